"""The folder of padded arrays: the writer's interface, the reader, and folders made by open_memmap."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_trips import any_packs, assert_reads, run_of, spec_of, write_packs
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import Sample, assert_is, demo_samples, folder_of, sample_of

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.memmap import MemmapShardWriter, Reader, Writer, recognise

ARRAYS = ("input_ids", "loss_mask", "packed_len", "seq_offsets", "seq_starts")
WHOLE = sorted(["manifest.json", *(f"{name}.npy" for name in ARRAYS)])


def loaded(folder: Path) -> dict[str, Any]:
    """The five arrays, as numpy reads them."""
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}


def expected_arrays(packs: Sequence[Sample], width: int, dtype: Any = np.int32) -> dict[str, Any]:
    ids, mask = np.zeros((len(packs), width), dtype), np.zeros((len(packs), width), np.uint8)
    for i, pack in enumerate(packs):
        ids[i, : len(pack.tokens)] = pack.tokens
        mask[i, : len(pack.tokens)] = pack.label_mask
    return {
        "input_ids": ids,
        "loss_mask": mask,
        "packed_len": np.array([len(p.tokens) for p in packs], np.uint32),
        "seq_offsets": np.cumsum([0, *(len(p.starts) for p in packs)]).astype(np.uint32),
        "seq_starts": np.array([s for p in packs for s in p.starts], np.uint32),
    }


def make_folder(folder: Path, packs: Sequence[Sample], width: int, **changes: Any) -> Path:
    """A folder as others make it: open_memmap, then a plain manifest. ``changes`` replace arrays or manifest keys."""
    folder.mkdir(exist_ok=True)
    for name, array in expected_arrays(packs, width).items():
        values = np.asarray(changes.pop(name, array))
        if values.size:
            out = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", values.dtype, values.shape)
            out[:] = values
        else:  # which open_memmap cannot make
            np.save(folder / f"{name}.npy", values)
    manifest = {"version": "1.0", "format": "memmap_padded_v1", "num_bins": len(packs), "pack_size": width}
    manifest |= {"dtype": "<i4", "loss_mask_dtype": "<u1", "index_dtype": "<u4", "bins_written": len(packs)}
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}, indent=2))
    return folder


# ---- the writer's interface ----


def write_bins(writer: Any, packs: Sequence[Sample]) -> Any:
    for i, pack in enumerate(packs):
        writer.write_bin(i, np.array(pack.tokens), np.array(pack.label_mask), np.array(pack.starts))
    return writer.finalize()


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64, ">i4", "uint32"])
def test_all_five_arrays_come_back(tmp_path: Path, dtype: Any) -> None:
    packs = [*demo_samples(), sample_of([1] * 40, lambda p: 0, lambda p: p)]
    out = tmp_path / "shard_000000"
    total = sum(len(p.starts) for p in packs)
    manifest = write_bins(MemmapShardWriter(str(out), len(packs), 50, total, dtype), packs)
    arrays = loaded(out)
    for name, expected in expected_arrays(packs, 50).items():
        np.testing.assert_array_equal(arrays[name], expected, err_msg=name)
    assert arrays["input_ids"].dtype == np.dtype(dtype).newbyteorder("<")
    assert manifest == json.loads((out / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["dtype"]) == (
        "memmap_padded_v1",
        "1.0",
        np.dtype(dtype).newbyteorder("<").str,
    )
    assert (manifest["num_bins"], manifest["bins_written"], manifest["pack_size"]) == (8, 8, 50)
    assert folder_of(out) == WHOLE
    assert_reads(Reader(out), packs)


def test_masks_are_stored_as_they_come(tmp_path: Path) -> None:
    """All ones has values at sequence ends; they are the caller's, and readers clear them."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        writer = MemmapShardWriter(folder, num_bins=2, pack_size=64, total_seq_starts=4)
        for i in range(2):
            writer.write_bin(i, np.arange(50, dtype=np.int32), np.ones(50, np.uint8), np.array([0, 25], np.uint32))
        assert "mask_alignment" not in writer.finalize()
        assert loaded(Path(folder))["loss_mask"][:, :50].all()
        reader = Reader(folder)
        assert [int(run.loss_mask.sum()) for run in reader.runs()] == [96]
        assert reader.notes == [
            "4 loss mask values at the end of a sequence, where there is nothing to predict, set to 0"
        ]


