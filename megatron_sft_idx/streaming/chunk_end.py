"""The end of a folder of chunks whose producer writes none: declared once, by one process, for all ranks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.formats.jsonl_chunks import chunk_name, chunk_numbers, ends_whole

__all__ = ["EndDecider"]

logger = logging.getLogger("megatron_sft_idx.streaming")

_Sight = tuple[int, int, int]


class EndDecider(threading.Thread):
    """Declares the end when no chunk came and none has grown for a while; a thread, as its process trains meanwhile.

    Half a line at the end of the newest chunk is no end: those who wait for that chunk say what is wrong with it.

    Args:
        folder: of the chunks.
        seconds: without a change, on this process's own clock.
        declare: is told how many chunks there are, once.
    """

    def __init__(self, folder: str, seconds: float, declare: Callable[[int], None]) -> None:
        super().__init__(name="end of chunks", daemon=True)
        self._folder, self._seconds, self._declare = folder, seconds, declare
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look until the end is declared, or this is stopped."""
        last, since = None, time.monotonic()
        while not self._stopped.wait(min(1.0, self._seconds / 4)):
            try:
                sight = self._sight()
                if sight is None or sight != last:
                    last, since = sight, time.monotonic()
                elif time.monotonic() - since >= self._seconds and self._is_whole(sight):
                    self._declare(sight[0] + 1)
                    logger.info(
                        "%s: no chunk came and none has grown for %g s: the end is declared at %d chunks",
                        self._folder,
                        self._seconds,
                        sight[0] + 1,
                    )
                    return
            except FileNotFoundError:
                continue  # freed, or not there yet
            except (OSError, SFTIndexError) as error:
                # Whoever reads the folder meets what is wrong with it too, and stops.
                logger.error("%s: the end cannot be declared: %s", self._folder, error)
                return

    def stop(self) -> None:
        """Declare nothing from now on."""
        self._stopped.set()
        self.join()

    def _sight(self) -> _Sight | None:
        """Number, bytes and time of change of the newest chunk."""
        newest = max(chunk_numbers(self._folder), default=None)
        if newest is None:
            return None
        status = os.stat(os.path.join(self._folder, chunk_name(newest)))
        return newest, status.st_size, status.st_mtime_ns

    def _is_whole(self, sight: _Sight) -> bool:
        number, nbytes, _ = sight
        return nbytes > 0 and ends_whole(os.path.join(self._folder, chunk_name(number)))
