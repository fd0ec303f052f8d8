"""Small JSON documents shared by producers and consumers of live data, and the records in them.

A document is replaced as a whole. It may be from another version or malicious. So its size, syntax, version and the
type of every field are checked, and any problem is a FormatError.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import orjson

from megatron_sft_idx.errors import FormatError, SFTIndexError, UnsupportedVersionError
from megatron_sft_idx.live.waiting import UnsettledError, patiently
from megatron_sft_idx.storage import read_beginning
from megatron_sft_idx.storage.publish import Kind, head_of, write_control_file

VERSION = 1
# Far above any real size: one leftover for each of a million shards.
MAX_NBYTES = 64 << 20
_LARGEST = 2**62
# In a record: an integer of at least 1; a plain int is at least 0.
Positive: TypeAlias = Annotated[int, 1]

_R = TypeVar("_R", bound="Record")

# ---- records ----


class Record:
    """A dataclass that is written as JSON, and checked against its annotations when it is read.

    Fields can be integers, texts, bools, literals, any of these or None, plain objects (``dict[str, Any]``), other
    records, and tuples of integers or records.
    """

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain values for ``parse``."""
        values: dict[str, Any] = orjson.loads(orjson.dumps(self))
        return values

    def contradiction(self) -> tuple[str, Any, str] | None:
        """Return a field that contradicts the others (name, value and expected value), or None."""
        return None

    @classmethod
    def parse(cls: type[_R], path: str, content: Any, where: str = "") -> _R:
        """Parse the plain values ``content`` from the document at ``path``, or from its field ``where``.

        Raises:
            FormatError: a field is missing, has another type, or contradicts others.
        """
        if not isinstance(content, dict):
            raise _wrong(path, where.rstrip("."), content, "an object")
        record = cls(**{name: _value(hint, path, where + name, content.get(name)) for name, hint in _hints(cls)})  # type: ignore[arg-type]
        if (found := record.contradiction()) is not None:
            raise _wrong(path, where + found[0], *found[1:])
        return record


@cache
def _hints(kind: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(entry.name, hints[entry.name]) for entry in dataclasses.fields(kind)]


def _value(hint: Any, path: str, name: str, value: Any) -> Any:
    """Return a value, checked against an annotation. FormatError: it has another type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None else _value(inner[0], path, name, value)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(path, name, value, "a list")
        numbered = ((f"{name}[{i}]" if isinstance(one, dict) else name, one) for i, one in enumerate(value))
        return tuple(_value(inner[0], path, place, one) for place, one in numbered)
    if isinstance(hint, type) and issubclass(hint, Record):
        return value if isinstance(value, hint) else hint.parse(path, value, f"{name}.")
    if hint is int or origin is Annotated:
        least = inner[1] if inner else 0
        right = type(value) is int and least <= value <= _LARGEST
        expected = f"a whole number of at least {least}"
    elif origin is Literal:
        right = value in inner
        expected = (" or " if len(inner) == 2 else " | ").join(inner)
    else:
        right = type(value) is (origin or hint)
        expected = {bool: "true or false", str: "a string", dict: "an object"}[origin or hint]
    if not right:
        raise _wrong(path, name, value, expected)
    return value


def _wrong(path: str, name: str, found: Any, expected: str) -> FormatError:
    return FormatError(
        f"{path}: {name} is {repr(found)[:80]}, expected {expected}; the file was written by another program, or by"
        " another version of megatron-sft-idx"
    )


# ---- documents ----


def require_version(path: str, content: dict[str, Any], version: int = VERSION) -> None:
    """Raise UnsupportedVersionError for another version of a document; FormatError if it has no version."""
    if _value(int, path, "version", content.get("version")) != version:
        raise UnsupportedVersionError(path, content["version"], [version])


# The beginning of all documents of this package.
_BEGIN = b'{"version":'


def _begins_as_ours(data: bytes) -> bool:
    return bool(data) and (data.startswith(_BEGIN) or _BEGIN.startswith(data))


def read_document(path: str) -> dict[str, Any] | None:
    """Return the content of the document at ``path``; None if it does not exist. Reads through ``patiently``.

    Raises:
        FormatError: something else is there, or the document is too large, incomplete or of another version.
        SFTIndexError, OSError: it is unreadable.
    """
    try:
        return patiently(path, lambda: look_at_document(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def look_at_document(path: str) -> dict[str, Any]:
    """Read a document once.

    Raises:
        UnsettledError: it is incomplete, and may be complete at the next attempt.
        FormatError, OSError: see ``read_document``; FileNotFoundError or NotADirectoryError if it does not exist.
    """
    try:
        data = read_beginning(path, MAX_NBYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.islink(path):
            raise
        raise FormatError(f"{path}: a broken symbolic link, expected a file or nothing; remove it") from None
    except IsADirectoryError:
        raise FormatError(f"{path}: a folder, expected a file; remove it") from None
    if len(data) > MAX_NBYTES:
        raise FormatError(f"{path}: more than {MAX_NBYTES} bytes, which is too large for this kind of file; remove it")
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        # An incomplete document is empty, begins like all documents, or has zeros in the part not written yet.
        is_torn = data[:1] in (b"", b"\0") or _begins_as_ours(data)
        raise (UnsettledError if is_torn else FormatError)(
            f"{path}: not a JSON document ({error.msg} at character {error.pos + 1}): it is damaged, or was written by"
            " another program; restore it from a copy, or create the folder again"
        ) from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: expected a JSON object, found {type(content).__name__}")
    require_version(path, content)
    return content


def write_document(path: str, record: Record, what: str) -> None:
    """Replace the document at ``path`` durably and as a whole. If there are several writers, the last one wins.

    An incomplete document of this package is also replaced.

    Raises:
        FormatError: the path has something that is not a document of this kind; ``what`` is its name in messages.
        SFTIndexError, OSError: an error of the disk.
    """

    def recognize(found: str) -> bool:
        try:
            return record.parse(found, look_at_document(found)) is not None
        except UnsettledError:
            with contextlib.suppress(OSError):
                return _begins_as_ours(head_of(found, len(_BEGIN)))
        except (SFTIndexError, OSError):
            pass
        return False

    data = _BEGIN + orjson.dumps(VERSION) + b"," + orjson.dumps(record.to_json())[1:]

    def write() -> None:
        try:
            write_control_file(path, data, Kind(what, recognize), overwrite=True)
        except FormatError:  # another writer may have just replaced it, or it was temporarily unreadable
            write_control_file(path, data, Kind(what, recognize), overwrite=True)

    patiently(path, write)
