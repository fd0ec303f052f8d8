"""Token ids by the tokenizers library, which defines those of every ``tokenizer.json``."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import tokenizers
from numpy.typing import NDArray


def build_tokenizer(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer that tokenises and nothing else.

    Truncation and padding would lose tokens or add some, and post-processors narrow the offsets of tokens
    that hold white space, so that a span's edge may fall on no token at all.

    Raises:
        Exception: whatever the tokenizers library says about a spec it cannot use.
    """
    bare = {**spec, "truncation": None, "padding": None, "post_processor": None}
    return tokenizers.Tokenizer.from_str(orjson.dumps(bare).decode())


def exact_ids(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[NDArray[np.uint32]]:
    """Token ids by the tokenizers library, which are right by definition; no special tokens are added."""
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.uint32) for encoding in encodings]
