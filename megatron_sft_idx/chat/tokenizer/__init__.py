"""Text with spans to token ids with a weight for each; the ids must be those that the model knows, to the last one.

So each file is read by the library that it was made for, and a faster one is taken only where its ids are known to be
the same. Nothing is downloaded. Chat templates and messages are not known here.
"""

from megatron_sft_idx.chat.tokenizer.tokenizer import Tokenizer, append_eod, load_tokenizer
from megatron_sft_idx.chat.tokenizer.tokens import COMPARED_ROWS, Backend, DifferentIdsError, comparing_all_texts
