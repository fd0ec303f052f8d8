"""Sets with more shards than may be mapped: they are held in memory or opened for each read, with equal results."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sample_packs import assert_is, write_samples
from shard_folders import PACKS, SIZES, files_of, is_held, maps_of, rewritten, write

from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError, ShardNotFoundError
from megatron_sft_idx.formats.packed_dataset import open_dataset
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.shard import Shard, shard_set
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.storage import Backend


def test_packs_are_the_same_and_nothing_is_open(tmp_path: Path, many: str) -> None:
    packs = write(tmp_path)
    shards = ShardSet.open(tmp_path)
    kept = [shards[i] for i in range(len(packs))]
    assert is_held(shards) == many
    assert maps_of(tmp_path) == files_of(tmp_path) == 0
    for i, pack in enumerate(packs):
        assert_is(shards[i - len(packs)], pack)
    del shards
    for got, pack in zip(kept, packs, strict=True):
        assert_is(got, pack)
        assert not got["input_ids"].flags.writeable
        assert not got["loss_mask"].flags.writeable


@pytest.mark.parametrize("dtypes", [(np.uint16, np.uint8), (np.int32, np.float32)])
def test_dtypes_are_those_on_disk(tmp_path: Path, many: str, dtypes: tuple[type, type]) -> None:
    write(tmp_path, token_dtype=dtypes[0], mask_dtype=dtypes[1])
    pack = ShardSet.open(tmp_path)[9]
    assert (pack["input_ids"].dtype, pack["loss_mask"].dtype) == dtypes


def test_shards_with_masks_of_two_kinds_are_not_held_together(tmp_path: Path, no_maps: None) -> None:
    write_samples(tmp_path / "a", PACKS[:3], capacity=64)
    write_samples(tmp_path / "b", PACKS[3:6], capacity=64, mask_dtype=np.float32)
    shards = ShardSet.open(tmp_path)
    assert is_held(shards) == "reopened"
    assert [shards[i]["loss_mask"].dtype for i in (0, 5)] == [np.uint8, np.float32]


def test_how_a_set_is_held_does_not_depend_on_other_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setattr(shard_set, "MAPPED_SHARDS", len(SIZES))
    first, second = ShardSet.open(tmp_path), ShardSet.open(tmp_path)
    first[0]
    second[0]
    assert first.shard(0).backend == second.shard(0).backend == "mmap"
    both = ShardSet.joined([first, second])
    both[0]
    assert is_held(both) == "held"
    nbytes = (
        both.in_memory.tokens.nbytes + both.in_memory.loss.nbytes + sum(header.index_nbytes for header in both.headers)
    )
    for most, how in ((nbytes, "held"), (nbytes - 1, "reopened")):
        monkeypatch.setattr(shard_set, "MEMORY_NBYTES", most)
        assert [is_held(ShardSet.joined([first, second])) for _ in range(2)] == [how, how]


_WITHOUT_ROOM = """
import resource, sys
import numpy as np
from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet

for name, packs in (("small", 1), ("large", 4096)):
    with ShardWriter(f"{sys.argv[1]}/{name}", token_dtype=np.int32, capacity=8192, durable=False) as writer:
        for pack in range(packs):
            writer.add_pack(np.full(8192, pack, np.int32), np.zeros(8192, np.uint8), [0])
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
for name in ("small", "large"):
    shards = ShardSet.open(f"{sys.argv[1]}/{name}")
    print(shards[len(shards) - 1]["input_ids"][-1], shards.shard(0).backend)
