"""Copies of the index files of remote shards, in a local folder that processes share.

A copy is named after the checksum of its content, so the copy of a replaced file is never used for the new file. A file
with such a name but other content is neither used nor removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from stat import S_ISREG

from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout import FileDigest
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.storage.local import HashedFile, has_digest, stamp_of
from megatron_sft_idx.storage.publish import Kind, new_control_file

_VARIABLE = "SFT_IDX_CACHE"
_REMEDY = f"choose another folder with {_VARIABLE}, or with --object-storage-cache-path in training"
_COPY_NAME = re.compile(r"([0-9a-f]{32})(\.\d+)?\.index")
# A copy is never replaced. The partial download of a killed process is recognised by its name.
_INDEX_COPY = Kind("an index file of a shard", lambda path: path.endswith(".index.tmp"))
_DAY_SECONDS = 86_400
# A copy that no process has opened for this long is removed.
_MAX_UNUSED_DAYS = 30
# Copies that had the right checksum when this process read them: path, digest, and the file's stamp at that time.
_checked_copies: set[tuple[Path, FileDigest, tuple[int, ...]]] = set()


def cached_copy(
    folder: str | None, digest: FileDigest, fetch: Callable[[], Iterable[bytes | memoryview]], source: str
) -> str:
    """Return the path of a complete, checked local copy of an index file. Fetch it first if the folder has none.

    Args:
        folder: folder of the copies. None uses ``SFT_IDX_CACHE``, or else a folder in the user's cache folder.
        digest: size and checksum of the index file.
        fetch: yields its bytes in chunks; called only if the folder has no good copy.
        source: origin of the bytes, for error messages.

    Raises:
        CorruptShardError: the fetched bytes have another checksum (rule F3).
        FormatError: the folder is not writable or full, or no folder is configured and the user has no home folder.
    """
    folder = folder or _default_folder()
    require_local(folder, "a cache of index files", _REMEDY)
    cache = Path(folder)
    # If a file with other content has the name of the copy, the copy takes the next name.
    names = (f"{digest.checksum.hex()}{f'.{number}' if number else ''}.index" for number in count())
    for copy in map(cache.joinpath, names):
        if _is_good(copy, digest):
            return str(copy)
        if not os.path.lexists(copy):
            break
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with new_control_file(copy, _INDEX_COPY, overwrite=False) as new:
            file = HashedFile(new.open())
            for chunk in fetch():
                file.write(chunk)
            if file.digest() != digest:
                detail = f"its checksum is not {digest.checksum.hex()}, the one in the header; restore it"
                raise CorruptShardError(source, None, "F3", detail)
            new.publish()
        _remove_unused(cache)
    except OSError as error:
        raise FormatError(
            f"{cache}: index files of remote shards cannot be kept here ({error.strerror}); {_REMEDY}"
        ) from None
    except FormatError:
        if not _is_good(copy, digest):  # otherwise another process has made the same copy in the meantime
            raise
    return str(copy)


def _default_folder() -> str:
    if named := os.environ.get(_VARIABLE):
        return named
    try:
        return os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "megatron-sft-idx")
    except RuntimeError as error:
        raise FormatError(f"index files of remote shards cannot be kept ({error}); {_REMEDY}") from None


def _is_good(path: Path, digest: FileDigest) -> bool:
    """Return whether a complete copy exists. A process reads a copy once, and again only if its stamp changed."""
    try:
        status = path.stat()
        checked = path, digest, stamp_of(status)
        if checked not in _checked_copies and not has_digest(str(path), digest):
            return False
    except (OSError, FormatError):
        return False
    if time.time() - status.st_mtime > _DAY_SECONDS:
        with contextlib.suppress(OSError):  # in a read-only folder, nothing is removed either
            os.utime(path)
    _checked_copies.add(checked)
    return True


def _remove_unused(cache: Path) -> None:
    """Remove the copies that no process has opened for a month."""
    for path in cache.iterdir():
        name = _COPY_NAME.fullmatch(path.name)
        with contextlib.suppress(OSError, FormatError):  # another process may have removed it already
            status = path.lstat()
            is_unused = S_ISREG(status.st_mode) and time.time() - status.st_mtime > _MAX_UNUSED_DAYS * _DAY_SECONDS
            # The name does not prove that a file is a copy. Its content must have the checksum.
            if name and is_unused and has_digest(str(path), FileDigest(status.st_size, bytes.fromhex(name[1]))):
                path.unlink()
