"""Ctrl-C and SIGTERM end a command within seconds, with exit code 128 + signal.

Python raises the exception of a signal in the main thread between bytecodes. Then ``with`` and ``finally`` clean up. A
long native call, or a read from a hanging file system, delays this. Therefore a second thread watches. If the main
thread takes too long, the second thread ends the process like SIGKILL. Every command that writes can be repeated after
a SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Time limits for the main thread to notice a signal, and then to clean up. Together they are below the 30 seconds after
# which most schedulers send SIGKILL.
_SECONDS_TO_NOTICE, _SECONDS_TO_CLEAN_UP = 3.0, 25.0


@contextmanager
def ending_on_signals(*, is_program: bool) -> Iterator[None]:
    """In this context SIGTERM raises SystemExit and Ctrl-C KeyboardInterrupt, or the process is ended.

    Args:
        is_program: whether the process exits after this context. The time limit for cleaning up then includes the
            interpreter's shutdown, which waits for threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noticed, left = threading.Event(), threading.Event()

    def notice(signum: int, _frame: FrameType | None) -> None:
        noticed.set()
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + signum)

    signals = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # shells make their background jobs ignore it
        signals.append(signal.SIGINT)

    def watch() -> None:
        while byte := os.read(reader, 1):
            if (signum := byte[0]) not in signals:  # libraries also have handlers
                continue
            if not (noticed.wait(_SECONDS_TO_NOTICE) and left.wait(_SECONDS_TO_CLEAN_UP)):
                _end_now(signum)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=watch, name="signals", daemon=True)
    handlers = {signum: signal.signal(signum, notice) for signum in signals}
    # The C handler of a signal writes the signal's number there, whatever the main thread is doing.
    earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if not (is_program and noticed.is_set()):
            left.set()
            os.close(writer)
            thread.join()
            os.close(reader)


def _end_now(signum: int) -> None:
    if (processes := sys.modules.get("multiprocessing")) is not None:
        for child in processes.active_children():
            child.kill()
    os.write(2, b"interrupted, before it could clean up\n")
    os._exit(128 + signum)
