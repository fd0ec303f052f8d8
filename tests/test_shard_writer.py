"""Writing: exact, in bounded memory, all at once or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import assert_holds, demo_samples, five_files, opens, samples, write_samples

from megatron_sft_idx import _native
from megatron_sft_idx.errors import CorruptShardError, FormatError, SequenceError, ShardNotFoundError
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.layout.journal import DONE, MASK, PACK, read_blocks, read_head
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard import writer as writer_module
from megatron_sft_idx.storage import OutputFile

ROOT = Path(__file__).parent.parent


def folder_of(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


WHOLE = sorted("x" + suffix for suffix in SUFFIXES)

# ---- what is written is what is read ----


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    token_dtype=st.sampled_from([np.uint16, np.int32]),
    weights=st.booleans(),
    aligned=st.booleans(),
    multiple=st.sampled_from([1, 2, 8]),
    bounded=st.booleans(),
    together=st.booleans(),
)
def test_any_packs_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    token_dtype: Any,
    weights: bool,
    aligned: bool,
    multiple: int,
    bounded: bool,
    together: bool,
) -> None:
    packs = data.draw(samples(token_dtype=token_dtype, weights=weights))
    needed = max((pack.padded(multiple) for pack in packs), default=0)
    capacity = max(needed, 1) if bounded else None
    masks = [pack.mask if aligned else pack.label_mask for pack in packs]
    alignment: Any = "token" if aligned else "label"
    prefix = tmp_path_factory.mktemp("any") / "x"
    mask_dtype = np.float32 if weights else np.uint8
    with ShardWriter(
        prefix,
        token_dtype=token_dtype,
        mask_dtype=mask_dtype,
        capacity=capacity,
        sequence_multiple=multiple,
        durable=False,
    ) as writer:
        if together:
            writer.add_packs(
                np.array([t for pack in packs for t in pack.tokens], np.int64),
                np.array([m for mask in masks for m in mask]),
                np.array([s for pack in packs for s in pack.starts], np.int64),
                np.array([len(pack.tokens) for pack in packs], np.int64),
                np.array([len(pack.starts) for pack in packs], np.int64),
                mask_alignment=alignment,
            )
        else:
            for pack, mask in zip(packs, masks, strict=True):
                writer.add_pack(pack.tokens, mask, pack.starts, mask_alignment=alignment)
    dropped = sum(pack.mask[start] != 0 for pack in packs for start in pack.starts)
    assert writer.dropped_first_tokens == (dropped if aligned else 0)
    for backend in ("mmap", "pread"):
        shard = Shard(prefix, backend=backend)  # type: ignore[arg-type]
        assert_holds(shard, packs)
        header = shard.header
        assert (header.token_dtype, header.mask_dtype) == (np.dtype(token_dtype), np.dtype(mask_dtype))
        assert header.num_sequences == sum(len(pack.starts) for pack in packs)
        assert header.num_tokens == sum(len(pack.tokens) for pack in packs)
        assert header.num_trained_tokens == sum(value > 0 for pack in packs for value in pack.label_mask)
        assert header.num_masked_packs == sum(not any(pack.label_mask) for pack in packs)
        assert header.capacity == (capacity if bounded else needed)
        assert header.longest_pack == max((len(pack.tokens) for pack in packs), default=0)
        assert header.most_sequences == max((len(pack.starts) for pack in packs), default=0)


@settings(max_examples=10, deadline=None)
@given(packs=samples())
def test_same_packs_same_bytes(tmp_path_factory: pytest.TempPathFactory, packs: Any) -> None:
    folder = tmp_path_factory.mktemp("same")
    first, second = (write_samples(folder / name, packs) for name in "ab")
    assert five_files(folder / "a") == five_files(folder / "b")
    assert first == second == Shard(folder / "a").header


def test_how_often_it_is_flushed_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = demo_samples(200)
    write_samples(tmp_path / "x", packs)
    monkeypatch.setattr(writer_module, "_STAGE_TOKENS", 3)
    monkeypatch.setattr(writer_module, "MAX_RECORDS", 2)
    write_samples(tmp_path / "y", packs)
    assert five_files(tmp_path / "x") == five_files(tmp_path / "y")


@settings(max_examples=20, deadline=None)
@given(flags=samples(), weights=samples(weights=True))
def test_promoted_masks_are_as_if_float_from_the_start(
    tmp_path_factory: pytest.TempPathFactory, flags: Any, weights: Any
) -> None:
    folder = tmp_path_factory.mktemp("promoted")
    with ShardWriter(folder / "x", durable=False) as writer:
        for pack in flags:
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
        writer.promote_mask_dtype()
        for pack in weights:
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
        writer.promote_mask_dtype()
    write_samples(folder / "y", [*flags, *weights], mask_dtype=np.float32)
    assert five_files(folder / "x") == five_files(folder / "y")
    assert folder_of(folder) == sorted(name + suffix for name in "xy" for suffix in SUFFIXES)


def test_promotion_rewrites_more_than_one_piece(tmp_path: Path) -> None:
    mask = np.arange(300_000) % 3 == 0
    mask[-1] = False
    for name, dtype in (("x", np.uint8), ("y", np.float32)):
        with ShardWriter(tmp_path / name, mask_dtype=dtype, durable=False) as writer:
            writer.add_pack(np.arange(300_000), mask, [0])
            writer.promote_mask_dtype()
    assert five_files(tmp_path / "x") == five_files(tmp_path / "y")


@settings(max_examples=20, deadline=None)
@given(
    first=samples(),
    second=samples(),
    stage=st.sampled_from([1, 7, 1 << 16]),
    backend=st.sampled_from(["mmap", "pread"]),
)
def test_adding_a_shard_is_adding_its_packs(
    tmp_path_factory: pytest.TempPathFactory, first: Any, second: Any, stage: int, backend: Any
) -> None:
    folder = tmp_path_factory.mktemp("added")
    write_samples(folder / "a", first)
    write_samples(folder / "b", second)
    with pytest.MonkeyPatch.context() as patch, ShardWriter(folder / "x", durable=False) as writer:
        patch.setattr(writer_module, "_STAGE_TOKENS", stage)
        for name in "ab":
            writer.add_shard(Shard(folder / name, backend=backend))
    write_samples(folder / "y", [*first, *second])
    assert five_files(folder / "x") == five_files(folder / "y")


@pytest.mark.parametrize(("which", "rule"), [(0, "O1"), (1, "O2")])
def test_a_shard_whose_offsets_leave_tokens_out_is_not_added(tmp_path: Path, which: int, rule: str) -> None:
    header = write_samples(tmp_path / "a", demo_samples())
    base = (header.nbytes, header.token_offsets_offset)[which]
    for place in (base, base + 8 * header.num_packs):
        raw = bytearray((tmp_path / "a.seq.idx").read_bytes())
        raw[place : place + 8] = (int.from_bytes(raw[place : place + 8], "little") + 1).to_bytes(8, "little")
        (tmp_path / "b.seq.idx").write_bytes(raw)
        for suffix in SUFFIXES[:-1]:
            (tmp_path / f"b{suffix}").write_bytes((tmp_path / f"a{suffix}").read_bytes())
        with (
            pytest.raises(CorruptShardError, match=rule),
            ShardWriter(tmp_path / "x", durable=False) as writer,
        ):
            writer.add_shard(Shard(tmp_path / "b"))
    assert not (tmp_path / "x.seq.idx").exists()


# ---- what may be handed in ----

EXPECTED = ([5, 6, 7, 8], [0, 1, 1, 0], [0, 1])
FORMS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    lambda v: np.array(v, np.uint8),
    lambda v: np.array(v, np.int8),
    lambda v: np.array(v, np.uint64),
    lambda v: np.array(v, np.int64),
    lambda v: np.array(v, ">i4"),
    lambda v: np.array(v, ">u2"),
    lambda v: np.repeat(np.array(v, np.int32), 2)[::2],
    lambda v: np.array(v[::-1], np.int64)[::-1],
    lambda v: np.frombuffer(b"\0" + np.array(v, np.int32).tobytes(), np.int32, offset=1),
    lambda v: memoryview(np.array(v, np.int32)),
    lambda v: np.array(v).astype(object).astype(int).tolist(),
    lambda v: range(v[0], v[-1] + 1) if v == list(range(v[0], v[-1] + 1)) else v,
]


@pytest.mark.parametrize("form", FORMS)
def test_arrays_of_any_integer_form_are_taken(tmp_path: Path, form: Callable[[list[int]], Any]) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack(*map(form, EXPECTED))
    pack = Shard(tmp_path / "x")[0]
    assert (pack["input_ids"].tolist(), pack["loss_mask"].tolist()) == EXPECTED[:2]
    assert pack["seq_boundaries"].tolist() == [0, 1, 4]


@pytest.mark.parametrize("mask", [np.array(EXPECTED[1], bool), np.array(EXPECTED[1], bool).repeat(2)[::2]])
@pytest.mark.parametrize("dtype", [None, "f2", "f4", ">f4", "f8", "g"])
def test_masks_may_be_booleans_or_floats(tmp_path: Path, mask: np.ndarray, dtype: str | None) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack(EXPECTED[0], mask if dtype is None else mask.astype(dtype), EXPECTED[2])
    assert Shard(tmp_path / "x")[0]["loss_mask"].tolist() == EXPECTED[1]


@pytest.mark.parametrize(
    ("place", "value", "word"),
    [
        (0, 5, "pack 0: tokens has shape ()"),
        (0, [[5, 6], [7, 8]], "pack 0: tokens has shape (2, 2)"),
        (0, [5.0, 6.0, 7.0, 8.0], "pack 0: tokens has dtype float64; expected integers"),
        (0, [5, 6, 7, None], "pack 0: tokens has dtype object"),
        (0, np.array([5, 6, 7, 2**63], np.uint64), "pack 0: tokens holds 9223372036854775808, far outside"),
        (0, [5, 6, 7, 2**64], "pack 0: tokens has dtype object"),
        (0, [True] * 4, "pack 0: tokens has dtype bool; expected integers"),
        (0, ["a", "b", "c", "d"], "pack 0: tokens has dtype <U1"),
        (0, None, "pack 0: tokens has shape ()"),
        (0, [5, [6]], "pack 0: tokens"),
        (1, 1, "pack 0: loss_mask has shape ()"),
        (1, [0, 1j, 1, 0], "pack 0: loss_mask has dtype complex128"),
        (1, [0, 1, 0], "pack 0: 3 loss mask values for 4 tokens"),
        (1, np.array([0, 2**64 - 1, 0, 0], np.uint64), "pack 0: loss_mask holds 18446744073709551615"),
        (2, 0, "pack 0: seq_starts has shape ()"),
        (2, [0.0, 1.0], "pack 0: seq_starts has dtype float64"),
        (2, [], "pack 0: no sequence starts"),
    ],
)
def test_arrays_of_another_form_are_named(tmp_path: Path, place: int, value: Any, word: str) -> None:
    arguments: list[Any] = list(EXPECTED)
    arguments[place] = value
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        with pytest.raises(SequenceError) as caught:
            writer.add_pack(*arguments)
        assert word in str(caught.value)
        assert str(caught.value).startswith(str(tmp_path / "x"))


@pytest.mark.parametrize(
    "options",
    [
        {"capacity": 0},
        {"capacity": 2**31},
        {"capacity": 4.0},
        {"capacity": True},
        {"sequence_multiple": 0},
        {"sequence_multiple": None},
        {"pad_id": -1},
        {"pad_id": 2**31},
        {"token_dtype": np.int64},
        {"token_dtype": ">i4"},
        {"token_dtype": np.uint32},
        {"mask_dtype": np.float64},
        {"mask_dtype": bool},
    ],
)
def test_options_outside_the_format_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        ShardWriter(tmp_path / "x", **options)
    assert folder_of(tmp_path) == []


def test_another_alignment_is_refused(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer, pytest.raises(FormatError, match="'rolled'"):
        writer.add_pack([1], [0], [0], mask_alignment="rolled")  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["", ".bin", "folder/", "folder/.idx"])
def test_a_prefix_names_a_shard(prefix: str) -> None:
    with pytest.raises(FormatError, match="not a prefix"):
        ShardWriter(prefix)


# ---- memory ----


def heap_of_adding(count: int, add: Callable[[int], None]) -> int:
    """The most bytes of Python's heap while ``add`` is called, beyond what was held before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(count):
            add(i)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


