"""Shards at ``msc://``: they are opened, read, cached and checked like local ones, without a server."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import filled, mounted
from object_folders import serve_folder
from sample_packs import Sample, assert_holds, demo_samples, five_files, sample_of, write_samples

from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.cli.main import main
from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError, StorageError
from megatron_sft_idx.formats.packed_dataset import open_dataset
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.shard import Shard, ShardWriter, index_cache
from megatron_sft_idx.shard.opening import missing_files
from megatron_sft_idx.shard.shard_set import ShardSet, find_prefixes
from megatron_sft_idx.storage.local import has_digest
from megatron_sft_idx.storage.remote.transport import CONNECTIONS
from megatron_sft_idx.tokenize import PackOptions, pack_shard


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "bucket"
    made.mkdir()
    return made


@pytest.fixture
def url(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return serve_folder(folder, tmp_path / "msc.json", monkeypatch)


def other_samples() -> list[Sample]:
    """Return packs with the lengths of the demo's packs and other tokens."""
    return [Sample([token + 500 for token in pack.tokens], pack.mask, pack.starts) for pack in demo_samples()]


@pytest.mark.parametrize("backend", ["mmap", "pread", "reopen"])
def test_a_remote_shard_holds_what_the_local_one_does(folder: Path, url: str, backend: Any) -> None:
    header = write_samples(folder / "x", demo_samples())
    shard = Shard(f"{url}/x", backend=backend)
    assert shard.header == header
    assert_holds(shard, demo_samples())
    assert not missing_files(f"{url}/x")
    local = Shard(folder / "x")
    assert shard.get(3, 1, 2).tolist() == local.get(3, 1, 2).tolist()
    assert [ids.tolist() for ids, _ in shard.sequences(3)] == [ids.tolist() for ids, _ in local.sequences(3)]
    assert shard.read(3, 7).tolist() == local.read(3, 7).tolist()
    assert shard.sequence_bounds().tolist() == local.sequence_bounds().tolist()
    with pytest.raises(ValueError, match="read-only"):
        shard[0]["input_ids"][0] = 1
    shard.schedule([1, 0])
    shard.willneed(0, 2)
    shard.dontneed()
    assert_holds(shard, demo_samples())
    assert Shard(f"{url}/x", copy=True)[0]["input_ids"].flags.writeable


def test_an_empty_shard(folder: Path, url: str) -> None:
    write_samples(folder / "x", [], capacity=8)
    assert len(Shard(f"{url}/x")) == 0
    assert verify_shard(f"{url}/x", full=True).ok


def test_a_shard_pickles_as_its_path(folder: Path, url: str) -> None:
    write_samples(folder / "x", demo_samples())
    shard = Shard(f"{url}/x")
    assert len(pickle.dumps(shard)) < 250
    assert_holds(pickle.loads(pickle.dumps(shard)), demo_samples())


def _reads_all(shard: Any, packs: list[Sample], answers: Any) -> None:
    assert_holds(shard, packs)
    answers.put("same")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_reads_it_too(folder: Path, url: str, method: str) -> None:
    write_samples(folder / "x", demo_samples())
    shard = Shard(f"{url}/x")
    assert_holds(shard, demo_samples())  # so that a fork inherits threads and clients
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=_reads_all, args=(shard, demo_samples(), answers))
    process.start()
    assert answers.get(timeout=300) == "same"
    process.join(300)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_missing_file_is_named(folder: Path, url: str, suffix: str) -> None:
    write_samples(folder / "x", demo_samples())
    (folder / f"x{suffix}").unlink()
    with pytest.raises(ShardNotFoundError) as caught:
        Shard(f"{url}/x")
    assert caught.value.missing == missing_files(f"{url}/x") == [f"{url}/x{suffix}"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_was_cut_short_is_refused(folder: Path, url: str, suffix: str) -> None:
    write_samples(folder / "x", demo_samples())
    path = folder / f"x{suffix}"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptShardError, match="F2") as caught:
        Shard(f"{url}/x")
    assert caught.value.path == f"{url}/x{suffix}"


@pytest.mark.parametrize("suffix", [".seq.idx", ".seq.bin"])
def test_index_files_are_held_to_their_checksums(folder: Path, url: str, suffix: str) -> None:
    write_samples(folder / "x", demo_samples())
    path = folder / f"x{suffix}"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptShardError, match="F3"):
        Shard(f"{url}/x")
    assert not list(Path(os.environ["SFT_IDX_CACHE"]).glob("*")) or suffix == ".seq.bin"


