"""``rebuild --accept-contents``: repair a shard whose contents were changed and that has no other copy."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from chats import command, files_of, preprocess
from columned import write_columned
from kills import killed_at, kills_at
from sample_packs import demo_samples, sample_of, write_samples

from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.doubts import DOUBTS, doubts
from megatron_sft_idx.layout.files import column_of
from megatron_sft_idx.packs.provenance import joined_metadata
from megatron_sft_idx.shard import Shard, read_header, write_column
from megatron_sft_idx.tokenize import PackOptions, pack_shard

PACKS = [sample_of([5, 4, 7], lambda position: position % 2, lambda position: position % 40) for _ in range(9)]
SPECS = {"score": ColumnSpec("token", "f4"), "turn": ColumnSpec("sequence", "u1")}
METADATA = {"tokenizer": {"fingerprint": "aaa", "vocab_size": 64}, "notes": ["kept"], "accepted": "no list"}
# For each file a byte that can change without breaking a rule of packs.
CHANGES = {".bin": (4, 9), ".loss.bin": (0, 0), ".seq.bin": (4, 6), ".score.col": (-2, 7), ".late.col": (-1, 7)}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_columned(tmp_path / "x", PACKS, SPECS, capacity=64, metadata=METADATA)
    write_column(tmp_path / "x", "late", np.arange(9, dtype=np.uint8), per="pack")
    return tmp_path / "x"


def change(prefix: Path, suffix: str, at: int, value: int) -> bytes:
    path = Path(f"{prefix}{suffix}")
    raw = bytearray(path.read_bytes())
    assert raw[at] != value
    raw[at] = value
    path.write_bytes(raw)
    return bytes(raw)


@pytest.mark.parametrize("suffix", CHANGES)
def test_what_is_there_becomes_the_shard(prefix: Path, suffix: str) -> None:
    before, shard_id = files_of(prefix), read_header(prefix).shard_id.hex()
    changed = change(prefix, suffix, *CHANGES[suffix])
    assert command("rebuild", prefix).code == 1
    assert command("pack", prefix, "--seq-length", 64, "--lossy", "--output-prefix", f"{prefix}-2").code == (
        0 if suffix == ".late.col" else 1  # left out, because it has one row per pack
    )
    only_said = command("rebuild", prefix, "--accept-contents", "--dry-run")
    assert (
        only_said.code,
        f"{prefix}{suffix}: would be accepted: " in only_said.out,
        "nothing was written" in only_said.out,
    ) == (
        0,
        True,
        True,
    )
    assert files_of(prefix) == before | {suffix: changed}
    done = command("rebuild", prefix, "--accept-contents")
    assert done.code == 0, done
    assert f"{prefix}{suffix}: accepted: " in done.out
    assert "kept as it is, with a new checksum" in done.out
    assert done.out.endswith(f"{prefix}: follows all rules, but its contents differ from what was written\n")
    header = read_header(prefix)
    (entry,) = header.metadata["accepted"]
    assert entry["file"] == suffix
    assert header.metadata["notes"] == ["kept"]
    assert (header.shard_id.hex() != shard_id) == (column_of(suffix) is None)
    assert verify_shard(prefix, full=True).ok
    after = files_of(prefix)
    for name in (".bin", ".loss.bin", ".seq.bin"):
        assert after[name] == (changed if name == suffix else before[name])
    for name in (*SPECS, "late"):  # including their headers, which contain the id of the shard
        spec = Shard(prefix).columns[name].spec
        kept = changed if suffix == f".{name}.col" else before[f".{name}.col"]
        assert after[f".{name}.col"][spec.header_nbytes :] == kept[spec.header_nbytes :]
    assert command("rebuild", prefix, "--accept-contents").out.strip().endswith("nothing to do")
    pack_shard(Shard(prefix), f"{prefix}-3", PackOptions(64), lossy=True)


def test_every_accepted_file_is_listed_and_stays_listed(prefix: Path) -> None:
    for suffix in (".bin", ".score.col"):
        change(prefix, suffix, *CHANGES[suffix])
    assert rebuild(prefix, accept_contents=True).whole
    change(prefix, ".loss.bin", *CHANGES[".loss.bin"])
    assert rebuild(prefix, accept_contents=True).whole
    assert [entry["file"] for entry in read_header(prefix).metadata["accepted"]] == [".bin", ".score.col", ".loss.bin"]
    assert verify_shard(prefix, full=True).ok


def test_an_index_that_was_damaged_too_is_made_again(prefix: Path) -> None:
    before = files_of(prefix)
    change(prefix, ".bin", *CHANGES[".bin"])
    change(prefix, ".idx", 40, 99)
    assert rebuild(prefix, accept_contents=True).whole
    assert files_of(prefix)[".idx"] == before[".idx"]


@pytest.mark.parametrize(
    ("suffix", "at", "value", "rule"),
    [
        (".bin", 5, 255, "P9"),
        (".loss.bin", 0, 3, "P7"),
        (".loss.bin", 4, 1, "P6"),
        (".seq.bin", 0, 1, "P2"),
        (".seq.bin", 5, 1, "P4"),
        (".score.col", 8, 2, "C1"),
    ],
)
def test_contents_that_break_a_rule_are_not_accepted(prefix: Path, suffix: str, at: int, value: int, rule: str) -> None:
    change(prefix, suffix, at, value)
    before = files_of(prefix)
    refused = command("rebuild", prefix, "--accept-contents")
    assert (refused.code, f"(rule {rule})" in refused.err) == (1, True), refused
    assert files_of(prefix) == before


def test_a_file_of_another_size_is_not_accepted(prefix: Path) -> None:
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-2])
    before = files_of(prefix)
    refused = command("rebuild", prefix, "--accept-contents")
    assert (refused.code, "(rule F2)" in refused.err) == (1, True), refused
    assert files_of(prefix) == before


def test_the_shard_is_no_longer_taken_for_what_a_job_made(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    assert preprocess(prefix).code == 0
    again = preprocess(prefix)
    assert (again.code, "found " in again.out + again.err) == (0, True), again
    raw = bytearray(Path(f"{prefix}.bin").read_bytes())
    raw[0] ^= 1
    Path(f"{prefix}.bin").write_bytes(raw)
    assert rebuild(prefix, accept_contents=True).whole
    refused = preprocess(prefix)
    assert (refused.code, "contents that do not match their checksums were accepted" in refused.err) == (1, True)


# Commands that make shards of the shards "clean" and "changed", which the outputs must not look cleaner than.
DERIVED = {
    "merge": ["merge clean changed --output-prefix out"],
    "merge, the other way round": ["merge changed clean --output-prefix out"],
    "split": ["split changed --shards 2 --output-prefix out"],
    "pack": ["pack changed --seq-length 2048 --output-prefix out"],
    "copy": ["copy changed out"],
    "convert": ["convert changed out --to sft-idx"],
    "convert several": ["convert clean changed out --to sft-idx"],
    "convert there and back": ["convert changed x.parquet --to parquet", "convert x.parquet out --to sft-idx"],
    "convert several there and back": [
        "convert clean changed x.parquet --to parquet",
        "convert x.parquet out --to sft-idx",
    ],
}


@pytest.mark.parametrize("name", DERIVED)
def test_what_is_made_from_it_says_so_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert preprocess("clean", "--max-rows", 40, capacity=1024).code == 0
    assert command("copy", "clean", "changed").code == 0
    change(tmp_path / "changed", ".bin", 4, 9)
    assert rebuild("changed", accept_contents=True).whole
    for line in DERIVED[name]:
        outcome = command(*line.split())
        assert outcome.code == 0, outcome
    outputs = sorted(each.name.removesuffix(".seq.idx") for each in tmp_path.glob("out*.seq.idx"))
    assert len(outputs) == (2 if name == "split" else 1)
    for prefix in outputs:
        assert [entry["file"] for entry in read_header(prefix).metadata["accepted"]] == [".bin"]
        note = "note: contents that do not match their checksums were accepted\n"
        assert f"{prefix}: {note}" in command("verify", prefix).out
        assert note.removeprefix("note: ") in command("inspect", prefix).out
    assert "note" not in command("verify", "clean").out


def test_several_shards_join_what_they_say_of_damage() -> None:
    """A recovered build is kept too, and columns that masks were multiplied by. Counts of one shard are not."""
    entry = {"file": ".bin", "expected": "0" * 32}
    first = {"kept": 1, "other": 1, "sources": {"rows": 3}, "accepted": [entry], "loss_weight_columns": ["score"]}
    second = {"kept": 1, "other": 2, "sources": {"rows": 3}, "accepted": [entry, {**entry, "file": ".loss.bin"}]}
    third = {"kept": 1, "recovered": {"packs": 3, "packs_noted": 4}, "loss_weight_columns": ["turn"]}
    joined, differing = joined_metadata([first, second, third])
    assert differing == {"other"}
    assert joined == {
        "kept": 1,
        "accepted": second["accepted"],
        "recovered": [third["recovered"]],
        "loss_weight_columns": ["score", "turn"],
    }
    assert doubts(joined) == list(DOUBTS.values())
    assert joined_metadata([joined, joined]) == (joined, set())


@kills_at
def test_killed_at_a_step_the_same_command_can_be_run_again(tmp_path: Path, stride: int) -> None:
    """Also with files that were complete, and whose renames had not begun."""
    step, killed, waiting = stride // 2, True, 0
    while killed:
        prefix = tmp_path / f"{step}" / "x"
        write_samples(prefix, demo_samples())
        change(prefix, ".bin", 4, 9)
        killed = killed_at(step, lambda prefix=prefix: rebuild(prefix, accept_contents=True))  # type: ignore[misc]
        unpublished = [f"{prefix}.building/done.json", f"{prefix}.building/.seq.idx", f"{prefix}.seq.idx"]
        if killed and all(map(os.path.exists, unpublished)):
            waiting += 1
            refused = command("rebuild", prefix)
            assert (refused.code, "of a killed rebuild --accept-contents" in refused.err) == (1, True), refused
        for dry in (["--dry-run"], []):
            done = command("rebuild", prefix, "--accept-contents", *dry)
            assert done.code == 0, done
        assert [entry["file"] for entry in read_header(prefix).metadata["accepted"]] == [".bin"]
        assert verify_shard(prefix, full=True).ok
        step += stride
    assert step > 20
    assert waiting > 1 // stride
