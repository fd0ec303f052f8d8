"""Text with spans to token ids with a weight for each; the ids must be those that the model knows, to the last one.

So each file is read by the library that it was made for, and a faster one is taken only where its ids are known to be
the same. Nothing is downloaded. Chat templates and messages are not known here.
"""

from megatron_sft_idx.chat.tokenizer.end_of_document import append_eod
from megatron_sft_idx.chat.tokenizer.fast_engine import COMPARED_ROWS, DifferentIdsError, comparing_all_texts
from megatron_sft_idx.chat.tokenizer.json_model import Backend
from megatron_sft_idx.chat.tokenizer.tokenizer import Tokenizer, load_tokenizer
