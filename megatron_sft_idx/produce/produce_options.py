"""The options of a producer: the options of ``tokenize``, and further ones for a catalog."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import Limits
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.storage.publish import describe
from megatron_sft_idx.tokenize import BadRowLimit, EncodingOptions, PackOptions, RowEncoder

# Approximate number of bytes of text per token, and number of input pieces per shard.
_BYTES_OF_A_TOKEN = 4
_PIECES_OF_A_SHARD = 8
_MIN_PIECE_NBYTES, _MAX_PIECE_NBYTES = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class ProduceOptions:
    """The options of a producer. The first two groups determine the bytes of the shards, the third does not.

    Attributes:
        inputs: files, globs and ``save_to_disk`` folders, or only ``-`` for JSON lines on standard input.
        watch: a folder whose files are the input, as they appear; ``inputs`` must then be empty. Otherwise None.
        catalog: the folder of the shards.

        encoding: how rows become sequences.
        packing: how sequences become packs; ``max_sequences_per_pack`` must be set, because consumers rely on it.
        tokens_per_shard: a shard ends with the first piece of the input at which it has this many tokens.

        workers: number of worker processes for tokenization; 0 for this process only.
        max_ahead_shards: maximum number of published shards that some consumer has not completed; None for no limit.
        max_ahead_nbytes: maximum size of such shards in bytes; None for no limit.
        consumers: number of training jobs that will read the catalog.
        keep_recent: number of completed shards to keep, the newest; older ones are removed. None keeps all.
        ack_dir: the folder of consumers' acknowledgements; None for the one in the catalog.
        end_after: number of seconds without anything new in ``watch`` after which the input ends; None waits for
            ``_END``.
        settle: number of seconds without a change after which a file in ``watch`` counts as complete.
        max_bad_rows: maximum number of rows of the whole catalog that may be skipped; None for no limit. A fraction is
            checked before each shard is published, over all rows so far, and at the end of the input.
    """

    inputs: Sequence[str]
    watch: str | None
    catalog: str
    encoding: EncodingOptions
    packing: PackOptions
    tokens_per_shard: int
    workers: int = 0
    max_ahead_shards: int | None = None
    max_ahead_nbytes: int | None = None
    consumers: int = 1
    keep_recent: int | None = None
    ack_dir: str | None = None
    end_after: float | None = None
    settle: float = 5.0
    max_bad_rows: BadRowLimit | None = None

    def __post_init__(self) -> None:
        for path, role in (
            (self.catalog, "a live catalog"),
            (self.watch, "a folder that is watched"),
            (self.ack_dir, "a folder of acknowledgements"),
        ):
            if path is not None:
                require_local(path, role)
        if (acks := self.ack_dir) and os.path.lexists(acks) and not os.path.isdir(acks):
            raise FormatError(f"{acks}: expected a folder, found {describe(acks)}; choose another path")
        if self.packing.max_sequences_per_pack is None:
            raise FormatError(
                "max_sequences_per_pack must be set, because it determines the shape of all batches of a live catalog"
            )
        for name, value, minimum in (
            ("max_ahead_shards", self.max_ahead_shards, 1),
            ("max_ahead_nbytes", self.max_ahead_nbytes, 1),
            ("consumers", self.consumers, 1),
            ("keep_recent", self.keep_recent, 0),
        ):
            if value is not None and value < minimum:
                raise FormatError(f"{name} {value}: expected {minimum} or more")
        if self.tokens_per_shard < self.packing.capacity:
            raise FormatError(
                f"--tokens-per-shard {self.tokens_per_shard} is below --seq-length {self.packing.capacity}, so a shard"
                " would not fill one pack; raise it, for example to 1000 x --seq-length"
            )

    @property
    def from_stdin(self) -> bool:
        """Whether the input is a pipe on standard input."""
        return self.watch is None and list(self.inputs) == ["-"]

    @property
    def sharding(self) -> dict[str, int]:
        """The settings that determine where a shard ends: tokens of a shard, and bytes of an input piece."""
        nbytes = self.tokens_per_shard * _BYTES_OF_A_TOKEN // _PIECES_OF_A_SHARD
        nbytes = min(max(nbytes, _MIN_PIECE_NBYTES), _MAX_PIECE_NBYTES)
        return {"tokens_per_shard": self.tokens_per_shard, "piece_nbytes": nbytes}

    def describe(self, encoder: RowEncoder, num_files: int) -> dict[str, Any]:
        """Return all options that determine the bytes of the shards, as plain values."""
        source = "a growing folder" if self.watch is not None else "a pipe" if self.from_stdin else f"{num_files} files"
        described = {"packing": self.packing.describe(), "sharding": self.sharding, "input": {"input": source}}
        return encoder.describe() | described

    def limits(self, encoder: RowEncoder) -> Limits:
        """Return the limits for consumers."""
        assert self.packing.max_sequences_per_pack is not None
        return Limits(
            capacity=self.packing.capacity,
            max_sequences_per_pack=self.packing.max_sequences_per_pack,
            sequence_multiple=self.packing.sequence_multiple,
            token_dtype="uint16" if encoder.token_dtype.name == "uint16" else "int32",
            consumers=self.consumers,
            max_ahead_shards=self.max_ahead_shards,
            max_ahead_nbytes=self.max_ahead_nbytes,
            keep_recent=self.keep_recent,
        )
