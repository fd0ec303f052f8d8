"""Whether what lies at a prefix is what this run would make, and if not, what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megatron_sft_idx.chat.inputs.files import InputFile
from megatron_sft_idx.layout import Header
from megatron_sft_idx.preprocess.encoding import RowEncoder
from megatron_sft_idx.preprocess.outputs import PackOptions
from megatron_sft_idx.preprocess.source import source_fingerprint

__all__ = ["corpus_differences", "option_differences", "packing_differences", "shards_differences"]


def option_differences(found: Mapping[str, Any], encoder: RowEncoder) -> list[str]:
    """What of the options that decide over tokens and masks is another in ``found``, a header's metadata."""
    wanted = encoder.describe()
    return list(_differences({key: found.get(key) for key in wanted}, wanted))


def packing_differences(found: Mapping[str, Any], packing: PackOptions) -> list[str]:
    """What of the packing options is another in ``found``: a packed shard's metadata, or what a run has noted."""
    noted, wanted = found.get("packing"), asdict(packing)
    packed = {key: noted.get(key) for key in wanted} if isinstance(noted, dict) else None
    return list(_differences(packed, wanted, "packing"))


def corpus_differences(header: Header, encoder: RowEncoder, files: Sequence[InputFile]) -> list[str]:
    """As ``option_differences``, and where these are the same, the content of the input, which is read for it."""
    if differs := option_differences(header.metadata, encoder):
        return differs
    found, wanted = header.metadata.get("sources", {}).get("fingerprint"), source_fingerprint(files)
    return [] if found == wanted else [f"the content of the input was {found}, is {wanted}"]


def shards_differences(
    headers: Sequence[Header], encoder: RowEncoder, files: Sequence[InputFile], packing: PackOptions
) -> list[str]:
    """As ``corpus_differences``, and how they were packed, of the shards of one run; the input is read once."""
    for header in headers:
        if differs := packing_differences(header.metadata, packing):
            return differs
    for header in headers[1:]:
        found, wanted = (each.metadata.get("sources") for each in (header, headers[0]))
        if differs := option_differences(header.metadata, encoder) or list(_differences(found, wanted, "sources")):
            return differs
    return corpus_differences(headers[0], encoder, files) if headers else []


def _differences(found: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """``name was this, is that`` of every value in nested objects."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*found, *wanted}):
            inner = key if name in ("", "options") else f"{name} {key}"
            yield from _differences(found.get(key), wanted.get(key), inner.replace("_", " "))
    elif found != wanted:
        yield f"{name} was {found!r}, is {wanted!r}"
