"""Progress of long work: a bar on a terminal or in a notebook, else lines of text, with rate and remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeAlias

from megatron_sft_idx.lines import log_line, on_one_line, unescaped

# Work calls these with the amount done since the last call, never with a sum. Advance takes units, such as bytes;
# Update takes units and items, such as tokens and packs.
Advance: TypeAlias = Callable[[int], None]
Update: TypeAlias = Callable[[int, int], None]
# Work with several stages calls this when a stage begins, with its name, as a verb, and its total in units. The
# returned context manager is the stage, and provides its Advance.
Watch: TypeAlias = Callable[[str, int], AbstractContextManager[Advance]]


@contextmanager
def unwatched(_stage: str, _total: int) -> Iterator[Advance]:
    """The ``Watch`` that shows nothing."""
    yield lambda units: None


def _bar_kind() -> Any:
    """Return the class of progress bars for a terminal or for a notebook that shows widgets, else None."""
    is_terminal = sys.stderr.isatty()
    if not is_terminal and "ipykernel" not in sys.modules:
        return None
    from tqdm import auto, autonotebook, std  # not needed by code that only uses the types

    return auto.tqdm if is_terminal or autonotebook.tqdm is not std.tqdm else None


class Progress:
    """Shows the progress of one stage.

    Args:
        what: the stage, as a verb: ``tokenising``.
        total: total number of units.
        unit: name of the units; ``B`` is shown in powers of 1024, others of 1000.
        log_interval: number of items between two lines without a terminal or notebook; 0 to show nothing.
        items: name of the items, which are counted next to the units.
    """

    def __init__(self, what: str, total: int, *, unit: str, log_interval: int, items: str) -> None:
        self._what, self._total, self._unit, self._items = what, total, unit, items
        self._interval, self._divisor = log_interval, 1024 if unit == "B" else 1000
        self._units = self._num_items = self._logged = 0
        self._earlier = (0, 0)
        self._begin = time.monotonic()
        self._bar: Any = None
        if log_interval and (kind := _bar_kind()) is not None:
            self._bar = kind(
                total=total,
                unit=unit,
                unit_scale=True,
                unit_divisor=self._divisor,
                desc=on_one_line(what),
                smoothing=0.1,
                file=unescaped(sys.stderr),  # a bar moves the cursor
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None and self._interval and self._logged < self._num_items and self._logged:
            self._log()

    def count_earlier(self, units: int, items: int) -> None:
        """Count work of an earlier job, which is part of the total but not of the rate."""
        self._earlier = self._earlier[0] + units, self._earlier[1] + items
        self.update(units, items)

    def update(self, units: int, items: int) -> None:
        """Count ``units`` more of the total, and the corresponding ``items``."""
        self._units += units
        self._num_items += items
        if self._bar is not None:
            self._bar.update(units)
            self._bar.set_postfix_str(f"{self._num_items:,} {self._items}")
        elif self._interval and self._num_items >= self._logged + self._interval:
            self._logged = self._num_items
            self._log()

    def advance(self, nbytes: int) -> None:
        """Count ``nbytes`` more, if units are bytes and items MiB."""
        self.update(nbytes, (self._units + nbytes >> 20) - (self._units >> 20))

    def _log(self) -> None:
        from tqdm import tqdm

        seconds = max(time.monotonic() - self._begin, 1e-9)
        units, items = self._units - self._earlier[0], self._num_items - self._earlier[1]
        rate = units / seconds
        share = 100 * self._units / self._total if self._total else 100.0
        line = f"{self._what}: {self._num_items:,} {self._items}, {share:.1f}%"
        if not units:  # all of it is work of an earlier job, so there is no rate yet
            log_line(f"{line}, from an earlier run")
            return
        time_left = tqdm.format_interval((self._total - self._units) / rate)
        # If items are the units, one rate is enough.
        second = "" if units == items else f" {tqdm.format_sizeof(rate, self._unit, self._divisor)}/s,"
        log_line(f"{line}, {items / seconds:,.0f} {self._items}/s,{second} {time_left} left")


def show_progress(log_interval: int) -> Watch:
    """Return the ``Watch`` that shows stages whose units are bytes; ``log_interval`` is in MiB."""

    @contextmanager
    def watch(what: str, total: int) -> Iterator[Advance]:
        with Progress(what, total, unit="B", log_interval=log_interval, items="MiB") as progress:
            yield progress.advance

    return watch
