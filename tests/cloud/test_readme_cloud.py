"""The commands of the pages that need an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chats import CHATS, preprocess
from copies import five_keys, keys
from doc_blocks import PAGES, blocks_of, clone, fast_environment, paste

pytestmark = pytest.mark.cloud


def test_the_pages_with_a_bucket(s3: Any, tmp_path: Path) -> None:
    s3.create_bucket(Bucket="bucket")
    s3.put_object(Bucket="bucket", Key="raw/chats.jsonl", Body=CHATS.read_bytes())
    assert preprocess(tmp_path / "data/chats").code == 0
    blocks = [block for page in PAGES for block in blocks_of(page) if block.kind == "sh cloud"]
    paste(blocks, clone(tmp_path), fast_environment(tmp_path), 900)
    assert keys(s3, "bucket", "sft/") == {
        *five_keys("sft/chats"), *five_keys("sft/more"), "sft/chats.source.col", "sft/more.source.col",
    }  # fmt: skip
