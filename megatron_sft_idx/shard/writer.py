"""Writing one shard in a stream: bounded memory, every rule checked, published all at once or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import FileDigest, Header, ShardPaths, mask_dtype_of, token_dtype_of
from megatron_sft_idx.layout.journal import DONE, MASK, PACK, encode_block, encode_head
from megatron_sft_idx.layout.values import MAX_CAPACITY
from megatron_sft_idx.shard.arrays import integer_array, mask_array, token_array
from megatron_sft_idx.shard.index import write_idx, write_seq_idx
from megatron_sft_idx.shard.publish import Publication
from megatron_sft_idx.storage import OutputFile

__all__ = ["FORMAT_WRITER", "MaskAlignment", "ShardWriter"]

MaskAlignment = Literal["label", "token"]

# Stored in the JSON block: raised whenever the same input would give other bytes.
FORMAT_WRITER = 1
_STAGE_TOKENS = 1 << 18


class _DataFile:
    """A data file on its way: staged, checksummed, written in large pieces."""

    def __init__(self, path: str, dtype: np.dtype[Any], *, durable: bool) -> None:
        self.file = OutputFile(path, durable=durable)
        self.stage = np.empty(_STAGE_TOKENS, dtype)
        self.filled = 0
        self._hash = xxhash.xxh3_128()

    def room(self, count: int) -> NDArray[Any]:
        """A place for ``count`` more items; ``filled`` moves on once they are in it."""
        if self.filled + count > len(self.stage):
            # Only before anything is staged: whoever stages flushes first.
            self.stage = np.empty(count, self.stage.dtype)
        return self.stage[self.filled : self.filled + count]

    def flush(self) -> None:
        if self.filled:
            data = self.stage[: self.filled]
            self.file.write(data)
            self._hash.update(data)
            self.filled = 0
            if len(self.stage) > _STAGE_TOKENS:
                self.stage = np.empty(_STAGE_TOKENS, self.stage.dtype)

    def digest(self) -> FileDigest:
        return FileDigest(self.file.nbytes, self._hash.digest())


class ShardWriter:
    """Writes a shard pack by pack.

    A context manager: leaving it publishes the five files together, leaving it by an exception publishes nothing and
    removes what was written. A killed writer leaves temporary files and a journal, never something that looks like
    a shard. Memory stays at a few MiB for any number of packs.

    Args:
        prefix: the path the five files will share; its folder is made where it is missing.
        token_dtype: int32, or uint16 for vocabularies below 65500.
        mask_dtype: uint8 for masks of 0 and 1, float32 for weights.
        capacity: most token positions a pack may hold; None sets it to the longest pack.
        sequence_multiple: count each sequence as its length rounded up to this against the capacity.
        pad_id: the tokenizer's padding id, kept for readers.
        overwrite: replace a shard, or the remains of an interrupted build, at this prefix.
        metadata: JSON object for the header: fingerprints, options, counts. Nothing that changes from run to run.
        durable: False skips fsync, for files that are thrown away anyway.

    Raises:
        FormatError: an argument the format does not allow, or something is at the prefix and ``overwrite`` is False.
        OSError: the disk says no.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        token_dtype: Any = np.int32,
        mask_dtype: Any = np.uint8,
        capacity: int | None = None,
        sequence_multiple: int = 1,
        pad_id: int | None = None,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        durable: bool = True,
    ) -> None:
        self._paths = ShardPaths.of(prefix)
        self._token_code, tokens = token_dtype_of(token_dtype)
        self._mask_code, masks = mask_dtype_of(mask_dtype)
        self._capacity = _checked(capacity, "capacity", 1, MAX_CAPACITY) if capacity is not None else None
        self._multiple = _checked(sequence_multiple, "sequence_multiple", 1, MAX_CAPACITY)
        self._pad_id = _checked(pad_id, "pad_id", 0, MAX_CAPACITY) if pad_id is not None else None
        self.metadata: dict[str, Any] = dict(metadata or {})
        self._durable = durable
        self.num_packs = self.num_sequences = self.num_tokens = 0
        self.num_trained_tokens = self.num_masked_packs = 0
        self.dropped_first_tokens = 0
        self._longest = self._longest_padded = self._most_sequences = 0
        self._publication = Publication(self._paths, overwrite=overwrite, durable=durable)
        try:
            self._open(tokens, masks)
        except BaseException:
            self._publication.abandon()
            raise

    def _open(self, tokens: np.dtype[Any], masks: np.dtype[Any]) -> None:
        self._tokens = self._data_file(self._paths.tokens, tokens)
        self._loss = self._data_file(self._paths.loss, masks)
        self._starts = self._data_file(self._paths.starts, np.dtype("<u4"))
        options = {
            "token_dtype": self._token_code,
            "mask_dtype": self._mask_code,
            "capacity": self._capacity,
            "sequence_multiple": self._multiple,
            "pad_id": self._pad_id,
            "metadata": self.metadata,
        }
        self._publication.journal.write(encode_head(options))
        self._records = np.empty((_STAGE_TOKENS // 8, 2), np.uint32)
        self._recorded = 0

    def _data_file(self, path: str, dtype: np.dtype[Any]) -> _DataFile:
        data = _DataFile(self._paths.temporary(path), dtype, durable=self._durable)
        self._publication.own(data.file)
        return data

    @property
    def prefix(self) -> str:
        """The path the five files will share."""
        return self._paths.prefix

    @property
    def mask_dtype(self) -> np.dtype[Any]:
        """Dtype of the loss file."""
        return self._loss.stage.dtype

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
        elif not self._publication.closed:
            self.finalize()

    def __del__(self) -> None:
        # Never finalized and never left through ``with``: the remains are of no use to anyone.
        if "_publication" in self.__dict__ and not self._publication.closed:
            self.abandon()

    def add_pack(
        self, tokens: ArrayLike, loss_mask: ArrayLike, seq_starts: ArrayLike, *, mask_alignment: MaskAlignment = "label"
    ) -> None:
        """Add one pack.

        Args:
            tokens: ids [length].
            loss_mask: 0/1 or weights [length]. ``label``-aligned: position j says whether predicting token j + 1 of
                the same sequence counts, so it is 0 at every sequence's end. ``token``-aligned: position j says
                whether token j is trained on; it is shifted here, and a mask set on a sequence's first token, which
                nothing predicts, is dropped and counted in ``dropped_first_tokens``.
            seq_starts: start of each sequence in the pack [sequences], the first 0.
            mask_alignment: which of the two ``loss_mask`` is.

        Raises:
            SequenceError: a rule of FORMAT.md is broken; nothing of the pack is kept.
        """
        starts = integer_array(seq_starts, "seq_starts", self._source)
        ids = token_array(tokens, "tokens", self._source)
        lengths, counts = np.array([ids.size]), np.array([starts.size])
        self.add_packs(ids, loss_mask, starts, lengths, counts, mask_alignment=mask_alignment)

    def add_packs(
        self,
        tokens: ArrayLike,
        loss_mask: ArrayLike,
        seq_starts: ArrayLike,
        pack_lengths: NDArray[np.int64],
        pack_sequences: NDArray[np.int64],
        *,
        mask_alignment: MaskAlignment = "label",
    ) -> None:
        """Add many packs at once: the arrays of ``add_pack`` end to end.

        Args:
            tokens: ids of all packs [sum of lengths].
            loss_mask: their masks [sum of lengths].
            seq_starts: positions inside each pack [sum of sequence counts].
            pack_lengths: tokens in each pack, int64 [packs].
            pack_sequences: sequences in each pack, int64 [packs].
            mask_alignment: as in ``add_pack``.

        Raises:
            SequenceError: a rule of FORMAT.md is broken in one of the packs; none of them is kept.
        """
        if self._publication.closed:
            raise FormatError(f"{self.prefix}: this writer is finished; open another one to write more packs")
        if mask_alignment not in ("label", "token"):
            raise FormatError(f"{self.prefix}: mask_alignment {mask_alignment!r}, choose 'label' or 'token'")
        ids = token_array(tokens, "tokens", self._source)
        mask = mask_array(loss_mask, "loss_mask", self._source)
        starts = integer_array(seq_starts, "seq_starts", self._source)
        if mask.size != ids.size:
            raise self._refuse(f"{mask.size} loss mask values for {ids.size} tokens; there is one a token")
        if self._tokens.filled + ids.size > _STAGE_TOKENS or self._starts.filled + starts.size > _STAGE_TOKENS:
            self.flush()
        to = self._tokens.room(ids.size), self._loss.room(ids.size), self._starts.room(starts.size)
        capacity = self._capacity or MAX_CAPACITY
        try:
            shape = _native.stage_shapes(
                pack_lengths, pack_sequences, starts, ids.size, capacity, self._multiple, to[2]
            )
            _native.stage_tokens(ids, pack_lengths, pack_sequences, starts, to[0])
            trained = _native.stage_mask(mask, pack_lengths, pack_sequences, starts, mask_alignment == "token", to[1])
        except ValueError as error:
            raise self._refuse(str(error)) from None
        self._commit(ids.size, pack_lengths, pack_sequences, shape, trained)

    def _commit(
        self,
        tokens: int,
        lengths: NDArray[np.int64],
        sequences: NDArray[np.int64],
        shape: tuple[int, int, int],
        trained: tuple[int, int, int],
    ) -> None:
        starts = int(sequences.sum())
        self._tokens.filled += tokens
        self._loss.filled += tokens
        self._starts.filled += starts
        if self._recorded + len(lengths) > len(self._records):
            self._records = np.concatenate([self._records[: self._recorded], np.empty((len(lengths), 2), np.uint32)])
        rows = self._records[self._recorded : self._recorded + len(lengths)]
        rows[:, 0], rows[:, 1] = lengths, sequences
        self._recorded += len(lengths)
        self.num_packs += len(lengths)
        self.num_sequences += starts
        self.num_tokens += tokens
        self._longest = max(self._longest, shape[0])
        self._longest_padded = max(self._longest_padded, shape[1])
        self._most_sequences = max(self._most_sequences, shape[2])
        self.num_trained_tokens += trained[0]
        self.num_masked_packs += trained[1]
        self.dropped_first_tokens += trained[2]
        if self._recorded == len(self._records):
            self.flush()

    def flush(self) -> None:
        """Write what is staged, then record it in the journal."""
        for data in (self._tokens, self._loss, self._starts):
            data.flush()
        if self._recorded:
            self._publication.journal.write(encode_block(PACK, self._records[: self._recorded]))
            self._recorded = 0
            if len(self._records) > _STAGE_TOKENS // 8:
                self._records = np.empty((_STAGE_TOKENS // 8, 2), np.uint32)

    def promote_mask_dtype(self) -> None:
        """Go on with float32 masks: what was written as uint8 is rewritten, in bounded memory."""
        if self.mask_dtype == np.float32:
            return
        self.flush()
        old = self._loss
        self._mask_code, dtype = mask_dtype_of(np.float32)
        widened = _DataFile(self._paths.temporary(self._paths.loss) + ".float32", dtype, durable=self._durable)
        self._publication.own(widened.file)
        for offset in range(0, old.file.nbytes, _STAGE_TOKENS):
            piece = os.pread(old.file.fileno(), _STAGE_TOKENS, offset)
            widened.room(len(piece))[:] = np.frombuffer(piece, np.uint8)
            widened.filled += len(piece)
            widened.flush()
        self._publication.replace(widened.file, old.file)
        self._publication.journal.write(encode_block(MASK, np.array([[self._mask_code, 0]], np.uint32)))
        self._loss = widened

    def finalize(self) -> Header:
        """Write the indexes and publish the shard.

        Returns:
            The header of the published shard.

        Raises:
            FormatError: another shard appeared at the prefix in the meantime, or the metadata is not JSON.
        """
        if self._publication.closed:
            raise FormatError(f"{self.prefix}: this writer is finished already")
        try:
            self.flush()
            header = self._write_indexes()
            self._publication.journal.write(encode_block(DONE, np.empty((0, 2), np.uint32)))
            self._publication.publish()
        except BaseException:
            self.abandon()
            raise
        return header

    def _write_indexes(self) -> Header:
        paths, journal = self._paths, self._publication.journal.path
        idx = OutputFile(paths.temporary(paths.idx), durable=self._durable)
        self._publication.own(idx)
        itemsize = self._tokens.stage.dtype.itemsize
        idx_digest = write_idx(idx, journal, self._token_code, itemsize, self.num_packs)
        seq_idx = OutputFile(paths.temporary(paths.seq_idx), durable=self._durable)
        self._publication.own(seq_idx)
        header = Header(
            num_packs=self.num_packs,
            num_sequences=self.num_sequences,
            num_tokens=self.num_tokens,
            num_trained_tokens=self.num_trained_tokens,
            num_masked_packs=self.num_masked_packs,
            token_dtype=self._tokens.stage.dtype,
            mask_dtype=self.mask_dtype,
            sequence_multiple=self._multiple,
            capacity=self._capacity or self._longest_padded,
            longest_pack=self._longest,
            most_sequences=self._most_sequences,
            pad_id=self._pad_id,
            digests=(self._tokens.digest(), self._loss.digest(), idx_digest, self._starts.digest()),
            arrays_checksum=bytes(16),
            metadata={**self.metadata, "format_writer": FORMAT_WRITER},
        )
        return write_seq_idx(seq_idx, journal, header)

    def abandon(self) -> None:
        """Publish nothing and remove what was written; may be called twice."""
        self._publication.abandon()

    @property
    def _source(self) -> tuple[str, int]:
        return self.prefix, self.num_packs

    def _refuse(self, reason: str) -> SequenceError:
        return SequenceError(*self._source, reason)


def _checked(value: Any, name: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
        raise FormatError(f"{name} {value!r}: expected a whole number from {least} to {most}")
    return int(value)
