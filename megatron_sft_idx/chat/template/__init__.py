"""Conversations to text, with the spans of it that are trained on, whatever chat template writes them.

Templates are programs of strangers: they run in a sandbox, and what one may spend is counted. A span that cannot be
proven is an error of its row and never a guess. Text and characters only: token ids begin in ``tokenizer``.
"""

from megatron_sft_idx.chat.template.chat_template import ChatTemplate
from megatron_sft_idx.chat.types import MaskOptions
