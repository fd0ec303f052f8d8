"""Shards for all tests of other trainers."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_shards import make_shards


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Provide the prefixes of a shard, and of a control shard with trained tokens shifted by one."""
    return make_shards(tmp_path_factory.mktemp("shards"))
