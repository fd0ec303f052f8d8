"""Which rows are packed, how often, and which are kept apart for validation.

A row's lot is drawn from a hash of what it says (its messages, weights, tools and template variables, or the ids and
masks it came with) and the seed. So it is the same on any machine and in any order, does not change as other rows are
added, and rows that say the same share it: no copy of a validation row is trained on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any, Literal

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.types import Conversation, TokenizedRow
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard import Shard

__all__ = [
    "Selected",
    "Selection",
    "file_weights",
    "row_hash",
    "select_rows",
    "sequences_of",
]


_MOST_WEIGHT = 1000


@dataclass(frozen=True, slots=True)
class Selection:
    """What is asked for, in the order in which it is done.

    Attributes:
        max_rows: only so many usable rows, the first of the input; None for all.
        dedup: ``exact`` leaves out rows that say what an earlier one says.
        sample: the share of rows to take, by lot.
        valid_fraction: the share of rows that go to the validation shard, by lot.
        weights: how often a row of each file is trained on, by the number of the file; empty where all are once.
        shuffle: put the rows in an order drawn by the seed.
        drop_untrained: leave out sequences, or what was cut from them, with no token to train on.
    """

    max_rows: int | None = None
    dedup: Literal["none", "exact"] = "none"
    sample: float = 1.0
    valid_fraction: float = 0.0
    weights: list[float] = field(default_factory=list)
    shuffle: bool = False
    drop_untrained: bool = False

    def __post_init__(self) -> None:
        for name, share in (("sample", self.sample), ("valid_fraction", self.valid_fraction)):
            is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if not is_number or not 0 <= share <= 1 or (name == "sample" and not share):
                raise FormatError(f"--{name.replace('_', '-')} {share}: expected a share of the rows, such as 0.1")
        if self.valid_fraction == 1:
            raise FormatError("--valid-fraction 1: nothing would be left to train on")

    @property
    def of_rows(self) -> bool:
        """Whether it is to be known which row says what."""
        return replace(self, drop_untrained=False) != Selection()


def file_weights(option: str, given: Sequence[str], files: Sequence[str]) -> list[float]:
    """A number for each file of the input; 1 for those that are not named.

    Args:
        option: what errors call it.
        given: ``FILE=WEIGHT``, where a file is a path as it is in the input, a glob of such, a folder that they lie in,
            or the name alone where one file has it.
        files: paths of the input.

    Raises:
        FormatError: a weight that is none, or of no file, of several of a name, or of one that has another.
    """
    weights: dict[int, float] = {}
    for entry in given:
        name, _, number = entry.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not name or not 0 <= weight <= _MOST_WEIGHT:
            form = f"FILE=WEIGHT, such as chats.jsonl=0.5, from 0 to {_MOST_WEIGHT:,}"
            raise FormatError(f"{option} {entry}: expected {form}")
        folder = name.rstrip("/") + "/"
        found = [n for n, path in enumerate(files) if path == name or fnmatch(path, name) or path.startswith(folder)]
        if not found:
            found = [n for n, path in enumerate(files) if os.path.basename(path) == name]
            if len(found) > 1:
                several = ", ".join(files[n] for n in found)
                raise FormatError(f"{option} {entry}: {several} are called so, name one by its path")
        if not found:
            raise FormatError(f"{option} {entry}: no file of the input is called so; they are {', '.join(files)}")
        if twice := next((files[n] for n in found if n in weights), None):
            raise FormatError(f"{option} {entry}: it has a weight already: {twice}")
        weights |= dict.fromkeys(found, weight)
    return [weights.get(n, 1.0) for n in range(len(files))]


def row_hash(row: Sequence[Conversation | TokenizedRow], label: int | None = None) -> NDArray[np.uint32]:
    """Of what a row says, whatever its columns are called and whatever stands beside them: uint32 [4].

    Args:
        row: what it holds: one conversation, or the two of a pair.
        label: of KTO, the lowest bit of the hash, of which lots do not depend: two rows that differ in it alone are no
            duplicates, but share their lot.
    """
    stream = xxhash.xxh3_128()
    for each in row:
        if isinstance(each, TokenizedRow):
            stream.update(each.input_ids.tobytes() + each.loss_mask.tobytes())
        else:
            said = [each.messages, each.weights, each.tools, each.kwargs]
            try:
                # What JSON has no word for, as tables have it, counts by how Python shows it.
                text = orjson.dumps(said, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
            except TypeError:  # numbers beyond 64 bits, lone surrogates
                text = json.dumps(said, default=repr, sort_keys=True).encode()
            stream.update(text)
    words = np.frombuffer(stream.digest(), "<u4").copy()
    words[0] = words[0] & 0xFFFFFFFE | (label or 0)
    return words


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """What was selected.

    Attributes:
        train: numbers of the sequences to train on, int64, in the order of packing.
        valid: likewise of those kept apart.
        counts: of rows, by name, for the summary.
    """

    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    counts: dict[str, int]


def select_rows(
    contents: NDArray[np.uint32], files: NDArray[np.integer[Any]], selection: Selection, seed: int
) -> Selected:
    """Decide over all rows of a run, in some 100 bytes a row.

    Args:
        contents: of each sequence the hash of its row and its number in it, uint32 [sequences, 5]; all of a row end
            to end, in the order of the input.
        files: number of the file of each, [sequences].
        selection: what is asked for.
        seed: of every lot.

    Raises:
        FormatError: nothing is left to train on, or to validate with.
    """
    starts = np.flatnonzero(contents[:, 4] == 0)
    sizes = np.diff(starts, append=len(contents))
    keys = np.ascontiguousarray(contents[starts, :4]).view("<u8")
    kept = np.arange(min(len(starts), selection.max_rows or len(starts)))
    counts = {} if selection.max_rows is None else {"max_rows": len(kept)}
    if selection.dedup == "exact":
        seen = keys[kept]
        order = np.lexsort((seen[:, 1], seen[:, 0]))  # which is stable
        repeats = (seen[order[1:]] == seen[order[:-1]]).all(1)
        unique = np.sort(kept[order[np.append(np.ones(min(len(order), 1), bool), ~repeats)]])
        counts["duplicates"], kept = len(kept) - len(unique), unique
    if selection.sample < 1:
        sampled = kept[draw_lots(keys[kept], seed, "sample") < selection.sample]
        counts["not_sampled"], kept = len(kept) - len(sampled), sampled
    is_valid = draw_lots(keys[kept], seed, "valid") < selection.valid_fraction
    train, valid = kept[~is_valid], kept[is_valid]
    counts["valid"] = len(valid)
    if selection.weights:
        weights = np.array(selection.weights)[files[starts[train]]]
        whole = np.floor(weights).astype(np.int64)
        times = whole + (draw_lots(keys[train], seed, "weight") < weights - whole)
        counts["weighted_out"] = int((times == 0).sum())
        counts["repeats"] = int(np.maximum(times - 1, 0).sum())
        # Copies of a row are far from each other: all rows once, then those that come twice, and so on.
        train = np.concatenate([train[times > done] for done in range(max(times.max(initial=0), 1))])
    counts["train"] = len(train)
    if selection.shuffle:
        train = np.random.default_rng(seed).permutation(train)
    for name, rows in (("train on", train), ("validate with", valid)):
        if not len(rows) and (name == "train on" or selection.valid_fraction):
            raise FormatError(f"no row is left to {name}, of {len(starts)} usable ones: ask for more of them")
    return Selected(_sequences_of(train, starts, sizes), _sequences_of(valid, starts, sizes), counts)


def draw_lots(keys: NDArray[np.uint64], seed: int, what_for: str) -> NDArray[np.float64]:
    """A number from 0 to below 1 for each key, uint64 [rows, 2]; other seeds and purposes draw others."""
    lots = (keys[:, 0] >> np.uint64(1)) ^ np.uint64(xxhash.xxh3_64_intdigest(f"{what_for} {seed}".encode()))
    # The finalizer of SplitMix64 (Steele, Lea and Flood 2014), with the key's other half mixed in between.
    for half in (np.uint64(0), keys[:, 1]):
        lots = lots ^ half
        lots = (lots ^ (lots >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        lots = (lots ^ (lots >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        lots = lots ^ (lots >> np.uint64(31))
    return np.asarray((lots >> np.uint64(11)) * 2.0**-53)


def _sequences_of(rows: NDArray[np.int64], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of the sequences of these rows, end to end."""
    each = sizes[rows]
    within = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
    return np.repeat(starts[rows], each) + within


def sequences_of(source: Shard, names: Iterable[str]) -> NDArray[np.int64]:
    """Numbers of the sequences that were made from files of these names, as the column ``source`` names them."""
    column = source.columns.get("source")
    files = None if column is None else column.spec.metadata.get("files")
    if column is None or column.spec.kind[:3] != ("sequence", "<u4", 2) or not isinstance(files, list):
        raise FormatError(f"{source.prefix}: has no column source, which preprocess writes, and so no files to choose")
    listed = [file.get("name") if isinstance(file, dict) else None for file in files]
    if unknown := sorted({*names} - {*listed}):
        known = ", ".join(map(str, listed[:5])) + (", ..." if len(listed) > 5 else "")
        raise FormatError(f"{source.prefix}: --source {unknown[0]}: no such file in it; it has {known}")
    wanted = [number for number, name in enumerate(listed) if name in {*names}]
    return np.flatnonzero(np.isin(column.values[:][:, 0], wanted))