def test_a_stated_alignment_reaches_the_reader(tmp_path: Path) -> None:
    pack = sample_of([3, 4], lambda p: int(p in (1, 2, 4)), lambda p: p)
    writer = MemmapShardWriter(tmp_path / "x", 1, 9, 2, mask_alignment="rolled-right")
    writer.write_bin(0, pack.tokens, [0, *pack.mask[:-1]], pack.starts)
    writer.finalize()
    assert_is(Reader(tmp_path / "x").read(0), pack)
    with pytest.raises(FormatError, match="once more"):
        Reader(tmp_path / "x", mask_alignment="token")


GOOD: dict[str, Any] = {"bin_id": 0, "input_ids": [5, 6, 7], "loss_mask": [0, 1, 0], "seq_start_id": [0, 2]}


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"bin_id": 1}, FormatError, "pack 1, expected 0 of 1"),
        ({"bin_id": -1}, FormatError, "expected 0"),
        ({"input_ids": []}, SequenceError, "0 in input_ids, 3 in loss_mask"),
        ({"input_ids": [], "loss_mask": []}, SequenceError, "P1"),
        ({"loss_mask": [0, 1]}, SequenceError, "3 in input_ids, 2 in loss_mask"),
        ({"loss_mask": [0, 0.5, 0]}, SequenceError, "P7"),
        ({"loss_mask": [0, 256, 0]}, SequenceError, "P7"),
        ({"input_ids": [5, 2**32 + 6, 7]}, SequenceError, "P8"),
        ({"input_ids": [5, -1, 7]}, SequenceError, "P8"),
        ({"input_ids": [5, 70000, 7]}, SequenceError, "id 70000 in uint16, at most 65535"),
        ({"input_ids": [5.5, 6, 7]}, FormatError, "integers"),
        ({"input_ids": [[5, 6, 7]]}, SequenceError, "one dimension"),
        ({"seq_start_id": []}, SequenceError, "P2"),
        ({"seq_start_id": [1]}, SequenceError, "P2"),
        ({"seq_start_id": [0, 0]}, SequenceError, "P3"),
        ({"seq_start_id": [0, 3]}, SequenceError, "P4"),
        ({"seq_start_id": [0, 1, 2], "input_ids": [1] * 4, "loss_mask": [0] * 4}, FormatError, "and 2 more sequences"),
        ({"input_ids": [1] * 5, "loss_mask": [0] * 5}, SequenceError, "5 tokens in rows of 4"),
    ],
)
def test_a_pack_that_breaks_a_rule_is_refused_and_leaves_no_trace(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with MemmapShardWriter(tmp_path / "x", 1, 4, 2, np.uint16) as writer:
        with pytest.raises(error, match=reason):
            writer.write_bin(**{**GOOD, **change})
        writer.write_bin(**GOOD)
        writer.finalize()
    packs = [sample_of([2, 1], lambda p: 0, lambda p: p + 5)]
    packs[0].mask[1] = 0
    arrays = loaded(tmp_path / "x")
    assert [arrays[name].tolist() for name in ARRAYS] == [[[5, 6, 7, 0]], [[0, 1, 0, 0]], [3], [0, 2], [0, 2]]


def test_missing_packs_and_sequences_are_refused(tmp_path: Path) -> None:
    with MemmapShardWriter(tmp_path / "x", 2, 4, 4) as writer:
        writer.write_bin(**GOOD)
        with pytest.raises(FormatError, match=r"1 packs with 2 sequences, expected 2 \(num_bins\) with 4"):
            writer.finalize()
        with pytest.raises(FormatError, match="pack 0, expected 1 of 2"):
            writer.write_bin(**GOOD)
        writer.write_bin(**{**GOOD, "bin_id": 1, "seq_start_id": [0]})
        with pytest.raises(FormatError, match="2 packs with 3 sequences"):
            writer.finalize()
        with pytest.raises(FormatError, match="pack 2, expected 2 of 2"):
            writer.write_bin(**{**GOOD, "bin_id": 2})
    assert folder_of(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((-1, 4, 0), "num_bins -1"),
        ((2**32, 4, 2**33), "num_bins 4294967296"),
        ((2, 0, 2), "pack_size 0"),
        ((2, 2**31, 2), "pack_size 2147483648"),
        ((2, 4, 1), "total_seq_starts 1"),
        ((2, 4, 2**32), "total_seq_starts 4294967296"),
        ((2, 4.0, 2), "pack_size 4.0"),
        ((2, 4, 2, np.float32), "dtype float32"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        MemmapShardWriter(tmp_path / "x", *arguments)
    assert folder_of(tmp_path) == []


def test_a_full_disk_is_an_error_when_the_writer_opens(tmp_path: Path) -> None:
    for rows in (2**27, 2**31):  # an exbibyte, and more than a file's size can say
        with pytest.raises(OSError, match=r"input_ids\.npy") as caught:
            MemmapShardWriter(tmp_path / "x", rows, 2**31 - 1, rows)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert folder_of(tmp_path) == []


def test_the_space_is_reserved_and_the_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()  # as a temporary directory is there already
    writer = MemmapShardWriter(tmp_path / "x", 100, 1000, 100)
    assert folder_of(tmp_path / "x") == []
    (hidden,) = (entry for entry in tmp_path.iterdir() if entry.name != "x")
    stat = (hidden / "input_ids.npy").stat()
    assert stat.st_size > 400_000
    assert stat.st_blocks * 512 >= stat.st_size
    for i in range(100):
        writer.write_bin(i, [i], [0], [0])
    writer.finalize()
    assert (folder_of(tmp_path), folder_of(tmp_path / "x")) == (["x"], WHOLE)
    with pytest.raises(FormatError, match="finished"):
        writer.write_bin(0, [0], [0], [0])
    writer.abandon()
    assert folder_of(tmp_path / "x") == WHOLE


def test_a_folder_with_files_is_kept_unless_it_may_go(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("x")
    with pytest.raises(FormatError, match="--overwrite"):
        MemmapShardWriter(tmp_path / "x", 1, 4, 2)
    (tmp_path / "y").mkdir()
    with MemmapShardWriter(tmp_path / "y", 1, 4, 2) as late:
        late.write_bin(**GOOD)
        (tmp_path / "y" / "mine").write_text("x")
        with pytest.raises(FormatError, match="appeared"):
            late.finalize()
    assert (folder_of(tmp_path / "x"), folder_of(tmp_path / "y")) == (["mine"], ["mine"])
    with MemmapShardWriter(tmp_path / "x", 1, 4, 2, overwrite=True) as writer:
        writer.write_bin(**GOOD)
        writer.finalize()
    assert (folder_of(tmp_path), folder_of(tmp_path / "x")) == (["x", "y"], WHOLE)


# ---- memory ----

NUM_PACKS, PACK = 1000, 4096
NBYTES = NUM_PACKS * PACK * 5


class Accumulating:
    """What such a writer must not be: it keeps every pack until the end."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._kept: list[tuple[Any, ...]] = []

    def write_bin(self, *pack: Any) -> None:
        self._kept.append(pack)

    def finalize(self) -> None:
        with MemmapShardWriter(*self._arguments) as writer:
            for pack in self._kept:
                writer.write_bin(*pack)
            writer.finalize()


def write_many(kind: Any, folder: str) -> None:
    writer = kind(folder, NUM_PACKS, PACK, 2 * NUM_PACKS)
    for i in range(NUM_PACKS):
        writer.write_bin(i, np.full(PACK, i, np.int32), np.zeros(PACK, np.uint8), np.array([0, 9]))
    writer.finalize()


def heap_growth(kind: Any, folder: Path) -> int:
    tracemalloc.start()
    try:
        write_many(kind, str(folder))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def rss_growth(kind: Any, folder: Path) -> int:
    """How far the resident set of a fresh process grows while it writes: its high-water mark, in bytes."""
    code = (
        "import re, sys, test_formats_memmap as t\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) << 10\n"
        "before = peak()\n"
        f"t.write_many(t.{kind.__name__}, {str(folder)!r})\n"
        "print(peak() - before)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize("measure", [heap_growth, rss_growth])
def test_memory_is_for_one_pack_and_the_bound_tells_an_accumulating_writer(
    tmp_path: Path, measure: Callable[[Any, Path], int]
) -> None:
    bound = NBYTES // 4
    assert measure(MemmapShardWriter, tmp_path / "a") < bound
    assert measure(Accumulating, tmp_path / "b") > bound
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()


# ---- the writer of runs, and the reader ----


@given(any_packs(), st.integers(1, 3), st.sampled_from([np.uint16, np.int32]))
@settings(max_examples=15, deadline=None)
def test_packs_come_back(packs: list[Sample], pieces: int, dtype: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec = {"token_dtype": np.dtype(dtype), "capacity": 1200, "pad_id": 3, "metadata": {"tokenizer": "t"}}
        written = write_packs(Writer, Path(folder, "x"), packs, pieces=pieces, spec=spec)
        reader = Reader(Path(folder, "x"))
        assert_reads(reader, packs)
        assert (reader.spec, reader.notes) == (written, [])


def test_same_packs_same_bytes(tmp_path: Path) -> None:
    packs = demo_samples(23)
    for pieces in (1, 2, 23):
        write_packs(Writer, tmp_path / f"{pieces}", packs, pieces=pieces)
    for name in WHOLE:
        assert len({(tmp_path / f"{pieces}" / name).read_bytes() for pieces in (1, 2, 23)}) == 1, name
    assert Reader(tmp_path / "1").identity == Reader(tmp_path / "23").identity


def test_folders_made_by_open_memmap(tmp_path: Path) -> None:
    packs = demo_samples(9)
    reader = Reader(make_folder(tmp_path / "x", packs, 30))
    assert_reads(reader, packs)
    assert (reader.spec.capacity, reader.spec.pad_id, reader.notes) == (30, None, [])
    before = reader.identity
    os.utime(tmp_path / "x" / "input_ids.npy", ns=(1, 1))
    assert Reader(tmp_path / "x").identity != before
    assert_reads(Reader(make_folder(tmp_path / "none", [], 30)), [])


def test_other_dtypes_and_byte_orders(tmp_path: Path) -> None:
    packs = demo_samples(9)
    arrays = expected_arrays(packs, 30)
    reader = Reader(
        make_folder(
            tmp_path / "x",
            packs,
            30,
            input_ids=arrays["input_ids"].astype(">u2"),
            loss_mask=arrays["loss_mask"].astype(bool),
            packed_len=arrays["packed_len"].astype(">i8"),
            seq_offsets=arrays["seq_offsets"].astype(np.int64),
            seq_starts=arrays["seq_starts"].astype(">u4"),
        )
    )
    assert_reads(reader, packs)
    assert reader.spec.token_dtype == np.uint16
    int64 = make_folder(tmp_path / "y", packs, 30, input_ids=arrays["input_ids"].astype(np.int64))
    assert_reads(Reader(int64), packs)
    weights = make_folder(tmp_path / "z", packs, 30, loss_mask=arrays["loss_mask"] * np.float64(0.5))
    assert Reader(weights).read(3)["loss_mask"].tolist() == [v / 2 for v in packs[3].label_mask]


def test_padding_is_told_by_lengths_and_never_by_values(tmp_path: Path) -> None:
    """A pack that ends in zeros keeps them, and what is behind a pack's end may be anything."""
    packs = [sample_of([4], lambda p: 0, lambda p: [7, 0, 0, 0][p])]
    arrays = expected_arrays(packs, 6)
    arrays["input_ids"][0, 4:], arrays["loss_mask"][0, 4:] = -5, 77
    folder = make_folder(tmp_path / "x", packs, 6, **{k: arrays[k] for k in ("input_ids", "loss_mask")})
    assert_reads(Reader(folder), packs)


def test_rolled_masks_are_rolled_back(tmp_path: Path) -> None:
    packs = [sample_of([3, 4], lambda p: int(p in (1, 2, 4)), lambda p: p)] * 2
    rolled = np.array([[0, *pack.mask[:-1], 0] for pack in packs], np.uint8)
    reader = Reader(make_folder(tmp_path / "x", packs, 8, loss_mask=rolled), mask_alignment="rolled-right")
    assert_reads(reader, packs)


def sequences_of(packs: Sequence[Sample]) -> Iterator[int]:
    return (s for p in packs for s in p.starts)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("packed_len", lambda a: np.where(np.arange(7) == 4, 0, a), "packed_len is 0"),
        ("packed_len", lambda a: np.where(np.arange(7) == 4, 31, a), "packed_len is 31, expected 1 to 30"),
        ("packed_len", lambda a: np.where(np.arange(7) == 4, 2**32 - 1, a), "packed_len is 4294967295"),
        ("packed_len", lambda a: np.where(np.arange(7) == 4, -3, a.astype(np.int64)), "packed_len is -3"),
        ("seq_offsets", lambda a: np.where(np.arange(8) == 5, a[4], a), "seq_offsets 10, 10"),
        ("seq_offsets", lambda a: np.where(np.arange(8) == 5, 2**32 - 1, a), "seq_offsets 10, 4294967295"),
        ("seq_starts", lambda a: np.where(np.arange(len(a)) == 10, 1, a), "P2"),
        ("input_ids", lambda a: a - (np.arange(7) == 4)[:, None] * 10**4, "P8"),
        ("loss_mask", lambda a: a + (np.arange(7) == 4)[:, None] * np.uint8(2), "P7"),
    ],
)
def test_a_broken_pack_is_named(tmp_path: Path, name: str, change: Callable[[Any], Any], reason: str) -> None:
    packs = demo_samples()
    changed = change(expected_arrays(packs, 30)[name])
    reader = Reader(make_folder(tmp_path / "x", packs, 30, **{name: changed}))
    assert_is(reader.read(0), packs[0])
    for use in (lambda: reader.read(4), lambda: list(reader.runs())):
        with pytest.raises(SequenceError, match=reason) as caught:
            use()
        assert caught.value.position == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "memmap_ragged_v2"}, "format 'memmap_ragged_v2'"),
        ({"version": "2.0"}, "version 2.0"),
        ({"num_bins": 6, "bins_written": 6}, r"input_ids.npy has shape \(7, 30\), expected \(6, 30\)"),
        ({"num_bins": -1}, "num_bins -1"),
        ({"num_bins": 2**63, "bins_written": 2**63}, "has shape"),
        ({"num_bins": "7"}, "num_bins '7'"),
        ({"pack_size": 0}, "pack_size 0"),
        ({"bins_written": 5}, "5 of 7 packs written"),
        ({"packed_len": np.zeros(6, np.uint32)}, r"packed_len.npy has shape \(6,\), expected \(7,\)"),
        ({"seq_starts": np.zeros((2, 2), np.uint32)}, "one dimension"),
        ({"seq_offsets": np.arange(8, dtype=np.uint32)}, "seq_offsets go from 0 to 7"),
        ({"input_ids": np.zeros((7, 30), np.float32)}, "input_ids.npy holds float32"),
        ({"loss_mask": np.asfortranarray(np.zeros((7, 30), np.uint8)).T}, "shape"),
    ],
)
def test_folders_that_do_not_add_up_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = make_folder(tmp_path / "x", demo_samples(), 30, **changes)
    with pytest.raises(FormatError, match=reason):
        Reader(folder)


