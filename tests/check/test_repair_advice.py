"""Follow the printed advice for damaged and interrupted shards: it works, and never makes damage look valid."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from chats import command
from columned import SOURCE, write_columned
from kills import killed_at
from sample_packs import demo_samples, tree_of

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import MAGIC, SUFFIXES
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.storage.publish import head_of

PACKS = demo_samples(20)
SPECS = {"source": SOURCE, "topk": ColumnSpec("token", "f4", 3)}
DATA = [".bin", ".loss.bin", ".seq.bin"]
# Kinds of damage to one file: other bytes, or None if the file is removed.
KINDS: dict[str, Callable[[bytes], bytes | None]] = {
    "lost": lambda raw: None,
    "changed": lambda raw: raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :],
    "changed at its start": lambda raw: bytes([raw[0] ^ 1]) + raw[1:],
    "changed at its end": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
    "cut short": lambda raw: raw[: len(raw) // 3],
    "emptied": lambda raw: b"",
}


def put(folder: Path, files: dict[str, bytes]) -> Path:
    """Create a folder with only these files, and return the prefix of the shard."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    return folder / "x"


def assert_honest(prefix: Path, whole: dict[str, bytes], said: str) -> None:
    """Check that data without findings are unchanged, or that the output said that this is unknown."""
    try:
        if not verify_shard(prefix, full=True).ok:
            return
    except SFTIndexError:
        return
    now = tree_of(prefix.parent)
    if "no checksum was left to verify that its contents are what was written" not in said:
        assert [suffix for suffix in DATA if now[f"x{suffix}"] != whole[f"x{suffix}"]] == [], said
    assert not [name for name in now if name.endswith(".col") and now[name] != whole[name]], said


# ---- a damaged shard ----


def make_again(source: Path, prefix: Path, said: str) -> None:
    """Replace a damaged shard. A column whose magic is damaged must be removed first, as the message then says."""
    merged = command("merge", source, "--output-prefix", prefix, "--overwrite")
    if strange := re.search(rf"error: (\S+): {_NO_COLUMN}", merged.err):
        os.unlink(strange[1])
        merged = command("merge", source, "--output-prefix", prefix, "--overwrite")
    assert (merged.code, verify_shard(prefix, full=True).ok) == (0, True), said + merged.err


def follow(folder: Path, damaged: dict[str, bytes], whole: dict[str, bytes]) -> None:
    """Rebuild a damaged shard, then follow each piece of advice on a copy of the result."""
    prefix = put(folder / "x", damaged)
    done = command("rebuild", prefix)
    said, left = done.out + done.err, tree_of(prefix.parent)
    assert_honest(prefix, whole, said)
    if "a complete shard, every checksum verified" in said or "nothing to do" in said:
        assert [name for name in whole if name != "x.seq.idx" and left.get(name, whole[name]) != whole[name]] == []
    followed = 0
    if ": the damaged file; remove it" in said:
        for path in re.findall(r"^(\S+): the damaged file; remove it when you no longer need it$", said, re.M):
            os.unlink(path)
        assert command("rebuild", prefix).code == done.code
        followed += 1
    if "restore" in said:
        # Restore the reported files until no error is left.
        prefix, now = put(folder / "x", left), done
        for _ in range(5):
            for suffix in re.findall(r"(?:/x| )((?:\.[a-z]+)+)\b", now.out + now.err):
                if f"x{suffix}" in whole and f"x{suffix}: good" not in now.out:
                    (folder / "x" / f"x{suffix}").write_bytes(whole[f"x{suffix}"])
            now = command("rebuild", prefix)
            if now.code == 0:
                break
        assert now.code == 0, said + now.err
        assert verify_shard(prefix, full=True).ok
        assert_honest(prefix, whole, now.out)
        followed += 1
    if "make the shard again with --overwrite" in said:
        make_again(put(folder / "again", whole), put(folder / "x", left), said)
        followed += 1
    if command_line := re.search(r": megatron-sft-idx (merge .*) NEW$", done.err, re.M):
        prefix = put(folder / "x", left)
        (folder / "new").mkdir()
        merged = command(*command_line[1].split(), folder / "new" / "x")
        assert (merged.code, "left out (--lossy)" in merged.out) == (0, True), said + merged.err
        assert_honest(folder / "new" / "x", whole, said + merged.out)
        shutil.rmtree(folder / "new")
        followed += 1
    for path in re.findall(
        r"^(\S+): lost: .*remove it and attach it again; if it is not a column, rename it$", said, re.M
    ):
        prefix = put(folder / "x", left)
        os.unlink(folder / "x" / Path(path).name)
        assert_honest(prefix, whole, said)
        followed += 1
    if re.search(r"(?<!only )move \S*(x\.seq\.idx|this file|this one) away", said):
        prefix = put(folder / "x", left)
        os.unlink(f"{prefix}.seq.idx")
        again = command("rebuild", prefix)
        assert again.code == 0, said + again.err
        assert_honest(prefix, whole, said + again.out + again.err)
        followed += 1
    assert followed or done.code == 0, said


