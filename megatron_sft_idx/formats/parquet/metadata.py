"""What Parquet's columns cannot say of packed data, as JSON in the schema's metadata."""

from __future__ import annotations

from typing import Any

import orjson

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.base import PackedSpec

__all__ = ["KEY", "decode", "encode"]

KEY = b"megatron_sft_idx"
_VERSION = 1


def encode(spec: PackedSpec) -> bytes:
    """The JSON for a file that is going to hold what the spec says; the same for the same spec."""
    stated = {
        "format": "packed-sft",
        "version": _VERSION,
        "mask_alignment": "label",
        "token_dtype": spec.token_dtype.name,
        "capacity": spec.capacity,
        "longest_pack": spec.longest_pack,
        "sequence_multiple": spec.sequence_multiple,
        "pad_id": spec.pad_id,
        "num_packs": spec.num_packs,
        "num_sequences": spec.num_sequences,
        "num_tokens": spec.num_tokens,
        "metadata": dict(spec.metadata),
    }
    return orjson.dumps(stated, option=orjson.OPT_SORT_KEYS)


def decode(metadata: dict[bytes, bytes] | None, path: str) -> dict[str, Any]:
    """What such JSON says; empty where a file has none, as those of other writers.

    Raises:
        FormatError: it is there and is not JSON, or of a version that this package does not read.
    """
    raw = (metadata or {}).get(KEY)
    if raw is None:
        return {}
    try:
        stated = orjson.loads(raw)
    except ValueError as error:
        raise FormatError(f"{path}: schema metadata {KEY.decode()!r} is not JSON: {error}") from None
    if not isinstance(stated, dict) or stated.get("version") != _VERSION:
        raise FormatError(
            f"{path}: schema metadata {KEY.decode()!r} is not of version {_VERSION};"
            " upgrade megatron-sft-idx, or drop the key to read the columns alone"
        )
    return stated
