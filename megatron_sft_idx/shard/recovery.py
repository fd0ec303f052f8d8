"""What an interrupted build left, and what can be made of it.

Its journal says which packs were written; how far its data really reaches is looked up. ``recover`` publishes those
packs, whoever built them; ``InterruptedBuild`` goes on from the last mark that the builder itself made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout import MASK_DTYPES, Header, ShardPaths
from megatron_sft_idx.layout.header import MAX_HEADER_NBYTES
from megatron_sft_idx.layout.journal import (
    MARK,
    MASK,
    PACK,
    Block,
    BuildOptions,
    Head,
    pack_records,
    read_blocks,
    read_head,
    torn,
)
from megatron_sft_idx.shard.build import Build
from megatron_sft_idx.shard.prefix import (
    WIDENED,
    check_free,
    drop_remains,
    is_scratch,
    locked_journal,
    read_journal,
    require_build,
)
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.shard.writer import ShardWriter
from megatron_sft_idx.storage import open_regular, read_most

__all__ = [
    "InterruptedBuild",
    "Remains",
    "adopt_remains",
    "complete_header",
    "find_remains",
    "read_remains",
    "recover",
    "remove_remains",
]


@dataclass(frozen=True)
class Remains:
    """What a killed build left at a prefix.

    Attributes:
        paths: of the shard it would have become.
        head: of the journal.
        num_packs: packs of complete journal blocks that lie wholly in all three data files.
        num_sequences: their sequences.
        num_tokens: their tokens.
        num_recorded: packs of complete journal blocks, also those whose data did not reach the disk.
        mask_dtype: of the loss file as it is now.
        journal_nbytes: where the journal's last complete block ends.
        done: all files are complete and synced, and only renames are left; the counts are then the shard's.
    """

    paths: ShardPaths
    head: Head
    num_packs: int
    num_sequences: int
    num_tokens: int
    num_recorded: int
    mask_dtype: np.dtype[Any]
    journal_nbytes: int
    done: bool

    @property
    def build_options(self) -> BuildOptions:
        """What the build was begun with. CorruptShardError where the head does not say it."""
        return BuildOptions.decode(self.head.content, self.paths.journal)

    def build(self, publication: Publication) -> Build:
        """The build, to be taken up: ``replay`` comes before anything else."""
        return Build(publication, self.build_options, self.mask_dtype, self.journal_nbytes)


def find_remains(prefix: str | os.PathLike[str]) -> Remains | None:
    """What an interrupted build left at a prefix; None where there is no journal. Changes nothing.

    A journal that only says that a whole shard is scratch, or that a shard is being removed, is none.

    Raises:
        CorruptShardError: the journal's head is torn, or it says that the files are complete and they are not.
        FormatError: a living writer is at work here, or what was interrupted is a copy or a rebuild.
    """
    paths = ShardPaths.of(prefix)
    with contextlib.suppress(FileNotFoundError), locked_journal(paths, shared=True):
        head = read_journal(paths)
        return None if is_scratch(paths) or (head is not None and head.work == "removal") else read_remains(paths)
    return None


def read_remains(paths: ShardPaths) -> Remains:
    """As ``find_remains``, for whoever holds the lock."""
    if (head := Head.read(paths.journal)) is None:
        raise torn(paths.journal, "the journal's head is torn or changed")
    if head.done is not None:
        header = complete_header(paths)
        counts = header.num_packs, header.num_sequences, header.num_tokens
        return Remains(paths, head, *counts, counts[0], header.mask_dtype, os.path.getsize(paths.journal), True)
    require_build(paths, head)
    options = BuildOptions.decode(head.content, paths.journal)
    mask_dtype, recorded = options.mask_dtype, 0
    with open_regular(paths.journal) as stream:
        read_head(stream, paths.journal)
        nbytes = begin = stream.tell()
        for block in read_blocks(stream):
            nbytes = stream.tell()
            if block.kind == MASK:
                mask_dtype = _widened(block, paths)
            recorded += len(block.records) if block.kind == PACK else 0
        stream.seek(begin)
        counts = _on_disk(stream, paths, options.token_dtype, mask_dtype)
    return Remains(paths, head, *counts, recorded, mask_dtype, nbytes, False)


def _widened(block: Block, paths: ShardPaths) -> np.dtype[Any]:
    code = int(block.records[0, 0]) if len(block.records) else None
    if code not in MASK_DTYPES:
        raise CorruptShardError(
            paths.journal, 0, "J1", f"a MASK block with dtype code {code}; build again (--overwrite)"
        )
    return MASK_DTYPES[code]


def _on_disk(
    stream: BinaryIO, paths: ShardPaths, token_dtype: np.dtype[Any], mask_dtype: np.dtype[Any]
) -> tuple[int, int, int]:
    """Packs, sequences and tokens that lie wholly in the three data files; the stream is at the first block."""
    loss = paths.temporary(paths.loss)
    if mask_dtype == np.float32 and os.path.exists(loss + WIDENED):
        loss += WIDENED
    most_tokens = min(
        _nbytes(paths.temporary(paths.tokens)) // token_dtype.itemsize, _nbytes(loss) // mask_dtype.itemsize
    )
    most_sequences = _nbytes(paths.temporary(paths.starts)) // 4
    packs = sequences = tokens = 0
    for records in pack_records(stream):
        token_ends = tokens + np.cumsum(records[:, 0], dtype=np.int64)
        sequence_ends = sequences + np.cumsum(records[:, 1], dtype=np.int64)
        # Sums ascend, so where both fit all before it does.
        fit = int(((token_ends <= most_tokens) & (sequence_ends <= most_sequences)).sum())
        if fit:
            packs, tokens, sequences = packs + fit, int(token_ends[fit - 1]), int(sequence_ends[fit - 1])
        if fit < len(records):
            break
    return packs, sequences, tokens


def complete_header(paths: ShardPaths) -> Header:
    """The header of a build whose journal says DONE, once every file has the size it says, under either name.

    Raises:
        CorruptShardError: a file is missing or has another size.
    """
    path = paths.temporary(paths.seq_idx)
    if not os.path.lexists(path):
        path = paths.seq_idx
    raw = b""
    with contextlib.suppress(FileNotFoundError):
        raw = read_most(path, MAX_HEADER_NBYTES)
    header = Header.decode(raw, path)
    sizes = dict(zip(paths.data, (digest.nbytes for digest in header.digests), strict=True))
    for final, nbytes in (sizes | {paths.seq_idx: header.seq_idx_nbytes}).items():
        where = next((name for name in (paths.temporary(final), final) if os.path.lexists(name)), final)
        if (found := _nbytes(where)) != nbytes:
            raise CorruptShardError(
                where,
                min(found, nbytes),
                "F2",
                f"file has {found} bytes, expected {nbytes} by the header of {path}; the journal says that it is"
                " complete, so it was changed since: build it again with overwrite (--overwrite)",
            )
    return header


def _nbytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def recover(
    prefix: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda num_tokens: None,
) -> Header:
    """Publish the packs that an interrupted build left at a prefix.

    A build that was complete but for renames is finished, its content as it was meant. Of any other every pack is
    kept whose journal record is complete and whose data is there; rules are checked, counts and checksums taken anew.
    Its header says that it was rebuilt, and its JSON block holds ``recovered``: how many packs there are and how many
    the journal knew of. Memory stays at a few MiB. Until the new shard is complete and synced nothing of the remains
    is removed, so a recovery that is itself killed can be run again.

    Args:
        prefix: the path the five files will share.
        metadata: JSON object for the header; None takes what was known when the build began.
        overwrite: replace a shard that is at the prefix.
        progress: called with the tokens read since the last call.

    Returns:
        The header of the published shard.

    Raises:
        CorruptShardError: the journal's head is torn, or it says that files are complete which are not.
        FormatError: nothing to recover, a living writer, or a shard that may not be replaced.
    """
    paths = ShardPaths.of(prefix)
    try:
        publication = Publication.take_up(paths, overwrite=overwrite)
    except FileNotFoundError:
        raise FormatError(f"{paths.journal}: there is no journal, so there is nothing to recover from it") from None
    try:
        remains = read_remains(paths)
        if remains.done:
            return finish_publication(publication, overwrite=overwrite)
        check_free(paths, overwrite=overwrite)
        build = remains.build(publication)
        if not (kept := build.replay(remains.num_packs, progress)):
            raise FormatError(
                f"{paths.journal}: no complete pack had been written yet, so there is nothing to recover;"
                " build it again with overwrite (--overwrite)"
            )
        known = remains.build_options.metadata if metadata is None else metadata
        recovered = {"packs": kept, "packs_in_journal": remains.num_recorded}
        return build.publish({**known, "recovered": recovered}, rebuilt=True)
    finally:
        publication.close()


def finish_publication(publication: Publication, *, overwrite: bool) -> Header:
    """Take the last steps of a build whose journal says DONE."""
    paths = publication.paths
    header = complete_header(paths)
    # .seq.idx is renamed last: while it has its temporary name, the one beside it is of the shard to be replaced.
    if not overwrite and os.path.lexists(paths.temporary(paths.seq_idx)) and os.path.lexists(paths.seq_idx):
        check_free(paths, overwrite=False)
    publication.finish()
    return header


def adopt_remains(paths: ShardPaths) -> None:
    """Let a journal name the temporary files that lie beside it, all of which were copied here.

    Raises:
        FormatError: there is no journal, or a living writer is at work here.
    """
    try:
        Publication.take_up(paths, overwrite=False, copied=True).close()
    except FileNotFoundError:
        raise FormatError(f"{paths.journal}: there is no journal; copy it here with the .tmp files beside it") from None


def remove_remains(prefix: str | os.PathLike[str]) -> None:
    """Remove the journal and the temporary files of an interrupted build; a shard at the prefix stays.

    Raises:
        FormatError: a living writer is at work here.
    """
    drop_remains(ShardPaths.of(prefix))


class _Mark(NamedTuple):
    """A MARK block.

    Attributes:
        content: its JSON, checked.
        journal_nbytes: where the journal ends with it.
    """

    content: dict[str, Any]
    journal_nbytes: int


class _Part(NamedTuple):
    """What matters of a journal's block: the records of packs, uint32 [n, 2], or a mark."""

    records: NDArray[np.uint32]
    mark: _Mark | None


