"""Rebuild each index after loss or damage. Data that cannot be derived are an error with their names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import command, preprocess
from hostile import verbs
from hypothesis import given, settings
from hypothesis import strategies as st
from rebuilding import assert_same_but_for_json, damage, small
from sample_packs import (
    WHOLE,
    assert_holds,
    demo_samples,
    five_files,
    folder_of,
    sample_of,
    samples,
)

from megatron_sft_idx.check import GivenFacts, rebuild
from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard

# ---- one index lost ----


@pytest.mark.parametrize("lost", [".idx", ".seq.idx"])
def test_a_lost_index_of_a_preprocessed_shard_comes_back(tmp_path: Path, lost: str) -> None:
    assert preprocess(tmp_path / "x").code == 0
    before, header = five_files(tmp_path / "x"), Shard(tmp_path / "x").header
    packs = [pack["input_ids"].tolist() for pack in Shard(tmp_path / "x")]
    os.unlink(tmp_path / f"x{lost}")
    assert command("rebuild", tmp_path / "x").code == 0
    after, shard = five_files(tmp_path / "x"), Shard(tmp_path / "x")
    assert {suffix for suffix in SUFFIXES if after[suffix] != before[suffix]} == ({lost} - {".idx"})
    assert_same_but_for_json(shard.header, header)
    assert [pack["input_ids"].tolist() for pack in shard] == packs
    assert shard.header.rebuilt == (lost == ".seq.idx")
    assert folder_of(tmp_path) == sorted([*WHOLE, "x.source.col"])


def test_a_rebuilt_header_says_what_is_no_longer_known(tmp_path: Path) -> None:
    small(tmp_path / "x")
    old = Shard(tmp_path / "x").header
    os.unlink(tmp_path / "x.seq.idx")
    rebuild(tmp_path / "x")
    header = Shard(tmp_path / "x").header
    assert header.rebuilt
    assert (header.capacity, header.sequence_multiple, header.pad_id) == (header.longest_pack, 1, None)
    unknown = ["capacity", "metadata", "pad_id", "sequence_multiple"]
    assert header.metadata == {"format_writer": 1, "rebuilt": {"pack_lengths": ".idx", "unknown": unknown}}

    os.unlink(tmp_path / "x.seq.idx")
    rebuild(tmp_path / "x", GivenFacts(capacity=64, sequence_multiple=2, pad_id=7))
    header = Shard(tmp_path / "x").header
    assert (header.capacity, header.sequence_multiple, header.pad_id) == (64, 2, 7)
    assert header.metadata["rebuilt"]["unknown"] == ["metadata"]
    assert_same_but_for_json(header, old)


KINDS = [(np.uint16, False), (np.int32, False), (np.uint16, True), (np.int32, True)]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS), lost=st.sampled_from([".idx", ".seq.idx"]))
def test_any_shard_survives_the_loss_of_an_index(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: tuple[Any, bool], lost: str
) -> None:
    (token_dtype, weights), prefix = kind, tmp_path_factory.mktemp("any") / "x"
    packs = data.draw(samples(token_dtype=token_dtype, weights=weights))
    mask_dtype = np.dtype(np.float32 if weights else np.uint8)
    before = small(prefix, packs, token_dtype=token_dtype, mask_dtype=mask_dtype)
    header = Shard(prefix).header
    os.unlink(f"{prefix}{lost}")
    known = GivenFacts(capacity=64, sequence_multiple=2, pad_id=7, mask_dtype=None if packs else mask_dtype)
    assert rebuild(prefix, known).whole
    after, shard = five_files(prefix), Shard(prefix)
    assert_holds(shard, packs)
    assert_same_but_for_json(shard.header, header)
    assert (shard.header.capacity, shard.header.sequence_multiple, shard.header.pad_id) == (64, 2, 7)
    assert after[".idx"] == before[".idx"]
    assert after[".seq.idx"][shard.header.nbytes :] == before[".seq.idx"][header.nbytes :]
    assert lost == ".seq.idx" or after == before


def test_an_empty_shard_does_not_say_what_its_masks_are(tmp_path: Path) -> None:
    small(tmp_path / "x", [])
    os.unlink(tmp_path / "x.seq.idx")
    with pytest.raises(FormatError, match=r"dtypes cannot be determined; pass --token-dtype and --mask-dtype"):
        rebuild(tmp_path / "x")


def megatron_builder(path: Path) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    return IndexedDatasetBuilder(str(path), np.uint16)


def test_an_index_that_megatron_itself_wrote_will_do(tmp_path: Path) -> None:
    before = small(tmp_path / "x", token_dtype=np.uint16)
    stock = megatron_builder(tmp_path / "stock.bin")
    for sample in demo_samples():
        stock.add_document(np.array(sample.tokens), [len(sample.tokens)])
    stock.finalize(str(tmp_path / "x.idx"))
    os.unlink(tmp_path / "x.seq.idx")
    rebuild(tmp_path / "x")
    assert (tmp_path / "x.idx").read_bytes() == before[".idx"]
    assert_holds(Shard(tmp_path / "x"), demo_samples())


def test_an_index_with_other_documents_gives_lengths_and_is_written_anew(tmp_path: Path) -> None:
    before = small(tmp_path / "x", token_dtype=np.uint16)
    import torch

    stock = megatron_builder(tmp_path / "stock.bin")
    for sample in demo_samples():
        stock.add_item(torch.tensor(sample.tokens))
    stock.end_document()
    stock.finalize(str(tmp_path / "x.idx"))
    os.unlink(tmp_path / "x.seq.idx")
    report = rebuild(tmp_path / "x")
    assert report.kept == (f"{tmp_path}/x.idx.damaged",)
    assert (tmp_path / "x.idx").read_bytes() == before[".idx"]
    assert_holds(Shard(tmp_path / "x"), demo_samples())


# ---- data files ----


@pytest.mark.parametrize("suffix", [".bin", ".loss.bin"])
@pytest.mark.parametrize("lost", [False, True])
def test_tokens_and_masks_cannot_be_derived_but_the_rest_is(tmp_path: Path, suffix: str, lost: bool) -> None:
    before = small(tmp_path / "x")
    path = tmp_path / f"x{suffix}"
    os.unlink(path) if lost else os.truncate(path, 3)
    os.unlink(tmp_path / "x.idx")
    report = rebuild(tmp_path / "x")
    assert not report.whole
    assert (tmp_path / "x.idx").read_bytes() == before[".idx"]
    assert [file.path for file in report.files if file.state == "lost"] == [str(path)]
    outcome = command("rebuild", tmp_path / "x")
    assert outcome.code == 1
    assert "cannot be derived; restore it from a copy" in outcome.out


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("suffix", [".bin", ".loss.bin", ".seq.bin"])
@pytest.mark.parametrize("lost", [".idx", ".seq.idx"])
def test_no_index_has_readers_open_what_is_damaged_in_place(
    tmp_path: Path, suffix: str, lost: str, dry_run: bool
) -> None:
    before = small(tmp_path / "x")
    damage(tmp_path / f"x{suffix}", 9, 1)
    os.unlink(tmp_path / "x.idx") if lost == ".idx" else damage(tmp_path / "x.seq.idx", -1)
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = command("rebuild", tmp_path / "x", *(["--dry-run"] if dry_run else []))
    assert done.code == 1
    assert f"x{suffix}: lost: expected " in done.out
    if suffix != ".seq.bin" or lost == ".idx":  # otherwise the arrays cannot be derived from any source
        assert f"readers would open the damaged {tmp_path}/x{suffix} without an error; first restore what" in done.out
    assert f"x{lost}: lost: " in done.out
    assert "rebuilt" not in done.out
    assert left == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / f"x{suffix}").write_bytes(before[suffix])
    assert rebuild(tmp_path / "x").whole
    assert five_files(tmp_path / "x") == before


@pytest.mark.parametrize("also_lost", [None, ".idx", ".seq.idx"])
def test_starts_of_an_unpacked_shard_are_zeros(tmp_path: Path, also_lost: str | None) -> None:
    packs = [sample_of([1 + i % 4], lambda p: 1, lambda p: p) for i in range(9)]
    before = small(tmp_path / "x", packs)
    os.unlink(tmp_path / "x.seq.bin")
    if also_lost:
        damage(tmp_path / f"x{also_lost}", -1)
    assert rebuild(tmp_path / "x").whole
    assert five_files(tmp_path / "x") == before


@pytest.mark.parametrize("suffix", [".bin", ".loss.bin", ".seq.bin"])
def test_without_a_header_all_three_data_files_are_needed(tmp_path: Path, suffix: str) -> None:
    small(tmp_path / "x")
    os.unlink(tmp_path / "x.seq.idx")
    os.unlink(tmp_path / f"x{suffix}")
    before = folder_of(tmp_path)
    with pytest.raises(
        FormatError, match=rf"cannot be derived without a valid .seq.idx: .*x{suffix}; restore them from a copy"
    ):
        rebuild(tmp_path / "x")
    assert folder_of(tmp_path) == before


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda p: os.truncate(f"{p}.bin", 9), r"does not match|\.bin has 9"),
        (lambda p: os.truncate(f"{p}.loss.bin", 9), "does not match"),
        (lambda p: os.truncate(f"{p}.seq.bin", 9), "not a multiple of 4"),
        (lambda p: os.truncate(f"{p}.seq.bin", 8), "packs begin here"),
        (lambda p: damage(f"{p}.seq.bin", 0), "the first start is 255"),
        (
            lambda p: damage(f"{p}.seq.bin", 11),
            r"x\.seq\.bin: byte 8: pack 1: expected 4 or less, found a sequence that starts at 4278190082 \(rule P4\)",
        ),
        (
            lambda p: damage(f"{p}.loss.bin", 3),
            r"x\.loss\.bin: byte 3: pack 1: expected 0 or 1, found mask 255 \(rule P7\)",
        ),
        (
            lambda p: damage(f"{p}.bin", 3),
            r"x\.bin: byte 0: pack 0: expected 0 to 2147483647, found id -16777216 \(rule P8\)",
        ),
    ],
)
def test_data_that_breaks_a_rule_gets_no_index(tmp_path: Path, break_it: Callable[[str], None], message: str) -> None:
    small(tmp_path / "x")
    os.unlink(tmp_path / "x.seq.idx")
    break_it(f"{tmp_path}/x")
    before = folder_of(tmp_path)
    with pytest.raises(FormatError, match=message):
        rebuild(tmp_path / "x")
    assert folder_of(tmp_path) == before


# ---- nothing at all ----


def test_a_good_shard_is_left_alone(tmp_path: Path) -> None:
    before = small(tmp_path / "x")
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in WHOLE}
    outcome = command("rebuild", f"{tmp_path}/x.seq.idx")
    assert (outcome.code, "nothing to do" in outcome.out) == (0, True)
    assert folder_of(tmp_path) == WHOLE
    assert five_files(tmp_path / "x") == before
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in WHOLE} == times


def test_nothing_gives_nothing(tmp_path: Path) -> None:
    with pytest.raises(ShardNotFoundError, match="nothing to rebuild from"):
        rebuild(tmp_path / "x")
    assert folder_of(tmp_path) == []
    (tmp_path / "y.bin").mkdir()
    with pytest.raises(FormatError, match="not a file"):
        rebuild(tmp_path / "y")


def test_the_script_is_the_command(tmp_path: Path) -> None:
    import runpy
    import sys

    small(tmp_path / "x")
    os.unlink(tmp_path / "x.idx")
    argv, sys.argv = sys.argv, ["rebuild_index.py", f"{tmp_path}/x"]
    try:
        with pytest.raises(SystemExit) as leaving:
            runpy.run_path(str(Path(__file__).parents[2] / "tools/rebuild_index.py"), run_name="__main__")
    finally:
        sys.argv = argv
    assert leaving.value.code == 0
    assert Shard(tmp_path / "x")


@pytest.mark.parametrize(
    "wrong",
    [{"capacity": 0}, {"sequence_multiple": 2**31}, {"pad_id": -1}, {"eod_id": -1}, {"token_dtype": np.dtype("i8")}],
)
def test_what_no_shard_can_have_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"expected a whole number|the format only stores"):
        GivenFacts(**wrong)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (GivenFacts(token_dtype=np.dtype("u2")), r"x\.idx: its tokens are int32, but --token-dtype is uint16"),
        (GivenFacts(mask_dtype=np.dtype("f4")), r"does not match int32, float32 \(rule F2\)"),
        (
            GivenFacts(capacity=5),
            r"x: pack 2: expected at most the capacity 5, found 12 tokens \(rule P1\); pass the --seq-length",
        ),
        (
            GivenFacts(capacity=12, sequence_multiple=8),
            r"x: pack 1: expected .* 12, found 16 positions with each sequence rounded up to 8 \(rule P5\)",
        ),
    ],
)
def test_options_that_the_files_contradict_are_refused(tmp_path: Path, known: GivenFacts, message: str) -> None:
    small(tmp_path / "x")
    os.unlink(tmp_path / "x.seq.idx")
    with pytest.raises(FormatError, match=message):
        rebuild(tmp_path / "x", known)
    assert folder_of(tmp_path) == sorted(set(WHOLE) - {"x.seq.idx"})


def test_many_shards_are_named_as_for_verify_and_each_is_rebuilt_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    files = {name: small(tmp_path / "parts" / name) for name in ("a-9", "a-10", "a-11")}
    os.unlink("parts/a-9.idx")
    os.unlink("parts/a-11.seq.bin")
    damage("parts/a-11.seq.idx", -1)
    calls: list[str] = []

    def counted(prefix: str, *arguments: Any, **options: Any) -> Any:
        calls.append(prefix)
        return rebuild(prefix, *arguments, **options)

    monkeypatch.setattr("megatron_sft_idx.cli.verify.rebuild", counted)
    os.symlink("parts", "link")
    named = ("parts", "parts/a-9", "parts/a-1*", "link/a-10.idx", "missing")
    for dry_run in (True, False):
        done = command("rebuild", *named, *(["--dry-run"] if dry_run else []))
        assert calls == ["parts/a-9", "parts/a-10", "parts/a-11", "missing"]
        calls.clear()
        assert done.code == 1
        whole = [line for line in done.out.splitlines() if line.startswith("parts/a-10")]
        assert whole == ["parts/a-10: nothing to do"]
        end = "4 shards: 2 NOT whole, 2 whole" + ("; nothing was written" if dry_run else "")
        assert done.out.splitlines()[-1] == end
        assert [line.split(": ")[2] for line in done.err.splitlines()] == ["parts/a-11", "missing"]
        assert os.path.exists("parts/a-9.idx") == (not dry_run)
    assert five_files(tmp_path / "parts/a-9") == files["a-9"]
    done = command("rebuild", "parts/a-9", "parts/a-10")
    assert (done.code, done.err) == (0, "")
    assert done.out == "parts/a-9: nothing to do\nparts/a-10: nothing to do\n2 shards: all whole\n"


def test_both_commands_take_the_same_arguments() -> None:
    taken = []
    for verb in ("verify", "rebuild"):
        (positional,) = (each for each in verbs()[verb]._actions if not each.option_strings)
        taken.append((positional.dest, positional.nargs, positional.metavar, positional.help))
    assert taken[0] == taken[1]
