"""The writer of padded memmap folders, used directly: five arrays, rules, memory."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_trips import assert_reads, run_of
from memmap_folders import ARRAYS, WHOLE, expected_arrays, loaded
from sample_packs import Sample, assert_is, demo_samples, folder_of, sample_of

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.memmap import MemmapShardWriter, Reader
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.packs.run import Column


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
    """A mask of all ones has values at sequence ends. They are stored, and readers need to know the alignment."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        writer = MemmapShardWriter(folder, num_bins=2, pack_size=64, total_seq_starts=4)
        for i in range(2):
            mask = np.ones(50, np.uint8)
            mask[24] = i  # one of the four sequences ends like in a label-aligned mask
            writer.write_bin(i, np.arange(50, dtype=np.int32), mask, np.array([0, 25], np.uint32))
        assert "mask_alignment" not in writer.finalize()
        assert loaded(Path(folder))["loss_mask"][:, :50].sum() == 99
        reader = Reader(folder)
        assert [int(run.loss_mask.sum()) for run in reader.runs()] == [96]
        assert reader.notes == ["3 loss mask values at the end of a sequence were set to 0, because no token follows"]


def test_a_stated_alignment_reaches_the_reader(tmp_path: Path) -> None:
    pack = sample_of([3, 4], lambda p: int(p in (1, 2, 4)), lambda p: p)
    writer = MemmapShardWriter(tmp_path / "x", 1, 9, 2, mask_alignment="rolled-right")
    writer.write_bin(0, pack.tokens, [0, *pack.mask[:-1]], pack.starts)
    writer.finalize()
    assert_is(Reader(tmp_path / "x").read(0), pack)
    with pytest.raises(FormatError, match="rolled-right-aligned, so mask alignment 'token' would shift them twice"):
        Reader(tmp_path / "x", mask_alignment="token")
    with pytest.raises(FormatError, match="unknown mask alignment 'rolled'; choose one of label, token, rolled-right"):
        MemmapShardWriter(tmp_path / "y", 1, 9, 2, mask_alignment="rolled")  # type: ignore[arg-type]


