"""Rows with images in ``produce``: the same shards for any way of running, and the source row of each pack."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chats import command, write_rows
from interrupted_runs import be_quick
from live_catalogs import loader
from media_processors import conversation, idefics3, png
from media_samples import as_plain
from productions import acknowledge, until

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import Catalog, shard_name
from megatron_sft_idx.shard import Shard

IMAGES = [png(20 + 9 * seed, 60 - 7 * seed, seed) for seed in range(6)]
SMALL = ("--seq-length", 4096, "--max-sequences-per-pack", 8, "--tokens-per-shard", 9000)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        be_quick(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a processor, and chats with images as data URIs and paths, and with only text."""
    made = tmp_path_factory.mktemp("media")
    idefics3(made / "processor")
    (made / "images").mkdir()
    for number, data in enumerate(IMAGES):
        (made / "images" / f"{number}.png").write_bytes(data)
    draw = random.Random(5)

    def given(data: bytes) -> Any:
        if draw.random() < 0.5:
            return str(made / "images" / f"{IMAGES.index(data)}.png")
        return "data:image/png;base64," + base64.b64encode(data).decode()

    rows = []
    for _ in range(60):
        chat = conversation(draw, "image", IMAGES)
        for message in chat:
            parts = message["content"] if isinstance(message["content"], list) else []
            for part in parts:
                if part["type"] == "image":
                    part["image"] = given(part["image"]["bytes"])
        rows.append({"messages": chat})
    write_rows(made / "rows.jsonl", rows)
    return made


def options(folder: Path) -> list[object]:
    processor = folder / "processor"
    given = ["--input", folder / "rows.jsonl", "--tokenizer", processor, "--processor", processor]
    return [*given, "--media-root", folder]


def produced(folder: Path, catalog: Path, *more: object) -> Any:
    return command("produce", "--catalog", catalog, *options(folder), *SMALL, *more)


def files_in(catalog: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(catalog.glob("shard-*")) if path.is_file()}


def sequences_in(prefixes: list[Path]) -> Counter[str]:
    """Return every sequence of some shards with its images, relative to its first token."""
    found: Counter[str] = Counter()
    for prefix in prefixes:
        for pack in Shard(prefix):
            bounds = pack["seq_boundaries"].tolist()
            for begin, end in pairwise(bounds):
                items = [(k, s - begin, n, d) for k, s, n, d in as_plain(pack["media"]) if begin <= s < end]
                arrays = pack["input_ids"][begin:end].tolist(), pack["loss_mask"][begin:end].tolist()
                found[repr((arrays, items))] += 1
    return found


@pytest.fixture(scope="module")
def calm(folder: Path) -> Path:
    done = produced(folder, folder / "calm", "--workers", 0)
    assert done.code == 0, done.err
    return folder / "calm"


def test_a_catalog_has_the_images_of_its_rows(folder: Path, calm: Path) -> None:
    numbers = Catalog(calm).numbers()
    assert len(numbers) > 3
    prefixes = [calm / shard_name(number) for number in numbers]
    assert all(verify_shard(prefix, full=True).ok for prefix in prefixes)
    made = command("preprocess", *options(folder), "--seq-length", 4096, "--output-prefix", folder / "whole")
    assert made.code == 0, made.err
    assert sequences_in(prefixes) == sequences_in([folder / "whole"])
    assert sum(len(pack["media"]) for prefix in prefixes for pack in Shard(prefix)) > 40
    said = produced(folder, calm)
    assert (said.code, "already complete" in said.out) == (0, True)
    text = ("--input", folder / "rows.jsonl", "--tokenizer", folder / "processor")
    other = command("produce", "--catalog", calm, *text, *SMALL)
    assert (other.code, "other options: processor was" in other.err) == (1, True), other.err
    with loader(calm, seq_length=4096) as batches, pytest.raises(FormatError, match="contains images or audio"):
        next(batches)
    with loader(calm, seq_length=4096, ignore_media=True) as batches:
        taken = sum(int((batch["loss_mask"].sum(1) > 0).sum()) for batch in batches)
    assert taken == sum(len(Shard(prefix)) for prefix in prefixes)


@pytest.mark.slow
def test_workers_change_no_byte(folder: Path, calm: Path, tmp_path: Path) -> None:
    assert produced(folder, tmp_path / "workers", "--workers", 2).code == 0
    assert files_in(tmp_path / "workers") == files_in(calm)


def test_a_kill_changes_no_byte(folder: Path, calm: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    given = ["produce", "--catalog", again, *options(folder), *SMALL, "--workers", 0]
    run = subprocess.Popen(
        [sys.executable, "-m", "megatron_sft_idx", *map(str, given)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: Catalog(again).numbers() or run.poll() is not None)
    run.send_signal(signal.SIGKILL)
    run.wait()
    done = produced(folder, again)
    assert done.code == 0, done.err
    assert files_in(again) == files_in(calm)


def test_completed_shards_go_with_their_images(folder: Path, tmp_path: Path) -> None:
    assert produced(folder, tmp_path / "catalog", "--workers", 0).code == 0
    count = len(Catalog(tmp_path / "catalog").numbers())
    acknowledge(tmp_path / "catalog", count - 1)
    assert produced(folder, tmp_path / "catalog", "--keep-recent", 0).code == 0
    left = {name.split(".")[0] for name in files_in(tmp_path / "catalog")}
    assert left == {shard_name(count - 1)}


# ---- source rows ----


def test_packs_with_images_say_which_row_they_come_from(folder: Path, tmp_path: Path) -> None:
    """Tests preprocess, pack, split and merge."""
    made = command("preprocess", *options(folder), "--seq-length", 4096, "--output-prefix", tmp_path / "x")
    assert made.code == 0, made.err
    halves = tmp_path / "half-00001-of-00002", tmp_path / "half-00000-of-00002"
    for line in (
        ("pack", tmp_path / "x", "--output-prefix", tmp_path / "packed", "--seq-length", 6000),
        ("split", tmp_path / "packed", "--shards", 2, "--output-prefix", tmp_path / "half"),
        ("merge", *halves, "--output-prefix", tmp_path / "merged"),
    ):
        done = command(*line)
        assert done.code == 0, done.err
    text = ("--input", folder / "rows.jsonl", "--tokenizer", folder / "processor")
    without = command("preprocess", *text, "--seq-length", 4096, "--output-prefix", tmp_path / "x")
    assert without.code == 1, without.out  # it does not count as already made
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for name in ("x", "packed", "merged"):
        shard, seen = Shard(tmp_path / name, columns=["source"]), set()
        for number, pack in enumerate(shard):
            bounds = pack["seq_boundaries"].tolist()
            for place, (_, row) in enumerate(pack["source"].tolist()):
                seen.add(row)
                begin, end = bounds[place : place + 2]
                shown = [item for item in as_plain(pack["media"]) if begin <= item[1] < end]
                assert [data for *_, data in shown] == images_of(rows[row])
                if row % 9:
                    continue
                said = command("inspect", tmp_path / name, "--row", f"rows.jsonl:{row + 1}")
                assert f"rows.jsonl:{row + 1}: pack {number}, sequence {place}\n" in said.out
                assert f"(rows.jsonl:{row + 1})" in command("inspect", tmp_path / name, "--pack", number).out
        assert seen == set(range(60))


def images_of(row: Any) -> list[bytes]:
    parts = [part for message in row["messages"] if isinstance(message["content"], list) for part in message["content"]]
    given = [part["image"] for part in parts if part["type"] == "image"]
    return [base64.b64decode(each[22:]) if each.startswith("data:") else Path(each).read_bytes() for each in given]
