"""The disk space and memory of ``preprocess`` agree with the README."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from chats import CHATS, TOKENIZER

from megatron_sft_idx import Shard

pytestmark = pytest.mark.slow

LIMIT = 300_000_000

PROGRAM = """
import resource, sys
from megatron_sft_idx.cli.main import main
code = main(sys.argv[1:])
for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
    print(resource.getrusage(who).ru_maxrss)
raise SystemExit(code)
"""


def test_memory_per_process_and_bytes_per_token(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_bytes(CHATS.read_bytes() * 100)
    prefix = tmp_path / "x"
    arguments = ["preprocess", "--input", tmp_path / "chats.jsonl", "--tokenizer", TOKENIZER, "--seq-length", "4096"]
    arguments += ["--earlier-reasoning", "drop", "--workers", "2", "--log-interval", "0", "--output-prefix", prefix]
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    own, worker = (int(line) * 1024 for line in done.stdout.splitlines()[-2:])
    assert max(own, worker) < LIMIT
    files = sum(path.stat().st_size for path in tmp_path.glob("x.*"))
    assert 3 < files / Shard(str(prefix)).header.num_tokens < 3.2
