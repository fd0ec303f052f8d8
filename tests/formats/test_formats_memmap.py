"""Folders of padded arrays, written by this package or by open_memmap, read in one process and in many."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_trips import any_packs, assert_reads, run_of, spec_of, write_packs
from hypothesis import given, settings
from hypothesis import strategies as st
from memmap_folders import WHOLE, expected_arrays, make_folder
from sample_packs import Sample, assert_is, demo_samples, folder_of, sample_of

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.memmap import Reader, Writer, recognise
from megatron_sft_idx.formats.packed_dataset import open_dataset


def read_in_workers(folder: Path, context: str) -> list[dict[str, Any]]:
    """Read two epochs with a DataLoader with four persistent workers, and return the second one."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        open_dataset(folder),  # type: ignore[arg-type]
        batch_size=8,
        num_workers=4,
        persistent_workers=True,
        multiprocessing_context=context,
        collate_fn=list,
    )
    for _ in range(2):
        packs = [pack for batch in loader for pack in batch]
    return packs


# A spawned worker imports torch again, which takes seconds.
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_four_persistent_workers_read_every_pack(tmp_path: Path, context: str) -> None:
    packs = demo_samples(100)
    write_packs(Writer, tmp_path / "x", packs)
    open_dataset(tmp_path / "x")[0]  # open files of the parent must not harm the children
    for found, expected in zip(read_in_workers(tmp_path / "x", context), packs, strict=True):
        assert_is(found, expected)


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
    """A pack that ends in zeros keeps them, and values after a pack's end can be anything."""
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


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("packed_len", lambda a: np.where(np.arange(7) == 4, 0, a), "packed_len is 0"),
        ("packed_len", lambda a: np.where(np.arange(7) == 4, 31, a), "packed_len is 31, expected 1 to 30"),
        ("packed_len", lambda a: np.where(np.arange(7) == 4, 2**32 - 1, a), "packed_len is 4294967295"),
        ("packed_len", lambda a: np.where(np.arange(7) == 4, -3, a.astype(np.int64)), "packed_len is -3"),
        ("seq_offsets", lambda a: np.where(np.arange(8) == 5, a[4], a), "seq_offsets are 10, 10"),
        ("seq_offsets", lambda a: np.where(np.arange(8) == 5, 2**32 - 1, a), "seq_offsets are 10, 4294967295"),
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
        ({"seq_starts": np.zeros((2, 2), np.uint32)}, r"seq_starts.npy has shape .*, expected"),
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
    """Return a header with any values, and a few bytes of data."""
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(840)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (npy("(7, 30)", "'|O'"), "not unpickled"),
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
    assert recognise(str(make_folder(tmp_path / "x", demo_samples(), 30)))
    assert not recognise(str(tmp_path))
    (tmp_path / "manifest.json").write_bytes(b"[" * 10000)
    assert not recognise(str(tmp_path))
    assert not recognise(str(tmp_path / "manifest.json"))


def test_weights_are_refused_unless_loss_is_allowed(tmp_path: Path) -> None:
    packs = [demo_samples()[0], sample_of([3], lambda p: 0.5, lambda p: p)]
    spec = {"mask_dtype": np.dtype(np.float32)}
    with pytest.raises(FormatError, match=r"pack 1 has a loss weight of 0\.5"):
        write_packs(Writer, tmp_path / "x", packs, spec=spec)
    assert folder_of(tmp_path) == []
    write_packs(Writer, tmp_path / "x", packs, spec=spec, lossy=True)
    assert Reader(tmp_path / "x").read(1)["loss_mask"].tolist() == [1, 1, 0]
    with pytest.raises(SequenceError, match="packs are not truncated"):
        write_packs(Writer, tmp_path / "y", packs, spec={**spec, "capacity": 2}, lossy=True)


def test_nothing_is_left_where_the_source_ends_early(tmp_path: Path) -> None:
    with (
        pytest.raises(FormatError, match=r"7 packs.*expected 9"),
        Writer(tmp_path / "x", spec_of(demo_samples(9))) as out,
    ):
        out.write(run_of(demo_samples()))
    assert folder_of(tmp_path) == []


def test_an_empty_dataset_without_a_capacity(tmp_path: Path) -> None:
    write_packs(Writer, tmp_path / "x", [], spec={"capacity": 0})
    assert_reads(Reader(tmp_path / "x"), [])
