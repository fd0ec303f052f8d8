"""Conversations to text, with the spans of it that are trained on."""

from megatron_sft_idx.chat.template.chat_template import ChatTemplate
from megatron_sft_idx.chat.types import MaskOptions

__all__ = ["ChatTemplate", "MaskOptions"]