def npy(shape: str, descr: str = "'<i4'", order: str = "False") -> bytes:
    """A header that says anything, and a few bytes of data."""
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(840)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (npy("(7, 30)", "'|O'"), "never unpickled"),
        (npy("(7, 30)", "[('a', '<i4')]"), "expected numbers"),
        (npy("(7, 9223372036854775808)"), "expected 258254417031933722752"),
        (npy("(4611686018427387904, 4)"), "bytes, expected"),
        (npy("(-7, -30)"), "shape"),
        (npy("(True, 30)"), "shape"),
        (npy("(7, 30)", order="True"), "fortran_order"),
        (npy("(7, 30)")[:-1], "967 bytes, expected 968"),
        (npy("__import__('os').system('true')"), "not a .npy"),
        (npy("(" * 50), "not a .npy"),
        (b"\x93NUMPY\x03\x00", "not a .npy"),
        (b"PK\x03\x04" + bytes(100), "not a .npy"),
        (b"", "not a .npy"),
    ],
)
def test_arrays_that_attack_are_refused(tmp_path: Path, raw: bytes, reason: str) -> None:
    folder = make_folder(tmp_path / "x", demo_samples(), 30)
    (folder / "input_ids.npy").write_bytes(raw)
    with pytest.raises(FormatError, match=reason):
        Reader(folder)


