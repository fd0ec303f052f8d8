"""A corpus, or packs of another capacity, to a packed shard: plan on the lengths, then gather."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.packing import PackPlan, pack_sequences
from megatron_sft_idx.preprocess.progress import Progress
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.storage import require_local

__all__ = ["Overlong", "PackOptions", "PackReport", "pack_report", "pack_shard"]

Overlong = Literal["error", "drop", "truncate", "split"]
_WINDOW_TOKENS = 1 << 20


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


@dataclass(slots=True)
class PackReport:
    """What packing did.

    Attributes:
        sequences: sequences in the packs.
        packs: packs written.
        tokens: tokens in them.
        trained_tokens: positions trained on.
        masked_packs: packs with no trained position.
        fill: tokens over packs times capacity.
        lower_bound: no packing has fewer packs.
        longest: tokens in the longest pack.
        most_sequences: sequences in the pack that has most.
        method: the method whose plan was taken.
        overlong: sequences longer than the capacity.
        dropped_tokens: tokens of dropped sequences, or behind the cut of truncated ones.
        untrained_by_cut: positions that were trained on and whose label now lies behind a cut.
    """

    sequences: int
    packs: int
    tokens: int
    trained_tokens: int
    masked_packs: int
    fill: float
    lower_bound: int
    longest: int
    most_sequences: int
    method: str
    overlong: int
    dropped_tokens: int
    untrained_by_cut: int


@dataclass(slots=True)
class _Ranges:
    """Which tokens of the source each sequence to be packed is: int64 [sequences] each."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    overlong: int = 0
    dropped_tokens: int = 0
    untrained_by_cut: int = 0


def pack_shard(
    source: Shard,
    prefix: str,
    options: PackOptions,
    *,
    overwrite: bool = False,
    log_interval: int = 0,
) -> PackReport:
    """Pack the sequences of ``source`` into a new shard at ``prefix``.

    Memory: some 40 bytes a sequence for the plan, and a few MiB for the tokens.

    Raises:
        SequenceError: sequences longer than the capacity, where they are not to be dropped, truncated or split.
        FormatError: an option that cannot be, nothing left to pack, or ``prefix`` is that of the source.
    """
    for path in (source.prefix, prefix):
        require_local(path, "packing")
    if os.path.realpath(ShardPaths.of(prefix).seq_idx) == os.path.realpath(ShardPaths.of(source.prefix).seq_idx):
        raise FormatError(f"{prefix}: this is the shard to be packed, which would be replaced; choose another prefix")
    ranges = _ranges(source, options)
    if not len(ranges.starts):
        raise FormatError(
            f"{source.prefix}: no sequence is left to pack ({ranges.overlong} were longer than the capacity)"
        )
    plan = _plan(ranges.stops - ranges.starts, options)
    with _writer(source.header, prefix, options, ranges, plan, overwrite=overwrite) as writer:
        with Progress(
            "packing", len(ranges.starts), unit="seq", log_interval=log_interval, items="sequences"
        ) as progress:
            _gather(source, ranges, plan, writer, progress.update)
        written = writer.finalize()
    return pack_report(written)


def pack_report(header: Header) -> PackReport:
    """What a packed shard's header says of how it was packed."""
    packing: dict[str, Any] = header.metadata["packing"]
    return PackReport(
        sequences=header.num_sequences,
        packs=header.num_packs,
        tokens=header.num_tokens,
        trained_tokens=header.num_trained_tokens,
        masked_packs=header.num_masked_packs,
        fill=header.num_tokens / (header.num_packs * header.capacity),
        lower_bound=packing["lower_bound"],
        longest=header.longest_pack,
        most_sequences=header.most_sequences,
        method=packing["chosen"],
        overlong=packing["overlong_sequences"],
        dropped_tokens=packing["dropped_tokens"],
        untrained_by_cut=packing["untrained_by_cut"],
    )