BOUND = 4 << 20


def test_heap_does_not_grow_with_packs(tmp_path: Path) -> None:
    ids, mask, starts = np.arange(4), np.array([0, 1, 1, 0]), np.array([0, 2])
    mask = np.array([1, 0, 1, 0], np.uint8)
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        assert heap_of_adding(200_000, lambda _: writer.add_pack(ids, mask, starts)) < BOUND
        assert heap_of_adding(1, lambda _: writer.finalize()) < BOUND
    assert len(Shard(tmp_path / "x")) == 200_000


def test_a_writer_that_kept_lists_would_not_pass() -> None:
    lengths: list[int] = []
    documents: list[int] = []

    def add(i: int) -> None:
        lengths.append(300 + i)
        documents.append(300 + i)

    assert heap_of_adding(200_000, add) > BOUND


def test_a_pack_larger_than_the_stage_leaves_no_memory_behind(tmp_path: Path) -> None:
    ids = np.zeros(3 << 20, np.int32)
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack(ids, np.zeros(len(ids), np.uint8), [0])
        writer.flush()
        before = resident()
        for _ in range(3):
            writer.add_pack(ids, np.zeros(len(ids), np.uint8), [0])
            writer.flush()
        assert resident() - before < 16 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# ---- the journal ----


def test_the_journal_knows_what_is_written_while_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_STAGE_TOKENS", 16)
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
            assert options == {
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
        writer.promote_mask_dtype()
        with open(journal, "rb") as stream:
            read_head(stream, str(journal))
            kinds = [block.kind for block in read_blocks(stream)]
        assert kinds == [PACK] * (len(kinds) - 1) + [MASK]


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


# ---- all at once or not at all ----


def run(program: str, *arguments: str, expected: int = 0) -> str:
    """A fresh process; returns what it wrote to stderr."""
    source = "import sys; sys.path[:0] = ['.', 'tests']\n" + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
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
    assert folder_of(tmp_path) == ["x.bin.tmp", "x.journal", "x.loss.bin.tmp", "x.seq.bin.tmp"]
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


def publish_and_die(prefix: Path, last: int) -> int:
    """Build in a fork that kills itself at step ``last`` of what changes the folder; its wait status."""
    if (child := os.fork()) == 0:
        steps = 0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def step(*arguments: Any) -> Any:
                nonlocal steps
                if steps == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                steps += 1
                return call(*arguments)

            return step

        os.rename, os.unlink, os.fsync = map(counted, (os.rename, os.unlink, os.fsync))  # type: ignore[assignment]
        try:
            write_samples(prefix, demo_samples(5), overwrite=True, durable=True)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("replaces", [False, True])
def test_killed_at_any_step_of_publication_a_whole_shard_opens_or_none(tmp_path: Path, replaces: bool) -> None:
    old, new = demo_samples(3), demo_samples(5)
    states = []
    for step in range(100):
        folder = tmp_path / str(step)
        if replaces:
            write_samples(folder / "x", old)
        if publish_and_die(folder / "x", step) != signal.SIGKILL:
            assert folder_of(folder) == WHOLE
            break
        if opens(folder / "x"):
            shard = Shard(folder / "x")
            states.append("old" if len(shard) == len(old) else "new")
            assert_holds(shard, old if len(shard) == len(old) else new)
        else:
            states.append("none")
            assert (folder / "x.journal").exists()
            with open(folder / "x.journal", "rb") as stream:
                read_head(stream, "x.journal")
                kinds = [block.kind for block in read_blocks(stream)]
            # Once a file has its final name, or the old shard is gone, the journal says that all are complete.
            if replaces or (folder / "x.bin").exists():
                assert kinds[-1] == DONE
            for suffix in SUFFIXES:
                assert (folder / f"x{suffix}").exists() or (folder / f"x{suffix}.tmp").exists()
    # Six files synced, the old .seq.idx unlinked, five renames, the folder synced once or twice, the journal unlinked.
    assert len(states) == 14 + replaces
    order = ["old", "none", "new"] if replaces else ["none", "new"]
    assert states == sorted(states, key=order.index)
    assert set(states) == set(order)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("replaces", [False, True])
def test_publication_that_fails_halfway_keeps_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool, error: BaseException
) -> None:
    if replaces:
        write_samples(tmp_path / "x", demo_samples(3))
    rename = os.rename

    def failing(source: str, target: str) -> None:
        if target.endswith("x.seq.bin"):
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(type(error)):
        write_samples(tmp_path / "x", demo_samples(5), overwrite=replaces)
    assert not opens(tmp_path / "x")
    assert (tmp_path / "x.journal").exists()
    for suffix in (".seq.bin", ".idx", ".seq.idx"):
        assert (tmp_path / f"x{suffix}.tmp").exists()


