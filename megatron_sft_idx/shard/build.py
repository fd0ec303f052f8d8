"""One build: three data files that grow, the counts and hashes of what is in them, and their way to five files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.layout import Header, mask_dtype_of, token_dtype_of
from megatron_sft_idx.layout.journal import (
    MARK,
    MASK,
    MAX_RECORDS,
    PACK,
    BuildOptions,
    encode_block,
    encode_json,
    pack_records,
    read_head,
)
from megatron_sft_idx.layout.values import MAX_CAPACITY
from megatron_sft_idx.shard.index import JournalPacks, write_idx, write_seq_idx
from megatron_sft_idx.shard.prefix import WIDENED
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.storage import open_regular
from megatron_sft_idx.storage.hashing import HashedFile, StreamHash

__all__ = ["FORMAT_WRITER", "STAGE_TOKENS", "Build"]

# Stored in the JSON block: raised whenever the same input would give other bytes.
FORMAT_WRITER = 1
# Small enough to stay in the processor's cache between the check, the write and the checksum.
STAGE_TOKENS = 1 << 16


class Build:
    """The data files of one shard in the making.

    Args:
        publication: the lock on the prefix, and the files' names.
        options: what the build is begun with.
        mask_dtype: of the loss file that an interrupted build left: it is taken up, and ``replay`` comes first.
        journal_nbytes: where the journal of that build ends.

    Attributes:
        stage: checks and counts packs, and holds them until they are written.
        mask_dtype: of the loss file.
    """

    def __init__(
        self,
        publication: Publication,
        options: BuildOptions,
        mask_dtype: np.dtype[Any] | None = None,
        journal_nbytes: int | None = None,
    ) -> None:
        self.options = options
        self.mask_dtype = mask_dtype or options.mask_dtype
        self.stage = _native.PackStage(
            options.token_dtype,
            self.mask_dtype,
            options.capacity or MAX_CAPACITY,
            options.sequence_multiple,
            STAGE_TOKENS,
        )
        self._publication = publication
        self._journal_nbytes = journal_nbytes
        # Of the masks taken in as they were before they were widened; marks made until then say what it should be.
        self._flags_hash = StreamHash()
        paths, keep = publication.paths, journal_nbytes is not None
        self._tokens = HashedFile(publication.open(paths.tokens, keep=keep))
        self._loss = HashedFile(publication.open(paths.loss, keep=keep))
        self._starts = HashedFile(publication.open(paths.starts, keep=keep))
        if keep and os.path.lexists(paths.temporary(paths.loss) + WIDENED) and (self.mask_dtype != options.mask_dtype):
            # The journal speaks of the widened file already; it has yet to take its name.
            widened = publication.open(paths.loss, WIDENED, keep=True)
            publication.replace(widened, self._loss.file)
            self._loss = HashedFile(widened)

    def write_staged(self) -> None:
        """Write what is staged, then record it in the journal."""
        stage = self.stage
        self._tokens.write(stage.tokens)
        self._loss.write(stage.mask)
        self._starts.write(stage.starts)
        records = np.frombuffer(stage.records, np.uint32).reshape(-1, 2)
        for start in range(0, len(records), MAX_RECORDS):
            self._publication.journal.write(encode_block(PACK, records[start : start + MAX_RECORDS]))
        stage.clear()

    def widen_mask(self) -> None:
        """Rewrite the loss file as float32, in bounded memory; nothing is staged."""
        old = self._loss.file
        dtype = mask_dtype_of(np.float32)[1]
        widened = HashedFile(self._publication.open(self._publication.paths.loss, WIDENED))
        for offset in range(0, old.nbytes, STAGE_TOKENS):
            widened.write(np.frombuffer(old.read_at(offset, STAGE_TOKENS), np.uint8).astype(dtype))
        # Whatever reaches the disk of these steps, the journal tells which of the two files counts and what is in it.
        widened.file.sync()
        self._publication.journal.write(_mask_block(dtype))
        self._publication.journal.sync()
        self._publication.replace(widened.file, old)
        self._loss, self.mask_dtype = widened, dtype
        self.stage.promote_mask()

    def mark(self, state: Mapping[str, Any], dropped_first_tokens: int) -> None:
        """Note in the journal what is written so far, and the state of whoever wrote it."""
        mark = {
            "checksums": self._checksums(),
            "mask_dtype": mask_dtype_of(self.mask_dtype)[0],
            "dropped_first_tokens": dropped_first_tokens,
            "state": state,
        }
        self._publication.journal.write(encode_json(MARK, mark))

    def _checksums(self) -> list[str]:
        return [data.checksum().hex() for data in (self._tokens, self._loss, self._starts)]

    def agrees(self, mark: Mapping[str, Any]) -> bool:
        """Whether the files hold what they held when the mark was made, masks widened since or not."""
        found = self._checksums()
        if mark["mask_dtype"] != mask_dtype_of(self.mask_dtype)[0]:
            found[1] = self._flags_hash.hex()
        return bool(found == mark["checksums"])

    def replay(self, num_packs: int, progress: Callable[[int], None] = lambda num_tokens: None) -> int:
        """Take in the first packs of the remains as if they had just been added: checked, counted and hashed.

        Args:
            num_packs: so many at most.
            progress: called with the tokens taken in since the last call.

        Returns:
            Packs taken in: fewer where one breaks a rule, since its bytes never reached the disk.
        """
        path = self._publication.paths.journal
        with open_regular(path) as stream:
            read_head(stream, path)
            for records in pack_records(stream):
                if not self.replay_records(records[: num_packs - self.stage.num_packs], progress):
                    break
        return self.stage.num_packs

    def replay_records(self, records: NDArray[np.uint32], progress: Callable[[int], None]) -> bool:
        """Take in the next packs, by their records [packs, 2]; False where one breaks a rule."""
        left = records.astype(np.int64)
        while len(left):
            size = int(np.searchsorted(np.cumsum(left[:, 0]), STAGE_TOKENS, side="right"))
            run, left = left[: max(size, 1)], left[max(size, 1) :]
            if not self._replay_run(run):
                return False
            progress(int(run[:, 0].sum()))
        return True

    def cut_back(self, journal_nbytes: int, mask_dtype: np.dtype[Any]) -> None:
        """Drop what lies behind the packs taken in, and go on from there.

        Args:
            journal_nbytes: the journal as far as it speaks of these packs.
            mask_dtype: of the loss file by that part of it.
        """
        publication = self._publication
        tail = _mask_block(self.mask_dtype) if mask_dtype != self.mask_dtype else b""
        if tail or journal_nbytes < publication.journal.nbytes:
            publication.cut_journal(journal_nbytes, tail)
        for data in (self._tokens, self._loss, self._starts):
            data.file.cut(data.nbytes)
        self._journal_nbytes = None

    def _replay_run(self, records: NDArray[np.int64]) -> bool:
        """Some packs at once; one by one where a rule is broken, so that those before it are taken in."""
        num_tokens, num_sequences = records.sum(axis=0).tolist()
        raw = [
            file.file.read_at(file.nbytes, count * itemsize)
            for file, count, itemsize in (
                (self._tokens, num_tokens, self.options.token_dtype.itemsize),
                (self._loss, num_tokens, self.mask_dtype.itemsize),
                (self._starts, num_sequences, 4),
            )
        ]
        tokens = np.frombuffer(raw[0], self.options.token_dtype)
        mask = np.frombuffer(raw[1], self.mask_dtype)
        starts = np.frombuffer(raw[2], "<u4").astype(np.int64)
        lengths, sequences = np.ascontiguousarray(records.T)
        try:
            self.stage.add(tokens, mask, starts, lengths, sequences, False)
        except ValueError:
            return len(records) > 1 and all(self._replay_run(record) for record in records[:, np.newaxis])
        for file, data in zip((self._tokens, self._loss, self._starts), raw, strict=True):
            file.update(data)
        if self.mask_dtype != self.options.mask_dtype:
            with np.errstate(invalid="ignore"):  # weights that were added later are not asked about
                self._flags_hash.update(mask.astype(self.options.mask_dtype))
        self.stage.clear()
        return True

    def publish(self, metadata: Mapping[str, Any], *, rebuilt: bool = False) -> Header:
        """Write the indexes and publish the shard; nothing is staged. Returns its header."""
        header = self.complete(metadata, rebuilt=rebuilt)
        self._publication.publish()
        return header

    def complete(self, metadata: Mapping[str, Any], *, rebuilt: bool = False) -> Header:
        """Write the indexes: the files hold all of the shard, under the names of before publication."""
        header = self._write_indexes(metadata, rebuilt)
        publication = self._publication
        # What is not of these packs was never part of the shard: the torn end of what a kill interrupted.
        for data in (self._tokens, self._loss, self._starts):
            data.file.cut(data.nbytes)
        if self._journal_nbytes is not None:
            publication.journal.cut(self._journal_nbytes)
        return header

    def _write_indexes(self, metadata: Mapping[str, Any], rebuilt: bool) -> Header:
        publication, options, stage = self._publication, self.options, self.stage
        paths, packs = publication.paths, JournalPacks(publication.journal.path, stage.num_packs)
        code, dtype = token_dtype_of(options.token_dtype)
        idx_digest = write_idx(publication.open(paths.idx), packs, code, dtype.itemsize, stage.num_packs)
        header = Header(
            num_packs=stage.num_packs,
            num_sequences=stage.num_sequences,
            num_tokens=stage.num_tokens,
            num_trained_tokens=stage.num_trained_tokens,
            num_masked_packs=stage.num_masked_packs,
            token_dtype=dtype,
            mask_dtype=self.mask_dtype,
            sequence_multiple=options.sequence_multiple,
            capacity=options.capacity or stage.longest_padded_pack,
            longest_pack=stage.longest_pack,
            most_sequences=stage.most_sequences,
            pad_id=options.pad_id,
            digests=(self._tokens.digest(), self._loss.digest(), idx_digest, self._starts.digest()),
            arrays_checksum=bytes(16),
            metadata={**metadata, "format_writer": FORMAT_WRITER},
        )
        return write_seq_idx(publication.open(paths.seq_idx), packs, dataclasses.replace(header, rebuilt=rebuilt))


def _mask_block(dtype: np.dtype[Any]) -> bytes:
    return encode_block(MASK, np.array([[mask_dtype_of(dtype)[0], 0]], np.uint32))
