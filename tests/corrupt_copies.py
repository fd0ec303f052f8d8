"""Damage copies of a shard and use each in every way: ``python tests/corrupt_copies.py FOLDER FIRST LAST``.

This is a separate program, because a reader that accesses memory outside its files is killed by a signal. It prints as
JSON how many copies of each kind of damage were rejected when opened, rejected for some pack, or read in full. A full
verification must find every damage.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from damage import Files, damaged, read_everything
from sample_packs import Sample, five_files, sample_of, write_samples

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.tokenize import PackOptions, pack_shard

CAPACITY = 48
OVERLONG = ("error", "drop", "truncate", "split")


def random_samples(seed: int, count: int) -> list[Sample]:
    """Return packs of some sequences with random ids and masks."""
    rng = np.random.default_rng(seed)
    packs = []
    for _ in range(count):
        lengths = rng.integers(1, 10, rng.integers(1, 5)).tolist()
        mask, ids = rng.integers(0, 2, 64).tolist(), rng.integers(0, 65536, 64).tolist()
        packs.append(sample_of(lengths, mask.__getitem__, ids.__getitem__))
    return packs


def two_shards(folder: Path) -> tuple[Files, Files]:
    """Write two shards with files of equal sizes: the same packs in another order and with other tokens."""
    first = random_samples(0, 12)
    second = [Sample([token ^ 1 for token in pack.tokens], pack.mask, pack.starts) for pack in first[::-1]]
    for name, packs in (("whole", first), ("other", second)):
        write_samples(folder / name, packs, token_dtype=np.uint16, capacity=CAPACITY)
    return five_files(folder / "whole"), five_files(folder / "other")


def use(prefix: str) -> str:
    """Use one copy and return the outcome. Errors other than SFTIndexError are not caught, and end this process."""
    verify_shard(prefix)
    assert not verify_shard(prefix, full=True).ok
    try:
        shard = Shard(prefix)
    except SFTIndexError:
        outcome = "refused"
    else:
        lines = read_everything(shard)
        assert lines == read_everything(Shard(prefix, backend="pread"))
        outcome = "refused in part" if any(": " in line for line in lines[1:]) else "read"
    for number, overlong in enumerate(OVERLONG):
        options = PackOptions(CAPACITY // (1 + number), overlong=overlong)  # type: ignore[arg-type]
        _require_refused(lambda options=options: pack_shard(Shard(prefix), f"{prefix}-packed", options))
    _require_refused(lambda: _copy(prefix))
    return outcome


def _require_refused(action: Callable[[], object]) -> None:
    try:
        action()
    except SFTIndexError:
        return
    raise AssertionError("damage went into a new shard")


def _copy(prefix: str) -> None:
    with ShardWriter(f"{prefix}-copy", token_dtype=np.uint16, durable=False, overwrite=True) as writer:
        writer.add_shard(Shard(prefix, backend="pread"))


def main(folder: Path, first: int, last: int) -> None:
    whole, other = two_shards(folder)
    assert verify_shard(folder / "whole", full=True).ok
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        damage = damaged(whole, other, np.random.default_rng(seed))
        for suffix in whole:
            path = folder / f"x{suffix}"
            path.unlink(missing_ok=True)
            if suffix in damage.files:
                path.write_bytes(damage.files[suffix])
        try:
            counts[f"{damage.name}: {use(str(folder / 'x'))}"] += 1
        except BaseException:
            print(f"copy {seed}: {damage.name}", file=sys.stderr)
            raise
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
