"""Serve folders as ``msc://`` with multi-storage-client's own file provider, for tests without a server."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from megatron_sft_idx.storage.remote import forget_stores

_NUMBERS = itertools.count()


def serve_folder(folder: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return ``msc://profile`` for a folder.

    The configuration in ``config`` also applies to processes started later.
    """
    pytest.importorskip("multistorageclient", reason="pip install 'megatron-sft-idx[cloud]'")
    profile = f"folder-{next(_NUMBERS)}"  # the library caches its clients by name
    provider = {"type": "file", "options": {"base_path": str(folder)}}
    config.write_text(json.dumps({"profiles": {profile: {"storage_provider": provider}}}))
    monkeypatch.setenv("MSC_CONFIG", str(config))
    monkeypatch.setenv("SFT_IDX_CACHE", str(config.with_suffix(".cache")))
    monkeypatch.setenv("SFT_IDX_STORAGE_SECONDS", "5")
    forget_stores()
    return f"msc://{profile}"
