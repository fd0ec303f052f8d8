"""Output for people, in which one line stays one line, even if it quotes arbitrary file names and data.

File names and data can contain line ends, terminal escape sequences, invisible characters that reorder or break lines,
and bytes that are not UTF-8. ``on_one_line`` replaces these with pictures or numbers. ``EscapedLines`` does the same
for everything printed to a stream, so commands can use plain ``print``. ``print_layout`` is for text whose line breaks,
tabs and colours are layout, and in which the data are already escaped. ``Shown`` and ``shown_by_fields`` define the
``repr`` of the classes of this package.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any, TextIO, TypeVar

_Kind = TypeVar("_Kind")

# A control character is shown as its picture. An invisible character that reorders or breaks lines (bidirectional
# controls, Unicode's own line ends) is shown by its number. PICTURES does not replace line ends and tabs.
PICTURES: dict[int, int | str] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_UNSEEN = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
PICTURES |= {code: f"<U+{code:04X}>" for code in _UNSEEN}
PICTURES |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}  # as Python prints a byte that is not UTF-8
_LINE_PICTURES = PICTURES | {9: 0x2409, 10: 0x240A}


def on_one_line(text: str) -> str:
    """Return a text with every control character, including line ends, replaced by its picture."""
    return text if text.isascii() and text.isprintable() else text.translate(_LINE_PICTURES)


def shortened(text: str, max_characters: int) -> str:
    """Shorten a text of unknown content and length, such as a shard's metadata, to one line."""
    text = on_one_line(text[: max_characters + 1])
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


def counted(count: int, unit: str, plural: str | None = None) -> str:
    """Return a number with its unit: ``1 pack``, ``2,000 packs``, ``2 copies``."""
    if count == 1:
        return f"1 {unit}"
    return f"{count:,} {plural or (unit[:-1] + 'ies' if unit.endswith('y') else unit + 's')}"


def found_unread(*prefixes: str) -> str:
    """Describe shards that already existed, whose files the command did not read, for a summary."""
    return (
        "already complete, with the same input and options; contents not checked: megatron-sft-idx verify --full"
        f" {shlex.join(prefixes)}"
    )


class Shown:
    """An object whose ``repr`` is one short line: ``<Name WHAT>``. ``_shown`` returns WHAT.

    ``repr`` never raises. An object that is closed, or whose constructor failed, shows only what is available.
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
    """Give a dataclass or named tuple a one-line ``repr`` that shows arrays and long collections only by their size.

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
            except Exception:  # a field that is not set yet, or whose own repr fails
                texts.append(f"{name}=?")
        return on_one_line(f"{type(self).__name__}({', '.join(texts)})")

    kind.__repr__ = show  # type: ignore[method-assign]
    return kind


def value_text(value: Any) -> str:
    """Return a value in the form used by ``shown_by_fields``."""
    if hasattr(value, "dtype") and hasattr(value, "shape") and value.shape != ():
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, memoryview) or (isinstance(value, bytes | bytearray) and len(value) > 60):
        return f"{memoryview(value).nbytes:,} bytes"  # of a file; repr would copy it
    if isinstance(value, (Mapping, Sequence, Set)) and len(text := repr(value)) > 80:
        return f"'{value[:60]}...'" if isinstance(value, str) else f"{type(value).__name__} of {len(value):,}"
    return text if isinstance(value, (Mapping, Sequence, Set)) else repr(value)


class EscapedLines:
    """A text stream that keeps each printed text on one line.

    ``print`` writes a text and then a separate line end, so line ends inside a text are data. If a text ends with a
    line end, the next text decides: before a separate line end it is data; otherwise it ends the line, as in logging's
    output.

    Args:
        stream: the underlying stream; methods that are not defined here are forwarded to it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._is_at_line_end = False  # whether the last text ended with a line end that is not written yet

    def write(self, text: str) -> int:
        """Write a text on one line, and return its length."""
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
        """Write the pending line end, if there is one, and flush the stream."""
        if self._is_at_line_end:
            self.stream.write("\n")
            self._is_at_line_end = False
        self.stream.flush()

    def writelines(self, texts: Any) -> None:
        """Write each text with ``write``."""
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def unescaped(stream: Any) -> Any:
    """Flush an ``EscapedLines`` and return its underlying stream, for layout. Return any other stream unchanged."""
    if not isinstance(stream, EscapedLines):
        return stream
    stream.flush()
    return stream.stream


def joined(lines: Iterable[str]) -> str:
    """Join lines to one text for ``print_layout``, each on one line."""
    return "\n".join(map(on_one_line, lines))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines, each on one line."""
    for line in lines:
        print(on_one_line(line), flush=True)


def print_layout(text: str) -> None:
    """Print a text whose line breaks, tabs and colours are layout. The caller has already escaped the data in it."""
    print(text, file=unescaped(sys.stdout), flush=True)


def log_line(line: str) -> None:
    """Print a line about ongoing work to stderr."""
    print(on_one_line(line), file=sys.stderr, flush=True)


def _escape_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = on_one_line(record.getMessage()), ()
    return True


def get_logger(name: str) -> logging.Logger:
    """Return the logger of this name. Its messages stay on one line with any handler."""
    logger = logging.getLogger(name)
    if _escape_record not in logger.filters:
        logger.addFilter(_escape_record)
    return logger
