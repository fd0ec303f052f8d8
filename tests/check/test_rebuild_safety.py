"""Rebuilds that are killed, locked out or dry runs: they lose nothing and write nothing without permission."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chats import command
from kills import killed_at, leave_complete
from sample_packs import WHOLE, assert_holds, demo_samples, five_files, folder_of, opens, tree_of, write_samples

from megatron_sft_idx.check import Advance, rebuild, verify_shard
from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard, ShardWriter, find_remains, read_header, remove_shard
from megatron_sft_idx.shard.publication import Publication

ALL_LOSSES = [[".idx"], [".seq.idx"], [".idx", ".seq.idx"]]


def trained_samples() -> Any:
    """Return packs whose masks show their ends: everything is trained on."""
    return [type(pack)(pack.tokens, [1] * len(pack.tokens), pack.starts) for pack in demo_samples()]


def break_index(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    else:
        raw = path.read_bytes()
        path.write_bytes(b"\xff" * 40 + raw[40:-9])


@pytest.mark.sample(1)
@pytest.mark.parametrize("broken", ALL_LOSSES)
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_killed_at_any_step_it_can_be_run_again(tmp_path: Path, broken: list[str], how: str) -> None:
    packs = trained_samples()
    results = set()
    for step in range(100):
        prefix = tmp_path / str(step) / "x"
        write_samples(prefix, packs, capacity=99)
        before = five_files(prefix)
        for suffix in broken:
            break_index(Path(f"{prefix}{suffix}"), how)
        left = {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in broken if how == "damaged"}
        finished = not killed_at(step, lambda prefix=prefix: rebuild(prefix))  # type: ignore[misc]
        for suffix, raw in left.items():  # existing files still exist, under their own or the other name
            names = [Path(f"{prefix}{suffix}"), Path(f"{prefix}{suffix}.damaged")]
            assert raw in [path.read_bytes() for path in names if path.exists()]
        if Path(f"{prefix}.seq.idx").exists() and ".seq.idx" in broken:
            try:
                assert_holds(Shard(prefix), packs)
            except CorruptShardError:
                assert Path(f"{prefix}.seq.idx").read_bytes() == left[".seq.idx"]
        assert rebuild(prefix).whole
        assert opens(prefix)
        assert_holds(Shard(prefix), packs)
        after = five_files(prefix)
        assert all(after[suffix] == before[suffix] for suffix in SUFFIXES if suffix != ".seq.idx")
        results.add(after[".seq.idx"])
        names = [*WHOLE, *(f"x{suffix}.damaged" for suffix in broken if how == "damaged")]
        assert folder_of(prefix.parent) == sorted(names)
        if finished:
            break
    assert step > 20
    if len(broken) < 2:  # otherwise lengths may come from the .idx that the first run restored
        assert len(results) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("lost", [".bin", ".seq.bin"])
def test_killed_at_any_step_of_bringing_back_a_part_it_can_be_run_again(tmp_path: Path, lost: str) -> None:
    num_complete = 0
    for step in range(100):
        prefix = tmp_path / str(step) / "x"
        write_samples(prefix, demo_samples())
        before = five_files(prefix)
        os.unlink(f"{prefix}{lost}")
        break_index(Path(f"{prefix}.idx"), "damaged")
        finished = not killed_at(step, lambda prefix=prefix: rebuild(prefix))  # type: ignore[misc]
        if (remains := find_remains(prefix)) is not None and remains.is_complete:
            num_complete += 1
            with pytest.raises(FormatError, match="left by an interrupted rebuild; finish it"):
                rebuild(prefix, dry_run=True)
        assert [file.path for file in rebuild(prefix).files if file.state == "lost"] == [f"{prefix}{lost}"]
        assert Path(f"{prefix}.idx").read_bytes() == before[".idx"]
        assert folder_of(prefix.parent) == sorted({*WHOLE, "x.idx.damaged"} - {f"x{lost}"})
        if finished:
            break
    assert step > 20
    assert num_complete > 4


@pytest.mark.parametrize("broken", ALL_LOSSES)
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_dry_run_says_what_would_happen_and_writes_nothing(tmp_path: Path, broken: list[str], how: str) -> None:
    write_samples(tmp_path / "x", trained_samples())
    for suffix in broken:
        break_index(tmp_path / f"x{suffix}", how)
    before = tree_of(tmp_path)
    tmp_path.chmod(0o555)  # enough for all users except root
    outcome = command("rebuild", tmp_path / "x", "--dry-run")
    tmp_path.chmod(0o755)
    assert (outcome.code, outcome.err) == (0, "")
    assert tree_of(tmp_path) == before
    assert outcome.out.endswith("nothing was written\n")
    would = outcome.out.splitlines()
    dry = rebuild(tmp_path / "x", dry_run=True)
    wet = rebuild(tmp_path / "x")
    assert dry.files == wet.files
    for suffix in broken:
        assert any(line.startswith(f"{tmp_path}/x{suffix}: would be rebuilt: ") for line in would)


def test_files_kept_from_several_rebuilds_do_not_replace_each_other(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    whole = (tmp_path / "x.idx").read_bytes()
    for i in range(3):
        (tmp_path / "x.idx").write_bytes(b"%d" % i)
        rebuild(tmp_path / "x")
        assert (tmp_path / "x.idx").read_bytes() == whole
    kept = [(tmp_path / f"x.idx.damaged{number}").read_bytes() for number in ("", ".1", ".2")]
    assert kept == [b"0", b"1", b"2"]


@pytest.mark.parametrize("target", ["nowhere", "x.idx", "x.idx.damaged"])
def test_a_link_at_the_other_name_is_left_alone_and_keeps_nothing(tmp_path: Path, target: str) -> None:
    write_samples(tmp_path / "x", demo_samples())
    whole = (tmp_path / "x.idx").read_bytes()
    (tmp_path / "x.idx").write_bytes(b"?")
    (tmp_path / "x.idx.damaged").symlink_to(target)
    assert rebuild(tmp_path / "x").kept == (f"{tmp_path}/x.idx.damaged.1",)
    assert (tmp_path / "x.idx").read_bytes() == whole
    assert (tmp_path / "x.idx.damaged.1").read_bytes() == b"?"
    assert os.readlink(tmp_path / "x.idx.damaged") == target


@pytest.mark.parametrize("target", ["nowhere", "notes"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_link_in_the_place_of_the_building_folder_is_refused(tmp_path: Path, target: str, dry_run: bool) -> None:
    write_samples(tmp_path / "x", demo_samples())
    (tmp_path / "x.idx").unlink()
    (tmp_path / "notes").write_bytes(b"notes")
    (tmp_path / "x.building").symlink_to(target)
    with pytest.raises(FormatError, match=r"x\.building: a symbolic link exists at the path"):
        rebuild(tmp_path / "x", dry_run=dry_run)
    assert (tmp_path / "notes").read_bytes() == b"notes"


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_shard_of_links_is_refused_before_it_is_read(tmp_path: Path, dry_run: bool) -> None:
    write_samples(tmp_path / "x", demo_samples())
    os.rename(tmp_path / "x.bin", tmp_path / "far")
    (tmp_path / "x.bin").symlink_to("far")
    assert rebuild(tmp_path / "x", dry_run=dry_run).note == "nothing to do"
    (tmp_path / "x.idx").unlink()

    def unread(what: str, total: int) -> Any:
        pytest.fail(f"{what} {total} bytes")

    with pytest.raises(FormatError, match=r"x\.bin: there is a symbolic link, expected a file of a shard or nothing"):
        rebuild(tmp_path / "x", dry_run=dry_run, watch=unread)


@pytest.mark.parametrize("broken", [".idx", ".seq.idx"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_no_file_stays_open(tmp_path: Path, broken: str, dry_run: bool) -> None:
    write_samples(tmp_path / "x", trained_samples())
    (tmp_path / f"x{broken}").unlink()
    before = len(os.listdir("/proc/self/fd"))
    assert rebuild(tmp_path / "x", dry_run=dry_run).changed
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_file_that_can_have_no_second_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: str, target: str) -> None:
        raise OSError(95, "Operation not supported", source)

    monkeypatch.setattr(os, "link", no_links)
    write_samples(tmp_path / "x", demo_samples())
    (tmp_path / "x.idx").write_bytes(b"?")
    before = tree_of(tmp_path)
    with pytest.raises(
        FormatError, match=r"x\.idx: it cannot be kept under the name .*x\.idx\.damaged \(Operation not supported\)"
    ):
        rebuild(tmp_path / "x")
    assert tree_of(tmp_path) == before


def test_a_stranger_that_appears_meanwhile_leaves_everything_at_its_name(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", trained_samples())
    (tmp_path / "x.idx").unlink()
    break_index(tmp_path / "x.seq.idx", "damaged")
    before = tree_of(tmp_path)

    @contextmanager
    def intruding(what: str, _total: int) -> Iterator[Advance]:
        yield lambda _done: None
        (tmp_path / "x.idx").write_bytes(b"a stranger's")

    with pytest.raises(FormatError, match=r"someone else created \S+/x\.idx in the meantime; choose another prefix"):
        rebuild(tmp_path / "x", watch=intruding)
    assert tree_of(tmp_path) == {**before, "x.idx": b"a stranger's"}


@pytest.mark.parametrize("is_link", [False, True])
def test_what_a_stranger_took_the_place_of_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    write_samples(tmp_path / "x", trained_samples())
    for suffix in (".idx", ".seq.idx"):
        break_index(tmp_path / f"x{suffix}", "damaged")
    before, link = tree_of(tmp_path), os.link

    def then_replaced(source: str, target: str) -> None:
        link(source, target)
        if source.endswith(".seq.idx"):
            (tmp_path / "new").symlink_to("notes") if is_link else (tmp_path / "new").write_bytes(b"a stranger's")
            os.replace(tmp_path / "new", source)

    (tmp_path / "notes").write_bytes(b"a stranger's")
    monkeypatch.setattr(os, "link", then_replaced)
    with pytest.raises(FormatError, match=r"x\.seq\.idx is now \S*/x\.seq\.idx\.damaged$") as caught:
        rebuild(tmp_path / "x")
    assert "x.idx.damaged" not in str(caught.value)
    kept = {
        "notes": b"a stranger's",
        "x.seq.idx": b"a stranger's",
        "x.seq.idx.damaged": before["x.seq.idx"],
    }
    assert tree_of(tmp_path) == {**before, **kept}


def test_a_stranger_at_the_last_moment_leaves_a_rebuild_to_be_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(tmp_path / "x", trained_samples())
    for suffix in (".idx", ".seq.idx"):
        break_index(tmp_path / f"x{suffix}", "damaged")
    before, finish = tree_of(tmp_path), Publication.finish

    def late(publication: Publication) -> None:
        (tmp_path / "new").write_bytes(b"a stranger's")
        os.replace(tmp_path / "new", tmp_path / "x.seq.idx")
        finish(publication)

    with monkeypatch.context() as patch:
        patch.setattr(Publication, "finish", late)
        with pytest.raises(FormatError, match=r"x\.seq\.idx: .* move it away, then .* kept: .*x\.seq\.idx\.damaged$"):
            rebuild(tmp_path / "x")
    os.rename(tmp_path / "x.seq.idx", tmp_path / "away")
    assert rebuild(tmp_path / "x").whole
    assert_holds(Shard(tmp_path / "x"), trained_samples())
    after = tree_of(tmp_path)
    assert after.pop("away") == b"a stranger's"
    assert sorted(after) == sorted([*WHOLE, "x.idx.damaged", "x.seq.idx.damaged"])
    assert all(after[f"{name}.damaged"] == before[name] for name in ("x.idx", "x.seq.idx"))


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_living_writer_keeps_the_rebuild_out(tmp_path: Path, dry_run: bool) -> None:
    write_samples(tmp_path / "x", demo_samples())
    os.unlink(tmp_path / "x.idx")
    with ShardWriter(tmp_path / "x", overwrite=True) as writer:
        writer.add_pack([1, 2], [1, 0], [0])
        with pytest.raises(FormatError, match="another process is writing this output"):
            rebuild(tmp_path / "x", dry_run=dry_run)
        writer.abandon()
    rebuild(tmp_path / "x")


def test_a_rebuild_at_work_keeps_writers_out(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    os.unlink(tmp_path / "x.idx")
    refused = []

    @contextmanager
    def intruding(what: str, _total: int) -> Iterator[Advance]:
        for intrude in (lambda: ShardWriter(tmp_path / "x", overwrite=True), lambda: rebuild(tmp_path / "x")):
            with pytest.raises(FormatError, match="another process is writing this output"):
                intrude()
            refused.append(what)
        yield lambda _done: None

    rebuild(tmp_path / "x", watch=intruding)
    assert refused
    assert folder_of(tmp_path) == WHOLE


def as_nobody(act: Callable[[], None]) -> bool:
    """Return whether ``act`` succeeds in a fork that is not root."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def test_a_folder_that_may_not_be_written_is_said() -> None:
    # Not in pytest's folder, which other users cannot enter.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_samples(folder / "x", demo_samples())
        os.unlink(folder / "x.idx")
        folder.chmod(0o555)
        before = tree_of(folder)

        def tries() -> None:
            with pytest.raises(PermissionError, match=r"Permission denied: .*x\.building"):
                rebuild(folder / "x")
            assert rebuild(folder / "x", dry_run=True).changed

        assert as_nobody(tries)
        assert tree_of(folder) == before


