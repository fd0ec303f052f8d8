"""The prefetch thread and torch's DataLoader give the same batches; and all ways to stop them."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from training_source import two_shards

from megatron_sft_idx.training.batch import BatchAssembler, whole_batch
from megatron_sft_idx.training.loader import BatchLoader, Wanted

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def assembler(tmp_path: Path) -> BatchAssembler:
    source, _ = two_shards(tmp_path)
    return BatchAssembler(source, 40)


def batches_of(packs: int, rows: int = 4, seed: int = 0) -> list[list[int]]:
    """Return batches like a Megatron sampler; the last one is smaller."""
    order = np.random.default_rng(seed).permutation(packs).tolist()
    return [order[i : i + rows] for i in range(0, packs, rows)]


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def wait_until_ended(thread: threading.Thread) -> None:
    thread.join(120)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not threads()


# ---- the thread ----


@pytest.mark.parametrize("ahead", [0, 1, 4, 100])
@pytest.mark.parametrize(("prefetch", "keep"), [(1, 1), (2, 1), (3, 4)])
def test_thread_gives_the_batches_in_order(assembler: BatchAssembler, prefetch: int, keep: int, ahead: int) -> None:
    batches = batches_of(26)
    loader = BatchLoader(assembler, batches, prefetch=prefetch, keep=keep, ahead=ahead)
    assert len(loader) == len(batches)
    for _ in range(2):
        count = 0
        for batch, picked in zip(loader, batches, strict=True):
            assert same(batch, assembler.assemble(picked))
            count += 1
        assert count == 7


def test_a_batch_is_valid_until_keep_more_have_been_taken(assembler: BatchAssembler) -> None:
    batches = [batch for batch in batches_of(26) if len(batch) == 4] * 5
    for keep in (1, 3):
        with iter(BatchLoader(assembler, batches, keep=keep, prefetch=2)) as taken:
            window: list[tuple[Tensors, list[int]]] = []
            addresses = set()
            for batch, picked in zip(taken, batches, strict=True):
                window = [*window, (batch, picked)][-keep:]
                time.sleep(0.001)  # gives the thread time to write to a wrong buffer
                for kept, of in window:
                    assert same(kept, assembler.assemble(of))
                addresses.add(batch["tokens"].data_ptr())
            assert len(addresses) == keep + 2


def test_copies_are_valid_for_good(assembler: BatchAssembler) -> None:
    batches = batches_of(26)
    taken = list(BatchLoader(assembler, batches, copy=True))
    assert all(same(batch, assembler.assemble(picked)) for batch, picked in zip(taken, batches, strict=True))


def test_taken_batches_stay_valid_after_close(assembler: BatchAssembler) -> None:
    batches = batches_of(26)
    taken = iter(BatchLoader(assembler, batches))
    batch = next(taken)
    taken.close()
    taken.close()
    assert same(batch, assembler.assemble(batches[0]))
    with pytest.raises(StopIteration):
        next(taken)


@pytest.mark.parametrize("ends", ["close", "error"])
def test_all_threads_that_wait_are_woken(assembler: BatchAssembler, ends: str) -> None:
    go_on = threading.Event()

    def slow() -> Iterator[list[int]]:
        yield [0]
        go_on.wait(120)
        raise OSError("the disk says no")

    taken = iter(BatchLoader(assembler, slow(), ahead=0))
    next(taken)
    outcomes: list[type[BaseException]] = []

    def wait() -> None:
        with pytest.raises((StopIteration, OSError)) as caught:
            next(taken)
        outcomes.append(caught.type)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    closing = threading.Thread(target=taken.close, daemon=True)
    if ends == "close":
        closing.start()  # it waits some seconds for the thread, which waits for batches
    else:
        go_on.set()
    for thread in threads:
        thread.join(60)
    go_on.set()
    if ends == "close":
        closing.join(60)
    assert sorted(outcomes, key=str) == ([OSError] if ends == "error" else [StopIteration]) + [StopIteration] * 2


def test_batches_may_grow(assembler: BatchAssembler) -> None:
    batches = [[0], [1, 2, 3], [], [4, 5], [6, 7, 8, 9, 10]]
    for batch, picked in zip(BatchLoader(assembler, batches, prefetch=1), batches, strict=True):
        assert same(batch, assembler.assemble(picked))


def test_batches_are_asked_for_in_the_thread(assembler: BatchAssembler) -> None:
    seen = []

    def order() -> Iterator[Wanted]:
        seen.append(threading.current_thread().name)
        yield Wanted([25, 22])

    (batch,) = BatchLoader(assembler, order())
    assert same(batch, assembler.assemble([25, 22]))
    assert seen == ["batches"]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_batch_carries_the_state_behind_itself_and_not_behind_what_is_prefetched(
    assembler: BatchAssembler, ahead: int
) -> None:
    order = [Wanted([i], np.array([i == 3]), {"taken": i + 1}) for i in range(6)]
    with iter(BatchLoader(assembler, order, prefetch=3, ahead=ahead)) as taken:
        assert taken.state is None
        for i, batch in enumerate(taken):
            assert taken.state == {"taken": i + 1}
            assert bool(batch["loss_mask"].any()) == (i != 3 and bool(assembler.sample(i)["loss_mask"].any()))


def test_endless_batches_are_taken_as_they_are_needed(assembler: BatchAssembler) -> None:
    asked = itertools.count()

    def endless() -> Iterator[list[int]]:
        for i in asked:
            yield [i % 26]

    with iter(BatchLoader(assembler, endless(), prefetch=2, ahead=3)) as taken:
        for _ in range(10):
            next(taken)
    # Ten were taken, three are ready or in progress, three are looked ahead, and one waits for room.
    assert 10 < next(asked) <= 18


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("ahead", [0, 4])
def test_what_goes_wrong_in_the_thread_is_raised_by_next(assembler: BatchAssembler, ahead: int) -> None:
    def broken() -> Iterator[list[int]]:
        yield [0]
        yield [1]
        raise BrokenError("no more")

    taken = iter(BatchLoader(assembler, broken(), ahead=ahead))
    if not ahead:
        assert same(next(taken), assembler.assemble([0]))
        assert same(next(taken), assembler.assemble([1]))
    with pytest.raises(BrokenError, match="no more"):
        next(taken)
    with pytest.raises(StopIteration):
        next(taken)


def test_a_pack_that_does_not_fit_is_named(tmp_path: Path) -> None:
    source, _ = two_shards(tmp_path)
    narrow = BatchAssembler(source, 40, width=2)
    with pytest.raises(ValueError, match="cu_seqlens of width 2"):
        list(BatchLoader(narrow, batches_of(26)))


def test_an_iterator_that_is_dropped_ends_its_thread(assembler: BatchAssembler) -> None:
    for batch in BatchLoader(assembler, batches_of(26)):
        (thread,) = threads()
        assert batch
        break
    gc.collect()
    wait_until_ended(thread)


def test_two_iterators_at_once(assembler: BatchAssembler) -> None:
    batches = batches_of(26)
    loader = BatchLoader(assembler, batches)
    for one, other, picked in zip(loader, loader, batches, strict=True):
        assert same(one, other)
        assert same(one, assembler.assemble(picked))
        assert one["tokens"].data_ptr() != other["tokens"].data_ptr()


def test_arguments_that_could_not_work_are_refused(assembler: BatchAssembler) -> None:
    for wrong in ({"prefetch": 0}, {"keep": 0}, {"ahead": -1}):
        with pytest.raises(ValueError, match="at least"):
            BatchLoader(assembler, [[0]], **wrong)


def test_interrupt_while_waiting_leaves_a_loader_that_closes(assembler: BatchAssembler) -> None:
    go_on = threading.Event()

    def slow() -> Iterator[list[int]]:
        yield [0]
        go_on.wait(120)
        yield [1]

    with iter(BatchLoader(assembler, slow(), ahead=0)) as taken:
        next(taken)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

        def wait() -> None:
            timer.start()  # inside, because another thread may continue first
            next(taken)

        with pytest.raises(KeyboardInterrupt):
            wait()
        timer.join()
        go_on.set()
        assert same(next(taken), assembler.assemble([1]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_is_told_to_iterate_for_itself(assembler: BatchAssembler) -> None:
    with iter(BatchLoader(assembler, batches_of(26))) as taken:
        next(taken)
        child = os.fork()
        if not child:
            try:
                next(taken)
            except RuntimeError as error:
                os._exit(17 if "fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17


def test_a_script_that_just_ends_ends(tmp_path: Path) -> None:
    two_shards(tmp_path)
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[1])]!r}
from training_source import StoredRows
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.training.batch import BatchAssembler, whole_batch
from megatron_sft_idx.training.loader import BatchLoader
source = StoredRows(Shard({str(tmp_path / "first")!r}))
taken = iter(BatchLoader(BatchAssembler(source, 40), [[i % 13] for i in range(1000)]))
print(next(taken)["tokens"].shape)
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "torch.Size([1, 40])", "")


# ---- torch's DataLoader ----


@pytest.mark.parametrize(
    ("workers", "start"), [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)]
)
def test_a_plain_dataloader_gets_whole_batches(assembler: BatchAssembler, workers: int, start: str | None) -> None:
    batches = batches_of(26)
    loader: Any = DataLoader(
        assembler, batch_sampler=batches, collate_fn=whole_batch, num_workers=workers, multiprocessing_context=start
    )
    taken = list(loader)
    assert len(taken) == len(batches)
    for batch, picked in zip(taken, batches, strict=True):
        assert type(batch) is dict
        assert same(batch, assembler.assemble(picked))
        if workers:
            assert len({tensor.untyped_storage().data_ptr() for tensor in batch.values()}) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataloader_that_knows_of_no_whole_batches_stacks_rows(assembler: BatchAssembler, workers: int) -> None:
    batches = batches_of(26)
    loader: Any = DataLoader(assembler, batch_sampler=batches, num_workers=workers)
    for batch, picked in zip(loader, batches, strict=True):
        assert same(batch, assembler.assemble(picked))


def test_the_collate_stacks_what_is_no_batch_yet(assembler: BatchAssembler) -> None:
    picked = [3, 20, 1]
    assert same(whole_batch([assembler.sample(i) for i in picked]), assembler.assemble(picked))


def test_masked_rows_of_a_batch_train_nothing(assembler: BatchAssembler) -> None:
    picked = [3, 20, 1]
    batch = whole_batch(assembler.rows(picked, np.array([False, True, False])))
    plain = assembler.assemble(picked)
    assert plain["loss_mask"][1].any()
    plain["loss_mask"][1] = 0
    assert same(batch, plain)


def test_a_dataloader_over_single_rows_is_the_same(assembler: BatchAssembler) -> None:
    batches = batches_of(26)
    assert len(assembler) == 26
    for picked in batches:
        stacked = torch.utils.data.default_collate([assembler[i] for i in picked])
        assert same(stacked, assembler.assemble(picked))


def test_a_workers_error_reaches_the_trainer(tmp_path: Path) -> None:
    source, packs = two_shards(tmp_path)
    loader: Any = DataLoader(
        BatchAssembler(source, 40, width=2), batch_size=len(packs), collate_fn=whole_batch, num_workers=1
    )
    with pytest.raises(ValueError, match="cu_seqlens of width 2"):
        list(loader)
