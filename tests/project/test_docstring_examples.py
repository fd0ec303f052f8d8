"""The examples in docstrings give what they show; they may read the shard ``data/chats``.

Those about images may read ``data/colours``, made with the processor ``data/processor``.
"""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
from house import is_light
from sample_packs import demo_samples, write_samples

from megatron_sft_idx.layout.media_layout import MediaItem
from megatron_sft_idx.shard import ShardWriter

PACKAGE = Path(__file__).parents[2] / "megatron_sft_idx"
_PROMPT = re.compile(r"^\s*>>> ", re.MULTILINE)
# Modules with examples, found by their text, so that those which import torch are imported only by their own test.
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if _PROMPT.search(path.read_text())
)


def write_picture(folder: Path) -> None:
    """A processor of LLaVA, and a shard of one pack with one image."""
    media_processors = pytest.importorskip("media_processors", reason="the extra media is not installed")
    processor = media_processors.llava(folder / "processor")
    with ShardWriter(folder / "colours", media=True, durable=False) as writer:
        tokens = [5, *[processor.image_token_id] * 16, 7]
        writer.add_pack(tokens, [0] * 16 + [1, 0], [0], media=[MediaItem("image", 1, 16, media_processors.png(30, 40))])


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    write_samples(tmp_path / "data/chats", demo_samples())
    if name == "megatron_sft_idx.training.media":
        write_picture(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    if not is_light(name):
        pytest.importorskip("torch")
        pytest.importorskip("megatron.core")
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted
    assert not failed
