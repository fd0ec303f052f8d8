"""Our dataset and builder compared with the stock Megatron classes that they replace."""

from __future__ import annotations

import gc
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, _IndexWriter
from sample_packs import Sample, assert_holds, assert_is, demo_samples, five_files, write_samples
from torch.utils.data import DataLoader

import megatron_sft_idx
from megatron_sft_idx.builder import SFTIndexedDatasetBuilder
from megatron_sft_idx.dataset import MMapIndexedDataset, SFTIndexedDataset
from megatron_sft_idx.errors import FormatError, SequenceError, ShardNotFoundError
from megatron_sft_idx.shard import Shard

ROOT = Path(__file__).parents[2]
PACKS = demo_samples(23)
DTYPES = [np.uint16, np.int32]


@pytest.fixture(scope="module", params=DTYPES)
def prefix(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    path = str(tmp_path_factory.mktemp("faces") / "x")
    with SFTIndexedDatasetBuilder(path + ".bin", request.param, capacity=64) as builder:
        for pack in PACKS:
            builder.add_pack(pack.tokens, pack.label_mask, pack.starts)
    return path


@pytest.fixture
def ours(prefix: str) -> SFTIndexedDataset:
    return SFTIndexedDataset(prefix)


@pytest.fixture
def stock(prefix: str) -> IndexedDataset:
    return IndexedDataset(prefix)


# ---- the dataset, compared with the stock one ----


def test_stock_reads_the_same_tokens(ours: SFTIndexedDataset, stock: IndexedDataset) -> None:
    assert isinstance(ours, IndexedDataset)
    assert len(ours) == len(stock) == len(PACKS)
    for i in range(-len(PACKS), len(PACKS)):
        np.testing.assert_array_equal(ours[i]["input_ids"], stock[i], strict=True)
        np.testing.assert_array_equal(ours.get(i), stock.get(i), strict=True)
        assert_is(ours[i], PACKS[i])
    for pack, tokens in zip(ours[3:9], stock[3:9], strict=True):
        np.testing.assert_array_equal(pack["input_ids"], tokens, strict=True)


def test_stock_reads_the_same_tokens_in_a_fresh_process(tmp_path: Path) -> None:
    program = """
import json, sys
from megatron.core.datasets.indexed_dataset import IndexedDataset
for prefix in sys.argv[1:]:
    dataset = IndexedDataset(prefix)
    print(json.dumps([dataset.index.dtype.__name__, [dataset[i].tolist() for i in range(len(dataset))]]))
print(json.dumps([module for module in sys.modules if module.startswith("megatron_sft_idx")]))
"""
    names = [np.dtype(dtype).name for dtype in DTYPES]
    for name in names:
        write_samples(tmp_path / name, PACKS, token_dtype=name)
    command = [sys.executable, "-I", "-c", program, *(str(tmp_path / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()[-len(names) - 1 :]]
    assert found == [*([name, [pack.tokens for pack in PACKS]] for name in names), []]


def test_what_gpt_dataset_asks_is_answered_as_stock_does(ours: SFTIndexedDataset, stock: IndexedDataset) -> None:
    for name in ("sequence_lengths", "document_indices"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(stock, name), strict=True)
        np.testing.assert_array_equal(getattr(ours.index, name), getattr(stock.index, name), strict=True)
    np.testing.assert_array_equal(ours.index.sequence_pointers, stock.index.sequence_pointers, strict=True)
    np.testing.assert_array_equal(ours.get_document_indices(), stock.get_document_indices(), strict=True)
    assert ours.sequence_lengths.dtype == np.int32
    assert len(ours.index) == len(stock.index)
    for name in ("dtype", "dtype_size", "sequence_count", "document_count", "sequence_modes"):
        assert getattr(ours.index, name) == getattr(stock.index, name)
    for name in ("path_prefix", "multimodal", "mmap", "object_storage_config"):
        assert getattr(ours, name) == getattr(stock, name)
    for i in range(-len(PACKS), len(PACKS)):
        found, expected = ours.index[i], stock.index[i]
        assert found == expected
        assert [type(value) for value in found] == [type(value) for value in expected]


@pytest.mark.parametrize("mmap", [True, False])
def test_parts_are_as_stock_gives_them(prefix: str, mmap: bool) -> None:
    ours, stock = SFTIndexedDataset(prefix, mmap=mmap), IndexedDataset(prefix, mmap=mmap)
    assert ours.mmap is mmap
    for i, pack in enumerate(PACKS):
        for offset in range(len(pack.tokens)):
            for length in (None, 1, len(pack.tokens) - offset):
                arguments = (np.int32(i), np.int32(offset), length and np.int32(length))
                np.testing.assert_array_equal(ours.get(*arguments), stock.get(*arguments), strict=True)


@pytest.mark.parametrize("index", [23, -24, 99, -99])
def test_an_index_outside_is_an_index_error_in_all_faces(ours: SFTIndexedDataset, index: int) -> None:
    for ask in (ours.__getitem__, ours.get, ours.sequences, ours.index.__getitem__):
        with pytest.raises(IndexError):
            ask(index)


def test_document_indices_can_be_set_as_in_stock(ours: SFTIndexedDataset) -> None:
    chosen = np.array([0, 5, 23])
    ours.set_document_indices(chosen)
    assert ours.document_indices is chosen
    assert ours.get_document_indices() is chosen


def test_stock_methods_keep_their_parameters() -> None:
    for stock, ours in ((IndexedDataset, SFTIndexedDataset), (IndexedDatasetBuilder, SFTIndexedDatasetBuilder)):
        for name, method in inspect.getmembers(stock, inspect.isfunction):
            if name.startswith("__") and name not in ("__init__", "__getitem__", "__len__"):
                continue
            expected = list(inspect.signature(method).parameters.values())
            found = list(inspect.signature(getattr(ours, name)).parameters.values())
            positional = [p.name for p in found if p.kind == p.POSITIONAL_OR_KEYWORD]
            assert positional == [p.name for p in expected], name
            for mine, theirs in zip(found, expected, strict=False):
                assert mine.default == theirs.default or theirs.default is inspect.Parameter.empty, (name, mine)


def test_the_builders_own_parameters() -> None:
    assert str(inspect.signature(SFTIndexedDatasetBuilder.__init__)) == (
        "(self, bin_path: 'str', dtype: 'Any' = <class 'numpy.int32'>, multimodal: 'bool' = False, *,"
        " capacity: 'int | None' = None, mask_dtype: 'Any' = <class 'numpy.uint8'>,"
        " sequence_multiple: 'int' = 1, pad_id: 'int | None' = None, overwrite: 'bool' = False,"
        " metadata: 'Mapping[str, Any] | None' = None, columns: 'Mapping[str, ColumnSpec] | None' = None) -> 'None'"
    )


def test_copies_are_writable(prefix: str) -> None:
    ours = SFTIndexedDataset(prefix)
    assert not ours[3]["input_ids"].flags.writeable
    assert not ours.get(3).flags.writeable
    for ids, mask in ours.sequences(3, copy=True):
        ids[:] = mask[:] = 0
    ours.get(3, copy=True)[:] = 0
    copied = SFTIndexedDataset(prefix, copy=True)
    pack = copied[3]
    pack["input_ids"][:] = pack["loss_mask"][:] = 0
    assert_is(ours[3], PACKS[3])
    assert_is(copied[3], PACKS[3])


def test_views_outlive_the_dataset(prefix: str) -> None:
    pack = SFTIndexedDataset(prefix)[3]
    tokens = SFTIndexedDataset(prefix).get(4)
    gc.collect()
    assert_is(pack, PACKS[3])
    assert tokens.tolist() == PACKS[4].tokens


def test_the_old_name_is_an_alias() -> None:
    assert MMapIndexedDataset is SFTIndexedDataset
    assert megatron_sft_idx.MMapIndexedDataset is SFTIndexedDataset
    assert megatron_sft_idx.SFTIndexedDatasetBuilder is SFTIndexedDatasetBuilder


def test_exists_asks_for_all_five(tmp_path: Path, prefix: str) -> None:
    assert SFTIndexedDataset.exists(prefix)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"x{suffix}").write_bytes(b"")
    assert IndexedDataset.exists(str(tmp_path / "x"))
    assert not SFTIndexedDataset.exists(str(tmp_path / "x"))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"multimodal": True}, "pass False"),
        ({"object_storage_config": object()}, "object storage"),
        ({"s3_config": object()}, "object storage"),
    ],
)
def test_what_is_not_supported_is_refused(prefix: str, options: dict[str, Any], word: str) -> None:
    with pytest.raises(FormatError, match=word):
        SFTIndexedDataset(prefix, **options)


