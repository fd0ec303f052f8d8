"""The shards that all tests of other trainers read."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_shards import make_shards


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Prefixes of a shard, and of the control whose sequences are trained one token later."""
    return make_shards(tmp_path_factory.mktemp("shards"))
