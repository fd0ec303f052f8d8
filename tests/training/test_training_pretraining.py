"""Pretraining data in a blend: its rows equal Megatron's GPTDataset, and chats are the same as without it."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blends import CAPACITY, build, config_of, write_documents, write_packs
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from torch.utils.data import DataLoader, default_collate

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.training.batch import BatchAssembler, whole_batch
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.losses import file_names, files_of
from megatron_sft_idx.training.pretraining import EveryToken
from megatron_sft_idx.training.rows import PackedBatchSampler, rows_of
from megatron_sft_idx.training.sft_dataset import PackedSFTDataset

BOTH = ("pretrain:{}/web", "{}/chats")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    write_documents(tmp_path / "web", rng.integers(1, 90, 60).tolist())
    write_documents(tmp_path / "code", rng.integers(1, 90, 40).tolist(), 100_000)
    write_packs(tmp_path / "chats", 30)
    write_packs(tmp_path / "others", 20, 1)
    return tmp_path


def paths_in(folder: Path, *paths: str) -> list[str]:
    return [path.format(folder) for path in paths]


def stock(folder: Path, paths: Sequence[str], weights: list[float] | None, sizes: Any, split: str = "1,0,0") -> Any:
    """Return Megatron's own data sets for paths of pretraining data."""
    config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=CAPACITY,
        blend=([path.removeprefix("pretrain:") for path in paths], weights),
        split=split,
        path_to_cache=str(folder / "stock"),
        tokenizer=EveryToken(""),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, config).build()


def mixed(folder: Path, weights: Any = (0.6, 0.4), sizes: Any = (64, 0, 0), paths: Any = BOTH, **options: Any) -> Any:
    """Return the training data of a blend, made by Megatron's builder."""
    blend = paths_in(folder, *paths), None if weights is None else list(weights)
    return build(config_of(blend, path_to_cache=str(folder / "cache"), **options), sizes)


def is_text(row: Any) -> bool:
    return bool(row["tokens"][0] >= 50_000)


def check_segment(row: Any, width: int) -> None:
    """Check that a row is one segment and fully trained."""
    whole = torch.full((width,), CAPACITY, dtype=torch.int32)
    whole[0] = 0
    assert row["loss_mask"].tolist() == [1.0] * CAPACITY
    assert row["position_ids"].tolist() == list(range(CAPACITY))
    assert (row["max_seqlen"], row["loss_mask"].dtype) == (CAPACITY, torch.float32)
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if name in row:
            assert torch.equal(row[name], whole), name


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("planned", [False, True])
def test_rows_are_those_of_megatron(folder: Path, planned: bool, context: int) -> None:
    """Rows of chats equal a blend of only chats. Read one by one, by whole batches, and by our loader."""
    if context == 2:
        for name, salt in (("chats", 0), ("others", 1)):
            for file in folder.glob(f"{name}.*"):
                file.unlink()
            write_padded(folder / name, salt)
    options: dict[str, Any] = {"index_only_packing": planned, "context_parallel_size": context, "padding_mask": True}
    blend = mixed(folder, **options)[0]
    text, chats = blend.datasets
    reference = stock(folder, ["pretrain:" + str(folder / "web")], None, (text.num_samples, None, None))[0]
    alone = build(config_of((paths_in(folder, "{}/chats"), None), **options), (chats.num_samples, None, None))[0]
    assert len(reference) == len(text.source.dataset) >= text.num_samples == len(text)
    width, seen = blend[0]["cu_seqlens"].shape[0], [0, 0]
    rows = rows_of(blend)
    for i in range(len(blend)):
        member, sample, row = int(blend.dataset_index[i]), int(blend.dataset_sample_index[i]), blend[i]
        seen[member] += 1
        if member == 0:
            expected = reference[sample]
            assert torch.equal(row["tokens"], expected["tokens"])
            assert torch.equal(row["labels"], expected["labels"])
            assert not row["padding_mask"].any()
            check_segment(row, width)
        else:
            expected = alone[sample]
            assert {name: value.tolist() for name, value in row.items() if name != "dataset_id"} == {
                name: value.tolist() for name, value in expected.items()
            }
        for name, value in rows[i].items():
            assert torch.equal(value, row[name]), name
    assert min(seen) > 10
    one_by_one = default_collate([{k: v for k, v in blend[i].items() if k != "dataset_id"} for i in range(len(blend))])
    sampler = PackedBatchSampler(
        rows, consumed_samples=0, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1
    )
    batches = list(BatchLoader(rows.assembler, rows.micro_batches(sampler), copy=True))
    for name, value in one_by_one.items():
        found = torch.cat([batch[name] for batch in batches])
        assert torch.equal(found, value[: len(found)]), name
        assert len(found) > len(blend) - 4