def test_modes_are_refused(ours: SFTIndexedDataset) -> None:
    with pytest.raises(FormatError, match="no sequence modes"):
        _ = ours.sequence_modes


def test_a_failed_open_is_silent_when_collected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ShardNotFoundError):
        SFTIndexedDataset(str(tmp_path / "x"))
    with pytest.raises(FormatError):
        SFTIndexedDatasetBuilder(str(tmp_path / "x.bin"), np.int64)
    gc.collect()
    assert capfd.readouterr().err == ""


# ---- workers ----


def test_the_pickle_is_small(prefix: str) -> None:
    for options in ({}, {"mmap": False, "copy": True}):
        ours = SFTIndexedDataset(prefix, **options)
        raw = pickle.dumps(ours)
        assert len(raw) - len(prefix) < 200
        again = pickle.loads(raw)
        assert again.shard._files is None
        assert (again.path_prefix, again.mmap) == (prefix, ours.mmap)
        assert_holds(again, PACKS)
        np.testing.assert_array_equal(again.sequence_lengths, ours.sequence_lengths)


def tokens_of(packs: Any) -> list[tuple[list[int], list[int], list[int]]]:
    return [(p["input_ids"].tolist(), p["loss_mask"].tolist(), p["seq_boundaries"].tolist()) for p in packs]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_data_loader_workers_read_the_same(tmp_path: Path, method: str) -> None:
    write_samples(tmp_path / "x", PACKS)
    ours = SFTIndexedDataset(str(tmp_path / "x"))
    loader = DataLoader(ours, batch_size=4, num_workers=2, multiprocessing_context=method, collate_fn=tokens_of)
    found = [pack for batch in loader for pack in batch]
    assert found == tokens_of(ours)
    assert [tuple(pack) for pack in found] == [(p.tokens, p.label_mask, p.bounds) for p in PACKS]


