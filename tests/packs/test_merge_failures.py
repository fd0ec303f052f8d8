"""Merging corrupt shards, or to an impossible place: an error, and nothing is published."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merges import merged, rewrite_header, write_parts
from sample_packs import WHOLE, assert_holds, demo_samples, five_files, folder_of, sums_told, write_samples

from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError, ShardNotFoundError
from megatron_sft_idx.layout.files import SUFFIXES, ShardPaths
from megatron_sft_idx.shard import Shard, read_header
from megatron_sft_idx.shard.pack_log import read_blocks

ROOT = Path(__file__).parents[2]


# ---- changed sources ----


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("which", [0, 1])
def test_a_flipped_bit_in_any_file_is_found_and_nothing_published(tmp_path: Path, suffix: str, which: int) -> None:
    sources = write_parts(tmp_path, demo_samples(8), [4])
    path = Path(sources[which] + suffix)
    raw = bytearray(path.read_bytes())
    raw[-12] ^= 4
    path.write_bytes(raw)
    before = folder_of(tmp_path)
    with pytest.raises(CorruptShardError, match="F3") as caught:
        merged(sources, tmp_path / "m")
    assert caught.value.path == str(path)
    assert folder_of(tmp_path) == before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_source_cut_short_or_incomplete_is_refused(tmp_path: Path, suffix: str) -> None:
    sources = write_parts(tmp_path, demo_samples(8), [4])
    os.truncate(sources[1] + suffix, os.path.getsize(sources[1] + suffix) - 1)
    with pytest.raises(CorruptShardError, match="F2"):
        merged(sources, tmp_path / "m")
    os.unlink(sources[1] + suffix)
    with pytest.raises(ShardNotFoundError, match="F1"):
        merged(sources, tmp_path / "m")
    assert not list(tmp_path.glob("m*"))


@pytest.mark.parametrize(("array", "rule"), [("sequence_offsets", "O1"), ("token_offsets", "O2")])
@pytest.mark.parametrize("change", [(0, 1), (-1, -1), (2, 10**9), (1, -(10**9))])
def test_offsets_that_lie_are_found_though_their_checksum_is_right(
    tmp_path: Path, array: str, rule: str, change: tuple[int, int]
) -> None:
    import xxhash

    (source,) = write_parts(tmp_path, demo_samples(8), [])
    header, path = read_header(source), Path(source + ".seq.idx")
    raw = bytearray(path.read_bytes())
    base = header.nbytes if array == "sequence_offsets" else header.token_offsets_offset
    np.frombuffer(raw, "<i8", header.num_packs + 1, base)[change[0]] += change[1]
    path.write_bytes(raw)
    rewrite_header(source, arrays_checksum=xxhash.xxh3_128_digest(bytes(raw[header.nbytes :])))
    with pytest.raises(CorruptShardError, match=rule):
        merged([source], tmp_path / "m")
    assert not list(tmp_path.glob("m*"))


def test_a_source_replaced_after_the_checks_is_refused(tmp_path: Path) -> None:
    sources = write_parts(tmp_path, demo_samples(8), [4])

    def replace(_done: int, _total: int) -> None:
        if read_header(sources[1]).num_packs == 4:
            write_samples(sources[1], demo_samples(5), capacity=64, overwrite=True)

    with pytest.raises(FormatError, match="another shard has replaced it"):
        merged(sources, tmp_path / "m", watch=sums_told(replace))
    assert not list(tmp_path.glob("m*"))


# ---- destinations ----


def test_a_source_is_never_the_output(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    sources = write_parts(folder, demo_samples(4), [2])
    (tmp_path / "link").symlink_to(folder)
    before = five_files(sources[0])
    for output in (sources[0], str(folder / ".." / "real" / "s0"), str(tmp_path / "link" / "s0"), sources[0] + ".bin"):
        with pytest.raises(FormatError, match="used as both the output and "):
            merged(sources, output, overwrite=True)
    with pytest.MonkeyPatch.context() as another_writer:  # our writer rejects a name like x.loss.bin
        another_writer.setattr(ShardPaths, "require_own_names", lambda paths: None)
        write_samples(folder / "x.loss", demo_samples(2), capacity=64)
    with pytest.raises(FormatError, match="used as both the output and "):
        merged([str(folder / "x.loss")], folder / "x", overwrite=True)
    assert five_files(sources[0]) == before


def test_only_overwrite_replaces_a_shard(tmp_path: Path) -> None:
    sources = write_parts(tmp_path, demo_samples(6), [2])
    write_samples(tmp_path / "m", demo_samples(1))
    with pytest.raises(FormatError, match="overwrite"):
        merged(sources, tmp_path / "m")
    assert_holds(Shard(tmp_path / "m"), demo_samples(1))
    merged(sources, tmp_path / "m", overwrite=True)
    assert_holds(Shard(tmp_path / "m"), demo_samples(6))


def test_no_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="the list of shards is empty; pass at least one"):
        merged([], tmp_path / "m")


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    sources = write_parts(tmp_path, demo_samples(30), [2, 9, 9])
    seen: list[tuple[int, int]] = []
    merged(sources, tmp_path / "m", watch=sums_told(lambda *counts: seen.append(counts)))
    total = sum(os.path.getsize(s + x) for s in sources for x in SUFFIXES) - sum(read_header(s).nbytes for s in sources)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_killed_merge_leaves_no_shard_and_notes_whole_sources(tmp_path: Path) -> None:
    packs = demo_samples(30)
    sources = write_parts(tmp_path, packs, [10, 20])
    two = sum(os.path.getsize(s + x) for s in sources[:2] for x in SUFFIXES)
    target = tmp_path / "out"
    if (child := os.fork()) == 0:
        kill = sums_told(lambda done, _: done > two and os.kill(os.getpid(), signal.SIGKILL))
        merged(sources, target / "x", watch=kill)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert os.listdir(target) == ["x.building"]
    with open(target / "x.building/packs", "rb") as stream:
        records = [record for block in read_blocks(stream) for record in block.tolist()]
    assert records == [[len(pack.tokens), len(pack.starts)] for pack in packs[:20]]
    merged(sources, target / "x")
    assert folder_of(target) == WHOLE
    assert_holds(Shard(target / "x"), packs)


def test_a_full_disk_is_an_error_and_gives_the_space_back(tmp_path: Path) -> None:
    sources = write_parts(tmp_path, demo_samples(200), [50])
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "from megatron_sft_idx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "merge", *sources, "--output-prefix", str(tmp_path / "out" / "x")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert f"error: {tmp_path}/out/x.building/.bin: File too large" in done.stderr
    assert folder_of(tmp_path / "out") == []


def test_a_folder_that_may_not_be_written_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from megatron_sft_idx.cli.main import main

    sources = write_parts(tmp_path, demo_samples(4), [2])
    # This imports everything that is needed, because the other user may not be able to read the package.
    assert main(["merge", *sources, "--output-prefix", str(tmp_path / "good")]) == 0
    target = tmp_path / "out"
    target.mkdir(mode=0o555)
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:  # otherwise the other user could not enter this folder
            folder.chmod(folder.stat().st_mode | 0o055)
    if (child := os.fork()) == 0:
        try:
            if os.getuid() == 0:  # root can write to every folder
                os.setuid(65534)
            os._exit(main(["merge", *sources, "--output-prefix", str(target / "x")]))
        finally:
            os._exit(3)  # the fork must not continue with the tests
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert f"error: {target}/x.building: Permission denied" in capfd.readouterr().err
    assert folder_of(target) == []


@settings(max_examples=40, deadline=None)
@given(flips=st.lists(st.tuples(st.sampled_from(SUFFIXES), st.integers(0, 10**6), st.integers(0, 7)), min_size=1))
def test_no_corruption_is_copied(tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[str, int, int]]) -> None:
    folder = tmp_path_factory.mktemp("flips")
    (source,) = write_parts(folder, demo_samples(5), [])
    before = five_files(source)
    for suffix, position, bit in flips:
        raw = bytearray(Path(source + suffix).read_bytes())
        raw[position % len(raw)] ^= 1 << bit
        Path(source + suffix).write_bytes(raw)
    try:
        merged([source], folder / "m")
    except SFTIndexError:
        assert not list(folder.glob("m*"))
    else:
        assert five_files(source) == before  # flipped back
