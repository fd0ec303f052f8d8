"""Standard streams that cannot fail a run by accident, and errors as people read them.

Under cron and in batch jobs a standard stream may be closed, lie on a full disk, or be a terminal that hangs up. Python
then has None where the stream was, or raises at every print; and the next file that is opened gets the number of the
closed descriptor, so that whatever a library writes to descriptor 2 ends up in that file. So ``main`` runs inside
``standard_streams``: descriptors 0 to 2 are open, what is printed to stderr is printed if possible, and a failed stdout
fails the commands that exist for what they print, and no others.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from megatron_sft_idx.errors import SFTIndexError

__all__ = ["STDOUT", "StandardOutput", "message_of", "print_error", "standard_streams"]


def message_of(error: Exception) -> str:
    """An error in one line; of the disk's errors, the path first and no number."""
    ours = isinstance(error, SFTIndexError)  # that no shard is there is an OSError too, with arguments of its own
    if isinstance(error, OSError) and not ours and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def print_error(message: str) -> None:
    """Print an error to stderr; messages quote names and metadata of anybody's, and a terminal obeys escape codes."""
    from megatron_sft_idx.inspect.text import PICTURES

    print(f"megatron-sft-idx: error: {message.translate(PICTURES)}", file=sys.stderr)


STDOUT, STDERR = "standard output", "standard error"


class _Stream(io.FileIO):
    """A descriptor that takes everything: what cannot be written is dropped, and the reason is kept.

    Attributes:
        error: why something was dropped; None where nothing was.
        failing: whether the last write was dropped.
        strict: raise the first error too, so that work whose product nobody receives ends early.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._what = name
        self.error: OSError | None = None
        self.failing = self.strict = False

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # somebody made the pipe non-blocking, and it is full
                select.select([], [self.fileno()], [])
        except OSError as error:
            error.filename = self._what
            first, self.error, self.failing = self.error is None, error, True
            if self.strict and first:
                raise
            return memoryview(data).nbytes
        self.failing = False
        return written


class StandardOutput:
    """What ``main`` knows of stdout.

    Args:
        stream: None where stdout is not a descriptor but an object of the caller's, whose errors are raised as usual.
        closed: whether there was no stdout when the program began.
    """

    def __init__(self, stream: _Stream | None, *, closed: bool) -> None:
        self._stream, self._closed = stream, closed

    def begin(self, *, product: bool) -> None:
        """Before the work of a command; ``product``: it exists for what it prints.

        Raises:
            OSError: there is no stdout to print the product to.
        """
        if product and self._closed:
            raise OSError(errno.EBADF, "closed, and what this command prints is its product", STDOUT)
        if self._stream is not None:
            self._stream.strict = product

    def finish(self, *, product: bool) -> OSError | None:
        """Flush what was printed; returns the error with which some of it was lost.

        Raises:
            OSError: what was lost is the product.
        """
        sys.stdout.flush()
        lost = self._stream.error if self._stream else None
        if product:
            self.begin(product=product)
            if lost is not None:
                raise lost
        return lost


@contextlib.contextmanager
def standard_streams() -> Iterator[StandardOutput]:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams whose failure is no accident, and put them back.

    Streams that are not descriptors 1 and 2, such as those of a caller that collects the output, stay as they are.
    """
    closed = [number for number in range(3) if not _is_open(number)]
    for number in closed:
        # Reading from a closed stdin goes on being an error, rather than an empty input.
        null = os.open(os.devnull, os.O_WRONLY)
        if null == number:
            os.set_inheritable(null, True)
        else:
            os.dup2(null, number)
            os.close(null)
    before = sys.stdout, sys.stderr
    out = _replacement(before[0], 1, STDOUT)
    err = _replacement(before[1], 2, STDERR)
    sys.stdout, sys.stderr = out or before[0], err or before[1]
    try:
        yield StandardOutput(_raw(out), closed=1 in closed)
    finally:
        for stream, number in ((out, 1), (err, 2)):
            _end(stream, number)
        sys.stdout, sys.stderr = before


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _replacement(stream: TextIO | None, number: int, name: str) -> TextIO | None:
    """A stream on the same descriptor; None where ``stream`` is something else."""
    try:
        if stream is not None and stream.fileno() != number:
            return None
    except (OSError, ValueError):  # no descriptor, or closed
        return None
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.flush()
    # Data hold any character; a terminal or file of another encoding gets those it lacks by number.
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(number, name)),
        encoding=getattr(stream, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=number == 2 or os.isatty(number),
    )


def _raw(stream: TextIO | None) -> _Stream | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Stream) else None


def _end(stream: TextIO | None, number: int) -> None:
    """Flush a replacement; where its descriptor takes no more, keep Python from trying again when it exits."""
    raw = _raw(stream)
    if stream is None or raw is None:
        return
    raw.strict = False
    stream.flush()
    if raw.failing:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
