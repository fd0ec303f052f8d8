"""Select which input rows are packed, and how often.

Rows are selected by random numbers. The number of a row is derived from the seed and a hash of the row's content:
messages, weights, tools and template variables, or the ids and masks of a tokenised row. So it is the same on any
machine and in any order, and does not change when other rows are added. Equal rows have the same number, so no copy of
a validation row is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.media_parts import MediaFile
from megatron_sft_idx.chat.types import Conversation, TextRow, TokenizedRow
from megatron_sft_idx.chat.values import Undecoded
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.packing import csr_rows
from megatron_sft_idx.packs.source_names import find_names, shortest_names, told_apart

_MAX_WEIGHT = 1000


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows are packed, and how often; applied in the order of the attributes.

    Attributes:
        max_rows: only the first usable rows of the input, up to this number; None for all.
        dedup: ``exact`` drops rows whose content equals that of an earlier row.
        sample: fraction of rows to take, by random number.
        valid_fraction: fraction of rows for the validation shard, by random number.
        weights: how often a row of each file is trained on, by the number of the file; empty for once each.
        shuffle: shuffle the rows with the seed.
        drop_untrained: drop sequences, and cuts of them, without a trained token.
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
            raise FormatError("--valid-fraction 1 leaves no rows for training; use a smaller share")

    @property
    def of_rows(self) -> bool:
        """Whether rows are selected, which requires the hashes of their content."""
        return replace(self, drop_untrained=False) != Selection()


def file_weights(option: str, by_file: Mapping[str, float], files: Sequence[str]) -> list[float]:
    """Return a weight for each input file; 1 for files without an entry.

    Args:
        option: name of the option in errors.
        by_file: weights by FILE: a glob or a folder of the input, or one file (``find_names``).
        files: paths of the input.

    Raises:
        FormatError: a weight is not a number from 0 to 1,000, or a FILE matches no file, is ambiguous, or matches a
            file that already has a weight.
    """
    weights: dict[int, float] = {}
    names = told_apart(shortest_names(files))
    for name, weight in by_file.items():
        entry = f"{name}={weight}"
        is_number = isinstance(weight, Real) and not isinstance(weight, bool)
        if not isinstance(name, str) or not name or not is_number or not 0 <= weight <= _MAX_WEIGHT:
            form = f"FILE=WEIGHT, such as chats.jsonl=0.5, from 0 to {_MAX_WEIGHT:,}"
            raise FormatError(f"{option} {brief(entry)}: expected {form}")
        matching = find_names(name, names, f"{option} {entry}", files)
        if weighted := next((files[n] for n in matching if n in weights), None):
            raise FormatError(f"{option} {entry}: {weighted} already has a weight; remove one of the two")
        weights |= dict.fromkeys(matching, float(weight))
    return [weights.get(n, 1.0) for n in range(len(files))]


_JSON_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS


def row_hash(row: Sequence[Conversation | TokenizedRow | TextRow], label: int | None = None) -> NDArray[np.uint32]:
    """Return a hash of a row's content, without field names and unread fields: uint32 [4].

    Args:
        row: its conversation or text, several conversations, or the two of a pair.
        label: KTO label, stored in the lowest bit of the hash. Random numbers do not depend on that bit: two rows that
            differ only in their label are not duplicates, but have the same number.
    """
    stream = xxhash.xxh3_128()
    for each in row:
        if isinstance(each, TokenizedRow):
            stream.update(each.input_ids.tobytes() + each.loss_mask.tobytes())
            if each.bounds is not None and len(each.bounds) > 2:
                stream.update(each.bounds.tobytes())
        elif isinstance(each, TextRow):
            stream.update(each.text.encode("utf-8", "surrogatepass"))
        else:
            content = [each.messages, each.weights, each.tools, each.kwargs]
            try:
                text = orjson.dumps(content, default=_shown, option=_JSON_OPTIONS)
            except TypeError:  # numbers beyond 64 bits, lone surrogates
                text = json.dumps(content, default=_shown, sort_keys=True).encode()
            stream.update(text)
    words = np.frombuffer(stream.digest(), "<u4").copy()
    words[0] = words[0] & 0xFFFFFFFE | (label or 0)
    return words


def _shown(value: Any) -> str:
    """Return the replacement in a hash for a value that JSON does not have."""
    if isinstance(value, MediaFile):
        given = value.given if isinstance(value.given, str) else xxhash.xxh3_128_hexdigest(value.given)
        return f"{value.kind} {type(value.given).__name__} {given}"
    return "undecoded" if isinstance(value, Undecoded) else repr(value)


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """The sequences of selected rows.

    Attributes:
        train: numbers of the sequences to train on, int64, in the order of packing, possibly with repetitions.
        valid: numbers of the validation sequences, likewise.
        counts: counts of rows, by name, for the summary.
    """

    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    counts: dict[str, int]


def select_rows(
    contents: NDArray[np.uint32], files: NDArray[np.integer[Any]], selection: Selection, seed: int
) -> Selected:
    """Select among all rows of a job, with about 100 bytes of memory per row.

    Args:
        contents: for each sequence the hash of its row and its number in the row, uint32 [sequences, 5]; in the order
            of the input, with the sequences of a row adjacent.
        files: number of the file of each sequence, [sequences].
        selection: selection of rows.
        seed: seed of all random numbers.

    Raises:
        FormatError: no row is selected for training or for validation.
    """
    starts = np.flatnonzero(contents[:, 4] == 0)
    sizes = np.diff(starts, append=len(contents))
    keys = np.ascontiguousarray(contents[starts, :4]).view("<u8")
    selected = np.arange(min(len(starts), selection.max_rows or len(starts)))
    counts = {} if selection.max_rows is None else {"max_rows": len(selected)}
    if selection.dedup == "exact":
        hashes = keys[selected]
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # it is stable
        repeats = (hashes[order[1:]] == hashes[order[:-1]]).all(1)
        unique = np.sort(selected[order[np.append(np.ones(min(len(order), 1), bool), ~repeats)]])
        counts["duplicates"], selected = len(selected) - len(unique), unique
    if selection.sample < 1:
        sampled = selected[draw_lots(keys[selected], seed, "sample") < selection.sample]
        counts["not_sampled"], selected = len(selected) - len(sampled), sampled
    is_valid = draw_lots(keys[selected], seed, "valid") < selection.valid_fraction
    train, valid = selected[~is_valid], selected[is_valid]
    counts["valid"] = len(valid)
    if selection.weights:
        weights = np.array(selection.weights)[files[starts[train]]]
        whole = np.floor(weights).astype(np.int64)
        times = whole + (draw_lots(keys[train], seed, "weight") < weights - whole)
        counts["weighted_out"] = int((times == 0).sum())
        counts["repeats"] = int(np.maximum(times - 1, 0).sum())
        # Copies of a row are far apart: first all rows once, then rows that occur twice, and so on.
        train = np.concatenate([train[times > copy] for copy in range(max(times.max(initial=0), 1))])
    counts["train"] = len(train)
    if selection.shuffle:
        train = np.random.default_rng(seed).permutation(train)
    for name, rows in (("train on", train), ("validate with", valid)):
        if not len(rows) and (name == "train on" or selection.valid_fraction):
            raise FormatError(
                f"none of {len(starts)} usable rows is left to {name}; choose options that keep more rows"
            )
    return Selected(_sequences_of(train, starts, sizes), _sequences_of(valid, starts, sizes), counts)


def draw_lots(keys: NDArray[np.uint64], seed: int, purpose: str) -> NDArray[np.float64]:
    """Return a random number from 0 to below 1 for each key, uint64 [rows, 2]; depends on the seed and the purpose."""
    lots = (keys[:, 0] >> np.uint64(1)) ^ np.uint64(xxhash.xxh3_64_intdigest(f"{purpose} {seed}".encode()))
    # The finalizer of SplitMix64 (Steele, Lea and Flood 2014), with the key's other half mixed in between.
    for half in (np.uint64(0), keys[:, 1]):
        lots = lots ^ half
        lots = (lots ^ (lots >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        lots = (lots ^ (lots >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        lots = lots ^ (lots >> np.uint64(31))
    return np.asarray((lots >> np.uint64(11)) * 2.0**-53)


def _sequences_of(rows: NDArray[np.int64], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of the sequences of these rows, concatenated."""
    return csr_rows(starts[rows], sizes[rows])[1]
