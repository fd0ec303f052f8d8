"""Whether a row is skipped, and its trained tokens, depend only on the row, not on its place or on workers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import ROOT, TOKENIZER

from megatron_sft_idx import Shard, preprocess

pytestmark = pytest.mark.slow

MASKS = ROOT / "tests/masks"
NUM_ROWS = 30_000


def rows() -> list[dict[str, Any]]:
    """Return rows of many structures: words that calls repeat or the template drops, quotes of the template, parts."""
    words = random.Random(0)
    made = []
    for number in range(NUM_ROWS):
        city = words.choice(["Paris", "Rome", "<|im_end|>\n<|im_start|>assistant\n", f"{number}"])
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": words.choice(["Where?", "</s> " * (number % 5), city])}
        ]
        for _ in range(words.randrange(1, 4)):
            content: Any = words.choice([city, "", f"word {number}"])
            if words.random() < 0.2:
                content = [{"type": "text", "text": content}]
            answer: dict[str, Any] = {"role": "assistant", "content": content}
            if words.random() < 0.4:
                answer["tool_calls"] = [{"function": {"name": "weather", "arguments": {"city": city}}}]
            messages += [answer, {"role": words.choice(["tool", "user"]), "content": city}]
        made.append({"messages": messages})
    return made


def outcome(folder: Path, order: list[int], made: list[dict[str, Any]], workers: int) -> tuple[Any, Any]:
    """Return the bytes of a shard of rows in this order, and for each row its ids and mask, or None if skipped."""
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(made[number]) + "\n" for number in order))
    prefix = folder / "x"
    preprocess(
        [str(source)], tokenizer=TOKENIZER, output_prefix=prefix, seq_length=4096, packing="none", workers=workers,
        chat_template=MASKS / "drop.jinja", on_bad_row="skip", overwrite=True, log_interval=0,
    )  # fmt: skip
    shard = Shard(prefix, columns=["source"])
    lines = np.concatenate([shard[pack]["source"][:, 1] for pack in range(len(shard))]) if len(shard) else []
    found = dict.fromkeys(order)
    for pack, line in zip(range(len(shard)), lines, strict=True):
        found[order[int(line)]] = (shard[pack]["input_ids"].tobytes(), shard[pack]["loss_mask"].tobytes())
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx")], found


def test_thirty_thousand_rows_in_three_orders_with_any_number_of_workers(tmp_path: Path) -> None:
    made = rows()
    orders = [[*range(NUM_ROWS)], [*range(NUM_ROWS - 1, -1, -1)], random.Random(1).sample(range(NUM_ROWS), NUM_ROWS)]
    alone: dict[int, Any] | None = None
    for order in orders:
        results = [outcome(tmp_path, order, made, workers) for workers in (0, 2, 4)]
        assert all(one[0] == results[0][0] for one in results)
        for _, found in results:
            alone = alone or found
            assert found == alone
    assert alone is not None
    skipped = sum(one is None for one in alone.values())
    print(f"{NUM_ROWS:,} rows, {skipped:,} of them skipped, in 3 orders with 0, 2 and 4 workers: the same")
    assert 1000 < skipped < NUM_ROWS - 1000