def _writer(
    source: Header, prefix: str, options: PackOptions, ranges: _Ranges, plan: PackPlan, *, overwrite: bool
) -> ShardWriter:
    """A writer whose metadata say where the sequences came from and how they were packed."""
    packing: dict[str, Any] = asdict(options) | {
        "source": source.shard_id.hex(),
        "overlong_sequences": ranges.overlong,
        "dropped_tokens": ranges.dropped_tokens,
        "untrained_by_cut": ranges.untrained_by_cut,
        "lower_bound": plan.lower_bound,
        "chosen": plan.method,
    }
    return ShardWriter(
        prefix,
        token_dtype=source.token_dtype,
        mask_dtype=source.mask_dtype,
        capacity=options.capacity,
        sequence_multiple=options.sequence_multiple,
        pad_id=source.pad_id,
        overwrite=overwrite,
        metadata=source.metadata | {"packing": packing},
    )


def _plan(lengths: NDArray[np.int64], options: PackOptions) -> PackPlan:
    one_a_pack = options.method == "none"
    return pack_sequences(
        lengths,
        options.capacity,
        method="sequential" if one_a_pack else options.method,
        effort=options.effort,
        max_sequences_per_pack=1 if one_a_pack else options.max_sequences_per_pack,
        sequence_multiple=options.sequence_multiple,
        seed=options.seed,
    )


def _ranges(source: Shard, options: PackOptions) -> _Ranges:
    offsets = source.sequence_bounds()
    starts, stops = offsets[:-1], offsets[1:]
    longest = options.longest_sequence
    if not longest:
        raise FormatError(
            f"--seq-length {options.capacity} is below --sequence-multiple {options.sequence_multiple}:"
            " no sequence fits; raise it"
        )
    lengths = stops - starts
    long = lengths > longest
    count = int(long.sum())
    if not count:
        return _Ranges(starts, stops)
    if options.overlong == "error":
        raise SequenceError(
            source.prefix,
            None,
            f"{count} of {len(lengths)} sequences are longer than {longest} tokens, the longest has {lengths.max()};"
            " choose --overlong drop, truncate or split, or a larger --seq-length",
        )
    if options.overlong == "drop":
        return _Ranges(starts[~long], stops[~long], count, int(lengths[long].sum()))
    if options.overlong == "truncate":
        cut = np.where(long, starts + longest, stops)
        return _Ranges(starts, cut, count, int((stops - cut).sum()), _trained_before(source, cut[long]))
    parts = -(-lengths // longest)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    part = np.arange(len(first)) - first
    split_starts = np.repeat(starts, parts) + part * longest
    split_stops = np.minimum(split_starts + longest, np.repeat(stops, parts))
    inner = split_stops < np.repeat(stops, parts)
    return _Ranges(split_starts, split_stops, count, 0, _trained_before(source, split_stops[inner]))


def _trained_before(source: Shard, cuts: NDArray[np.int64]) -> int:
    """How many positions right before a cut were trained on: their labels are behind it."""
    loss = source.files.loss
    return sum(int(loss[cut - 1 : cut][0] != 0) for cut in cuts.tolist())


def _gather(
    source: Shard, ranges: _Ranges, plan: PackPlan, writer: ShardWriter, progress: Callable[[int, int], None]
) -> None:
    """Write the packs of the plan, some packs at a time."""
    tokens, loss = source.files.tokens[:], source.files.loss[:]
    lengths = ranges.stops - ranges.starts
    first = 0
    while first < plan.num_packs:
        # As many packs as surely hold no more than the window, and one at least.
        last = first + max(1, _WINDOW_TOKENS // max(plan.longest, 1))
        bounds = plan.offsets[first : last + 1]
        last = first + len(bounds) - 1
        order = plan.sequences[bounds[0] : bounds[-1]]
        each = lengths[order]
        ends = np.cumsum(each)
        counts = np.diff(bounds)
        pack_ends = ends[np.cumsum(counts) - 1]
        pack_lengths = np.diff(pack_ends, prepend=0)
        starts = ends - each - np.repeat(pack_ends - pack_lengths, counts)
        ids, mask = np.empty(ends[-1], tokens.dtype), np.empty(ends[-1], loss.dtype)
        _native.gather_sequences(tokens, ranges.starts, ranges.stops, order, ids)
        _native.gather_sequences(loss, ranges.starts, ranges.stops, order, mask)
        # Where a sequence was cut its last label is gone; elsewhere this is zero already (rule P6).
        mask[ends - 1] = 0
        writer.add_packs(ids, mask, starts, pack_lengths, counts)
        progress(len(order), len(order))
        first = last
