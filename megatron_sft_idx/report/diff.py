"""What differs between two shards: pack by pack, and where much does, as sets of packs and of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.layout import Header
from megatron_sft_idx.report.set_diff import PackDifference, SequenceDifference, ShardSamples, pack_hashes, shape_hashes
from megatron_sft_idx.report.windows import Window, read_window, windows
from megatron_sft_idx.shard import Shard

__all__ = ["Comparison", "Difference", "compare_shards"]

Tell = Callable[[int, int], None]


class Difference(NamedTuple):
    """One difference between packs of the same number.

    Attributes:
        what: ``token``, ``mask``, ``boundaries`` or ``length``.
        pack: its number.
        sequence: in the pack; None where the packs differ as a whole.
        token: in the sequence.
        position: the same in the pack.
        here: value in the first shard.
        there: value in the other.
    """

    what: str
    pack: int
    sequence: int | None
    token: int | None
    position: int | None
    here: Any
    there: Any


@dataclass(slots=True)
class Comparison:
    """All that differs.

    Attributes:
        header: fields and metadata that differ, by name: values here and there.
        packs: numbers of packs, here and there.
        differing_packs: packs of the same number that differ in any way.
        tokens: ids that differ in packs of the same boundaries.
        masks: the same of mask values.
        reshaped: packs of the same number whose lengths or boundaries differ.
        first: the first few differences.
        pack_set: of shards that differ by more than single values: the packs as a set.
        sequences: of the same: the sequences as a set.
    """

    header: dict[str, tuple[Any, Any]]
    packs: tuple[int, int]
    differing_packs: int = 0
    tokens: int = 0
    masks: int = 0
    reshaped: int = 0
    first: list[Difference] = field(default_factory=list)
    pack_set: PackDifference | None = None
    sequences: SequenceDifference | None = None

    @property
    def same(self) -> bool:
        """Whether packs, ids, masks and boundaries are equal; headers may still say other things."""
        return not self.differing_packs and self.packs[0] == self.packs[1]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        rest = {"same": self.same, "first": [difference._asdict() for difference in self.first]}
        return asdict(self) | rest


def compare_shards(here: Shard, there: Shard, *, most: int = 20, tell: Tell | None = None) -> Comparison:
    """Compares every byte of two shards, in bounded memory; open them with the backend ``pread``.

    Ids and masks are compared by value, so that shards of different dtypes can be equal. Where packs of the same number
    differ in shape, or in more ids than are named, both are read again as sets: of packs, and of sequences.

    Args:
        here: one shard.
        there: another.
        most: differences that are named; all are counted.
        tell: is given how many tokens and packs of ``here`` more are done.

    Raises:
        FormatError: indexes that do not divide the tokens.
    """
    result = Comparison(header_differences(here.header, there.header), (len(here), len(there)))
    here.check_ends()
    there.check_ends()
    shared, first = min(len(here), len(there)), 0
    while first < shared:
        window, other = _window_pair(here, there, first, shared)
        pair = _Pair(here, there, window, other)
        if not pair.same_shape():
            pair.compare_packs(result, most)
        elif not pair.same_content():
            pair.compare_values(result, most)
        if tell:
            tell(int(window.pack_bounds[-1]), len(window))
        first += len(window)
    if result.reshaped or result.tokens > most or len(here) != len(there):
        left, right = (ShardSamples(shard, windows(shard)) for shard in (here, there))
        result.pack_set = left.pack_difference(right, most)
        result.sequences = left.sequence_difference(right, most)
    return result


def _window_pair(here: Shard, there: Shard, first: int, stop: int) -> tuple[Window, Window]:
    """The same packs of both: as many as fit a window of either."""
    window = read_window(here, first, stop)
    other = read_window(there, first, first + len(window))
    if len(other) < len(window):
        window = read_window(here, first, first + len(other))
    return window, other


class _Pair:
    """The same packs of two shards."""

    def __init__(self, here: Shard, there: Shard, window: Window, other: Window) -> None:
        self._windows = window, other
        self._ids, self._masks = (
            [array[part.tokens] for array, part in zip(arrays, self._windows, strict=True)]
            for arrays in ((here.files.tokens, there.files.tokens), (here.files.loss, there.files.loss))
        )

    def same_shape(self) -> bool:
        """Whether packs and sequences begin at the same places."""
        window, other = self._windows
        return np.array_equal(window.pack_bounds, other.pack_bounds) and np.array_equal(window.bounds, other.bounds)

    def same_content(self) -> bool:
        """Whether ids and masks are equal, place by place."""
        return not any(_unequal(values, others).any() for values, others in (self._ids, self._masks))

    def compare_values(self, result: Comparison, most: int) -> None:
        """Ids and masks of packs of the same shape, place by place."""
        window = self._windows[0]
        changed, found = [], []
        for what, (values, others) in (("token", self._ids), ("mask", self._masks)):
            at = np.flatnonzero(_unequal(values, others))
            changed.append(at)
            found += [self._difference(what, i, values[i], others[i]) for i in at[:most].tolist()]
        result.tokens += len(changed[0])
        result.masks += len(changed[1])
        differs = np.zeros(int(window.pack_bounds[-1]), np.bool_)
        for at in changed:
            differs[at] = True
        result.differing_packs += int(np.count_nonzero(np.logical_or.reduceat(differs, window.pack_bounds[:-1])))
        _add(result, found, most)

    def _difference(self, what: str, at: int, value: Any, other: Any) -> Difference:
        window = self._windows[0]
        number = int(np.searchsorted(window.bounds, at, "right")) - 1
        pack, sequence = window.place(number)
        token, position = at - int(window.bounds[number]), at - int(window.pack_bounds[pack - window.first])
        return Difference(what, pack, sequence, token, position, value.item(), other.item())

    def compare_packs(self, result: Comparison, most: int) -> None:
        """Packs of any shape, each as a whole."""
        lengths, others = (np.diff(window.pack_bounds) for window in self._windows)
        shapes, packs = (
            _unequal(*hashes)
            for hashes in (
                [shape_hashes(window) for window in self._windows],
                [pack_hashes(*parts) for parts in zip(self._windows, self._ids, self._masks, strict=True)],
            )
        )
        reshaped = shapes | (lengths != others)
        result.reshaped += int(np.count_nonzero(reshaped))
        result.differing_packs += int(np.count_nonzero(reshaped | packs))
        found = []
        for i in np.flatnonzero(reshaped)[:most].tolist():
            pack = self._windows[0].first + i
            if lengths[i] != others[i]:
                found.append(Difference("length", pack, None, None, None, int(lengths[i]), int(others[i])))
            else:
                starts = [_starts(window, i) for window in self._windows]
                found.append(Difference("boundaries", pack, None, None, None, *starts))
        values: list[Difference] = []
        for i in np.flatnonzero(packs & ~reshaped).tolist():
            # Naming one takes far longer than counting it.
            values += self._within(result, i, max(0, most - len(values) - len(result.first)))
        _add(result, found + values, most)

    def _within(self, result: Comparison, i: int, most: int) -> Iterator[Difference]:
        """Up to ``most`` differences of each kind in pack ``i``, which has the same shape in both; counts all."""
        begins = [int(window.pack_bounds[i]) for window in self._windows]
        length = int(self._windows[0].pack_bounds[i + 1]) - begins[0]
        for what, pair in (("token", self._ids), ("mask", self._masks)):
            values, others = (array[begin : begin + length] for array, begin in zip(pair, begins, strict=True))
            at = np.flatnonzero(_unequal(values, others))
            if what == "token":
                result.tokens += len(at)
            else:
                result.masks += len(at)
            for k in at[:most].tolist():
                yield self._difference(what, begins[0] + k, values[k], others[k])


def _add(result: Comparison, found: list[Difference], most: int) -> None:
    room = most - len(result.first)
    if room > 0:
        result.first += sorted(found, key=lambda one: (one.pack, one.position or 0))[:room]


def _unequal(values: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    unequal: NDArray[np.bool_] = values != others
    if values.dtype.kind == others.dtype.kind == "f" and unequal.any():
        unequal &= ~(np.isnan(values) & np.isnan(others))  # damage, but the same in both
    return unequal


def _starts(window: Window, i: int) -> list[int]:
    """The first few starts of the window's pack ``i``."""
    first, last = window.sequence_offsets[i : i + 2].tolist()
    starts: list[int] = (window.bounds[first : min(last, first + 9)] - window.pack_bounds[i]).tolist()
    return starts


def header_differences(here: Header, there: Header) -> dict[str, tuple[Any, Any]]:
    """Fields and metadata that two headers do not share, by name; what only one has is None in the other."""
    found = {}
    names = ("num_packs", "num_sequences", "num_tokens", "num_trained_tokens", "num_masked_packs", "capacity")
    for name in (*names, "sequence_multiple", "pad_id", "rebuilt"):
        found[name.replace("_", " ")] = (getattr(here, name), getattr(there, name))
    found["shard id"] = (here.shard_id.hex(), there.shard_id.hex())
    for name in ("token_dtype", "mask_dtype"):
        found[name.replace("_", " ")] = (getattr(here, name).name, getattr(there, name).name)
    left, right = _flat(here.metadata), _flat(there.metadata)
    found |= {name: (left.get(name), right.get(name)) for name in sorted({*left, *right})}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def _flat(values: Mapping[str, Any], prefix: str = "metadata") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix} {key}"
        found |= _flat(value, name) if isinstance(value, Mapping) and value else {name: value}
    return found
