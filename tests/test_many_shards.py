"""Sets of more shards than are mapped: held in memory or opened for each read, equal to the mapped in everything."""

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
from packs import Sample, assert_is, demo_samples, write_samples

from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError, ShardNotFoundError
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shards import ShardSet, budgets, shard_set
from megatron_sft_idx.storage import Backend, ReopenedArray
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.sources import PlannedPacks, PlanOptions, StoredPacks

PACKS = demo_samples(40)
SIZES = [7, 0, 1, 12, 3, 9, 8]


def write(folder: Path, sizes: list[int] = SIZES, **options: object) -> list[Sample]:
    done = 0
    for number, size in enumerate(sizes):
        write_samples(folder / f"s{number}", PACKS[done : done + size], **{"capacity": 64, **options})
        done += size
    return PACKS[:done]


@pytest.fixture
def no_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets.MAPPED_SHARDS, "most", 0)


@pytest.fixture(params=["held", "reopened"])
def many(request: pytest.FixtureRequest, no_maps: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sets are not mapped, and are held in memory or not even that."""
    if request.param == "reopened":
        monkeypatch.setattr(budgets.MEMORY_NBYTES, "most", 0)
    return str(request.param)


def is_held(shards: ShardSet) -> str:
    return "reopened" if shards.held is None else "held"


def maps_of(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


def files_of(folder: Path) -> int:
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.lexists(link) and os.readlink(link).startswith(f"{folder}/") for link in links)


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


def test_budgets_are_shared_and_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    taken = sum(budgets.MAPPED_SHARDS._granted.values())
    monkeypatch.setattr(budgets.MAPPED_SHARDS, "most", taken + len(SIZES))
    first, second = ShardSet.open(tmp_path), ShardSet.open(tmp_path)
    first[0]
    second[0]
    assert first.shard(0).backend == "mmap"
    assert is_held(second) == "held"
    del first
    third = ShardSet.open(tmp_path)
    third[0]
    assert third.shard(0).backend == "mmap"


def test_index_arrays_are_held_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = write(tmp_path)
    shards = ShardSet.open(tmp_path, backend="reopen")
    largest = max(shards._index_nbytes)
    monkeypatch.setattr(shard_set, "INDEX_NBYTES", 2 * largest)
    for i in [*range(len(packs)), *reversed(range(len(packs))), 5]:
        assert_is(shards[i], packs[i])
        assert len(shards._shards) <= 2
    shards[len(packs) - 1]
    shards[5]
    shards[12]
    assert list(shards._shards) == [0, 3]  # the one unused for longest went


# ---- changed under a reader ----


def rewritten(path: Path) -> None:
    """Another file with the same bytes, as a copy put back is."""
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw)


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
    """As an overwriting build begins: the index goes first (rule W3), then a data file is another one."""
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
        assert_is(shards[1], packs[1])  # as a map would serve it
    else:
        with pytest.raises(error, match="s0"):
            shards[1]
    assert_is(shards[8], packs[8])


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
    assert receive.poll(60)
    assert receive.recv() == sum(sum(pack.tokens) for pack in packs)
    process.join(60)


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


# ---- batches ----


def batches_of(source: StoredPacks | PlannedPacks, order: list[list[int]]) -> list[dict[str, list[object]]]:
    assembler = BatchAssembler(source, 64)
    return [{name: tensor.tolist() for name, tensor in assembler.assemble(packs).items()} for packs in order]


def planned(shards: ShardSet) -> PlannedPacks:
    return PlannedPacks(shards, PlanOptions(32, seed=3))


@pytest.mark.parametrize("source_of", [StoredPacks, planned])
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_batches_are_those_of_mapped_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source_of: Callable[..., StoredPacks], backend: Backend
) -> None:
    write(tmp_path)
    write_samples(tmp_path / "weights", PACKS[:5], capacity=64, mask_dtype=np.float32)
    made = []
    for most in (10**6, 0):
        monkeypatch.setattr(budgets.MAPPED_SHARDS, "most", most)
        source = source_of(ShardSet.open(tmp_path, backend=backend, same_capacity=False))
        order = [[i, source.num_packs - 1 - i, i // 2] for i in range(source.num_packs)]
        made.append(batches_of(source, [*order, []]))
    assert made[0] == made[1]


@pytest.mark.parametrize("source_of", [StoredPacks, planned])
def test_batches_of_many_shards(tmp_path: Path, many: str, source_of: Callable[..., StoredPacks]) -> None:
    write(tmp_path)
    reference = source_of(ShardSet.open(tmp_path))
    order = [[i, reference.num_packs - 1 - i] for i in range(reference.num_packs)]
    assert is_held(reference.shards) == many
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets.MAPPED_SHARDS, "most", 10**6)
        mapped = source_of(ShardSet.open(tmp_path))
        assert batches_of(mapped, order) == batches_of(reference, order)
    loader = BatchLoader(BatchAssembler(pickle.loads(pickle.dumps(reference)), 64), order, copy=True)
    assert [batch["tokens"].tolist() for batch in loader] == [b["tokens"] for b in batches_of(reference, order)]


def test_a_batch_meets_a_changed_shard(tmp_path: Path, no_maps: None) -> None:
    write(tmp_path)
    source = StoredPacks(ShardSet.open(tmp_path, backend="reopen"))
    before = batches_of(source, [[0, 8, 1, 20]])
    rewritten(tmp_path / "s3.bin")
    rewritten(tmp_path / "s0.loss.bin")
    assert batches_of(source, [[0, 8, 1, 20]]) == before
    write_samples(tmp_path / "s3", PACKS[20:32], capacity=64, overwrite=True)
    with pytest.raises(FormatError, match="s3: .*another shard was published"):
        batches_of(source, [[0, 8, 1, 20]])


def test_a_file_that_never_rests_is_an_error(tmp_path: Path, no_maps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    shards = ShardSet.open(tmp_path, backend="reopen")
    source = StoredPacks(shards)
    look = ReopenedArray.look_again
    monkeypatch.setattr(ReopenedArray, "look_again", lambda array: (look(array), rewritten(tmp_path / "s0.bin"))[0])
    rewritten(tmp_path / "s0.bin")
    with pytest.raises(FormatError, match="changed at every one of"):
        shards[0]
    with pytest.raises(FormatError, match="changed at every one of"):
        batches_of(source, [[0]])


# ---- under limits ----

_UNDER_LIMITS = """
import resource, sys
from pathlib import Path
import numpy as np
from megatron_sft_idx.shards import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.sources import StoredPacks

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
folder, backend = sys.argv[1:]
most = 0
def look():
    global most
    most = max(most, Path("/proc/self/maps").read_text().count(folder + "/"))
shards = ShardSet.open(folder, backend=backend)
assert (shards.held is None) == (backend == "reopen")
order = np.random.default_rng(0).permutation(len(shards))
kept = [shards[int(i)] for i in order]
look()
assembler = BatchAssembler(StoredPacks(shards), 64)
total = sum(int(assembler.assemble(order[i : i + 8])["tokens"].sum()) for i in range(0, len(order), 8))
look()
assert total == sum(int(pack["input_ids"].sum()) for pack in kept)
print(len(shards), total, most)
"""


def under_limits(folder: Path, shards: int, backend: str) -> None:
    for number in range(shards):
        write_samples(folder / f"s{number}", [PACKS[number % len(PACKS)]], capacity=64)
    command = [sys.executable, "-W", "ignore", "-c", _UNDER_LIMITS, str(folder), backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    total = sum(sum(PACKS[number % len(PACKS)].tokens) for number in range(shards))
    assert done.stdout.split() == [str(shards), str(total), "0"], done.stderr


@pytest.mark.parametrize("backend", ["mmap", "reopen"])
def test_hundreds_of_shards_need_no_maps_and_no_descriptors(tmp_path: Path, backend: str) -> None:
    under_limits(tmp_path, 300, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mmap", "reopen"])
def test_thousands_of_shards_need_no_maps_and_no_descriptors(tmp_path: Path, backend: str) -> None:
    under_limits(tmp_path, 5000, backend)