def test_packs_come_with_the_columns_that_the_writer_was_opened_for(tmp_path: Path) -> None:
    """Their arrays have full length from the start, and missing values would read as zeros."""
    pack = Sample([5, 6, 7], [0, 1, 1], [0, 2])
    column = Column(ColumnSpec("sequence", np.float32), np.array([1.5, 2.5], np.float32))
    with MemmapShardWriter(tmp_path / "x", 1, 9, 2, columns={"grade": column.spec}) as writer:
        with pytest.raises(FormatError, match="other columns than the spec of this writer"):
            write_bins(writer, [pack])
        writer.write(dataclasses.replace(run_of([pack]), columns={"grade": column}))
        writer.finalize()
    assert np.load(tmp_path / "x/grade.col.npy").tolist() == [1.5, 2.5]


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
        ({"input_ids": [5, 70000, 7]}, SequenceError, "id 70000, but uint16 stores at most 65535"),
        ({"input_ids": [5.5, 6, 7]}, FormatError, "integers"),
        ({"input_ids": [[5, 6, 7]]}, SequenceError, "one dimension"),
        ({"seq_start_id": []}, SequenceError, "P2"),
        ({"seq_start_id": [1]}, SequenceError, "P2"),
        ({"seq_start_id": [0, 0]}, SequenceError, "P3"),
        ({"seq_start_id": [0, 3]}, SequenceError, "P4"),
        ({"seq_start_id": [0, 1, 2], "input_ids": [1] * 4, "loss_mask": [0] * 4}, FormatError, "and 2 more sequences"),
        ({"input_ids": [1] * 5, "loss_mask": [0] * 5}, SequenceError, "5 tokens, but rows have 4"),
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
        ((2, 4.0, 2), "pack_size: 4.0"),
        ((2, 4, 2, np.float32), "dtype of ids is float32, expected an integer type"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        MemmapShardWriter(tmp_path / "x", *arguments)
    assert folder_of(tmp_path) == []


def test_a_full_disk_is_an_error_when_the_writer_opens(tmp_path: Path) -> None:
    for rows in (2**27, 2**31):  # an exbibyte, and more than a file size can represent
        with pytest.raises(OSError, match=r"input_ids\.npy") as caught:
            MemmapShardWriter(tmp_path / "x", rows, 2**31 - 1, rows)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert folder_of(tmp_path) == []


def test_the_space_is_reserved_and_the_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()  # exists already, like a temporary directory
    writer = MemmapShardWriter(tmp_path / "x", 100, 1000, 100)
    assert folder_of(tmp_path / "x") == []
    (hidden,) = (entry for entry in tmp_path.iterdir() if entry.name != "x")
    stat = (hidden / "output/input_ids.npy").stat()
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


def write_good(folder: Path, **options: Any) -> None:
    with MemmapShardWriter(folder, 1, 4, 2, **options) as writer:
        writer.write_bin(**GOOD)
        writer.finalize()


def test_a_folder_with_files_of_others_is_kept(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("notes")
    for overwrite in (False, True):
        with pytest.raises(
            FormatError, match=r"x: expected a folder .*, found mine, a file of 5 bytes that begins with b'notes'"
        ):
            write_good(tmp_path / "x", overwrite=overwrite)
    (tmp_path / "y").mkdir()
    with MemmapShardWriter(tmp_path / "y", 1, 4, 2) as late:
        late.write_bin(**GOOD)
        (tmp_path / "y" / "mine").write_text("x")
        with pytest.raises(FormatError, match="found mine, a file of 1 bytes"):
            late.finalize()
    assert (folder_of(tmp_path / "x"), folder_of(tmp_path / "y")) == (["mine"], ["mine"])
    assert folder_of(tmp_path) == ["x", "y"]


def test_a_folder_of_the_format_may_be_replaced(tmp_path: Path) -> None:
    write_good(tmp_path / "x", extra={"first": True})
    with pytest.raises(FormatError, match="--overwrite"):
        write_good(tmp_path / "x")
    write_good(tmp_path / "x", overwrite=True)
    assert "first" not in json.loads((tmp_path / "x" / "manifest.json").read_text())
    assert (folder_of(tmp_path), folder_of(tmp_path / "x")) == (["x"], WHOLE)
    # An array that the manifest does not list belongs to another program; without a manifest, all arrays do.
    for name in ("embeddings.npy", "grade.col.npy"):
        np.save(tmp_path / "x" / name, np.ones(3))
        with pytest.raises(FormatError, match=f"x: expected .*, found {re.escape(name)}, a file of"):
            write_good(tmp_path / "x", overwrite=True)
        (tmp_path / "x" / name).unlink()
    (tmp_path / "x" / "manifest.json").unlink()
    with pytest.raises(FormatError, match=r"x: expected .*, found input_ids\.npy, a file of"):
        write_good(tmp_path / "x", overwrite=True)


# ---- memory ----

NUM_PACKS, PACK = 1000, 4096
NBYTES = NUM_PACKS * PACK * 5


class Accumulating:
    """A bad writer for comparison: it keeps every pack until the end."""

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
    """Return the growth of the peak resident set of a new process while it writes, in bytes."""
    code = (
        f"import re, {__name__} as t\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) << 10\n"
        "before = peak()\n"
        f"t.write_many(t.{kind.__name__}, {str(folder)!r})\n"
        "print(peak() - before)"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.sample(1)
@pytest.mark.parametrize("measure", [heap_growth, rss_growth])
def test_memory_is_for_one_pack_and_the_bound_tells_an_accumulating_writer(
    tmp_path: Path, measure: Callable[[Any, Path], int]
) -> None:
    bound = NBYTES // 4
    assert measure(MemmapShardWriter, tmp_path / "a") < bound
    assert measure(Accumulating, tmp_path / "b") > bound
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()
