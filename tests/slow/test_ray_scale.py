"""200,000 chats give the same bytes with one and two workers, and on a cluster that loses a process and a node."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
from chats import CHATS, SUFFIXES, preprocess
from ray_clusters import cluster_of, killing, require_ray

require_ray()

ROWS = 200_000
SHARDS = 4


def write_chats(path: Path) -> None:
    """Write chats of one question and one answer, taken from the bundled ones, of about 500 bytes each."""
    rng = random.Random(7)
    chats = (json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines())
    texts = [str(turn.get("content") or "") for chat in chats for turn in chat.get("messages", [])]
    words = [word for text in texts for word in text.split()]
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(ROWS):
            spans = ((start := rng.randrange(len(words) - 80), start + rng.randrange(4, 80)) for _ in range(2))
            ask, answer = (" ".join(words[start:stop]) for start, stop in spans)
            turns = [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")


def digests(prefix: Path) -> dict[str, str]:
    prefixes = [f"{prefix}-{number:05d}-of-{SHARDS:05d}" for number in range(SHARDS)]
    return {
        path[len(str(prefix)) :]: hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for path in (f"{one}{suffix}" for one in prefixes for suffix in SUFFIXES)
    }


@pytest.mark.slow
def test_200_000_chats(tmp_path):
    write_chats(tmp_path / "rows.jsonl")
    options = ("--input", tmp_path / "rows.jsonl", "--output-shards", SHARDS, "--seq-length", 4096)
    wanted = None
    for workers in (1, 2):
        here = tmp_path / f"local{workers}" / "x"
        done = preprocess(here, *options, "--workers", workers)
        assert done.code == 0, done
        wanted = wanted or digests(here)
        assert digests(here) == wanted
    folder = tmp_path / "ray" / "x.building" / "parts"

    def parts() -> int:
        return len(list(folder.glob("*.part"))) if folder.exists() else 0

    with cluster_of(2) as nodes:
        for prefix, losses in (("calm", False), ("ray", True)):
            there = tmp_path / prefix / "x"
            arguments = (there, *options, "--engine", "ray", "--ray-address", nodes.address, "--workers", 2)
            if losses:
                with killing(lambda: parts() > 2 and nodes.kill_worker(), nodes.kill_node) as killed:
                    done = preprocess(*arguments)
                assert len(killed) == 1
            else:
                done = preprocess(*arguments)
            assert done.code == 0, done
            assert digests(there) == wanted
