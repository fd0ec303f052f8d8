"""Render conversations to text with any chat template, and find the spans of the text that are trained on.

A template does not say which part of its text the model must learn. A span that cannot be proven is an error of its
row, never a guess. Templates are untrusted programs, so they run in a sandbox with an allowance. Nothing here knows
token ids.
"""

from megatron_sft_idx.chat.template.chat_template import ChatTemplate
from megatron_sft_idx.chat.types import MaskOptions
