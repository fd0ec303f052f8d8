"""Going on with a build that was interrupted, from the last mark in its journal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import MASK_DTYPES, ShardPaths
from megatron_sft_idx.layout.journal import MARK, PACK, BuildOptions, read_blocks, read_head
from megatron_sft_idx.shard.build import Build
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.shard.remains import read_remains
from megatron_sft_idx.shard.writer import ShardWriter
from megatron_sft_idx.storage import open_regular

__all__ = ["InterruptedBuild"]


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
        self._build = Build(self._publication, self.options, self._remains)
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
