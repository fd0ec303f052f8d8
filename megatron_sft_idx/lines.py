"""Text for people, in which one line stays one line, whatever file names and data it quotes.

A name or a text of the data can hold line ends, escape sequences that command a terminal, characters that reorder or
break a line unseen, and bytes that are no UTF-8. ``on_one_line`` shows these as pictures or numbers. ``EscapedLines``
does that to all that is printed to a stream, so that a verb just prints. ``print_layout`` is for text in which line
breaks, tabs and colours are layout and the data are escaped already. ``Shown`` and ``shown_by_fields`` make
the ``repr`` of the classes of this package.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any, TextIO, TypeVar

_Kind = TypeVar("_Kind")

# A control character is shown as its picture, and a character that reorders or breaks lines unseen (bidirectional
# controls, Unicode's own line ends) by its number. PICTURES leaves line ends and tabs alone.
PICTURES: dict[int, int | str] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_UNSEEN = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
PICTURES |= {code: f"<U+{code:04X}>" for code in _UNSEEN}
PICTURES |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}  # as Python prints a byte that is no UTF-8
_LINE_PICTURES = PICTURES | {9: 0x2409, 10: 0x240A}


def on_one_line(text: str) -> str:
    """A text with every control character, line ends included, as its picture."""
    return text if text.isascii() and text.isprintable() else text.translate(_LINE_PICTURES)


def shortened(text: str, max_characters: int) -> str:
    """A text of unknown content and length, such as a shard's metadata, on one line and cut."""
    text = on_one_line(text[: max_characters + 1])
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


class Shown:
    """An object whose ``repr`` is one short line: ``<Name WHAT>``, where ``_shown`` gives WHAT.

    It never raises. An object that is closed, or whose constructor failed, is shown as far as it is known.
    """

    __slots__ = ()

    def _shown(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        try:
            what = on_one_line(self._shown())
        except Exception:  # a debugger or a traceback must be able to show the object
            what = "not open"
        return f"<{type(self).__name__} {what}>"


def shown_by_fields(kind: type[_Kind]) -> type[_Kind]:
    """Give a dataclass or named tuple a ``repr`` on one line, with arrays and long collections by their sizes alone.

    Example:
        >>> import numpy as np
        >>> from typing import NamedTuple
        >>> @shown_by_fields
        ... class Places(NamedTuple):
        ...     starts: np.ndarray
        ...     names: list[str]
        >>> Places(np.zeros((2, 3)), ["a", "b"])
        Places(starts=float64 [2, 3], names=['a', 'b'])
    """
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else kind._fields  # type: ignore[attr-defined]

    def show(self: Any) -> str:
        texts = []
        for name in names:
            try:
                texts.append(f"{name}={value_text(getattr(self, name))}")
            except Exception:  # a field that was not set yet, or whose own repr fails
                texts.append(f"{name}=?")
        return on_one_line(f"{type(self).__name__}({', '.join(texts)})")

    kind.__repr__ = show  # type: ignore[method-assign]
    return kind


def value_text(value: Any) -> str:
    """A value as ``shown_by_fields`` shows it."""
    if hasattr(value, "dtype") and hasattr(value, "shape") and value.shape != ():
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, memoryview) or (isinstance(value, bytes | bytearray) and len(value) > 60):
        return f"{memoryview(value).nbytes:,} bytes"  # of a file, which its repr would copy
    if isinstance(value, (Mapping, Sequence, Set)) and len(text := repr(value)) > 80:
        return f"'{value[:60]}...'" if isinstance(value, str) else f"{type(value).__name__} of {len(value):,}"
    return text if isinstance(value, (Mapping, Sequence, Set)) else repr(value)


class EscapedLines:
    """A text stream that keeps every text that is printed on one line.

    ``print`` writes a text, and then a line end by itself. So line ends inside a text are data. Where a text ends with
    one, the next text decides: before a line end by itself it is data, else it ends a line, as logging writes them.

    Args:
        stream: what the lines are written to; methods that are not defined here are those of this stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._is_at_line_end = False  # whether a text that ended with a line end was the last, which is not written yet

    def write(self, text: str) -> int:
        """Write a text on one line; returns its length."""
        if self._is_at_line_end and text:
            self.stream.write(on_one_line("\n") if text == "\n" else "\n")
            self._is_at_line_end = False
        if text == "\n":
            self.stream.write(text)
        else:
            self._is_at_line_end = text.endswith("\n")
            self.stream.write(on_one_line(text.removesuffix("\n")))
        return len(text)

    def flush(self) -> None:
        """Write what was held back, and flush the stream."""
        if self._is_at_line_end:
            self.stream.write("\n")
            self._is_at_line_end = False
        self.stream.flush()

    def writelines(self, texts: Any) -> None:
        """Write each text as ``write`` does."""
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def unescaped(stream: Any) -> Any:
    """The stream below an ``EscapedLines``, flushed, for layout; any other stream as it is."""
    if not isinstance(stream, EscapedLines):
        return stream
    stream.flush()
    return stream.stream


def joined(lines: Iterable[str]) -> str:
    """Lines as one text for ``print_layout``, each on one line."""
    return "\n".join(map(on_one_line, lines))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines, each on one line."""
    for line in lines:
        print(on_one_line(line), flush=True)


def print_layout(text: str) -> None:
    """Print a text whose line breaks, tabs and colours are layout. Whoever made it has escaped the data in it."""
    print(text, file=unescaped(sys.stdout), flush=True)


def log_line(line: str) -> None:
    """Print a line about work that goes on to stderr."""
    print(on_one_line(line), file=sys.stderr, flush=True)


def _escape_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = on_one_line(record.getMessage()), ()
    return True


def get_logger(name: str) -> logging.Logger:
    """The logger of this name; its messages are put on one line, whichever handler writes them."""
    logger = logging.getLogger(name)
    if _escape_record not in logger.filters:
        logger.addFilter(_escape_record)
    return logger
