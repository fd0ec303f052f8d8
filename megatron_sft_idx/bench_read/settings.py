"""The ways of reading a shard that are measured."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sft_idx.storage import Advice, Backend

__all__ = ["SETTINGS", "Setting"]


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
        opened = f"Shard({', '.join(['prefix', *self._given])})"
        return f"{opened}, with schedule() ahead of use" if self.schedule else opened

    @property
    def training(self) -> str:
        """How training asks for it, whose loaders say what comes next by themselves."""
        return f"PackedSFTDatasetConfig(..., read=ReadOptions({', '.join(self._given)}))"

    @property
    def _given(self) -> list[str]:
        """Options that are not as they are by default."""
        given = [f"backend={self.backend!r}"] * (self.backend != "mmap")
        return given + [f"advice={self.advice!r}"] * (self.advice != "normal") + ["huge_pages=True"] * self.huge_pages


# From the simplest on: of settings that are as good as each other, the first one is recommended.
SETTINGS = (
    Setting(),
    Setting(advice="random"),
    Setting(advice="sequential"),
    Setting("pread"),
    Setting("pread", "random"),
    Setting(schedule=True),
    Setting(advice="random", schedule=True),
    Setting("pread", "random", schedule=True),
    Setting("process"),
    Setting("process", schedule=True),
    Setting("process", "random", schedule=True),
    Setting(huge_pages=True),
)
