"""``open_dataset`` recognises packed data of any format by content, and opens it as one dataset in any process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import SUFFIXES as FILES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_packs import Sample, assert_holds, assert_is, demo_samples, write_samples

from megatron_sft_idx import PackedDataset, open_dataset
from megatron_sft_idx.errors import FormatError, SequenceError, ShardNotFoundError
from megatron_sft_idx.formats import parquet
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.formats.registry import WRITABLE, JoinedReader, recognise, resolve_source
from megatron_sft_idx.shard import Shard

PACKS = demo_samples(23)


def plain_npy(path: Path, packs: list[Sample]) -> Path:
    """Write a file like most programs: np.save of a list of dicts."""
    rows = [{"input_ids": p.tokens, "loss_mask": p.label_mask, "seq_start_id": p.starts} for p in packs]
    array = np.empty(len(rows), object)
    array[:] = rows
    np.save(path, array, allow_pickle=True)
    return path


def cut(packs: list[Sample], sizes: dict[str, int]) -> dict[str, list[Sample]]:
    """Return the packs for each file, by name, in order."""
    left = iter(packs)
    return {name: [next(left) for _ in range(size)] for name, size in sizes.items()}


def write_shards(folder: Path, sizes: dict[str, int], packs: list[Sample] = PACKS) -> None:
    for name, part in cut(packs, sizes).items():
        write_samples(folder / name, part, capacity=64, overwrite=True)


def write_npys(folder: Path, sizes: dict[str, int], packs: list[Sample] = PACKS) -> None:
    for name, part in cut(packs, sizes).items():
        plain_npy(folder / f"{name}.npy", part)


def write_kind(kind: str, folder: Path, sizes: dict[str, int], packs: list[Sample] = PACKS) -> None:
    """Write data of one format in files of these sizes."""
    if kind == "sft-idx":
        write_shards(folder, sizes, packs)
        return
    write_shards(folder / ".shards", sizes, packs)
    for name in sizes:
        source, options = str(folder / ".shards" / name), ConvertOptions(overwrite=True)
        convert(source, str(folder / (name + SUFFIXES[kind])), kind, options)


SIZES = {"a-2": 5, "a-9": 0, "a-10": 1, "b": 0, "c": 17}
SUFFIXES = {
    "sft-idx": "",
    "npy": ".npy",
    "memmap": ".memmap",
    "parquet": ".parquet",
    "jsonl-chunks": ".chunks",
    "save_to_disk": ".hf",
}
KINDS = [kind for kind in WRITABLE if kind in SUFFIXES]

SAY_CAPACITY = ("sft-idx", "memmap", "parquet", "save_to_disk")


def test_a_capacity_that_is_only_guessed_is_noted(tmp_path: Path) -> None:
    for kind in KINDS:
        write_kind(kind, tmp_path / kind, {"x": 3})
    # As another program writes it, without metadata.
    pq.write_table(pa.table({name: [[0]] for name in parquet.FIELDS}), tmp_path / "plain.parquet")
    for kind in [*KINDS, "plain"]:
        source = str(next(tmp_path.glob("plain.parquet" if kind == "plain" else f"{kind}/x*")))
        for capacity in (None, 99):
            options = ConvertOptions(capacity=capacity, overwrite=True)
            report = convert(source, str(tmp_path / "out"), "sft-idx", options)
            noted = [note for note in report.notes if "the longest pack, " in note and "--seq-length" in note]
            assert bool(noted) == (capacity is None and kind not in SAY_CAPACITY), kind


# ---- indexing ----


@pytest.mark.parametrize("kind", KINDS)
def test_several_of_one_kind_are_one(tmp_path: Path, kind: str) -> None:
    write_kind(kind, tmp_path, SIZES)
    ds = open_dataset(tmp_path, max_open=2)
    assert (ds.format, len(ds), len(ds.paths)) == (kind, 23, 5)
    assert ds.num_sequences == sum(len(p.starts) for p in PACKS)
    assert ds.capacity == (64 if kind in SAY_CAPACITY else max(len(p.tokens) for p in PACKS))
    assert_holds(ds, PACKS)
    for pack, sample in zip(ds, PACKS, strict=True):
        assert_is(pack, sample)
    assert_is(ds[np.int64(-1)], PACKS[-1])
    for start, stop in [(3, 8), (-4, None), (20, 99), (9, 3)]:
        found = ds[start:stop]
        assert [pack["input_ids"].tolist() for pack in found] == [p.tokens for p in PACKS[start:stop]]
    for index in (23, -24):
        with pytest.raises(IndexError, match=f"no pack {index}; the dataset has 23"):
            ds[index]
    with pytest.raises(ValueError, match="slice step 2"):
        ds[::2]
    with pytest.raises(TypeError):
        ds["1"]  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", KINDS)
def test_one_alone_and_an_empty_one(tmp_path: Path, kind: str) -> None:
    write_kind(kind, tmp_path, {"full": 5, "none": 0})
    suffix = SUFFIXES[kind]
    ds = open_dataset(tmp_path / f"full{suffix}")
    assert_holds(ds, PACKS[:5])
    assert_holds(ds, PACKS[:5])  # the first access may use another code path than the next
    with pytest.raises(IndexError, match="pack 5"):
        ds[5]
    empty = open_dataset(tmp_path / f"none{suffix}")
    assert (len(empty), list(empty), empty[:], empty.num_sequences) == (0, [], [], 0)
    for index in (0, -1):
        with pytest.raises(IndexError):
            empty[index]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5), index=st.integers(-40, 40))
def test_global_indices_are_those_of_a_list(tmp_path_factory: Any, sizes: list[int], index: int) -> None:
    folder = tmp_path_factory.mktemp("shards")
    done, expected = 0, []
    for number, size in enumerate(sizes):
        part = [PACKS[(done + i) % len(PACKS)] for i in range(size)]
        write_samples(folder / f"part-{number}", part, capacity=64)
        expected += part
        done += size
    ds = open_dataset(f"{folder}/part-*", max_open=1)
    try:
        sample = expected[index]
    except IndexError:
        with pytest.raises(IndexError):
            ds[index]
    else:
        assert_is(ds[index], sample)


def test_ids_and_masks_cannot_be_written_to(tmp_path: Path) -> None:
    write_npys(tmp_path, {"x": 3})
    write_shards(tmp_path, {"y": 3})
    for path in (tmp_path / "x.npy", tmp_path / "y"):
        pack = open_dataset(path)[0]
        assert not pack["input_ids"].flags.writeable
        assert not pack["loss_mask"].flags.writeable


# ---- recognition ----


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    plain_npy(tmp_path / "x.npy", PACKS).rename(tmp_path / "data.parquet")
    assert_holds(open_dataset(tmp_path / "data.parquet"), PACKS)
    (tmp_path / "data.npy").write_bytes(b"PAR1 or so it says")
    with pytest.raises(FormatError, match=r"data.npy: no known packed data; found a file of 18 bytes .*b'PAR1"):
        open_dataset(tmp_path / "data.npy")


def test_a_shard_by_any_of_its_names(tmp_path: Path) -> None:
    write_shards(tmp_path, {"run[1]": 3, "run1": 2})
    for name in ("run[1]", "run[1].seq.idx", "run[1].bin", "run[1].idx"):
        assert resolve_source(tmp_path / name) == ("sft-idx", [str(tmp_path / "run[1]")])
    assert resolve_source(f"{tmp_path}/run?") == ("sft-idx", [str(tmp_path / "run1")])
    assert resolve_source(f"{tmp_path}/run*") == ("sft-idx", [str(tmp_path / "run1"), str(tmp_path / "run[1]")])
    assert len(open_dataset([tmp_path / "run1", tmp_path / "run[1]", tmp_path / "run1"])) == 7


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="an empty list"):
        open_dataset([])
    with pytest.raises(ShardNotFoundError) as missing:
        open_dataset(tmp_path / "no")
    assert str(missing.value) == (
        f"{tmp_path}/no: no shard here, missing {tmp_path}/no.bin and the other four (rule F1); there"
        " is no file or folder of this name; check the prefix; it does not include .seq.idx"
    )
    assert missing.value.missing == [f"{tmp_path}/no{suffix}" for suffix in FILES]
    with pytest.raises(FormatError, match=r"no file or folder of this name. Looked for sft-idx: .*; npy: "):
        open_dataset(tmp_path / "no*")
    with pytest.raises(FormatError, match="found a folder without data"):
        open_dataset(tmp_path)
    for number in range(7):
        (tmp_path / f"notes-{number}").touch()
    with pytest.raises(FormatError, match=r"found 7 entries, none with a known format: notes-0, notes-1, .*, \.\.\."):
        open_dataset(tmp_path)
    with pytest.raises(FormatError, match="unknown format 'csv'"):
        open_dataset(tmp_path, format="csv")
    with pytest.raises(ShardNotFoundError):
        open_dataset(tmp_path / "no", format="sft-idx")


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_it_holds(tmp_path: Path, kind: str) -> None:
    write_kind(kind, tmp_path, SIZES)
    ds = open_dataset(tmp_path)
    tokens, trained = sum(len(p.tokens) for p in PACKS), sum(map(np.count_nonzero, (p.label_mask for p in PACKS)))
    share = f", {100 * trained / tokens:.1f}% trained" if kind == "sft-idx" else ""
    counts = f"23 packs of up to {ds.capacity:,} tokens, {ds.num_sequences:,} sequences, {tokens:,} tokens{share}"
    assert repr(ds) == f"<PackedDataset {kind} {ds.paths[0]} and 4 more: {counts}>"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(FormatError, match="found a FIFO without data"):
        open_dataset(tmp_path / "x.npy")
    for path in ("", ".idx", f"{tmp_path}/.seq.idx"):
        with pytest.raises(FormatError, match="no file or folder of this name"):
            open_dataset(path)


def test_a_forced_format_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"PK\x03\x04 zip")
    with pytest.raises(FormatError, match=r"not a \.npy file of version 1 or 2"):
        open_dataset(tmp_path / "x", format="npy")


def test_kinds_do_not_mix(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x": 3})
    write_npys(tmp_path, {"y": 3})
    with pytest.raises(FormatError, match=r"y.npy is npy, .*x is sft-idx; a dataset needs a single format"):
        open_dataset(tmp_path)
    assert open_dataset(tmp_path, format="npy").paths == (str(tmp_path / "y.npy"),)


def test_a_path_that_is_two_things_is_refused(tmp_path: Path) -> None:
    """If a folder of shards is next to a shard of the same name, the shard wins. A file of two formats is an error."""
    write_shards(tmp_path, {"x": 3})
    plain_npy(tmp_path / "x.npy", PACKS)
    os.link(tmp_path / "x.npy", tmp_path / "x2")
    write_shards(tmp_path, {"x2": 3})
    assert set(recognise(str(tmp_path / "x2"))) == {"npy", "sft-idx"}
    with pytest.raises(FormatError, match=r"x2: could be one of several formats \(sft-idx: .*; npy: a pickled .npy"):
        open_dataset(tmp_path / "x2")
    assert len(open_dataset(tmp_path / "x2", format="npy")) == 23
    assert len(open_dataset(tmp_path / "x2", format="sft-idx")) == 3


def test_a_damaged_file_among_others_is_not_passed_over(tmp_path: Path) -> None:
    write_npys(tmp_path, {"x": 3, "y": 3})
    (tmp_path / "README").touch()
    (tmp_path / ".hidden.npy").touch()
    assert len(open_dataset(tmp_path)) == 6
    (tmp_path / "y.npy").write_bytes(b"")
    with pytest.raises(FormatError, match=r"y.npy: by its name it belongs to the files next to it"):
        open_dataset(tmp_path)
    shards = tmp_path / "shards"
    shards.mkdir()
    write_shards(shards, {"x": 3, "y": 3})
    (shards / "y.seq.idx").unlink()
    with pytest.raises(FormatError, match=r"y.idx: by its name it belongs to the files next to it"):
        open_dataset(shards)


def test_options_are_those_of_the_format(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x": 3})
    ds = open_dataset(tmp_path / "x", backend="pread", copy=True)
    ds[0]["input_ids"][0] = 9  # a copy
    with pytest.raises(FormatError, match="x: a sft-idx source has no option colour; leave it out"):
        open_dataset(tmp_path / "x", colour="red")
    with pytest.raises(
        FormatError, match=r"would shift the masks twice, .* label-aligned \(rule P6\); leave the option out"
    ):
        open_dataset(tmp_path / "x", mask_alignment="token")
    with pytest.raises(FormatError, match="label-aligned"):
        open_dataset(tmp_path / "x", mask_alignment="token", copy=True)
    with pytest.raises(FormatError, match="max_open 0"):
        open_dataset(tmp_path / "x", max_open=0)


def test_different_tokenizers_do_not_go_together(tmp_path: Path) -> None:
    for name in "ab":
        write_samples(tmp_path / name, PACKS, capacity=64, metadata={"tokenizer": {"fingerprint": name}})
    assert len(open_dataset(tmp_path)) == 46
    with pytest.raises(FormatError, match=r"different tokenizers \(a, b\); read them separately"):
        _ = open_dataset(tmp_path).capacity


# ---- processes and threads ----


@pytest.mark.parametrize("kind", KINDS)
def test_it_pickles_small_and_opens_again(tmp_path: Path, kind: str) -> None:
    write_kind(kind, tmp_path, SIZES)
    ds = open_dataset(tmp_path)
    raw = pickle.dumps(ds)
    assert len(raw) < 1000
    assert_holds(pickle.loads(raw), PACKS)
    write_kind(kind, tmp_path, {"a-2": 5}, demo_samples(30)[25:])
    again = pickle.loads(raw)
    with pytest.raises(FormatError, match="the content has changed since this dataset was opened"):
        again[0]
    if kind == "sft-idx":  # shards are one set, with another fingerprint
        with pytest.raises(FormatError, match="because a shard was replaced"):
            again[-1]
    else:
        assert_is(again[-1], PACKS[-1])


@pytest.mark.parametrize(("kind", "method"), [*((kind, "fork") for kind in KINDS), ("memmap", "spawn")])
def test_data_loader_workers_read_what_is_there(tmp_path: Path, kind: str, method: str) -> None:
    from torch.utils.data import DataLoader

    write_kind(kind, tmp_path, SIZES)
    ds = open_dataset(tmp_path, max_open=1)
    _ = ds[0]  # open here, so that a fork inherits it
    loader: Any = DataLoader(
        ds,
        batch_size=None,
        shuffle=False,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=multiprocessing.get_context(method),
    )
    for _epoch in range(2):
        found = [pack["input_ids"].tolist() for pack in loader]
        assert found == [p.tokens for p in PACKS]


def test_threads_share_one(tmp_path: Path) -> None:
    write_npys(tmp_path, SIZES)
    ds = open_dataset(tmp_path, max_open=1)
    failures: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for i in np.random.default_rng(seed).integers(-23, 23, 50).tolist():
                assert_is(ds[i], PACKS[i])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_fork_in_a_threads_read_does_not_wait_for_it(tmp_path: Path) -> None:
    write_npys(tmp_path, {"x": 3})
    ds = open_dataset(tmp_path)
    with ds._files._process_lock():  # like a thread during a read
        child = multiprocessing.get_context("fork").Process(target=ds.__getitem__, args=(0,))
        child.start()
        child.join(300)
    assert child.exitcode == 0


def test_no_more_are_open_than_allowed(tmp_path: Path) -> None:
    write_npys(tmp_path, SIZES)
    parts = JoinedReader(*resolve_source(tmp_path), max_open=2)
    ds = PackedDataset(parts)
    for i in range(-23, 23):
        _ = ds[i]
        assert len(parts._readers) <= 2
    first = parts.reader(0)
    parts.reader(2)
    assert parts.reader(0) is first  # used last, so it is kept
    parts.reader(4)
    assert parts.reader(0) is first


# ---- reading by pointer ----


def test_the_token_file_is_read_by_pointer_and_size(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", PACKS, capacity=64, token_dtype=np.uint16)
    write_samples(tmp_path / "y", PACKS[:2], capacity=64, token_dtype=np.uint16)
    raw = (tmp_path / "x.bin").read_bytes()
    for options in ({}, {"backend": "pread"}, {"copy": True}):
        ds = open_dataset([tmp_path / "x", tmp_path / "y"], **options)
        for offset, nbytes in [(0, 0), (0, len(raw)), (3, 5), (1, 1), (len(raw), 0), (len(raw) - 1, 1)]:
            assert bytes(ds.read(offset, nbytes)) == raw[offset : offset + nbytes]
        assert bytes(ds.read(2, 4, part=1)) == (tmp_path / "y.bin").read_bytes()[2:6]
        for offset, nbytes in [(-1, 1), (0, -1), (0, len(raw) + 1), (2**63, 2**63), (len(raw), 1), (2**64, 0)]:
            with pytest.raises(IndexError, match="exceed the file"):
                ds.read(offset, nbytes)
        with pytest.raises(IndexError, match="no part 2; the dataset has 2"):
            ds.read(0, 1, part=2)
    shard = Shard(tmp_path / "x")
    assert np.shares_memory(shard.read(0, len(raw)), shard[0]["input_ids"])


def test_other_formats_have_no_pointers(tmp_path: Path) -> None:
    plain_npy(tmp_path / "x.npy", PACKS)
    with pytest.raises(FormatError, match="npy has no token file for offsets; convert it to sft-idx"):
        open_dataset(tmp_path / "x.npy").read(0, 1)


# ---- legacy .npy ----


def test_packs_over_the_stated_capacity_by_a_token_a_sequence_are_kept(tmp_path: Path) -> None:
    packs = [Sample(list(range(10)), [0] * 10, [0, 5]), Sample([1, 2, 3], [0] * 3, [0])]
    path = plain_npy(tmp_path / "x.npy", packs)
    ds = open_dataset(path, capacity=8)
    assert ds.capacity == 10
    assert any("exceed the capacity 8 by up to one token per sequence" in note for note in ds.notes)
    assert_holds(ds, packs)
    assert open_dataset(path, capacity=64).capacity == 64
    assert open_dataset(path).capacity == 10
    with pytest.raises(
        SequenceError, match=r"x\.npy:0: has 10 tokens in 2 sequences, which is too many for a capacity of 7"
    ):
        open_dataset(path, capacity=7)


def test_lists_that_repeat_each_other_do_not_unfold(tmp_path: Path) -> None:
    nested: Any = [1] * 100
    for _ in range(9):
        nested = [nested] * 100
    row = {"input_ids": nested, "loss_mask": [1], "seq_start_id": [0]}
    array = np.empty(1, object)
    array[0] = row
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(SequenceError, match="input_ids is not a list of numbers"):
        open_dataset(tmp_path / "x.npy")


@pytest.mark.parametrize("suffix", ["", ".bin", ".seq.idx"])
@pytest.mark.parametrize(
    ("offset", "new", "says"),
    [(8, b"\x02", "upgrade"), (0, b"?", "rebuild"), (40, b"?", "rebuild"), (None, b"", "rebuild")],
    ids=["version", "magic", "header", "cut"],
)
def test_what_is_wrong_with_a_shard_is_said_where_nobody_says_that_it_is_one(
    tmp_path: Path, suffix: str, offset: int | None, new: bytes, says: str
) -> None:
    write_shards(tmp_path, {"x": 3}, PACKS[:3])
    header = tmp_path / "x.seq.idx"
    raw = header.read_bytes()
    header.write_bytes(raw[:20] if offset is None else raw[:offset] + new + raw[offset + 1 :])
    with pytest.raises(FormatError) as expected:
        open_dataset(tmp_path / "x", format="sft-idx")
    with pytest.raises(type(expected.value)) as found:
        open_dataset(f"{tmp_path / 'x'}{suffix}")
    assert str(found.value) == str(expected.value)
    assert says in str(found.value)
