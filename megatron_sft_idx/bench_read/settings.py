"""The ways of reading a shard that are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_sft_idx.storage import Backend

__all__ = ["SETTINGS", "Advice", "Setting"]

Advice = Literal["normal", "sequential", "random"]


@dataclass(frozen=True)
class Setting:
    """Options of ``Shard``, and whether it is told which packs come next.

    Attributes:
        backend: how bytes are read.
        advice: what the kernel is told of the order.
        schedule: whether ``Shard.schedule`` is called.
        huge_pages: whether the kernel is asked to map by huge pages.
    """

    backend: Backend = "mmap"
    advice: Advice = "normal"
    schedule: bool = False
    huge_pages: bool = False

    @property
    def name(self) -> str:
        """For people, such as ``mmap, random, schedule``."""
        advice = [self.advice] * (self.advice != "normal")
        return ", ".join([self.backend, *advice, *["schedule"] * self.schedule, *["huge pages"] * self.huge_pages])

    @property
    def call(self) -> str:
        """How a program asks for it."""
        given = [f"backend={self.backend!r}"] * (self.backend != "mmap")
        given += [f"advice={self.advice!r}"] * (self.advice != "normal") + ["huge_pages=True"] * self.huge_pages
        opened = f"Shard({', '.join(['prefix', *given])})"
        return f"{opened}, with schedule() ahead of use" if self.schedule else opened

    def options(self, cache_nbytes: int | None) -> dict[str, Any]:
        """Keyword arguments of ``Shard``; ``cache_nbytes`` is for the backend that has a cache of its own."""
        given: dict[str, Any] = {"backend": self.backend, "advice": self.advice, "huge_pages": self.huge_pages}
        if self.backend == "process" and cache_nbytes is not None:
            given["cache_bytes"] = cache_nbytes
        return given


# From the simplest on: of settings that are as good as each other, the first one is recommended.
SETTINGS = (
    Setting(),
    Setting(advice="random"),
    Setting(advice="sequential"),
    Setting("pread"),
    Setting("pread", "random"),
    Setting("pread", "sequential"),
    Setting(schedule=True),
    Setting(advice="random", schedule=True),
    Setting("pread", schedule=True),
    Setting("pread", "random", schedule=True),
    Setting("process", schedule=True),
    Setting("process"),
    Setting(huge_pages=True),
)
