"""The number of modules that one piece of work uses; ``-s`` prints them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import entered_modules
import pytest

# A module that must be among them.
LANDMARKS = {
    "row": "megatron_sft_idx.shard.writer",
    "item": "megatron_sft_idx.dataset",
    "batch": "megatron_sft_idx.training.batch",
    "conversion": "megatron_sft_idx.formats.memmap",
}


@pytest.mark.parametrize("work", entered_modules.WORKS)
def test_the_modules_that_a_piece_of_work_enters_are_reported(work: str, tmp_path: Path) -> None:
    entered_modules.prepare(tmp_path)
    script = [sys.executable, entered_modules.__file__, work, tmp_path]
    run = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    entered = run.stdout.split()
    print(f"\n{work}: {len(entered)} modules", *entered, sep="\n  ")
    assert LANDMARKS[work] in entered
