"""Stock Megatron datasets are read with a mask rule or separate masks, and all their fields are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_packs import Sample, assert_holds

from megatron_sft_idx import open_dataset
from megatron_sft_idx.cli.main import main
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.shard import Shard


def stock(prefix: Path, items: list[list[Any]], dtype: Any = np.int32, *, multimodal: bool = False) -> str:
    """Write a dataset with Megatron's own builder."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for item in items:
        builder.add_item(torch.tensor(item))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


ITEMS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_a_stock_dataset_with_a_rule(tmp_path: Path, dtype: Any) -> None:
    source = stock(tmp_path / "x", ITEMS, dtype)
    ds = open_dataset(source, mask_rule="all")
    expected = [Sample(item, [1] * len(item), [0]) for item in ITEMS]
    assert_holds(ds, expected)
    assert ds.format == "megatron"
    assert ds[0]["input_ids"].dtype == (np.uint16 if dtype in (np.uint8, np.uint16) else np.int32)
    assert main(["convert", source, f"{tmp_path}/y", "--to", "sft-idx", "--mask-rule", "all"]) == 0
    assert_holds(Shard(tmp_path / "y"), expected)
    with pytest.raises(FormatError, match="has no loss masks; pass either mask_rule"):
        open_dataset(source)
    with pytest.raises(FormatError, match="pass either mask_rule"):
        open_dataset(source, mask_rule="all", mask_path=source)


@pytest.mark.parametrize("alignment", ["label", "token"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_stock_dataset_with_parallel_masks(tmp_path: Path, alignment: str, dtype: Any) -> None:
    packs = [Sample(item, [i % 2 for i in item], [0]) for item in ITEMS]
    source = stock(tmp_path / "x", ITEMS)
    masks = stock(tmp_path / "m", [p.mask if alignment == "token" else p.label_mask for p in packs], dtype)
    arguments = ["--mask-path", masks, "--mask-alignment", alignment]
    assert main(["convert", source, f"{tmp_path}/y", "--to", "sft-idx", *arguments]) == 0
    shard = Shard(tmp_path / "y")
    assert_holds(shard, packs)
    assert shard.header.mask_dtype == dtype
    for items, words in [(ITEMS[:-1], "3 masks for the 4 items"), ([*ITEMS[:-1], [1]], "1 mask values for 4 tokens")]:
        with pytest.raises((FormatError, SequenceError), match=words):
            open_dataset(source, mask_path=stock(tmp_path / "other", items))


def test_what_no_stock_dataset_of_text_is(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="a multimodal dataset"):
        open_dataset(stock(tmp_path / "m", ITEMS, multimodal=True), mask_rule="all")
    with pytest.raises(FormatError, match="items of float32"):
        open_dataset(stock(tmp_path / "f", ITEMS, np.float32), mask_rule="all")
    with pytest.raises(SequenceError, match="x:1: has no tokens"):
        open_dataset(stock(tmp_path / "x", [[1], [], [2]]), mask_rule="all")
    with pytest.raises(SequenceError, match="n:2: position 1 has id -5"):
        open_dataset(stock(tmp_path / "n", [[1], [2], [3, -5]]), mask_rule="all")[2]
    with pytest.raises(SequenceError, match="id 4294967296"):
        open_dataset(stock(tmp_path / "w", [[2**32]], np.int64), mask_rule="all")[0]


def test_items_with_gaps_between_them_are_read(tmp_path: Path) -> None:
    source = stock(tmp_path / "x", [[1, 2], [99], [3, 4, 5]])
    raw = bytearray((tmp_path / "x.idx").read_bytes())
    # The index lacks the middle item; its bytes stay in the .bin.
    lengths, pointers = np.array([2, 3], "<i4"), np.array([0, 12], "<i8")
    head = raw[:18] + np.array([2, 3], "<u8").tobytes()
    (tmp_path / "x.idx").write_bytes(
        head + lengths.tobytes() + pointers.tobytes() + np.arange(3, dtype="<i8").tobytes()
    )
    expected = [Sample([1, 2], [1, 1], [0]), Sample([3, 4, 5], [1, 1, 1], [0])]
    assert_holds(open_dataset(source, mask_rule="all"), expected)
    convert(source, str(tmp_path / "y"), "sft-idx", ConvertOptions(reader={"mask_rule": "all"}))
    assert_holds(Shard(tmp_path / "y"), expected)


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (9, 2, "version 2"),
        (17, 9, "dtype code 9"),
        (18, 2**63 - 1, "the file was truncated or changed"),
        (18, 2**64 - 1, "the file was truncated or changed"),
        (26, 2**64 - 1, "the file was truncated or changed"),
        (34, -1, "item 0 has -1 tokens"),
        (34, 2**31 - 1, "item 0 has 2147483647 tokens"),
        (50, -8, "at byte -8"),
        (58, 0, "item 1 has 1 tokens at byte 0 .* overlaps"),
        (58, 2**63 - 1, "item 1 .* at byte 9223372036854775807"),
    ],
)
def test_a_lying_index_is_refused(tmp_path: Path, position: int, value: int, words: str) -> None:
    source = stock(tmp_path / "x", ITEMS)
    raw = bytearray((tmp_path / "x.idx").read_bytes())
    size = {9: 8, 17: 1, 34: 4}.get(position, 8)
    raw[position : position + size] = value.to_bytes(size, "little", signed=value < 0)
    (tmp_path / "x.idx").write_bytes(raw)
    with pytest.raises((FormatError, SequenceError), match=words):
        open_dataset(source, mask_rule="all")


def test_a_stock_dataset_cut_short_is_refused(tmp_path: Path) -> None:
    source = stock(tmp_path / "x", ITEMS)
    whole = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(whole[:-1])
    with pytest.raises(FormatError, match="item 3 has 4 tokens at byte 24"):
        open_dataset(source, mask_rule="all")
    (tmp_path / "x.bin").unlink()
    with pytest.raises(FormatError, match=r"x\.bin: not found"):
        open_dataset(source, mask_rule="all")