def write_padded(prefix: Path, salt: int) -> None:
    """Write packs that fit into a row if each sequence is padded to a multiple of four."""
    rng = np.random.default_rng(salt)
    with ShardWriter(prefix, capacity=CAPACITY, sequence_multiple=4, durable=False) as writer:
        for i in range(30):
            lengths = rng.integers(1, 13, 2).tolist()
            ids = 1000 * salt + 30 * i + np.arange(1, sum(lengths) + 1)
            mask = np.arange(sum(lengths)) % 3 != 0
            mask[[lengths[0] - 1, -1]] = False
            writer.add_pack(ids, mask, [0, lengths[0]])


def test_a_batch_of_pretraining_data_alone_and_one_of_none(folder: Path) -> None:
    rows = rows_of(mixed(folder)[0])
    kinds = np.array([is_text(rows[i]) for i in range(len(rows))])
    for chosen in (np.flatnonzero(kinds)[:5], np.flatnonzero(~kinds)[:5], np.zeros(0, np.int64)):
        batch = rows.__getitems__(chosen)
        assert [is_text(row) for row in batch] == kinds[chosen].tolist()
        for name, value in (default_collate([rows[int(i)] for i in chosen]) if len(chosen) else {}).items():
            assert torch.equal(batch.tensors[name], value), name


def test_masked_rows_have_no_loss(folder: Path) -> None:
    rows = rows_of(mixed(folder)[0])
    text = next(i for i in range(len(rows)) if is_text(rows[i]))
    masked = rows[text - len(rows)]
    assert torch.equal(masked["tokens"], rows[text]["tokens"])
    assert not masked["loss_mask"].any()


def test_balanced_ranks_count_a_row_as_one_segment(folder: Path) -> None:
    rows = rows_of(mixed(folder)[0])
    numbers = np.arange(len(rows))
    costs = rows.sample_costs(numbers)
    for i in range(len(rows)):
        row = rows[i]
        tokens = row["cu_seqlens"].diff().long()
        if not is_text(row):  # without the padding at the end
            tokens = tokens[: int((tokens > 0).sum()) - int(row["cu_seqlens"].max() > len(key(row)))]
        assert costs[i] == int((tokens**2).sum())


def key(row: Any) -> list[int]:
    return [token for token in row["tokens"].tolist() if token]


def test_a_run_that_is_resumed_goes_on_with_the_rows_that_would_have_come(folder: Path) -> None:
    rows = rows_of(mixed(folder)[0])
    whole = [key(rows[i]) for i in range(len(rows))]
    again = rows_of(mixed(folder)[0])
    found: list[list[int]] = []
    for ranks, first, last in ((1, 0, 16), (2, 16, 32), (4, 32, 64)):
        taken: dict[int, list[int]] = {}
        for rank in range(ranks):
            sampler = PackedBatchSampler(
                again, consumed_samples=first, micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=ranks
            )
            for number, batch in enumerate(sampler):
                rows_of_batch = again.__getitems__(batch)
                for sample, row in zip(batch, rows_of_batch, strict=True):
                    if sample < last:
                        taken[sample] = key(row)
                assert number < 64
        found += [taken[sample] for sample in range(first, last)]
    assert found == whole[:64]


