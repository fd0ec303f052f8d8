"""``make test-megatron``: if a Python lacks the packages to test, its line reports a failure."""

from __future__ import annotations

import sys
from pathlib import Path

import matrix
import pytest


def test_a_python_with_bridge_has_an_environment_for_it_and_is_bad_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []

    def environment(name: str, found: Path, *packages: str, alone: str | None) -> Path:
        made.append((name, alone))
        return found

    own = "{}.{}".format(*sys.version_info)
    monkeypatch.setattr(matrix, "VERSIONS", (own,))
    monkeypatch.setattr(matrix, "BRIDGE", {own: ("bridge-not-there", ())})
    monkeypatch.setattr(matrix, "find", lambda version: Path(sys.executable))
    monkeypatch.setattr(matrix, "environment", environment)  # takes minutes, and is not tested here
    monkeypatch.setattr(matrix, "run_tests", lambda *_: "good: whatever was skipped")
    assert matrix.main("megatron") == 1
    assert made == [(f".venv-megatron-{own}", "bridge-not-there")]
    out = capsys.readouterr().out
    assert "bad: " in out
    assert "good: " not in out
    assert "bridge-not-there" in out
