"""The end-of-document token at the end of a sequence: ``--append-eod``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.tokenizer import Tokenizer
from megatron_sft_idx.chat.types import Encoded


def append_eod(encoded: Encoded, tokenizer: Tokenizer) -> Encoded:
    """Append an end-of-document token, the tokenizer's ``eos_id``, to a sequence.

    A sequence that already ends with the token gets no second one. If the sequence ends in a trained answer, the token
    is trained with the weight of the last trained token. White space at the end is ignored.

    Raises:
        ValueError: the tokenizer has no ``eos_id``.
    """
    eod = tokenizer.eos_id
    if eod is None:
        raise ValueError("the tokenizer has no end-of-sequence token")
    ids, mask = encoded.input_ids, encoded.loss_mask
    end = _last(ids == eod)
    if end < 0 or not _is_space(ids[end + 1 :], tokenizer):
        ids, mask = np.append(ids, np.int32(eod)), np.append(mask, np.float32(0))

    def ends_at(token: int) -> bool:
        """Return whether only white space and the end of document follow this token."""
        behind = ids[token + 1 :]
        return token >= 0 and _is_space(behind[behind != eod], tokenizer)

    answer_end = _last(mask != 0)
    # An answer may end in the token and white space, both trained. Then nothing has to be done.
    if ends_at(answer_end) and not ends_at(_last((ids == eod) & (mask != 0))):
        ends = np.flatnonzero(ids == eod)
        mask = mask.copy()
        mask[ends[ends > answer_end][:1]] = mask[answer_end]
    return encoded._replace(input_ids=ids, loss_mask=mask)


def _last(chosen: NDArray[np.bool_]) -> int:
    """Return the position of the last chosen token, or -1."""
    return int(np.flatnonzero(chosen)[-1]) if chosen.any() else -1


def _is_space(ids: NDArray[np.int32], tokenizer: Tokenizer) -> bool:
    """Return whether the text of these tokens is white space or empty. A character may consist of several tokens."""
    # The last few tokens are nearly always enough, and the text may be long. They may begin inside a character.
    if tokenizer.decode(ids[-8:]).replace("\ufffd", "").strip():
        return False
    return not tokenizer.decode(ids).strip()