def test_a_damaged_copy_in_the_cache_is_passed_over(folder: Path, url: str, tmp_path: Path) -> None:
    write_samples(folder / "x", demo_samples())
    cache = tmp_path / "named"
    assert_holds(Shard(f"{url}/x", index_cache=str(cache)), demo_samples())
    copies = sorted(cache.iterdir())
    assert len(copies) == 2
    for damage in (lambda raw: raw[:-1], lambda raw: bytes(len(raw))):
        damaged = [damage(copy.read_bytes()) for copy in copies]
        for copy, raw in zip(copies, damaged, strict=True):
            copy.write_bytes(raw)
        assert_holds(Shard(f"{url}/x", index_cache=str(cache)), demo_samples())
        assert [copy.read_bytes() for copy in copies] == damaged
    beside = [copy.with_name(copy.name.replace(".index", ".1.index")) for copy in copies]
    assert sorted(cache.iterdir()) == sorted([*copies, *beside])


def test_a_good_copy_is_hashed_once_as_long_as_it_stays_as_it_was(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(folder / "x", demo_samples())
    cache, hashed = tmp_path / "named", list[str]()
    monkeypatch.setattr(index_cache, "has_digest", lambda path, digest: hashed.append(path) or has_digest(path, digest))
    for _ in range(3):
        assert_holds(Shard(f"{url}/x", index_cache=str(cache)), demo_samples())
    copies = sorted(map(str, cache.iterdir()))
    assert [hashed.count(copy) for copy in copies] == [1, 1]
    os.utime(copies[0], (0, 0))
    assert_holds(Shard(f"{url}/x", index_cache=str(cache)), demo_samples())
    assert [hashed.count(copy) for copy in copies] == [2, 1]
    assert time.time() - os.stat(copies[0]).st_mtime < 60  # it is in use


def test_copies_that_nobody_opened_for_a_month_are_removed(folder: Path, url: str, tmp_path: Path) -> None:
    cache = tmp_path / "named"
    write_samples(folder / "x", demo_samples())
    Shard(f"{url}/x", index_cache=str(cache))
    old = sorted(cache.iterdir())
    strangers = [cache / "notes.index", cache / f"{'0' * 32}.index", cache / "folder"]
    strangers[2].mkdir()
    for path in strangers[:2]:
        path.write_text("mine")
    for path in (*old, *strangers):
        os.utime(path, (0, 0))
    write_samples(folder / "y", demo_samples(40))
    assert_holds(Shard(f"{url}/y", index_cache=str(cache)), demo_samples(40))
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in strangers)
    assert_holds(Shard(f"{url}/x", index_cache=str(cache)), demo_samples())


def test_a_shard_that_replaces_another_never_meets_its_index(folder: Path, url: str) -> None:
    write_samples(folder / "x", demo_samples())
    assert_holds(Shard(f"{url}/x"), demo_samples())
    write_samples(folder / "x", demo_samples(11), overwrite=True)
    assert_holds(Shard(f"{url}/x"), demo_samples(11))


def test_a_shard_replaced_under_a_reader_is_an_error(folder: Path, url: str) -> None:
    write_samples(folder / "x", demo_samples())
    shard = Shard(f"{url}/x")
    state = pickle.dumps(shard)
    assert_holds(shard, demo_samples())
    write_samples(folder / "x", other_samples(), overwrite=True)
    for _ in range(2):
        with pytest.raises(FormatError, match="replaced"):
            shard[0]
    with pytest.raises(FormatError, match="this dataset was opened with"):
        pickle.loads(state)[0]


def test_a_shorter_object_is_not_waited_for(folder: Path, url: str) -> None:
    write_samples(folder / "x", demo_samples())
    shard = Shard(f"{url}/x")
    raw = (folder / "x.bin").read_bytes()
    (folder / "x.bin").write_bytes(raw[:-1])
    with pytest.raises(FormatError, match="replaced after it was opened"):
        shard[-1]


def test_an_object_that_is_gone_is_an_error(folder: Path, url: str) -> None:
    write_samples(folder / "x", demo_samples())
    shard = Shard(f"{url}/x")
    (folder / "x.bin").unlink()
    with pytest.raises(StorageError, match="no such object") as caught:
        shard[0]
    assert caught.value.missing


def test_what_killed_processes_have_fetched_is_taken_by_the_next(folder: Path, url: str, tmp_path: Path) -> None:
    write_samples(folder / "x", demo_samples())
    cache = tmp_path / "named"
    Shard(f"{url}/x", index_cache=str(cache))
    for copy in list(cache.iterdir()):
        copy.rename(cache / f".{copy.name}.tmp")
    assert_holds(Shard(f"{url}/x", index_cache=str(cache)), demo_samples())
    assert len(list(cache.iterdir())) == 2