@pytest.mark.parametrize("name", WHOLE)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "x", demo_samples(), 30)
    (folder / name).unlink()
    with pytest.raises(FormatError, match=name):
        Reader(folder)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_folders_fail_cleanly(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder(Path(scratch, "x"), demo_samples(5), 30)
        path = folder / data.draw(st.sampled_from(WHOLE))
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, min(len(raw), 200) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
        recognise(str(folder))
        try:
            reader = Reader(folder)
            for i in range(len(reader)):
                reader.read(i)
            assert sum(len(run.pack_lengths) for run in reader.runs()) == reader.spec.num_packs
        except (FormatError, SequenceError):
            pass


def test_it_is_recognised_by_its_manifest(tmp_path: Path) -> None:
    assert "memmap_padded_v1" in (recognise(str(make_folder(tmp_path / "x", demo_samples(), 30))) or "")
    assert recognise(str(tmp_path)) is None
    (tmp_path / "manifest.json").write_bytes(b"[" * 10000)
    assert recognise(str(tmp_path)) is None
    assert recognise(str(tmp_path / "manifest.json")) is None


def test_weights_are_refused_unless_loss_is_allowed(tmp_path: Path) -> None:
    packs = [demo_samples()[0], sample_of([3], lambda p: 0.5, lambda p: p)]
    spec = {"mask_dtype": np.dtype(np.float32)}
    with pytest.raises(FormatError, match=r"pack 1 has a loss weight of 0\.5"):
        write_packs(Writer, tmp_path / "x", packs, spec=spec)
    assert folder_of(tmp_path) == []
    write_packs(Writer, tmp_path / "x", packs, spec=spec, allow_loss=True, pack_size=5)
    assert Reader(tmp_path / "x").read(1)["loss_mask"].tolist() == [1, 1, 0]
    with pytest.raises(SequenceError, match="nothing is truncated"):
        write_packs(Writer, tmp_path / "y", packs, spec=spec, allow_loss=True, pack_size=2)


def test_nothing_is_left_where_the_source_ends_early(tmp_path: Path) -> None:
    with (
        pytest.raises(FormatError, match=r"7 packs.*expected 9"),
        Writer(tmp_path / "x", spec_of(demo_samples(9))) as out,
    ):
        out.write(run_of(demo_samples()))
    assert folder_of(tmp_path) == []
