"""Commands that write to a bucket do not change other programs' objects, or files in the staging folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from chats import SUFFIXES
from hostile import TO_A_BUCKET, Recipe, World, within
from object_folders import serve_folder
from obstacles import OBSTACLES, attempt, judge_bystanders


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("buckets"))


@pytest.fixture
def url(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> str:
    world.fresh()
    (world.here / "bucket").mkdir()
    world._seen = None
    return serve_folder(world.here / "bucket", tmp_path / "msc.json", monkeypatch)


@pytest.mark.sample(10)
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
@pytest.mark.parametrize("text", TO_A_BUCKET)
def test_objects_of_others_stay(world: World, url: str, text: str, flags: tuple[str, ...]) -> None:
    recipe = Recipe(text.replace("URL", url))
    wrong = []
    for name in (*(f"out{suffix}" for suffix in SUFFIXES), "out.building", "out.probe", "out.journal", "out"):
        bucket = world.here / "bucket"
        shutil.rmtree(bucket)
        bucket.mkdir()
        (bucket / name).write_text("of somebody else")
        world._seen = None
        with within(world.here):
            before = world.look()
            outcome = attempt(recipe.argv(None, *flags))
        after = world.look()
        # The store keeps its own files next to its objects.
        wrong += [f"{name}: {one}" for one in judge_bystanders(before, after, may_go={"here/bucket"})]
        if outcome.code not in (0, 1) or (outcome.code and "error: " not in outcome.err):
            wrong.append(f"{name}: {outcome}")
        shutil.rmtree(world.here / "stage", ignore_errors=True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.sample(10)
@pytest.mark.parametrize("way", OBSTACLES)
@pytest.mark.parametrize("text", TO_A_BUCKET[1:])
def test_what_is_in_the_place_of_the_staging_folder_stays(world: World, url: str, text: str, way: str) -> None:
    recipe = Recipe(text.replace("URL", url))
    with within(world.here):
        OBSTACLES[way]("stage")
        world._seen = None
        before = world.look()
        outcome = attempt(recipe.argv(None, "--overwrite"))
    after = world.look()
    assert list(judge_bystanders(before, after, may_go={"here/bucket", "here/project"})) == []
    assert outcome.code in (0, 1), outcome
    assert outcome.code == 0 or "stage" in outcome.err
    left = [name for name in after.keys() - before.keys() if not name.startswith("here/bucket")]
    assert not left, left
    assert not os.path.exists(world.here / "nowhere")
