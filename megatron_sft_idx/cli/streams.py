"""Standard streams that cannot fail a command by accident, and errors as people read them.

Under cron and in batch jobs a standard stream may be closed, lie on a full disk, or be a terminal that hangs up. Python
then has None where the stream was, or raises at every print; and the next file that is opened gets the number of the
closed descriptor, so that whatever a library writes to descriptor 2 ends up in that file. So ``main`` runs inside
``standard_streams``: descriptors 0 to 2 are open, a failed stderr is never an error, and a failed stdout is an error
only of commands whose product is what they print.
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


def message_of(error: Exception) -> str:
    """An error in one line. One of the system begins with its path, or both paths of a rename, without a number."""
    is_ours = isinstance(error, SFTIndexError)  # ShardNotFoundError is an OSError too, but has other arguments
    if isinstance(error, OSError) and not is_ours and error.filename:
        target = f" -> {error.filename2}" if error.filename2 else ""
        return f"{error.filename}{target}: {error.strerror}"
    return str(error)


def print_error(message: str) -> None:
    """Print an error to stderr, without control characters: a quoted name could otherwise command the terminal."""
    from megatron_sft_idx.inspect.text import PICTURES

    print(f"megatron-sft-idx: error: {message.translate(PICTURES)}", file=sys.stderr)


STDOUT, STDERR = "standard output", "standard error"


class _LossyFile(io.FileIO):
    """A file that never fails: what cannot be written to its descriptor is dropped, and the reason kept.

    Attributes:
        error: the error for which output was dropped last; None if no output was dropped.
        failing: whether the last write was dropped.
        strict: whether the first error is raised, which ends work whose output nobody receives.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._name = name
        self.error: OSError | None = None
        self.failing = self.strict = False

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # somebody made the pipe non-blocking, and it is full
                select.select([], [self.fileno()], [])
        except OSError as error:
            error.filename = self._name
            first, self.error, self.failing = self.error is None, error, True
            if self.strict and first:
                raise
            return memoryview(data).nbytes
        self.failing = False
        return written


class StandardOutput:
    """The state of stdout, for ``main``.

    Args:
        stream: None where stdout is not a descriptor but an object of the caller's, whose errors are raised as usual.
        closed: whether there was no stdout when the program began.
    """

    def __init__(self, stream: _LossyFile | None, *, closed: bool) -> None:
        self._stream, self._closed = stream, closed

    def begin(self, *, product: bool) -> None:
        """Get ready for a verb, before its work; ``product``: whether the verb's product is what it prints.

        Raises:
            OSError: there is no stdout to print the product to.
        """
        if product and self._closed:
            raise OSError(errno.EBADF, "closed, and what this command prints is its product", STDOUT)
        if self._stream is not None:
            self._stream.strict = product

    def finish(self, *, product: bool) -> OSError | None:
        """Flush what was printed; returns the error by which output was lost, None if none was.

        Raises:
            OSError: output was lost, and it is the product.
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
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams of a ``_LossyFile`` each, and put them back at the end.

    Streams that are not descriptors 1 and 2, such as those of a caller that collects the output, stay as they are.
    """
    closed = []
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            closed.append(number)
            # Reading from a closed stdin goes on being an error, rather than an empty input.
            _to_devnull(number)
    originals = sys.stdout, sys.stderr
    replacements = [_replacement(stream, number) for number, stream in enumerate(originals, 1)]
    sys.stdout, sys.stderr = (new or old for new, old in zip(replacements, originals, strict=True))
    try:
        stdout: Any = replacements[0]
        yield StandardOutput(stdout.buffer.raw if stdout else None, closed=1 in closed)
    finally:
        for number, stream in enumerate(replacements, 1):
            if stream is not None:
                raw: _LossyFile = stream.buffer.raw  # type: ignore[attr-defined]
                raw.strict = False
                stream.flush()
                if raw.failing:  # keep Python from trying again when it exits
                    _to_devnull(number)
        sys.stdout, sys.stderr = originals


def _to_devnull(number: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if null == number:
        os.set_inheritable(null, True)
    else:
        os.dup2(null, number)
        os.close(null)


def _replacement(stream: TextIO | None, number: int) -> io.TextIOWrapper | None:
    """A stream on the descriptor ``number``; None if ``stream`` is open on something else."""
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
        io.BufferedWriter(_LossyFile(number, (STDOUT, STDERR)[number - 1])),
        encoding=getattr(stream, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=number == 2 or os.isatty(number),
    )
