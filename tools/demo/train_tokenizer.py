"""Trains the demo's tokenizer on the demo's chats: ``python tools/demo/train_tokenizer.py [FOLDER]``.

A byte-level BPE as GPT-2's, so every text is representable and no token is unknown, with ChatML's control
tokens and the tags of reasoning and function calls as tokens of their own. Training draws no random numbers:
a second run writes the same bytes.

The chat template comes from ``chat_template_generation.jinja``. The tokenizer gets it without its generation
markers, as most public templates are; both render the same text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
VOCABULARY = 2000
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def texts(node: Any) -> Iterator[str]:
    """Every string of a chat, keys included, less the control tokens' own spelling."""
    if isinstance(node, str):
        for token in CONTROL:
            node = node.replace(token, " ")
        yield node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield key
            yield from texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from texts(value)


def train(chats: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = [json.loads(line) for line in chats.read_bytes().splitlines()]
    tokenizer.train_from_iterator(texts(rows), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def without_markers(template: str) -> str:
    """The template without its ``generation`` tags, each of which has a line to itself."""
    tags = ("{%- generation %}", "{%- endgeneration %}")
    return "".join(line for line in template.splitlines(keepends=True) if line.strip() not in tags)


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0]) if arguments else HERE / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train(HERE / "chats.jsonl")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": without_markers((HERE / "chat_template_generation.jinja").read_text(encoding="utf-8")),
    }
    (folder / "tokenizer.json").write_bytes(tokenizer.to_str(pretty=True).encode())
    text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_bytes(text.encode())
    print(f"{folder}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main(sys.argv[1:])