def test_splits_are_of_documents_as_megatron_has_them(folder: Path) -> None:
    sizes, paths = (40, 8, 0), ["pretrain:" + str(folder / "web")]
    blend = mixed(folder, split="80,20,0", sizes=sizes)
    for ours, split in zip(blend[:2], (0, 1), strict=True):
        text = ours.datasets[0]
        wanted = [0, 0, None]
        wanted[split] = text.num_samples
        theirs = stock(folder, paths, None, [number or 1 for number in wanted[:2]] + [None], "80,20,0")[split]
        for i in range(text.num_samples):
            assert torch.equal(text[i]["tokens"], theirs[i]["tokens"])
    train, valid = ({int(t) for i in range(len(b)) for t in b[i]["tokens"] if t >= 50_000} for b in blend[:2])
    assert train
    assert valid
    assert not train & valid


def test_several_corpora_and_without_weights(folder: Path) -> None:
    paths = ("{}/chats", "pretrain:{}/web", "{}/others", "pretrain:{}/code")
    blend = mixed(folder, None, (None, None, None), paths)[0]
    assert blend.weights == [len(member) for member in blend.datasets]
    seen: dict[str, int] = {"chats": 0, "web": 0, "code": 0}
    for i in range(len(blend)):
        first = int(rows_of(blend)[i]["tokens"][0])
        seen["code" if first >= 100_000 else "web" if first >= 50_000 else "chats"] += 1
    tokens = np.fromfile(folder / "web.bin", np.int32).size, np.fromfile(folder / "code.bin", np.int32).size
    assert seen == {"chats": 50, "web": (tokens[0] - 1) // CAPACITY, "code": (tokens[1] - 1) // CAPACITY}


def test_per_split_paths(folder: Path) -> None:
    blends = [(paths_in(folder, *BOTH), [0.5, 0.5]), (paths_in(folder, "pretrain:{}/code"), None), None]
    train, valid, test = build(config_of(None, blend_per_split=blends, path_to_cache=str(folder / "c")), (20, 4, 0))
    assert (len(train), test) == (20, None)
    assert all(valid[i]["tokens"][0] >= 100_000 for i in range(4))


def test_data_loaders_take_the_rows(folder: Path) -> None:
    """Also in worker processes, which get the rows pickled."""
    blend = mixed(folder)[0]
    rows = rows_of(blend)
    expected = [rows[i]["tokens"].tolist() for i in range(16)]
    again = pickle.loads(pickle.dumps(rows))
    assert [again[i]["tokens"].tolist() for i in range(16)] == expected
    member = pickle.loads(pickle.dumps(blend.datasets[0]))
    assert torch.equal(member[3]["tokens"], blend.datasets[0][3]["tokens"])
    loader = DataLoader(rows, batch_size=4, collate_fn=whole_batch, num_workers=1, multiprocessing_context="fork")
    assert [row for batch in loader for row in batch["tokens"].tolist()][:16] == expected


def test_ids_of_sixteen_bits_and_files_that_are_read(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "web", [300], 65_000, np.uint16)
    chats = write_packs(tmp_path / "chats", 4)
    options = {"path_to_cache": str(tmp_path / "c")}
    for mmap in (True, False):
        blend = build(config_of(([path, chats], [0.5, 0.5]), mmap_bin_files=mmap, **options), (8, 0, 0))[0]
        values = {int(token) for i in range(8) for token in blend[i]["tokens"]}
        assert max(values) > 65_200


def test_the_column_source_names_the_corpus(folder: Path) -> None:
    a, b = ({"name": f"{letter}.jsonl", "fingerprint": letter * 32} for letter in "ab")
    for name in ("chats", "others"):
        for file in folder.glob(f"{name}.*"):
            file.unlink()
        table = {"files": [a, b] if name == "chats" else [b]}
        spec = ColumnSpec("sequence", np.uint32, 2, metadata=table)
        with ShardWriter(folder / name, capacity=CAPACITY, durable=False, columns={"source": spec}) as writer:
            for i in range(10):
                file = i % len(table["files"])
                ids = [1 + "ab".index(table["files"][file]["name"][0])] * 5
                writer.add_pack(ids, [1, 1, 1, 1, 0], [0], columns={"source": np.array([[file, i]])})
    paths = ("{}/chats", "pretrain:{}/web", "{}/others", "pretrain:{}/code")
    blend = mixed(folder, None, (None, None, None), paths, columns=("source",))[0]
    rows = rows_of(blend)
    names = file_names(rows.assembler.source_files)
    assert names == ["a.jsonl", "b.jsonl", "pretrain:web", "pretrain:code"]
    for members in ([blend], [rows], blend.datasets):
        for member in members:
            batch = default_collate(
                [{k: v for k, v in member[i].items() if k != "dataset_id"} for i in range(len(member))]
            )
            files = files_of(batch)
            for tokens, mask, numbers in zip(batch["tokens"], batch["loss_mask"], files, strict=True):
                first = int(tokens[0])
                expected = 3 if first >= 100_000 else 2 if first >= 50_000 else first - 1
                assert {*numbers[mask > 0].tolist()} == {expected}


def test_narrow_batches_are_refused(folder: Path) -> None:
    rows = rows_of(mixed(folder)[0])
    assembler = BatchAssembler(rows.source, CAPACITY, form="narrow")
    text = next(i for i in range(len(rows)) if is_text(rows[i]))
    with pytest.raises(ValueError, match="cannot store the last label"):
        assembler.assemble(rows.packs([text]))


def damaged(folder: Path, what: str) -> str:
    """Damage a dataset, and return the expected error."""
    idx, data = folder / "web.idx", folder / "web.bin"
    if what == "cut":
        os.truncate(data, data.stat().st_size - 4)
        return "according to its index"
    if what == "longer":
        with data.open("ab") as file:
            file.write(b"1234")
        return "according to its index"
    if what == "index cut":
        os.truncate(idx, idx.stat().st_size - 3)
        return "truncated or changed"
    if what == "no index":
        idx.unlink()
        return "web.idx does not exist"
    if what == "no data":
        data.unlink()
        return "web.bin does not exist"
    if what == "another file":
        idx.write_bytes(b"x" * 100)
        return "is not a Megatron index"
    if what in ("a longer document", "a document of less than none", "a pointer"):
        at = {"a pointer": 34 + 60 * 4 + 8 * 7}.get(what, 34 + 4 * 7)
        data_of_index = bytearray(idx.read_bytes())
        data_of_index[at : at + 4] = {"a document of less than none": -5}.get(what, 100).to_bytes(
            4, "little", signed=True
        )
        idx.write_bytes(data_of_index)
        return "document [78] has .* the index is damaged"
    if what == "no documents":
        write_documents(folder / "web", [])
        return "0 documents without any token"
    if what == "empty documents":
        write_documents(folder / "web", [0, 0, 0])
        return "3 documents without any token"
    if what == "too short":
        write_documents(folder / "web", [CAPACITY])
        return f"has {CAPACITY} tokens"
    if what == "floats":
        write_documents(folder / "web", [100], dtype=np.float32)
        return "expected integer token ids"
    shutil.copy(folder / "chats.seq.idx", folder / "web.seq.idx")
    return "packed SFT data"


FAULTS = ("cut", "longer", "index cut", "no index", "no data", "another file", "no documents", "empty documents")


DAMAGE = ("a longer document", "a document of less than none", "a pointer")


@pytest.mark.parametrize("what", [*FAULTS, *DAMAGE, "too short", "floats", "a shard"])
def test_what_is_no_whole_dataset_is_refused_before_anything_is_built(folder: Path, what: str) -> None:
    said = damaged(folder, what)
    with pytest.raises(FormatError, match=said):
        config_of((paths_in(folder, *BOTH), None))


@pytest.mark.parametrize("nbytes", range(34, 34 + 60 * 12, 97))
def test_an_index_that_is_cut_short_anywhere_is_refused(folder: Path, nbytes: int) -> None:
    os.truncate(folder / "web.idx", nbytes)
    with pytest.raises(FormatError, match="truncated or changed"):
        config_of((paths_in(folder, *BOTH), None))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"single_sequences": True}, "single sequences"),
        ({"columns": ("score",)}, "score"),
        ({"split": "100,0.5,0"}, "valid split has"),
    ],
)
def test_what_pretraining_data_has_no_place_for_is_refused(folder: Path, options: dict[str, Any], said: str) -> None:
    if "columns" in options:
        spec = ColumnSpec("sequence", np.float32)
        with ShardWriter(folder / "scored", capacity=CAPACITY, durable=False, columns={"score": spec}) as writer:
            writer.add_pack([1, 2], [1, 0], [0], columns={"score": [1.0]})
        paths = paths_in(folder, BOTH[0], "{}/scored")
    else:
        paths = paths_in(folder, *BOTH)
    with pytest.raises(FormatError, match=said):
        config_of((paths, None), **options)


