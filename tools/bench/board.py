"""The board: every bench in turn, one page of results, plots, and the figures that README quotes.

    python tools/bench/board.py                        # what make bench does; under 20 minutes on two cores
    python tools/bench/board.py --only shard batches   # only these; the others keep their earlier results
    python tools/bench/board.py --full                 # larger, and more rounds; hours
    python tools/bench/board.py --readme               # runs nothing: writes the page and README's blocks

Each bench runs in its own process and writes results/NAME.md and NAME.json; ``report.py`` describes how to add one. A
bench that lacks something on this machine, such as an object store, is noted as not run. If one fails, the others still
run, and the exit status is 1. Writes tools/bench/RESULTS.md, plots in tools/bench/results, and README's blocks
(``quotes.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plot import Dot, dots
from quotes import complaints, rewritten
from report import HEADER, NOT_RUN, RESULTS, Headline, machine, table

sys.path.append(str(Path(__file__).parents[1]))  # of medium.py
from medium import mount_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).resolve().parent / "RESULTS.md"
BENCHES = (
    *("whole_job", "packing", "tokenising", "scaling", "shard", "merge", "verify", "formats", "conversion"),
    *("batches", "columns", "backends", "cold_pack", "media", "media_training", "index_only", "pretraining"),
    *("many_shards", "live_catalog", "remote"),
)
MOST_SECONDS = {False: 900, True: 3 * 3600}  # one bench, and with --full
GB = 10**9


@dataclass(frozen=True)
class Result:
    """The results of one bench."""

    name: str  # of the bench
    kept: dict[str, Any]  # its JSON; empty where it leaves none
    text: str  # its Markdown

    @property
    def headlines(self) -> list[Headline]:
        """None where it was not run."""
        return [Headline(**one) for one in self.kept.get("headlines", ())]


# ---- running ----


def run(name: str, full: bool) -> str:
    """Run one bench; what to say of it: empty where it did its work, why it was not run, or FAILED and why."""
    command = [sys.executable, str(Path(__file__).parent / f"{name}.py"), *(["--full"] if full else [])]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile("w+") as log:
        try:
            done = subprocess.run(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=MOST_SECONDS[full], check=False
            )
        except subprocess.TimeoutExpired:
            return f"FAILED: it took more than {MOST_SECONDS[full]} s"
        log.seek(0)
        lines = log.read().splitlines() or [""]
    if done.returncode == NOT_RUN:
        forget(name)
        (RESULTS / f"{name}.json").write_text(json.dumps({"not_run": lines[-1]}) + "\n")
        return f"not run: {lines[-1]}"
    if done.returncode:
        print("\n".join(lines[-25:]), file=sys.stderr)
        return f"FAILED with exit status {done.returncode}"
    return ""


def forget(name: str) -> None:
    """Remove what an earlier run has left, plots included."""
    if (kept := RESULTS / f"{name}.json").exists():
        for plot in json.loads(kept.read_text()).get("plots", ()):
            (RESULTS / f"{plot}.svg").unlink(missing_ok=True)
    (RESULTS / f"{name}.md").unlink(missing_ok=True)
    kept.unlink(missing_ok=True)


def run_all(names: list[str], full: bool) -> list[str]:
    """Run every bench in turn and print a line for each. Return the names of the benches that failed."""
    begin, failed, where = time.monotonic(), [], surroundings()
    for place, name in enumerate(names, 1):
        print(f"[{place}/{len(names)}] {name} ...", end="", flush=True)
        started = time.monotonic()
        said = run(name, full)
        now = time.monotonic()
        minutes, seconds = divmod(round(now - begin), 60)
        print(f" {said or 'done'} ({now - started:.0f} s; {minutes} min {seconds:02d} s in all)", flush=True)
        if said.startswith("FAILED"):
            failed.append(name)
    about = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "seconds": round(time.monotonic() - begin)}
    about |= {"full": full, "benches": names, "machine": where}
    (RESULTS / "board.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return failed


# ---- where it ran ----


def commit() -> str:
    """The one that is checked out; empty outside of git."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def surroundings() -> list[str]:
    """Processor, memory, disk, kernel, Python, and what else runs now."""
    pages, mount = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), mount_of(tempfile.gettempdir())
    return [
        machine(),
        f"{pages / GB:.0f} GB of memory",
        f"temporary files on {mount.filesystem} ({mount.source})",
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}",
        f"load {os.getloadavg()[0]:.1f} when it began",
    ]


