"""Token-aligned masks are never mistaken for label-aligned ones, in all formats that do not record the alignment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sample_packs import Sample, sample_of

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.formats.memmap import MemmapShardWriter
from megatron_sft_idx.formats.packed_dataset import open_dataset

Write = Callable[[Path, list[Sample]], None]
# Two sequences per pack, each with an answer that is trained to its end.
PACKS = [sample_of([5, 4], lambda position: int(position % 5 > 2), lambda position: position) for _ in range(6)]
LABELS = [0, 0, 1, 1, 0, 0, 0, 1, 0]


def rows_of(packs: list[Sample]) -> list[dict[str, list[int]]]:
    return [{"input_ids": pack.tokens, "loss_mask": pack.mask, "seq_start_id": pack.starts} for pack in packs]


def write_npy(path: Path, packs: list[Sample]) -> None:
    with open(path, "wb") as file:
        np.save(file, np.array(rows_of(packs), object), allow_pickle=True)


def write_parquet(path: Path, packs: list[Sample]) -> None:
    pq.write_table(pa.Table.from_pylist(rows_of(packs)), path)


def write_memmap(path: Path, packs: list[Sample]) -> None:
    writer = MemmapShardWriter(path, len(packs), 16, sum(len(pack.starts) for pack in packs))
    for number, pack in enumerate(packs):
        writer.write_bin(number, pack.tokens, pack.mask, pack.starts)
    writer.finalize()


WRITERS: dict[str, Write] = {
    "npy": write_npy,
    "parquet": write_parquet,
    "memmap": write_memmap,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_token_aligned_masks_are_not_taken_for_labels(write: Write, tmp_path: Path) -> None:
    write(tmp_path / "x", PACKS)
    source, target = str(tmp_path / "x"), str(tmp_path / "out")
    wanted = r"x: all of the first 12 sequences end in a loss mask above 0.*--mask-alignment token"
    for opening in (lambda: open_dataset(source), lambda: convert(source, target, "sft-idx")):
        with pytest.raises(FormatError, match=wanted):
            opening()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    convert(source, target, "sft-idx", ConvertOptions(mask_alignment="token"))
    for shifted in (open_dataset(source, mask_alignment="token"), open_dataset(target)):
        assert [pack["loss_mask"].tolist() for pack in shifted] == [LABELS] * 6


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_one_sequence_that_ends_as_labels_do_is_enough(write: Write, tmp_path: Path) -> None:
    """Then the caller's choice applies, because the alignment is unknown. Values at ends are dropped and counted."""
    label_aligned = Sample(PACKS[0].tokens, [0, 0, 1, 1, 1, 0, 0, 1, 0], PACKS[0].starts)
    write(tmp_path / "x", [label_aligned, *PACKS])
    dataset = open_dataset(tmp_path / "x")
    assert dataset[0]["loss_mask"].tolist() == LABELS
    report = convert(str(tmp_path / "x"), str(tmp_path / "out"), "sft-idx")
    assert any(note.startswith("13 loss mask values at the end of a sequence") for note in report.notes)
