"""``verify``: reports about valid shards of every kind and about unfinished builds, and the command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import command, preprocess
from reseal import put
from sample_packs import demo_samples, five_files, write_samples

import megatron_sft_idx
from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.cli.streams import message_of
from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard, ShardWriter

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", ["flags", "weights", "columns", "media"])
def test_the_golden_shards_are_clean(name: str, full: bool) -> None:
    report = verify_shard(GOLDEN / name, full=full)
    assert report.ok
    assert report.findings == ()


@pytest.mark.parametrize("token_dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("mask_dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("count", [0, 1, 200])
@pytest.mark.parametrize("multiple", [1, 8])
def test_what_the_writer_writes_is_clean(
    tmp_path: Path, token_dtype: Any, mask_dtype: Any, count: int, multiple: int
) -> None:
    options = {"token_dtype": token_dtype, "mask_dtype": mask_dtype, "sequence_multiple": multiple}
    header = write_samples(tmp_path / "x", demo_samples(count), **options)
    for full in (False, True):
        report = verify_shard(tmp_path / "x", full=full)
        assert report.ok, report.findings
        assert report.counts == {"packs": count, "sequences": header.num_sequences, "tokens": header.num_tokens}


@pytest.mark.parametrize("packing", ["none", "auto"])
def test_what_preprocess_writes_is_clean(tmp_path: Path, packing: str) -> None:
    assert preprocess(tmp_path / "x", "--packing", packing).code == 0
    report = verify_shard(tmp_path / "x", full=True)
    assert (report.findings, report.notes) == ((), ())  # the vocabulary is in the header


def test_packs_larger_than_any_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_sft_idx.check.pack_walk._CHUNK_NBYTES", 8)
    monkeypatch.setattr("megatron_sft_idx.check.pack_walk._CHUNK_SEQUENCES", 2)
    monkeypatch.setattr("megatron_sft_idx.check.verify.RUN_PACKS", 3)
    write_samples(tmp_path / "x", demo_samples(20))
    assert verify_shard(tmp_path / "x", full=True).ok


def test_it_is_public() -> None:
    assert megatron_sft_idx.verify_shard is verify_shard


def test_a_vocabulary_of_nothing_is_refused() -> None:
    with pytest.raises(FormatError, match="vocab_size 0"):
        verify_shard(GOLDEN / "flags", full=True, vocab_size=0)


# ---- remains of a build ----


def killed_build(prefix: Path) -> None:
    """Leave the folder of a writer that was neither finished nor stopped."""
    writer = ShardWriter(prefix, overwrite=True)
    writer.add_pack([1, 2], [1, 0], [0])
    writer.flush()
    writer.suspend()


def test_unfinished_work_next_to_a_good_shard_is_a_note(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    killed_build(tmp_path / "x")
    killed_build(tmp_path / "x2")  # for another prefix
    report = verify_shard(tmp_path / "x", full=True)
    assert report.ok
    assert [note for note in report.notes if "building" in note] == [report.notes[0]]
    assert report.notes[0].startswith("x.building: left by a command that was killed")
    assert report.notes[0].endswith(f"recover its packs: megatron-sft-idx rebuild {tmp_path / 'x'}")
    assert list(Shard(tmp_path / "x"))


def test_unfinished_work_without_a_shard_breaks_f1(tmp_path: Path) -> None:
    killed_build(tmp_path / "x")
    report = verify_shard(tmp_path / "x")
    assert [finding.rule for finding in report.findings] == ["F1"] * 5
    assert all(
        f"recover the packs of the interrupted build: megatron-sft-idx rebuild {tmp_path / 'x'}" in finding.remedy
        for finding in report.findings
    )
    assert len(report.notes) == 1


@pytest.mark.parametrize("put", [Path.mkdir, Path.touch, lambda path: path.symlink_to("y.building")])
def test_a_folder_that_is_not_ours_is_no_unfinished_work(tmp_path: Path, put: Callable[[Path], None]) -> None:
    write_samples(tmp_path / "x", demo_samples())
    killed_build(tmp_path / "y")
    for name in ("x", "notes", "_producer"):
        put(tmp_path / f"{name}.building")
    for source in (tmp_path / "x", tmp_path / "x*"):
        done = command("verify", source)
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith(f"{tmp_path / 'x'}: ok: ")
        assert done.out.count("\n") == 1
    done = command("verify", tmp_path)
    assert done.out.count("x: ok: ") == 1
    assert "notes" not in done.out + done.err
    done = command("verify", tmp_path / "_producer")
    assert done.code == 1
    assert "_producer: no shard here" in done.err
    assert "interrupted" not in done.err
    with pytest.raises(ShardNotFoundError) as refused:
        Shard(tmp_path / "_producer")
    assert "interrupted" not in str(refused.value)


# ---- the command ----


def test_a_good_shard(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    done = command("verify", tmp_path / "x")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{tmp_path / 'x'}: ok: 7 packs, 16 sequences, 47 tokens; checked: headers, sizes and ends\n"
    done = command("verify", "--full", "--vocab-size", 70, tmp_path / "x.seq.idx")
    assert (done.code, done.err) == (0, "")
    assert "checked: every byte" in done.out


def test_all_shards_are_told_of_and_the_exit_code_is_1(tmp_path: Path) -> None:
    for i in (1, 2, 10):
        write_samples(tmp_path / f"s{i}", demo_samples())
    files = five_files(tmp_path / "s2")
    put(tmp_path, {**files, ".bin": b"\xff" * len(files[".bin"])}, name="s2")
    (tmp_path / "s1.seq.idx").unlink()
    for sources in ([tmp_path], [tmp_path / "s*"], [tmp_path / "s1", tmp_path / "s2.bin", tmp_path / "s10", tmp_path]):
        done = command("verify", "--full", *sources)
        assert done.code == 1
        verdicts = [line for line in done.out.splitlines() if "ok: " in line]
        assert [line.split(":")[0] for line in verdicts] == [str(tmp_path / name) for name in ("s1", "s2", "s10")]
        assert done.out.splitlines()[-1] == "3 shards: 2 NOT ok, 1 ok"
        assert "(rule F1)" in done.out
        assert "(rule F3)" in done.out
    done = command("verify", tmp_path / "s10", tmp_path / "missing")
    assert done.code == 1
    assert "missing: no shard here" in done.err
    assert done.out.splitlines()[-1] == "2 shards: 1 NOT ok, 1 ok"


def test_a_folder_of_many_shards_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        write_samples(tmp_path / f"s{number}", demo_samples())
    looks = []
    for name in ("listdir", "scandir"):
        look = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *path, look=look: looks.append(path) or look(*path))
    assert command("verify", tmp_path).code == 0
    assert len(looks) < 8


def test_what_a_path_holds_does_not_reach_the_terminal(tmp_path: Path) -> None:
    for name in ("\x1bcgone", "\x1b[2Jgone"):  # the error of one shard; an error of a glob ends the command
        done = command("verify", tmp_path / name)
        assert done.code == 1
        assert f"{name.replace(chr(27), '␛')}: no shard here" in done.err
        assert "\x1b" not in done.err


def test_errors_of_the_disk_name_the_path_first() -> None:
    assert message_of(PermissionError(13, "Permission denied", "x.bin")) == "x.bin: Permission denied"
    assert message_of(OSError(5, "Input/output error")) == "[Errno 5] Input/output error"
    assert message_of(ShardNotFoundError("x", ["x.idx"], "copy it")).startswith("x: no shard here, missing x.idx")


def test_json_says_the_same(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    Path(ShardPaths.of(tmp_path / "x").starts).write_bytes(b"")
    done = command("verify", "--json", tmp_path / "x", tmp_path / "missing", GOLDEN / "flags")
    assert done.code == 1
    document = json.loads(done.out)
    assert document["ok"] is False
    broken, missing, good = document["shards"]
    (finding,) = broken["findings"]
    assert set(finding) == {"path", "offset", "pack", "rule", "found", "expected", "remedy"}
    assert (finding["rule"], finding["offset"], finding["pack"]) == ("F2", 0, None)
    assert (broken["ok"], broken["num_findings"], broken["counts"]["packs"]) == (False, 1, 7)
    assert missing["ok"] is False
    assert "no shard here" in missing["error"]
    assert (good["ok"], good["findings"], good["omitted"]) == (True, [], {})
    assert (good["error"], missing["findings"]) == (None, [])
    assert set(good) == set(broken) == set(missing)


@pytest.mark.parametrize("bad", ["", "empty", "*.none", "x.seq.idx/", "both"])
def test_what_names_no_shard_does_not_keep_others_from_being_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "x", demo_samples())
    for name in ("both/y", "both"):
        write_samples(tmp_path / name, demo_samples())
    for arguments in ((bad, "x"), ("x", bad), (bad,)):
        done = command("verify", *arguments)
        assert (done.code, "x: ok: " in done.out, done.err.count("error: ")) == (1, "x" in arguments, 1)
        document = json.loads(command("verify", "--json", *arguments).out)
        assert document["ok"] is False
        assert [shard["prefix"] for shard in document["shards"]] == list(arguments)
        assert [shard["error"] is None for shard in document["shards"]] == [each == "x" for each in arguments]


def test_a_shard_under_several_spellings_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "x", demo_samples())
    (tmp_path / "link").symlink_to(tmp_path)
    spellings = ["x", "./x", "x.bin", f"{tmp_path}/x", f"../{tmp_path.name}/x", "link/x", ".", "x*"]
    assert command("verify", *spellings).out == command("verify", "x").out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "PREFIX"),
        (("x", "--vocab-size", "0", "--full"), 2, "--vocab-size"),
        (("x", "--vocab-size", "5"), 2, "--full"),
        (("",), 1, "not a prefix"),
        (("empty",), 1, "the folder directly contains no shard"),
        (("*.none",), 1, "no shard and no folder of shards"),
    ],
)
def test_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, says: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    done = command("verify", *arguments)
    assert done.code == code
    assert says in done.err


def test_help_teaches() -> None:
    done = command("verify", "--help")
    assert done.code == 0
    assert "examples:" in done.out
    assert "exit code:" in done.out


def test_it_changes_nothing(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    for path in tmp_path.iterdir():
        path.chmod(0o400)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert command("verify", "--full", tmp_path).code == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(before) == len(SUFFIXES)
