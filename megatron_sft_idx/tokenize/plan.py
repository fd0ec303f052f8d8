"""From lengths to packs: what becomes of overlong sequences, the plan, and the shards it is cut into.

A run makes one shard at the prefix, or several that share it, each a run of consecutive packs of one plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.packing import PackPlan, pack_sequences
from megatron_sft_idx.packs.split import part_prefix
from megatron_sft_idx.shard import ShardWriter, read_header
from megatron_sft_idx.shard.prefix import is_set_aside
from megatron_sft_idx.shard.recovery import complete_header

__all__ = [
    "Cuts",
    "Output",
    "Overlong",
    "PackOptions",
    "PackedRun",
    "Packing",
    "Selection",
    "cut_sequences",
    "output_prefixes",
    "plan_packs",
]

Overlong = Literal["error", "drop", "truncate", "split"]


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How sequences become packs.

    Attributes:
        capacity: most token positions a pack may hold.
        method: of ``pack_sequences``, or ``none`` for one sequence a pack in the order of the input.
        effort: of ``pack_sequences``.
        overlong: what becomes of sequences longer than the capacity.
        sequence_multiple: count each sequence as its length rounded up to this.
        max_sequences_per_pack: at most so many; None for no limit.
        seed: of every shuffle.
    """

    capacity: int
    method: str = "auto"
    effort: Literal["normal", "high"] = "normal"
    overlong: Overlong = "error"
    sequence_multiple: int = 1
    max_sequences_per_pack: int | None = None
    seed: int = 0

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that fits a pack, rounded up as it is; 0 where none does."""
        return self.capacity // self.sequence_multiple * self.sequence_multiple


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Some cuts, in an order: what one output shard or one window of it is made of.

    Attributes:
        sequences: number of the sequence each is cut from, int64 [cuts].
        begins: where in that sequence it begins, in tokens, int64 [cuts]; None where all begin at 0.
        lengths: tokens of each, uint32 or int64 [cuts].
    """

    sequences: NDArray[np.int64]
    begins: NDArray[np.int64] | None
    lengths: NDArray[np.integer[Any]]

    def __len__(self) -> int:
        return len(self.sequences)

    def window(self, first: int, last: int) -> Selection:
        """Those from ``first`` to before ``last``."""
        begins = None if self.begins is None else self.begins[first:last]
        return Selection(self.sequences[first:last], begins, self.lengths[first:last])


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """What is packed: whole sequences, or runs of tokens cut from them.

    Attributes:
        lengths: tokens of each, int64 [cuts].
        sequences: number of the sequence each is cut from, int64 [cuts]; None where cut ``i`` is all of sequence ``i``.
        begins: where in that sequence each begins, int64 [cuts]; None where all begin at 0.
        overlong: sequences that were longer than a pack.
        dropped_tokens: tokens of dropped sequences, or behind the cut of truncated ones.
        parted: sequences that go on behind a cut, int64; one entry a cut.
        parted_at: the position in the sequence behind that cut, int64: whether its token is trained on decides
            whether the cut loses a label.
    """

    lengths: NDArray[np.int64]
    sequences: NDArray[np.int64] | None
    begins: NDArray[np.int64] | None
    overlong: int
    dropped_tokens: int
    parted: NDArray[np.int64]
    parted_at: NDArray[np.int64]

    def select(self, order: NDArray[np.int64]) -> Selection:
        """The cuts of these numbers."""
        sequences = order if self.sequences is None else self.sequences[order]
        begins = None if self.begins is None else self.begins[order]
        return Selection(sequences, begins, self.lengths[order])


