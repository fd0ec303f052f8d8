"""Packs for tests: generate, write and compare them, and convert token-aligned to label-aligned masks the slow way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Pack, Shard, ShardWriter
from megatron_sft_idx.storage.progress import Advance, Watch


def sums_told(tell: Callable[[int, int], Any]) -> Watch:
    """Return a ``Watch`` that calls ``tell`` with the number of finished units and the total, after each step."""

    @contextmanager
    def watch(_what: str, total: int) -> Iterator[Advance]:
        done = 0

        def advance(units: int) -> None:
            nonlocal done
            done += units
            tell(done, total)

        yield advance

    return watch


@dataclass(frozen=True)
class Sample:
    """One pack as plain lists, with a token-aligned mask."""

    tokens: list[int]
    mask: list[float]
    starts: list[int]

    @property
    def bounds(self) -> list[int]:
        return [*self.starts, len(self.tokens)]

    @property
    def label_mask(self) -> list[float]:
        """The mask, shifted left by one inside every sequence, with 0 at its end."""
        out: list[float] = []
        for a, b in pairwise(self.bounds):
            out += [*self.mask[a + 1 : b], 0]
        return out

    def padded(self, multiple: int) -> int:
        return sum(-(-(b - a) // multiple) * multiple for a, b in pairwise(self.bounds))


def sample_of(lengths: Sequence[int], mask: Any, tokens: Any) -> Sample:
    """Return a pack of sequences of these lengths. ``mask`` and ``tokens`` return the value for a position."""
    total, starts = 0, []
    for length in lengths:
        starts.append(total)
        total += length
    return Sample([tokens(i) for i in range(total)], [mask(i) for i in range(total)], starts)


@st.composite
def samples(draw: st.DrawFn, *, token_dtype: Any = np.uint16, weights: bool = False, least: int = 0) -> list[Sample]:
    largest = np.iinfo(token_dtype).max
    ids = st.integers(0, 300) | st.sampled_from([0, largest - 1, largest])
    masks = st.floats(0, 1e6, width=32) if weights else st.integers(0, 1)
    packs = []
    for _ in range(draw(st.integers(least, 6))):
        lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        size = sum(lengths)
        tokens = draw(st.lists(ids, min_size=size, max_size=size))
        mask = draw(st.lists(masks, min_size=size, max_size=size))
        packs.append(sample_of(lengths, mask.__getitem__, tokens.__getitem__))
    return packs


def write_samples(prefix: str | os.PathLike[str], packs: Sequence[Sample], **options: Any) -> Any:
    """Write label-aligned packs without waiting for the disk, and return the header."""
    with ShardWriter(prefix, **{"durable": False, **options}) as writer:
        for pack in packs:
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
        return writer.finalize()


def assert_is(pack: Pack, sample: Sample) -> None:
    assert pack["input_ids"].tolist() == sample.tokens
    assert pack["loss_mask"].tolist() == sample.label_mask
    assert pack["seq_boundaries"].tolist() == sample.bounds
    assert pack["seq_boundaries"].dtype == np.int32


def assert_holds(shard: Any, packs: Sequence[Sample]) -> None:
    assert len(shard) == len(packs)
    for i, sample in enumerate(packs):
        assert_is(shard[i], sample)
        assert_is(shard[i - len(packs)], sample)


def five_files(prefix: str | os.PathLike[str]) -> dict[str, bytes]:
    return {suffix: Path(os.fspath(prefix) + suffix).read_bytes() for suffix in SUFFIXES}


def demo_samples(count: int = 7) -> list[Sample]:
    """Return a few packs of one to four sequences, always the same."""
    return [
        sample_of([1 + (i + j) % 5 for j in range(1 + i % 4)], lambda p, i=i: (p + i) % 2, lambda p, i=i: 10 * i + p)
        for i in range(count)
    ]


def opens(prefix: str | os.PathLike[str]) -> bool:
    """Return whether there is a shard. If there is one, check that it is complete."""
    if not Path(os.fspath(prefix) + ".seq.idx").exists():
        return False
    list(Shard(prefix))
    return True


def folder_of(path: Path) -> list[str]:
    """Return the names in a folder, sorted."""
    return sorted(entry.name for entry in path.iterdir())


def tree_of(path: Path) -> dict[str, bytes]:
    """Return the content of all files in a folder and its subfolders, by path. Locks are left out."""
    files = (each for each in path.rglob("*") if each.is_file() and each.name != "lock")
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(files)}


# The names in a folder that holds the shard "x" and nothing else.
WHOLE = sorted("x" + suffix for suffix in SUFFIXES)
