"""Columns in batches equal a slow twin's, for every reader and division into batches; and errors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_twin import slow_column
from blends import build, config_of
from columned import FILES, SPECS, unchecked, write_columned
from object_folders import serve_folder
from sample_packs import Sample, write_samples
from torch.utils.data import DataLoader
from training_source import random_samples

from megatron_sft_idx.dataset import SFTIndexedDataset
from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.formats.packed_dataset import open_dataset
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.shard import Shard, ShardWriter, write_column
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler, whole_batch, widen
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.rows import BlendedRows, EpochOrder, PackedBatchSampler, PackedRows, rows_of
from megatron_sft_idx.training.sources import JoinedPacks, PlannedPacks, PlanOptions, StoredPacks

Tensors = dict[str, torch.Tensor]
CAPACITY, LENGTH, MULTIPLE = 40, 80, 8
NAMES = tuple(SPECS)


def write_shards(folder: Path, count: int = 2, packs: int = 9, **options: Any) -> list[Sample]:
    """Write shards with every kind of column and consecutive values. Packs fit into a row with padding."""
    rng, all_packs, first = np.random.default_rng(count), [], 0
    for number in range(count):
        samples = random_samples(packs, CAPACITY, rng)
        # Far enough apart that shards share no values.
        write_columned(
            folder / f"x-{number}", samples, first=first, capacity=LENGTH, sequence_multiple=MULTIPLE, **options
        )
        first += 17
        all_packs += samples
    return all_packs


def shards_of(folder: Path, columns: Sequence[str] = NAMES, **options: Any) -> ShardSet:
    return ShardSet.open(folder, columns=columns, **options)


def slow_columns(folder: Path, assembler: BatchAssembler, picked: Sequence[int], count: int = 2) -> dict[str, Any]:
    """Return the columns of a batch of these packs, from packs read one by one."""
    shards = [Shard(folder / f"x-{number}", columns=NAMES) for number in range(count)]
    packs = [pack for shard in shards for pack in shard]
    out = {}
    for name, spec in SPECS.items():
        rows = []
        for pack in (packs[i] for i in picked):
            values = pack[name].tolist()
            bounds = pack["seq_boundaries"].tolist()
            rows.append([values[a:b] for a, b in pairwise(bounds)] if spec.per == "token" else values)
        shape = assembler.seq_length, assembler.width, assembler.sequence_multiple
        out[name] = slow_column(spec.per, rows, *shape, np.zeros(spec.width if spec.width > 1 else ()).tolist())
    return out


def assert_columns(batch: Tensors, slow: dict[str, Any]) -> None:
    for name, spec in SPECS.items():
        assert batch[name].numpy().dtype == spec.dtype, name
        assert batch[name].tolist() == slow[name], name


@pytest.mark.parametrize("form", ["wide", "narrow"])
@pytest.mark.parametrize("multiple", [1, MULTIPLE])
def test_columns_of_two_shards_are_the_slow_ones(tmp_path: Path, multiple: int, form: Any) -> None:
    write_shards(tmp_path)
    source = StoredPacks(shards_of(tmp_path))
    options: dict[str, Any] = {"sequence_multiple": multiple, "form": form}
    assembler = BatchAssembler(source, LENGTH, columns=NAMES, **options)
    plain = BatchAssembler(StoredPacks(shards_of(tmp_path, ())), LENGTH, **options)
    order = np.random.default_rng(1).permutation(source.num_packs)
    for rows in (1, 3, 8):
        for first in range(0, len(order), rows):
            picked = order[first : first + rows].tolist()
            batch = assembler.assemble(picked)
            assert_columns(batch, slow_columns(tmp_path, assembler, picked))
            without = plain.assemble(picked)
            assert set(batch) == {*without, *NAMES}
            assert all(torch.equal(batch[name], tensor) for name, tensor in without.items())
    assert assembler.assemble([])["source"].shape == (0, assembler.width - 1, 2)


def test_a_batch_has_the_columns_that_are_asked_for_in_that_order(tmp_path: Path) -> None:
    write_shards(tmp_path)
    source = StoredPacks(shards_of(tmp_path))
    batch = BatchAssembler(source, LENGTH, columns=("token_float64", "source")).assemble([1])
    assert list(batch)[-2:] == ["token_float64", "source"]
    whole = BatchAssembler(source, LENGTH, columns=NAMES).assemble([1])
    assert all(torch.equal(tensor, whole[name]) for name, tensor in batch.items())
    row = BatchAssembler(source, LENGTH, columns=NAMES).sample(1)
    assert all(torch.equal(row[name], whole[name][0]) for name in whole)


def test_widening_lets_columns_be(tmp_path: Path) -> None:
    write_shards(tmp_path)
    source = StoredPacks(shards_of(tmp_path))
    narrow = BatchAssembler(source, LENGTH, columns=NAMES, form="narrow", pad_id=3)
    wide = BatchAssembler(source, LENGTH, columns=NAMES, pad_id=3).assemble([2, 4])
    widened = widen(narrow.assemble([2, 4]), 3)
    assert all(torch.equal(wide[name], widened[name]) for name in wide)


# ---- all readers ----


@pytest.mark.parametrize("backend", ["mmap", "pread", "reopen"])
@pytest.mark.parametrize("count", [2, 40])
def test_every_backend_reads_the_same(tmp_path: Path, backend: Any, count: int) -> None:
    """Forty small shards would be held in memory, but with columns they are opened for each read."""
    write_shards(tmp_path, count, packs=3)
    shards = shards_of(tmp_path, backend=backend)
    assert shards.in_memory is None
    assembler = BatchAssembler(StoredPacks(shards), LENGTH, columns=NAMES)
    picked = np.random.default_rng(0).permutation(3 * count)[:16].tolist()
    segments = assembler.plan(picked)
    assembler.will_need(segments)
    slow = slow_columns(tmp_path, assembler, picked, count)
    assert_columns(assembler.assemble(picked), slow)
    (taken,) = BatchLoader(pickle.loads(pickle.dumps(assembler)), [picked])
    assert_columns(taken, slow)


def test_remote_shards_bring_their_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_IDX_CACHE", str(tmp_path / "cache"))
    write_shards(tmp_path / "data")
    url = serve_folder(tmp_path / "data", tmp_path / "msc.yaml", monkeypatch)
    assembler = BatchAssembler(StoredPacks(shards_of(url)), LENGTH, columns=NAMES)
    batches = [[0, 12, 3], [17, 5], [3, 3]]
    for batch, picked in zip(BatchLoader(assembler, batches, copy=True), batches, strict=True):
        assert_columns(batch, slow_columns(tmp_path / "data", assembler, picked))


@pytest.mark.parametrize("workers", [0, 2])
def test_columns_come_out_of_worker_processes(tmp_path: Path, workers: int) -> None:
    write_shards(tmp_path)
    assembler = BatchAssembler(StoredPacks(shards_of(tmp_path)), LENGTH, columns=NAMES)
    batches = [[0, 12, 3], [17, 5], [1]]
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    loader = DataLoader(assembler, batch_sampler=batches, collate_fn=whole_batch, **options)
    for batch, picked in zip(loader, batches, strict=True):
        assert_columns(batch, slow_columns(tmp_path, assembler, picked))
    (stacked,) = DataLoader(assembler, batch_sampler=batches[:1])
    assert_columns(stacked, slow_columns(tmp_path, assembler, batches[0]))


# ---- all divisions into batches ----


TOP = 8


def write_teacher(prefix: Path, packs: int = 60) -> None:
    """Write a shard, and attach a teacher's best tokens and their logits as columns."""
    rng = np.random.default_rng(5)
    header = write_samples(prefix, random_samples(packs, CAPACITY, rng), capacity=LENGTH, sequence_multiple=MULTIPLE)
    shape = header.num_tokens, TOP
    write_column(prefix, "topk_ids", rng.integers(0, 1 << 17, shape, np.int32), per="token", alignment="label")
    write_column(prefix, "topk_logp", -rng.random(shape, np.float32), per="token", alignment="label")