def cut_sequences(
    lengths: NDArray[np.int64], *, capacity: int, sequence_multiple: int, overlong: Overlong, source: str
) -> Cuts:
    """Apply the policy for overlong sequences.

    Args:
        lengths: tokens of each sequence, int64 [sequences].
        capacity: most token positions a pack may hold.
        sequence_multiple: each sequence takes its length rounded up to this.
        overlong: the policy.
        source: what errors call the sequences.

    Raises:
        SequenceError: sequences longer than the capacity, where they are not to be dropped, truncated or split.
        FormatError: no sequence fits, or none is left.
    """
    longest = capacity // sequence_multiple * sequence_multiple
    if not longest:
        raise FormatError(
            f"--seq-length {capacity} is below --sequence-multiple {sequence_multiple}: no sequence fits; raise it"
        )
    long = lengths > longest
    count = int(long.sum())
    if count and overlong == "error":
        raise SequenceError(
            source,
            None,
            f"{count} of {len(lengths)} sequences are longer than {longest} tokens, the longest has {lengths.max()};"
            " choose --overlong drop, truncate or split, or a larger --seq-length",
        )
    cuts = _cut(lengths, long, longest, overlong, count)
    if not len(cuts.lengths):
        raise FormatError(f"{source}: no sequence is left to pack ({count} were longer than the capacity)")
    return cuts


