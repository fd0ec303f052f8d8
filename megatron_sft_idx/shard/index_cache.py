"""Index files of remote shards, kept in a local folder.

A copy's name there is the checksum that the header knows its bytes by, so a shard that replaces another finds other
names, and equal shards share one copy wherever they lie. Copies are held to that checksum whenever they are opened: one
that was cut short or damaged is never read, and another is fetched beside it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path

from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError
from megatron_sft_idx.layout.header import FileDigest
from megatron_sft_idx.storage.hashing import has_digest
from megatron_sft_idx.storage.publish import Kind, new_file

__all__ = ["IndexCache"]

_VARIABLE = "SFT_IDX_CACHE"
_KIND = Kind("an index file of a shard", lambda path: False)
_Fetch = Callable[[], Iterable["bytes | memoryview"]]


class IndexCache:
    """A folder of index files by checksum; processes may share one.

    Args:
        folder: where; None for what ``SFT_IDX_CACHE`` names, else ``megatron-sft-idx`` in the user's cache folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = Path(folder or os.environ.get(_VARIABLE) or _users() / "megatron-sft-idx")

    def path(self, checksum: bytes, nbytes: int, fetch: _Fetch, *, source: str) -> str:
        """The local copy of some bytes, whole and checked.

        Args:
            checksum: their xxh3_128.
            nbytes: how many there are.
            fetch: gives them, piece by piece; called where there is no good copy.
            source: where they are from, for messages.

        Raises:
            CorruptShardError: what was fetched has another checksum (rule F3).
            FormatError: the folder cannot be written, or is full.
        """
        # Something else under the name may be anybody's: it is passed over.
        names = (f"{checksum.hex()}{f'.{number}' if number else ''}.index" for number in count())
        for local in map(self.folder.joinpath, names):
            if _is_good(local, checksum, nbytes):
                return str(local)
            if not os.path.lexists(local):
                break
        try:
            self._keep(local, checksum, nbytes, fetch, source)
        except _NoPlaceError as error:
            if not _is_good(local, checksum, nbytes):  # else another process's, which was faster
                raise self._useless(str(error)) from None
        except SFTIndexError:  # of the store, which may be an OSError too
            raise
        except OSError as error:
            raise self._useless(str(error.strerror)) from None
        return str(local)

    def _useless(self, reason: str) -> FormatError:
        return FormatError(
            f"{self.folder}: index files of remote shards cannot be kept here ({reason}); name another folder with"
            f" {_VARIABLE}, or --object-storage-cache-path in training"
        )

    def _keep(self, local: Path, checksum: bytes, nbytes: int, fetch: _Fetch, source: str) -> None:
        with _placing():
            new = new_file(local, _KIND, overwrite=False)
        with new:
            with contextlib.closing(new.open(durable=False)) as file:
                for piece in fetch():
                    file.write(piece)
            if not _is_good(Path(new.temporary), checksum, nbytes):
                raise CorruptShardError(
                    source, 0, "F3", f"checksum is not {checksum.hex()}, which the header expects; restore the file"
                )
            with _placing():
                new.publish()


class _NoPlaceError(Exception):
    """Nothing can be put at the place of a copy, or something has appeared there."""


@contextlib.contextmanager
def _placing() -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        raise _NoPlaceError(error) from None


def _is_good(path: Path, checksum: bytes, nbytes: int) -> bool:
    try:
        return has_digest(str(path), FileDigest(nbytes, checksum))
    except (OSError, FormatError):
        return False


def _users() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
