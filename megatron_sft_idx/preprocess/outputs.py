"""The shards a run makes: one at the prefix, or several that share it, each a run of consecutive packs of one plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.packing import PackPlan, pack_sequences
from megatron_sft_idx.packs.split import part_prefix
from megatron_sft_idx.preprocess.gather import PackedRun
from megatron_sft_idx.preprocess.overlong import Cuts, Overlong, cut_sequences
from megatron_sft_idx.shard import ShardWriter, check_free, read_header
from megatron_sft_idx.shard.prefix import is_set_aside
from megatron_sft_idx.shard.remains import complete_header

__all__ = ["Output", "PackOptions", "Packing", "make_room", "output_prefixes", "plan_packs"]


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

    def found(self) -> Header | None:
        """The header of this very shard, where it is published or set aside; a shard is whole or not there at all."""
        paths = ShardPaths.of(self.prefix)
        if is_set_aside(paths):
            header = complete_header(paths)
        elif paths.missing():
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


def make_room(outputs: Sequence[Output], *, overwrite: bool, keep: bool) -> dict[str, Header]:
    """Find out which of the shards of a run are there, and whether the others may be written.

    Args:
        outputs: all shards of a run.
        overwrite: whether shards may be replaced.
        keep: leave those that are the very ones that would be made.

    Returns:
        The headers of those that are left, by prefix.

    Raises:
        FormatError: a shard is there that is another one, and may not be replaced.
    """
    kept = {}
    for output in outputs:
        paths = ShardPaths.of(output.prefix)
        if keep and (found := output.found()) is not None:
            kept[output.prefix] = found
        else:
            check_free(paths, overwrite=overwrite)
    return kept


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