@pytest.mark.parametrize(
    "failing", [".bin.tmp", ".loss.bin.tmp", ".seq.bin.tmp", ".journal", ".idx.tmp", ".seq.idx.tmp"]
)
def test_a_write_that_fails_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    write = OutputFile.write
    full = False

    def limited(self: OutputFile, data: Any) -> None:
        if full and self.path.endswith("x" + failing):
            raise OSError(28, "No space left on device", self.path)
        write(self, data)

    monkeypatch.setattr(OutputFile, "write", limited)
    writer = ShardWriter(tmp_path / "x", durable=False)
    writer.add_pack([1, 2], [1, 0], [0])
    full = True
    with pytest.raises(OSError, match="No space left"):
        writer.finalize()
    with pytest.raises(FormatError, match="abandoned"):
        writer.add_pack([1, 2], [1, 0], [0])
    with pytest.raises(FormatError, match="abandoned"):
        writer.finalize()
    assert folder_of(tmp_path) == []


def test_a_flush_that_fails_is_not_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path / "x", durable=False)
    writer.add_pack([1, 2], [1, 0], [0])
    write = OutputFile.write
    monkeypatch.setattr(OutputFile, "write", lambda self, data: self.path.endswith(".bin.tmp") or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.flush()
    monkeypatch.setattr(OutputFile, "write", write)
    with pytest.raises(FormatError, match="abandoned"):
        writer.finalize()
    assert folder_of(tmp_path) == []


def test_an_exception_inside_publishes_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    old = demo_samples(3)
    write_samples(tmp_path / "x", old)
    before = five_files(tmp_path / "x")
    with (
        pytest.raises(ZeroDivisionError),
        ShardWriter(tmp_path / "x", overwrite=True) as writer,
    ):
        writer.add_pack([1], [0], [0])
        writer.flush()
        raise ZeroDivisionError
    assert five_files(tmp_path / "x") == before
    assert folder_of(tmp_path) == WHOLE


def test_a_clean_exit_after_finalize_or_abandon_does_nothing(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.finalize()
    with ShardWriter(tmp_path / "y", durable=False) as writer:
        writer.abandon()
        writer.abandon()
    assert folder_of(tmp_path) == WHOLE


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_nothing_is_overwritten_unasked(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"x{suffix}").write_bytes(b"precious")
    with pytest.raises(FormatError, match=f"x{suffix} exist"):
        ShardWriter(tmp_path / "x")
    assert (tmp_path / f"x{suffix}").read_bytes() == b"precious"
    assert folder_of(tmp_path) == [f"x{suffix}"]


def test_a_shard_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", durable=False)
    (tmp_path / "x.idx").write_bytes(b"precious")
    with pytest.raises(FormatError, match=r"x\.idx exist"):
        writer.finalize()
    assert folder_of(tmp_path) == ["x.idx"]
    assert (tmp_path / "x.idx").read_bytes() == b"precious"


def test_one_writer_a_prefix(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        for overwrite in (False, True):
            with pytest.raises(FormatError, match="another writer is at work"):
                ShardWriter(tmp_path / "x", overwrite=overwrite)
        writer.add_pack([1], [0], [0])
    assert len(Shard(tmp_path / "x")) == 1


def test_of_many_writers_one_wins(tmp_path: Path) -> None:
    winners: list[int] = []
    barrier = threading.Barrier(8)

    def build(number: int) -> None:
        barrier.wait()
        for _ in range(10):
            try:
                with ShardWriter(tmp_path / "x", durable=False, overwrite=True) as writer:
                    for _ in range(number + 1):
                        writer.add_pack([number] * 3, [0] * 3, [0])
                winners.append(number)
            except FormatError as error:
                assert "another writer" in str(error)  # noqa: PT017

    threads = [threading.Thread(target=build, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert winners
    shard = Shard(tmp_path / "x")
    assert len(shard) == shard[0]["input_ids"][0] + 1
    assert folder_of(tmp_path) == WHOLE


def test_a_lock_on_a_removed_journal_is_not_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ShardWriter(tmp_path / "x", durable=False)
    opened = os.open
    second: list[ShardWriter] = []

    def open_then_finish(path: Any, *arguments: Any) -> int:
        fd = opened(path, *arguments)
        if str(path).endswith(".journal") and first.num_packs == 0:
            first.add_pack([1], [0], [0])
            first.finalize()
        return fd

    monkeypatch.setattr(os, "open", open_then_finish)
    second.append(ShardWriter(tmp_path / "x", durable=False, overwrite=True))
    with pytest.raises(FormatError, match="another writer"):
        ShardWriter(tmp_path / "x", overwrite=True)
    second.pop().abandon()
    assert len(Shard(tmp_path / "x")) == 1


def test_remains_of_a_killed_build_go_with_the_next(tmp_path: Path) -> None:
    for suffix in (*SUFFIXES, ".loss.bin.tmp.float32"):
        (tmp_path / f"x{suffix.removesuffix('.tmp.float32')}.tmp").write_bytes(b"old")
    (tmp_path / "x.loss.bin.tmp.float32").write_bytes(b"old")
    (tmp_path / "x.journal").write_bytes(b"torn")
    ShardWriter(tmp_path / "x", overwrite=True, durable=False).abandon()
    assert folder_of(tmp_path) == []


def test_a_folder_named_like_the_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.journal").mkdir()
    with pytest.raises(FormatError, match="a folder is where the journal"):
        ShardWriter(tmp_path / "x")


def test_a_missing_folder_is_made_and_a_file_in_its_place_is_not(tmp_path: Path) -> None:
    write_samples(tmp_path / "a" / "b" / "x", [])
    assert Shard(tmp_path / "a" / "b" / "x").header.num_packs == 0
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError):
        ShardWriter(tmp_path / "file" / "x")


# ---- forks, and the end of a process ----


def test_a_fork_neither_writes_nor_removes(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", durable=False)
    writer.add_pack([1, 2], [1, 0], [0])
    if (child := os.fork()) == 0:
        status = 1
        try:
            for act in (writer.flush, writer.finalize, writer.promote_mask_dtype):
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


def test_the_kernel_is_the_one_rule_book(tmp_path: Path) -> None:
    """The stage takes arrays of several packs, so a wrong length array cannot reach past the tokens."""
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        with pytest.raises(SequenceError, match="tokens run out"):
            writer.add_packs([1, 2], [0, 0], [0], np.array([3]), np.array([1]))
        with pytest.raises(TypeError):
            writer.add_packs([1, 2], [0, 0], [0], [2], [1])  # type: ignore[arg-type]
    assert _native.PackStage.__module__ == "megatron_sft_idx._native"
