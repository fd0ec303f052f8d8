"""Writing shards: exact for arrays of any form, in bounded memory."""

from __future__ import annotations

import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_packs import assert_holds, demo_samples, five_files, folder_of, samples, write_samples

from megatron_sft_idx import _native
from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import CorruptShardError, FormatError, SequenceError
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.packs import run as run_module
from megatron_sft_idx.shard import Shard, ShardWriter, pack_log
from megatron_sft_idx.shard import writer as writer_module

# ---- read equals written ----


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    token_dtype=st.sampled_from([np.uint16, np.int32]),
    weights=st.booleans(),
    aligned=st.booleans(),
    multiple=st.sampled_from([1, 2, 8]),
    bounded=st.booleans(),
    together=st.booleans(),
)
def test_any_packs_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    token_dtype: Any,
    weights: bool,
    aligned: bool,
    multiple: int,
    bounded: bool,
    together: bool,
) -> None:
    packs = data.draw(samples(token_dtype=token_dtype, weights=weights))
    needed = max((pack.padded(multiple) for pack in packs), default=0)
    capacity = max(needed, 1) if bounded else None
    masks = [pack.mask if aligned else pack.label_mask for pack in packs]
    alignment: Any = "token" if aligned else "label"
    prefix = tmp_path_factory.mktemp("any") / "x"
    mask_dtype = np.float32 if weights else np.uint8
    with ShardWriter(
        prefix,
        token_dtype=token_dtype,
        mask_dtype=mask_dtype,
        capacity=capacity,
        sequence_multiple=multiple,
        durable=False,
    ) as writer:
        if together:
            writer.add_packs(
                np.array([t for pack in packs for t in pack.tokens], np.int64),
                np.array([m for mask in masks for m in mask]),
                np.array([s for pack in packs for s in pack.starts], np.int64),
                np.array([len(pack.tokens) for pack in packs], np.int64),
                np.array([len(pack.starts) for pack in packs], np.int64),
                mask_alignment=alignment,
            )
        else:
            for pack, mask in zip(packs, masks, strict=True):
                writer.add_pack(pack.tokens, mask, pack.starts, mask_alignment=alignment)
    dropped = sum(pack.mask[start] != 0 for pack in packs for start in pack.starts)
    assert writer.dropped_first_tokens == (dropped if aligned else 0)
    for backend in ("mmap", "pread"):
        shard = Shard(prefix, backend=backend)  # type: ignore[arg-type]
        assert_holds(shard, packs)
        header = shard.header
        assert (header.token_dtype, header.mask_dtype) == (np.dtype(token_dtype), np.dtype(mask_dtype))
        assert header.num_sequences == sum(len(pack.starts) for pack in packs)
        assert header.num_tokens == sum(len(pack.tokens) for pack in packs)
        assert header.num_trained_tokens == sum(value > 0 for pack in packs for value in pack.label_mask)
        assert header.num_masked_packs == sum(not any(pack.label_mask) for pack in packs)
        assert header.capacity == (capacity if bounded else needed)
        assert header.longest_pack == max((len(pack.tokens) for pack in packs), default=0)
        assert header.most_sequences == max((len(pack.starts) for pack in packs), default=0)


@settings(max_examples=10, deadline=None)
@given(packs=samples())
def test_same_packs_same_bytes(tmp_path_factory: pytest.TempPathFactory, packs: Any) -> None:
    folder = tmp_path_factory.mktemp("same")
    first, second = (write_samples(folder / name, packs) for name in "ab")
    assert five_files(folder / "a") == five_files(folder / "b")
    assert first == second == Shard(folder / "a").header


def test_how_often_it_is_flushed_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = demo_samples(200)
    write_samples(tmp_path / "x", packs)
    monkeypatch.setattr(writer_module, "STAGE_TOKENS", 3)
    monkeypatch.setattr(pack_log, "_MAX_RECORDS", 2)
    write_samples(tmp_path / "y", packs)
    assert five_files(tmp_path / "x") == five_files(tmp_path / "y")


