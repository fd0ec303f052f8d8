"""Read the messages quoted in the troubleshooting tables, and make shards for the scenes that print them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chats import preprocess
from doc_blocks import ROOT

Scenes = dict[str, Callable[[], str]]


def quoted(page: str, heading: str) -> list[str]:
    """Return the first cells of the table below a heading that consist of code only."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`|]+)` \|", text, flags=re.MULTILINE)


def scene(scenes: Scenes, message: str) -> str:
    """Run the scene with the name that the message begins with, and return its output."""
    (provoke,) = (provoke for start, provoke in scenes.items() if message.startswith(start))
    return provoke()


def chat(question: Any = "a", answer: str = "b") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@contextmanager
def some_shards(here: Path) -> Iterator[Path]:
    """Provide a folder with the demo's chats as a packed shard, and the corpus from which it was packed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        assert preprocess(Path("data/chats"), "--keep-corpus").code == 0
        yield here
