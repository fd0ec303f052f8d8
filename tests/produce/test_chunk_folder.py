"""Chunks that are being written: when they are complete, and errors if they never will be."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from chats import TOKENIZER
from hypothesis import given
from hypothesis import strategies as st
from sample_packs import demo_samples
from test_formats_jsonl_chunks import produced, write_chunk

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats import jsonl_chunks
from megatron_sft_idx.formats.jsonl_chunks import ChunkFile, ends_with_whole_line, line_bounds
from megatron_sft_idx.live import Limits
from megatron_sft_idx.live.chunks import LiveChunks
from megatron_sft_idx.tokenize import EncodingOptions, RowEncoder

SETTLE = 0.2
PATIENCE = 300.0


def folder_of(path: Path) -> LiveChunks:
    return LiveChunks(str(path), Limits(64, 8), settle_seconds=SETTLE)


def put(folder: Path, number: int, text: str = '{"a": 1}\n') -> Path:
    path = folder / f"chunk_{number:05d}.jsonl"
    path.write_text(text)
    return path


def wait_until_whole(folder: LiveChunks, number: int) -> float:
    begin = time.monotonic()
    while not folder.is_whole(number, None):
        assert time.monotonic() - begin < PATIENCE, folder.describe(number)
        time.sleep(0.01)
    return time.monotonic() - begin


# ---- complete chunks ----


@given(st.lists(st.sampled_from([b'{"a":1}', b"{", b"", b"  ", b"\n"])).map(b"".join))
def test_ends_whole_says_what_finding_the_lines_says(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        try:
            line_bounds(file.name)
        except FormatError:
            assert not ends_with_whole_line(file.name)
        else:
            assert ends_with_whole_line(file.name)


def test_a_last_line_may_be_many_blocks_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_chunks, "_BLOCK_NBYTES", 16)
    for last, is_whole in (("[" * 50_000, False), ("[" + "1, " * 50_000 + "1]", True)):
        assert ends_with_whole_line(str(put(tmp_path, 0, "{}\n" + last))) == is_whole


def test_a_chunk_with_a_successor_is_whole_at_once(tmp_path: Path) -> None:
    put(tmp_path, 0)
    folder = folder_of(tmp_path)
    assert not folder.is_whole(0, None)
    put(tmp_path, 1, "")
    assert folder.is_whole(0, None)
    assert not folder.is_whole(2, None)
    # The next chunk may be consumed and freed before this rank reaches its own.
    (tmp_path / "chunk_00001.jsonl").unlink()
    put(tmp_path, 7)
    assert folder.is_whole(0, None)


def test_a_declared_end_makes_the_last_chunk_whole(tmp_path: Path) -> None:
    put(tmp_path, 0, '{"a": 1}\n{"a": 2}')
    folder = folder_of(tmp_path)
    assert not folder.is_whole(0, None)
    assert folder.is_whole(0, 1)
    put(tmp_path, 100_000, "")
    assert folder.is_whole(100_000, 100_001)


def test_the_newest_chunk_settles_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_sft_idx")
    folder = folder_of(tmp_path)
    put(tmp_path, 3)
    assert wait_until_whole(folder, 3) >= SETTLE
    assert folder.is_whole(3, None)
    assert len(caplog.messages) == 1
    assert "chunk_00003.jsonl is considered complete" in caplog.messages[0]


@pytest.mark.parametrize("content", ["", '{"a": 1}\n{"a"'])
def test_what_has_not_ended_a_line_never_settles(tmp_path: Path, content: str) -> None:
    folder = folder_of(tmp_path)
    path = put(tmp_path, 0, content)
    begin = time.monotonic()
    while time.monotonic() - begin < 2 * SETTLE:
        assert not folder.is_whole(0, None)
        time.sleep(0.02)
    assert "chunk_00000.jsonl" in folder.describe(0)
    path.write_text('{"a": 1}\n')
    wait_until_whole(folder, 0)


def test_a_chunk_that_grows_begins_to_settle_anew(tmp_path: Path) -> None:
    path, folder = put(tmp_path, 0), folder_of(tmp_path)
    begin = time.monotonic()
    while time.monotonic() - begin < 3 * SETTLE:
        with path.open("a") as file:
            file.write('{"a": 2}\n')
        # It changed since the last look.
        assert not folder.is_whole(0, None)
        time.sleep(0.01)
    wait_until_whole(folder, 0)


def test_a_producer_that_pauses_for_longer_is_found_out(tmp_path: Path) -> None:
    path, folder = put(tmp_path, 0), folder_of(tmp_path)
    wait_until_whole(folder, 0)
    folder.require_unchanged()
    with path.open("a") as file:
        file.write('{"a": 2}\n')
    put(tmp_path, 1)
    for look in (folder.require_unchanged, lambda: folder.count(0)):  # there are no waits after the last chunk
        with pytest.raises(FormatError, match=r"chunk_00000.jsonl: it has 18 bytes, but had 9 .* raise --settle"):
            look()


def test_a_settled_chunk_is_watched_until_it_has_a_successor(tmp_path: Path) -> None:
    path, folder = put(tmp_path, 0), folder_of(tmp_path)
    wait_until_whole(folder, 0)
    put(tmp_path, 1)
    folder.require_unchanged()
    path.unlink()
    folder.require_unchanged()


def test_half_a_line_with_a_successor_is_torn(tmp_path: Path) -> None:
    put(tmp_path, 0, '{"a": 1}\n{"a')
    folder = folder_of(tmp_path)
    assert not folder.is_whole(0, None)
    with pytest.raises(
        FormatError, match=r"chunk_00000.jsonl: the last line is incomplete, although the end is declared; its"
    ):
        folder.is_whole(0, 1)
    put(tmp_path, 1)
    with pytest.raises(
        FormatError, match=r"chunk_00000.jsonl: the last line is incomplete, although a later chunk exists; its"
    ):
        folder.is_whole(0, None)


def test_a_chunk_that_was_removed_is_not_waited_for(tmp_path: Path) -> None:
    put(tmp_path, 5)
    with pytest.raises(FormatError, match=r"chunk_00004.jsonl: the chunk is missing, .* it was deleted: put it back"):
        folder_of(tmp_path).is_whole(4, None)


def test_a_name_that_could_be_there_twice(tmp_path: Path) -> None:
    put(tmp_path, 0)
    (tmp_path / "chunk_3.jsonl").touch()
    with pytest.raises(FormatError, match=r"chunk_3.jsonl: expected the name chunk_00003.jsonl; rename it"):
        folder_of(tmp_path).is_whole(3, None)


def test_a_chunk_that_was_not_whole_after_all_is_an_error(tmp_path: Path) -> None:
    path = put(tmp_path, 0)
    chunk = ChunkFile(str(path))
    assert chunk.line(0) == b'{"a": 1}\n'
    with path.open("a") as file:
        file.write("{")
    with pytest.raises(FormatError, match=r"it has 10 bytes, but had 9 when it was considered complete"):
        chunk.line(0)


# ---- rows ----


def test_pre_packed_lines_are_packs(tmp_path: Path) -> None:
    packs = demo_samples(6)
    chunk = ChunkFile(str(write_chunk(tmp_path / "chunk_00000.jsonl", [produced(pack) for pack in packs])))
    rows = LiveChunks(".", Limits(64, 8))
    run = rows.packs(chunk, [4, 0])
    assert run.tokens.tolist() == [*packs[4].tokens, *packs[0].tokens]
    assert run.loss_mask.tolist() == [*packs[4].label_mask, *packs[0].label_mask]
    assert run.pack_sequences.tolist() == [len(packs[4].starts), len(packs[0].starts)]


def chat(number: int, answer: str = "yes") -> dict[str, object]:
    return {"messages": [{"role": "user", "content": f"chat {number}"}, {"role": "assistant", "content": answer}]}


def test_raw_chats_are_tokenised_when_asked_for(tmp_path: Path) -> None:
    path = write_chunk(tmp_path / "chunk_00000.jsonl", [chat(i) for i in range(3)])
    chunk = ChunkFile(str(path))
    rows = LiveChunks(".", Limits(64, 1), EncodingOptions(str(TOKENIZER)))
    assert "encoder" not in vars(rows)
    tokenizer = RowEncoder(EncodingOptions(str(TOKENIZER))).tokenizer
    for index in (2, 0):
        run = rows.packs(chunk, [index])
        text = tokenizer.decode(run.tokens.tolist())
        trained = tokenizer.decode(run.tokens[1:][run.loss_mask[:-1] > 0].tolist())
        assert f"chat {index}" in text
        assert trained.startswith("yes")
        assert "chat" not in trained


def test_bad_lines_are_errors_with_file_and_line(tmp_path: Path) -> None:
    rows = [chat(0), {"messages": []}, chat(2, "far too long " * 60), chat(3)]
    path = tmp_path / "chunk_00000.jsonl"
    # A blank line is not a pack, but it counts in line numbers, as in an editor.
    path.write_text("\n".join([json.dumps(rows[0]), "", *map(json.dumps, rows[1:])]) + "\n")
    chunk = ChunkFile(str(path))
    assert len(chunk) == 4
    limits, encoding = Limits(64, 1), EncodingOptions(str(TOKENIZER))
    strict = LiveChunks(".", limits, encoding)
    with pytest.raises(SequenceError, match=r"chunk_00000.jsonl:3: messages is empty; pass --on-bad-row skip"):
        strict.packs(chunk, [0, 1])
    with pytest.raises(
        SequenceError, match=r"chunk_00000.jsonl:4: \d+ tokens, but a pack has room for 64; raise --seq-length"
    ):
        strict.packs(chunk, [2])
    lenient = LiveChunks(".", limits, encoding, on_bad_row="skip")
    run = lenient.packs(chunk, [0, 1, 2, 3])
    assert run.pack_lengths.tolist()[1:3] == [1, 1]
    first = int(run.pack_lengths[0])
    assert run.tokens[first : first + 2].tolist() == [lenient.pad_id] * 2
    assert np.all(run.loss_mask[first : first + 2] == 0)
    assert lenient.skipped == 2


def test_packs_that_cannot_fit_are_refused(tmp_path: Path) -> None:
    packs = demo_samples(4)
    chunk = ChunkFile(str(write_chunk(tmp_path / "chunk_00000.jsonl", [produced(pack) for pack in packs])))
    most, positions = len(packs[3].starts), packs[3].padded(8)
    for limits, vocab_size, message in (
        (Limits(positions, most, 8), None, None),
        (Limits(positions - 1, most, 8), None, "with sequences padded to multiples of 8, but a pack has room for"),
        (Limits(positions, most - 1, 8), None, "raise --max-sequences-per-pack"),
        (Limits(positions, most, 8), max(packs[3].tokens), "raise --vocab-size"),
    ):
        rows = LiveChunks(".", limits, vocab_size=vocab_size)
        if message is None:
            rows.packs(chunk, [3])
        else:
            with pytest.raises(SequenceError, match=message):
                rows.packs(chunk, [3])


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    path = put(tmp_path, 0)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        ChunkFile(str(path))
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_chunks_in_an_object_store_are_refused():
    with pytest.raises(FormatError, match="on a file system that the producer"):
        LiveChunks("s3://bucket/chunks", Limits(64, 8))
