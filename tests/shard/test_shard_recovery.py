"""Recovery of an interrupted build: the shard has every complete pack and nothing else, whenever it was interrupted."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kills import killed_at, leave_complete
from sample_packs import WHOLE, assert_holds, demo_samples, five_files, folder_of, opens, tree_of, write_samples

from megatron_sft_idx.check import rebuild
from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout.files import DATA_SUFFIXES, SUFFIXES
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard import writer as writer_module
from megatron_sft_idx.shard.recovery import Remains, find_remains, recover


def leave(prefix: Path, packs: Any, **options: Any) -> None:
    """Leave the files of a build that was killed after these packs were logged, one block per pack."""
    with ShardWriter(prefix, durable=False, **options) as writer:
        for pack in packs:
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
            writer.flush()
        writer.suspend()


def found(prefix: Path) -> Remains:
    remains = find_remains(prefix)
    assert remains is not None
    return remains


@pytest.mark.parametrize("mask_dtype", [np.uint8, np.float32])
def test_every_pack_that_was_noted_comes_back(tmp_path: Path, mask_dtype: Any) -> None:
    packs = demo_samples(9)
    leave(tmp_path / "x", packs, mask_dtype=mask_dtype, capacity=40, pad_id=3, metadata={"a": 1})
    remains = found(tmp_path / "x")
    assert (remains.num_packs, remains.num_recorded, remains.is_complete) == (9, 9, False)
    assert remains.num_tokens == sum(len(pack.tokens) for pack in packs)
    assert remains.num_sequences == sum(len(pack.starts) for pack in packs)
    assert remains.options is not None
    assert remains.options.metadata == {"a": 1}
    header = recover(tmp_path / "x")
    assert folder_of(tmp_path) == WHOLE
    assert find_remains(tmp_path / "x") is None
    assert_holds(Shard(tmp_path / "x"), packs)
    whole = write_samples(tmp_path / "y", packs, capacity=40, pad_id=3, mask_dtype=mask_dtype)
    assert Shard(tmp_path / "x").header == header
    assert (header.rebuilt, header.metadata["recovered"]) == (True, {"packs": 9, "packs_noted": 9})
    assert (header.metadata["a"], header.metadata["format_writer"]) == (1, whole.metadata["format_writer"])
    for name in ("shard_id", "digests", "num_trained_tokens", "num_masked_packs", "capacity", "longest_pack", "pad_id"):
        assert getattr(header, name) == getattr(whole, name), name


def test_without_a_capacity_it_is_the_longest_pack_as_padded(tmp_path: Path) -> None:
    packs = demo_samples(9)
    leave(tmp_path / "x", packs, sequence_multiple=4)
    assert recover(tmp_path / "x").capacity == max(pack.padded(4) for pack in packs)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from([".bin", ".loss.bin", ".seq.bin", "packs"]),
    cut=st.integers(0, 400),
    weights=st.booleans(),
    blocks=st.sampled_from([1, 3, 100]),
)
def test_packs_count_as_far_as_every_file_reaches(
    tmp_path_factory: pytest.TempPathFactory, name: str, cut: int, weights: bool, blocks: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    packs = demo_samples(12)
    with ShardWriter(folder / "x", durable=False, mask_dtype=np.float32 if weights else np.uint8) as writer:
        for i, pack in enumerate(packs):
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
            if i % blocks == blocks - 1:
                writer.flush()
        writer.flush()
        shutil.copytree(folder / "x.building", folder / "left" / "x.building")
        writer.abandon()
    path = folder / "left" / "x.building" / name
    os.truncate(path, size := max(path.stat().st_size - cut, 0))
    tokens, starts = np.cumsum([[len(p.tokens), len(p.starts)] for p in packs], axis=0).T
    kept = {
        ".bin": (tokens * 4 <= size).sum(),
        ".loss.bin": (tokens * (4 if weights else 1) <= size).sum(),
        ".seq.bin": (starts * 4 <= size).sum(),
    }.get(name)
    if kept is None:
        kept = found(folder / "left" / "x").num_packs
        assert kept <= 12 - (cut > 0) * min(blocks, 12)
    if not kept:
        before = tree_of(folder / "left")
        with pytest.raises(FormatError, match="nothing to recover"):
            recover(folder / "left" / "x")
        assert path.stat().st_size == size
        assert all(raw.startswith(before[path]) for path, raw in tree_of(folder / "left").items())
        return
    assert recover(folder / "left" / "x").num_packs == kept
    assert_holds(Shard(folder / "left" / "x"), packs[:kept])
    assert folder_of(folder / "left") == WHOLE


def test_what_follows_the_last_complete_block_is_not_of_the_shard(tmp_path: Path) -> None:
    packs = demo_samples(6)
    leave(tmp_path / "x", packs)
    for suffix in DATA_SUFFIXES:
        with open(tmp_path / "x.building" / suffix, "ab") as file:
            file.write(b"\xff" * 1001)
    with open(tmp_path / "x.building" / "packs", "ab") as file:
        file.write(b"PACK\x05\0\0\0 torn")
    recover(tmp_path / "x")
    assert_holds(Shard(tmp_path / "x"), packs)


def test_bytes_that_never_reached_the_disk_end_the_recovery(tmp_path: Path) -> None:
    packs = demo_samples(9)
    leave(tmp_path / "x", packs)
    # A file system may return zeros for unwritten data; starts of 0 break rule P3.
    starts = np.fromfile(tmp_path / "x.building" / ".seq.bin", "<u4")
    starts[sum(len(pack.starts) for pack in packs[:6]) :] = 0
    starts.tofile(tmp_path / "x.building" / ".seq.bin")
    assert recover(tmp_path / "x").metadata["recovered"] == {"packs": 6, "packs_noted": 9}
    assert_holds(Shard(tmp_path / "x"), packs[:6])


@pytest.mark.parametrize("replaces", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_recovery_killed_at_any_step_can_be_run_again(tmp_path: Path, replaces: bool) -> None:
    old, packs = demo_samples(3), demo_samples(8)
    leave(tmp_path / "left" / "x", packs, mask_dtype=np.float32)
    if replaces:
        write_samples(tmp_path / "old" / "x", old)
        shutil.copytree(tmp_path / "old", tmp_path / "left", dirs_exist_ok=True)
    states, expected = list[str](), None
    for step in range(100):
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "left", folder)
        if not killed_at(step, lambda folder=folder: recover(folder / "x", overwrite=replaces)):  # type: ignore[misc]
            break
        if opens(folder / "x"):
            states.append("old" if len(Shard(folder / "x")) == len(old) else "new")
            assert_holds(Shard(folder / "x"), old if states[-1] == "old" else packs)
        else:
            states.append("none")
        if (folder / "x.building").exists() and (remains := find_remains(folder / "x")) is not None:
            assert remains.num_packs in (0, len(packs))
            assert recover(folder / "x", overwrite=replaces).num_packs == len(packs)
        else:  # only the folder was left to remove
            assert states[-1] == "new"
            assert rebuild(folder / "x").note == "nothing to do"
        expected = expected or five_files(folder / "x")
        assert five_files(folder / "x") == expected
        assert folder_of(folder) == WHOLE
    assert step > 20
    order = ["old", "none", "new"] if replaces else ["none", "new"]
    assert states == sorted(states, key=order.index)
    assert set(states) == set(order)
    assert_holds(Shard(tmp_path / "0" / "x"), packs)


@pytest.mark.parametrize("replaces", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_publication_killed_halfway_is_finished_as_it_was_meant(tmp_path: Path, replaces: bool) -> None:
    packs = demo_samples(5)
    write_samples(tmp_path / "calm" / "x", packs, metadata={"a": 1})
    finished = 0
    for step in range(100):
        folder = tmp_path / str(step)
        if replaces:
            write_samples(folder / "x", demo_samples(3))
        work = lambda folder=folder: write_samples(folder / "x", packs, overwrite=True, durable=True, metadata={"a": 1})  # noqa: E731
        if not killed_at(step, work):
            break
        if (remains := find_remains(folder / "x")) is None or not remains.is_complete:
            continue
        finished += 1
        assert (remains.num_packs, remains.num_recorded) == (5, 5)
        if replaces and opens(folder / "x") and len(Shard(folder / "x")) == 3:
            with pytest.raises(
                FormatError, match=r"/x\.seq\.idx already exist; choose another prefix, or pass overwrite"
            ):
                recover(folder / "x")
        assert not recover(folder / "x", overwrite=replaces).rebuilt
        assert five_files(folder / "x") == five_files(tmp_path / "calm" / "x")
        assert folder_of(folder) == WHOLE
    assert finished >= 8


def test_a_file_that_changed_since_it_was_complete_is_found(tmp_path: Path) -> None:
    for step in range(100):
        folder = tmp_path / str(step)
        killed_at(step, lambda folder=folder: write_samples(folder / "x", demo_samples(5), durable=True))  # type: ignore[misc]
        if (folder / "x.bin").exists():
            break
    assert found(folder / "x").is_complete
    for name in ("x.bin", *(f"x.building/{suffix}" for suffix in (".loss.bin", ".seq.bin", ".idx", ".seq.idx"))):
        raw = (folder / name).read_bytes()
        for changed in (raw[:-1], raw + b"\0", b""):
            (folder / name).write_bytes(changed)
            with pytest.raises(CorruptShardError):
                recover(folder / "x")
            with pytest.raises(CorruptShardError):
                find_remains(folder / "x")
        (folder / name).write_bytes(raw)
    assert recover(folder / "x").num_packs == 5


def test_nothing_good_is_overwritten_unasked(tmp_path: Path) -> None:
    leave(tmp_path / "x", demo_samples(4))
    write_samples(tmp_path / "other" / "x", demo_samples(2))
    shutil.copytree(tmp_path / "other", tmp_path, dirs_exist_ok=True)
    with pytest.raises(FormatError, match=r"/x\.seq\.idx already exist; choose another prefix, or pass overwrite"):
        recover(tmp_path / "x")
    assert_holds(Shard(tmp_path / "x"), demo_samples(2))
    assert found(tmp_path / "x").num_packs == 4
    recover(tmp_path / "x", overwrite=True)
    assert_holds(Shard(tmp_path / "x"), demo_samples(4))


def test_nothing_to_recover_is_said(tmp_path: Path) -> None:
    assert find_remains(tmp_path / "x") is None
    with pytest.raises(FormatError, match="there is no such folder"):
        recover(tmp_path / "x")
    assert folder_of(tmp_path) == []
    with ShardWriter(tmp_path / "x") as writer:
        for act in (find_remains, recover):
            with pytest.raises(FormatError, match="another process is writing"):
                act(tmp_path / "x")
        writer.abandon()
    leave(tmp_path / "x", [])
    with pytest.raises(FormatError, match="no complete pack"):
        recover(tmp_path / "x")
    assert "packs" in folder_of(tmp_path / "x.building")


@pytest.mark.parametrize(
    "options",
    [
        {"token_dtype": 5},
        {"token_dtype": True},
        {"mask_dtype": [1]},
        {"capacity": 0},
        {"capacity": 2**31},
        {"sequence_multiple": None},
        {"pad_id": "0"},
        {"metadata": []},
        None,
    ],
)
def test_options_that_no_builder_writes_are_refused_with_a_remedy_that_works(
    tmp_path: Path, options: dict[str, Any] | None
) -> None:
    leave(tmp_path / "x", demo_samples())
    good = {"token_dtype": 4, "mask_dtype": 1, "capacity": 9, "sequence_multiple": 1, "pad_id": None, "metadata": {}}
    shard = {} if options is None else {**good, **options}
    path = tmp_path / "x.building" / "build.json"
    path.write_text(json.dumps({"sft-building": 1, "work": "build", "shard": shard}))
    for act in (find_remains, recover, rebuild):
        with pytest.raises(FormatError, match=r"x\.building.*: not the options .*; remove its folder, and build again"):
            act(tmp_path / "x")
    shutil.rmtree(path.parent)
    write_samples(tmp_path / "x", demo_samples())
    assert folder_of(tmp_path) == WHOLE


def test_memory_does_not_depend_on_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = demo_samples(200)
    leave(tmp_path / "x", packs)
    runs: list[int] = []
    monkeypatch.setattr(writer_module, "STAGE_TOKENS", 16)
    recover(tmp_path / "x", progress=runs.append)
    assert sum(runs) == sum(len(pack.tokens) for pack in packs)
    assert max(runs) <= max(16, *(len(pack.tokens) for pack in packs))
    assert_holds(Shard(tmp_path / "x"), packs)
    assert set(five_files(tmp_path / "x")) == set(SUFFIXES)


def test_a_full_disk_does_not_leave_the_prefix_locked(tmp_path: Path) -> None:
    leave(tmp_path / "x", demo_samples(3))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "x.building" / ".bin").stat().st_size, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            recover(tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value.filename).startswith(f"{tmp_path}/x.building/")
    assert found(tmp_path / "x").num_packs == 3
    assert recover(tmp_path / "x").num_packs == 3
    assert folder_of(tmp_path) == WHOLE


def test_what_was_copied_elsewhere_is_recovered_there(tmp_path: Path) -> None:
    packs = demo_samples(4)
    leave(tmp_path / "a" / "x", packs)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "x.building" / "lock").unlink()
    os.rename(tmp_path / "b" / "x.building", tmp_path / "b" / "y.building")
    assert found(tmp_path / "b" / "y").num_packs == 4
    recover(tmp_path / "b" / "y")
    assert_holds(Shard(tmp_path / "b" / "y"), packs)
    assert folder_of(tmp_path / "b") == [name.replace("x", "y", 1) for name in WHOLE]
    leave_complete(lambda: write_samples(tmp_path / "c" / "x", packs))
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    assert not recover(tmp_path / "d" / "x").rebuilt
    assert folder_of(tmp_path / "d") == WHOLE
    assert_holds(Shard(tmp_path / "d" / "x"), packs)