# ---- the builder ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 23])
def test_stock_writes_the_same_idx_and_bin(tmp_path: Path, dtype: Any, count: int) -> None:
    with SFTIndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype) as ours:
        stock = IndexedDatasetBuilder(str(tmp_path / "stock.bin"), dtype)
        for pack in PACKS[:count]:
            ours.add_pack(pack.tokens, pack.label_mask, pack.starts)
            stock.add_document(pack.tokens, [len(pack.tokens)])
        stock.finalize(str(tmp_path / "stock.idx"))
    with _IndexWriter(str(tmp_path / "written.idx"), dtype) as writer:
        writer.write([len(pack.tokens) for pack in PACKS[:count]], None, list(range(count + 1)))
    idx = (tmp_path / "x.idx").read_bytes()
    assert idx == (tmp_path / "stock.idx").read_bytes() == (tmp_path / "written.idx").read_bytes()
    assert (tmp_path / "x.bin").read_bytes() == (tmp_path / "stock.bin").read_bytes()


def test_tensors_are_taken(tmp_path: Path) -> None:
    with SFTIndexedDatasetBuilder(str(tmp_path / "x.bin")) as builder:
        builder.add_pack(torch.tensor([1, 2, 3]), torch.tensor([1, 1, 0]), torch.tensor([0]))
        builder.add_pack(torch.tensor([1, 2, 3], dtype=torch.int16), torch.tensor([True, True, False]), [0])
        builder.add_pack(torch.arange(6)[::2], torch.tensor([1.0, 1.0, 0.0], dtype=torch.float16), [0])
        for place, bad in (
            (0, torch.tensor([1.0, 2, 3])),
            (1, torch.tensor([1.0, 1, 0], requires_grad=True)),
            (1, torch.tensor([1.0, 1, 0], dtype=torch.bfloat16)),
            (0, torch.tensor(3)),
            (0, torch.empty(3, dtype=torch.int64, device="meta")),
        ):
            arguments: list[Any] = [torch.tensor([1, 2, 3]), torch.tensor([1, 1, 0]), torch.tensor([0])]
            arguments[place] = bad
            with pytest.raises(SequenceError, match="pack 3: "):
                builder.add_pack(*arguments)
    assert [pack["input_ids"].tolist() for pack in SFTIndexedDataset(str(tmp_path / "x"))] == [
        *([1, 2, 3], [1, 2, 3], [0, 2, 4])
    ]


def test_token_masks_are_shifted_once_and_what_is_dropped_is_counted(tmp_path: Path) -> None:
    pack = Sample([1, 2, 3, 4, 5], [1, 1, 0, 1, 1], [0, 3])
    with SFTIndexedDatasetBuilder(str(tmp_path / "x.bin")) as builder:
        builder.add_pack(pack.tokens, pack.mask, pack.starts, mask_alignment="token")
        with pytest.raises(SequenceError, match='mask_alignment="token"'):
            builder.add_pack(pack.tokens, pack.mask, pack.starts)
    assert builder.writer.dropped_first_tokens == 2
    assert SFTIndexedDataset(str(tmp_path / "x"))[0]["loss_mask"].tolist() == pack.label_mask == [1, 0, 0, 1, 0]


