"""tools/pretrain_sft.py with live data in one process: errors, the end of data, and resuming after a kill."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from chats import TOKENIZER, write_rows
from pretrain_runs import run
from test_live_training import LENGTH, chat, pack
from test_pretrain_script import assert_bitwise
from training_twin import lone_process

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.live import Catalog, Limits, ProducerState, completed, read_acks
from megatron_sft_idx.tokenize.encoding import EncodingOptions

PACKS = ["--vocab-size", 2048]
RAW = ["--tokenizer-model", TOKENIZER]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with lone_process() as module:
        yield module


def finished(folder: Path, rows: list[dict[str, Any]], size: int = 3) -> Path:
    """Return a finished folder of chunks."""
    folder.mkdir()
    numbers = range(0, len(rows), size)
    for number, begin in enumerate(numbers):
        write_rows(folder / f"chunk_{number:05d}.jsonl", rows[begin : begin + size])
    Catalog(folder).write_end(len(numbers))
    return folder


def options(folder: Path, *more: object, steps: int | None = 100) -> list[str]:
    data = ["--data-path", f"live:{folder}", "--seq-length", LENGTH, "--global-batch-size", 2]
    model = ["--hidden-size", 32, "--log-interval", 1000, "--max-wait", 30]
    taken = [] if steps is None else ["--train-iters", steps]
    return [str(option) for option in (*data, *model, *taken, *more)]


@pytest.mark.parametrize(
    ("more", "steps", "why"),
    [
        ([], None, "the amount of live data is unknown; pass --train-iters"),
        (["--split", "98,1,1"], 5, "leave out --split: live data cannot be split"),
        (["--repack"], 5, "leave out --repack: packs are planned over all sequences"),
        (["--balance-attention"], 5, "leave out --balance-attention"),
        (["--eval-iters", "2"], 5, "leave out --eval-iters"),
        (["--data-cache-path", "cache"], 5, "leave out --data-cache-path"),
        (["--data-path", "0.5", "live:a", "0.5", "live:b"], 5, "a blend needs the amount of data in each part"),
        (["--live-window", "-1"], 5, "--live-window -1: expected 0 or more"),
        (["--end-after", "nan"], 5, "--end-after nan: expected 0 or more"),
        (["--consumers", "0"], 5, "--consumers 0: expected 1 or more"),
        (["--num-chunks", "-1"], 5, "--num-chunks -1: expected 0 or more"),
        (["--samples-per-chunk", "-5"], 5, "--samples-per-chunk -5: expected 1 or more"),
        (["--max-sequences-per-pack", "0"], 5, "--max-sequences-per-pack 0: expected 1 or more"),
        (["--data-path", "live:s3://bucket/a"], 5, "s3://bucket/a: live data needs files on a local disk"),
        (["--chat-template", "x.jinja"], 5, "--chat-template is for raw chats, which also need --tokenizer"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    more: list[str], steps: int | None, why: str, script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        script.parse_arguments(options(tmp_path, *more, steps=steps))
    assert leaving.value.code == 2
    assert why in capsys.readouterr().err


def test_a_finished_folder_is_data_as_any_other(script: ModuleType, tmp_path: Path) -> None:
    args = script.parse_arguments(["--data-path", str(tmp_path), "--seq-length", "64", "--split", "98,1,1"])
    assert (args.train_iters, args.split) == (50, "98,1,1")


@pytest.mark.parametrize("kind", ["raw", "packed"])
def test_a_killed_run_goes_on_where_its_checkpoint_ended(kind: str, script: ModuleType, tmp_path: Path) -> None:
    row, more = (chat, RAW) if kind == "raw" else (pack, PACKS)
    folder = finished(tmp_path / "chunks", [row(i) for i in range(23)])
    more = [*more, "--live-window", 2]
    whole = run(script, options(folder, *more))
    assert len(whole.rows) == 24
    saves = ["--save", tmp_path / "checkpoints", "--save-interval", 5]
    assert not run(script, options(folder, *more, *saves, "--consumer", "killed"), kill_at=14).losses
    # Ten rows are committed: the first group of two chunks and most of the next.
    markers = sorted(path.name for path in folder.glob("*.completed"))
    assert markers == ["chunk_00000.jsonl.completed", "chunk_00001.jsonl.completed"]
    resumed = run(script, options(folder, *more, "--consumer", "killed", "--load", tmp_path / "checkpoints"))
    assert_bitwise(resumed.rows, whole.rows[10:])


def test_the_end_of_the_data_is_said_and_saved(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished(tmp_path / "chunks", [pack(i) for i in range(5)])
    assert len(run(script, options(folder, *PACKS, "--save", tmp_path / "checkpoints")).losses) == 3
    assert "the data ended after step 3, before --train-iters 100" in capsys.readouterr().out
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "3"
    assert len(list(folder.glob("*.completed"))) == 2
    dropped = run(script, options(folder, *PACKS, "--live-end", "drop", "--consumer", "other"))
    assert len(dropped.losses) == 2


def test_chunks_are_marked_once_all_consumers_have_committed(script: ModuleType, tmp_path: Path) -> None:
    folder = finished(tmp_path / "chunks", [pack(i) for i in range(4)])
    for consumer, marked in (("one", 0), ("two", 2)):
        saves = ["--save", tmp_path / consumer, "--consumer", consumer, "--consumers", 2]
        run(script, options(folder, *PACKS, *saves))
        assert len(list(folder.glob("*.completed"))) == marked


def test_a_run_without_checkpoints_is_told_that_it_acknowledges_nothing(
    script: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = finished(tmp_path / "chunks", [pack(i) for i in range(4)])
    run(script, options(folder, *PACKS, "--save", tmp_path / "checkpoints", steps=1))
    assert "without --save" not in caplog.text
    run(script, options(folder, *PACKS, "--consumer", "other", steps=1))
    assert f"{folder}: without --save, the run acknowledges nothing" in caplog.text


def test_a_run_from_the_beginning_takes_back_what_is_complete(script: ModuleType, tmp_path: Path) -> None:
    folder = finished(tmp_path / "chunks", [pack(i) for i in range(4)])
    run(script, options(folder, *PACKS, "--save", tmp_path / "checkpoints"))
    acks = str(folder / "_acks")
    assert completed(read_acks(acks), 1, range(2)) == [0, 1]
    run(script, options(folder, *PACKS, steps=1))
    assert completed(read_acks(acks), 1, range(2)) == []


def test_a_checkpoint_of_other_data_is_refused(script: ModuleType, tmp_path: Path) -> None:
    folder = finished(tmp_path / "chunks", [pack(i) for i in range(5)])
    live = script.open_live(script.parse_arguments(options(folder, *PACKS)))
    with live, pytest.raises(FormatError, match="the checkpoint contains no position in live data"):
        live.load_states(None)


def test_nothing_comes(script: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_sft_idx.live")
    with pytest.raises(SFTIndexError, match=r"still no _producer.json .* after 0.5 s \(--max-wait\)"):
        run(script, options(tmp_path / "nothing", "--max-wait", 0.5))
    waits = [line for line in caplog.messages if "waits" in line]
    assert waits == [f"rank 0 waits 0 s for {tmp_path / 'nothing'}: no catalog and no chunks yet"]


def test_a_script_may_have_fewer_options_than_ours(script: ModuleType, tmp_path: Path) -> None:
    folder = finished(tmp_path / "chunks", [pack(i) for i in range(4)])
    args = script.parse_arguments(options(folder, *PACKS))
    for name in ("repack", "balance_attention", "chat_template", "on_bad_row"):
        delattr(args, name)
    args.split = None  # the value in Megatron's arguments if it is not given
    script.check_live_options(args)
    assert not script.is_live(Namespace(data_path=None))
    with script.open_live(args) as live:
        assert live is not None


def test_sequences_are_padded_for_the_ranks_that_share_them(script: ModuleType, tmp_path: Path) -> None:
    folder = finished(tmp_path / "chunks", [chat(i) for i in range(4)])
    args = script.parse_arguments(options(folder, *RAW))
    args.context_parallel_size, args.sequence_parallel = 2, False
    with script.open_live(args, EncodingOptions(str(TOKENIZER))) as live:
        batch = next(live)
    assert (batch["cu_seqlens_padded"] % 4 == 0).all()
    assert (batch["cu_seqlens"] % 4 > 0).any()


def test_a_vocabulary_is_asked_for_where_nobody_names_one(script: ModuleType, tmp_path: Path) -> None:
    folder = finished(tmp_path / "chunks", [pack(i) for i in range(5)])
    with pytest.raises(FormatError, match="--vocab-size"):
        run(script, options(folder))


def test_the_vocabulary_is_known_when_every_shard_is_freed(script: ModuleType, tmp_path: Path) -> None:
    """A finished run is started again by a script that does not know that."""
    described = {"tokenizer": {"vocab_size": 2000}}
    catalog = Catalog(tmp_path)
    catalog.write_producer(ProducerState(Limits(LENGTH, 8), published=2, freed=2, options=described))
    catalog.write_end(2)
    with script.open_live(script.parse_arguments(options(tmp_path))) as live:
        assert script.vocabulary_of(live) == 2048


def test_bad_rows_stop_the_run_or_are_left_out(script: ModuleType, tmp_path: Path) -> None:
    rows = [chat(i) for i in range(6)]
    rows[4] = {"messages": []}
    folder = finished(tmp_path / "chunks", rows)
    more = [*RAW, "--live-window", 0]
    with pytest.raises(ValueError, match=r"chunk_00001.jsonl:2: messages is empty; pass --on-bad-row skip"):
        run(script, options(folder, *more))
    lenient = run(script, options(folder, *more, "--on-bad-row", "skip"))
    assert [bool(row["loss_mask"].any()) for row in lenient.rows] == [True, True, True, True, False, True]


def test_chunks_are_found_by_their_names(script: ModuleType, tmp_path: Path) -> None:
    folder = finished(tmp_path / "chunks", [pack(i) for i in range(4)])
    assert len(run(script, options(folder, *PACKS, "--live-window", 0)).rows) == 4


def test_the_same_command_goes_on_by_itself(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished(tmp_path / "chunks", [pack(i) for i in range(23)])
    whole = run(script, options(folder, *PACKS, "--consumer", "whole"))
    same = options(folder, *PACKS, "--save", tmp_path / "checkpoints", "--save-interval", 5)
    assert not run(script, same, kill_at=14).losses
    assert f"saved {tmp_path}/checkpoints/iter_0000005" in capsys.readouterr().out
    assert_bitwise(run(script, same).rows, whole.rows[10:])
    assert f"resuming from {tmp_path}/checkpoints/iter_0000005, after 5 steps" in capsys.readouterr().out
    # A finished run stays finished.
    assert not run(script, same).rows
    assert "the data ended after step 12" in capsys.readouterr().out


def test_a_fresh_run_behind_another_is_asked_for(script: ModuleType, tmp_path: Path) -> None:
    folder = finished(tmp_path / "chunks", [pack(i) for i in range(4)])
    run(script, options(folder, *PACKS, "--save", tmp_path / "one"))
    other = options(folder, *PACKS, "--save", tmp_path / "two")
    for more in ([], ["--load", str(tmp_path / "one"), "--finetune"]):
        with pytest.raises(
            FormatError, match=r"'train' has acknowledged shards here, but --save .*two contains no checkpoint"
        ):
            run(script, [*other, *more])
    assert len(run(script, [*other, "--fresh"]).rows) == 4
