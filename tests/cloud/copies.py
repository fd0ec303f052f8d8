"""Shards to copy, uploads in separate processes that can be killed, and the contents of a bucket."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import ShardWriter

ROOT = Path(__file__).parents[2]
# Nothing on one machine takes this long; a longer wait means a hang.
PATIENCE_SECONDS = 120.0
_PACK_TOKENS = 4096


def write_shard(prefix: Path, num_packs: int, seed: int) -> str:
    """Write a shard of packs of 4096 random tokens: 8 KiB of ``.bin`` each, which no store can compress."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    mask = np.ones(_PACK_TOKENS, np.uint8)
    mask[[2047, -1]] = 0
    with ShardWriter(prefix, token_dtype=np.dtype(np.uint16), durable=False) as writer:
        for _ in range(num_packs):
            writer.add_pack(random.integers(0, 65536, _PACK_TOKENS).astype(np.uint16), mask, [0, 2048])
        writer.finalize()
    return str(prefix)


def command(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start ``megatron-sft-idx`` as a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_sft_idx", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait until a process ends, within a time limit. Return exit code and output."""
    try:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out + err


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run ``command`` and ``ended``."""
    return ended(command(*arguments, **environment))


def wait_until(holds: Callable[[], Any], what: str) -> None:
    """Wait for a condition. Raise AssertionError if it does not become true in time."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < until, f"never happened: {what}"
        time.sleep(0.01)


def keys(s3: Any, bucket: str, prefix: str = "") -> set[str]:
    """Return all keys of a bucket with a prefix."""
    return {each["Key"] for each in s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])}


def five_keys(prefix: str) -> set[str]:
    """Return the keys of one shard."""
    return {prefix + suffix for suffix in SUFFIXES}


def remote_files(s3: Any, bucket: str, prefix: str) -> dict[str, bytes]:
    """Return the five objects of a shard, in the form of ``sample_packs.five_files``."""
    return {suffix: s3.get_object(Bucket=bucket, Key=prefix + suffix)["Body"].read() for suffix in SUFFIXES}


def unfinished(s3: Any, bucket: str) -> list[str]:
    """Return the keys of unfinished multipart uploads."""
    return [each["Key"] for each in s3.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]
