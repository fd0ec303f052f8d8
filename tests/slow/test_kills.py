"""Five hundred kills at random moments of a build."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from interrupted_runs import Case, be_quick, some_rows
from kills import killed_after

pytestmark = pytest.mark.slow

KILLS = 500


def test_five_hundred_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_quick(monkeypatch)
    for workers in (0, 2):
        (tmp_path / str(workers)).mkdir()
    cases = {workers: Case(tmp_path / str(workers), some_rows(60), "--workers", workers) for workers in (0, 2)}
    chance = random.Random(0)
    kills: Counter[str] = Counter()
    attempt = 0
    while kills.total() < KILLS:
        attempt += 1
        # Only one run in ten has worker processes, because they take seconds to start.
        workers = 2 if attempt % 10 == 0 else 0
        case = cases[workers]
        prefix = case.folder / str(attempt) / "x"
        more = False
        # Every third run is killed again during its resumption, up to four times.
        for _ in range(1 + (attempt % 3 == 0) * chance.randrange(1, 5)):
            if not killed_after(chance.uniform(0, 1.1 * case.seconds), lambda: case.run(prefix)):  # noqa: B023
                break
            kills[f"{workers} workers, {'again' if more else 'fresh'}"] += 1
            case.check_what_is_left(prefix)
            more = True
        case.assert_ends_the_same(prefix)
    with capsys.disabled():
        print(f"\n{kills.total()} kills in {attempt} runs, each ended byte-identical: {dict(sorted(kills.items()))}")
