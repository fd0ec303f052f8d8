"""``copy`` between folders, and to a store that is a folder: kept files, errors, resuming."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import MADE, command, preprocess
from kills import killed_at, kills_at
from object_folders import serve_folder
from sample_packs import Sample, demo_samples, five_files, write_samples

from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout.files import SUFFIXES, ShardPaths
from megatron_sft_idx.packs import transfer
from megatron_sft_idx.packs.buckets import copy_shard
from megatron_sft_idx.packs.destination import Destination
from megatron_sft_idx.packs.transfer import CopySource, shard_nbytes
from megatron_sft_idx.shard import Shard, ShardWriter, remove_shard, write_column
from megatron_sft_idx.shard.publication import is_set_aside
from megatron_sft_idx.storage.remote import RemoteStore


@pytest.fixture
def shard(tmp_path: Path) -> str:
    write_samples(tmp_path / "here/train", demo_samples())
    return str(tmp_path / "here/train")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "store").mkdir()
    return serve_folder(tmp_path / "store", tmp_path / "msc.json", monkeypatch)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@kills_at
def test_a_copy_killed_at_any_step_is_no_shard_or_a_whole_one_and_the_next_ends_it(
    shard: str, tmp_path: Path, stride: int
) -> None:
    step, killed = stride // 2, True
    while killed:
        target = tmp_path / f"to-{step}/train"
        killed = killed_at(step, lambda target=target: copy_shard(shard, str(target)))
        if (target.parent / "train.seq.idx").exists():
            assert five_files(target) == five_files(shard)
        copy_shard(shard, str(target))
        assert five_files(target) == five_files(shard)
        assert names(target.parent) == {"train" + suffix for suffix in SUFFIXES}
        step += stride
    assert step > 10


@kills_at
def test_replacing_killed_at_any_step_never_shows_a_mixture(shard: str, tmp_path: Path, stride: int) -> None:
    write_samples(tmp_path / "other", demo_samples(4))
    old, new = five_files(tmp_path / "other"), five_files(shard)
    step, killed = stride // 2, True
    while killed:
        target = tmp_path / f"to-{step}/train"
        copy_shard(str(tmp_path / "other"), str(target))
        killed = killed_at(step, lambda target=target: copy_shard(shard, str(target), overwrite=True))
        if (target.parent / "train.seq.idx").exists():
            assert five_files(target) in (old, new)
        copy_shard(shard, str(target), overwrite=True)
        assert five_files(target) == new
        step += stride


@pytest.mark.parametrize("work", ["replacing", "removing"])
@kills_at
def test_a_copy_keeps_no_file_that_a_killed_writer_was_about_to_change(
    shard: str, tmp_path: Path, work: str, stride: int
) -> None:
    """The old shard differs only in masks and header."""
    masked = [Sample(each.tokens, [0] * len(each.tokens), each.starts) for each in demo_samples()]

    def change(target: Path) -> None:
        if work == "replacing":
            write_samples(target, masked, overwrite=True, durable=True)
        else:
            remove_shard(ShardPaths.of(target))

    step, killed = stride // 2, True
    while killed:
        target = tmp_path / f"to-{step}/train"
        copy_shard(shard, str(target))
        killed = killed_at(step, lambda target=target: change(target))
        copy_shard(shard, str(target), overwrite=work == "replacing")
        assert five_files(target) == five_files(shard)
        step += stride
    assert step > 5


@kills_at
def test_what_a_killed_copy_kept_is_in_no_later_command_s_way(shard: str, tmp_path: Path, stride: int) -> None:
    """It copies only masks and header, and keeps the other files."""
    write_samples(
        tmp_path / "old", [Sample(each.tokens, [0] * len(each.tokens), each.starts) for each in demo_samples()]
    )
    step, killed = stride // 2, True
    while killed:
        target = tmp_path / f"to-{step}/train"
        copy_shard(str(tmp_path / "old"), str(target))
        killed = killed_at(step, lambda target=target: copy_shard(shard, str(target), overwrite=True))
        write_samples(target, demo_samples(3), overwrite=True)
        assert len(Shard(target)) == 3
        step += stride
    assert step > 10


def test_attached_columns_are_replaced_together(tmp_path: Path) -> None:
    """A running or killed copy never shows a column of the source next to an old one."""
    for number, name in enumerate(("old", "new")):
        write_samples(tmp_path / name, demo_samples())
        for column in ("one", "two"):
            write_column(tmp_path / name, column, np.full(7, number), per="pack")
    step, killed, seen = 0, True, set()
    while killed:
        target = tmp_path / f"to-{step}/x"
        copy_shard(str(tmp_path / "old"), str(target))
        killed = killed_at(step, lambda target=target: copy_shard(str(tmp_path / "new"), str(target), overwrite=True))
        if Path(f"{target}.seq.idx").exists():
            columns = Shard(target).columns
            seen.add((columns["one"].values[0], columns["two"].values[0]))
        step += 1
    assert seen == {(0, 0), (1, 1)}


def test_a_copy_of_columns_removes_no_remains_without_overwrite(tmp_path: Path) -> None:
    for name in ("from", "to"):
        write_samples(tmp_path / name, demo_samples())
    for column in ("one", "two"):
        write_column(tmp_path / "from", column, np.arange(7), per="pack")
    with ShardWriter(tmp_path / "to", overwrite=True) as writer:
        writer.add_pack([1, 2], [1, 0], [0])
        writer.flush()
        writer.suspend()
    with pytest.raises(FormatError, match="left by an interrupted build"):
        copy_shard(str(tmp_path / "from"), str(tmp_path / "to"))
    assert (tmp_path / "to.building").exists()
    for _ in range(2):  # the second run finds all files correct
        copy_shard(str(tmp_path / "from"), str(tmp_path / "to"), overwrite=True)
        assert not (tmp_path / "to.building").exists()
        ShardWriter(tmp_path / "to", overwrite=True).suspend()


def test_a_copy_keeps_no_file_that_another_command_changes(
    shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, compare = str(tmp_path / "to"), transfer._compare
    copy_shard(shard, target)
    os.unlink(f"{target}.loss.bin")

    def compare_and_replace(*arguments: Any, **options: Any) -> Any:
        found = compare(*arguments, **options)
        write_samples(target, demo_samples(3), overwrite=True)
        return found

    monkeypatch.setattr(transfer, "_compare", compare_and_replace)
    with pytest.raises(FormatError, match=r"another command wrote to this prefix|already exist"):
        copy_shard(shard, target)
    monkeypatch.undo()
    assert len(Shard(target)) == 3
    copy_shard(shard, target, overwrite=True)
    assert five_files(target) == five_files(shard)


@kills_at
def test_a_copy_that_lost_a_file_before_its_renames_is_made_anew(shard: str, tmp_path: Path, stride: int) -> None:
    step, found = stride // 2, 0
    while killed_at(step, lambda target=tmp_path / f"{step}/x": copy_shard(shard, str(target))):
        target, step = tmp_path / f"{step}/x", step + stride
        if not (lost := Path(f"{target}.building/.loss.bin")).exists() or not is_set_aside(str(target)):
            continue
        found += 1
        lost.unlink()
        with pytest.raises(FormatError, match="with overwrite"):
            copy_shard(shard, str(target))
        copy_shard(shard, str(target), overwrite=True)
        assert five_files(target) == five_files(shard)
    assert found > 1 // stride


def test_progress_ends_at_the_size_of_the_shard_whatever_was_there(shard: str, tmp_path: Path) -> None:
    size = sum(map(len, five_files(shard).values()))
    for missing in [SUFFIXES, (".bin",), (".seq.idx", ".idx"), ()]:
        for suffix in missing:
            (tmp_path / f"back{suffix}").unlink(missing_ok=True)
        (tmp_path / "back.bin.copy").write_bytes(b"not of this shard")
        told: list[int] = []
        copy_shard(shard, str(tmp_path / "back"), on_progress=told.append)
        assert sum(told) == size
        assert five_files(tmp_path / "back") == five_files(shard)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_damaged_source_is_refused(shard: str, store: str, tmp_path: Path, suffix: str) -> None:
    path = Path(shard + suffix)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    for target in (str(tmp_path / "back/x"), f"{store}/x"):
        told: list[int] = []
        with pytest.raises(CorruptShardError, match="rule F3"):
            copy_shard(shard, target, on_progress=told.append)
        assert sum(filter(None, map(abs, told))) <= sum(os.path.getsize(shard + each) for each in SUFFIXES)
    assert not (tmp_path / "back").exists() or not names(tmp_path / "back") & {"x" + each for each in SUFFIXES}
    assert "x.seq.idx" not in names(tmp_path / "store")
    path.write_bytes(raw[:-1])
    with pytest.raises(CorruptShardError):
        CopySource(shard)


def test_a_missing_source_says_what_is_missing(shard: str, store: str) -> None:
    os.unlink(shard + ".loss.bin")
    with pytest.raises(ShardNotFoundError, match=r"missing .*train\.loss\.bin \(rule F1\)"):
        CopySource(shard)
    with pytest.raises(ShardNotFoundError, match=r"no shard here, missing .*x\.bin and the other four"):
        CopySource(f"{store}/x")


def test_a_build_at_work_at_the_target_keeps_copies_out(shard: str, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "there/train")
    writer.add_pack([1, 2], [1, 0], [0])
    writer.flush()
    with pytest.raises(FormatError, match="another process is writing this output"):
        copy_shard(shard, str(tmp_path / "there/train"), overwrite=True)
    writer.suspend()
    with pytest.raises(FormatError, match="left by an interrupted build"):
        copy_shard(shard, str(tmp_path / "there/train"))
    copy_shard(shard, str(tmp_path / "there/train"), overwrite=True)
    assert names(tmp_path / "there") == {"train" + suffix for suffix in SUFFIXES}


@pytest.mark.parametrize(
    "claim", [b"", b"[]", b"{", b'{"version": 2}', b'{"version": 1, "shard_id": 5}', b"x" * 5000, b"[" * 4000]
)
def test_an_object_that_is_no_claim_is_never_replaced(shard: str, store: str, tmp_path: Path, claim: bytes) -> None:
    (tmp_path / "store/x.building").write_bytes(claim)
    for overwrite in (False, True):
        with pytest.raises(FormatError, match="an object exists here that no upload of this package wrote"):
            copy_shard(shard, f"{store}/x", overwrite=overwrite)
        assert (tmp_path / "store/x.building").read_bytes() == claim
    (tmp_path / "store/x.building").unlink()
    copy_shard(shard, f"{store}/x")
    assert five_files(tmp_path / "store/x") == five_files(shard)


def test_an_upload_whose_last_object_is_gone_again_is_an_error(
    shard: str, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = RemoteStore.create
    monkeypatch.setattr(RemoteStore, "create", lambda *args: not args[1].endswith(".seq.idx") and create(*args))
    with pytest.raises(FormatError, match=r"x\.seq\.idx: changed since this command uploaded it"):
        copy_shard(shard, f"{store}/x")
    assert not (tmp_path / "store/x.seq.idx").exists()


def test_the_size_of_a_remote_shard_is_that_of_its_own_files(shard: str, store: str, tmp_path: Path) -> None:
    copy_shard(shard, f"{store}/x")
    (tmp_path / "store/x.y.source.col").write_bytes(b"of the shard x.y")
    assert shard_nbytes(f"{store}/x") == sum(map(len, five_files(shard).values()))


def test_staged_output_refuses_before_the_work(shard: str, store: str, tmp_path: Path) -> None:
    output = Destination(f"{store}/x", staging=str(tmp_path / "staging"))
    output.prepare()
    copy_shard(shard, output.local)
    output.prepare()
    output.publish()
    assert five_files(tmp_path / "store/x") == five_files(shard)
    assert not (tmp_path / "staging").exists()
    assert names(tmp_path / "store") == {"x" + suffix for suffix in SUFFIXES}
    with pytest.raises(FormatError, match="a shard already exists"):
        output.prepare()
    Destination(f"{store}/x", staging=str(tmp_path / "staging"), overwrite=True).prepare()


def test_the_next_run_sends_what_an_earlier_one_had_built(store: str, tmp_path: Path) -> None:
    output = Destination(f"{store}/x", staging=str(tmp_path / "staging"))
    output.prepare()
    assert preprocess(Path(output.local)).code == 0
    built = five_files(output.local)
    to = ("--output-prefix", f"{store}/x", "--staging", tmp_path / "staging")
    for _ in range(2):  # the second run finds it in the store
        outcome = preprocess(tmp_path, *to)
        assert (outcome.code, f"found {store}/x" in outcome.out) == (0, True), outcome.err
        assert five_files(tmp_path / "store/x") == built
        assert not (tmp_path / "staging").exists()
    other = preprocess(tmp_path, *to, "--seed", 3)
    assert (other.code, "packing seed was 0, is 3" in other.err) == (1, True)
    assert five_files(tmp_path / "store/x") == built


def test_a_corpus_in_the_way_is_told_before_the_work(shard: str, store: str, tmp_path: Path) -> None:
    copy_shard(shard, f"{store}/x.unpacked")
    to = ("--output-prefix", f"{store}/x", "--staging", tmp_path / "staging")
    refused = preprocess(tmp_path, *to, "--keep-corpus")
    assert (refused.code, refused.out) == (1, "")
    assert f"{store}/x.unpacked: a complete shard already exists here, and was made differently" in refused.err
    assert names(tmp_path / "staging") == set()
    assert preprocess(tmp_path, *to).code == 0  # writes no corpus
    assert five_files(tmp_path / "store/x.unpacked") == five_files(shard)
    assert preprocess(tmp_path, *to, "--keep-corpus", "--overwrite").code == 0
    assert five_files(tmp_path / "store/x.unpacked") != five_files(shard)


def test_pack_and_merge_write_to_a_store(shard: str, store: str, tmp_path: Path) -> None:
    staging = ("--staging", tmp_path / "staging")
    for arguments in (("pack", shard, "--seq-length", 64), ("merge", shard, shard)):
        name = arguments[0]
        local = command(*arguments, "--output-prefix", tmp_path / f"local/{name}")
        remote = command(*arguments, "--output-prefix", f"{store}/out/{name}", *staging)
        assert (local.code, remote.code) == (0, 0), remote.err
        assert f"wrote {store}/out/{name}" in remote.out
        assert five_files(tmp_path / f"store/out/{name}") == five_files(tmp_path / f"local/{name}")
    assert not (tmp_path / "staging").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("split", "{url}/x", "--shards", "2", "--output-prefix", "y"),
        ("split", "x", "--shards", "2", "--output-prefix", "{url}/y"),
        ("merge", "{url}/x", "--output-prefix", "y"),
        ("convert", "{url}/x", "y", "--to", "parquet"),
        ("convert", "x", "{url}/y", "--to", "sft-idx"),
        ("rebuild", "{url}/x"),
        ("pack", "{url}/x", "--seq-length", "8", "--output-prefix", "y"),
        ("create-raw-index", "{url}/x.jsonl"),
    ],
)
def test_what_cannot_be_done_in_a_store_names_copy(arguments: tuple[str, ...]) -> None:
    outcome = command(*(each.format(url="s3://bucket") for each in arguments))
    assert outcome.code == 2
    assert "transfer the shard from or to the bucket with megatron-sft-idx copy" in outcome.err


def test_several_shards_go_to_a_store_and_those_that_did_not_arrive_are_named(store: str, tmp_path: Path) -> None:
    arguments = "--packing", "sequential", "--output-shards", 3
    assert preprocess(tmp_path / "local/x", *arguments).code == 0
    # Files of another shard without .seq.idx.
    copy_shard(str(tmp_path / "local/x-00000-of-00003"), f"{store}/x-00001-of-00003")
    foreign = tmp_path / "store/x-00001-of-00003.bin"
    for suffix in MADE:
        if suffix != ".bin":
            (tmp_path / f"store/x-00001-of-00003{suffix}").unlink()
    failed = preprocess(
        tmp_path, "--output-prefix", f"{store}/x", "--staging", tmp_path / "staging", *arguments
    )  # fmt: skip
    assert (failed.code, "x-00001-of-00003.bin already exist" in failed.err) == (1, True), failed
    left = re.findall(rf"megatron-sft-idx copy (\S+) {store}/x(-\S+)", failed.err)
    assert [suffix for _, suffix in left] == ["-00001-of-00003", "-00002-of-00003"]
    foreign.unlink()
    for local, suffix in left:
        copy_shard(local, f"{store}/x{suffix}")
    for number in range(3):
        name = f"x-{number:05}-of-00003"
        assert five_files(tmp_path / "store" / name) == five_files(tmp_path / "local" / name)


@pytest.mark.parametrize("target", ["s3://bucket", "s3://", "s3:///x", "gs://bucket/x", "S3://bucket/x"])
def test_a_store_that_is_named_wrongly_is_no_local_folder(
    shard: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = names(tmp_path)
    outcome = command("copy", shard, target)
    assert names(tmp_path) == before
    assert outcome.code == 1
    assert outcome.err.startswith(f"megatron-sft-idx: error: {target.removesuffix('/x')}"), outcome.err


def test_destinations_that_cannot_be(shard: str, tmp_path: Path) -> None:
    write_samples(tmp_path / "there/train", demo_samples(2))
    two = (shard, tmp_path / "there/train")
    assert "a single prefix, but there are 2 shards; end it with /" in command("copy", *two, tmp_path / "x").err
    assert "two of the shards have the name train" in command("copy", *two, f"{tmp_path}/out/").err
    assert not (tmp_path / "out").exists()
