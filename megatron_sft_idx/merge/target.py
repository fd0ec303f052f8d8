"""Writing packs that were checked when their shard was: whole ranges of bytes, not pack by pack."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from types import TracebackType

import numpy as np

from megatron_sft_idx.layout import Header, ShardPaths, token_dtype_of
from megatron_sft_idx.layout.header import header_nbytes
from megatron_sft_idx.layout.journal import PACK, BuildOptions, encode_block
from megatron_sft_idx.merge.source import SourceShard
from megatron_sft_idx.merge.trained import TrainedCount
from megatron_sft_idx.shard.build import FORMAT_WRITER
from megatron_sft_idx.shard.index import JournalPacks, write_idx, write_seq_idx
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.storage.hashing import HashedFile

__all__ = ["CopyWriter"]


class CopyWriter:
    """Writes a shard out of ranges of packs of other shards; publishes and journals as ``ShardWriter`` does.

    Tokens, masks and starts are not looked at: a source that has its checksums holds what a writer checked. What the
    new shard's structure is computed from, the lengths of packs, is checked all the same. A context manager: leaving it
    without ``finalize`` publishes nothing and removes what was written.

    Args:
        prefix: the path the five files will share.
        like: dtypes, capacity, multiple, pad id, metadata and flags of the new shard; its counts and checksums are
            of no concern.
        overwrite: replace what is at the prefix.
        durable: False skips fsync.
        nbytes: what will be written, for which room is looked for.
        drops: what half done work at the prefix may be dropped all the same.

    Raises:
        FormatError: something is at the prefix, or the metadata are too large for a header.
        OSError: the disk says no.
    """

    def __init__(
        self, prefix: str, like: Header, *, overwrite: bool, durable: bool, nbytes: int = 0, drops: Collection[str] = ()
    ) -> None:
        self._paths = ShardPaths.of(prefix)
        self._like = dataclasses.replace(like, metadata={**like.metadata, "format_writer": FORMAT_WRITER})
        header_nbytes(self._like.metadata)
        self._totals = np.zeros(2, np.int64)  # tokens, sequences
        self._most = np.zeros(2, np.int64)  # in one pack
        self._num_packs = 0
        self._publication = Publication(
            self._paths, _options(like).encode(), overwrite=overwrite, durable=durable, nbytes=nbytes, drops=drops
        )
        try:
            self._tokens, self._loss, self._starts = map(
                self._file, (self._paths.tokens, self._paths.loss, self._paths.starts)
            )
        except BaseException:
            self._publication.abandon()
            raise

    def _file(self, path: str) -> HashedFile:
        return HashedFile(self._publication.open(path))

    def __enter__(self) -> CopyWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publication.abandon()

    def append(self, source: SourceShard, first: int, stop: int, trained: TrainedCount | None = None) -> None:
        """Append the packs ``[first, stop)`` of a source.

        The journal takes them after their data is written and, where they are all of the source, known to be right:
        what is recovered from a killed merge is never what a corrupt source held.

        Raises:
            CorruptShardError: the source breaks F2, F3, O1 or O2.
        """
        token_span, sequence_span = source.spans(first, stop)
        for piece in source.tokens.pieces(*token_span):
            self._tokens.write(piece)
        for piece in source.loss.pieces(*token_span):
            self._loss.write(piece)
            if trained is not None:
                trained.add(piece)
        for piece in source.starts.pieces(*sequence_span):
            self._starts.write(piece)
        for records in source.records(first, stop):
            self._num_packs += len(records)
            self._totals += records.sum(axis=0)
            self._most = np.maximum(self._most, records.max(axis=0))
            self._publication.journal.write(encode_block(PACK, records.astype(np.uint32)))

    def finalize(self, num_trained_tokens: int, num_masked_packs: int, *, publish: bool = True) -> Header:
        """Write the indexes and publish, or set the shard aside for ``publish_all``.

        Args:
            num_trained_tokens: of all that was appended.
            num_masked_packs: likewise.
            publish: whether to publish.

        Returns:
            The header.
        """
        paths, like = self._paths, self._like
        packs = JournalPacks(self._publication.journal.path, self._num_packs)
        code, dtype = token_dtype_of(like.token_dtype)
        idx, seq_idx = self._file(paths.idx).file, self._file(paths.seq_idx).file
        idx_digest = write_idx(idx, packs, code, dtype.itemsize, self._num_packs)
        (num_tokens, num_sequences), (longest, most) = self._totals.tolist(), self._most.tolist()
        header = dataclasses.replace(
            like,
            num_packs=self._num_packs,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            num_trained_tokens=num_trained_tokens,
            num_masked_packs=num_masked_packs,
            longest_pack=longest,
            most_sequences=most,
            digests=(self._tokens.digest(), self._loss.digest(), idx_digest, self._starts.digest()),
        )
        header = write_seq_idx(seq_idx, packs, header)
        if publish:
            self._publication.publish()
        else:
            self._publication.set_aside()
        return header


def _options(like: Header) -> BuildOptions:
    """What a ``ShardWriter`` of such a shard would have been begun with."""
    return BuildOptions(
        like.token_dtype,
        like.mask_dtype,
        like.capacity or None,  # an empty shard may have none
        like.sequence_multiple,
        like.pad_id,
        dict(like.metadata),
    )
