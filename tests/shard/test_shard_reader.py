"""Reading shards: exact values, views that stay valid, and use in threads, forks and after pickling."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_packs import assert_holds, assert_is, demo_samples, samples, write_samples

from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard import opening as opening_module
from megatron_sft_idx.storage import PreadArray, open_array

BACKENDS = ["mmap", "pread"]
PACKS = demo_samples(23)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("reader") / "x")
    write_samples(path, PACKS, token_dtype=np.uint16, metadata={"a": 1})
    return path


@pytest.fixture(params=BACKENDS)
def shard(prefix: str, request: pytest.FixtureRequest) -> Shard:
    return Shard(prefix, backend=request.param)


# ---- one pack, many packs, parts of packs ----


@settings(max_examples=50, deadline=None)
@given(packs=samples(least=1), data=st.data())
def test_parts_are_parts_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, packs: Any, data: st.DataObject
) -> None:
    prefix = tmp_path_factory.mktemp("parts") / "x"
    write_samples(prefix, packs)
    index = data.draw(st.integers(-len(packs), len(packs) - 1))
    tokens = packs[index].tokens
    offset = data.draw(st.integers(0, len(tokens)))
    length = data.draw(st.none() | st.integers(0, len(tokens) - offset))
    for backend in BACKENDS:
        shard = Shard(prefix, backend=backend)  # type: ignore[arg-type]
        expected = tokens[offset:] if length is None else tokens[offset : offset + length]
        assert shard.get(index, offset, length).tolist() == expected
        label, bounds = packs[index].label_mask, packs[index].bounds
        assert [(ids.tolist(), mask.tolist()) for ids, mask in shard.sequences(index)] == [
            (tokens[a:b], label[a:b]) for a, b in pairwise(bounds)
        ]


@pytest.mark.parametrize("one", [int, np.int8, np.uint8, np.int64, np.uint64, np.array])
def test_any_integer_is_an_index(shard: Shard, one: Any) -> None:
    assert_is(shard[one(3)], PACKS[3])
    assert shard.get(one(3), one(1), one(1)).tolist() == PACKS[3].tokens[1:2]
    assert len(shard.sequences(one(3))) == len(PACKS[3].starts)


def test_small_numpy_offsets_do_not_overflow(shard: Shard) -> None:
    # Megatron's sample index is int32, and a shard can have more tokens; int8 shows the same in a small shard.
    assert shard.token_offsets[-2] > 127
    assert shard.get(-1, np.int8(0), np.int8(1)).tolist() == PACKS[-1].tokens[:1]
    assert shard.get(-1, np.int8(1)).tolist() == PACKS[-1].tokens[1:]


@pytest.mark.parametrize(
    "cut",
    [
        slice(None), slice(2, 5), slice(-3, None), slice(None, -20), slice(5, 2), slice(0, 0), slice(20, 99),
        slice(99, 100), slice(-99, 2), slice(np.int64(1), np.int64(3)), slice(None, None, 1),
    ],
)  # fmt: skip
def test_slices_are_lists_of_packs(shard: Shard, cut: slice) -> None:
    found = shard[cut]
    expected = PACKS[cut]
    assert isinstance(found, list)
    assert len(found) == len(expected)
    for pack, sample in zip(found, expected, strict=True):
        assert_is(pack, sample)


@pytest.mark.parametrize("step", [2, -1])
def test_other_steps_are_refused(shard: Shard, step: int) -> None:
    with pytest.raises(ValueError, match="step"):
        shard[::step]


@pytest.mark.parametrize("index", [23, -24, 2**63, -(2**63), np.int64(-24)])
def test_an_index_outside_is_an_index_error(shard: Shard, index: Any) -> None:
    for ask in (shard.__getitem__, shard.get, shard.sequences, shard.token_range):
        with pytest.raises(IndexError, match=r"the shard has 23"):
            ask(index)


@pytest.mark.parametrize("index", [1.0, "1", None, [1, 2], np.array([1, 2])])
def test_other_indices_are_type_errors(shard: Shard, index: Any) -> None:
    for ask in (shard.__getitem__, shard.get, shard.sequences):
        with pytest.raises(TypeError):
            ask(index)


@pytest.mark.parametrize(("offset", "length"), [(-1, None), (99, None), (0, 99), (0, -1), (2, 2**63), (-1, 1), (1, -1)])
def test_a_range_outside_the_pack_is_an_index_error(shard: Shard, offset: int, length: Any) -> None:
    with pytest.raises(IndexError, match="exceed pack 3"):
        shard.get(3, offset, length)


def test_iteration_is_all_packs(shard: Shard) -> None:
    for pack, sample in zip(shard, PACKS, strict=True):
        assert_is(pack, sample)


# ---- an empty shard ----


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_shard_is_a_shard(tmp_path: Path, backend: Any) -> None:
    header = write_samples(tmp_path / "x", [])
    shard = Shard(tmp_path / "x", backend=backend)
    assert len(shard) == header.num_packs == header.num_tokens == header.capacity == 0
    assert list(shard) == shard[:] == []
    assert shard.token_offsets.tolist() == shard.sequence_offsets.tolist() == [0]
    assert len(pickle.loads(pickle.dumps(shard))) == 0
    for index in (0, -1):
        with pytest.raises(IndexError, match="the shard has 0"):
            shard[index]


# ---- views ----


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("copied", [False, True])
def test_arrays_are_read_only_unless_copies_are_asked_for(prefix: str, backend: Any, copied: bool) -> None:
    shard = Shard(prefix, backend=backend, copy=copied)
    pack = shard[3]
    ids, mask = shard.sequences(3)[1]
    for array in (pack["input_ids"], pack["loss_mask"], shard.get(3), ids, mask):
        assert array.flags.writeable is copied
        if copied:
            array[:] = 7
        else:
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 7
    pack["seq_boundaries"][:] = 7
    assert_is(shard[3], PACKS[3])


def test_views_are_views_of_one_map(prefix: str) -> None:
    shard = Shard(prefix)
    assert np.shares_memory(shard[3]["input_ids"], shard.get(3))
    assert np.shares_memory(shard[3]["loss_mask"], shard.sequences(3)[0][1])
    assert not np.shares_memory(shard[3]["seq_boundaries"], shard[3]["seq_boundaries"])


def test_views_outlive_the_shard_and_its_files(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", PACKS)
    packs = list(Shard(tmp_path / "x"))
    write_samples(tmp_path / "x", demo_samples(2), overwrite=True)
    for suffix in SUFFIXES:
        (tmp_path / f"x{suffix}").unlink()
    gc.collect()
    for pack, sample in zip(packs, PACKS, strict=True):
        assert_is(pack, sample)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_open_shard_goes_on_reading_what_it_opened(tmp_path: Path, backend: Any) -> None:
    write_samples(tmp_path / "x", PACKS)
    shard = Shard(tmp_path / "x", backend=backend)
    lazy = pickle.loads(pickle.dumps(shard))
    write_samples(tmp_path / "x", PACKS[::-1], overwrite=True)
    assert_holds(shard, PACKS)
    with pytest.raises(FormatError, match="another shard has replaced it"):
        lazy[0]
    write_samples(tmp_path / "x", PACKS, overwrite=True)
    assert_holds(lazy, PACKS)


@pytest.mark.parametrize("others", [PACKS[::-1], PACKS[:3]], ids=["equal sizes", "other sizes"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shard_replaced_while_it_is_opened_is_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Any, others: Any
) -> None:
    """With equal sizes, only the second read of the header can detect it; other sizes do not count as damage."""
    write_samples(tmp_path / "x", PACKS)
    write_samples(tmp_path / "y", others)
    opened = 0

    def replacing(path: str, *arguments: Any, **options: Any) -> Any:
        nonlocal opened
        opened += 1
        if opened == 3:
            for suffix in SUFFIXES:
                shutil.move(tmp_path / f"y{suffix}", tmp_path / f"x{suffix}")
        return open_array(path, *arguments, **options)

    monkeypatch.setattr(opening_module, "open_array", replacing)
    with pytest.raises(FormatError, match="published here during opening"):
        Shard(tmp_path / "x", backend=backend)
    assert_holds(Shard(tmp_path / "x", backend=backend), others)


def test_a_file_cut_short_under_pread_is_an_error(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", PACKS)
    shard = Shard(tmp_path / "x", backend="pread")
    os.truncate(tmp_path / "x.bin", 8)
    with pytest.raises(CorruptShardError, match=r"cut short.*F2"):
        shard[-1]


def test_pread_reads_any_slice(tmp_path: Path) -> None:
    values = np.arange(1000, dtype="<u4")
    (tmp_path / "f").write_bytes(b"headhead" + values.tobytes())
    array = PreadArray(str(tmp_path / "f"), values.dtype, 1000, 8)
    with pytest.raises(ValueError, match="only be read with step 1, not 2"):
        array[::2]
    for cut in (slice(None), slice(0, 0), slice(5, 5), slice(7, 3), slice(-3, None), slice(990, 2000), slice(1, 999)):
        found = array[cut]
        np.testing.assert_array_equal(found, values[cut], strict=True)
        assert not found.flags.writeable


# ---- names and errors ----


def test_a_prefix_may_be_a_path_or_one_of_the_files(prefix: str) -> None:
    for name in (prefix, Path(prefix), *(prefix + suffix for suffix in SUFFIXES)):
        shard = Shard(name)
        assert shard.prefix == prefix
        assert_holds(shard, PACKS)


def test_only_one_suffix_is_taken_off(tmp_path: Path) -> None:
    # No writer makes such a shard, but shards can be renamed.
    write_samples(tmp_path / "b", PACKS)
    for suffix in SUFFIXES:
        os.rename(tmp_path / f"b{suffix}", tmp_path / f"a.idx{suffix}")
    assert_holds(Shard(str(tmp_path / "a.idx.bin")), PACKS)
    assert_holds(pickle.loads(pickle.dumps(Shard(str(tmp_path / "a.idx.bin")))), PACKS)


@pytest.mark.parametrize(
    ("present", "word"),
    [
        ([], "check the prefix"),
        ([".bin", ".idx"], "stock Megatron dataset without loss masks"),
        (SUFFIXES[:-1], "stock Megatron dataset without loss masks, or an incomplete copy of a shard"),
        ([".building"], "a command was interrupted here, or is still running"),
        ([".bin", ".building"], "a command was interrupted here, or is still running"),
    ],
)
def test_what_is_missing_is_said_with_a_remedy(tmp_path: Path, present: Any, word: str) -> None:
    for suffix in reversed(present):
        if suffix == ".building":
            ShardWriter(tmp_path / "x", overwrite=True).suspend()
        else:
            (tmp_path / f"x{suffix}").write_bytes(b"")
    with pytest.raises(ShardNotFoundError, match=word) as caught:
        Shard(tmp_path / "x")
    assert caught.value.missing == [str(tmp_path / f"x{s}") for s in SUFFIXES if s not in present]
    assert isinstance(caught.value, FileNotFoundError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_a_lock_is_no_interrupted_build(tmp_path: Path) -> None:
    (tmp_path / "x.building").mkdir()
    (tmp_path / "x.building" / "lock").touch()
    with pytest.raises(ShardNotFoundError, match="check the prefix"):
        Shard(tmp_path / "x")


def test_another_backend_is_refused(prefix: str) -> None:
    with pytest.raises(FormatError, match="backend 's3', choose one of mmap, os, pread, reopen"):
        Shard(prefix, backend="s3")  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 10**6), byte=st.integers(1, 255), backend=st.sampled_from(BACKENDS))
def test_a_flipped_byte_in_the_index_is_an_error_or_harmless(
    prefix: str, tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, backend: Any
) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    for suffix in SUFFIXES:
        (folder / f"x{suffix}").write_bytes(Path(prefix + suffix).read_bytes())
    raw = bytearray((folder / "x.seq.idx").read_bytes())
    place %= len(raw)
    raw[place] ^= byte
    (folder / "x.seq.idx").write_bytes(raw)
    (header_nbytes,) = struct.unpack_from("<I", raw, 12)
    if place < 320:
        with pytest.raises(FormatError):
            Shard(folder / "x", backend=backend)
        return
    assert header_nbytes == 320
    shard = Shard(folder / "x", backend=backend)
    for i in range(len(shard)):
        try:
            pack = shard[i]
            shard.sequences(i)
        except CorruptShardError as error:
            assert error.rule in ("O1", "O2")  # noqa: PT017
        else:
            assert len(pack["input_ids"]) == len(pack["loss_mask"]) == pack["seq_boundaries"][-1] > 0


# ---- workers ----


def test_a_pickle_is_small_and_opens_lazily(prefix: str) -> None:
    for backend in BACKENDS:
        shard = Shard(prefix, backend=backend, copy=True)  # type: ignore[arg-type]
        raw = pickle.dumps(shard)
        assert len(raw) - len(prefix) < 200
        again = pickle.loads(raw)
        assert again._files is None
        assert (again.prefix, again.backend, again.shard_id) == (prefix, backend, shard.shard_id)
        assert again[0]["input_ids"].flags.writeable
        assert_holds(again, PACKS)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert_holds(pickle.loads(pickle.dumps(Shard(prefix), protocol)), PACKS)
    assert_holds(copy.deepcopy(Shard(prefix)), PACKS)


def test_a_pickle_of_a_shard_that_is_gone_says_so_when_used(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", PACKS)
    shard = pickle.loads(pickle.dumps(Shard(tmp_path / "x")))
    (tmp_path / "x.seq.idx").unlink()
    with pytest.raises(ShardNotFoundError):
        shard[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_share_a_lazy_shard(prefix: str, backend: Any) -> None:
    for _ in range(20):
        shard = pickle.loads(pickle.dumps(Shard(prefix, backend=backend)))
        barrier = threading.Barrier(4)

        def read(start: int, shard: Any = shard, barrier: Any = barrier) -> None:
            barrier.wait()
            for i in range(len(PACKS)):
                assert_is(shard[(start + i) % len(PACKS)], PACKS[(start + i) % len(PACKS)])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, (0, 5, 11, 17)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lazy", [False, True])
def test_forks_share_an_open_shard(prefix: str, backend: Any, lazy: bool) -> None:
    shard = Shard(prefix, backend=backend)
    shard = pickle.loads(pickle.dumps(shard)) if lazy else shard
    children = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            status = 1
            try:
                for _ in range(20):
                    assert_holds(shard, PACKS)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for _ in range(20):
        assert_holds(shard, PACKS)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]


def test_a_shard_gives_its_descriptors_and_maps_back(prefix: str) -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count(str(Path(prefix).parent))
        return len(list(Path("/proc/self/fd").iterdir())), maps

    before = held()
    for backend in BACKENDS:
        shards = [Shard(prefix, backend=backend) for _ in range(3)]  # type: ignore[arg-type]
        packs = [shard[0] for shard in shards]
        assert held() != before
        del shards, packs
        gc.collect()
        assert held() == before
    write = Path(prefix + ".seq.idx").read_bytes()
    Path(prefix + "-bad.seq.idx").write_bytes(write)
    with pytest.raises(ShardNotFoundError):
        Shard(prefix + "-bad")
    assert held() == before
