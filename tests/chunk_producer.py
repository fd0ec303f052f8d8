"""A producer of chunks as other tools write them, as a separate program: it never renames, and writes slowly.

Every chunk is opened under its final name and written line by line. After each chunk, chunks with the consumer's marker
are deleted, except for the most recent ones. It does not write an end marker.

    python chunk_producer.py ROWS FOLDER '{"samples_per_chunk": 4, "seconds_per_line": 0.01}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO


def write_line(file: IO[str], line: str, *, until: Path | None, die: bool) -> None:
    """Write a line in two halves, each flushed. Between them, ``die``, or wait for a file to appear."""
    middle = len(line) // 2
    file.write(line[:middle])
    file.flush()
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    while until is not None and not until.exists():
        time.sleep(0.02)
    file.write(line[middle:] + "\n")
    file.flush()


def clean_up(folder: Path, keep_recent: int) -> None:
    """Delete chunks that are marked as completed, and their markers, except the last ``keep_recent``."""
    markers = sorted(folder.glob("*.completed"))
    for marker in markers[:-keep_recent] if len(markers) > keep_recent else []:
        marker.with_suffix("").unlink(missing_ok=True)
        marker.unlink()
        print(f"cleaned up {marker.stem}", flush=True)


def produce(
    rows: list[str],
    folder: Path,
    *,
    samples_per_chunk: int,
    seconds_per_line: float = 0.0,
    stops: dict[str, str] | None = None,
    die_in: int | None = None,
    first: int = 0,
    keep_recent: int = 10,
) -> None:
    """Write the rows as chunks.

    Args:
        rows: lines without their newline.
        folder: made where it is missing.
        samples_per_chunk: lines in a chunk; the last one may have fewer.
        seconds_per_line: time each takes.
        stops: by a line's number, the file that is waited for in the middle of it.
        die_in: be killed in the middle of this line.
        first: number of the first chunk.
        keep_recent: completed chunks that are not deleted yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, begin in enumerate(range(0, len(rows), samples_per_chunk), first):
        with open(folder / f"chunk_{number:05d}.jsonl", "w", encoding="utf-8") as file:
            for index in range(begin, min(begin + samples_per_chunk, len(rows))):
                time.sleep(seconds_per_line)
                until = (stops or {}).get(str(index))
                write_line(file, rows[index], until=Path(until) if until else None, die=index == die_in)
        print(f"wrote chunk {number}", flush=True)
        clean_up(folder, keep_recent)


if __name__ == "__main__":
    produce(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines(), Path(sys.argv[2]), **json.loads(sys.argv[3]))
