"""Media of a build that was killed or lost the end of a file: recovered packs have all their items."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kills import killed_at, kills_at
from media_samples import MediaSample, as_plain, media_samples, seven_files, write_media
from sample_packs import assert_is, folder_of, opens, tree_of, write_samples

from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.errors import SFTIndexError, ShardNotFoundError
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import MEDIA_SUFFIXES
from megatron_sft_idx.packs.buckets import copy_shard
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.split import SplitSize, split
from megatron_sft_idx.shard import Shard, ShardWriter, recover, remove_shard
from megatron_sft_idx.tokenize import PackOptions, pack_shard

SAMPLES = media_samples(11, 14)


def assert_holds_media(prefix: Path, samples: list[MediaSample]) -> None:
    shard = Shard(prefix)
    assert len(shard) == len(samples)
    for pack, sample in zip(shard, samples, strict=True):
        assert_is(pack, sample.pack)
        assert as_plain(pack["media"]) == as_plain(sample.items)
    assert verify_shard(prefix, full=True).ok


# ---- recovery ----


def suspended(prefix: Path, flushed: int = 2) -> Path:
    """Stop a build after all packs were logged, ``flushed`` at a time, and return its folder."""
    writer = ShardWriter(prefix, media=True, capacity=64, durable=False)
    for number, sample in enumerate(SAMPLES):
        writer.add_pack(sample.pack.tokens, sample.pack.label_mask, sample.pack.starts, media=sample.items)
        if number % flushed == flushed - 1:
            writer.flush()
    writer.flush()
    writer.suspend()
    return Path(f"{prefix}.building")


def recovered(prefix: Path) -> int:
    """Return the number of recovered packs, after a check of their content."""
    try:
        count = recover(prefix).num_packs
    except SFTIndexError as error:
        assert "no complete pack" in str(error)  # noqa: PT017
        return 0
    assert_holds_media(prefix, SAMPLES[:count])
    write_media(prefix.parent / "calm", SAMPLES[:count], capacity=64, overwrite=True)
    for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx", ".media.data"):
        assert Path(f"{prefix}{suffix}").read_bytes() == (prefix.parent / f"calm{suffix}").read_bytes()
    return count


@pytest.mark.parametrize("name", ["items", "blobs", "packs", ".media.data", ".bin"])
def test_packs_are_recovered_with_all_their_items_whatever_file_lost_its_end(tmp_path: Path, name: str) -> None:
    """As after a power failure, each file has its synced part, independently of the others."""
    folder = suspended(tmp_path / "x")
    kept = tmp_path / "kept"
    shutil.move(folder, kept)
    raw = (kept / name).read_bytes()
    counts = []
    draw = random.Random(name)
    for size in sorted({0, 1, len(raw) - 1, len(raw), *draw.choices(range(len(raw)), k=25)}):
        # Truncated, or of full length with unwritten zeros; zeros are valid tokens.
        for end in (b"", bytes(len(raw) - size)) if name != ".bin" else (b"",):
            for path in tmp_path.glob("x.*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            shutil.copytree(kept, folder)
            (folder / name).write_bytes(raw[:size] + end)
            counts.append((size, recovered(tmp_path / "x")))
    assert counts == sorted(counts)
    assert counts[0][1] == 0
    assert counts[-1] == (len(raw), len(SAMPLES))
    assert len({count for _, count in counts}) > 2


@kills_at
def test_a_recovery_that_is_killed_at_any_step_can_be_run_again(tmp_path: Path, stride: int) -> None:
    """This includes a recovery of fewer packs than were logged."""
    for lost in (0, 40):
        kept = tmp_path / f"kept-{lost}"
        shutil.move(suspended(tmp_path / "x"), kept)
        raw = (kept / ".media.data").read_bytes()
        (kept / ".media.data").write_bytes(raw[: len(raw) - lost])
        shutil.copytree(kept, tmp_path / f"calm{lost}.building")
        recover(tmp_path / f"calm{lost}")
        wanted = seven_files(tmp_path / f"calm{lost}")
        assert (len(Shard(tmp_path / f"calm{lost}")) < len(SAMPLES)) == (lost > 0)
        for step in range(stride // 2, 100, stride):
            prefix = tmp_path / str(lost) / str(step) / "x"
            prefix.parent.mkdir(parents=True)
            shutil.copytree(kept, f"{prefix}.building")
            is_killed = killed_at(step, lambda prefix=prefix: recover(prefix))  # type: ignore[misc]
            if is_killed and Path(f"{prefix}.building").exists():
                with contextlib.suppress(SFTIndexError):  # only the last files of the folder were left to remove
                    recover(prefix)
            assert seven_files(prefix) == wanted, step
            if not is_killed:
                break
        assert step > 15


# ---- every command, killed at every step ----

OLD = media_samples(21, 6)
NEW = media_samples(22, 8)
Work = Callable[[Path], Any]


def sources_in(folder: Path) -> Path:
    """Write the shards that the commands read and, in ``left``, the shards that they replace."""
    for name, samples in (("old", OLD), ("new", NEW)):
        write_media(folder / name, samples, capacity=64)
        write_samples(folder / f"{name}-text", [sample.pack for sample in samples], capacity=64)
    (folder / "left").mkdir()
    return folder


def works(sources: Path) -> dict[str, tuple[str | None, Work]]:
    """Return functions that write ``folder / "x"``, each with the shard of ``sources`` to replace, if any."""
    new, text = str(sources / "new"), str(sources / "new-text")

    def written(prefix: Path) -> None:
        write_media(prefix, NEW, capacity=64, overwrite=True, durable=True)

    def split_up(prefix: Path) -> None:
        split(new, prefix, SplitSize(shards=3), overwrite=True)

    def packed(prefix: Path) -> None:
        pack_shard(Shard(new), str(prefix), PackOptions(64), overwrite=True)

    def accepted(prefix: Path) -> None:
        rebuild(prefix, accept_contents=True)

    return {
        "build": (None, written),
        "build over images": ("old", written),
        "build over text": ("old-text", written),
        "text over images": (
            "old",
            lambda prefix: write_samples(prefix, [each.pack for each in NEW], overwrite=True, durable=True),
        ),
        "merge": (None, lambda prefix: merge([sources / "old", sources / "new"], prefix)),
        "merge over images": ("old", lambda prefix: merge([sources / "old", new], prefix, overwrite=True)),
        "split": (None, split_up),
        "copy": (None, lambda prefix: copy_shard(new, str(prefix), overwrite=True)),
        "copy over images": ("old", lambda prefix: copy_shard(new, str(prefix), overwrite=True)),
        "copy text over images": ("old", lambda prefix: copy_shard(text, str(prefix), overwrite=True)),
        "pack": (None, packed),
        "pack over images": ("old", packed),
        "convert": ("old", lambda prefix: convert(new, prefix, "sft-idx", ConvertOptions(overwrite=True))),
        "rebuild": ("no index", rebuild),
        "derive": ("no header", rebuild),
        "accept": ("changed tokens", accepted),
        "remove": ("old", lambda prefix: remove_shard(ShardPaths.of(prefix))),
    }


def put_before(sources: Path, before: str | None, folder: Path) -> None:
    """Put a shard at ``folder / "x"``, and a file of another program."""
    folder.mkdir(parents=True)
    (folder / "x.txt").write_text("not of the package")
    if before is None:
        return
    damage = {"no index": ".idx", "no header": ".seq.idx", "changed tokens": ".bin"}.get(before)
    name = before if damage is None else "old"
    for path in sources.glob(f"{name}.*"):
        suffix = path.name.removeprefix(name)
        raw = path.read_bytes()
        if suffix == damage == ".bin":
            raw = bytes([raw[0] ^ 1]) + raw[1:]
        elif suffix == damage:
            continue
        (folder / f"x{suffix}").write_bytes(raw)


def shards_in(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return the files of each shard that opens in a folder, by name. Each must be complete."""
    found = {}
    for path in sorted(folder.glob("*.seq.idx")):
        name = path.name.removesuffix(".seq.idx")
        with contextlib.suppress(ShardNotFoundError):
            if opens(folder / name):
                paths = ShardPaths.of(folder / name).with_listed(Shard(folder / name).header.metadata)
                found[name] = {paths.suffix(each): Path(each).read_bytes() for each in paths.all}
    return found


