"""The examples in docstrings give what they show; they may read the shard ``data/chats``."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
from house import is_light
from packs import demo_samples, write_samples

PACKAGE = Path(__file__).parents[1] / "megatron_sft_idx"
_PROMPT = re.compile(r"^\s*>>> ", re.MULTILINE)
# Modules with examples, found by their text, so that those which import torch are imported only by their own test.
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if _PROMPT.search(path.read_text())
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    write_samples(tmp_path / "data/chats", demo_samples())
    monkeypatch.chdir(tmp_path)
    if not is_light(name):
        pytest.importorskip("torch")
        pytest.importorskip("megatron.core")
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted
    assert not failed
