"""A live run that ends early is resumed with another number of ranks: every row comes once, on any rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_live_chunks import producer
from test_live_training import PATIENCE, ROWS, finish, launch, options, pack

pytestmark = pytest.mark.slow

LINES, SAVED = 3, 4


def train(folder: Path, name: str, ranks: int, arguments: list[str], **more: Any) -> Any:
    training = launch(folder, {name: arguments}, ranks, **more)
    said = training.communicate(timeout=PATIENCE)[0]
    assert training.returncode == 0, said[-6000:]
    return finish(folder, name, said, ranks)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
@pytest.mark.parametrize("window", [0, 2])
def test_ranks_come_and_go(before: int, after: int, window: int, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    checkpoints = tmp_path / "checkpoints"
    ends = ["--end-after", 4, "--vocab-size", 2048, "--live-window", window]
    common = options(data, *ends, "--save", checkpoints, "--save-interval", SAVED)
    with producer(data, [pack(i) for i in range(ROWS)], samples_per_chunk=LINES, seconds_per_line=0.1) as process:
        first = train(tmp_path, "first", before, common, kill_at=4 // before * SAVED + 1)
        # Some rows were trained on after the checkpoint; they must come again.
        rows_saved = 4 // before * SAVED
        assert all(len(rows) == rows_saved + 2 for rows in first.rows)
        again = train(tmp_path, "again", after, [*common, "--load", str(checkpoints)])
        assert process.wait(PATIENCE) == 0
    kept = [int(row["tokens"][0]) for rows in first.rows for row in rows[:rows_saved]]
    came = [int(tokens[0]) for rank in range(after) for tokens in again.real(rank)]
    assert sorted(kept + came) == list(range(ROWS))
    assert len({len(rows) for rows in again.rows}) == 1
    marked = {path.name for path in (data / "chunks").glob("*.completed")}
    assert len(marked) == -(-ROWS // LINES), "the last checkpoint includes everything"


def test_the_command_ends_with_a_sentence(tmp_path: Path) -> None:
    """A torn chunk gives no traceback, but a path and a remedy."""
    with producer(tmp_path, [pack(i) for i in range(7)], samples_per_chunk=3, die_in=4) as process:
        process.wait(PATIENCE)
    script = Path(__file__).parents[2] / "tools/pretrain_sft.py"
    arguments = [*options(tmp_path, "--vocab-size", 2048, "--max-wait", 2)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *arguments, "--global-batch-size", "1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "chunk_00001.jsonl" in last, json.dumps(done.stderr[-3000:])
    assert "ends with an incomplete line" in last
