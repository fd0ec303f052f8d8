"""``split``: every pack is in exactly one output, and merging the outputs gives the shard again."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_packs import (
    Sample,
    assert_holds,
    demo_samples,
    five_files,
    folder_of,
    opens,
    samples,
    sums_told,
    write_samples,
)

from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import DATA_SUFFIXES, SUFFIXES
from megatron_sft_idx.packs import run as run_module
from megatron_sft_idx.packs import split as split_module
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.provenance import Origin, OriginRun
from megatron_sft_idx.packs.split import SplitSize, output_prefix, split
from megatron_sft_idx.shard import Shard, ShardWriter, read_header, remove_shard
from megatron_sft_idx.shard.publication import is_set_aside

ABOUT = {
    "tokenizer": {"fingerprint": "aaa"},
    "sources": {"fingerprint": "f" * 32, "rows": 40},
    "notes": {"literals": 3},
    "packing": {"method": "auto"},
}


def cut(source: Path | str, prefix: Path | str, **options: Any) -> list[str]:
    """Split without waiting for the disk, and return the prefixes of the outputs."""
    parts = SplitSize(**{name: options.pop(name) for name in ("packs", "nbytes", "shards") if name in options})
    return split(source, prefix, parts, durable=False, **options).prefixes


def nbytes_beside_header(prefix: str) -> int:
    return sum(os.path.getsize(prefix + suffix) for suffix in SUFFIXES) - read_header(prefix).nbytes


WAYS = (
    st.builds(lambda n: {"packs": n}, st.integers(1, 8))
    | st.builds(lambda n: {"nbytes": n}, st.integers(1, 2000))
    | st.builds(lambda n: {"shards": n}, st.integers(1, 8))
)


@settings(max_examples=40, deadline=None)
@given(
    packs=samples(weights=False) | samples(token_dtype=np.int32, weights=False),
    weights=st.booleans(),
    way=WAYS,
    back=st.booleans(),
)
def test_every_pack_is_in_exactly_one_part(
    tmp_path_factory: pytest.TempPathFactory, packs: list[Sample], weights: bool, way: dict[str, int], back: bool
) -> None:
    folder = tmp_path_factory.mktemp("split")
    mask_dtype = np.float32 if weights else np.uint8
    whole = write_samples(folder / "x", packs, capacity=64, mask_dtype=mask_dtype, pad_id=3, metadata=ABOUT)
    prefixes = cut(folder / "x", folder / "p", **way)
    bounds = [0, *np.cumsum([read_header(prefix).num_packs for prefix in prefixes]).tolist()]
    assert bounds[-1] == len(packs)
    for number, (prefix, (first, stop)) in enumerate(zip(prefixes, pairwise(bounds), strict=True)):
        assert prefix == f"{folder}/p-{number:05d}-of-{len(prefixes):05d}"
        assert_holds(Shard(prefix), packs[first:stop])
        written = write_samples(folder / "alone", packs[first:stop], capacity=64, mask_dtype=mask_dtype, overwrite=True)
        found = read_header(prefix)
        for count in ("num_trained_tokens", "num_masked_packs", "longest_pack", "most_sequences", "shard_id"):
            assert getattr(found, count) == getattr(written, count)
        assert (found.capacity, found.pad_id, found.mask_dtype) == (64, 3, mask_dtype)
        check_size(packs[first:stop], prefix, way, len(prefixes), whole.num_packs)
    if back:
        header = merge(prefixes, folder / "m", durable=False).header
        assert header.shard_id == whole.shard_id
        for suffix in DATA_SUFFIXES:
            assert Path(f"{folder}/m{suffix}").read_bytes() == Path(f"{folder}/x{suffix}").read_bytes()


def check_size(packs: list[Sample], prefix: str, way: dict[str, int], parts: int, num_packs: int) -> None:
    if "packs" in way:
        assert len(packs) <= way["packs"]
        assert parts == max(-(-num_packs // way["packs"]), 1)
    elif "shards" in way:
        assert parts == way["shards"]
        assert num_packs // parts <= len(packs) <= -(-num_packs // parts)
    else:
        assert len(packs) <= 1 or nbytes_beside_header(prefix) <= way["nbytes"]


def test_parts_by_bytes_are_as_large_as_they_may_be(tmp_path: Path) -> None:
    packs = demo_samples(400)
    write_samples(tmp_path / "x", packs, capacity=64)
    prefixes = cut(tmp_path / "x", tmp_path / "p", nbytes=4000)
    sizes = [nbytes_beside_header(prefix) for prefix in prefixes]
    assert len(sizes) > 5
    assert max(sizes) <= 4000
    # A pack has at most 13 tokens and 4 sequences; up to 64 bytes are between the arrays of .seq.idx.
    assert min(sizes[:-1]) > 4000 - (13 * 5 + 4 * 4 + 36) - 64


def test_parts_say_what_they_are_of(tmp_path: Path) -> None:
    whole = write_samples(tmp_path / "x", demo_samples(9), capacity=64, metadata=ABOUT)
    prefixes = cut(tmp_path / "x", tmp_path / "p", packs=4)
    found = read_header(prefixes[1])
    part = {"first_pack": 4, "num_packs": 4}
    counts = {"num_sequences": found.num_sequences, "num_tokens": found.num_tokens}
    whole_id = whole.shard_id.hex()
    assert found.metadata == {
        "format_writer": 1,
        "tokenizer": ABOUT["tokenizer"],
        "split": part | {"shard_id": whole_id, "part": 1, "parts": 3},
        "origin": [part | counts | {"shard_id": whole_id, "source": "f" * 32}],
    }
    again = cut(prefixes[1], tmp_path / "q", packs=3)  # an output of an output
    (entry,) = read_header(again[1]).metadata["origin"]
    assert (entry["shard_id"], entry["first_pack"], entry["num_packs"]) == (whole_id, 7, 1)


def test_a_merged_shard_split_and_merged_again_is_the_same_to_the_last_byte(tmp_path: Path) -> None:
    packs = demo_samples(200)
    sources = [str(tmp_path / f"s{i}") for i in range(100)]
    for i, source in enumerate(sources):
        write_samples(source, packs[i * i // 50 : (i + 1) ** 2 // 50], capacity=64, metadata=ABOUT)
    merge(sources, tmp_path / "m", durable=False)
    for way in ({"shards": 100}, {"packs": 37}, {"nbytes": 6000}):
        (name,) = way
        prefixes = cut(tmp_path / "m", tmp_path / name, **way)
        merge(prefixes, tmp_path / f"{name}-back", durable=False)
        assert five_files(tmp_path / f"{name}-back") == five_files(tmp_path / "m")
    assert_holds(Shard(tmp_path / "m"), packs)


def test_an_empty_shard_is_split_into_empty_ones(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", [], capacity=64)
    assert [len(cut(tmp_path / "x", tmp_path / name, **{name: 3})) for name in ("packs", "nbytes", "shards")] == [
        1,
        1,
        3,
    ]
    assert len(Shard(output_prefix(str(tmp_path / "shards"), 2, 3))) == 0


@settings(max_examples=40, deadline=None)
@given(packs=samples(), weights=st.booleans(), window=st.integers(1, 40), chunk=st.integers(1, 5))
def test_trained_positions_are_counted_in_any_chunks(
    tmp_path_factory: pytest.TempPathFactory, packs: list[Sample], weights: bool, window: int, chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("counted")
    write_samples(folder / "x", packs, mask_dtype=np.float32 if weights else np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "COPIED_TOKENS", window)
        patch.setattr(split_module, "COPIED_TOKENS", window)
        patch.setattr(run_module, "WINDOW_PACKS", chunk)
        parts = cut(folder / "x", folder / "p", shards=3)
    masks = [[pack["loss_mask"] for pack in Shard(part)] for part in parts]
    counts = [(header.num_trained_tokens, header.num_masked_packs) for header in map(read_header, parts)]
    assert counts == [(sum(map(np.count_nonzero, part)), sum(not mask.any() for mask in part)) for part in masks]


@pytest.mark.parametrize(("small", "large"), [((1_200_000, 3), (2_400_000, 3)), ((20, 50_000), (100, 50_000))])
def test_the_heap_does_not_grow_with_packs_or_tokens(
    tmp_path: Path, small: tuple[int, int], large: tuple[int, int]
) -> None:
    peaks = []
    for name, (packs, length) in (("warm", small), ("small", small), ("large", large)):
        ones = np.ones(packs, np.int64)
        with ShardWriter(tmp_path / name, capacity=100_000, durable=False) as writer:
            total = packs * length
            writer.add_packs(np.zeros(total, np.int32), np.zeros(total, np.uint8), 0 * ones, length * ones, ones)
        tracemalloc.start()
        cut(tmp_path / name, tmp_path / f"{name}-p", shards=3)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + (256 << 10)
    assert peaks[2] < 8 << 20


# ---- errors ----


@pytest.mark.parametrize("options", [{}, {"packs": 0}, {"packs": 1, "shards": 1}, {"nbytes": -1}])
def test_parts_are_given_in_one_way(options: dict[str, int]) -> None:
    with pytest.raises(FormatError, match="set exactly one of packs, nbytes and shards, to 1 or more"):
        SplitSize(**options)


def test_too_many_parts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_sft_idx.packs.split._MAX_OUTPUTS", 5)
    write_samples(tmp_path / "x", demo_samples(6), capacity=64)
    before = folder_of(tmp_path)
    for way in ({"packs": 1}, {"nbytes": 1}, {"shards": 6}):
        with pytest.raises(FormatError, match="more than 5 parts of five files each; choose larger parts"):
            cut(tmp_path / "x", tmp_path / "p", **way)
    assert folder_of(tmp_path) == before
    assert len(cut(tmp_path / "x", tmp_path / "p", shards=5)) == 5


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_corrupt_source_is_found_before_anything_is_published(tmp_path: Path, suffix: str) -> None:
    write_samples(tmp_path / "x", demo_samples(8), capacity=64)
    path = tmp_path / f"x{suffix}"
    raw = bytearray(path.read_bytes())
    raw[-12] ^= 4
    path.write_bytes(raw)
    before = folder_of(tmp_path)
    with pytest.raises(CorruptShardError, match="F3") as caught:
        cut(tmp_path / "x", tmp_path / "p", packs=2)
    assert caught.value.path == str(path)
    assert folder_of(tmp_path) == before


def test_a_part_is_never_the_source_and_replaces_nothing_unasked(tmp_path: Path) -> None:
    packs = demo_samples(6)
    name = output_prefix("x", 1, 3)
    write_samples(tmp_path / name, packs, capacity=64)
    with pytest.raises(FormatError, match="used as both the output and "):
        cut(tmp_path / name, tmp_path / "x", packs=2, overwrite=True)
    write_samples(tmp_path / "y", packs[:3], capacity=64)
    with pytest.raises(FormatError, match=r"x-00001-of-00003.*already exist"):
        cut(tmp_path / "y", tmp_path / "x", packs=1)
    prefixes = cut(tmp_path / "y", tmp_path / "x", packs=1, overwrite=True)
    assert_holds(Shard(prefixes[1]), packs[1:2])


def test_parts_of_another_split_are_not_mixed_with_these(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(6), capacity=64)
    cut(tmp_path / "x", tmp_path / "p", shards=3)
    with pytest.raises(FormatError, match="belongs to a split into 3 parts, but this split has 2"):
        cut(tmp_path / "x", tmp_path / "p", shards=2, overwrite=True)


def test_the_folder_is_looked_through_once_for_each_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_samples(tmp_path / "whole", demo_samples(8))
    looks, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(str(path)) or scandir(path))
    split(tmp_path / "whole", tmp_path / "to/p", SplitSize(packs=1), durable=False)
    assert len([path for path in looks if path == str(tmp_path / "to")]) <= 8 + 2


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(30), capacity=64)
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        cut(tmp_path / "x", tmp_path / "p", packs=7, watch=sums_told(lambda *counts: seen.append(counts)))
        assert seen[-1][0] == seen[-1][1]


# ---- failed and killed ----


@pytest.mark.parametrize("resumed", [False, True])
def test_an_error_leaves_nothing_of_the_split_but_what_an_earlier_one_had_done(tmp_path: Path, resumed: bool) -> None:
    write_samples(tmp_path / "x", demo_samples(60), capacity=64)
    prefixes = cut(tmp_path / "x", tmp_path / "out" / "p", shards=6)
    for prefix in prefixes[1 if resumed else 0 :]:
        remove_shard(ShardPaths.of(prefix))
    before = folder_of(tmp_path / "out")

    def disk_is_full(done: int, total: int) -> None:
        if 100 * done > 85 * total:
            assert len(folder_of(tmp_path / "out")) > len(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        cut(tmp_path / "x", tmp_path / "out" / "p", shards=6, watch=sums_told(disk_is_full))
    assert folder_of(tmp_path / "out") == before


def test_a_killed_split_leaves_whole_parts_and_goes_on_behind_them(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(60), capacity=64)
    expected = [five_files(prefix) for prefix in cut(tmp_path / "x", tmp_path / "expected", shards=6)]
    source = str(tmp_path / "x")
    killed = set()
    for percent in (40, 75, 85, 95):
        target = tmp_path / f"{percent}"

        def kill(done: int, total: int, percent: int = percent) -> None:
            if 100 * done > percent * total:
                os.kill(os.getpid(), signal.SIGKILL)

        if (child := os.fork()) == 0:
            cut(source, target / "p", shards=6, watch=sums_told(kill))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        # Complete outputs stay in their building folders until all are complete.
        assert not any(opens(output_prefix(str(target / "p"), i, 6)) for i in range(6))
        assert all(name.endswith(".building") for name in os.listdir(target))
        done = [p for i in range(6) if is_set_aside(p := output_prefix(str(target / "p"), i, 6))]
        killed.add(len(done))
        inodes = [os.stat(p + ".building/.bin").st_ino for p in done]
        report = split(source, target / "p", SplitSize(shards=6), durable=False)
        assert report.num_kept == len(done)
        assert [os.stat(p + ".bin").st_ino for p in done] == inodes
        assert [five_files(p) for p in report.prefixes] == expected
        assert len(folder_of(target)) == 30
    assert len(killed) > 2


def test_it_does_not_take_a_broken_or_another_part_for_its_own(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(6), capacity=64)
    prefixes = cut(tmp_path / "x", tmp_path / "p", shards=3)
    os.unlink(prefixes[1] + ".loss.bin")
    with pytest.raises(ShardNotFoundError, match=r"loss\.bin"):
        cut(tmp_path / "x", tmp_path / "p", shards=3)
    cut(tmp_path / "x", tmp_path / "p", shards=3, overwrite=True)
    write_samples(tmp_path / "x", demo_samples(7), capacity=64, overwrite=True)
    with pytest.raises(FormatError, match="already exist"):
        cut(tmp_path / "x", tmp_path / "p", packs=3)
    cut(tmp_path / "x", tmp_path / "p", packs=3, overwrite=True)
    assert_holds(Shard(prefixes[1]), demo_samples(7)[3:6])


def test_going_on_needs_room_for_the_outputs_that_are_missing_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(tmp_path / "x", demo_samples(60), capacity=64)
    prefixes = cut(tmp_path / "x", tmp_path / "p", shards=3)
    needed = sum(map(os.path.getsize, ShardPaths(prefixes[1]).all))
    remove_shard(ShardPaths(prefixes[1]))
    room = os.statvfs(tmp_path)
    for free, fits in ((needed // 2, False), (needed * 2, True)):
        monkeypatch.setattr(os, "statvfs", lambda _, n=free: os.statvfs_result([1, 1, n, n, n, *room[5:]]))
        with contextlib.nullcontext() if fits else pytest.raises(OSError, match="bytes are needed"):
            cut(tmp_path / "x", tmp_path / "p", shards=3)


def test_an_output_has_the_origin_of_its_packs(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    counts = rng.integers(0, 9, 60).tolist()
    packs = [(f"{run}", 100 * run + at) for run, count in enumerate(counts) for at in range(count)]
    spans_asked = []

    def spans(first: int, stop: int) -> tuple[tuple[int, int], tuple[int, int]]:
        spans_asked.append(first)
        return (first * 7, stop * 7), (first * 2, stop * 2)

    runs = [OriginRun(f"{i}", None, 100 * i, n, 2 * n, 7 * n) for i, n in enumerate(counts)]
    whole = {"num_packs": len(packs), "num_sequences": 2 * len(packs), "num_tokens": 7 * len(packs)}
    metadata = {"origin": list(map(dataclasses.asdict, runs))}
    header = dataclasses.replace(write_samples(tmp_path / "x", []), metadata=metadata, **whole)
    origin = Origin(header, spans)
    edges = sorted([0, len(packs), *rng.integers(0, len(packs) + 1, 40).tolist()])
    found = [run for first, stop in pairwise(edges) for run in origin.of_packs(first, stop)]
    assert [(run.shard_id, run.first_pack + i) for run in found for i in range(run.num_packs)] == packs
    assert all((run.num_sequences, run.num_tokens) == (2 * run.num_packs, 7 * run.num_packs) for run in found)
    assert len(spans_asked) <= len(runs) + len(edges), "every output looks at its own runs alone"
