"""Kill ``preprocess`` of rows with images at each step: the same command then gives the same bytes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from chats import command, write_rows
from interrupted_runs import be_quick
from kills import killed_at
from media_processors import PROCESSORS, png
from sample_packs import opens, tree_of

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.shard import Shard


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("every", [23, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_with_images_killed_at_a_step_make_the_same_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, every: int
) -> None:
    be_quick(monkeypatch)
    (tmp_path / "processor").mkdir()
    PROCESSORS["llava of any size"](tmp_path / "processor")
    names = []
    for number, size in enumerate([(28, 42), (28, 42), (56, 28), (14, 14)]):
        (tmp_path / f"{number}.png").write_bytes(png(*size, number))
        names.append(f"{number}.png")
    rows = [
        {
            "prompt": "<image>" * (number % 3) + f"what is {number}?",
            "completion": f"the cat {number}",
            "images": [names[(number + each) % 4] for each in range(number % 3)],
        }
        for number in range(40)
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    folder = tmp_path / "processor"

    def run(prefix: Path) -> None:
        prefix.parent.mkdir(exist_ok=True)
        done = command(
            *("preprocess", "--input", source, "--tokenizer-model", folder, "--processor", folder, "--workers", 0),
            *("--media-root", tmp_path, "--seq-length", 128, "--output-prefix", prefix, "--output-shards", shards),
        )
        assert done.code == 0, done.err

    run(tmp_path / "calm" / "x")
    wanted = tree_of(tmp_path / "calm")
    made = [str(path)[: -len(".seq.idx")] for path in (tmp_path / "calm").glob("*.seq.idx")]
    assert len(made) == shards
    for each in made:
        assert verify_shard(each, full=True).ok
        assert Shard(each).media is not None
    step = random.Random(shards).randrange(every)
    kills = 0
    while True:
        prefix = tmp_path / str(step) / "x"
        prefix.parent.mkdir()
        if not killed_at(step, lambda prefix=prefix: run(prefix)):  # type: ignore[misc]
            assert tree_of(prefix.parent) == wanted
            break
        kills += 1
        for each in made:
            if opens(place := prefix.parent / Path(each).name):
                found = {
                    path.name: path.read_bytes() for path in prefix.parent.glob(f"{place.name}.*") if path.is_file()
                }
                assert found.items() <= wanted.items()
        run(prefix)
        assert tree_of(prefix.parent) == wanted, step
        shutil.rmtree(prefix.parent)
        step += every
    assert kills > 2
