"""A shard for the tests of other trainers, and the trained tokens of each sequence, read the slow way."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_sft_idx import Shard, ShardWriter
from megatron_sft_idx.cli.main import main

ROOT = Path(__file__).parents[1]
SEQ_LENGTH = 320


class Trained(NamedTuple):
    """One sequence: its ids, and for each id whether it is trained. The first never is."""

    ids: list[int]
    learnt: list[bool]


def trained_of(prefix: Any) -> list[Trained]:
    """Return every sequence of a shard, in order."""
    found = []
    for pack in Shard(prefix):
        for start, stop in pairwise(pack["seq_boundaries"].tolist()):
            mask = pack["loss_mask"][start:stop].tolist()
            found.append(Trained(pack["input_ids"][start:stop].tolist(), [False, *(value > 0 for value in mask[:-1])]))
    return found


def make_shards(folder: Path) -> tuple[Path, Path]:
    """Write a shard of chats, and a control shard with the trained tokens of each sequence shifted by one.

    The chats have system, tool and masked turns. Packs have several sequences and room for padding. Two sequences have
    only one token.
    """
    rows = []
    for number in range(24):
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Answer in one line."},
            {"role": "user", "content": f"What is {number} and {number}?" + " Take your time." * (number % 4)},
            {"role": "assistant", "content": "I do not know.", "weight": 0},
            {"role": "user", "content": "Look it up."},
            {"role": "assistant", "content": f"Looking up {number}."},
            {"role": "tool", "content": str(2 * number)},
            {"role": "assistant", "content": f"It is {2 * number}." + " Good bye!" * (number % 3)},
        ]
        rows.append(json.dumps({"messages": messages[number % 2 :]}))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    arguments = ["--tokenizer", ROOT / "tools/demo/tokenizer", "--chat-template", folder / "template.jinja"]
    arguments += ["--seq-length", SEQ_LENGTH, "--output-prefix", folder / "chats", "--workers", 0]
    assert main(["preprocess", "--input", str(folder / "rows.jsonl"), *map(str, arguments)]) == 0
    header = Shard(folder / "chats").header
    options: dict[str, Any] = {"capacity": SEQ_LENGTH, "token_dtype": header.token_dtype, "durable": False}
    with ShardWriter(folder / "train", **options) as train, ShardWriter(folder / "later", **options) as later:
        for pack in Shard(folder / "chats"):
            ids, mask, bounds = pack["input_ids"], pack["loss_mask"], pack["seq_boundaries"]
            moved = np.append(0, mask[:-1])
            moved[bounds[1:] - 1] = 0
            moved[bounds[:-1]] = 0
            train.add_pack(ids, mask, bounds[:-1])
            later.add_pack(ids, moved, bounds[:-1])
        for writer in (train, later):
            writer.add_pack([7, 8, 9, 10, 7], [0, 1, 0, 0, 0], [0, 1, 4])
    trained = trained_of(folder / "train")
    assert {len(sequence.ids) for sequence in trained} > {1}
    assert max(map(len, (pack["seq_boundaries"] for pack in Shard(folder / "train")))) > 3
    assert any(len(pack["input_ids"]) < SEQ_LENGTH for pack in Shard(folder / "train"))
    return folder / "train", folder / "later"


def told(trainer: str, trained: list[Trained]) -> None:
    """Print the comparison, for ``make test-trainers``."""
    tokens, learnt = sum(len(each.ids) for each in trained), sum(sum(each.learnt) for each in trained)
    print(f"{trainer}: {len(trained)} sequences, {tokens} tokens, {learnt} of them trained")
