"""Text with spans to token ids with their masks."""

from megatron_sft_idx.chat.tokenizer.tokenizer import Backend, Tokenizer, append_eod, load_tokenizer

__all__ = ["Backend", "Tokenizer", "append_eod", "load_tokenizer"]
