"""Blocks of README and docs that quote the board, and the check that other text quotes no figures.

A block of README or of a page in docs is between ``<!-- board: NAME -->`` and ``<!-- /board -->``. It is
``readme/NAME.md`` with its fields filled in: ``{{batches/batch-arrow.ratio}}`` is a part of a headline of the bench
``batches``, as ``Headline.words`` shows it, and ``{{page}}`` the way to RESULTS.md. Figures outside of blocks
are checked elsewhere, such as limits, sizes and figures in tests; ``HELD_ELSEWHERE`` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from report import Headline

TEMPLATES = Path(__file__).parent / "readme"
BLOCK = re.compile(r"(<!-- board: (\w+) -->\n)(.*?)(<!-- /board -->)", re.DOTALL)
FIELD = re.compile(r"\{\{(\w+)/([\w-]+)\.(\w+)\}\}")
LINK = re.compile(r"RESULTS\.md#(\w+)")
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNITS = (
    *("CPU s", "core hours", "hours", "minutes", "seconds", "milliseconds", "µs", "us", "ms", "s"),
    *("GB/s", "MB/s", "GB a CPU s", "M tokens a CPU s", "k tokens/s", "samples/s", "packs/s"),
    *("KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "times", "%", "ns", "min", "sec", "percent", "per cent"),
)
ANY_UNIT = "|".join(sorted(UNITS, key=len, reverse=True))
FIGURE = re.compile(rf"(?<![\w.,-])({NUMBER}(?: (?:to|/) {NUMBER})*)(?: |(?=%))({ANY_UNIT})(?!\w)")
# Comparisons in other words, which no row can hold: 5x, 5-fold, a factor of 5, twice as fast, ten times the rate.
COMPARED = re.compile(
    rf"(?<![\w.,-]){NUMBER}(?:x|×|-fold|[kKMG]?B/s|[mµu]?s)(?!\w)|\bfactor of {NUMBER}"
    r"|\b(?:twice|(?:two|three|four|five|six|seven|eight|nine|ten|twenty|(?:a )?hundred|(?:a )?thousand) times)"
    r" (?:as|the|more|less|faster|slower)\b"
)
# Figures of README and docs that no bench measures, and the file and the words in it that confirm them.
HELD_ELSEWHERE = {
    "under 1 MB for any shard": ("megatron_sft_idx/inspect/page.py", "MAX_NBYTES = 1_000_000"),
    "1% of 42 packs is none": ("tests/project/test_troubleshooting_training.py", 'split="99,1,0"'),
    "under 300 MB per process": ("tests/slow/test_preprocess_memory.py", "LIMIT = 300_000_000"),
    "about 256 KiB of each file, and at most 4 MiB in total": (
        "megatron_sft_idx/tokenize/dry_run.py",
        "_SAMPLE_NBYTES, _MAX_FILE_NBYTES = 1 << 22, 1 << 18",
    ),
    "up to 1 GiB": ("megatron_sft_idx/shard/shard_set.py", "MEMORY_NBYTES = 1 << 30"),
}


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Name and text of every block."""
    for found in BLOCK.finditer(text):
        yield found[2], found[3]


def rewritten(text: str, rows: Mapping[tuple[str, str], Headline], page: str) -> tuple[str, list[str]]:
    """Return a text with all blocks filled in again.

    Args:
        text: README, or a page of docs.
        rows: every headline, by the names of its bench and its own.
        page: the way from the text to RESULTS.md.

    Returns:
        The text, and the fields for which there is no row; a block with such stays as it is.
    """
    missing: list[str] = []

    def field(found: re.Match[str]) -> str:
        headline = rows.get((found[1], found[2]))
        words = headline.words() if headline else {}
        if not words.get(found[3]):
            missing.append(f"{found[0]} is quoted, and there is no such row")
        return words.get(found[3], "")

    def block(found: re.Match[str]) -> str:
        before = len(missing)
        template = (TEMPLATES / f"{found[2]}.md").read_text(encoding="utf-8").replace("{{page}}", page)
        made = f"{found[1]}{FIELD.sub(field, template).rstrip()}\n{found[4]}"
        return found[0] if len(missing) > before else made

    return BLOCK.sub(block, text), missing


def figures(text: str) -> Iterator[tuple[str, list[str], str]]:
    """Every quantity in a text that is not code: as it stands, its numbers, its unit."""
    for found in FIGURE.finditer(_no_code(text)):
        yield found[0], re.findall(NUMBER, found[1]), found[2]


def complaints(text: str, page: str) -> list[str]:
    """Find figures of speed, time or size in a text that are in no row of the page.

    Args:
        text: README, or a page of docs.
        page: RESULTS.md.

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
    for name, block in blocks(text):
        for line in block.splitlines():
            benches = LINK.findall(line) or LINK.findall(block)
            lines = [row for bench in benches for row in rows.get(bench, ())]
            for figure, numbers, unit in figures(line):
                if not all(any(_holds(row, number, unit) for row in lines) for number in numbers):
                    found.append(f"block {name}: {figure!r} is in no row of {' or '.join(benches) or 'any bench'}")
    prose = re.sub(r"^```.*?^```", "", BLOCK.sub("", text), flags=re.DOTALL | re.MULTILINE)
    prose = " ".join(prose.split())
    for phrase in HELD_ELSEWHERE:
        prose = prose.replace(phrase, "")
    said = [figure for figure, _, _ in figures(prose)] + [match[0] for match in COMPARED.finditer(_no_code(prose))]
    return found + [f"{figure!r} is in no block, and nothing that is known holds it" for figure in said]


def _no_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "``", text)


def _holds(row: str, number: str, unit: str) -> bool:
    """Whether a row has this number: with its unit, or as the whole of a cell or an end of a spread for a ratio."""
    if unit == "times":
        return any(number in cell.strip().removesuffix(" times").split(" to ") for cell in row.split("|"))
    return re.search(rf"(?<![\d.,]){re.escape(number)}(?: |(?=%)){re.escape(unit)}(?!\w)", row) is not None