@pytest.mark.parametrize("name", [*works(Path())])
@kills_at
def test_killed_at_a_step_the_old_shard_or_the_new_one_is_whole(tmp_path: Path, name: str, stride: int) -> None:
    """Running the command again gives the same result as without the kill."""
    sources = sources_in(tmp_path)
    before, work = works(sources)[name]
    put_before(sources, before, tmp_path / "calm")
    old = shards_in(tmp_path / "calm")
    work(tmp_path / "calm" / "x")
    new, tree = shards_in(tmp_path / "calm"), tree_of(tmp_path / "calm")
    for each in new:
        assert verify_shard(tmp_path / "calm" / each, full=True).ok
    seen = set()
    first = random.Random(name).randrange(stride)
    for step in range(first, 400, stride):
        folder = tmp_path / str(step)
        put_before(sources, before, folder)
        if not killed_at(step, lambda folder=folder: work(folder / "x")):  # type: ignore[misc]
            assert tree_of(folder) == tree
            break
        left = shards_in(folder)
        for each, files in left.items():
            assert files in (old.get(each), new.get(each)), (step, each)
        seen.add("old" if left == old else "new" if left == new else "some")
        if name == "remove":
            work(folder / "x")
        else:
            with contextlib.suppress(SFTIndexError):  # sometimes only the folder is left to remove
                work(folder / "x")
        assert shards_in(folder) == new, step
        assert {path.name for path in folder.iterdir()} >= {path.name for path in (tmp_path / "calm").iterdir()}
        assert (folder / "x.txt").read_text() == "not of the package"
        for path in folder.iterdir():
            assert not path.name.endswith(MEDIA_SUFFIXES) or path.name in tree, step
        shutil.rmtree(folder)
    assert step > 12
    assert seen


def test_what_a_kill_leaves_of_images_is_the_folder_and_no_file_at_the_prefix(tmp_path: Path) -> None:
    suspended(tmp_path / "x")
    assert folder_of(tmp_path) == ["x.building"]
    assert folder_of(tmp_path / "x.building") == sorted(
        [".bin", ".loss.bin", ".seq.bin", ".media.data", "build.json", "lock", "packs", "items", "blobs"]
    )
