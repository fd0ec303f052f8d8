"""Putting rebuilt files in their places: complete, synced and checked first, the damaged ones kept beside them."""

from __future__ import annotations

import contextlib
import os
import shutil
from types import TracebackType

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.shard.digests import digest_file
from megatron_sft_idx.storage import OutputFile, sync_folder

__all__ = ["DAMAGED", "Replacement"]

# Added to the name of a file whose place a rebuilt one takes.
DAMAGED = ".damaged"


class Replacement:
    """New files of one shard, written under temporary names and renamed together.

    A file that is replaced stays in its place until the new one is renamed over it, so a kill at any moment leaves
    what there was or what shall be, and in either case all that a second rebuild needs. Leaving the context removes
    what was not published.

    Args:
        paths: of the shard.
        dry_run: write nothing; the bytes go nowhere.
    """

    def __init__(self, paths: ShardPaths, *, dry_run: bool) -> None:
        self._paths, self._dry_run = paths, dry_run
        self._files: dict[str, OutputFile] = {}

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in list(self._files):
            self.drop(path)

    def create(self, path: str) -> OutputFile:
        """A new file for ``path``."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._paths.temporary(path))
        file = OutputFile(os.devnull if self._dry_run else self._paths.temporary(path), keep=self._dry_run)
        self._files[path] = file
        return file

    def drop(self, path: str) -> None:
        """Do without the new file for ``path``, where there is one."""
        if (file := self._files.pop(path, None)) is None:
            return
        file.close()
        if not self._dry_run:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.path)

    def check(self, header: Header) -> None:
        """FormatError where a new file reads back as something else than the header says."""
        digests = dict(zip(self._paths.data, header.digests, strict=True))
        for path, file in () if self._dry_run else self._files.items():
            if path == self._paths.seq_idx:
                with open(file.path, "rb") as stream:
                    good = Header.decode(stream.read(header.nbytes), file.path) == header
                arrays = digest_file(file.path, header.nbytes)
                good = good and arrays.checksum == header.arrays_checksum
            else:
                good = digest_file(file.path) == digests[path]
            if not good:
                raise FormatError(f"{file.path}: not what was written to it just now; check the disk, then run again")

    def publish(self) -> list[str]:
        """Sync the new files, keep the old ones under another name, and rename; ``.seq.idx`` last (rule W2).

        Returns:
            Paths under which the replaced files are kept.
        """
        order = [path for path in self._paths.all if path in self._files]
        if self._dry_run or not order:
            return []
        for path in order:
            self._files[path].sync()
        kept = [_keep(path) for path in order if os.path.lexists(path)]
        sync_folder(self._paths.folder)
        for path in order:
            os.rename(self._files[path].path, path)
            self._files.pop(path).close()
            sync_folder(self._paths.folder)
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
        shutil.copyfile(path, kept + ".tmp")
        os.rename(kept + ".tmp", kept)
    return kept