def test_a_full_disk_leaves_things_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_samples(tmp_path / "x", demo_samples())
    break_index(tmp_path / "x.seq.idx", "damaged")
    before = tree_of(tmp_path)
    write = os.write

    def full(fd: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("x.building/.seq.idx"):
            raise OSError(28, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    outcome = command("rebuild", tmp_path / "x")
    assert (outcome.code, "x.building/.seq.idx: No space left on device" in outcome.err) == (1, True)
    assert tree_of(tmp_path) == before


# ---- remains of a killed build ----


def killed_build(prefix: Path, *, packs: int = 7, overwrite: bool = False) -> None:
    """Start a build of demo packs whose process is killed before it is finalized."""
    if (child := os.fork()) == 0:
        writer = ShardWriter(prefix, capacity=99, overwrite=overwrite)
        for pack in demo_samples(packs):
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
            writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_the_packs_of_a_killed_build_become_a_shard(tmp_path: Path) -> None:
    killed_build(tmp_path / "x")
    with open(tmp_path / "x.building" / ".loss.bin", "ab") as torn:
        torn.write(b"\1\1\1")
    before = tree_of(tmp_path)
    outcome = command("rebuild", tmp_path / "x", "--dry-run")
    assert (outcome.code, "a build that was killed: 7 packs" in outcome.out) == (0, True)
    assert tree_of(tmp_path) == before
    outcome = command("rebuild", tmp_path / "x")
    assert (outcome.code, outcome.err) == (0, "")
    assert_holds(Shard(tmp_path / "x"), demo_samples())
    assert Shard(tmp_path / "x").header.rebuilt
    assert folder_of(tmp_path) == WHOLE


def test_a_build_killed_between_renames_is_finished(tmp_path: Path) -> None:
    write_samples(tmp_path / "whole", demo_samples())
    for step in range(100):
        prefix = tmp_path / str(step) / "x"
        if not killed_at(step, lambda prefix=prefix: write_samples(prefix, demo_samples(), durable=True)):  # type: ignore[misc]
            break
        if (remains := find_remains(prefix)) is None or not remains.num_packs:
            continue
        rebuild(prefix)
        assert_holds(Shard(prefix), demo_samples())
        if not Shard(prefix).header.rebuilt:
            assert five_files(prefix) == five_files(tmp_path / "whole")
        assert folder_of(prefix.parent) == WHOLE
    assert step > 20


def test_what_a_killed_removal_left_stays_or_goes_as_its_message_says(tmp_path: Path) -> None:
    num_whole = num_refused = num_kept = 0
    for step in range(100):
        prefix = tmp_path / str(step) / "x"
        write_samples(prefix, trained_samples())
        if not killed_at(step, lambda prefix=prefix: remove_shard(ShardPaths.of(prefix))):  # type: ignore[misc]
            break
        before = tree_of(prefix.parent)
        if (remains := find_remains(prefix)) is None or not remains.is_complete:
            if opens(prefix):  # nothing was removed yet
                assert rebuild(prefix).note == "nothing to do"
                assert folder_of(prefix.parent) == WHOLE
                num_whole += 1
            else:
                assert not [name for name in before if not name.startswith("x.building/")]
            continue
        for dry_run in (True, False):
            with pytest.raises(FormatError, match="left by an interrupted removal; run the command that removed"):
                rebuild(prefix, dry_run=dry_run)
        assert tree_of(prefix.parent) == before
        num_refused += 1
        if step % 2 and all(Path(f"{prefix}{suffix}").exists() for suffix in (".bin", ".loss.bin", ".seq.bin")):
            os.rename(f"{prefix}.building", prefix.parent / "away")
            rebuild(prefix)
            assert_holds(Shard(prefix), trained_samples())
            num_kept += 1
        else:
            remove_shard(ShardPaths.of(prefix))
            assert folder_of(prefix.parent) == []
    assert folder_of(prefix.parent) == []
    assert num_whole > 5
    assert num_refused > 5
    assert num_kept


def test_no_files_are_removed_that_no_header_makes_a_shard(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    for suffix in (".seq.idx", ".seq.bin", ".loss.bin"):  # the remaining files may be stock data
        (tmp_path / f"x{suffix}").unlink()
    before = tree_of(tmp_path)
    with pytest.raises(FormatError, match=r"x\.idx: expected a file of a shard, which has a .*, found a file of"):
        remove_shard(ShardPaths.of(tmp_path / "x"))
    assert tree_of(tmp_path) == before


def test_a_good_shard_beside_a_killed_build_stays(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(3))
    killed_build(tmp_path / "x", overwrite=True)
    before = tree_of(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(FormatError, match=r"there is a shard, and \S+x\.building has 7 packs of a killed build"):
            rebuild(tmp_path / "x", dry_run=dry_run)
    assert before == tree_of(tmp_path)
    assert verify_shard(tmp_path / "x", full=True).ok
    outcome = command("rebuild", tmp_path / "x", "--overwrite")
    assert (outcome.code, outcome.err) == (0, "")
    assert_holds(Shard(tmp_path / "x"), demo_samples())
    assert folder_of(tmp_path) == WHOLE


@pytest.mark.parametrize("dry_run", [False, True])
def test_of_a_rebuild_that_lost_a_file_among_its_renames_nothing_is_taken(tmp_path: Path, dry_run: bool) -> None:
    write_samples(tmp_path / "x", trained_samples(), capacity=99)
    for suffix in (".idx", ".seq.idx"):
        break_index(tmp_path / f"x{suffix}", "damaged")
    leave_complete(lambda: rebuild(tmp_path / "x"))
    (tmp_path / "x.building" / ".idx").unlink()
    before = tree_of(tmp_path)
    with pytest.raises(FormatError, match=r"\.idx: this file was removed before it was moved .* \(--overwrite\)"):
        rebuild(tmp_path / "x", dry_run=dry_run)
    assert tree_of(tmp_path) == before
    if not dry_run:
        assert command("rebuild", tmp_path / "x", "--overwrite").code == 0
        assert_holds(Shard(tmp_path / "x"), trained_samples())
        assert {*WHOLE} <= {*folder_of(tmp_path)}
        assert "x.building" not in folder_of(tmp_path)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_build_killed_before_its_first_pack_left_nothing(tmp_path: Path, dry_run: bool) -> None:
    killed_build(tmp_path / "x", packs=0)
    before = tree_of(tmp_path)
    with pytest.raises(FormatError, match="killed before it wrote a pack"):
        rebuild(tmp_path / "x", dry_run=dry_run)
    assert tree_of(tmp_path) == before


def test_where_nothing_is_at_the_prefix_a_killed_run_beside_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.building.txt").touch()
    (tmp_path / "x.y.building").mkdir()
    for look in (rebuild, verify_shard, Shard, read_header):
        with pytest.raises(ShardNotFoundError, match=r"check the prefix; it does not include \.seq\.idx"):
            look(tmp_path / "x")
    killed_build(tmp_path / "x.unpacked")
    for look in (rebuild, verify_shard, Shard, read_header):
        with pytest.raises(
            ShardNotFoundError, match=rf"recover its packs: megatron-sft-idx rebuild {tmp_path}/x\.unpacked$"
        ):
            look(tmp_path / "x")
    assert rebuild(tmp_path / "x.unpacked").whole