"""


def test_where_no_more_can_be_mapped_files_are_opened_for_each_read(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WITHOUT_ROOM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.splitlines() == ["0 mmap", "4095 reopen"], done.stderr


# ---- changed under a reader ----


def test_the_same_content_in_another_file_is_read_on(tmp_path: Path, many: str) -> None:
    packs = write(tmp_path)
    shards = ShardSet.open(tmp_path)
    shards[0]
    rewritten(tmp_path / "s0.bin")
    (tmp_path / "s0.loss.bin").touch()
    for i, pack in enumerate(packs):
        assert_is(shards[i], pack)


def replaced(folder: Path) -> None:
    write_samples(folder / "s0", PACKS[20:27], capacity=64, overwrite=True)


def cut(folder: Path) -> None:
    os.truncate(folder / "s0.bin", 4)


def removed(folder: Path) -> None:
    for path in folder.glob("s0.*"):
        path.unlink()


def unpublished(folder: Path) -> None:
    """Begin to overwrite a shard: the index is removed first (rule W3), then a data file changes."""
    (folder / "s0.seq.idx").unlink()
    (folder / "s0.bin").write_bytes(bytes((folder / "s0.bin").stat().st_size))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (replaced, FormatError),
        (cut, CorruptShardError),
        (removed, ShardNotFoundError),
        (unpublished, ShardNotFoundError),
    ],
)
@pytest.mark.parametrize("read_before", [False, True])
def test_a_change_is_an_error_and_never_other_tokens(
    tmp_path: Path, many: str, change: Callable[[Path], None], error: type[SFTIndexError], read_before: bool
) -> None:
    packs = write(tmp_path)
    shards = ShardSet.open(tmp_path)
    if read_before:
        shards[0]
    len(shards)
    change(tmp_path)
    if read_before and many == "held":
        assert_is(shards[1], packs[1])  # the same as through a map
    else:
        with pytest.raises(error, match="s0"):
            shards[1]
    assert_is(shards[8], packs[8])


@pytest.mark.parametrize("backend", ["mmap", "pread", "reopen"])
def test_a_file_that_goes_while_a_shard_is_opened_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    write_samples(tmp_path / "x", PACKS[:3], capacity=64)
    sizes = Header.sizes

    def late(header: Header, paths: ShardPaths) -> dict[str, int]:
        Path(paths.loss).unlink(missing_ok=True)
        return sizes(header, paths)

    monkeypatch.setattr(Header, "sizes", late)
    with pytest.raises(ShardNotFoundError, match=r"x: no shard here, missing .*x\.loss\.bin"):
        Shard(tmp_path / "x", backend=backend)


def test_the_index_is_held_to_its_rules_before_packs_are_read(tmp_path: Path, many: str) -> None:
    packs = write(tmp_path)
    shards = ShardSet.open(tmp_path)
    index = tmp_path / "s3.seq.idx"
    offset = shards.headers[3].token_offsets_offset + 8 * 4
    with index.open("r+b") as file:
        file.seek(offset)
        file.write((10**6).to_bytes(8, "little"))
    with pytest.raises(FormatError, match="s3"):
        shards[8 + 4]
    assert_is(shards[0], packs[0])


# ---- processes and threads ----


def test_it_pickles_as_paths_and_little_else(tmp_path: Path, many: str) -> None:
    packs = write(tmp_path, [1] * 40)
    shards = ShardSet.open(tmp_path)
    raw = pickle.dumps(shards)
    assert len(raw) < 200 + sum(len(prefix) + 1 for prefix in shards.prefixes)
    again = pickle.loads(raw)
    assert again.fingerprint == shards.fingerprint
    assert_is(again[17], packs[int(Path(again.prefixes[17]).name[1:])])


def _sum_of(shards: ShardSet, send: object) -> None:
    send.send(sum(int(pack["input_ids"].sum()) for pack in shards))  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_read_it(tmp_path: Path, many: str, method: str) -> None:
    packs = write(tmp_path)
    shards = ShardSet.open(tmp_path)
    shards[3]
    context = multiprocessing.get_context(method)
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_sum_of, args=(shards, send))
    process.start()
    assert receive.poll(300)
    assert receive.recv() == sum(sum(pack.tokens) for pack in packs)
    process.join(300)


def test_threads_read_it(tmp_path: Path, many: str) -> None:
    packs = write(tmp_path)
    shards, wrong = ShardSet.open(tmp_path), []

    def read(seed: int) -> None:
        for i in np.random.default_rng(seed).permutation(len(packs)).tolist():
            if shards[i]["input_ids"].tolist() != packs[i].tokens:
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_one_shard_can_be_reopened_too(tmp_path: Path) -> None:
    write(tmp_path, [9])
    mapped, reopened = Shard(tmp_path / "s0"), Shard(tmp_path / "s0", backend="reopen")
    assert maps_of(tmp_path) > 0
    for i, pack in enumerate(PACKS[:9]):
        assert_is(reopened[i], pack)
        assert reopened.get(i, 0, 1).tolist() == pack.tokens[:1]
        assert reopened.token_range(i) == mapped.token_range(i)
    assert reopened.read(3, 5).tobytes() == mapped.read(3, 5).tobytes()
    assert reopened.sequence_bounds().tolist() == mapped.sequence_bounds().tolist()
    assert_is(pickle.loads(pickle.dumps(reopened))[2], PACKS[2])


# ---- as packed data of any format ----


def test_open_dataset_holds_no_file_open(tmp_path: Path, many: str) -> None:
    packs = write(tmp_path)
    ds = open_dataset(tmp_path)
    for i, pack in enumerate(packs):
        assert_is(ds[i], pack)
    assert maps_of(tmp_path) == files_of(tmp_path) == 0
    assert (len(ds), ds.capacity, ds.format) == (len(packs), 64, "sft-idx")
    assert ds.num_sequences == sum(len(pack.starts) for pack in packs)
    assert not ds[0]["input_ids"].flags.writeable
    copies = open_dataset(tmp_path, copy=True)
    copies[0]["input_ids"][:] = 0
    copies[0]["loss_mask"][:] = 0
    assert_is(copies[0], packs[0])


def test_what_is_not_of_a_shard_is_still_looked_at(tmp_path: Path) -> None:
    packs = write(tmp_path, [3, 2])
    (tmp_path / "notes.txt").write_text("beside the data")
    assert len(open_dataset(tmp_path)) == len(packs)
    (tmp_path / "s9.seq.idx").write_bytes(b"no index")
    with pytest.raises(FormatError, match=r"s9\.seq\.idx"):
        open_dataset(tmp_path)
