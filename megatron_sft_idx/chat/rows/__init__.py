"""Raw rows of every common kind to conversations or tokenised rows."""

from megatron_sft_idx.chat.rows.messages import RowError
from megatron_sft_idx.chat.rows.reading import RowKind, RowOptions, to_sequence_source

__all__ = ["RowError", "RowKind", "RowOptions", "to_sequence_source"]
