"""Run an interrupted ``preprocess`` again: it gives the same bytes as an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import time
from dataclasses import fields
from pathlib import Path

import pytest
from chats import CHATS, MADE, command, files_of, preprocess, remains, write_rows
from interrupted_runs import Case, be_quick, some_rows
from kills import killed_after, killed_at
from rebuilding import damage

from megatron_sft_idx.chat.template import MaskOptions
from megatron_sft_idx.shard import Shard, read_header
from megatron_sft_idx.storage import building
from megatron_sft_idx.tokenize import gather, parts, pipeline


@pytest.fixture(scope="module")
def quick():
    with pytest.MonkeyPatch.context() as patch:
        be_quick(patch)
        yield


@pytest.fixture(scope="module")
def case(quick, tmp_path_factory):
    return Case(tmp_path_factory.mktemp("case"), some_rows(48))


@pytest.fixture
def prefix(case, request):
    """Return a new prefix for a run of the case."""
    folder = case.folder / "".join(c if c.isalnum() else "-" for c in request.node.name)
    yield folder / "x"
    shutil.rmtree(folder, ignore_errors=True)


def half_made(case, prefix: Path, pieces: int = 5, *more: object) -> None:
    """Leave a run that was killed while it tokenised piece number ``pieces``. Each piece is a part."""

    def dies():
        taken = iter(range(pieces))
        write_part = parts.write_part

        def counted(*arguments):
            if next(taken, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return write_part(*arguments)

        parts.write_part = counted
        case.run(prefix, *more)

    assert end_of_fork(dies) == signal.SIGKILL
    assert len(parts_left(prefix)) == pieces


def parts_left(prefix: Path) -> list[Path]:
    return sorted(Path(f"{prefix}.building/parts").glob("*.part"))


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def end_of_fork(work) -> int:
    """Do ``work`` in a fork and return its wait status."""
    if (child := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_step_of_what_changes_the_folder(case, prefix, stride):
    for step in range(0, 200, stride):
        at = prefix.parent.with_name(f"step-{step}") / "x"
        if not killed_at(step, lambda at=at: case.run(at)):
            break
        case.check_what_is_left(at)
        case.assert_ends_the_same(at)
    assert step > 40


def test_killed_at_random_moments_and_killed_again(case, prefix):
    chance = random.Random(0)
    kills = 0
    for attempt in range(8):
        at = prefix.parent.with_name(f"moment-{attempt}") / "x"
        for _ in range(1 + attempt % 3):
            if not killed_after(chance.uniform(0, 1.1 * case.seconds), lambda at=at: case.run(at)):
                break
            kills += 1
            case.check_what_is_left(at)
        case.assert_ends_the_same(at)
    assert kills > 4


def test_with_worker_processes_it_ends_the_same_and_they_end_too(case, prefix):
    if (run := os.fork()) == 0:
        case.run(prefix, "--workers", 2)
        os._exit(0)
    children = Path(f"/proc/{run}/task/{run}/children")
    workers: list[int] = []
    while len(workers) < 2:
        assert os.waitpid(run, os.WNOHANG) == (0, 0), "it ended before its workers had begun"
        workers = [pid for pid in map(int, children.read_text().split()) if _is_worker(pid)]
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    case.check_what_is_left(prefix)
    case.assert_ends_the_same(prefix, "--workers", 2)
    for _ in range(6000):  # a minute, because busy machines start processes slowly
        if not any(map(_is_worker, workers)):
            break
        time.sleep(0.01)
    assert not any(map(_is_worker, workers))


def _is_worker(pid: int) -> bool:
    """Return whether a process exists and has not ended (a zombie has no command line)."""
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("more", [(), ("--overwrite",)])
@pytest.mark.parametrize("half", [False, True])
def test_of_runs_at_the_same_time_one_makes_the_shard(case, prefix, more, half):
    prefix.parent.mkdir()
    if half:
        half_made(case, prefix)
    runs = []
    for number in range(4):
        if (run := os.fork()) == 0:
            time.sleep(number * case.seconds / 8)
            os._exit(case.run(prefix, *more).code)
        runs.append(run)
    codes = [os.waitstatus_to_exitcode(os.waitpid(run, 0)[1]) for run in runs]
    assert 0 in codes
    assert set(codes) <= {0, 1}
    assert files_of(prefix) == case.files
    assert remains(prefix.parent) == sorted(f"x{suffix}" for suffix in case.files)


def run_with_a_file_limit(case, prefix: Path, said: Path, limit: int, *more: object) -> str:
    """Run into an error and return its message."""

    def limited():
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        done = case.run(prefix, *more)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        said.write_text(done.err)
        os._exit(done.code)

    assert os.waitstatus_to_exitcode(end_of_fork(limited)) == 1
    assert "File too large" in said.read_text()
    return said.read_text()


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_file_limit_ends_the_run_and_gives_the_space_back(case, prefix, tmp_path, share, resumed):
    largest = case.largest_part
    if resumed:
        half_made(case, prefix, 2)
    run_with_a_file_limit(case, prefix, tmp_path / "said", int(share * largest))
    # If a run cannot even begin, the parts of the previous run stay.
    assert remains(prefix.parent) == ["x.building"] * (resumed and share == 0.1)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_file_limit_while_packing_keeps_the_parts(case, prefix, tmp_path, share):
    limit = int(share * len(case.files[".bin"]))
    assert limit > case.largest_part
    said = run_with_a_file_limit(case, prefix, tmp_path / "said", limit)
    assert f"kept in {prefix}.building" in said
    assert remains(prefix.parent) == ["x.building"]
    again = case.run(prefix)
    assert (again.code, "corpus reused" in again.out) == (0, True), again
    assert files_of(prefix) == case.files
    assert remains(prefix.parent) == sorted(f"x{suffix}" for suffix in case.files)


@pytest.mark.parametrize("record", [bytes(300), b'{"version": 1}', b'{"sft-building": 1, "work": '])
def test_a_record_that_cannot_be_read_stops_the_run_with_a_remedy(case, prefix, record):
    half_made(case, prefix)
    Path(f"{prefix}.building/build.json").write_bytes(record)
    before = everything_in(prefix.parent)
    for more in ((), ("--overwrite",)):
        refused = case.run(prefix, *more)
        assert refused.code == 1
        assert f"{prefix}.building" in refused.err
    assert everything_in(prefix.parent) == before
    shutil.rmtree(f"{prefix}.building")
    assert case.run(prefix).code == 0
    assert files_of(prefix) == case.files


def test_it_goes_on_and_does_not_begin_again(case, prefix):
    half_made(case, prefix)
    done = case.run(prefix)
    assert re.search(r"\b5 of \d+ parts reused", done.err)
    assert files_of(prefix) == case.files


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_become_a_sequence_a_turn_are_gone_on_with_as_a_whole(quick, tmp_path, workers):
    case = Case(tmp_path, some_rows(48), "--earlier-reasoning", "split")
    rows = case.counts["corpus"]["rows"] - case.counts["corpus"]["skipped"]
    assert case.counts["packing"]["sequences"] > rows  # otherwise no row would give several sequences
    prefix = tmp_path / "killed" / "x"
    half_made(case, prefix, 5)
    assert sum(parts.Part(str(path)).info.rows for path in parts_left(prefix)) > 0
    assert "5 of " in case.run(prefix, "--workers", workers).err
    assert files_of(prefix) == case.files
    assert case.counts_of(prefix) == case.counts


def test_a_finished_run_is_found(case, prefix):
    assert case.run(prefix).code == 0
    damage(f"{prefix}.loss.bin", -2, 1)
    again = case.run(prefix)
    assert (again.code, again.out.startswith(f"found {prefix}: already complete, ")) == (0, True)
    assert "reused" not in again.out
    check = re.search("contents not checked: megatron-sft-idx (.*)", again.out)
    checked = command(*check[1].split())
    assert (checked.code, "make the shard again with --overwrite" in checked.out) == (1, True)
    assert case.run(prefix, "--overwrite").code == 0
    other = case.run(prefix, "--seed", 3)
    assert other.code == 1
    assert "packing seed was 0, is 3" in other.err
    assert files_of(prefix) == case.files


@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_a_run_killed_after_its_last_rename_is_found(case, prefix, more):
    def dies():
        remove_others = building.Building._remove_others

        def dying(self):
            if self.is_whole:
                os.kill(os.getpid(), signal.SIGKILL)
            remove_others(self)

        building.Building._remove_others = dying
        case.run(prefix, *more)

    assert end_of_fork(dies) == signal.SIGKILL
    assert files_of(prefix) == case.files
    again = case.run(prefix, *more)
    assert (again.code, again.out.startswith("found ")) == (0, True), again
    assert remains(prefix.parent) == sorted(f"x{suffix}" for suffix in MADE)


@pytest.mark.parametrize(
    "options", [("--seed", 3), ("--seq-length", 2048), ("--output-shards", 2), ("--overlong", "drop")]
)
def test_a_run_killed_while_packing_may_be_packed_otherwise_from_the_same_parts(case, prefix, options):
    def dies():
        gather.write_packs = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        case.run(prefix)

    assert end_of_fork(dies) == signal.SIGKILL
    number = len(parts_left(prefix))
    done = case.run(prefix, *options)
    assert (done.code, f"{number} of {number} parts reused" in done.err) == (0, True), done
    calm = prefix.parent.with_name("calm-otherwise") / "x"
    assert case.run(calm, *options, "--overwrite").code == 0
    assert everything_in(prefix.parent) == everything_in(calm.parent)
    shutil.rmtree(calm.parent)


def test_bad_rows_may_be_skipped_by_the_run_that_goes_on(case, prefix):
    half_made(case, prefix)
    assert case.run(prefix, "--on-bad-row", "error").code == 1


def test_the_weight_of_a_file_is_part_of_its_parts_alone(quick, tmp_path):
    one, other = (write_rows(tmp_path / name, some_rows(48)[at::2]) for at, name in enumerate(("a.jsonl", "b.jsonl")))
    common = ("--input", one, other, "--on-bad-row", "skip")

    def dies():
        gather.write_packs = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        preprocess(tmp_path / "x", *common)

    assert end_of_fork(dies) == signal.SIGKILL
    number = len(parts_left(tmp_path / "x"))
    weighted = (*common, "--loss-weight", "b.jsonl=0.5")
    done = preprocess(tmp_path / "x", *weighted)
    reused = int(re.search(r"(\d+) of \d+ parts reused", done.err)[1])
    assert 0 < reused < number
    assert preprocess(tmp_path / "calm", *weighted).code == 0
    assert files_of(tmp_path / "x") == files_of(tmp_path / "calm")


@pytest.mark.parametrize(("recovered", "more"), [("x", ()), ("x.unpacked", ("--keep-corpus",))])
def test_packs_that_rebuild_recovered_are_not_taken_for_all(case, prefix, recovered, more):
    def dies():
        write_packs = gather.write_packs

        def dying(reader, run, writer, *_):
            write_packs(reader, run.window(0, 3), writer)
            writer.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        gather.write_packs = pipeline.write_packs = dying
        case.run(prefix, *more)

    assert end_of_fork(dies) == signal.SIGKILL
    if recovered == "x":
        refused = command("rebuild", prefix)
        assert (refused.code, "run that command again" in refused.err) == (1, True)
        shutil.rmtree(f"{prefix}.building/parts")
    assert command("rebuild", prefix.parent / recovered).code == 0
    refused = case.run(prefix, *more)
    assert (refused.code, f"{recovered}: a " in refused.err, "packs may be missing" in refused.err) == (1, True, True)
    assert case.run(prefix, "--overwrite", *more).code == 0
    assert files_of(prefix) == case.files


@pytest.mark.parametrize(("packed", "more"), [("x.unpacked", ("--where", "source == rows.jsonl")), ("x-short", ())])
def test_what_pack_made_of_some_rows_is_not_taken_for_all(case, prefix, packed, more):
    assert case.run(prefix, "--keep-corpus").code == 0
    packing = ("--seq-length", 256, "--overlong", "drop", "--output-prefix", prefix.with_name("x-short"))
    assert command("pack", f"{prefix}.unpacked", *packing).code == 0
    again = prefix.with_name("again")
    packing = (*more, "--seq-length", 1024, "--output-prefix", again)
    assert command("pack", prefix.with_name(packed), *packing).code == 0
    refused = case.run(again)
    said = "packing where was ['source == rows.jsonl'], is None" if more else "it was packed from a different shard"
    assert (refused.code, said in refused.err) == (1, True), refused.err


def test_a_corpus_that_is_asked_for_later_is_made(case, prefix):
    assert case.run(prefix).code == 0
    assert case.run(prefix, "--keep-corpus").code == 0
    assert files_of(prefix) == case.files
    assert len(Shard(f"{prefix}.unpacked")) == len(case.corpus)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--train-on", "all"), "train on was 'assistant', is 'all'"),
        (("--no-train-on-thinking",), "train on thinking was True, is False"),
        (("--no-train-on-tool-calls",), "train on tool calls was True, is False"),
        (("--earlier-reasoning", "split"), "earlier reasoning was 'drop', is 'split'"),
        (("--partial-markers", "keep"), "partial markers was 'error', is 'keep'"),
        (("--allow-control-tokens",), "allow control tokens was False, is True"),
        (("--template-date", "2026-01-01"), "template date was None, is '2026-01-01'"),
        (("--append-eod",), "append eod was False, is True"),
        (("--chat-template-kwargs", '{"a": 1}'), "template kwargs a was None, is 1"),
    ],
)
def test_changed_options_are_named(case, prefix, options, said):
    half_made(case, prefix)
    before = everything_in(prefix.parent)
    refused = case.run(prefix, *options)
    assert refused.code == 1
    assert f"with a different option: {said}; use" in refused.err
    assert everything_in(prefix.parent) == before
    case.assert_ends_the_same(prefix)


def test_each_option_of_the_masks_is_changed_above():
    marks = next(mark for mark in test_changed_options_are_named.pytestmark if mark.name == "parametrize")
    changed = {said.partition(" was ")[0].replace(" ", "_") for _, said in marks.args[1]}
    assert {field.name for field in fields(MaskOptions)} <= changed


def test_overwrite_drops_parts_of_another_option(case, prefix):
    half_made(case, prefix, 5, "--append-eod")
    done = case.run(prefix, "--overwrite")
    assert (done.code, "reused" in done.err) == (0, False)
    assert files_of(prefix) == case.files


def test_of_changed_input_the_parts_that_are_the_same_are_reused(quick, tmp_path):
    rows = some_rows(48)
    path = write_rows(tmp_path / "rows.jsonl", rows)

    def dies():
        gather.write_packs = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        preprocess(tmp_path / "x", "--input", path, "--on-bad-row", "skip")

    assert end_of_fork(dies) == signal.SIGKILL
    write_rows(path, [*rows[:-9], *rows[-5:]])
    done = preprocess(tmp_path / "x", "--input", path, "--on-bad-row", "skip")
    reused, number = map(int, re.search(r"(\d+) of (\d+) parts reused", done.err).groups())
    assert 0 < reused < number
    assert preprocess(tmp_path / "calm", "--input", path, "--on-bad-row", "skip").code == 0
    assert files_of(tmp_path / "x") == files_of(tmp_path / "calm")


def test_what_was_to_be_replaced_still_is(case, prefix):
    assert case.run(prefix, "--seed", 3).code == 0
    half_made(case, prefix, 5, "--overwrite")
    assert read_header(prefix).metadata["packing"]["seed"] == 3
    assert case.run(prefix).code == 1
    assert read_header(prefix).metadata["packing"]["seed"] == 3
    case.assert_ends_the_same(prefix, "--overwrite")


def test_remains_that_were_tampered_with_are_not_gone_on_with(case, prefix):
    half_made(case, prefix, 8)
    flipped, torn, empty, *_ = parts_left(prefix)
    with open(flipped, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    os.truncate(torn, torn.stat().st_size - 1)
    os.truncate(empty, 0)
    case.assert_ends_the_same(prefix)


def test_parts_of_an_earlier_version_are_refused_with_a_remedy(case, prefix):
    old = Path(f"{prefix}.parts")
    old.mkdir(parents=True)
    (old / "run.json").write_text("{}")
    refused = case.run(prefix)
    assert (refused.code, "remove this folder" in refused.err) == (1, True)
    shutil.rmtree(old)
    assert case.run(prefix).code == 0


def test_an_interrupted_run_says_how_many_parts_it_keeps(case, prefix):
    def interrupted():
        taken = iter(range(3))
        write_part = parts.write_part

        def counted(*arguments):
            if next(taken, None) is None:
                raise KeyboardInterrupt
            return write_part(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts, "write_part", counted)
            return case.run(prefix)

    said = interrupted()
    assert said.code == 130
    assert f"interrupted; 3 parts kept in {prefix}.building; run the same command again" in said.err
    case.assert_ends_the_same(prefix)


def test_an_input_that_is_the_output_is_refused(tmp_path):
    rows = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()[:3]]
    for name in ("x.bin", "x.unpacked.idx"):
        path = write_rows(tmp_path / name, rows)
        before = path.read_bytes()
        refused = preprocess(tmp_path / "x", "--overwrite", "--input", path)
        assert (
            refused.code,
            any(said in refused.err for said in ("is an input", "both the output and the input")),
        ) == (1, True)
        assert path.read_bytes() == before
    assert remains(tmp_path) == ["x.bin", "x.unpacked.idx"]


def test_a_shard_is_not_packed_over_itself(tmp_path):
    assert preprocess(tmp_path / "x").code == 0
    before = files_of(tmp_path / "x")
    for output in (tmp_path / "x", tmp_path / "x.bin", tmp_path / "." / "x"):
        refused = command("pack", tmp_path / "x", "--seq-length", 512, "--overwrite", "--output-prefix", output)
        assert (refused.code, "both the output and the source" in refused.err) == (1, True)
    assert files_of(tmp_path / "x") == before
