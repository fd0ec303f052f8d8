"""What one library can do with one bucket, a single attempt at a time.

A transport translates between its library and four failures, which say what whoever called can do; retrying, counting
bytes and wording errors for people are the store's (``store``), once for all libraries.

Failures carry a status or the name of an exception, never a library's own message: those may quote request headers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

__all__ = ["Beyond", "Changed", "Denied", "Failure", "Missing", "ObjectInfo", "Refused", "Temporary", "Transport"]


class ObjectInfo(NamedTuple):
    """An object without its content.

    Attributes:
        key: inside its bucket.
        nbytes: its size.
        etag: differs where the content does; without quotes.
    """

    key: str
    nbytes: int
    etag: str


class Failure(Exception):  # noqa: N818 - it never reaches a caller
    """What came of a request instead of an answer; its text is a status or the name of an exception."""


class Temporary(Failure):
    """No answer, or half of one: the same request may do next time."""


class Missing(Failure):
    """There is no such object, or no such bucket."""


class Denied(Failure):
    """The credentials are not accepted, are not enough, or there are none."""


class Changed(Failure):
    """The object is another one than the etag names."""


class Beyond(Failure):
    """The object ends before the range begins."""


class Refused(Failure):
    """Any other answer, which the same request would get again."""


class Transport(Protocol):
    """One library on one bucket; threads may share one, processes may not."""

    conditional: bool
    """Whether ``get`` holds the object to the etag. Where not, the store asks for the etag again after reading."""

    def head(self, key: str) -> ObjectInfo:
        """What is at a key."""
        ...

    def get(self, key: str, offset: int, nbytes: int, etag: str | None) -> bytes | memoryview:
        """Bytes of an object, possibly fewer than wanted; ``nbytes`` is above zero."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with a prefix, in any order."""
        ...
