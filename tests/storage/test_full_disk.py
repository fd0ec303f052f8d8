"""Disks that are really full, over quota or read-only: a clear error, nothing is published, and space is freed."""

from __future__ import annotations

import random
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chats import TOKENIZER, command, files_of, write_rows
from disks import NOBODY, PAGE_NBYTES, filled, free_nbytes, in_a_child, mounted
from media_samples import MediaSample, item_of, write_media
from sample_packs import Sample, assert_holds, demo_samples, five_files, folder_of, sample_of, write_samples

from megatron_sft_idx.packs import destination
from megatron_sft_idx.shard import Shard

ROWS = [{"prompt": f"Say {i}", "completion": f"{i}, as you like it. " * (1 + i % 5)} for i in range(300)]
CAPACITY = 256


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide an unpacked shard with files of some pages each."""
    prefix = tmp_path_factory.mktemp("corpus") / "c"
    write_samples(prefix, unpacked_samples())
    return prefix


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the same with images, mostly different ones."""
    prefix, draw = tmp_path_factory.mktemp("shown") / "c", random.Random(0)
    files = [draw.randbytes(draw.randrange(1, 400)) for _ in range(300)]
    write_media(
        prefix, [MediaSample(pack, [item_of("image", 0, 1, draw.choice(files))]) for pack in unpacked_samples()]
    )
    return prefix


