"""Going on with an interrupted build from its last mark: the same bytes as if nothing had happened."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kills import copy_remains, killed_at
from packs import WHOLE, Sample, demo_samples, five_files, folder_of

from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout.journal import MASK, PACK, read_blocks, read_head
from megatron_sft_idx.shard import InterruptedBuild, Shard, ShardWriter, find_remains

PACKS = demo_samples(40)
_EVERY = 4  # packs between two marks


def go_on(writer: ShardWriter, done: int, *, weights_from: int | None, packs: Sequence[Sample] = PACKS) -> None:
    """Add the packs from ``done`` on, with a mark every few of them; a token mask on every first token."""
    if not done:
        writer.mark({"done": 0})
    for i in range(done, len(packs)):
        if i == weights_from:
            writer.promote_mask_dtype()
        mask = list(packs[i].mask)
        mask[0] = 1
        writer.add_pack(packs[i].tokens, mask, packs[i].starts, mask_alignment="token")
        if i % 3 == 2:
            writer.flush()
        if i % _EVERY == _EVERY - 1:
            writer.mark({"done": i + 1})


def build(prefix: Path, *, weights_from: int | None = None, overwrite: bool = False) -> None:
    with ShardWriter(prefix, overwrite=overwrite, metadata={"a": 1}) as writer:
        go_on(writer, 0, weights_from=weights_from)
        writer.metadata["dropped"] = writer.dropped_first_tokens


def resume(prefix: Path, *, weights_from: int | None = None) -> int:
    """Go on where an interrupted build stopped; how many packs were kept, -1 where it began anew."""
    try:
        with InterruptedBuild(prefix) as interrupted:
            if not interrupted.verify():
                raise FormatError("no mark")
            *_, state = interrupted.states()
            writer = interrupted.resume()
    except FormatError as error:
        if ".journal" in str(error).split(":")[0]:  # which names no file: the remedy that the error gives
            for path in (prefix.parent / "x.journal", *prefix.parent.glob("x.*.tmp*")):
                path.unlink()
        build(prefix, weights_from=weights_from, overwrite=True)
        return -1
    with writer:
        assert writer.num_packs == state["done"]
        go_on(writer, state["done"], weights_from=weights_from)
        writer.metadata["dropped"] = writer.dropped_first_tokens
    return int(state["done"])


@pytest.mark.parametrize("weights_from", [None, pytest.param(17, marks=pytest.mark.slow)])
def test_killed_at_any_step_and_gone_on_with_it_ends_the_same(tmp_path: Path, weights_from: int | None) -> None:
    build(tmp_path / "calm" / "x", weights_from=weights_from)
    expected = five_files(tmp_path / "calm" / "x")
    for step in range(0, 100, 2):
        prefix = tmp_path / str(step) / "x"
        if not killed_at(step, lambda prefix=prefix: build(prefix, weights_from=weights_from)):  # type: ignore[misc]
            break
        if not (prefix.parent / "x.journal").exists():
            build(prefix, weights_from=weights_from)
            continue
        if prefix.parent.joinpath("x.journal").stat().st_size and find_remains(prefix).done:  # type: ignore[union-attr]
            continue
        # Killed again on the way.
        for again in range(step % 11, 60, 11):
            copy = tmp_path / f"{step}.{again}" / "x"
            copy_remains(prefix.parent, copy.parent)
            killed = killed_at(again, lambda copy=copy: resume(copy, weights_from=weights_from))  # type: ignore[misc]
            left = find_remains(copy) if killed and copy.with_name("x.journal").stat().st_size else None
            if killed and not (left and left.done):
                resume(copy, weights_from=weights_from)
            if not (left and left.done):
                assert five_files(copy) == expected
                assert folder_of(copy.parent) == WHOLE
            shutil.rmtree(copy.parent)
            if not killed:
                break
    assert step > 25


@pytest.mark.parametrize("suffix", [".bin.tmp", ".loss.bin.tmp", ".seq.bin.tmp", ".journal"])
@pytest.mark.parametrize("weights_from", [None, 17])
def test_a_lost_tail_costs_the_pieces_it_was_of(tmp_path: Path, suffix: str, weights_from: int | None) -> None:
    build(tmp_path / "calm" / "x", weights_from=weights_from)
    with ShardWriter(tmp_path / "left" / "x", metadata={"a": 1}) as writer:
        go_on(writer, 0, weights_from=weights_from)
        writer.suspend()
    size = (tmp_path / "left" / f"x{suffix}").stat().st_size
    kept = []
    for i, cut in enumerate(range(0, size + 1, max(size // 9, 1))):
        for zeros in (False, True):
            folder = tmp_path / f"{i}{zeros}"
            copy_remains(tmp_path / "left", folder)
            os.truncate(folder / f"x{suffix}", size - cut)
            if zeros:
                os.truncate(folder / f"x{suffix}", size)
            kept.append(resume(folder / "x", weights_from=weights_from))
            assert five_files(folder / "x") == five_files(tmp_path / "calm" / "x")
            assert folder_of(folder) == WHOLE
    assert kept[0] == len(PACKS)
    assert {-1, 0} & set(kept)
    assert len(set(kept)) > 5


def test_a_mask_widened_after_the_last_mark_stays_wide(tmp_path: Path) -> None:
    build(tmp_path / "calm" / "x", weights_from=17)
    with ShardWriter(tmp_path / "x", metadata={"a": 1}) as writer:
        go_on(writer, 0, weights_from=None, packs=PACKS[:18])
        writer.promote_mask_dtype()
        writer.suspend()
    with InterruptedBuild(tmp_path / "x") as interrupted:
        interrupted.verify()
        writer = interrupted.resume()
        assert (writer.num_packs, writer.mask_dtype) == (16, np.float32)
        writer.suspend()
    with open(tmp_path / "x.journal", "rb") as stream:
        read_head(stream, "x.journal")
        blocks = list(read_blocks(stream))
    assert sum(len(block.records) for block in blocks if block.kind == PACK) == 16
    assert blocks[-1].kind == MASK
    assert resume(tmp_path / "x", weights_from=17) == 16
    assert five_files(tmp_path / "x") == five_files(tmp_path / "calm" / "x")


def test_looking_changes_nothing_and_keeps_others_out(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x") as writer:
        go_on(writer, 0, weights_from=None, packs=PACKS[:18])
        writer.suspend()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with InterruptedBuild(tmp_path / "x") as interrupted:
        interrupted.verify()
        assert [state["done"] for state in interrupted.states()] == [0, 4, 8, 12, 16]
        for act in (find_remains, InterruptedBuild, lambda x: ShardWriter(x, overwrite=True)):
            with pytest.raises(FormatError, match="another writer"):
                act(tmp_path / "x")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), RuntimeError("bad row")])
@pytest.mark.parametrize("marked", [False, True])
def test_interrupts_keep_what_is_marked_and_errors_give_the_space_back(
    tmp_path: Path, error: BaseException, marked: bool
) -> None:
    with pytest.raises(type(error)), ShardWriter(tmp_path / "x") as writer:  # noqa: PT012
        writer.add_pack([1, 2], [1, 0], [0])
        if marked:
            writer.mark({"done": 1})
        raise error
    assert bool(folder_of(tmp_path)) == (marked and not isinstance(error, Exception))


def test_an_interrupt_within_a_write_keeps_what_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def interrupted(fd: int, data: Any) -> int:
        if len(data) == 4 * len(PACKS[0].tokens):
            raise KeyboardInterrupt
        return write(fd, data)

    with pytest.raises(KeyboardInterrupt), ShardWriter(tmp_path / "x", metadata={"a": 1}) as writer:  # noqa: PT012
        writer.mark({"done": 0})
        monkeypatch.setattr(os, "write", interrupted)
        writer.add_pack(PACKS[0].tokens, PACKS[0].label_mask, PACKS[0].starts)
        writer.flush()
    monkeypatch.undo()
    assert resume(tmp_path / "x") == 0
    assert len(Shard(tmp_path / "x")) == len(PACKS)


def test_a_marked_writer_that_is_left_behind_can_be_gone_on_with(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", metadata={"a": 1})
    go_on(writer, 0, weights_from=None, packs=PACKS[:9])
    del writer
    gc.collect()
    assert resume(tmp_path / "x") == 8


def test_nothing_to_go_on_from_is_said(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no journal"):
        InterruptedBuild(tmp_path / "x")
    with ShardWriter(tmp_path / "x") as writer:
        writer.add_pack([1, 2], [1, 0], [0])
        writer.flush()
        writer.suspend()
    with InterruptedBuild(tmp_path / "x") as interrupted:
        assert interrupted.verify() == 0
        assert list(interrupted.states()) == []
    (tmp_path / "x.journal").write_bytes(b"SFTJ")
    with pytest.raises(CorruptShardError, match="J1"):
        InterruptedBuild(tmp_path / "x")
