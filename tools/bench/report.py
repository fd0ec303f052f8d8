"""What every bench says of its machine, and how it writes a table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

__all__ = ["machine", "memory", "table"]


def machine() -> str:
    """Processor and cores."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown CPU")
    return f"{model}, {os.cpu_count()} cores"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Lines of a Markdown table, and an empty one."""
    yield "| " + " | ".join(header) + " |"
    yield "|---" * len(header) + "|"
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"
    yield ""


def memory(field: str, process: int | str = "self") -> int:
    """Bytes that Linux counts of a process, such as ``VmRSS``, or ``RssAnon``: what it holds beside mapped files."""
    with open(f"/proc/{process}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))