@settings(max_examples=20, deadline=None)
@given(
    first=samples(),
    second=samples(),
    stage=st.sampled_from([1, 7, 1 << 16]),
    backend=st.sampled_from(["mmap", "pread"]),
)
def test_adding_a_shard_is_adding_its_packs(
    tmp_path_factory: pytest.TempPathFactory, first: Any, second: Any, stage: int, backend: Any
) -> None:
    folder = tmp_path_factory.mktemp("added")
    write_samples(folder / "a", first)
    write_samples(folder / "b", second)
    with pytest.MonkeyPatch.context() as patch, ShardWriter(folder / "x", durable=False) as writer:
        patch.setattr(run_module, "COPIED_TOKENS", stage)
        patch.setattr(writer_module, "_LONG_RUN", stage)  # longer ones are not staged
        for name in "ab":
            writer.add_shard(Shard(folder / name, backend=backend))
    write_samples(folder / "y", [*first, *second])
    assert five_files(folder / "x") == five_files(folder / "y")


@pytest.mark.parametrize(("which", "rule"), [(0, "O1"), (1, "O2")])
def test_a_shard_whose_offsets_leave_tokens_out_is_not_added(tmp_path: Path, which: int, rule: str) -> None:
    header = write_samples(tmp_path / "a", demo_samples())
    base = (header.nbytes, header.token_offsets_offset)[which]
    for place in (base, base + 8 * header.num_packs):
        raw = bytearray((tmp_path / "a.seq.idx").read_bytes())
        raw[place : place + 8] = (int.from_bytes(raw[place : place + 8], "little") + 1).to_bytes(8, "little")
        (tmp_path / "b.seq.idx").write_bytes(raw)
        for suffix in SUFFIXES[:-1]:
            (tmp_path / f"b{suffix}").write_bytes((tmp_path / f"a{suffix}").read_bytes())
        with pytest.raises(CorruptShardError, match=rule), ShardWriter(tmp_path / "x", durable=False) as writer:
            writer.add_shard(Shard(tmp_path / "b"))
    assert not (tmp_path / "x.seq.idx").exists()


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize(("suffix", "mask_dtype"), [(".bin", "u1"), (".loss.bin", "f4"), (".seq.bin", "u1")])
def test_a_shard_without_its_checksums_is_not_added(tmp_path: Path, suffix: str, mask_dtype: str, backend: Any) -> None:
    write_samples(tmp_path / "a", demo_samples(), mask_dtype=mask_dtype)
    path = tmp_path / f"a{suffix}"
    raw = bytearray(path.read_bytes())
    raw[1 if suffix == ".loss.bin" else 0] ^= 1  # another valid weight
    path.write_bytes(raw)
    writer = ShardWriter(tmp_path / "x", mask_dtype=mask_dtype, durable=False)
    with pytest.raises(CorruptShardError, match=re.escape(f"{path}: ")) as caught:
        writer.add_shard(Shard(tmp_path / "a", backend=backend))
    assert caught.value.rule == "F3"
    with pytest.raises(FormatError, match="finished or was abandoned"):
        writer.finalize()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(f"a{one}" for one in SUFFIXES)


def test_a_shard_with_a_pack_that_does_not_fit_leaves_the_packs_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "COPIED_TOKENS", 1)
    with ShardWriter(tmp_path / "a", durable=False) as writer:
        for length in (3, 4, 9, 2):
            writer.add_pack([1] * length, [0] * length, [0])
    with ShardWriter(tmp_path / "x", capacity=5, durable=False) as writer:
        writer.add_pack([1, 2], [0, 0], [0])
        with pytest.raises(SequenceError, match="rule P1"):
            writer.add_shard(Shard(tmp_path / "a"))
        writer.add_pack([3], [0], [0])
    assert [len(pack["input_ids"]) for pack in Shard(tmp_path / "x")] == [2, 3, 4, 1]
    assert verify_shard(tmp_path / "x", full=True).ok


# ---- accepted arguments ----

