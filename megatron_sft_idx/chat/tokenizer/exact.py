"""Token ids from the tokenizers library, which defines the ids for every ``tokenizer.json``."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import tokenizers
from numpy.typing import NDArray


def build_tokenizer(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    """Build a tokenizer that only tokenises.

    Truncation and padding would lose or add tokens. Post-processors narrow the offsets of tokens with white space, so a
    span's edge might fall on no token at all.

    Raises:
        Exception: any error of the tokenizers library about an unusable spec.
    """
    bare = {**spec, "truncation": None, "padding": None, "post_processor": None}
    return tokenizers.Tokenizer.from_str(orjson.dumps(bare).decode())


def exact_ids(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[NDArray[np.uint32]]:
    """Return token ids from the tokenizers library, which are right by definition; no special tokens are added."""
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.uint32) for encoding in encodings]
