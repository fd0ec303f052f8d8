"""Convert text with spans to token ids with weights. The ids must be exactly those that the model knows.

So each file is read by the library for which it was made, and a faster one is used only if its ids are known to be the
same. Nothing is downloaded. Nothing here knows chat templates or messages.
"""

from megatron_sft_idx.chat.tokenizer.end_of_document import append_eod
from megatron_sft_idx.chat.tokenizer.fast_engine import COMPARED_ROWS, DifferentIdsError, comparing_all_texts
from megatron_sft_idx.chat.tokenizer.json_model import Backend
from megatron_sft_idx.chat.tokenizer.tokenizer import Tokenizer, load_tokenizer