_NO_RECORDS = np.empty((0, 2), np.uint32)


class InterruptedBuild:
    """What an interrupted build left, under lock, and the way to go on with it.

    Nothing is changed before ``resume``: whoever finds that the work is not the same leaves it as it was found.

    Args:
        prefix: the path the five files would have shared.
        overwrite: whether the shard may replace another.

    Attributes:
        options: what the build was begun with.
        num_marks: marks that can be gone on from: all their packs are on disk.

    Raises:
        FormatError: there is no journal, its head is torn, or a living writer is at work here.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        paths = ShardPaths.of(prefix)
        try:
            publication = Publication.take_up(paths, overwrite=overwrite)
        except FileNotFoundError:
            raise FormatError(f"{paths.journal}: there is no journal, so there is nothing to go on from") from None
        self._publication: Publication | None = publication
        self._path = paths.journal
        try:
            self._remains = read_remains(paths)
            self.options: BuildOptions = self._remains.build_options
            self.num_marks = self._count_marks()
        except BaseException:
            self.close()
            raise

    def _count_marks(self) -> int:
        marks, packs = 0, 0
        for part in self._parts():
            packs += len(part.records)
            if packs > self._remains.num_packs:
                break
            marks += part.mark is not None
        return marks

    def _parts(self) -> Iterator[_Part]:
        with open_regular(self._path) as stream:
            read_head(stream, self._path)
            for block in read_blocks(stream):
                if block.kind == PACK:
                    yield _Part(block.records, None)
                elif block.kind == MARK and (content := _checked(block.json())) is not None:
                    yield _Part(_NO_RECORDS, _Mark(content, stream.tell()))

    @property
    def num_tokens(self) -> int:
        """Tokens that are left, some of them perhaps behind the last mark."""
        return self._remains.num_tokens

    def __enter__(self) -> InterruptedBuild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up the lock, unless ``resume`` has handed it on."""
        if self._publication is not None:
            self._publication.close()
            self._publication = None

    def states(self) -> Iterator[dict[str, Any]]:
        """What was given to ``mark``, in order, as far as it can be gone on from."""
        marks = (part.mark for part in self._parts() if part.mark is not None)
        return (mark.content["state"] for mark in islice(marks, self.num_marks))

    def verify(self, progress: Callable[[int], None] = lambda num_tokens: None) -> int:
        """Read all that is kept, and count only marks whose checksums it has from then on.

        Args:
            progress: called with the tokens read since the last call.

        Returns:
            ``num_marks``: 0 where there is nothing to go on from.
        """
        assert self._publication is not None
        while (held := self._replay(progress)) < self.num_marks:
            # Its counts and hashes are of more than what is kept: once more, and not so far.
            self._publication.close_files()
            self.num_marks = held
        return held

    def _replay(self, progress: Callable[[int], None]) -> int:
        """Take in what lies before ``num_marks`` marks; how many of them hold."""
        assert self._publication is not None
        self._build = self._remains.build(self._publication)
        held = 0
        parts = self._parts()
        while held < self.num_marks:
            part = next(parts)
            if part.mark is None:
                if not self._build.replay_records(part.records, progress):
                    break
            elif self._build.agrees(part.mark.content):
                self._last, held = part.mark, held + 1
            else:
                break
        return held

    def resume(self) -> ShardWriter:
        """Cut everything back to the last mark, and go on from there; after ``verify`` has found one."""
        assert self._publication is not None
        assert self.num_marks
        publication, content = self._publication, self._last.content
        self._build.cut_back(self._last.journal_nbytes, MASK_DTYPES[content["mask_dtype"]])
        writer = ShardWriter.take_up(publication, self._build, content["dropped_first_tokens"])
        self._publication = None
        return writer


def _checked(content: dict[str, Any] | None) -> dict[str, Any] | None:
    """A mark as ``Build.mark`` writes it, or None."""
    if (
        content is not None
        and isinstance(content.get("state"), dict)
        and isinstance(content.get("checksums"), list)
        and len(content["checksums"]) == 3
        and type(content.get("dropped_first_tokens")) is int
        and type(content.get("mask_dtype")) is int
        and content["mask_dtype"] in MASK_DTYPES
    ):
        return content
    return None