def unpacked_samples() -> list[Sample]:
    lengths = np.random.default_rng(0).integers(1, CAPACITY // 4, 400).tolist()
    return [sample_of([n], lambda i: i % 2, lambda i, n=n: n + i) for n in lengths]


@pytest.fixture
def disk() -> Iterator[Path]:
    with mounted("size=8m") as folder:
        yield folder


def pack(corpus: Path, prefix: Path, *more: object) -> tuple[int, str]:
    done = command("pack", corpus, "--seq-length", CAPACITY, "--output-prefix", prefix, *more)
    assert "Traceback" not in done.err
    return done.code, done.err


def sweep(disk: Path, needed: int, steps: int) -> list[int]:
    """Return numbers of free bytes to try, from none to almost enough."""
    pages = -(-needed // PAGE_NBYTES)
    return sorted({PAGE_NBYTES * (pages * step // steps) for step in range(steps)})


def readable_by_all(corpus: Path, disk: Path) -> Path:
    """Copy the corpus to the disk. Packing it once imports all modules, which another user may not be able to read."""
    assert pack(corpus, disk / "warm")[0] == 0
    copy = disk / "corpus"
    for suffix, data in five_files(corpus).items():
        Path(f"{copy}{suffix}").write_bytes(data)
    return copy


@pytest.mark.parametrize(
    ("source", "fails_at"), [("corpus", ()), ("shown", ("/.media.data", "/.media.items", "/items"))]
)
def test_packing_onto_a_disk_that_fills_up_at_every_point(
    source: str, fails_at: tuple[str, ...], disk: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    corpus = request.getfixturevalue(source)
    # Other programs fill the disk after the check for space.
    monkeypatch.setattr(destination, "require_space", lambda *_: None)
    empty = free_nbytes(disk)
    assert pack(corpus, disk / "x")[0] == 0
    # Until the end, the logs and two small files are next to the shard's files.
    needed = empty - free_nbytes(disk) + (8 if source == "corpus" else 14) * PAGE_NBYTES
    wanted = {path.name: path.read_bytes() for path in disk.iterdir()}
    for path in disk.iterdir():
        path.unlink()
    failed = set()
    for left in sweep(disk, needed, 40):
        with filled(disk, left):
            before = free_nbytes(disk)
            code, said = pack(corpus, disk / "x")
            if code == 0:
                assert left > needed - (12 if source == "corpus" else 20) * PAGE_NBYTES
                [path.unlink() for path in disk.glob("x.*")]
                continue
            assert (code, "No space left on device" in said) == (1, True), said
            failed.add(said.split(": ")[2].removeprefix(str(disk)))
            assert folder_of(disk) == ["ballast"]
            assert free_nbytes(disk) == before
    assert {"/x.building/.bin", "/x.building/.idx", *(f"/x.building{name}" for name in fails_at)} <= failed, failed
    assert pack(corpus, disk / "x")[0] == 0
    assert {path.name: path.read_bytes() for path in disk.iterdir()} == wanted


def test_a_full_disk_leaves_the_shard_that_was_to_be_replaced(corpus: Path, disk: Path) -> None:
    old = demo_samples(50)
    write_samples(disk / "x", old)
    for left in (0, 4 * PAGE_NBYTES, 12 * PAGE_NBYTES):
        with filled(disk, left):
            before = free_nbytes(disk)
            code, said = pack(corpus, disk / "x", "--overwrite")
            assert (code, "No space left on device" in said) == (1, True), said
            assert free_nbytes(disk) == before
        assert_holds(Shard(disk / "x"), old)
    assert pack(corpus, disk / "x", "--overwrite")[0] == 0


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_preprocessing_onto_a_full_disk(tmp_path: Path, disk: Path, workers: int) -> None:
    source = write_rows(tmp_path / "rows.jsonl", ROWS)
    arguments = ["--input", source, "--tokenizer-model", TOKENIZER, "--seq-length", CAPACITY, "--workers", workers]
    outcomes = set()
    assert command("preprocess", *arguments, "--output-prefix", tmp_path / "x").code == 0
    needed = sum(map(len, files_of(tmp_path / "x").values()))
    # Twice the space is needed: for the tokenised corpus and for the packs.
    for left in sweep(disk, 2 * needed, 8 if workers == 0 else 1):
        with filled(disk, left):
            before = free_nbytes(disk)
            done = command("preprocess", *arguments, "--output-prefix", disk / "x")
            assert done.code == 1, done
            assert f"error: {disk}/x" in done.err
            assert "No space left on device" in done.err
            assert "Traceback" not in done.err
            # Hours of tokenizing are not lost: complete parts stay, and the error reports that.
            kept = [disk / "x.building"] if f"kept in {disk}/x.building" in done.err else []
            assert sorted(disk.iterdir()) == [disk / "ballast", *kept]
            for folder in kept:
                shutil.rmtree(folder)
            outcomes.add(len(kept))
            assert free_nbytes(disk) == before
    assert outcomes == ({0, 1} if workers == 0 else {0})
    assert command("preprocess", *arguments, "--output-prefix", disk / "x").code == 0
    assert files_of(disk / "x") == files_of(tmp_path / "x")


def test_a_quota_is_an_error_like_a_full_disk(corpus: Path) -> None:
    with mounted("size=8m,usrquota,usrquota_block_hardlimit=65536") as disk:

        def over_quota() -> None:
            code, said = pack(ours, disk / "x")
            assert (code, "quota exceeded" in said) == (1, True), said
            assert f"error: {disk}/x" in said
            assert not list(disk.glob("x*"))

        ours = readable_by_all(corpus, disk)
        empty = free_nbytes(disk)
        in_a_child(over_quota, user=NOBODY)
        assert free_nbytes(disk) == empty


@pytest.mark.parametrize("limit", [1, 1000, 8192, 20_000])
def test_a_file_size_limit_cuts_a_write_short_and_ends_the_build(corpus: Path, tmp_path: Path, limit: int) -> None:
    """The kernel accepts part of the last write (a short write) and rejects the next one."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        code, said = pack(corpus, tmp_path / "x")
        assert (code, "File too large" in said) == (1, True), said
        assert f"error: {tmp_path}/x" in said

    in_a_child(limited)
    assert folder_of(tmp_path) == []


def test_a_disk_that_became_read_only(corpus: Path, disk: Path) -> None:
    samples = demo_samples()
    write_samples(disk / "x", samples)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert_holds(Shard(disk / "x"), samples)
    assert_holds(Shard(disk / "x", backend="pread"), samples)
    for name, more in (("y", ()), ("x", ("--overwrite",))):
        code, said = pack(corpus, disk / name, *more)
        assert (code, "Read-only file system" in said) == (1, True), said
        assert f"error: {disk}/" in said
    assert len(folder_of(disk)) == 5


def test_a_folder_of_another_user(corpus: Path, disk: Path) -> None:
    samples = demo_samples()
    (disk / "data").mkdir()
    write_samples(disk / "data" / "x", samples)
    ours = readable_by_all(corpus, disk)
    (disk / "data").chmod(0o555)

    def read_only() -> None:
        for backend in ("mmap", "pread"):
            assert_holds(Shard(disk / "data" / "x", backend=backend), samples)  # type: ignore[arg-type]
        for name, more in (("y", ()), ("x", ("--overwrite",)), ("new/x", ())):
            code, said = pack(ours, disk / "data" / name, *more)
            assert (code, "Permission denied" in said) == (1, True), said
            assert f"error: {disk}/data/" in said

    in_a_child(read_only, user=NOBODY)
    assert len(folder_of(disk / "data")) == 5


def test_a_shard_that_may_not_be_read(disk: Path) -> None:
    write_samples(disk / "x", demo_samples())
    (disk / "x.loss.bin").chmod(0o000)

    def forbidden() -> None:
        with pytest.raises(OSError, match=r"Permission denied.*x\.loss\.bin"):
            Shard(disk / "x")

    in_a_child(forbidden, user=NOBODY)