NAMES = [*SUFFIXES, ".source.col"]
CHOSEN = [each for count in (1, 2, 3) for each in itertools.combinations(NAMES, count)]
# One file, and a few pairs; the other pairs and all triples are slow.
SAMPLE = [*CHOSEN[: len(NAMES)], *random.Random(3).sample([each for each in CHOSEN if len(each) == 2], 4)]


# Without columns, the original data is unknown if .seq.idx is lost.
@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("suffixes", "specs"),
    [
        pytest.param(suffixes, specs, marks=[pytest.mark.slow] * (suffixes not in SAMPLE))
        for suffixes in CHOSEN
        for specs in (SPECS, {})
        if specs or ".source.col" not in suffixes
    ],
)
def test_what_is_advised_about_damaged_files_works_and_blesses_none(
    tmp_path: Path, suffixes: tuple[str, ...], specs: dict[str, ColumnSpec]
) -> None:
    write_columned(tmp_path / "whole" / "x", PACKS, specs)
    whole = tree_of(tmp_path / "whole")
    kinds = [[*KINDS], ["lost", "changed", "cut short"], ["lost", "changed"]][len(suffixes) - 1]
    for chosen in itertools.product(kinds, repeat=len(suffixes)):
        damaged = dict(whole)
        for suffix, kind in zip(suffixes, chosen, strict=True):
            raw = KINDS[kind](damaged.pop(f"x{suffix}"))
            if raw is not None:
                damaged[f"x{suffix}"] = raw
        if set(damaged) & {f"x{suffix}" for suffix in SUFFIXES}:
            follow(tmp_path, damaged, whole)


# ---- a build that was killed ----


def interrupted(folder: Path, *, replaces: bool) -> list[Path]:
    """Kill merges at each step, and return a folder for each resulting state."""
    write_columned(folder / "source" / "x", PACKS, SPECS)
    left: list[Path] = []
    states: set[tuple[str, ...]] = set()
    for step in range(200):
        prefix = folder / f"killed{step}" / "x"
        if replaces:
            write_columned(prefix, demo_samples(3), {**SPECS, "old": ColumnSpec("pack", "u1")})
        if not killed_at(step, lambda prefix=prefix: merge([folder / "source" / "x"], prefix, overwrite=replaces)):  # type: ignore[misc]
            assert len(left) > 12
            return left
        state = (*sorted(tree_of(prefix.parent)), str(Path(f"{prefix}.building/done.json").exists()))
        # Remains of a replaced shard would have to be copied with their inodes.
        if state not in states and os.path.exists(f"{prefix}.seq.idx" if replaces else f"{prefix}.building"):
            states.add(state)
            left.append(prefix.parent)
    raise AssertionError("it is never done")


_NO_COLUMN = "the file has the name of a column .* rename it"
_NO_SHARD = "found a file of .* which is never replaced"
_APPEARED = "something else was written here after this command began, and was not replaced; move it away, then run"


def build_again(folder: Path, prefix: Path, said: str) -> None:
    for _ in range(4 * len(NAMES)):
        done = command("merge", folder / "source" / "x", "--output-prefix", prefix, "--overwrite")
        # A file that is no longer recognised as ours is not replaced; and the files of a copy are different files.
        is_torn = head_of(f"{prefix}.seq.idx", len(MAGIC)) not in (b"", MAGIC) or _APPEARED in said
        known = [_NO_COLUMN, _APPEARED, *[_NO_SHARD] * is_torn]
        if not (other := re.search(rf"error: (\S+): ({'|'.join(known)})", done.err)):
            break
        os.unlink(other[1])
    assert done.code == 0, said + done.err
    assert verify_shard(prefix, full=True).ok, said
    assert sorted(tree_of(prefix.parent)) == sorted(tree_of(folder / "whole")), said


