"""What README quotes of the board: blocks that are written from the benches' rows, and the check that nothing else is.

A block of README lies between ``<!-- board: NAME -->`` and ``<!-- /board -->``. ``measured`` is the short table; every
other is ``readme/NAME.md`` with its fields filled in: ``{{batches/batch-arrow.ratio}}`` is a part of a headline of the
bench ``batches``, as ``Headline.words`` shows it. Figures outside of blocks are those that something else holds, such as
limits, sizes and what the tests check; ``HELD_ELSEWHERE`` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from report import Headline

__all__ = ["HELD_ELSEWHERE", "blocks", "complaints", "figures", "rewritten"]

TEMPLATES = Path(__file__).parent / "readme"
BLOCK = re.compile(r"(<!-- board: (\w+) -->\n)(.*?)(<!-- /board -->)", re.DOTALL)
FIELD = re.compile(r"\{\{(\w+)/([\w-]+)\.(\w+)\}\}")
LINK = re.compile(r"RESULTS\.md#(\w+)")
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNITS = (
    *("CPU s", "core hours", "hours", "minutes", "seconds", "milliseconds", "µs", "us", "ms", "s"),
    *("GB/s", "MB/s", "GB a CPU s", "M tokens a CPU s", "k tokens/s", "samples/s", "KB", "MB", "GB", "TB", "MiB"),
    *("GiB", "KiB", "times", "%"),
)
ANY_UNIT = "|".join(sorted(UNITS, key=len, reverse=True))
FIGURE = re.compile(rf"(?<![\w.,-])({NUMBER})(?: (?:to|/) ({NUMBER}))?(?: |(?=%))({ANY_UNIT})(?!\w)")
# Figures of README that no bench measures, as they stand there, and what holds them.
HELD_ELSEWHERE: dict[str, str] = {}


def blocks(readme: str) -> Iterator[tuple[str, str]]:
    """Name and text of every block."""
    for found in BLOCK.finditer(readme):
        yield found[2], found[3]


def rewritten(readme: str, rows: Mapping[tuple[str, str], Headline], measured: Sequence[str]) -> tuple[str, list[str]]:
    """README with all blocks written anew, and the fields for which there is no row; a block with such stays."""
    missing: list[str] = []

    def field(found: re.Match[str]) -> str:
        headline = rows.get((found[1], found[2]))
        words = headline.words() if headline else {}
        if found[3] not in words:
            missing.append(f"there is no {found[0]} to quote")
            return found[0]
        return words[found[3]]

    def block(found: re.Match[str]) -> str:
        before = len(missing)
        if found[2] == "measured":
            text = "\n".join(measured)
        else:
            text = FIELD.sub(field, (TEMPLATES / f"{found[2]}.md").read_text(encoding="utf-8"))
        return found[0] if len(missing) > before else f"{found[1]}{text.rstrip()}\n{found[4]}"

    return BLOCK.sub(block, readme), missing


def figures(text: str) -> Iterator[tuple[str, list[str], str]]:
    """Every quantity in a text that is not code: as it stands, its numbers, its unit."""
    for found in FIGURE.finditer(re.sub(r"`[^`\n]*`", "``", text)):
        yield found[0], [number for number in found.group(1, 2) if number], found[3]


def complaints(readme: str, page: str) -> list[str]:
    """What README says of speed, time or size that no row of the page says.

    Args:
        readme: its text.
        page: of the board, RESULTS.md.

    Returns:
        A line for each figure of a block that no row of the benches which that line, or else that block, links to has;
        and for each outside of blocks that is not listed in ``HELD_ELSEWHERE``.
    """
    parts = re.split(r"^## (\w+)\n", page, flags=re.MULTILINE)
    rows = {
        name: [line for line in text.splitlines() if line[:1] == "|"]
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    found = []
    for name, text in blocks(readme):
        for line in text.splitlines():
            benches = LINK.findall(line) or LINK.findall(text)
            lines = [row for bench in benches for row in rows.get(bench, ())]
            for figure, numbers, unit in figures(line):
                if not all(any(_holds(row, number, unit) for row in lines) for number in numbers):
                    found.append(f"block {name}: {figure!r} is in no row of {' or '.join(benches) or 'any bench'}")
    prose = re.sub(r"^```.*?^```", "", BLOCK.sub("", readme), flags=re.DOTALL | re.MULTILINE)
    prose = " ".join(prose.split())
    for phrase in HELD_ELSEWHERE:
        prose = prose.replace(phrase, "")
    for figure, _, _ in figures(prose):
        found.append(f"{figure!r} is in no block, and nothing that is known holds it")
    return found


def _holds(row: str, number: str, unit: str) -> bool:
    """Whether a row has this number: with its unit, or as the whole of a cell or an end of a spread for a ratio."""
    if unit == "times":
        return any(number in cell.strip().split(" to ") for cell in row.split("|"))
    return re.search(rf"(?<![\d.,]){re.escape(number)}(?: |(?=%)){re.escape(unit)}(?!\w)", row) is not None
