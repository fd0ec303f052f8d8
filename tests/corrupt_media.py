"""Damage the images and audio of a shard and use each copy in every way.

``python tests/corrupt_media.py FOLDER SEED COUNT FIRST STEP``: a separate program, because a reader that accesses
memory outside its files is killed by a signal. It draws COUNT cases of the matrix, or takes all if COUNT is 0, and runs
every STEP-th from FIRST on. It prints as JSON how many copies had which outcome.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from chats import command
from media_damage import DATA, ITEMS, MediaDamage, Shards, media_damages, media_shards, put_placed, some_of
from media_samples import as_plain

from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.split import SplitSize, split
from megatron_sft_idx.packs.transfer import CopySource, download
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.tokenize import PackOptions, pack_shard

_BEHIND = "merge behind its twin"
BACKENDS = ("mmap", "pread", "reopen")


def read(prefix: str) -> str:
    """Return whether a shard is rejected, read in part or in full. All backends must agree."""
    seen = []
    for backend in BACKENDS:
        try:
            shard = Shard(prefix, backend=backend)  # type: ignore[arg-type]
        except SFTIndexError as error:
            seen.append(["refused", type(error).__name__])
            continue
        lines = []
        for number in range(len(shard)):
            try:
                lines.append(as_plain(shard[number].get("media", [])))
            except SFTIndexError as error:
                lines.append([(type(error).__name__, 0, 0, b"")])
        seen.append(lines)
    assert seen[0] == seen[1] == seen[2], seen
    if seen[0][0] == "refused":
        return "refused"
    return "refused in part" if any(line and line[0][0].endswith("Error") for line in seen[0]) else "read"


def new_shards(folder: Path) -> dict[str, Callable[[str], object]]:
    """Return all functions that make shards from a shard, by name. Their outputs in ``folder`` begin with ``out``."""
    out, sound = str(folder / "out"), str(folder / "whole")

    def add(prefix: str) -> None:
        with ShardWriter(out, media=True, durable=False) as writer:
            writer.add_shard(Shard(prefix, backend="pread"))

    def through_parquet(prefix: str) -> None:
        convert(prefix, f"{out}.parquet", "parquet", ConvertOptions())
        convert(f"{out}.parquet", out, "sft-idx", ConvertOptions())

    return {
        "parquet": through_parquet,
        "merge": lambda prefix: merge([prefix, sound], out, durable=False),
        _BEHIND: lambda prefix: merge([sound, prefix], out, durable=False),
        "split by packs": lambda prefix: split(prefix, out, SplitSize(packs=4), durable=False),
        "split by bytes": lambda prefix: split(prefix, out, SplitSize(nbytes=700), durable=False),
        "pack": lambda prefix: pack_shard(Shard(prefix), out, PackOptions(64)),
        "truncate": lambda prefix: pack_shard(Shard(prefix), out, PackOptions(6, overlong="truncate")),
        "convert": lambda prefix: convert(prefix, out, "sft-idx", ConvertOptions()),
        "add": add,
    }


def use(folder: Path, damage: MediaDamage, shards: Shards) -> str:
    """Use one copy in every way. Errors other than SFTIndexError are not caught, and end this process."""
    prefix = str(folder / "x")
    put_placed(prefix, damage.files)
    quick, full = verify_shard(prefix), verify_shard(prefix, full=True)
    assert {each.rule for each in quick.findings} <= {each.rule for each in full.findings}
    assert not (damage.is_found and full.ok), "not found"
    outcome = read(prefix)
    for options in ((), ("--pack", 1), ("--diff", folder / "whole")):
        assert command("inspect", prefix, *options).code in (0, 1)
    assert outcome == "read" or not full.ok
    passed = []
    for name, make in new_shards(folder).items():
        for path in folder.glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            make(prefix)
        except SFTIndexError:
            assert not full.ok, name
            assert not [*folder.glob("out*")], name
            continue
        passed.append(name)
        made = [str(path)[: -len(".seq.idx")] for path in folder.glob("out*.seq.idx")]
        assert made, name
        for each in made:
            assert verify_shard(each, full=True).ok, name
        # Equal files are read from the first shard that has them, so a damaged copy in a later shard is not read. If
        # checksums were corrected, parts that a new shard does not take over may be wrong.
        assert not damage.is_found or name == _BEHIND or "right" in damage.name, name
    _copy(folder, prefix, damage, full.ok)
    _rebuild(folder, damage, full.ok)
    if full.ok:
        return f"{outcome}, keeps every rule"
    return f"{outcome}, {'new shards of what is sound' if passed else 'no new shards'}"


def _copy(folder: Path, prefix: str, damage: MediaDamage, is_sound: bool) -> None:
    """Check that a copy has the same bytes or is rejected, and that its bytes always match its checksums."""
    for path in folder.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        download(CopySource(prefix), str(folder / "out"))
    except SFTIndexError:
        assert not is_sound
        assert not [*folder.glob("out*.seq.idx")]
        return
    shows_media = Shard(prefix).media is not None
    for suffix, content in damage.files.items():
        if shows_media or suffix not in (DATA, ITEMS):
            assert (folder / f"out{suffix}").read_bytes() == content
    rules = {each.rule for each in verify_shard(folder / "out", full=True).findings}
    assert rules.isdisjoint({"F2", "F3", "M1", "M2", "M13"})


def _rebuild(folder: Path, damage: MediaDamage, is_sound: bool) -> None:
    """Check that a rebuild and a verification agree on the shard, and that no broken rule is accepted."""
    for accept, lost in ((False, None), (True, None), (False, ".idx"), (False, ".seq.idx")):
        place = folder / "rebuilt"
        place.mkdir()
        prefix = str(place / "x")
        put_placed(prefix, {suffix: content for suffix, content in damage.files.items() if suffix != lost})
        try:
            is_whole = rebuild(prefix, accept_contents=accept).whole
        except SFTIndexError:
            is_whole = False
        assert is_whole == verify_shard(prefix, full=True).ok
        assert is_whole or not is_sound
        for suffix, content in damage.files.items():
            if isinstance(content, bytes) and not is_whole and suffix != lost:
                assert Path(prefix + suffix).read_bytes() == content
        shutil.rmtree(place)


def main(folder: Path, seed: int, count: int, first: int, step: int) -> None:
    shards = media_shards(folder)
    damages = media_damages(shards)
    if count:
        damages = some_of(damages, count, seed)
    outcomes: Counter[str] = Counter()
    for damage in damages[first::step]:
        try:
            outcomes[use(folder, damage, shards)] += 1
        except BaseException:
            print(f"damage: {damage.name}", file=sys.stderr)
            raise
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
