"""``produce`` killed at any point: the same command then gives the bytes of an uninterrupted run."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
from chats import command
from disks import in_a_child
from interrupted_runs import be_quick
from kills import killed_at
from productions import Production, acknowledge, arguments, assert_clean, producing, shards_of, state_of, until

from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.live import Catalog
from megatron_sft_idx.shard import remove_shard
from megatron_sft_idx.tokenize import gather


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        be_quick(patch)
        yield


@pytest.fixture(scope="module")
def production(quick, tmp_path_factory) -> Production:
    return Production(tmp_path_factory.mktemp("production"))


@pytest.fixture
def catalog(tmp_path) -> Path:
    return tmp_path / "catalog"


@pytest.mark.parametrize("stride", [111, pytest.param(37, marks=pytest.mark.slow)])
def test_killed_at_any_step_of_what_changes_the_folder(production, tmp_path, stride):
    for step in range(0, 600, stride):
        at = tmp_path / str(step)
        if not killed_at(step, lambda at=at: production.run(at)):
            break
        production.check_what_is_left(at)
        production.assert_ends_the_same(at)
    assert step > 100


@pytest.mark.parametrize("stride", [166, pytest.param(83, marks=pytest.mark.slow)])
@pytest.mark.parametrize("source", ["--watch", "-"])
def test_killed_with_input_that_comes_bit_by_bit(production, tmp_path, source, stride):
    for step in range(5, 600, stride):
        at = tmp_path / str(step)
        if not killed_at(step, lambda at=at: production.run(at, source)):
            break
        production.check_what_is_left(at)
        production.assert_ends_the_same(at, source)
    assert step > 100


@pytest.mark.parametrize("stride", [183, pytest.param(61, marks=pytest.mark.slow)])
def test_killed_while_it_removes_what_is_completed(production, tmp_path, stride):
    """Only counted shards are removed: removed shards are neither made again nor skipped."""
    last = state_of(production.folder / "calm")
    for step in range(20, 600, stride):
        at = tmp_path / str(step)
        acknowledge(at, 10**6)
        if not killed_at(step, lambda at=at: production.run(at, "--input", "--keep-recent", 0)):
            break
        done = production.run(at, "--input", "--keep-recent", 0)
        assert done.code == 0, done.err
        assert Catalog(at).present() == []
        state = state_of(at)
        assert (state.published, state.freed, state.input) == (last.published, last.published, last.input)
        assert Catalog(at).end() == last.published
    assert step > 100


def test_a_removal_that_was_cut_short_is_finished(production, catalog):
    """The ``.seq.idx`` is removed first. The rest after a kill is not a shard, and is removed later."""
    shutil.copytree(production.folder / "calm", catalog)
    for number, gone in ((0, 1), (2, 3)):
        paths = ShardPaths(Catalog(catalog).shard_prefix(number))

        def dies(paths=paths, gone=gone):
            unlink, left = os.unlink, list(range(gone))

            def counted(path, *arguments, **named):
                if str(path) in paths.all and (not left or left.pop() is None):
                    os.kill(os.getpid(), signal.SIGKILL)
                return unlink(path, *arguments, **named)

            os.unlink = counted
            remove_shard(paths)

        assert killed_at(10**9, dies)
        assert len(paths.missing()) == gone
    assert Catalog(catalog).present() == sorted(range(len(production.shards)))
    assert production.run(catalog).code == 0
    assert Catalog(catalog).present() == [1, *range(3, len(production.shards))]


def test_a_shard_that_rebuild_recovered_is_not_gone_on_behind(production, catalog, monkeypatch):
    """Its header contains a cursor after packs that it may lack."""
    write_packs = gather.write_packs

    def dying(reader, run, writer, *_):
        write_packs(reader, run.window(0, 1), writer)
        writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(gather, "write_packs", dying)
        assert killed_at(10**9, lambda: production.run(catalog))
    shard = Catalog(catalog).shard_prefix(0)
    assert command("rebuild", shard).code == 0
    refused = production.run(catalog)
    assert (refused.code, "packs may be missing" in refused.err) == (1, True)
    for path in catalog.glob(f"{Path(shard).name}.*"):
        path.unlink()
    production.assert_ends_the_same(catalog)


@pytest.mark.parametrize("limit", [300, 3000])
def test_a_file_limit_ends_it_and_the_next_run_goes_on(production, catalog, limit):
    """This is like a full disk. With the lower limit, not even the state can be written."""

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        failed = production.run(catalog)
        assert (failed.code, "File too large" in failed.err) == (1, True), failed

    in_a_child(limited)
    assert limit == 300 or (state_of(catalog).state, "File too large" in state_of(catalog).reason) == ("failed", True)
    production.assert_ends_the_same(catalog)


def test_killed_with_worker_processes(production, catalog):
    run = producing(catalog, "--input", production.rows, "--on-bad-row", "skip", "--workers", 2)
    until(lambda: Catalog(catalog).is_published(0), run)
    run.kill()
    run.communicate()
    production.check_what_is_left(catalog)
    production.assert_ends_the_same(catalog)


def test_of_runs_at_the_same_time_one_makes_the_catalog(production, catalog, tmp_path):
    runs = [
        producing(catalog, "--input", production.rows, "--on-bad-row", "skip", stdin=-1),
        producing(catalog, "--input", production.rows, "--on-bad-row", "skip", stdin=-1),
    ]
    outcomes = {(run.communicate()[1], run.returncode) for run in runs}
    assert any(code == 0 for _, code in outcomes)
    assert all(code == 0 or "another producer is writing here" in err for err, code in outcomes)
    assert shards_of(catalog) == production.shards
    assert_clean(catalog, len(production.shards))


def test_a_process_killed_by_another_is_gone_on_with_by_the_plain_command(production, catalog):
    assert killed_at(60, lambda: command(*arguments(catalog, "--input", production.rows, "--on-bad-row", "skip")))
    done = production.run(catalog)
    assert (done.code, "continuing after " in done.err) == (0, True)
    assert shards_of(catalog) == production.shards
