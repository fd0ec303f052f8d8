"""Conversations to text, with the spans of it that are trained on, whatever chat template writes them.

A template does not say which of its text the model must learn: a span that cannot be proven is an error of its row, and
never a guess. It is a stranger's program: it runs in a sandbox with an allowance. Token ids are not known here.
"""

from megatron_sft_idx.chat.template.chat_template import ChatTemplate
from megatron_sft_idx.chat.types import MaskOptions
