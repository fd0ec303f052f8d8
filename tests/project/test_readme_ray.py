"""The commands of the pages that need Ray."""

from __future__ import annotations

from pathlib import Path

from chats import command
from doc_blocks import PAGES, blocks_of, clone, fast_environment, paste
from ray_clusters import require_ray

require_ray()


def test_the_pages_on_ray(tmp_path: Path) -> None:
    blocks = [block for page in PAGES for block in blocks_of(page) if block.kind == "sh ray"]
    paste(blocks, clone(tmp_path), fast_environment(tmp_path), 900)
    verified = command("verify", "--full", f"{tmp_path}/data/ray-*")
    assert (verified.code, verified.out.splitlines()[-1]) == (0, "2 shards: all ok")
