"""The demo of ``make demo``: bundled chats become a packed shard, which is read back, checked and printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from megatron_sft_idx import SFTIndexedDataset
from megatron_sft_idx.cli.options import in_color
from megatron_sft_idx.inspect.text import mark_pack

CHATS = "tools/demo/chats.jsonl"
TOKENIZER = "tools/demo/tokenizer"
PREFIX = "demo-out/chats"
ARGUMENTS = [
    *("preprocess", "--input", CHATS, "--tokenizer", TOKENIZER, "--seq-length", "1024"),
    *("--output-prefix", PREFIX, "--workers", "2", "--overwrite", "--earlier-reasoning", "drop"),
]


def check(claim: str, holds: bool) -> None:
    print(f"  {'ok' if holds else 'NO'}  {claim}")
    if not holds:
        sys.exit(f"the demo failed: not true that {claim}")


def rendered_chats() -> list[tuple[str, list[str]]]:
    """Every chat as transformers renders it, with the answers in it that are to be learned."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)
    rendered = []
    for line in Path(CHATS).read_text(encoding="utf-8").splitlines():
        chat = json.loads(line)
        for message in chat["messages"]:
            if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
        answers = [
            message["content"] or message["tool_calls"][0]["function"]["arguments"]
            for message in chat["messages"]
            if message["role"] == "assistant" and message.get("train", True) and message.get("weight", 1)
        ]
        text = tokenizer.apply_chat_template(chat["messages"], chat.get("tools"), tokenize=False)
        rendered.append((text, answers))
    return rendered


def check_sequences(dataset: SFTIndexedDataset, tokenizer: Tokenizer) -> None:
    """Holds every sequence of the shard against transformers' rendering of the chats."""
    chats = rendered_chats()
    answers = dict(chats)
    opening, closing = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    texts: Counter[str] = Counter()
    complete = turns_match = no_prompts = True
    for pack in range(len(dataset)):
        for ids, mask in dataset.sequences(pack):
            text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            texts[text] += 1
            # The mask is aligned with labels: its entry j is about token j + 1.
            learned = ids[1:][mask[:-1] != 0].tolist()
            words = tokenizer.decode(learned, skip_special_tokens=False)
            wanted = answers.get(text, [])
            complete &= all(answer in words for answer in wanted)
            turns_match &= learned.count(closing) == len(wanted)
            no_prompts &= opening not in learned
    check(f"{texts.total()} sequences decode to the {len(chats)} chats", texts == Counter(t for t, _ in chats))
    check("every answer to be learned is trained on, with the end of its turn", complete and turns_match)
    check("nobody else's turn is", no_prompts)


def main() -> None:
    os.chdir(Path(__file__).parents[2])
    print(f"Packing the chats of {CHATS} into rows of 1,024 tokens at {PREFIX}, then reading them back.\n")
    print("$ megatron-sft-idx", *ARGUMENTS, flush=True)
    Path(PREFIX).parent.mkdir(exist_ok=True)
    status = subprocess.run([sys.executable, "-m", "megatron_sft_idx", *ARGUMENTS], check=False).returncode
    if status:
        sys.exit(status)

    print("\nThe shard:")
    for path in sorted(Path(PREFIX).parent.glob(Path(PREFIX).name + ".*")):
        print(f"  {path.stat().st_size:>9,} bytes  {path}")

    print("\nRead back:")
    dataset = SFTIndexedDataset(PREFIX)
    stock = IndexedDataset(PREFIX)
    same = all((stock[i] == dataset[i]["input_ids"]).all() for i in range(len(dataset)))
    same &= len(stock) == len(dataset)
    check(f"stock Megatron reads the same tokens of all {len(dataset)} packs", same)
    tokenizer = Tokenizer.from_file(f"{TOKENIZER}/tokenizer.json")
    check_sequences(dataset, tokenizer)

    color = in_color()
    print(f"\nPack 0; what is {'green' if color else 'in [[ ]]'} is trained on:\n")
    pack = dataset[0]
    ids, mask, boundaries = pack["input_ids"], pack["loss_mask"], pack["seq_boundaries"]
    print(mark_pack(ids, mask, boundaries, partial(tokenizer.decode, skip_special_tokens=False), color=color))


if __name__ == "__main__":
    main()
