"""The results of a bench for the board: tables, headlines and plots.

A bench is a function that adds its results to a ``Bench``. It is passed to ``run_bench``::

    def report(bench: Bench, folder: Path, options: Namespace) -> None:
        bench.section("Opening")
        bench.table(("packs", "ms"), rows)
        bench.headline("open", "opening a shard", [0.51, 0.52], "ms", peer="IndexedDataset", theirs=[0.50, 0.50])

    sizes = {"packs": (20_000, 50_000, "packs that are read")}
    run_bench("Shards compared with Megatron's", ("megatron-core",), report, sizes, rounds=(3, 9))

which in ``shard.py`` leaves ``results/shard.md`` to read, ``results/shard.json`` for the board, and plots.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
NOT_RUN = 77  # exit status of a bench that cannot run here, as test harnesses have it
LARGER = {"µs": "ms", "ms": "s", "MB": "GB"}
HEADER = ("what", "ours", "beside", "theirs", "times better", "least to most")


def machine() -> str:
    """Processor and cores."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown CPU")
    return f"{model}, {os.cpu_count()} cores"


def not_run(reason: str) -> NoReturn:
    """End a bench that lacks something; the board quotes the reason and keeps no older result."""
    print(reason, file=sys.stderr)
    raise SystemExit(NOT_RUN)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table, and an empty one."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, *rows)]
    return [lines[0], "|---" * len(header) + "|", *lines[1:], ""]


def cells(forms: str, *values: float) -> list[str]:
    """Each value in its format: ``cells(".2f ,.0f", seconds, packs)``."""
    return [format(value, form) for form, value in zip(forms.split(), values, strict=True)]


def shown(value: float) -> str:
    """A figure as README quotes it: two digits that count, whole numbers from ten on."""
    if value == 0 or abs(value) >= 9.95:
        return f"{value:,.0f}"
    digits = 1
    while abs(value) < 0.995 * 10 ** (1 - digits):
        digits += 1
    return f"{value:.{digits}f}"


def quantity(value: float, unit: str) -> str:
    """A figure with its unit; times in the unit that makes it short."""
    while unit in LARGER and value >= 1000:
        value, unit = value / 1000, LARGER[unit]
    return f"{shown(value)} {unit}".rstrip()


@dataclass(frozen=True)
class Headline:
    """One figure that can be quoted, with or without the figure of a peer from the same run."""

    key: str  # by which README's blocks name it
    what: str  # was measured
    ours: float  # median of the rounds
    unit: str  # of both figures
    peer: str = ""  # the peer that was measured, if any
    theirs: float | None = None  # median of the same rounds
    # How many times better ours is (above 1: faster, or less); median of the ratios of single rounds.
    ratio: float | None = None
    low: float | None = None  # least ratio of a round
    high: float | None = None  # greatest ratio of a round
    short: bool = False  # whether it is a line of the short table

    def words(self) -> dict[str, str]:
        """Every part as it is shown and quoted."""
        ratio, low, high = (shown(x) if x is not None else "" for x in (self.ratio, self.low, self.high))
        return {
            "what": self.what,
            "ours": quantity(self.ours, self.unit),
            "number": shown(self.ours),
            "peer": self.peer,
            "theirs": quantity(self.theirs, self.unit) if self.theirs is not None else "",
            "ratio": ratio,
            "spread": f"{low} to {high}" if self.low != self.high else "",
        }

    def row(self) -> tuple[str, ...]:
        """Return the row of this headline in the table of headlines."""
        words = self.words()
        return tuple(words[part] for part in ("what", "ours", "peer", "theirs", "ratio", "spread"))


