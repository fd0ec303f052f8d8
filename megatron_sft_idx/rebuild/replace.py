"""Putting rebuilt files in their places: complete, synced and checked first, the damaged ones kept beside them."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.storage import OutputFile, open_regular, read_most
from megatron_sft_idx.storage.hashing import digest_file
from megatron_sft_idx.storage.publish import put

__all__ = ["DAMAGED", "Replacement"]

# Added to the name of a file whose place a rebuilt one takes.
DAMAGED = ".damaged"


class Replacement:
    """New files of one shard, published together; leaving the context removes what was not published.

    A file that is replaced keeps another name, so a kill at any moment leaves all that a second rebuild needs.

    Args:
        paths: of the shard.
        lock: of its journal; None for a dry run, whose bytes go nowhere.
    """

    def __init__(self, paths: ShardPaths, lock: int | None) -> None:
        self._paths = paths
        self._written: set[str] = set()
        self._new: Publication | None = None
        if lock is not None:
            only = (paths.starts, paths.idx, paths.seq_idx)
            self._new = Publication(paths, {}, work="rebuild", overwrite=True, only=only, lock=lock)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._new is not None:
            self._new.abandon()

    def create(self, path: str) -> OutputFile:
        """A new file for ``path``."""
        if self._new is None:
            return OutputFile(os.devnull, keep=True)
        self._written.add(path)
        return self._new.open(path)

    def drop(self, path: str) -> None:
        """Do without the new file for ``path``, where there is one."""
        self._written.discard(path)

    def check(self, header: Header) -> None:
        """FormatError where a new file reads back as something else than the header says."""
        digests = dict(zip(self._paths.data, header.digests, strict=True))
        for path in self._written:
            name = self._paths.temporary(path)
            if path == self._paths.seq_idx:
                good = Header.decode(read_most(name, header.nbytes), name) == header
                good = good and digest_file(name, header.nbytes).checksum == header.arrays_checksum
            else:
                good = digest_file(name) == digests[path]
            if not good:
                raise FormatError(f"{name}: not what was written to it just now; check the disk, then run again")

    def publish(self) -> list[str]:
        """Keep the old files under another name, then let the new ones take their places, ``.seq.idx`` last (rule W2).

        Returns:
            Paths under which the replaced files are kept.
        """
        if self._new is None or not self._written:
            return []
        for path in self._paths.all:
            if path not in self._written:
                self._new.drop(path)
        kept = [_keep(path) for path in self._paths.all if path in self._written and os.path.lexists(path)]
        self._new.publish()
        return kept


def _keep(path: str) -> str:
    """Give a file a second name, or a copy where the file system has no links; a rebuild that was killed may have."""
    number = 0
    while os.path.lexists(kept := path + DAMAGED + (f".{number}" if number else "")):
        if os.path.samefile(kept, path):
            return kept
        number += 1
    try:
        os.link(path, kept)
    except OSError:
        copy = OutputFile(f"{kept}.{os.getpid()}.tmp")
        with contextlib.closing(copy), open_regular(path) as file:
            while piece := file.read(1 << 20):
                copy.write(piece)
        put(copy.path, kept, None)
    return kept