def follow_up(folder: Path, left: Path, change: Callable[[Path], object]) -> None:
    """Change the remains of a kill, then follow each piece of advice on a separate copy."""
    source = tree_of(folder / "source")
    whole, old = tree_of(folder / "whole"), tree_of(folder / "old")

    def again() -> Path:
        shutil.rmtree(folder / "x", ignore_errors=True)
        shutil.copytree(left, folder / "x")
        change(folder / "x")
        return folder / "x" / "x"

    def is_whole(prefix: Path, said: str) -> None:
        now = tree_of(prefix.parent)
        data = [{suffix: each.get(f"x{suffix}") for suffix in DATA} for each in (whole, old, now)]
        if verify_shard(prefix, full=True).ok and "no checksum was left" not in said:
            assert data[2] in data[:2], said

    prefix = again()
    merged = command("merge", folder / "source" / "x", "--output-prefix", prefix)
    verified = command("verify", prefix)
    rebuilt = command("rebuild", prefix)
    for done in (merged, verified, rebuilt):
        if done.code == 0:
            is_whole(prefix, done.out + done.err)
    for said in (merged.err + merged.out, verified.out + verified.err, rebuilt.err + rebuilt.out):
        if "--overwrite" in said:
            build_again(folder, again(), said)
        if f"megatron-sft-idx rebuild {prefix}" in said:
            prefix = again()
            done = command("rebuild", prefix)
            assert done.code == 0 or done.err != said, said
        if "remove the folder /" in said:
            assert (
                f"remove the folder {prefix}.building and the output {prefix}, unless that is complete; then run"
                in said
            )
            prefix = again()
            shutil.rmtree(f"{prefix}.building")
            if not os.path.exists(f"{prefix}.seq.idx"):
                for path in folder.glob("x/x.*"):
                    path.unlink()
            build_again(folder, prefix, said)
        if "or remove the folder to rebuild the shard" in said:
            prefix = again()
            shutil.rmtree(f"{prefix}.building")
            done = command("rebuild", prefix)
            assert "was replacing it" not in done.err, said + done.err
            assert done.code == 0 or ": lost: " in done.out or re.search("restore it|build it again", done.err), (
                said + done.err
            )
            is_whole(prefix, done.out)
        if _APPEARED in said:
            build_again(folder, again(), said)
        if "move it away" in said and (name := re.search(r": contains (\S+), which is not part of a build", said)):
            prefix = again()
            shutil.move(f"{prefix}.building/{name[1]}", folder / "away")
            build_again(folder, prefix, said)
        if "move the folder away" in said:
            prefix = again()
            shutil.move(f"{prefix}.building", folder / "away.building")
            shutil.rmtree(folder / "away.building")
            build_again(folder, prefix, said)
    assert source == tree_of(folder / "source")


@pytest.mark.sample(1)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("replaces", [False, True])
def test_what_is_advised_about_a_killed_build_works(tmp_path: Path, replaces: bool, every: bool) -> None:
    left = interrupted(tmp_path, replaces=replaces)
    merge([tmp_path / "source" / "x"], tmp_path / "whole" / "x")
    write_columned(tmp_path / "old" / "x", demo_samples(3), SPECS)

    def damaged(name: str, kind: str) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            if (path := folder / name).exists() and path.stat().st_size:
                raw = KINDS[kind](path.read_bytes())
                path.unlink() if raw is None else path.write_bytes(raw)

        return change

    for folder in left if every else left[-4:-1]:
        follow_up(tmp_path, folder, lambda folder: None)
        names = tree_of(folder).keys() - ({"x.seq.idx"} if replaces else set())
        few = {
            "x.bin",
            "x.seq.idx",
            *(f"x.building/{name}" for name in (".loss.bin", ".seq.idx", "build.json", "done.json")),
        }
        for name in names if every else names & few:
            for kind in ("lost", "changed", "changed at its start", "cut short")[:: 1 if every else 2]:
                follow_up(tmp_path, folder, damaged(name, kind))