EXPECTED = ([5, 6, 7, 8], [0, 1, 1, 0], [0, 1])
FORMS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    lambda v: np.array(v, np.uint8),
    lambda v: np.array(v, np.int8),
    lambda v: np.array(v, np.uint64),
    lambda v: np.array(v, np.int64),
    lambda v: np.array(v, ">i4"),
    lambda v: np.array(v, ">u2"),
    lambda v: np.array(v, np.int32).view(np.dtype(np.int32).newbyteorder("<")),  # "<i4" is not always "=i4"
    lambda v: np.repeat(np.array(v, np.int32), 2)[::2],
    lambda v: np.array(v[::-1], np.int64)[::-1],
    lambda v: np.frombuffer(b"\0" + np.array(v, np.int32).tobytes(), np.int32, offset=1),
    lambda v: memoryview(np.array(v, np.int32)),
    lambda v: np.array(v).astype(object).astype(int).tolist(),
    lambda v: range(v[0], v[-1] + 1) if v == list(range(v[0], v[-1] + 1)) else v,
]


@pytest.mark.parametrize("form", FORMS)
def test_arrays_of_any_integer_form_are_taken(tmp_path: Path, form: Callable[[list[int]], Any]) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack(*map(form, EXPECTED))
    pack = Shard(tmp_path / "x")[0]
    assert (pack["input_ids"].tolist(), pack["loss_mask"].tolist()) == EXPECTED[:2]
    assert pack["seq_boundaries"].tolist() == [0, 1, 4]


@pytest.mark.parametrize("form", FORMS)
def test_many_packs_are_taken_in_the_same_forms(tmp_path: Path, form: Callable[[list[int]], Any]) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_packs(*map(form, ([*EXPECTED[0], 9, 3], [*EXPECTED[1], 0, 0], [0, 1, 0], [4, 2], [2, 1])))
    packs = Shard(tmp_path / "x")[:]
    assert [pack["input_ids"].tolist() for pack in packs] == [EXPECTED[0], [9, 3]]
    assert [pack["loss_mask"].tolist() for pack in packs] == [EXPECTED[1], [0, 0]]
    assert [pack["seq_boundaries"].tolist() for pack in packs] == [[0, 1, 4], [0, 2]]


@pytest.mark.parametrize("value", [4, [4.0], [[4]], [None], ["4"], [True], [2**64], np.array([2**63], np.uint64), [3]])
@pytest.mark.parametrize("name", ["pack_lengths", "pack_sequences"])
def test_counts_of_another_form_are_named(tmp_path: Path, name: str, value: Any) -> None:
    counts: dict[str, Any] = {"pack_lengths": [4], "pack_sequences": [2], name: value}
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        with pytest.raises(SequenceError, match=f"{tmp_path / 'x'}.*({name}|expected|pack)"):
            writer.add_packs(*EXPECTED, **counts)
        assert writer.num_packs == 0


@pytest.mark.parametrize("mask", [np.array(EXPECTED[1], bool), np.array(EXPECTED[1], bool).repeat(2)[::2]])
@pytest.mark.parametrize("dtype", [None, "f2", "f4", ">f4", "f8", "g"])
def test_masks_may_be_booleans_or_floats(tmp_path: Path, mask: np.ndarray, dtype: str | None) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack(EXPECTED[0], mask if dtype is None else mask.astype(dtype), EXPECTED[2])
    assert Shard(tmp_path / "x")[0]["loss_mask"].tolist() == EXPECTED[1]