def own_positions(bounds: list[int], ranks: int, rank: int) -> torch.Tensor:
    """Return a context-parallel rank's positions of a row: a part of each segment's beginning and one of its end."""
    own = []
    for start, stop in pairwise(dict.fromkeys(bounds)):
        part = (stop - start) // (2 * ranks)
        own += [torch.arange(part) + start + piece * part for piece in (rank, 2 * ranks - 1 - rank)]
    return torch.cat(own)


def run_job(prefix: Path, samples: range, ranks: int, rows: int, context: int) -> list[dict[int, Any]]:
    """Return the columns that a job reads for each pack, by its number, joined over context-parallel ranks.

    There is one dictionary per global batch of 12 samples.
    """
    source = StoredPacks(ShardSet.open(prefix, columns=("topk_ids", "topk_logp")))
    options: dict[str, Any] = {"sequence_multiple": 2 * context if context > 1 else 1, "padding_mask": True}
    packed = PackedRows(source, 1, "train", 1000, LENGTH, **options)
    numbers = {tuple(pack["input_ids"].tolist()): i for i, pack in enumerate(source.shards)}
    streams = []
    for rank in range(ranks):
        shape: dict[str, Any] = {"micro_batch_size": rows, "data_parallel_rank": rank, "data_parallel_size": ranks}
        sampler = PackedBatchSampler(packed, consumed_samples=samples.start, global_batch_size=12, **shape)
        streams.append(iter(BatchLoader(packed.assembler, packed.micro_batches(sampler), copy=True)))
    found = []
    for _ in range(len(samples) // 12):
        step = [cut for stream in streams for _ in range(12 // ranks // rows) for cut in _packs(next(stream), context)]
        found.append({numbers[tuple(tokens)]: columns for tokens, *columns in step})
        assert len(step) == len(found[-1]) == 12
    for stream in streams:
        stream.close()
    return found


def _packs(batch: Tensors, context: int) -> Iterator[list[Any]]:
    """Yield tokens and columns of each row without padding, divided among context-parallel ranks and joined again."""
    names = "tokens", "padding_mask", "topk_ids", "topk_logp"
    for row, bounds in enumerate(batch.get("cu_seqlens_padded", batch["cu_seqlens"]).tolist()):
        whole = {name: torch.empty_like(batch[name][row]) for name in names}
        for rank in range(context):
            own = own_positions(bounds, context, rank) if context > 1 else torch.arange(LENGTH)
            for name in names:  # divided as in megatron.core.utils.get_thd_batch_on_this_cp_rank
                whole[name][own] = batch[name].index_select(1, own)[row]
        real = ~whole.pop("padding_mask")
        assert not any(whole[name][~real].any() for name in ("topk_ids", "topk_logp"))
        yield [tensor[real].tolist() for tensor in whole.values()]


def test_a_teachers_logits_are_those_of_each_token_on_any_ranks_micro_batches_and_context(tmp_path: Path) -> None:
    """A run on two ranks is resumed within an epoch on other numbers of ranks. Values stay with their tokens."""
    write_teacher(tmp_path / "x")
    shard = Shard(tmp_path / "x", columns=("topk_ids", "topk_logp"))
    stored = {i: [pack["topk_ids"].tolist(), pack["topk_logp"].tolist()] for i, pack in enumerate(shard)}
    order = EpochOrder(len(shard), 1, "train", StoredPacks(ShardSet.open(tmp_path / "x")).fingerprint)
    jobs = [(range(0, 36), 2, 2, 1)]
    jobs += [(range(36, 96), *job) for job in ((2, 2, 1), (1, 4, 1), (3, 2, 2), (4, 3, 4), (6, 1, 4))]
    for samples, ranks, rows, context in jobs:
        packs = order.pack_of(np.arange(samples.start, samples.stop)).reshape(-1, 12).tolist()
        expected = [{pack: stored[pack] for pack in step} for step in packs]
        assert run_job(tmp_path / "x", samples, ranks, rows, context) == expected


# ---- packed when training starts, and blends ----


def numbered_samples(count: int, first: int = 1) -> list[Sample]:
    """Return packs with unique tokens, so that each token identifies its place."""
    rng, made = np.random.default_rng(first), []
    for _ in range(count):
        sizes = rng.integers(1, 9, rng.integers(1, 5)).tolist()
        bounds = np.cumsum([0, *sizes]).tolist()
        made.append(Sample(list(range(first, first + bounds[-1])), [1] * bounds[-1], bounds[:-1]))
        first += bounds[-1]
    return made


SOME = {name: spec for name, spec in SPECS.items() if spec.per != "pack"}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("unpacked", [True, False])
def test_sequences_keep_their_values_when_they_are_packed_at_start_up(
    tmp_path: Path, unpacked: bool, cached: bool
) -> None:
    """For parts of two shards: compare each sequence with packs read one by one, found by its first token."""
    first, beside = 1, {}
    for number in range(2):
        packs = numbered_samples(30, first)
        if unpacked:
            packs = [Sample(p.tokens[a:b], p.mask[a:b], [0]) for p in packs for a, b in pairwise(p.bounds)]
        write_columned(tmp_path / f"x-{number}", packs, SOME, first=first, capacity=LENGTH)
        first = packs[-1].tokens[-1] + 1
        for pack in Shard(tmp_path / f"x-{number}", columns=tuple(SOME)):
            for k, (a, b) in enumerate(pairwise(pack["seq_boundaries"].tolist())):
                values = {
                    name: pack[name][a:b] if spec.per == "token" else pack[name][k] for name, spec in SOME.items()
                }
                beside[int(pack["input_ids"][a])] = {name: value.tolist() for name, value in values.items()}
    shards = shards_of(tmp_path, tuple(SOME))
    cache = tmp_path / "cache" if cached else None
    for _ in range(2):  # the second time from the cache
        source = PlannedPacks(shards, PlanOptions(LENGTH), cache=cache, first=5, last=shards.num_sequences - 3)
        assembler = BatchAssembler(source, LENGTH, columns=tuple(SOME))
        batch, seen = assembler.assemble(range(source.num_packs)), 0
        segments = assembler.plan(range(source.num_packs))
        for row, (begin, end) in enumerate(pairwise(segments.offsets.tolist())):
            at = 0
            for k, length in enumerate(segments.lengths[begin:end].tolist()):
                values = beside[int(batch["tokens"][row, at])]
                for name, spec in SOME.items():
                    mine = batch[name][row, at : at + length] if spec.per == "token" else batch[name][row, k]
                    assert mine.tolist() == values[name], name
                at, seen = at + length, seen + 1
        assert seen == shards.num_sequences - 8


def pack_on_disk(prefix: Path, source: PlannedPacks, specs: dict[str, ColumnSpec]) -> None:
    """Write the packs of a plan as a new shard, sequence by sequence, from packs of one sequence each."""
    shards = [Shard(path, columns=tuple(specs)) for path in source.shards.prefixes]
    shape: dict[str, Any] = {"capacity": source.capacity, "sequence_multiple": source.sequence_multiple}
    with ShardWriter(prefix, pad_id=3, durable=False, columns=specs, **shape) as writer:
        segments = source.segments(np.arange(source.num_packs))
        for begin, end in pairwise(segments.offsets.tolist()):
            places = zip(segments.shards[begin:end].tolist(), segments.starts[begin:end].tolist(), strict=True)
            found = [shards[shard][int(np.searchsorted(shards[shard].token_offsets, start))] for shard, start in places]
            starts = np.cumsum([0, *(len(pack["input_ids"]) for pack in found)])[:-1]
            whole = {name: np.concatenate([pack[name] for pack in found]) for name in found[0]}  # type: ignore[literal-required]
            beside = {name: whole[name] for name in specs}
            writer.add_pack(whole["input_ids"], whole["loss_mask"], starts, columns=beside)


@pytest.mark.parametrize("seed", range(12))
def test_packs_planned_at_start_up_give_the_batches_of_packs_on_disk(tmp_path: Path, seed: int) -> None:
    """This holds for any columns, plans and sequence multiples."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(list(SOME))[: rng.integers(1, len(SOME) + 1)].tolist()
    specs, multiple, first = {name: SOME[name] for name in names}, int(rng.choice([1, 2, 8])), 1
    for number in range(int(rng.integers(1, 4))):
        alone = [
            Sample(pack.tokens[a:b], pack.mask[a:b], [0])
            for pack in numbered_samples(int(rng.integers(1, 12)), first)
            for a, b in pairwise(pack.bounds)
        ]
        write_columned(tmp_path / f"x-{number}", alone, specs, first=first, capacity=LENGTH, pad_id=3)
        first = alone[-1].tokens[-1] + 1
    options = PlanOptions(LENGTH, multiple, seed=seed, max_sequences_per_pack=int(rng.integers(2, 9)))
    planned = PlannedPacks(shards_of(tmp_path, names), options)
    pack_on_disk(tmp_path / "packed", planned, specs)
    stored = StoredPacks(ShardSet.open(tmp_path / "packed", columns=names))
    assert stored.num_packs == planned.num_packs
    shape: dict[str, Any] = {"sequence_multiple": multiple, "width": 12, "columns": names}
    with_plan, from_disk = (BatchAssembler(source, LENGTH, **shape) for source in (planned, stored))
    order = rng.permutation(stored.num_packs)
    for begin in range(0, len(order), 3):
        batch, other = (assembler.assemble(order[begin : begin + 3]) for assembler in (with_plan, from_disk))
        assert batch.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in batch.items())


def test_a_plan_without_columns_of_sequences_is_what_it_was(tmp_path: Path) -> None:
    write_columned(tmp_path / "x-0", numbered_samples(9), SOME, capacity=LENGTH)
    for columns in ((), ("token_float64",), ("source",)):
        PlannedPacks(shards_of(tmp_path, columns), PlanOptions(LENGTH), cache=tmp_path / "cache")
    plain, numbered = sorted((path for path in (tmp_path / "cache").glob("*.bin")), key=lambda path: len(path.name))
    count = ShardSet.open(tmp_path).num_sequences
    assert numbered.stat().st_size - plain.stat().st_size == 8 * count


@pytest.mark.parametrize("planned", [False, True])
def test_a_blend_brings_the_columns_of_all_its_parts(tmp_path: Path, planned: bool) -> None:
    members = []
    for number, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        write_columned(tmp_path / folder / "x", numbered_samples(40, 1 + 1000 * number), SOME, capacity=LENGTH)
        shards = shards_of(tmp_path / folder, tuple(SOME))
        source = PlannedPacks(shards, PlanOptions(LENGTH)) if planned and number else StoredPacks(shards)
        members.append(PackedRows(source, 1, "train", source.num_packs, LENGTH, width=40))
    member_of = np.array([0, 1, 1, 0, 1], np.int64)
    sample_of = np.array([1, 0, 1, 2, 2], np.int64)
    blend = BlendedRows(members, member_of, sample_of)
    batch = blend.__getitems__(range(5)).whole()
    for i, (member, sample) in enumerate(zip(member_of, sample_of, strict=True)):
        row = members[member][int(sample)]
        assert set(SOME) < set(row)
        assert all(torch.equal(batch[name][i], tensor) for name, tensor in row.items())
    copied = pickle.loads(pickle.dumps(members[0]))
    assert all(torch.equal(tensor, copied[2][name]) for name, tensor in members[0][2].items())


def test_data_sets_of_megatrons_builder_bring_them(tmp_path: Path) -> None:
    """Tests a blend of packs, with workers and after pickling, also packed at start-up.

    Differing columns are an error.
    """
    for number in range(2):
        write_columned(tmp_path / f"x-{number}", numbered_samples(30, 1 + 1000 * number), SOME, capacity=CAPACITY)
    paths = [str(tmp_path / f"x-{number}") for number in range(2)]
    names = ("token_float64", "source")
    for options in ({}, {"index_only_packing": True}):
        config = config_of((paths, [0.5, 0.5]), sequence_length=CAPACITY, columns=names, **options)
        blended, _, _ = build(config, (40, 0, 0))
        row = blended[3]
        assert list(row)[-2:] == list(names)
        width = config.cu_seqlens_width
        assert [tuple(row[name].shape) for name in names] == [(CAPACITY, 3), (width - 1, 2)]
        rows = rows_of(blended)
        assert rows.assembler.source_files == FILES["files"]
        loader = DataLoader(blended.datasets[0], batch_size=4, num_workers=1, collate_fn=whole_batch)
        for name, tensor in next(iter(loader)).items():
            assert torch.equal(tensor, torch.stack([blended.datasets[0][i][name] for i in range(4)]))
    with pytest.raises(FormatError, match="columns source: Megatron's packing scheduler only supports tokens"):
        config_of(paths[0], sequence_length=CAPACITY, columns=("source",), single_sequences=True)
    with unchecked():
        write_columned(tmp_path / "y", numbered_samples(3), {"source": ColumnSpec("sequence", "u4")}, capacity=CAPACITY)
    differ = r"y: column source is uint32 x 1 per sequence, but uint32 x 2 per sequence in .*x-0;"
    with pytest.raises(FormatError, match=differ):
        config_of(([paths[0], str(tmp_path / "y")], None), sequence_length=CAPACITY, columns=("source",))


@pytest.mark.parametrize("count", [1, 2])
def test_data_sets_bring_them_with_packs(tmp_path: Path, count: int) -> None:
    write_shards(tmp_path, count)
    paths = [str(tmp_path / f"x-{number}") for number in range(count)]
    stored = [pack for path in paths for pack in Shard(path, columns=NAMES)]
    sets: list[Any] = [open_dataset(paths, columns=NAMES), open_dataset(paths, columns=NAMES, copy=True)]
    sets += [pickle.loads(pickle.dumps(sets[0]))]
    if count == 1:
        sets += [SFTIndexedDataset(paths[0], columns=NAMES), SFTIndexedDataset(paths[0], mmap=False, columns=NAMES)]
        sets += [pickle.loads(pickle.dumps(sets[-1]))]
    for ds in sets:
        for i in (0, len(stored) - 1):
            assert ds[i].keys() == stored[i].keys()
            assert all(np.array_equal(ds[i][name], values) for name, values in stored[i].items())
    assert all(values.flags.writeable for values in sets[1][0].values() if values.ndim)


# ---- errors ----


def test_columns_that_are_not_alike_are_refused_by_the_shards_name(tmp_path: Path) -> None:
    for number, spec in enumerate((ColumnSpec("token", "f4", 8), ColumnSpec("token", "f4", 4))):
        write_columned(tmp_path / f"x-{number}", numbered_samples(3), {"topk": spec}, capacity=LENGTH)
    with pytest.raises(
        FormatError, match=r"x-1: column topk is float32 x 4 per token, .* but float32 x 8 per token, .* in .*x-0;"
    ):
        shards_of(tmp_path, ("topk",))
    one = [ShardSet.open(tmp_path / f"x-{number}", columns=("topk",)) for number in range(2)]
    with pytest.raises(FormatError, match="x-1: column topk is"):
        JoinedPacks([StoredPacks(shards) for shards in one])


def test_a_column_that_is_missing_in_one_shard_is_refused_by_its_name(tmp_path: Path) -> None:
    write_columned(tmp_path / "x-0", numbered_samples(3), SOME, capacity=LENGTH)
    write_samples(tmp_path / "x-1", numbered_samples(3), capacity=LENGTH)
    with pytest.raises(ShardNotFoundError, match=r"x-1.*column source"):
        shards_of(tmp_path, ("source",))
    with pytest.raises(FormatError, match="expected a name of at most 64 lower-case letters"):
        shards_of(tmp_path, ("Source",))


def test_what_was_not_opened_is_not_assembled(tmp_path: Path) -> None:
    write_columned(tmp_path / "x-0", numbered_samples(3), SOME, capacity=LENGTH)
    source = StoredPacks(shards_of(tmp_path, ("source",)))
    with pytest.raises(FormatError, match=r"the source has no column token_float64; it has source; open"):
        BatchAssembler(source, LENGTH, columns=("token_float64",))


def test_columns_of_packs_mean_nothing_to_packs_made_at_start_up(tmp_path: Path) -> None:
    write_columned(tmp_path / "x-0", numbered_samples(3), SPECS, capacity=LENGTH)
    with pytest.raises(
        FormatError, match=r"x-0: column pack_int8 has one value per pack, .* makes new packs; leave it out"
    ):
        PlannedPacks(shards_of(tmp_path, ("pack_int8",)), PlanOptions(LENGTH))


def test_a_column_that_is_replaced_meanwhile_is_not_read_as_the_old_one(tmp_path: Path) -> None:
    """This happens only if files are opened for each read; maps and descriptors keep the old file."""
    header = write_samples(tmp_path / "x", numbered_samples(5), capacity=LENGTH)
    values = np.arange(header.num_tokens, dtype=np.float32)
    for backend in ("mmap", "pread", "reopen"):
        write_column(tmp_path / "x", "score", values, per="token", overwrite=True)
        opened: Any = ShardSet.open(tmp_path / "x", columns=["score"], backend=backend)  # type: ignore[arg-type]
        assembler = BatchAssembler(StoredPacks(opened), LENGTH, columns=["score"])
        before = assembler.assemble([1])["score"]
        write_column(tmp_path / "x", "score", values + 1, per="token", overwrite=True)
        if backend == "reopen":
            with pytest.raises(FormatError, match=r"x.score.col: another column was attached after"):
                assembler.assemble([1])
        else:
            assert torch.equal(assembler.assemble([1])["score"], before)
