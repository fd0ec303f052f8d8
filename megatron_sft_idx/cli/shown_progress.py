"""Progress in bytes, for verbs that copy them."""

from __future__ import annotations

from typing import Any

from megatron_sft_idx.storage.progress import Progress

__all__ = ["ShownProgress"]

_MIB = 1 << 20


class ShownProgress:
    """Progress as a person sees it, from sums of bytes; the total is known when the work begins."""

    def __init__(self, what: str, log_interval: int) -> None:
        self._what, self._interval = what, log_interval
        self._progress: Progress | None = None
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes are there."""
        if self._progress is None:
            self._progress = Progress(self._what, total, unit="B", log_interval=self._interval, items="MiB")
        self._progress.update(done - self._done, done // _MIB - self._done // _MIB)
        self._done = done

    def __enter__(self) -> ShownProgress:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._progress is not None:
            self._progress.__exit__(*error)