def test_stock_methods_without_masks_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with SFTIndexedDatasetBuilder(str(tmp_path / "x.bin")) as builder:
        assert isinstance(builder, IndexedDatasetBuilder)
        for call in (
            lambda: builder.add_item(torch.tensor([1])),
            lambda: builder.add_document(torch.tensor([1]), [1]),
            builder.end_document,
        ):
            with pytest.raises(FormatError, match="use add_pack"):
                call()
    assert len(Shard(tmp_path / "x")) == 0


@pytest.mark.parametrize(
    ("path", "options", "word"),
    [
        ("x.bin", {"multimodal": True}, "pass False"),
        ("x", {}, "PREFIX.bin"),
        ("x.idx", {}, "PREFIX.bin"),
        ("x.loss.bin", {}, "PREFIX.bin"),
        ("x.seq.bin", {}, "PREFIX.bin"),
        ("x.idx.bin", {}, "end like one of the five"),
        (".bin", {}, "not a prefix"),
        ("x.bin", {"dtype": np.int64}, "int64"),
        ("x.bin", {"dtype": np.uint8}, "uint8"),
        ("x.bin", {"mask_dtype": np.float16}, "float16"),
        ("x.bin", {"capacity": 0}, "capacity"),
        ("x.bin", {"metadata": {"a": object()}}, "metadata"),
    ],
)
def test_arguments_outside_the_format_are_refused(tmp_path: Path, path: str, options: Any, word: str) -> None:
    with pytest.raises(FormatError, match=word):
        SFTIndexedDatasetBuilder(str(tmp_path) + "/" + path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_live_bin_is_not_truncated(prefix: str) -> None:
    before = five_files(prefix)
    with pytest.raises(FormatError, match="already exist"):
        SFTIndexedDatasetBuilder(prefix + ".bin")
    with pytest.raises(RuntimeError, match="stop"), SFTIndexedDatasetBuilder(prefix + ".bin", overwrite=True):
        raise RuntimeError("stop")
    assert five_files(prefix) == before


def test_other_shards_are_appended(tmp_path: Path) -> None:
    for name, packs in (("a", PACKS[:9]), ("b", []), ("c", PACKS[9:])):
        write_samples(tmp_path / name, packs)
    with SFTIndexedDatasetBuilder(str(tmp_path / "x.bin")) as builder:
        for name in "abc":
            builder.add_index(str(tmp_path / name))
    write_samples(tmp_path / "y", PACKS)
    assert five_files(tmp_path / "x") == five_files(tmp_path / "y")


def test_other_shards_must_fit(tmp_path: Path) -> None:
    write_samples(tmp_path / "a", PACKS)
    write_samples(tmp_path / "weights", [Sample([1, 2], [0, 0.5], [0])], mask_dtype=np.float32)
    with SFTIndexedDatasetBuilder(str(tmp_path / "x.bin"), np.uint16) as builder:
        with pytest.raises(FormatError, match="tokens are int32, but this builder writes uint16"):
            builder.add_index(str(tmp_path / "a"))
        with pytest.raises(ShardNotFoundError):
            builder.add_index(str(tmp_path / "nothing"))
    with SFTIndexedDatasetBuilder(str(tmp_path / "y.bin"), capacity=2) as builder:
        with pytest.raises(SequenceError, match="rule P1"):
            builder.add_index(str(tmp_path / "a"))
        with pytest.raises(SequenceError, match="rule P7"):
            builder.add_index(str(tmp_path / "weights"))


@pytest.mark.parametrize("form", [lambda path: path, Path, lambda path: path.parent / "." / "y" / ".." / path.name])
def test_finalize_takes_the_index_path_it_would_use(tmp_path: Path, form: Any) -> None:
    builder = SFTIndexedDatasetBuilder(str(tmp_path / "x.bin"))
    with pytest.raises(FormatError, match="have the same prefix"):
        builder.finalize(str(tmp_path / "y.idx"))
    header = builder.finalize(str(form(tmp_path / "x.idx")))
    assert header == SFTIndexedDataset(str(tmp_path / "x")).header
    with pytest.raises(FormatError, match="finished"):
        builder.finalize()
