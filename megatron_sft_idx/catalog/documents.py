"""Small JSON documents that are replaced while others read them: all of the old one, or all of the new one.

What is read was written by another program, perhaps of another version, perhaps not at all with good intentions:
size, syntax, version and the type of every field are checked, and anything wrong is a FormatError.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from megatron_sft_idx.errors import FormatError, SFTIndexError, UnsupportedVersionError
from megatron_sft_idx.storage import read_most
from megatron_sft_idx.storage.publish import Kind, write_file

__all__ = ["MAX_NBYTES", "VERSION", "Document", "kind_of_document", "read_document", "write_document"]

VERSION = 1
# Far above what is ever written: a leftover of every one of a million shards.
MAX_NBYTES = 64 << 20
_LARGEST = 2**62


class Document:
    """A JSON object whose fields are asked for by type.

    Args:
        path: names the document in errors.
        content: the object.
        where: the field that holds the object, where it is not the document itself; ends with a dot.
    """

    def __init__(self, path: str, content: Mapping[str, Any], where: str = "") -> None:
        self.path = path
        self._content, self._where = content, where

    def whole(self, name: str, least: int = 0) -> int:
        """A whole number, ``least`` or more."""
        value = self._content.get(name)
        if type(value) is not int or not least <= value <= _LARGEST:
            raise self.wrong(name, value, f"a whole number from {least} on")
        return value

    def whole_or_none(self, name: str, least: int = 0) -> int | None:
        """As ``whole``; None where the field is null or missing."""
        return None if self._content.get(name) is None else self.whole(name, least)

    def text(self, name: str) -> str:
        """A string."""
        value = self._content.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def text_or_none(self, name: str) -> str | None:
        """As ``text``; None where the field is null or missing."""
        return None if self._content.get(name) is None else self.text(name)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object, as it is."""
        value = self._content.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return value

    def document(self, name: str) -> Document:
        """An object, whose fields are asked for in turn."""
        return Document(self.path, self.mapping(name), f"{self._where}{name}.")

    def documents(self, name: str) -> list[Document]:
        """A list of objects."""
        values = self._list(name)
        for value in values:
            if not isinstance(value, dict):
                raise self.wrong(name, value, "a list of objects")
        return [Document(self.path, value, f"{self._where}{name}[{i}].") for i, value in enumerate(values)]

    def wholes(self, name: str) -> list[int]:
        """A list of whole numbers, 0 or more each."""
        values = self._list(name)
        for value in values:
            if type(value) is not int or not 0 <= value <= _LARGEST:
                raise self.wrong(name, value, "a list of whole numbers from 0 on")
        return values

    def wrong(self, name: str, found: Any, expected: str) -> FormatError:
        """The error about a field."""
        shown = repr(found)[:80]
        return FormatError(
            f"{self.path}: {self._where}{name} is {shown}, expected {expected}; whatever wrote this file is not"
            " megatron-sft-idx, or another version of it"
        )

    def _list(self, name: str) -> list[Any]:
        value = self._content.get(name)
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value


def read_document(path: str | os.PathLike[str]) -> Document | None:
    """The document at ``path``; None where there is none.

    Raises:
        FormatError: something else is there, or it is too large, torn or of another version.
        OSError: it cannot be read.
    """
    name = os.fspath(path)
    try:
        data = read_most(name, MAX_NBYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(name):
            raise FormatError(
                f"{name}: a symbolic link to nothing is here, expected a file or nothing; move it away"
            ) from None
        return None
    except IsADirectoryError:
        raise FormatError(f"{name}: a folder is here, expected a file; remove it") from None
    if len(data) > MAX_NBYTES:
        raise FormatError(f"{name}: more than {MAX_NBYTES} bytes, which no such file ever has; remove it")
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise FormatError(
            f"{name}: not a JSON document ({error.msg} at character {error.pos + 1}): damaged, or not written by"
            " megatron-sft-idx, which replaces it as a whole; restore it from a copy, or make its folder anew"
        ) from None
    if not isinstance(content, dict):
        raise FormatError(f"{name}: found a JSON {type(content).__name__}, expected an object")
    document = Document(name, content)
    if (version := document.whole("version")) != VERSION:
        raise UnsupportedVersionError(name, version, [VERSION])
    return document


def kind_of_document(name: str, parse: Callable[[Document], object]) -> Kind:
    """Documents of one sort, recognized by being read: ``parse`` raises FormatError for all others."""

    def recognize(path: str) -> bool:
        try:
            if (document := read_document(path)) is None:
                return False
            parse(document)
        except (SFTIndexError, OSError):
            return False
        return True

    return Kind(name, recognize)


def write_document(path: str | os.PathLike[str], content: Mapping[str, Any], kind: Kind) -> None:
    """Replace the document at ``path``, durably, all at once; of several writers the last one stays.

    Raises:
        FormatError: something else than a document of this kind is there.
        OSError: the disk says no.
    """
    data = orjson.dumps({"version": VERSION, **content})
    try:
        write_file(path, data, kind, overwrite=True)
    except FormatError:  # unless it was another writer's, which has come in between
        write_file(path, data, kind, overwrite=True)