@pytest.mark.parametrize("named", [False, True])
def test_indices_of_another_corpus_at_the_same_path_are_not_taken(folder: Path, named: bool) -> None:
    """The same holds for a corpus that has grown; with a cache folder, and with the cache next to the corpus."""

    def tokens() -> set[int]:
        paths = paths_in(folder, *BOTH)
        options = {"path_to_cache": str(folder / "named")} if named else {}
        blend = build(config_of((paths, None), **options), (None, None, None))[0]
        return {int(token) for i in range(len(blend)) for token in blend[i]["tokens"]}

    lengths = np.fromfile(folder / "web.idx", np.int32, 60, offset=34).tolist()
    before = tokens()
    for changed in ([*lengths, 64, 64], [lengths[0] - 1, *lengths[1:]], lengths[:30]):
        write_documents(folder / "web", changed, 80_000)
        found = {token for token in tokens() if token >= 80_000}
        assert len(found) > sum(changed) - CAPACITY - 1
        assert max(found) < 80_000 + sum(changed)
    assert max(before) < 80_000


def test_tokens_below_zero_are_refused_where_they_are_read(folder: Path) -> None:
    write_documents(folder / "web", [200], -100)
    blend = mixed(folder)[0]
    with pytest.raises(FormatError, match=r"row \d+ has token -\d+"):
        default_collate([blend[i] for i in range(len(blend))])


