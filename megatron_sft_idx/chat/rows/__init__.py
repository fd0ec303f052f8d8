"""Raw rows of every common kind to a conversation in one form, or to tokens where a row comes tokenised.

A row that cannot be read without guessing is refused with its reason. No template and no tokenizer is known here.
"""

from megatron_sft_idx.chat.rows.messages import RowError
from megatron_sft_idx.chat.rows.reading import RowKind, RowOptions, to_sequence_source

__all__ = ["RowError", "RowKind", "RowOptions", "to_sequence_source"]
