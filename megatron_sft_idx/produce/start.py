"""What a producer is told, and where it begins: an empty catalog, or one that it was making, however it ended."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.live import Catalog, Limits, ProducerState, Record
from megatron_sft_idx.produce.feed import Position
from megatron_sft_idx.shard import read_header, remove_remains
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.storage.publish import describe
from megatron_sft_idx.tokenize import EncodingOptions, PackOptions, RowEncoder, option_differences, packing_differences

__all__ = ["CURSOR", "AheadLimits", "Cursor", "ProduceOptions", "find_start"]


# Of text that becomes one token, about: a shard is then some eight pieces.
_BYTES_OF_A_TOKEN = 4
_PIECES_OF_A_SHARD = 8
_LEAST_PIECE_NBYTES, _MOST_PIECE_NBYTES = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class AheadLimits:
    """How far the producer may run ahead of training, and what becomes of shards that training is done with.

    Attributes:
        max_shards: most published shards that some consumer has not completed; None for no limit.
        max_nbytes: most bytes of these; None for no limit.
        consumers: training runs that are to read the catalog.
        keep_recent: remove completed shards but for so many, the newest; None removes nothing.
        ack_dir: where consumers acknowledge, when that is not in the catalog.
    """

    max_shards: int | None = None
    max_nbytes: int | None = None
    consumers: int = 1
    keep_recent: int | None = None
    ack_dir: str | None = None


@dataclass(frozen=True, slots=True)
class ProduceOptions:
    """One producer. The first two groups decide over the bytes of the shards, the third does not.

    Attributes:
        inputs: files, globs and ``save_to_disk`` folders, or ``-`` alone for JSON lines on standard input.
        watch: a folder whose files are the input, as they appear; ``inputs`` is empty then.
        catalog: the folder of shards.

        encoding: rows to sequences.
        packing: sequences to packs; ``max_sequences_per_pack`` is set, since consumers rely on it.
        tokens_per_shard: a shard ends with the first piece of input at which it holds as many.

        workers: tokenising processes; 0 tokenises in this one.
        ahead: how far this may run ahead of training.
        end_after: seconds without new input in ``watch`` that end it; None waits for its ``_END``.
        settle: seconds for which the size of a file in ``watch`` must stay the same until it counts as whole.
    """

    inputs: Sequence[str]
    watch: str | None
    catalog: str
    encoding: EncodingOptions
    packing: PackOptions
    tokens_per_shard: int
    workers: int = 0
    ahead: AheadLimits = AheadLimits()
    end_after: float | None = None
    settle: float = 5.0

    def __post_init__(self) -> None:
        for path, what in (
            (self.catalog, "a live catalog"),
            (self.watch, "a folder that is watched"),
            (self.ahead.ack_dir, "a folder of acknowledgements"),
        ):
            if path is not None:
                require_local(path, what)
        if (acks := self.ahead.ack_dir) and os.path.lexists(acks) and not os.path.isdir(acks):
            raise FormatError(f"{acks}: {describe(acks)} is here, expected a folder; name another one")
        if self.packing.max_sequences_per_pack is None:
            raise FormatError("max_sequences_per_pack must be set: the width of every batch of a live catalog")
        if self.tokens_per_shard < self.packing.capacity:
            raise FormatError(
                f"--tokens-per-shard {self.tokens_per_shard} is below --seq-length {self.packing.capacity}: a shard"
                " would be less than a pack; raise it, a thousand packs are a good shard"
            )

    @property
    def from_stdin(self) -> bool:
        """Whether the input comes in a pipe."""
        return self.watch is None and list(self.inputs) == ["-"]

    @property
    def piece_nbytes(self) -> int:
        """Bytes of input that are tokenised at a time, and between which a shard may end."""
        nbytes = self.tokens_per_shard * _BYTES_OF_A_TOKEN // _PIECES_OF_A_SHARD
        return min(max(nbytes, _LEAST_PIECE_NBYTES), _MOST_PIECE_NBYTES)

    def sharding(self) -> dict[str, Any]:
        """What decides where shards end."""
        return {"tokens_per_shard": self.tokens_per_shard, "piece_nbytes": self.piece_nbytes}

    def describe(self, encoder: RowEncoder, num_files: int) -> dict[str, Any]:
        """All that decides over the bytes of the shards, but for the content of the input."""
        source = "a growing folder" if self.watch is not None else "a pipe" if self.from_stdin else f"{num_files} files"
        return encoder.describe() | {
            "packing": asdict(self.packing),
            "sharding": self.sharding(),
            "input": {"input": source},
        }

    def limits(self, encoder: RowEncoder) -> Limits:
        """What consumers may rely on."""
        assert self.packing.max_sequences_per_pack is not None
        return Limits(
            capacity=self.packing.capacity,
            max_sequences_per_pack=self.packing.max_sequences_per_pack,
            sequence_multiple=self.packing.sequence_multiple,
            token_dtype="uint16" if encoder.token_dtype.name == "uint16" else "int32",
            consumers=self.ahead.consumers,
            max_ahead_shards=self.ahead.max_shards,
            max_ahead_nbytes=self.ahead.max_nbytes,
            keep_recent=self.ahead.keep_recent,
        )


# The key of the header's JSON block that holds a shard's cursor: publishing a shard and moving on is one step.
CURSOR = "cursor"


@dataclass(frozen=True, slots=True)
class Cursor(Record):
    """How far the input has become shards.

    Attributes:
        position: in the input.
        rows: before it.
        skipped: of these, rows that could not be used.
    """

    position: Position = field(default_factory=Position)
    rows: int = 0
    skipped: int = 0


def find_start(
    catalog: Catalog, options: ProduceOptions, encoder: RowEncoder, num_files: int
) -> tuple[ProducerState, Cursor]:
    """The state to go on from, and the place in the input.

    Shards that were published after the state was last written are counted, since each holds its own cursor. Where
    there is no shard yet, the options may be others.

    Args:
        catalog: held by this producer.
        options: what it is told.
        encoder: made from them.
        num_files: of the input; 0 where they are not all there yet.

    Raises:
        FormatError: the folder holds shards that no producer made, or was made with other options; says which.
    """
    limits = options.limits(encoder)
    wanted = options.describe(encoder, num_files)
    state = catalog.producer()
    if state is None:
        if (present := catalog.present()) or catalog.end() is not None:
            raise FormatError(
                f"{catalog.folder}: {len(present)} shards are here, and no _producer.json that says how they were made;"
                " name another folder"
            )
        return ProducerState(limits, options=wanted, input=Cursor().to_json()), Cursor()
    if not state.published and not catalog.is_published(0) and catalog.end() is None:
        return ProducerState(limits, state.beat, options=wanted, input=Cursor().to_json()), Cursor()
    if differs := _differences(state, wanted, limits, options, encoder):
        raise FormatError(
            f"{catalog.folder}: this catalog was begun with other options: {'; '.join(differs)}; give the same ones to"
            " go on with it, or name another folder"
        )
    path = os.path.join(catalog.folder, "_producer.json")
    cursor = Cursor.parse(path, state.input, f"{CURSOR}.")
    published = state.published
    while catalog.is_published(published):
        prefix = catalog.shard_prefix(published)
        # The last thing to go of a build is its journal.
        remove_remains(prefix)
        paths = ShardPaths.of(prefix)
        content = read_header(prefix).metadata.get(CURSOR)
        if not isinstance(content, dict):
            raise FormatError(
                f"{paths.seq_idx}: not a shard that this producer made, its header has no cursor; name another folder"
            )
        cursor = Cursor.parse(paths.seq_idx, content, f"{CURSOR}.")
        published += 1
    return (
        ProducerState(limits, state.beat, "running", None, published, state.freed, wanted, cursor.to_json()),
        cursor,
    )


def _differences(
    state: ProducerState, wanted: Mapping[str, Any], limits: Limits, options: ProduceOptions, encoder: RowEncoder
) -> list[str]:
    """What decides over the bytes of the shards and is another now."""
    differs = option_differences(state.options, encoder) + packing_differences(state.options, options.packing)
    for group in ("sharding", "input"):
        found = state.options.get(group)
        before = found if isinstance(found, dict) else {}
        for key in sorted({*before, *wanted[group]}):
            if before.get(key) != wanted[group].get(key):
                name = key.replace("_", " ")
                differs.append(f"{name} was {before.get(key)!r}, is {wanted[group].get(key)!r}")
    if state.limits.token_dtype != limits.token_dtype:
        differs.append(f"token dtype was {state.limits.token_dtype}, is {limits.token_dtype}")
    return differs
