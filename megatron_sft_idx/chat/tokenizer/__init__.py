"""Convert text with spans to token ids with weights. The ids must be exactly the ids that the model was trained with.

So each tokenizer file is read by the library for which it was made, and a faster library is used only if its ids are
known to be the same. Nothing is downloaded. Modules here do not depend on chat templates or messages.
"""

from megatron_sft_idx.chat.tokenizer.end_of_document import append_eod
from megatron_sft_idx.chat.tokenizer.fast_engine import COMPARED_ROWS, DifferentIdsError, comparing_all_texts
from megatron_sft_idx.chat.tokenizer.json_model import Backend
from megatron_sft_idx.chat.tokenizer.tokenizer import Tokenizer, load_tokenizer
