"""All parsers on mutated inputs, and readers on damaged shards; `make sanitize` detects accesses out of bounds."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from corrupt_copies import main as use_copies
from fuzz.targets import CORPUS, TARGETS, load

SANITIZED = "SFT_IDX_NATIVE_FOLDER" in os.environ
MUTATIONS = 3000 if SANITIZED else 80


def mutated(seeds: list[bytes], rng: np.random.Generator) -> bytes:
    """Return a seed with some bytes changed, removed, repeated, or joined to another seed."""
    data = bytearray(seeds[rng.integers(len(seeds))])
    for _ in range(rng.integers(1, 6)):
        at, size = int(rng.integers(len(data) + 1)), int(rng.integers(1, 9))
        match rng.integers(5):
            case 0:
                data[at : at + size] = rng.bytes(size)
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = data[at : at + size]
            case 3:
                data[at : at + size] = b"\xff" * size
            case 4:
                data[at:] = seeds[rng.integers(len(seeds))][at:]
    return bytes(data)


@pytest.mark.parametrize("count", [MUTATIONS, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs(name: str, count: int) -> None:
    run = load(name)
    seeds = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    rng = np.random.default_rng(len(name))
    for _ in range(count):
        data = mutated(seeds, rng)[: TARGETS[name].max_nbytes]
        try:
            run(data)
        except BaseException:
            print(f"{name}: {data!r}")
            raise


def test_damaged_shards() -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        use_copies(Path(folder), 10_000, 10_000 + (500 if SANITIZED else 20))
