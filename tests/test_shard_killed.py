"""The journal of a build, and what is left of one that was killed, failed or forked."""

from __future__ import annotations

import io
import os
import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kills import killed_at
from packs import WHOLE, assert_holds, demo_samples, folder_of, opens, write_samples

from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import SUFFIXES, ShardPaths
from megatron_sft_idx.shard import Shard, ShardWriter, find_remains, publication, recover
from megatron_sft_idx.shard import writer as writer_module
from megatron_sft_idx.shard.journal import DONE, read_blocks, read_head

ROOT = Path(__file__).parent.parent


# ---- the journal ----


def test_the_journal_knows_what_is_written_while_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "STAGE_TOKENS", 16)
    packs = demo_samples(40)
    journal = tmp_path / "x.journal"
    seen = 0
    with ShardWriter(tmp_path / "x", capacity=99, pad_id=3, metadata={"a": 1}, durable=False) as writer:
        for added, pack in enumerate(packs):
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
            with open(journal, "rb") as stream:
                options = read_head(stream, str(journal))
                records = [record for block in read_blocks(stream) for record in block.records.tolist()]
                assert stream.read() == b""
            assert set(options.pop("files")) == {suffix + ".tmp" for suffix in SUFFIXES}
            assert options == {
                "work": "build",
                "overwrite": False,
                "token_dtype": 4,
                "mask_dtype": 1,
                "capacity": 99,
                "sequence_multiple": 1,
                "pad_id": 3,
                "metadata": {"a": 1},
            }
            assert records == [[len(p.tokens), len(p.starts)] for p in packs[: len(records)]]
            assert added - 8 < len(records) <= added
            tokens = sum(length for length, _ in records)
            assert (tmp_path / "x.bin.tmp").stat().st_size == 4 * tokens
            assert (tmp_path / "x.loss.bin.tmp").stat().st_size == tokens
            seen = len(records)
        assert seen > 20


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 10**6), flip=st.booleans())
def test_a_torn_journal_gives_a_prefix_of_its_blocks(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: bool
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    with ShardWriter(folder / "x", durable=False) as writer:
        for pack in demo_samples(9):
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
            writer.flush()
        raw = bytearray((folder / "x.journal").read_bytes())
        writer.abandon()
    with_whole = folder / "whole"
    with_whole.write_bytes(raw)
    cut %= len(raw)
    if flip:
        raw[cut] ^= 1
    torn = folder / "torn"
    torn.write_bytes(raw if flip else raw[:cut])
    with open(with_whole, "rb") as stream:
        read_head(stream, "whole")
        body = stream.tell()
        expected = [block.records.tolist() for block in read_blocks(stream)]
    with open(torn, "rb") as stream:
        if cut < body:
            with pytest.raises(CorruptShardError, match="J1"):
                read_head(stream, "torn")
            return
        read_head(stream, "torn")
        found = [block.records.tolist() for block in read_blocks(stream)]
    assert len(found) < len(expected)
    assert found == expected[: len(found)]


@pytest.mark.parametrize("magic", [b"SFTJRNL1", b"SFTJRNL2"])
def test_the_journal_of_an_earlier_version_is_refused_with_the_remedy(tmp_path: Path, magic: bytes) -> None:
    """It may say what this version does not know, such as that masks were widened."""
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack([1, 2], [1, 0], [0])
        writer.flush()
        writer.suspend()
    raw = (tmp_path / "x.journal").read_bytes()
    (tmp_path / "x.journal").write_bytes(magic + raw[8:])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for act in (find_remains, recover):
        with pytest.raises(FormatError, match=r"earlier version .* recover it .* remove it with .*x\.\*\.tmp\* and"):
            act(tmp_path / "x")
    with pytest.raises(FormatError, match="expected a temporary file that a journal names"):
        ShardWriter(tmp_path / "x", overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("suffix", [".bin", ".loss.bin", ".idx", ".seq.idx", ".seq.bin"])
def test_a_temporary_file_that_is_gone_is_made_anew_where_packs_do_not_need_it(tmp_path: Path, suffix: str) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack([1, 2], [1, 0], [0])
        writer.flush()
        writer.suspend()
    (tmp_path / f"x{suffix}.tmp").unlink()
    if suffix.endswith(".idx"):
        assert recover(tmp_path / "x").num_packs == 1
        assert verify_shard(tmp_path / "x", full=True).ok
        assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob("*.journal"))
    else:
        with pytest.raises(FormatError, match="no complete pack had been written yet"):
            recover(tmp_path / "x")


@pytest.mark.parametrize("block", [b"", b"[1]", b"{", b"\xff\xfe{\x00", b"[" * 100_000])
def test_a_journal_whose_head_is_no_object_says_so(block: bytes) -> None:
    head = struct.pack("<8sII", b"SFTJRNL3", len(block), 0) + block
    head = head.ljust(-(-len(head) // 8) * 8, b"\0")
    raw = head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
    with pytest.raises(CorruptShardError, match="J1"):
        read_head(io.BytesIO(raw), "x.journal")


# ---- killed ----


def run(program: str, *arguments: str, expected: int = 0) -> str:
    """A fresh process; returns what it wrote to stderr."""
    source = "import sys; sys.path[:0] = ['.', 'tests']\n" + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == expected, done.stderr
    return done.stderr


def test_a_build_killed_halfway_leaves_a_journal_and_no_shard(tmp_path: Path) -> None:
    run(
        """
        import os, signal
        from packs import demo_samples
        from megatron_sft_idx.shard import ShardWriter
        writer = ShardWriter(sys.argv[1])
        for pack in demo_samples(30):
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
            if writer.num_packs == 20:
                writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        str(tmp_path / "x"),
        expected=-signal.SIGKILL,
    )
    names = [*(f"x{suffix}.tmp" for suffix in SUFFIXES), "x.journal"]
    assert folder_of(tmp_path) == sorted(names)
    with pytest.raises(ShardNotFoundError, match="interrupted here"):
        Shard(tmp_path / "x")
    with open(tmp_path / "x.journal", "rb") as stream:
        read_head(stream, "x.journal")
        records = [record for block in read_blocks(stream) for record in block.records.tolist()]
    packs = demo_samples(20)
    assert records == [[len(pack.tokens), len(pack.starts)] for pack in packs]
    ids = [token for pack in packs for token in pack.tokens]
    assert np.fromfile(tmp_path / "x.bin.tmp", "<i4").tolist() == ids
    with pytest.raises(FormatError, match="interrupted; pass overwrite"):
        ShardWriter(tmp_path / "x")
    write_samples(tmp_path / "x", packs, overwrite=True)
    assert folder_of(tmp_path) == WHOLE
    assert_holds(Shard(tmp_path / "x"), packs)


@pytest.mark.parametrize("replaces", [pytest.param(False, marks=pytest.mark.slow), True])
def test_killed_at_any_step_of_publication_a_whole_shard_opens_or_none(tmp_path: Path, replaces: bool) -> None:
    old, new = demo_samples(3), demo_samples(5)
    states = []
    for step in range(100):
        folder = tmp_path / str(step)
        if replaces:
            write_samples(folder / "x", old)
        if not killed_at(step, lambda x=folder / "x": write_samples(x, new, overwrite=True, durable=True)):  # type: ignore[misc]
            assert folder_of(folder) == WHOLE
            break
        if opens(folder / "x"):
            shard = Shard(folder / "x")
            states.append("old" if len(shard) == len(old) else "new")
            assert_holds(shard, old if len(shard) == len(old) else new)
        else:
            states.append("none")
            assert (folder / "x.journal").exists()
            if not (folder / "x.journal").stat().st_size:
                assert not replaces  # begun, no more
                continue
            with open(folder / "x.journal", "rb") as stream:
                read_head(stream, "x.journal")
                kinds = [block.kind for block in read_blocks(stream)]
            # Once a file has its final name, or the old shard is gone, the journal says that all are complete.
            if replaces or (folder / "x.bin").exists():
                assert kinds[-1] == DONE
            for suffix in SUFFIXES:
                assert (folder / f"x{suffix}").exists() or (folder / f"x{suffix}.tmp").exists()
    # Five files synced once, the journal twice, the folder four times, five renames, the journal unlinked. Where a
    # shard is replaced, its .seq.idx is unlinked, the folder synced once more, and four of the renames are two steps.
    # A disk that cannot rename without replacing needs more.
    assert len(states) >= (17 + 6 if replaces else 17)
    order = ["old", "none", "new"] if replaces else ["none", "new"]
    assert states == sorted(states, key=order.index)
    assert set(states) == set(order)


def fail_at(suffix: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file of this suffix fail to get its name, behind those that get theirs before it."""
    put = publication.move_into_place

    def failing(source: str, target: str, found: Any) -> None:
        if target.endswith(suffix):
            raise error
        put(source, target, found)

    monkeypatch.setattr(publication, "move_into_place", failing)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("replaces", [False, True])
def test_publication_that_fails_halfway_keeps_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool, error: BaseException
) -> None:
    if replaces:
        write_samples(tmp_path / "x", demo_samples(3))
    fail_at(".seq.bin", error, monkeypatch)
    with pytest.raises(type(error)):
        write_samples(tmp_path / "x", demo_samples(5), overwrite=replaces)
    assert not opens(tmp_path / "x")
    assert (tmp_path / "x.journal").exists()
    for suffix in (".seq.bin", ".idx", ".seq.idx"):
        assert (tmp_path / f"x{suffix}.tmp").exists()


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("suffix", [".loss.bin", ".seq.bin", ".idx", ".seq.idx"])
def test_of_a_shard_that_lost_a_file_among_its_renames_no_more_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, replaces: bool
) -> None:
    """The next writer must not let a mix of it and of the shard that it replaces appear, which may have equal sizes."""
    if replaces:
        write_samples(tmp_path / "x", demo_samples(3))
    fail_at(".loss.bin", KeyboardInterrupt(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        write_samples(tmp_path / "x", demo_samples(3), overwrite=replaces)
    monkeypatch.undo()
    Path(f"{tmp_path / 'x'}{suffix}.tmp").unlink()
    before = folder_of(tmp_path)
    for finish in (find_remains, recover, rebuild):
        with pytest.raises((FormatError, CorruptShardError), match=r"\(--overwrite\)"):
            finish(tmp_path / "x")
    assert folder_of(tmp_path) == before
    with ShardWriter(tmp_path / "x", overwrite=True, durable=False) as writer:
        assert folder_of(tmp_path) == sorted([*(f"x{each}.tmp" for each in SUFFIXES), "x.journal"])
        writer.abandon()
    assert folder_of(tmp_path) == []


# ---- forks, and the end of a process ----


def test_a_fork_neither_writes_nor_removes(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", durable=False)
    writer.add_pack([1, 2], [1, 0], [0])
    if (child := os.fork()) == 0:
        status = 1
        try:
            for act in (writer.flush, writer.finalize):
                with pytest.raises(FormatError, match="a fork of it"):
                    act()
            writer.abandon()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(FormatError, match="another writer"):
        ShardWriter(tmp_path / "x", overwrite=True)
    writer.add_pack([3, 4], [1, 0], [0])
    writer.finalize()
    assert [pack["input_ids"].tolist() for pack in Shard(tmp_path / "x")] == [[1, 2], [3, 4]]


def test_a_fork_that_closes_late_takes_nothing_back(tmp_path: Path) -> None:
    """Files reserve room on disk ahead of what is written, and give back what they do not need."""
    ids, mask = np.arange(1, 300_001, dtype=np.int32), np.append(np.ones(299_999, np.uint8), 0)
    writer = ShardWriter(tmp_path / "x", durable=False)
    writer.add_pack(ids, mask, [0])
    writer.flush()
    begin, go = os.pipe()
    if (child := os.fork()) == 0:
        os.read(begin, 1)
        writer.abandon()
        os._exit(0)
    writer.add_pack(ids, mask, [0])
    writer.flush()
    os.write(go, b"x")
    assert os.waitpid(child, 0)[1] == 0
    writer.add_pack(ids, mask, [0])
    writer.finalize()
    assert verify_shard(tmp_path / "x", full=True).ok


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("replaced", [False, True])
def test_a_temporary_file_that_went_away_is_told_before_anything_is_renamed(
    suffix: str, replaced: bool, tmp_path: Path
) -> None:
    write_samples(tmp_path / "x", demo_samples(3), capacity=64)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    writer = ShardWriter(tmp_path / "x", durable=False, overwrite=True)
    writer.add_pack([1, 2], [1, 0], [0])
    writer.flush()
    temporary = Path(f"{tmp_path / 'x'}{suffix}.tmp")
    temporary.unlink()
    if replaced:
        temporary.write_bytes(b"of somebody else")
    with pytest.raises(FormatError, match=r"\.tmp: was removed or replaced while it was written"):
        writer.finalize()
    temporary.unlink(missing_ok=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_shard_set_aside_that_lost_a_file_replaces_nothing(suffix: str, tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(3), capacity=64)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    writer = ShardWriter(tmp_path / "x", durable=False, overwrite=True)
    writer.add_pack([1, 2], [1, 0], [0])
    writer.set_aside()
    Path(f"{tmp_path / 'x'}{suffix}.tmp").unlink()
    with pytest.raises(FormatError, match=r"\.tmp: was removed before it got its name"):
        publication.publish_all([ShardPaths.of(tmp_path / "x")])
    assert before.items() <= {path.name: path.read_bytes() for path in tmp_path.iterdir()}.items()
    write_samples(tmp_path / "x", demo_samples(4), capacity=64, overwrite=True)
    assert folder_of(tmp_path) == sorted(before)


@pytest.mark.parametrize("finish", [find_remains, partial(recover, overwrite=True)])
@pytest.mark.parametrize("suffix", [*SUFFIXES, ".grade.col"])
def test_a_file_that_was_lost_is_not_taken_from_the_shard_that_is_replaced(
    suffix: str, finish: Callable[[Path], Any], tmp_path: Path
) -> None:
    def write(tokens: list[int], **options: Any) -> ShardWriter:
        writer = ShardWriter(tmp_path / "x", columns={"grade": ColumnSpec("pack", "u1")}, durable=False, **options)
        writer.add_pack(tokens, [1, 0], [0], columns={"grade": tokens[:1]})
        return writer

    write([1, 2]).finalize()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write([3, 4], overwrite=True).set_aside()
    Path(f"{tmp_path / 'x'}{suffix}.tmp").unlink()
    with pytest.raises(FormatError, match=r"\.tmp: was removed before it got its name"):
        finish(tmp_path / "x")
    assert before.items() <= {path.name: path.read_bytes() for path in tmp_path.iterdir()}.items()
    write([3, 4], overwrite=True).finalize()
    assert folder_of(tmp_path) == sorted(before)


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".grade.col"])
def test_of_a_shard_set_aside_that_lost_a_file_nothing_appears(suffix: str, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", columns={"grade": ColumnSpec("pack", "u1")}, durable=False)
    writer.add_pack([1, 2], [1, 0], [0], columns={"grade": [1]})
    writer.set_aside()
    Path(f"{tmp_path / 'x'}{suffix}.tmp").unlink()
    before = folder_of(tmp_path)
    with pytest.raises(FormatError, match=r"\.tmp: was removed before it got its name"):
        publication.publish_all([ShardPaths.of(tmp_path / "x")])
    assert folder_of(tmp_path) == before


@pytest.mark.parametrize("suffix", [".bin", ".seq.idx"])
def test_rebuild_finishes_a_shard_of_which_a_file_has_both_of_its_names(suffix: str, tmp_path: Path) -> None:
    """As a kill may leave it on a file system that renames by a second link."""
    writer = ShardWriter(tmp_path / "x", durable=False)
    writer.add_pack([1, 2], [1, 0], [0])
    writer.set_aside()
    for other in SUFFIXES[: SUFFIXES.index(suffix)]:
        os.rename(tmp_path / f"x{other}.tmp", tmp_path / f"x{other}")
    os.link(tmp_path / f"x{suffix}.tmp", tmp_path / f"x{suffix}")
    assert rebuild(tmp_path / "x").whole
    assert folder_of(tmp_path) == WHOLE


def test_a_writer_left_behind_removes_its_files_silently(tmp_path: Path) -> None:
    program = """
    from megatron_sft_idx.shard import ShardWriter
    writer = ShardWriter(sys.argv[1])
    writer.add_pack([1], [0], [0])
    writer.flush()
    """
    assert run(program, str(tmp_path / "x")) == ""
    assert folder_of(tmp_path) == []


def test_a_constructor_that_fails_says_nothing_more_when_collected(tmp_path: Path) -> None:
    program = """
    import gc
    from megatron_sft_idx.errors import FormatError
    from megatron_sft_idx.shard import Shard, ShardWriter
    for make in (
        lambda: ShardWriter(sys.argv[1], capacity=0), lambda: ShardWriter(sys.argv[1], token_dtype="i8"),
        lambda: ShardWriter(sys.argv[2] + "/x"), lambda: Shard(sys.argv[1]), lambda: Shard(sys.argv[1], backend="s3"),
        lambda: ShardWriter(sys.argv[1], token_dtype="foo"),
    ):
        try:
            make()
        except (FormatError, OSError):
            gc.collect()
        else:
            raise SystemExit(1)
    """
    (tmp_path / "file").write_bytes(b"")
    assert run(program, str(tmp_path / "x"), str(tmp_path / "file")) == ""
