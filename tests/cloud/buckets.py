"""Put shards into the test server's buckets, and configure multi-storage-client for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sample_packs import Sample, five_files, write_samples
from swift_server import SwiftServer

from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.storage.remote import forget_stores


def put(s3: Any, bucket: str, key: str, prefix: Path) -> None:
    """Put a shard's five files under a key, data first and ``.seq.idx`` last."""
    files = five_files(prefix)
    for suffix in SUFFIXES:
        s3.put_object(Bucket=bucket, Key=key + suffix, Body=files[suffix])


def put_samples(s3: Any, bucket: str, key: str, folder: Path, packs: Sequence[Sample], **options: Any) -> Path:
    """Write packs as a shard in ``folder``, put it into a bucket, and return its local prefix."""
    prefix = folder / key.replace("/", "-")
    write_samples(prefix, packs, **{"overwrite": True, **options})
    put(s3, bucket, key, prefix)
    return prefix


def reach(swift: SwiftServer, bucket: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return both addresses of a bucket, by scheme. Index files are cached below ``folder``."""
    credentials = swift.credentials
    options = {"base_path": bucket, "region_name": "us-east-1", "endpoint_url": swift.endpoint}
    keys = {"access_key": credentials.access_key, "secret_key": credentials.secret}
    profile = {
        "storage_provider": {"type": "s3", "options": options},
        "credentials_provider": {"type": "S3Credentials", "options": keys},
        "retry": {"attempts": 1, "delay": 0.1},
    }
    name = f"swift-{bucket}"
    (folder / "msc.json").write_text(json.dumps({"profiles": {name: profile}}))
    monkeypatch.setenv("MSC_CONFIG", str(folder / "msc.json"))
    monkeypatch.setenv("SFT_IDX_CACHE", str(folder / "index-cache"))
    monkeypatch.setenv("SFT_IDX_STORAGE_SECONDS", "60")
    forget_stores()
    return {"s3": f"s3://{bucket}", "msc": f"msc://{name}"}