class Bench:
    """The results of one bench.

    Args:
        name: of the script, and of what it writes.
        title: in the reports.
        peers: distributions whose versions are noted.
        arguments: what the sizes of this run were.
    """

    def __init__(
        self, name: str, title: str, peers: Sequence[str] = (), arguments: argparse.Namespace | None = None
    ) -> None:
        self.name, self.title = name, title
        self.headlines: list[Headline] = []
        self._peers = {peer: found for peer in peers if (found := _version(peer))}
        self._arguments = {key: value for key, value in vars(arguments or argparse.Namespace()).items() if value}
        self._lines: list[str] = []
        self._plots: list[str] = []
        self._begin = time.monotonic()

    def section(self, title: str) -> None:
        """Begin a section."""
        self.lines([f"## {title}", ""])

    def say(self, text: str) -> None:
        """Add a paragraph."""
        self.lines([text, ""])

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table."""
        self.lines(table(header, rows))

    def lines(self, lines: Iterable[str]) -> None:
        """Add lines of Markdown; they are printed as they come."""
        for line in lines:
            print(line, flush=True)
            self._lines.append(line)

    def headline(
        self,
        key: str,
        what: str,
        ours: Sequence[float],
        unit: str,
        *,
        peer: str = "",
        theirs: Sequence[float] = (),
        more: bool = False,
        short: bool = False,
    ) -> None:
        """Note a figure that may be quoted.

        Args:
            key: unique in this bench.
            what: was measured.
            ours: one value per round.
            unit: of the values.
            peer: the peer that it is compared with.
            theirs: its values of the same rounds; or one value.
            more: whether more is better, as of rates; else less is.
            short: whether the short table has it.
        """
        if any(key == headline.key for headline in self.headlines):
            raise ValueError(f"{self.name}: two headlines are called {key}")
        mine = statistics.median(ours)
        if not theirs:
            self.headlines.append(Headline(key, what, mine, unit))
            return
        pairs = list(zip(ours, theirs, strict=True))
        ratios = [a / b if more else b / a for a, b in pairs]
        figures = (statistics.median(theirs), statistics.median(ratios), min(ratios), max(ratios))
        self.headlines.append(Headline(key, what, mine, unit, peer, *figures, short))

    def plot(self, name: str, svg: str) -> None:
        """Keep a plot, as ``results/NAME.svg``."""
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.svg").write_text(svg, encoding="utf-8")
        self._plots.append(name)

    def write(self) -> None:
        """Write ``results/NAME.md`` and ``results/NAME.json``."""
        seconds = time.monotonic() - self._begin
        peers = ", ".join(f"{name} {found}" for name, found in self._peers.items())
        sizes = " ".join(f"{key}={_plain(value)}" for key, value in self._arguments.items())
        about = [
            time.strftime("%Y-%m-%d"),
            machine(),
            f"Python {platform.python_version()}",
            peers,
            sizes,
            f"{seconds:.0f} s",
        ]
        head = [f"# {self.title}", "", "; ".join(part for part in about if part) + ".", ""]
        quoted = table(HEADER, [headline.row() for headline in self.headlines])
        images = [f"![{self.title}]({name}.svg)\n" for name in self._plots]
        RESULTS.mkdir(exist_ok=True)
        text = "\n".join([*head, *(quoted if self.headlines else []), *images, *self._lines]).rstrip() + "\n"
        (RESULTS / f"{self.name}.md").write_text(text, encoding="utf-8")
        kept: dict[str, Any] = {"title": self.title, "peers": self._peers, "plots": self._plots}
        kept |= {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds)}
        kept["headlines"] = [asdict(headline) for headline in self.headlines]
        (RESULTS / f"{self.name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


# ---- sizes ----


# How large a thing is for the board, which has minutes for all benches, and for --full; what it is, for --help.
Size = tuple[Any, Any, str]


def parse(documentation: str | None, sizes: Mapping[str, Size]) -> argparse.Namespace:
    """Parse the command line: every size is an option, and ``--full`` sets the sizes that are not given.

    Args:
        documentation: of the module.
        sizes: by name; a list is an option of several values.
    """
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="larger, and more often, than make bench has time for")
    for name, (board, full, what) in sizes.items():
        several = isinstance(board, list)
        kind = type(board[0] if several else board)
        about = f"{what} (default: {_plain(board)}; --full: {_plain(full)})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, nargs="+" if several else None, help=about)
    options = parser.parse_args()
    for name, (board, full, _) in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, full if options.full else board)
    return options


def run_bench(
    title: str,
    peers: Sequence[str],
    work: Callable[[Bench, Path, argparse.Namespace], None],
    sizes: Mapping[str, Size],
    rounds: tuple[int, int] | None = None,
) -> None:
    """Run a bench script: ``work`` measures in its own folder and adds its results.

    Args:
        title: in the reports.
        peers: distributions whose versions are noted.
        work: called with the bench, a folder and the sizes of this run.
        sizes: by name.
        rounds: how often things are measured, for the board and with ``--full``; a size too.
    """
    script: Any = sys.modules["__main__"]
    if rounds:
        sizes = {**sizes, "rounds": (*rounds, "rounds of which the median is taken")}
    options = parse(script.__doc__, sizes)
    bench = Bench(Path(script.__file__).stem, title, peers, options)
    with tempfile.TemporaryDirectory() as folder:
        work(bench, Path(folder), options)
    bench.write()
