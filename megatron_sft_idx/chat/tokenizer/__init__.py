"""Text with spans to token ids with a weight for each, by whichever library has the ids of the tokenizer at hand.

Tokenizers are read from local files. A library that is faster is taken only where its ids are known to be the same.
Chat templates and messages are not known here.
"""

from megatron_sft_idx.chat.tokenizer.tokenizer import Tokenizer, append_eod, load_tokenizer
from megatron_sft_idx.chat.tokenizer.tokens import Backend
