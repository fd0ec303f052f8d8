"""A producer killed at every step that changes the catalog, and at a hundred random moments.

This takes about five minutes on two cores, because every kill is followed by a run with byte-identical result.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from interrupted_runs import be_quick
from kills import killed_after, killed_at
from productions import Production, acknowledge, state_of

from megatron_sft_idx.live import Catalog

pytestmark = pytest.mark.slow

KILLS = 100


@pytest.fixture
def production(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Production:
    be_quick(monkeypatch)
    return Production(tmp_path)


# Publication is the same for all kinds of input; only reading differs, which is one of many steps per file.
@pytest.mark.parametrize(("source", "stride"), [("--input", 1), ("--watch", 3), ("-", 3)])
def test_every_step(production: Production, capsys: pytest.CaptureFixture[str], source: str, stride: int) -> None:
    step = 0
    while killed_at(step, lambda: production.run(production.folder / f"{step}", source)):  # noqa: B023
        production.check_what_is_left(production.folder / f"{step}")
        production.assert_ends_the_same(production.folder / f"{step}", source)
        step += stride
    assert step > 100
    with capsys.disabled():
        print(f"\n{source}: killed at {step // stride} of {step} steps, each ended byte-identical")


def test_every_step_while_completed_shards_are_removed(
    production: Production, capsys: pytest.CaptureFixture[str]
) -> None:
    last = state_of(production.folder / "calm")

    def run(at: Path) -> int:
        return production.run(at, "--input", "--keep-recent", 0).code

    step = 0
    while True:
        at = production.folder / f"{step}"
        acknowledge(at, 10**6)
        if not killed_at(step, lambda: run(at)):  # noqa: B023
            break
        assert run(at) == 0
        state = state_of(at)
        assert (state.published, state.freed, state.input) == (last.published, last.published, last.input)
        assert (Catalog(at).present(), Catalog(at).end()) == ([], last.published)
        step += 1
    assert step > 100
    with capsys.disabled():
        print(f"\n--keep-recent 0: killed at each of {step} steps, each ended with the same count and cursor")


def test_random_moments(production: Production, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(0)
    kills = attempt = 0
    while kills < KILLS:
        attempt += 1
        source = ("--input", "--watch", "-")[attempt % 3]
        at = production.folder / f"{attempt}"
        for _ in range(1 + (attempt % 4 == 0) * chance.randrange(1, 5)):
            moment = chance.uniform(0, 1.1 * production.seconds)
            if not killed_after(moment, lambda: production.run(at, source)):  # noqa: B023
                break
            kills += 1
            production.check_what_is_left(at)
        production.assert_ends_the_same(at, source)
    with capsys.disabled():
        print(f"\n{kills} kills in {attempt} runs, each ended byte-identical")