def test_all_documents_are_taken_where_no_split_is_named(folder: Path) -> None:
    config = config_of((paths_in(folder, *BOTH), None))
    paths = paths_in(folder, BOTH[0])
    whole = PackedSFTDataset(range(60), paths[0], None, None, Split.train, config)
    assert len(whole) == len(mixed(folder, None, (None, None, None))[0].datasets[0])


@pytest.mark.parametrize("paths", [BOTH, BOTH[::-1]])
def test_a_split_of_nothing_is_refused(folder: Path, paths: tuple[str, str]) -> None:
    with pytest.raises(FormatError, match="expected shares of all packs"):
        config_of((paths_in(folder, *paths), None), "0,0,0")


def test_pretraining_data_alone_is_refused(folder: Path) -> None:
    for path, said in (
        ("pretrain:{}/web", "no packed SFT data"),
        ("pretrain:s3://bucket/web", "on a local or shared disk"),
    ):
        with pytest.raises(FormatError, match=said):
            config_of((paths_in(folder, path), None))


def test_content_and_order_have_names(folder: Path) -> None:
    """A resumed run uses these names to detect another corpus or another order."""
    first, longer = (mixed(folder, sizes=(size, 0, 0))[0].datasets[0].source for size in (20, 400))
    assert first.corpus.content == longer.corpus.content
    assert first.order() != longer.order()
    assert first.order() == mixed(folder, sizes=(21, 0, 0))[0].datasets[0].source.order()
    write_documents(folder / "web", [700], 60_000)
    assert mixed(folder)[0].datasets[0].source.corpus.content != first.corpus.content


@pytest.mark.parametrize("nbytes", [0, 100])
@pytest.mark.parametrize("index", ["document", "sample", "shuffle"])
def test_indices_that_a_full_disk_has_cut_short_are_named(folder: Path, index: str, nbytes: int) -> None:
    mixed(folder)
    for path in (folder / "cache").glob(f"*-GPTDataset-train-{index}_index.npy"):
        os.truncate(path, nbytes)
    with pytest.raises(FormatError, match=r"cannot read or write its indices for this path in .*cache"):
        mixed(folder)


def test_a_file_in_place_of_the_cache_folder_is_named(folder: Path) -> None:
    (folder / "cache").write_text("")
    with pytest.raises(FormatError, match="check that this folder has free space"):
        mixed(folder)
