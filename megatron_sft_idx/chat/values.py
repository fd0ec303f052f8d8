"""The values of a row: JSON types, independent of the format of the file.

Absent keys
    A table has a null for each key that only other rows have, and so do JSON lines that were exported from a table. A
    null in an object of a row therefore means that its key is absent, in files of all formats. Nulls in JSON text,
    which no table filled in, stay: in arguments given as a string, and in a field that is typed as JSON.
Typed JSON
    Fields of Arrow's type ``arrow.json`` have the value of their parsed text.
Depth
    No row has more than ``MAX_DEPTH`` nested lists and objects, whatever its source, and neither has JSON text in a
    row. So recursion over a row stays far from Python's limit.
Undecoded values
    Tables can hold values that JSON cannot, such as times. ``Undecoded`` replaces such a value. It is an error only if
    something reads it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from megatron_sft_idx.chat.types import RowError

# Maximum nesting of lists and objects. Python's own limit of 1,000 calls allows several calls per level.
MAX_DEPTH = 128
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep; flatten it, or write it as text"

# Fields that are passed to a chat template as a whole, which may write any part of them.
_TOOLS = ("tools", "functions")
_OF_ROWS = frozenset({*_TOOLS, "chat_template_kwargs"})
_OF_CALLS = frozenset({"arguments", "parameters"})
# Types of values that need no conversion.
_SIMPLE = frozenset({str, int, float, bool})
_FLAT = _SIMPLE | {type(None)}


class JsonText(str):
    """The text of a field with the JSON type.

    Attributes:
        field: name of the field, with the names of its parents.
    """

    __slots__ = ("field",)
    field: str

    def __new__(cls, text: str, field: str) -> JsonText:
        """See ``str``."""
        made = super().__new__(cls, text)
        made.field = field
        return made


class Undecoded:
    """A value of a table that JSON cannot hold.

    It is neither text nor number, list or object, so code that reads the field rejects it. Writing it, also as part of
    something else, raises its error.

    Args:
        field: name of the field, with the names of its parents.
        reason: description of the value, as the end of a sentence that begins with the field.
        remedy: what the user can do.
        is_time: whether it is a point in time or a duration.
    """

    __slots__ = ("field", "is_time", "reason", "remedy")

    def __init__(self, field: str, reason: str, remedy: str, *, is_time: bool = False) -> None:
        self.field, self.reason, self.remedy, self.is_time = field, reason, remedy, is_time

    def error(self, expected: str = "") -> RowError:
        """Return the error for reading it."""
        wanted = f", expected {expected}" if expected else ""
        return RowError(f"{self.field} {self.reason}{wanted}; {self.remedy}")

    def __repr__(self) -> str:
        raise self.error()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.error()


class Binary(Undecoded):
    """Bytes in a table. Only images and audio may be bytes."""

    __slots__ = ("_array", "_at")

    def __init__(self, field: str, reason: str, remedy: str, array: Any, at: int) -> None:
        super().__init__(field, reason, remedy)
        self._array, self._at = array, at

    def read(self) -> bytes:
        """Return the bytes."""
        return bytes(self._array[self._at].as_py())


class _ReadAsWholeError(Exception):
    """An undecoded value is inside something that is passed on as a whole."""

    def __init__(self, value: Undecoded) -> None:
        super().__init__(value)
        self.value = value


def read_values(row: Any) -> tuple[Any, Mapping[str, int]]:
    """Return the row without absent keys and with typed JSON parsed, and counts of these changes by name.

    Tools, arguments and template variables that contain an undecoded value are replaced by that value. The row must not
    be deeper than ``MAX_DEPTH``.
    """
    if not isinstance(row, dict):
        return row, {}
    counts: Counter[str] = Counter()
    out = {}
    for key, given in row.items():
        if key in _OF_ROWS:
            value = _whole(given, counts, "nulls_in_tools" if key in _TOOLS else "")
        else:
            value = _read(given, counts, "", in_whole=False)
        if value is not None:
            out[key] = value
    return out, counts


def refuse_deep(value: Any) -> None:
    """Raise RowError if lists and objects are nested more than ``MAX_DEPTH`` levels deep."""
    if _is_deeper(value, MAX_DEPTH):
        fields = (
            [key for key, inner in value.items() if _is_deeper(inner, MAX_DEPTH - 1)] if type(value) is dict else []
        )
        what = f"{fields[0]!s:.40} is " if fields else ""
        raise RowError(what + _TOO_DEEP)


def _is_deeper(value: Any, limit: int) -> bool:
    level: dict[int, Any] = {id(value): value}
    for _ in range(limit):
        below: dict[int, Any] = {}  # by identity: a Python object may contain one list a thousand times, or itself
        for each in level.values():
            items: Iterable[Any]
            # Exact types first, because a check for Mapping is slow in Python.
            if type(each) is dict or isinstance(each, Mapping):
                items = each.values()
            else:
                items = each if isinstance(each, (list, tuple)) else ()
            below.update({id(item): item for item in items if type(item) not in _FLAT})
        if not below:
            return False
        level = below
    return True


def _whole(value: Any, counts: Counter[str], note: str) -> Any:
    """See ``_read``. The first undecoded value in it replaces the whole."""
    try:
        return _read(value, counts, note, in_whole=True)
    except _ReadAsWholeError as error:
        return error.value


def _read(value: Any, counts: Counter[str], note: str, *, in_whole: bool) -> Any:
    """Return the value without absent keys and with typed JSON parsed; ``note`` is the name for the count of nulls.

    Raises:
        _ReadAsWholeError: an undecoded value is ``in_whole``.
    """
    kind = type(value)
    if kind is dict:
        if _SIMPLE.issuperset(map(type, value.values())):  # true for most messages
            return value
        out = {}
        for key, item in value.items():
            if item is None:
                if note:
                    counts[note] += 1
            elif type(item) in _SIMPLE:
                out[key] = item
            elif not in_whole and key in _OF_CALLS and "name" in value:
                out[key] = _whole(item, counts, "nulls_in_arguments")
            else:
                out[key] = _read(item, counts, note, in_whole=in_whole)
        return out
    if kind is list:
        return [item if type(item) in _SIMPLE else _read(item, counts, note, in_whole=in_whole) for item in value]
    if kind is JsonText:
        try:
            value = parse_json(value.encode())
        except ValueError as error:
            reason = clause_of(error).replace("of the row", "of the text")
            value = Undecoded(value.field, f"has the type JSON, but is {reason}", "write it as JSON, or as a string")
    if in_whole and isinstance(value, Undecoded):
        raise _ReadAsWholeError(value)
    return value


# ---- JSON ----

_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
# The shortest integers that do not fit into 64 bits have 19 digits (those below -2**63).
_LONG_NUMBER = b"0" * 19


def parse_json(raw: bytes) -> Any:
    """Parse one JSON document. For a repeated key the last value counts, as in JSON libraries.

    Integers are kept at any size; orjson would round those beyond 64 bits to floats. Floats become doubles: ``1.10`` is
    later written as ``1.1``.

    Raises:
        ValueError: the text is not allowed by RFC 8259 (NaN, lone surrogates, invalid UTF-8), has numbers beyond the
            range of a double, or is deeper than ``MAX_DEPTH``; with the reason.
    """
    try:
        value = orjson.loads(raw)
        if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:
            refuse_deep(value)
        if _LONG_NUMBER in raw.translate(_DIGITS_TO_ZERO):
            value = json.loads(raw)
    except orjson.JSONDecodeError as error:
        if "limit" in error.msg:  # orjson's own, of 1,024 levels
            raise RowError(_TOO_DEEP) from None
        try:
            raw.decode()
        except UnicodeDecodeError as bad:
            reason = f"not valid UTF-8: {bad.reason} (byte {bad.start + 1} of the row); convert the file to UTF-8"
            raise ValueError(reason) from None
        reason = f"not valid JSON: {error.msg} (character {error.pos + 1} of the row)"
        if b"NaN" in raw or b"Infinity" in raw:
            reason += "; NaN and Infinity are not JSON, write null"
        raise ValueError(reason) from None
    except RowError:
        raise
    except ValueError as error:  # raised by json for integers of thousands of digits
        raise ValueError(f"cannot be parsed: {error}") from None
    return value


def clause_of(error: ValueError) -> str:
    """Return the reason why ``parse_json`` failed, to follow "is"."""
    reason = str(error)
    return reason if reason.startswith("not ") else f"not usable: {reason}"
