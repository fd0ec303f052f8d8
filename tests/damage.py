"""Make damaged copies of shards, each with one named, seeded kind of damage, and read them in every way."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fuzz.contract import memory_folder

from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard

Files = dict[str, bytes]
ROOT = Path(__file__).parent.parent


class Damage(NamedTuple):
    """One damaged copy.

    Attributes:
        name: what was done to which file, for messages.
        files: the five files, or the remaining ones, by suffix.
    """

    name: str
    files: Files


@contextmanager
def folder_for_copies() -> Iterator[Path]:
    """Provide a folder in memory if the system has one, because there are many copies and each is synced."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as made:
        yield Path(made)


def outcomes_of(script: str, folder: Path, *arguments: int) -> Counter[str]:
    """Run a script of this folder on damaged copies in a new folder, and return its counts.

    The script is another process, because a reader that accesses memory outside its files is killed by a signal.
    """
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, f"tests/{script}", str(folder), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Counter(json.loads(done.stdout))


def read_everything(shard: Shard) -> list[str]:
    """Read a shard in every way. Return one line per pack: its content, or the error.

    For any bytes, a returned pack must have as many mask values as tokens, and boundaries that span it.
    """
    dtypes = shard.header.token_dtype, shard.header.mask_dtype
    lines = [repr(shard.header)]
    for i in range(len(shard)):
        try:
            pack = shard[i]
            ids, mask, bounds = pack["input_ids"], pack["loss_mask"], pack["seq_boundaries"]
            assert (ids.dtype, mask.dtype, bounds.dtype) == (*dtypes, np.int32)
            assert len(ids) == len(mask) == bounds[-1] > 0
            assert len(bounds) >= 2
            assert np.array_equal(shard.get(i), ids)
            assert np.array_equal(shard.get(i, len(ids) - 1, 1), ids[-1:])
            arrays = [ids, mask, bounds]
            for a, b in shard.sequences(i):
                assert len(a) == len(b) <= len(ids)
                arrays += [a, b]
            lines.append(hashlib.sha1(b"|".join(array.tobytes() for array in arrays)).hexdigest())
        except SFTIndexError as error:
            lines.append(str(error))
    return lines


def damaged(whole: Files, other: Files, rng: np.random.Generator) -> Damage:
    """Return a copy of ``whole`` with one damage. ``other`` is another undamaged shard, for swaps and splices."""
    kind = list(KINDS)[rng.integers(len(KINDS))]
    while True:
        suffix = SUFFIXES[rng.integers(len(SUFFIXES))]
        changed = KINDS[kind](whole[suffix], other[suffix], rng)
        if changed != whole[suffix]:
            files = (
                {**whole, suffix: changed} if changed is not None else {s: whole[s] for s in SUFFIXES if s != suffix}
            )
            return Damage(f"{kind} of {suffix}", files)


def _bit_flip(data: bytes, _: bytes, rng: np.random.Generator) -> bytes:
    out = bytearray(data)
    out[rng.integers(len(out))] ^= 1 << int(rng.integers(8))
    return bytes(out)


def _byte_burst(data: bytes, _: bytes, rng: np.random.Generator) -> bytes:
    start, stop = _range(data, rng)
    return data[:start] + rng.bytes(stop - start) + data[stop:]


def _zeros(data: bytes, _: bytes, rng: np.random.Generator) -> bytes:
    start, stop = _range(data, rng)
    return data[:start] + bytes(stop - start) + data[stop:]


def _truncation(data: bytes, _: bytes, rng: np.random.Generator) -> bytes:
    return data[: rng.integers(len(data))]


def _extension(data: bytes, _: bytes, rng: np.random.Generator) -> bytes:
    return data + rng.bytes(int(rng.integers(1, 100)))


def _duplication(data: bytes, _: bytes, rng: np.random.Generator) -> bytes:
    start, stop = _range(data, rng)
    return data[:stop] + data[start:]


def _move(data: bytes, _: bytes, rng: np.random.Generator) -> bytes:
    """Swap a block with the next one, so that bytes and size stay the same but the order changes."""
    start, stop = _range(data, rng)
    middle = (start + stop) // 2
    return data[:start] + data[middle:stop] + data[start:middle] + data[stop:]


def _splice(data: bytes, other: bytes, rng: np.random.Generator) -> bytes:
    cut = int(rng.integers(len(data) + 1))
    return data[:cut] + other[cut:]


def _swap(_: bytes, other: bytes, __: np.random.Generator) -> bytes:
    return other


def _loss(_: bytes, __: bytes, ___: np.random.Generator) -> None:
    return None


def _range(data: bytes, rng: np.random.Generator) -> tuple[int, int]:
    start = int(rng.integers(len(data)))
    return start, min(len(data), start + int(rng.integers(1, 64)))


KINDS: dict[str, Callable[[bytes, bytes, np.random.Generator], Any]] = {
    "bit flip": _bit_flip,
    "random bytes": _byte_burst,
    "zeroed range": _zeros,
    "truncation": _truncation,
    "extension": _extension,
    "duplicated block": _duplication,
    "moved block": _move,
    "splice": _splice,
    "swap": _swap,
    "loss": _loss,
}