@pytest.mark.parametrize(
    ("place", "value", "word"),
    [
        (0, 5, "pack 0: tokens has shape ()"),
        (0, [[5, 6], [7, 8]], "pack 0: tokens has shape (2, 2)"),
        (0, [5.0, 6.0, 7.0, 8.0], "pack 0: tokens has dtype float64; expected integers"),
        (0, [5, 6, 7, None], "pack 0: tokens has dtype object"),
        (0, np.array([5, 6, 7, 2**63], np.uint64), "pack 0: tokens has 9223372036854775808, which is too large"),
        (0, [5, 6, 7, 2**64], "pack 0: tokens has dtype object"),
        (0, [True] * 4, "pack 0: tokens has dtype bool; expected integers"),
        (0, ["a", "b", "c", "d"], "pack 0: tokens has dtype <U1"),
        (0, None, "pack 0: tokens has shape ()"),
        (0, [5, [6]], "pack 0: tokens"),
        (1, 1, "pack 0: loss_mask has shape ()"),
        (1, [0, 1j, 1, 0], "pack 0: loss_mask has dtype complex128"),
        (1, [0, 1, 0], "pack 0: 3 loss mask values for 4 tokens"),
        (
            1,
            np.array([0, 2**64 - 1, 0, 0], np.uint64),
            "pack 0: loss_mask has 18446744073709551615, which is too large",
        ),
        (2, 0, "pack 0: seq_starts has shape ()"),
        (2, [0.0, 1.0], "pack 0: seq_starts has dtype float64"),
        (2, [], "pack 0: it has no sequence starts, but needs at least a first one at 0 (rule P2)"),
    ],
)
def test_arrays_of_another_form_are_named(tmp_path: Path, place: int, value: Any, word: str) -> None:
    arguments: list[Any] = list(EXPECTED)
    arguments[place] = value
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        with pytest.raises(SequenceError) as caught:
            writer.add_pack(*arguments)
        assert word in str(caught.value)
        assert str(caught.value).startswith(str(tmp_path / "x"))


@pytest.mark.parametrize(
    "options",
    [
        {"capacity": 0},
        {"capacity": 2**31},
        {"capacity": 4.0},
        {"capacity": True},
        {"sequence_multiple": 0},
        {"sequence_multiple": None},
        {"pad_id": -1},
        {"pad_id": 2**31},
        {"token_dtype": np.int64},
        {"token_dtype": ">i4"},
        {"token_dtype": np.uint32},
        {"mask_dtype": np.float64},
        {"mask_dtype": bool},
    ],
)
def test_options_outside_the_format_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        ShardWriter(tmp_path / "x", **options)
    assert folder_of(tmp_path) == []


def test_another_alignment_is_refused(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer, pytest.raises(FormatError, match="'rolled'"):
        writer.add_pack([1], [0], [0], mask_alignment="rolled")  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["", ".bin", "folder/", "folder/.idx"])
def test_a_prefix_names_a_shard(prefix: str) -> None:
    with pytest.raises(FormatError, match="not a prefix"):
        ShardWriter(prefix)


# ---- memory ----


def heap_of_adding(count: int, add: Callable[[int], None]) -> int:
    """Return the peak of Python's heap during calls of ``add``, minus the bytes in use before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(count):
            add(i)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


BOUND = 4 << 20


def test_heap_does_not_grow_with_packs(tmp_path: Path) -> None:
    ids, mask, starts = np.arange(4), np.array([0, 1, 1, 0]), np.array([0, 2])
    mask = np.array([1, 0, 1, 0], np.uint8)
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        assert heap_of_adding(200_000, lambda _: writer.add_pack(ids, mask, starts)) < BOUND
        assert heap_of_adding(1, lambda _: writer.finalize()) < BOUND
    assert len(Shard(tmp_path / "x")) == 200_000


def test_a_writer_that_kept_lists_would_not_pass() -> None:
    lengths: list[int] = []
    documents: list[int] = []

    def add(i: int) -> None:
        lengths.append(300 + i)
        documents.append(300 + i)

    assert heap_of_adding(200_000, add) > BOUND


def test_a_pack_larger_than_the_stage_leaves_no_memory_behind(tmp_path: Path) -> None:
    ids = np.zeros(3 << 20, np.int32)
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack(ids, np.zeros(len(ids), np.uint8), [0])
        writer.flush()
        before = resident()
        for _ in range(3):
            writer.add_pack(ids, np.zeros(len(ids), np.uint8), [0])
            writer.flush()
        assert resident() - before < 16 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# ---- many packs at once ----


def test_the_kernel_is_the_one_rule_book(tmp_path: Path) -> None:
    """The kernel takes arrays of several packs, so a wrong length array must not reach past the tokens."""
    with ShardWriter(tmp_path / "x", durable=False) as writer, pytest.raises(SequenceError, match="tokens run out"):
        writer.add_packs([1, 2], [0, 0], [0], np.array([3]), np.array([1]))
    assert _native.PackStage.__module__ == "megatron_sft_idx._native"
