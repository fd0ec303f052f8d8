"""What a shard's JSON block says of where its tokens come from; None where it says nothing."""

from __future__ import annotations

from typing import Any

from megatron_sft_idx.layout import Header

__all__ = ["source_of", "template_of", "tokenizer_of", "vocab_size_of"]


def tokenizer_of(header: Header) -> str | None:
    """Fingerprint of the tokenizer that made the ids."""
    return _fingerprint(header, "tokenizer", "fingerprint")


def vocab_size_of(header: Header) -> int | None:
    """The largest id of that tokenizer + 1."""
    block: Any = header.metadata.get("tokenizer")
    size = block.get("vocab_size") if isinstance(block, dict) else None
    return size if type(size) is int else None


def template_of(header: Header) -> str | None:
    """Fingerprint of the chat template that rendered the text, and of another one for rows with tools, if any."""
    text = _fingerprint(header, "chat_template", "fingerprint")
    tools = _fingerprint(header, "chat_template", "tools_fingerprint")
    return f"{text}, with tools {tools}" if tools else text


def source_of(header: Header) -> str | None:
    """Fingerprint of the rows the shard was made from."""
    return _fingerprint(header, "sources", "fingerprint")


def _fingerprint(header: Header, block: str, name: str) -> str | None:
    # Anybody may write anything into the block.
    found: Any = header.metadata.get(block)
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, str) else None
