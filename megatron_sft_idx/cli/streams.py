"""Standard streams that cannot fail a command by accident and that keep a line on one line, and readable errors.

Under cron and in batch jobs, a standard stream may be closed, be on a full disk, or be a terminal that hangs up. Python
then has None in place of the stream, or raises an error at every print. Also, the next opened file gets the number of
the closed descriptor, so everything that a library writes to descriptor 2 ends up in that file. Therefore ``main`` runs
inside ``standard_streams``: descriptors 0 to 2 are open, a failing stderr is never an error, and a failing stdout is an
error only for commands whose product is their output.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO, cast

from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.lines import EscapedLines, unescaped


def message_of(error: Exception) -> str:
    """Return an error in one line, without errno: ``a.bin: No space left``, ``a -> b: Is a directory``."""
    is_ours = isinstance(error, SFTIndexError)  # ShardNotFoundError is an OSError too, but has other arguments
    if isinstance(error, OSError) and not is_ours and error.filename:
        target = f" -> {error.filename2}" if error.filename2 else ""
        return f"{error.filename}{target}: {error.strerror}"
    return str(error)


def program_name() -> str:
    """Return the name with which the program was called: the short one, or else the long one."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    return name if name == "sft-idx" else "megatron-sft-idx"


def print_error(message: str) -> None:
    """Print an error to stderr, on one line."""
    print(f"{program_name()}: error: {message}", file=sys.stderr)


STDOUT, STDERR = "standard output", "standard error"


@dataclass
class Output:
    """The state of the output to one standard stream.

    Attributes:
        error: why output was last dropped; None if all was written.
        strict: whether to raise the first error, which stops work if its output cannot be written.
    """

    error: OSError | None = None
    strict: bool = False


class _LossyFile(io.FileIO):
    """A file that drops output which its descriptor rejects, and records the error; it raises it only if ``strict``."""

    def __init__(self, descriptor: int, name: str, output: Output) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._name, self._output = name, output

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # the pipe is full, and non-blocking
                select.select([], [self.fileno()], [])
        except OSError as error:
            error.filename = self._name
            is_first, self._output.error = self._output.error is None, error
            if self._output.strict and is_first:
                raise
            return memoryview(data).nbytes
        return written


@contextlib.contextmanager
def standard_streams() -> Iterator[Output]:
    """Replace ``sys.stdout`` and ``sys.stderr`` by ``EscapedLines`` on a ``_LossyFile``; restore them at the end.

    If a stream is not descriptor 1 or 2, such as that of a caller that captures output, ``EscapedLines`` writes to it.
    Yields the ``Output`` of stdout, which has an error from the beginning if stdout is closed.
    """
    outputs = Output(), Output()
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Reading from a closed stdin stays an error, instead of becoming an empty input.
            _to_devnull(number)
            if number == 1:
                outputs[0].error = OSError(
                    errno.EBADF, ("is closed, but the result of this command is printed there"), STDOUT
                )
    originals = sys.stdout, sys.stderr
    replacements = [_replacement(stream, number, outputs[number - 1]) for number, stream in enumerate(originals, 1)]
    escaped = [EscapedLines(unescaped(new or old)) for new, old in zip(replacements, originals, strict=True)]
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in escaped)
    try:
        yield outputs[0]
    finally:
        for number, (stream, replacement, output) in enumerate(zip(escaped, replacements, outputs, strict=True), 1):
            output.strict = False
            with contextlib.suppress(OSError, ValueError):  # from a caller's stream that fails or is closed
                stream.flush()
            if replacement is not None and output.error is not None:  # keep Python from retrying at exit
                _to_devnull(number)
        sys.stdout, sys.stderr = originals


def _to_devnull(number: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if null == number:
        os.set_inheritable(null, True)
    else:
        os.dup2(null, number)
        os.close(null)


def _replacement(stream: TextIO | None, number: int, output: Output) -> io.TextIOWrapper | None:
    """Return a stream on the descriptor ``number``; None if ``stream`` is open on something else."""
    try:
        if stream is not None and stream.fileno() != number:
            return None
    except (OSError, ValueError):  # no descriptor, or closed
        return None
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.flush()
    # Data may contain any character. One that the encoding of a terminal or file lacks is written as its number.
    return io.TextIOWrapper(
        io.BufferedWriter(_LossyFile(number, (STDOUT, STDERR)[number - 1], output)),
        encoding=getattr(stream, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=number == 2 or os.isatty(number),
    )
