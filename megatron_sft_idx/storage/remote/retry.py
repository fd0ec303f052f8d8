"""Trying again: what for, how often, and when to stop."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage.remote.threads import is_ending
from megatron_sft_idx.storage.remote.transport import Temporary

__all__ = ["RetryPolicy"]

_T = TypeVar("_T")
_SECONDS = "SFT_IDX_STORAGE_SECONDS"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Back-off that doubles, with jitter, under a bound of the whole.

    Attributes:
        total_seconds: no attempt begins later than this after the first one.
        first_delay: seconds before the second attempt, at most.
        longest_delay: seconds between two attempts, at most.
    """

    total_seconds: float = 120.0
    first_delay: float = 0.1
    longest_delay: float = 5.0

    @classmethod
    def from_environment(cls) -> RetryPolicy:
        """The usual one, with the total bound that ``SFT_IDX_STORAGE_SECONDS`` names, where it does."""
        text = os.environ.get(_SECONDS, "")
        if not text:
            return cls()
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:
            raise FormatError(f"{_SECONDS}={text!r}: expected seconds, such as 120")
        return cls(total_seconds=seconds)

    def run(self, attempt: Callable[[], _T]) -> _T:
        """What ``attempt`` gives once it does not raise ``Temporary``.

        Raises:
            Temporary: the last one's, with the number of attempts and the time they took; any other failure at once.
        """
        begin, delay, attempts = time.monotonic(), self.first_delay, 0
        while True:
            attempts += 1
            if is_ending():
                raise Temporary("the process ends")
            try:
                return attempt()
            except Temporary as failure:
                spent = time.monotonic() - begin
                # Half of it is by chance, so that many readers do not come back together.
                pause = delay * random.uniform(0.5, 1)
                if spent + pause > self.total_seconds:
                    raise Temporary(f"{attempts} attempts in {spent:.1f} s, the last one: {failure}") from None
            time.sleep(pause)
            delay = min(2 * delay, self.longest_delay)
