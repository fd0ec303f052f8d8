"""Kill any command at any step, then run any other at the prefix: shards that open there are always complete."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import SUFFIXES
from chats import files_of as files_of_text
from columned import write_columned
from kills import killed_at
from media_samples import MediaSample, item_of, write_media
from sample_packs import Sample, demo_samples, opens

from megatron_sft_idx.check import rebuild
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import MEDIA_SUFFIXES
from megatron_sft_idx.packs.buckets import copy_shard
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.split import SplitSize, split
from megatron_sft_idx.shard import Shard, remove_shard, write_column
from megatron_sft_idx.shard.media_reader import MediaItem

pytestmark = pytest.mark.slow

CHAINS = 200
NAME = "x-00000-of-00002"  # also an output of the split
Files = dict[str, bytes]


def files_of(prefix: Path) -> Files:
    """Return the bytes of a shard, its columns, and its images and audio, by suffix."""
    media = {suffix: Path(f"{prefix}{suffix}") for suffix in MEDIA_SUFFIXES}
    return files_of_text(prefix) | {suffix: path.read_bytes() for suffix, path in media.items() if path.exists()}


def make_sources(folder: Path) -> None:
    """Write shards with files of equal sizes. ``masked`` has other masks and columns, ``named`` has other columns."""
    grade = {"grade": ColumnSpec("pack", "u1")}
    packs = demo_samples()
    masked = [Sample(each.tokens, [0] * len(each.tokens), each.starts) for each in packs]
    other = [Sample([token + 1 for token in each.tokens], each.mask, each.starts) for each in packs]
    for number, (name, samples) in enumerate({"one": packs, "masked": masked, "named": packs, "other": other}.items()):
        write_columned(folder / name, samples, {} if name == "other" else grade)
        for column in ("late", "note") if name != "other" else ():
            write_column(folder / name, column, np.full(len(packs), number, "u1"), per="pack")
    # The same packs with images, and with other images of the same sizes.
    for number, name in enumerate(("shown", "altered")):
        write_media(folder / name, [MediaSample(pack, [_image(pack, number)]) for pack in packs])


def _image(pack: Sample, number: int) -> MediaItem:
    return item_of("image", 0, 1, bytes([number, pack.tokens[0] % 3]))


def works(sources: Path) -> dict[str, Callable[[Path], Any]]:
    """Return the commands to run at a prefix. All except the last three make a shard in any state."""
    copies = {
        name: lambda target, name=name: copy_shard(str(sources / name), str(target), overwrite=True)
        for name in ("one", "masked", "named", "other", "shown", "altered")
    }
    return {
        **copies,
        "merge shown": lambda target: merge([sources / "altered", sources / "shown"], target, overwrite=True),
        "merge": lambda target: merge([sources / "masked"], target, overwrite=True),
        "build": lambda target: write_columned(target, demo_samples(7)[::-1], {}, overwrite=True, durable=True),
        "split": lambda target: split(
            sources / "one", str(target).removesuffix("-00000-of-00002"), SplitSize(shards=2), overwrite=True
        ),
        "attach": lambda target: write_column(
            target, "note", np.full(len(Shard(target)), 9, "u1"), per="pack", overwrite=True
        ),
        "rebuild": rebuild,
        "remove": lambda target: remove_shard(ShardPaths.of(target)),
    }


def test_whatever_is_killed_and_whatever_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sources").mkdir()
    make_sources(tmp_path / "sources")
    todo, chance, kills = works(tmp_path / "sources"), random.Random(0), Counter[str]()
    makers = [*todo][:-3]
    made: dict[str, Files] = {}
    for name in makers:
        todo[name](tmp_path / name / NAME)
        made[name] = files_of(tmp_path / name / NAME)
    for chain in range(CHAINS):
        target = tmp_path / str(chain) / NAME
        target.parent.mkdir()
        (target.parent / f"{NAME}.txt").write_text("not of the package")
        trail = [chance.choice(["nothing", "lacks .idx", "lacks .media.items", *made])]
        start = trail[0].replace("lacks .idx", "masked").replace("lacks .media.items", "shown")
        for suffix, content in made.get(start, {}).items():
            if trail[0] != f"lacks {suffix}":
                Path(f"{target}{suffix}").write_bytes(content)
        for name in chance.choices([*todo], k=chance.randrange(1, 4)):
            step = chance.randrange(60)

            def work(name: str = name, target: Path = target) -> None:
                with contextlib.suppress(SFTIndexError):  # impossible work is an error
                    todo[name](target)

            is_killed = killed_at(step, work)
            kills[name] += is_killed
            trail.append(f"{name} {step if is_killed else 'done'}")
            is_there = all(Path(f"{target}{suffix}").exists() for suffix in SUFFIXES)
            if is_there and trail[0] == "lacks .media.items" and not Path(f"{target}.media.items").exists():
                is_there = Path(f"{target}.seq.idx").read_bytes() != made["shown"][".seq.idx"]  # unchanged
            if is_there and opens(target):
                left = files_of(target)
                if "attach" in str(trail):
                    left[".note.col"] = b""
                    known = [files | {".note.col": b""} for files in made.values()]
                else:
                    known = [*made.values()]
                assert left in known or b'"recovered"' in left[".seq.idx"], trail
        last = chance.choice(makers)
        todo[last](target)
        found = files_of(target)
        assert found == made[last], (trail, last)
        assert not [*target.parent.glob(f"{NAME}*.building")], (trail, last)
        assert (target.parent / f"{NAME}.txt").exists()
    with capsys.disabled():
        print(f"\n{kills.total()} kills in {CHAINS} chains, each shard a whole one: {dict(kills)}")
