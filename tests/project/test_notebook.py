"""The notebook in examples/ runs, shows what it has stored, and its model learns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from notebooks import ROOT, executed, folder_like_a_clone

NOTEBOOK = ROOT / "examples/masks.ipynb"
DECIMALS = re.compile(r"\d+\.\d+")


def shown(cell: dict[str, object]) -> str:
    """The outputs of a cell; decimals of a cell whose numbers vary from machine to machine are left out."""
    text = json.dumps(cell.get("outputs", []), ensure_ascii=False, indent=1)
    return DECIMALS.sub("N", text) if "numbers-vary" in dict(cell["metadata"]).get("tags", ()) else text  # type: ignore[call-overload]


def test_the_notebook_shows_what_it_has_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    monkeypatch.chdir(folder_like_a_clone(tmp_path))
    found, names = executed(stored)
    for old, new in zip(stored["cells"], found["cells"], strict=True):
        assert shown(new) == shown(old), "".join(old["source"])
        assert new.get("execution_count") == old.get("execution_count")
    losses = names["losses"]
    assert sum(losses[-10:]) / 10 < losses[0] - 2


def test_nothing_of_a_machine_is_stored() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r'stderr|"error"|\d s\b|seconds  ', text)
