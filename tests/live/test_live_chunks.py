"""A folder of chunks as a live catalog while a real producer writes it: only complete chunks, and each row once."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import TOKENIZER, write_rows
from disks import NOBODY, in_a_child
from sample_packs import sample_of
from test_formats_jsonl_chunks import produced

from megatron_sft_idx.chat.inputs import JsonPiece
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.template.chat_template import MaskOptions
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.live import Ack, Catalog, Deal, Limits, Stopped, Waiter, write_ack
from megatron_sft_idx.live.chunks import LiveChunks, declaring_end
from megatron_sft_idx.live.live_loader import LiveConfig, LiveLoader
from megatron_sft_idx.tokenize import EncodingOptions, RowEncoder

PRODUCER = Path(__file__).parents[1] / "chunk_producer.py"
PATIENCE = 300.0
WAITER = Waiter("rank 0")


def packed_rows(count: int) -> list[dict[str, Any]]:
    """Return packed rows whose first id is their number."""
    return [
        produced(sample_of([2 + i % 3, 3], lambda p: p % 2, lambda p, i=i: i if p == 0 else 1000 + p))
        for i in range(count)
    ]


def raw_rows(count: int) -> list[dict[str, Any]]:
    turn = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It."}]
    return [{"messages": [*turn, {"role": "user", "content": f"row {i}"}, turn[1]]} for i in range(count)]


@contextmanager
def producer(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a producer in ``tmp_path / "chunks"``."""
    source = write_rows(tmp_path / "rows.jsonl", rows)
    arguments = [sys.executable, str(PRODUCER), str(source), str(tmp_path / "chunks"), json.dumps(options)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def chunks_of(tmp_path: Path, **changes: Any) -> LiveChunks:
    folder = str(tmp_path / "chunks")
    options: dict[str, Any] = {"end_folders": (folder,), "settle_seconds": 1.0, "max_wait": PATIENCE}
    return LiveChunks(folder, Limits(64, 8), **{**options, **changes})


def ids_of(chunks: LiveChunks, number: int) -> list[int]:
    """Return the first ids of the packs of a chunk."""
    opened = chunks.open(number)
    found = []
    for pack in range(opened.num_packs):
        assert opened.load is not None
        loaded, _ = opened.load(np.array([pack]))
        (_, bounds, _, total), (tokens, mask) = loaded.pack_index, loaded.arrays
        assert len(tokens) == len(mask) == bounds[-1] == total
        found.append(int(tokens[0]))
    return found


def read_all(chunks: LiveChunks, first: int = 0) -> list[int]:
    found: list[int] = []
    number = first
    while chunks.wait(number, WAITER):
        found += ids_of(chunks, number)
        number += 1
    return found


@pytest.mark.parametrize("first", [0, 99_998])
def test_every_row_comes_once_while_the_producer_writes(tmp_path: Path, first: int) -> None:
    go = tmp_path / "go"
    options = {"samples_per_chunk": 5, "seconds_per_line": 0.02, "first": first, "stops": {"6": str(go)}}
    with producer(tmp_path, packed_rows(22), **options) as process:
        chunks = chunks_of(tmp_path, num_chunks=first + 5, samples_per_chunk=5, settle_seconds=1.5)
        assert chunks.wait(first, WAITER)
        assert ids_of(chunks, first) == [0, 1, 2, 3, 4]
        # Half a line never counts as complete, however long it stays unchanged.
        with pytest.raises(SFTIndexError, match="ends with an incomplete line"):
            replace(chunks, max_wait=1.5).wait(first + 1, WAITER)
        assert process.poll() is None
        go.touch()
        assert read_all(chunks, first + 1) == list(range(5, 22))
    assert [chunks.count(first + i) for i in range(5)] == [5, 5, 5, 5, 2]
    assert chunks.name(first).endswith(f"(chunk_{first:05d}.jsonl)")


def test_the_end_is_declared_where_the_producer_writes_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_sft_idx")
    with producer(tmp_path, packed_rows(7), samples_per_chunk=3, seconds_per_line=0.02):
        folder = str(tmp_path / "chunks")
        with declaring_end(folder, 1.5, [folder]):
            assert read_all(chunks_of(tmp_path)) == list(range(7))
    assert Catalog(folder).end() == 3
    assert "the end is declared at 3 chunks" in caplog.text
    (tmp_path / "chunks/chunk_00003.jsonl").touch()
    with pytest.raises(
        FormatError, match=r"chunk_00003.jsonl: this chunk appeared after the end was declared at 3 chunks"
    ):
        chunks_of(tmp_path).wait(2, WAITER)


def test_a_producer_killed_in_a_line_leaves_no_end(tmp_path: Path) -> None:
    with producer(tmp_path, packed_rows(7), samples_per_chunk=3, die_in=4) as process:
        assert process.wait(PATIENCE) == -signal.SIGKILL
    folder = str(tmp_path / "chunks")
    with declaring_end(folder, 0.2, [folder]):
        chunks = chunks_of(tmp_path, max_wait=1.5, settle_seconds=0.1)
        assert ids_of(chunks, 0) == [0, 1, 2]
        with pytest.raises(SFTIndexError, match=r"rank 0 waited .* \(--max-wait\): .* ends with an incomplete line"):
            chunks.wait(1, WAITER)
    assert Catalog(folder).end() is None


def test_the_end_is_declared_behind_a_last_chunk_that_was_freed(tmp_path: Path) -> None:
    """Its producer deletes all chunks marked as completed, including the newest one."""
    with producer(tmp_path, packed_rows(3), samples_per_chunk=3) as process:
        assert process.wait(PATIENCE) == 0
    folder = str(tmp_path / "chunks")
    with declaring_end(folder, 2.0, [folder]):
        chunks = chunks_of(tmp_path, max_wait=20.0, settle_seconds=0.5)
        assert chunks.wait(0, WAITER)
        time.sleep(0.8)
        Path(chunks.path_of(0)).unlink()
        assert not chunks.wait(1, WAITER)
    assert Catalog(folder).end() == 1


def test_a_wrong_number_of_samples_is_loud(tmp_path: Path) -> None:
    with producer(tmp_path, packed_rows(7), samples_per_chunk=3) as process:
        assert process.wait(PATIENCE) == 0
    for wrong, chunk in ((4, 0), (2, 0)):
        with pytest.raises(FormatError, match=rf"chunk_0000{chunk}.jsonl: it has 3 lines, expected {wrong}"):
            read_all(chunks_of(tmp_path, num_chunks=3, samples_per_chunk=wrong))
    assert read_all(chunks_of(tmp_path, num_chunks=3, samples_per_chunk=3)) == list(range(7))


def test_a_short_chunk_that_was_not_the_last_is_found_when_the_next_comes(tmp_path: Path) -> None:
    with producer(tmp_path, packed_rows(2), samples_per_chunk=2) as process:
        assert process.wait(PATIENCE) == 0
    chunks = chunks_of(tmp_path, samples_per_chunk=3, settle_seconds=0.1)
    assert chunks.wait(0, WAITER)
    assert ids_of(chunks, 0) == [0, 1]
    (tmp_path / "chunks/chunk_00001.jsonl").touch()
    with pytest.raises(FormatError, match=r"chunk_00000.jsonl: it has 2 lines, expected 3"):
        chunks.wait(1, WAITER)


def test_a_wait_speaks_once_and_can_be_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_sft_idx")
    asked: list[int] = []
    waiter = Waiter("rank 3", lambda seconds: len(asked) > 3 or bool(asked.append(0)))
    with pytest.raises(Stopped):
        chunks_of(tmp_path).wait(3, waiter)
    assert [record.message for record in caplog.records] == [
        "rank 3 waits 0 s for chunk 3 (chunk_00003.jsonl); chunk_00003.jsonl does not exist, there are no chunks"
    ]


def test_raw_and_packed_lines_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    raw = EncodingOptions(str(TOKENIZER))
    with producer(tmp_path, packed_rows(2), samples_per_chunk=2) as process:
        assert process.wait(PATIENCE) == 0
    with pytest.raises(FormatError, match="the chunk is already packed; leave --tokenizer out"):
        read_all(chunks_of(tmp_path, encoding=raw, num_chunks=1))
    with producer(tmp_path, raw_rows(2), samples_per_chunk=2) as process:
        assert process.wait(PATIENCE) == 0
    with pytest.raises(SFTIndexError, match="--tokenizer for live chunks"):
        read_all(chunks_of(tmp_path, num_chunks=1))
    chunks = chunks_of(tmp_path, encoding=raw, num_chunks=1)
    assert chunks.limits(WAITER)[0].capacity == 64
    assert len(read_all(chunks)) == 2


@pytest.mark.parametrize("kind", ["preference", "kto"])
def test_answers_that_a_column_would_judge_are_refused(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(
        FormatError, match=f"--row-kind {kind} needs a column to mark bad answers, but chunks have no columns"
    ):
        chunks_of(tmp_path, encoding=EncodingOptions(str(TOKENIZER), rows=RowOptions(kind=kind)))


def test_each_turn_of_a_chat_is_a_sequence_of_its_pack(tmp_path: Path) -> None:
    said = [{"role": "assistant", "content": f"a{i}", "reasoning_content": f"why {i}"} for i in range(2)]
    turns = [turn for answer in said for turn in ({"role": "user", "content": "u"}, answer)]
    folder = tmp_path / "chunks"
    folder.mkdir()
    raw = write_rows(folder / "chunk_00000.jsonl", [{"messages": turns}]).read_bytes()
    encoding = EncodingOptions(str(TOKENIZER), masks=MaskOptions(earlier_reasoning="split"))
    encoded = RowEncoder(encoding).encode(JsonPiece("x", 1, 0, raw, np.array([len(raw)]), is_array=False))
    assert len(encoded.lengths) == 2
    chunks = LiveChunks(str(folder), Limits(128, 2), encoding, num_chunks=1)
    with LiveLoader(chunks, LiveConfig(rank=0, size=1, seq_length=128)) as loader:
        (batch,) = loader
    first, both = np.cumsum(encoded.lengths).tolist()
    assert batch["cu_seqlens"].tolist() == [[0, first, both, 128]]
    assert batch["tokens"][0, :both].tolist() == encoded.input_ids.tolist()
    expected = [*encoded.loss_mask[1:first], 0, *encoded.loss_mask[first + 1 :], 0]
    assert batch["loss_mask"][0, :both].tolist() == expected


def test_numbers_above_99999_go_through_the_loader(tmp_path: Path) -> None:
    first = 99_997
    with producer(tmp_path, packed_rows(15), samples_per_chunk=3, first=first) as process:
        assert process.wait(PATIENCE) == 0
    folder = tmp_path / "chunks"
    Catalog(folder).write_end(first + 5)
    found: dict[int, list[int]] = {}
    for rank in (0, 1):
        live = chunks_of(tmp_path, acks=str(folder / "_acks"))
        with LiveLoader(live, LiveConfig(rank=rank, size=2, seq_length=64, shuffle=False)) as loader:
            state = loader.state_dict()
            # The state of a run that began with chunk 0.
            loader.load_state_dict(state | {"deal": state["deal"] | {"frontier": first}})
            found[rank] = [int(batch["tokens"][0, 0]) for batch in loader if batch["loss_mask"].any()]
            loader.commit(loader.state_dict())
    assert found == {0: [0, 1, 2, 6, 7, 8, 12, 13, 14], 1: [3, 4, 5, 9, 10, 11]}
    assert len(list(folder.glob("chunk_*.completed"))) == 5


# ---- markers ----


def acknowledge(folder: str, rank: int, items: int, size: int = 2) -> None:
    write_ack(folder, Ack("default", 0, Deal(size), rank, items, packs_done=items))


def test_chunks_are_marked_once_every_owner_has_committed(tmp_path: Path) -> None:
    with producer(tmp_path, packed_rows(5), samples_per_chunk=1) as process:
        assert process.wait(PATIENCE) == 0
    acks = str(tmp_path / "acks")
    live = chunks_of(tmp_path, acks=acks)

    def marked() -> list[str]:
        live.committed()
        return sorted(path.name for path in (tmp_path / "chunks").glob("*.completed"))

    assert marked() == []
    acknowledge(acks, 1, 1)
    assert marked() == ["chunk_00001.jsonl.completed"]
    acknowledge(acks, 0, 2)
    expected = [f"chunk_0000{i}.jsonl.completed" for i in (0, 1, 2)]
    assert marked() == expected
    # Deleted chunks are not marked again.
    for name in expected[:2]:
        (tmp_path / "chunks" / name).unlink()
        (tmp_path / "chunks" / name).with_suffix("").unlink()
    assert marked() == expected[2:]
    assert live.count(0) is None
    assert live.wait(3, WAITER)


def test_a_folder_that_may_not_be_written_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with producer(folder, packed_rows(2), samples_per_chunk=1) as process:
            assert process.wait(PATIENCE) == 0
        acknowledge(str(folder / "acks"), 0, 2, size=1)
        folder.chmod(0o755)
        (folder / "chunks").chmod(0o555)

        def mark() -> None:
            live = chunks_of(folder, acks=str(folder / "acks"))
            for _ in range(3):
                live.committed()
            assert [record.message for record in caplog.records if "cannot be marked" in record.message]
            assert len(caplog.records) == 1

        in_a_child(mark, user=NOBODY if os.geteuid() == 0 else None)
        (folder / "chunks").chmod(0o755)