def _cut(lengths: NDArray[np.int64], long: NDArray[np.bool_], longest: int, overlong: Overlong, count: int) -> Cuts:
    nothing = np.empty(0, np.int64)
    if not count:
        return Cuts(lengths, None, None, 0, 0, nothing, nothing)
    if overlong == "drop":
        kept = np.flatnonzero(~long)
        return Cuts(lengths[kept], kept, None, count, int(lengths[long].sum()), nothing, nothing)
    if overlong == "truncate":
        parted = np.flatnonzero(long)
        dropped = int((lengths[parted] - longest).sum())
        at = np.full(len(parted), longest, np.int64)
        return Cuts(np.minimum(lengths, longest), None, None, count, dropped, parted, at)
    parts = -(-lengths // longest)
    sequences = np.repeat(np.arange(len(lengths)), parts)
    begins = (np.arange(len(sequences)) - np.repeat(np.cumsum(parts) - parts, parts)) * longest
    inner = begins > 0
    each = np.minimum(lengths[sequences] - begins, longest)
    return Cuts(each, sequences, begins, count, 0, sequences[inner], begins[inner])


@dataclass(frozen=True, slots=True, eq=False)
class PackedRun:
    """Consecutive packs of a plan.

    Attributes:
        offsets: pack ``p`` holds the cuts ``[offsets[p], offsets[p + 1])`` of the selection, int64 [packs + 1].
        selection: the cuts of all these packs.
        longest: tokens of the longest pack, or more.
    """

    offsets: NDArray[np.int64]
    selection: Selection
    longest: int


def output_prefixes(prefix: str, shards: int) -> list[str]:
    """Where the shards of a run go: the prefix itself, or ``PREFIX-00000-of-00008`` and so on."""
    return [prefix] if shards == 1 else [part_prefix(prefix, number, shards) for number in range(shards)]


@dataclass(frozen=True, slots=True)
class Output:
    """One shard of a run: what a writer of it is told; picklable.

    Attributes:
        prefix: of the shard.
        token_dtype: name of its ids' dtype.
        mask_dtype: name of its masks' dtype.
        pad_id: the tokenizer's.
        options: how its packs came about.
        metadata: of its header.
    """

    prefix: str
    token_dtype: str
    mask_dtype: str
    pad_id: int | None
    options: PackOptions
    metadata: dict[str, Any]

    def found(self, *, published: bool = True) -> Header | None:
        """The header of this very shard, where it is set aside or ``published``; it is whole or not there at all."""
        paths = ShardPaths.of(self.prefix)
        if is_set_aside(paths):
            header = complete_header(paths)
        elif not published or paths.missing():
            return None
        else:
            header = read_header(self.prefix)
        same = {**header.metadata, "format_writer": None} == {**self.metadata, "format_writer": None}
        return header if same else None

    def writer(self, *, overwrite: bool) -> ShardWriter:
        """Begin to write it."""
        return ShardWriter(
            self.prefix,
            token_dtype=np.dtype(self.token_dtype),
            mask_dtype=np.dtype(self.mask_dtype),
            capacity=self.options.capacity,
            sequence_multiple=self.options.sequence_multiple,
            pad_id=self.pad_id,
            overwrite=overwrite,
            metadata=self.metadata,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """A plan for all sequences, and what its shards' headers say of it.

    Attributes:
        options: what was asked for.
        cuts: what is packed.
        plan: into which packs.
        shards: into how many shards, of as many packs each, give or take one.
    """

    options: PackOptions
    cuts: Cuts
    plan: PackPlan
    shards: int

    def describe(self, number: int, source: str, untrained_by_cut: int) -> dict[str, Any]:
        """What the header of one shard says of how it was packed.

        Args:
            number: of the shard.
            source: identity of the sequences: the id of the shard they were packed from, or the fingerprint of the
                input they were tokenised from, which does not depend on how that was shared out.
            untrained_by_cut: trained tokens right behind a cut.
        """
        packing: dict[str, Any] = asdict(self.options) | {
            "source": source,
            "overlong_sequences": self.cuts.overlong,
            "dropped_tokens": self.cuts.dropped_tokens,
            "untrained_by_cut": untrained_by_cut,
            "lower_bound": self.plan.lower_bound,
            "chosen": self.plan.method,
        }
        if self.shards > 1:
            first, last = self._packs(number)
            packing["part"] = {"part": number, "parts": self.shards, "first_pack": first, "num_packs": last - first}
        return packing

    def _packs(self, number: int) -> tuple[int, int]:
        return self.plan.num_packs * number // self.shards, self.plan.num_packs * (number + 1) // self.shards

    def run(self, number: int) -> PackedRun:
        """The packs of one shard."""
        first, last = self._packs(number)
        bounds = self.plan.offsets[first : last + 1]
        selection = self.cuts.select(self.plan.sequences[bounds[0] : bounds[-1]])
        # Twelve bytes a sequence, which may be sent to another machine.
        selection = replace(selection, lengths=selection.lengths.astype(np.uint32))
        return PackedRun(bounds - bounds[0], selection, self.plan.longest)

    def outputs(
        self, prefix: str, metadata: Mapping[str, Any], source: str, untrained_by_cut: int, **common: Any
    ) -> Iterator[Output]:
        """All shards; ``metadata`` is what their headers say beside the packing."""
        for number, path in enumerate(output_prefixes(prefix, self.shards)):
            packing = self.describe(number, source, untrained_by_cut)
            yield Output(path, options=self.options, metadata={**metadata, "packing": packing}, **common)


def plan_packs(lengths: Any, options: PackOptions, *, shards: int, source: str) -> Packing:
    """Plan all packs, global over the lengths of all sequences.

    Args:
        lengths: tokens of each sequence, int64 [sequences].
        options: how they are packed.
        shards: into how many shards.
        source: what errors call the sequences.

    Raises:
        SequenceError: sequences longer than the capacity, where they are not to be dropped, truncated or split.
        FormatError: nothing is left to pack, or there are fewer packs than shards.
    """
    cuts = cut_sequences(
        lengths,
        capacity=options.capacity,
        sequence_multiple=options.sequence_multiple,
        overlong=options.overlong,
        source=source,
    )
    one_a_pack = options.method == "none"
    plan = pack_sequences(
        cuts.lengths,
        options.capacity,
        method="sequential" if one_a_pack else options.method,
        effort=options.effort,
        max_sequences_per_pack=1 if one_a_pack else options.max_sequences_per_pack,
        sequence_multiple=options.sequence_multiple,
        seed=options.seed,
    )
    if plan.num_packs < shards:
        raise FormatError(
            f"{source}: {plan.num_packs} packs cannot fill --output-shards {shards}: stock Megatron opens no empty"
            f" shard; ask for {plan.num_packs} or fewer"
        )
    return Packing(options, cuts, plan, shards)