# ---- the page ----


def results() -> list[Result]:
    """Return the results of all benches that were ever run, in the order of the board."""
    found = []
    for name in BENCHES:
        kept, text = RESULTS / f"{name}.json", RESULTS / f"{name}.md"
        if kept.exists() or text.exists():
            about = json.loads(kept.read_text()) if kept.exists() else {}
            found.append(Result(name, about, text.read_text() if text.exists() else ""))
    return found


def short_table(found: list[Result]) -> list[str]:
    """Return one line per capability. The last column links to the bench."""
    rows = [
        (*headline.row(), f"[{result.name}](#{result.name})")
        for result in found
        for headline in result.headlines
        if headline.short
    ]
    return table((*HEADER, "bench"), rows)


def sections(found: list[Result]) -> Iterator[str]:
    """Every bench's page, one level down."""
    for result in found:
        yield f"## {result.name}\n"
        if reason := result.kept.get("not_run"):
            yield f"Not run: {reason}\n"
            continue
        title, _, text = result.text.partition("\n")
        yield f"**{title.removeprefix('# ')}**\n"
        demoted = re.sub(r"^## ", "### ", text.strip(), flags=re.MULTILINE)
        yield re.sub(r"\]\((\w+\.svg)\)", r"](results/\1)", demoted) + "\n"


def page(found: list[Result]) -> str:
    """Return RESULTS.md, made only from the files in ``results``."""
    about = json.loads((RESULTS / "board.json").read_text())
    ran = "every bench" if len(about["benches"]) == len(BENCHES) else ", ".join(about["benches"])
    lines = [
        "# Results",
        "",
        "`make bench` writes this page: do not edit it. A peer runs beside us in the same run, in turns; figures are"
        " medians of the rounds. *Times better* is above 1 where ours is faster, or takes less: the median of the"
        " ratios of single rounds, and beside it the least and the greatest of them.",
        "",
        f"Last run: {about['date']}, commit {about['commit']}, {ran}{', --full' if about['full'] else ''} in"
        f" {about['seconds'] / 60:.0f} minutes; {'; '.join(about['machine'])}.",
        "",
        *short_table(found),
        "![Times better than the peer, one line a capability](results/overview.svg)",
        "",
        *sections(found),
    ]
    return "\n".join(lines).rstrip() + "\n"


def overview(found: list[Result]) -> str:
    """The short table, drawn."""
    rows = [
        Dot(one.what.replace("`", ""), [one.low, one.ratio, one.high], True, f"beside {one.peer.replace('`', '')}")
        for result in found
        for one in result.headlines
        if one.short and one.low is not None and one.ratio is not None and one.high is not None
    ]
    return dots(
        "Beside each peer, one line a capability", "times better than the peer", rows, more=True, log=True, one=True
    )


def write() -> list[str]:
    """The page, the plot, and the blocks of README and docs; what they quote that is in no row."""
    found = results()
    (RESULTS / "overview.svg").write_text(overview(found), encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")
    rows = {(result.name, one.key): one for result in found for one in result.headlines}
    said = []
    for place in quoting():
        text, missing = rewritten(place.read_text(encoding="utf-8"), rows, os.path.relpath(PAGE, place.parent))
        place.write_text(text, encoding="utf-8")
        said += [f"{place.name}: {complaint}" for complaint in (*missing, *complaints(text, PAGE.read_text()))]
    return said


def quoting() -> list[Path]:
    """README and the pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHES, metavar="NAME", help=f"some of {', '.join(BENCHES)}")
    parser.add_argument("--full", action="store_true", help="larger, and more rounds")
    parser.add_argument("--readme", action="store_true", help="run nothing, write the page and README's blocks")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    failed = [] if options.readme else run_all(options.only or list(BENCHES), options.full)
    for complaint in write():
        print(complaint, file=sys.stderr)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the page keeps what they found before")


if __name__ == "__main__":
    main()
