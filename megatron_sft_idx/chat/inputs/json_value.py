"""One JSON document to a Python value, exactly."""

from __future__ import annotations

import json
from typing import Any

import orjson

__all__ = ["parse_json"]

_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
# The shortest integers outside 64 bits have 19 digits (below -2**63).
_LONG_NUMBER = b"0" * 19


def parse_json(raw: bytes) -> Any:
    """Parses one document; of repeated keys the last counts, as JSON libraries do.

    Integers are kept whatever their size (orjson alone would round those past 64 bits to floats). Floats
    become doubles: ``1.10`` is later written as ``1.1``.

    Raises:
        ValueError: with the reason, for anything RFC 8259 does not allow (NaN, lone surrogates, invalid
            UTF-8), numbers past a double's range and nesting deeper than the parser goes.
    """
    try:
        value = orjson.loads(raw)
        if _LONG_NUMBER in raw.translate(_DIGITS_TO_ZERO):
            value = json.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(_reason(raw, error)) from None
    except (RecursionError, ValueError) as error:
        # Only from json: nesting that orjson still takes, integers of thousands of digits.
        raise ValueError(f"cannot be parsed: {error}") from None
    return value


def _reason(raw: bytes, error: json.JSONDecodeError) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError as bad:
        return f"not valid UTF-8: {bad.reason} (byte {bad.start + 1} of the row); convert the file to UTF-8"
    reason = f"not valid JSON: {error.msg} (character {error.pos + 1} of the row)"
    if any(word in raw for word in (b"NaN", b"Infinity")):
        reason += "; NaN and Infinity are not JSON, write null"
    return reason