def test_a_shard_copied_onto_itself_keeps_its_files(folder: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples(folder / "x", demo_samples())  # its objects have no checksums, so they cannot be checked
    assert main(["copy", f"{url}/x", url + "/", "--overwrite"]) == 1
    assert "both SRC and DST" in capsys.readouterr().err
    assert_holds(Shard(f"{url}/x"), demo_samples())


def test_a_cache_that_cannot_be_written_is_said(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(folder / "x", demo_samples())
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    for cache in (str(tmp_path / "file/inside"), "s3://bucket/cache"):
        with pytest.raises(FormatError, match="SFT_IDX_CACHE"):
            Shard(f"{url}/x", index_cache=cache)
    assert not Path("s3:").exists()


def test_without_a_home_a_folder_that_is_named_serves(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(folder / "x", demo_samples())
    for name in ("HOME", "XDG_CACHE_HOME", "SFT_IDX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # a user id without an entry, as in containers
    assert_holds(Shard(f"{url}/x", index_cache=str(tmp_path / "cache")), demo_samples())
    with pytest.raises(FormatError, match="choose another folder with SFT_IDX_CACHE"):
        Shard(f"{url}/x")


def test_a_cache_on_a_full_disk_is_said_and_nothing_is_left(folder: Path, url: str) -> None:
    write_samples(folder / "x", demo_samples(400))
    with mounted("size=1m") as disk:
        with filled(disk, 0), pytest.raises(FormatError, match=r"cannot be kept here \(No space left"):
            Shard(f"{url}/x", index_cache=str(disk))
        assert not list(disk.iterdir())
        assert_holds(Shard(f"{url}/x", index_cache=str(disk)), demo_samples(400))


def test_a_full_disk_under_an_upload_is_named(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples(tmp_path / "x", demo_samples(400))
    with mounted("size=1m") as disk:
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        with filled(disk, 0):
            assert main(["copy", str(tmp_path / "x"), f"{url}/x"]) == 1
        assert f"error: {disk}/megatron-sft-idx-" in capsys.readouterr().err
    assert not list(folder.iterdir())


def test_shards_of_a_set_are_opened_at_once(folder: Path, url: str) -> None:
    for number in range(40):
        write_samples(folder / f"s-{number}", demo_samples(1 + number % 3))
    shards = ShardSet.open(f"{url}/", same_capacity=False)
    wanted = [39, 0, 7, *range(10, 30)]
    found = shards.open_shards(wanted)
    assert [shard.prefix for shard in found] == [f"{url}/s-{number}" for number in wanted]
    assert shards.open_shards(wanted) == found
    os.unlink(folder / "s-3.bin")
    with pytest.raises(ShardNotFoundError, match=r"s-3\.bin"):
        shards.open_shards(range(40))


def test_folders_globs_and_lists(folder: Path, url: str) -> None:
    write_samples(folder / "top", demo_samples())
    assert find_prefixes(url) == find_prefixes(f"{url}/") == [f"{url}/top"]
    for name in ("a/t-10", "a/t-9", "b/t-1", "b/deep/t-1", "a/u-1"):
        write_samples(folder / name, demo_samples(3))
    (folder / "a/notes.txt").write_text("no shard")
    assert find_prefixes(f"{url}/a") == find_prefixes(f"{url}/a/") == [f"{url}/a/{n}" for n in ("t-9", "t-10", "u-1")]
    assert find_prefixes(f"{url}/a/t-*") == [f"{url}/a/t-9", f"{url}/a/t-10"]
    assert find_prefixes(f"{url}/*/t-1*") == [f"{url}/a/t-10", f"{url}/b/t-1"]
    assert find_prefixes(f"{url}/[ab]") == [f"{url}/a/t-9", f"{url}/a/t-10", f"{url}/a/u-1", f"{url}/b/t-1"]
    assert find_prefixes(f"{url}/a/t-9.bin") == [f"{url}/a/t-9"]
    assert find_prefixes([f"{url}/b", str(folder / "a/u-1")]) == [f"{url}/b/t-1", str(folder / "a/u-1")]
    for nothing in (f"{url}/c/", f"{url}/a/w-*"):
        with pytest.raises(ShardNotFoundError):
            find_prefixes(nothing)
    with pytest.raises(ShardNotFoundError, match=f"missing {url}/none.bin"):
        Shard(find_prefixes(f"{url}/none")[0])
    assert len(ShardSet.open(f"{url}/a")) == 9
    for lost in (".seq.idx", ".bin"):
        (folder / f"a/t-9{lost}").unlink()
    (folder / "a/_producer.building").touch()
    found = [f"{url}/a/t-9", f"{url}/a/t-10"]
    for source in (f"{url}/a/t-*", f"{url}/a/t-[0-9]*"):
        assert find_prefixes(source, incomplete=True) == found
        assert find_prefixes(source) == found[1:]
    assert find_prefixes(f"{url}/a/t-9", incomplete=True) == find_prefixes(f"{url}/a/t-?", incomplete=True) == found[:1]
    for source in (f"{url}/a", f"{url}/a/", f"{url}/[a]/"):
        assert find_prefixes(source, incomplete=True) == [*found, f"{url}/a/u-1"]


def test_many_shards_that_are_missing_are_an_error_and_no_standstill(folder: Path, url: str) -> None:
    write_samples(folder / "x", demo_samples())
    with pytest.raises(ShardNotFoundError, match="none-0"):
        ShardSet([f"{url}/none-{i}" for i in range(3 * CONNECTIONS)])


def test_a_set_of_local_and_remote_shards(folder: Path, url: str) -> None:
    write_samples(folder / "a", demo_samples())
    write_samples(folder / "b", other_samples())
    shards = ShardSet([f"{url}/a", str(folder / "b")])
    assert_holds(shards, demo_samples() + other_samples())
    assert_holds(pickle.loads(pickle.dumps(shards)), demo_samples() + other_samples())
    assert shards.fingerprint == ShardSet([str(folder / "a"), f"{url}/b"]).fingerprint


def test_verify_and_open_dataset(folder: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples(folder / "s/x", demo_samples())
    write_samples(folder / "s/y", other_samples())
    assert_holds(open_dataset(f"{url}/s"), demo_samples() + other_samples())
    assert_holds(open_dataset(f"{url}/s/x", format="sft-idx", backend="pread"), demo_samples())
    for options in ([], ["--full"]):
        assert main(["verify", *options, f"{url}/s"]) == 0
        assert main(["verify", *options, f"{url}/s/x", f"{url}/s/[y]*"]) == 0
    path = folder / "s/y.bin"
    path.write_bytes(path.read_bytes()[::-1])
    (folder / "s/x.idx").unlink()
    capsys.readouterr()
    assert main(["verify", f"{url}/s/y"]) == 0
    assert main(["verify", "--full", f"{url}/s"]) == 1
    shown = capsys.readouterr().out
    assert f"{url}/s/y.bin" in shown
    assert f"{url}/s/x.idx" in shown


def test_what_can_not_be_done_remotely_says_so(
    folder: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples(folder / "x", demo_samples(), capacity=64)
    with pytest.raises(FormatError, match="local disk"):
        ShardWriter(f"{url}/new")
    for refused in (
        ["rebuild", f"{url}/x"],
        ["merge", f"{url}/x", "--output-prefix", str(tmp_path / "m")],
        ["split", f"{url}/x", "--shards", "2", "--output-prefix", str(tmp_path / "m")],
        ["pack", f"{url}/x", "--seq-length", "64", "--output-prefix", str(tmp_path / "m")],
    ):
        with pytest.raises(SystemExit) as ended:
            sys.exit(main(refused))
        assert ended.value.code
        assert "megatron-sft-idx copy" in capsys.readouterr().err
    for work in (
        lambda: rebuild(f"{url}/x"),
        lambda: merge([f"{url}/x"], str(tmp_path / "m")),
        lambda: pack_shard(Shard(f"{url}/x"), str(tmp_path / "m"), PackOptions(capacity=64)),
    ):
        with pytest.raises(FormatError, match="needs files on a local disk"):
            work()
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"x{suffix}" for suffix in SUFFIXES)


def test_a_large_shard_is_verified_in_windows(folder: Path, url: str) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 9, 40_000)
    pack = sample_of([20_000, 20_000], lambda p: 1, lambda p: int(ids[p]))
    write_samples(folder / "x", [pack] * 60, capacity=40_000)
    assert (folder / "x.bin").stat().st_size > 4 << 20
    assert verify_shard(f"{url}/x", full=True).ok
    assert verify_shard(f"{url}/x", full=True) == verify_shard(f"{url}/x", full=True)
    shutil.copy(folder / "x.bin", folder / "y")
    raw = bytearray((folder / "x.bin").read_bytes())
    raw[-1] ^= 64
    (folder / "x.bin").write_bytes(raw)
    assert not verify_shard(f"{url}/x", full=True).ok
    assert five_files(folder / "x")[".bin"] == bytes(raw)
