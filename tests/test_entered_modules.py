"""How many modules somebody meets who follows one piece of work through the package; ``-s`` shows which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import entered_modules
import pytest

# At most so many modules, and one that is surely among them.
LIMITS = {
    "row": (30, "megatron_sft_idx.shard.writer"),
    "item": (5, "megatron_sft_idx.dataset"),
    "batch": (11, "megatron_sft_idx.training.batch"),
    "conversion": (10, "megatron_sft_idx.formats.memmap"),
}


@pytest.mark.parametrize("work", entered_modules.WORKS)
def test_a_piece_of_work_enters_few_modules(work: str, tmp_path: Path) -> None:
    entered_modules.prepare(tmp_path)
    script = [sys.executable, entered_modules.__file__, work, tmp_path]
    run = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    entered = run.stdout.split()
    print(f"\n{work}: {len(entered)} modules", *entered, sep="\n  ")
    most, landmark = LIMITS[work]
    assert landmark in entered
    assert len(entered) <= most, f"{work} enters {len(entered)} modules, at most {most}: {', '.join(entered)}"
