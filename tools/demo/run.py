"""The job that ``make demo`` shows: pack bundled chats, verify and read the shard, and write a page to look at.

It needs the base installation only: no torch, no Megatron, no transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_sft_idx import Shard
from megatron_sft_idx.cli.options import in_color
from megatron_sft_idx.inspect.text import mark_pack

CHATS = "tools/demo/chats.jsonl"
TOKENIZER = "tools/demo/tokenizer"
PREFIX = "demo-out/chats"
PAGE = "demo-out/chats.html"


def main() -> None:
    """Run all steps. Each prints its work; exit with 1 if one fails."""
    os.chdir(Path(__file__).parents[2])
    Path(PREFIX).parent.mkdir(exist_ok=True)
    run(
        f"Pack the chats of {CHATS} into rows of 1,024 tokens",
        *("preprocess", "--input", CHATS, "--tokenizer", TOKENIZER, "--seq-length", "1024", "--output-prefix", PREFIX),
        *("--earlier-reasoning", "drop", "--overwrite"),
    )
    print("\nThe five files of the shard, and a column with the input line of each sequence:")
    for path in sorted(Path(PREFIX).parent.glob(f"{Path(PREFIX).name}.*")):
        if path.suffix != ".html":
            print(f"  {path.stat().st_size:>9,} bytes  {path}")
    run("Compare every byte with its checksum", "verify", "--full", PREFIX)

    print("\nRead it in Python, and compare the trained words with the answers in the chats:")
    tokenizer = Tokenizer.from_file(f"{TOKENIZER}/tokenizer.json")
    shard = Shard(PREFIX, columns=("source",))
    check_answers(shard, tokenizer)

    color = in_color()
    print(f"\nPack 0 of {len(shard)}. Tokens that are trained on are {'green' if color else 'in [[ ]]'}:\n")
    pack = shard[0]
    ids, mask, boundaries = pack["input_ids"], pack["loss_mask"], pack["seq_boundaries"]
    print(mark_pack(ids, mask, boundaries, partial(tokenizer.decode, skip_special_tokens=False), color=color))

    run(
        "Write a page that shows this for the whole shard",
        *("inspect", PREFIX, "--tokenizer", TOKENIZER, "--html", PAGE, "--overwrite"),
    )
    print(f"\nOpen the page in a browser: {Path(PAGE).absolute().as_uri()}")


def run(title: str, *arguments: str) -> None:
    """Run a command of the package and show it; exit with its status if it fails."""
    print(f"\n{title}:\n$ megatron-sft-idx", *arguments, flush=True)
    if status := subprocess.run([sys.executable, "-m", "megatron_sft_idx", *arguments], check=False).returncode:
        sys.exit(status)


def check(claim: str, holds: bool) -> None:
    """Print a claim and whether it holds; exit with 1 if it does not."""
    print(f"  {'ok' if holds else 'NO'}  {claim}")
    if not holds:
        sys.exit(f"the demo failed: not true that {claim}")


def check_answers(shard: Shard, tokenizer: Tokenizer) -> None:
    """Compare the trained words of every sequence with the answers of the chat that it was made from."""
    chats = [json.loads(line) for line in Path(CHATS).read_text(encoding="utf-8").splitlines()]
    start, end = tokenizer.encode("<|im_start|><|im_end|>").ids
    rows, answers_trained, ends_trained, no_headers = list[int](), True, True, True
    for row, trained in trained_tokens(shard):
        rows.append(row)
        answers = answers_of(chats[row])
        words = tokenizer.decode(trained, skip_special_tokens=False)
        answers_trained &= all(answer in words for answer in answers)
        ends_trained &= trained.count(end) == len(answers)
        no_headers &= start not in trained
    check(
        f"each of the {len(chats)} chats is one sequence of the {len(shard)} packs",
        sorted(rows) == [*range(len(chats))],
    )
    check("every answer is trained on", answers_trained)
    check("so is the end of each answer, and no other end of a turn", ends_trained)
    check("no header of a turn is trained on", no_headers)


def trained_tokens(shard: Shard) -> Iterator[tuple[int, list[int]]]:
    """For each sequence the input row that it was made from, counted from 0, and the tokens that are trained on."""
    for pack in shard:
        source: Any = pack["source"]  # type: ignore[typeddict-item]
        for (_, row), (begin, stop) in zip(source.tolist(), pairwise(pack["seq_boundaries"].tolist()), strict=True):
            ids, mask = pack["input_ids"][begin:stop], pack["loss_mask"][begin:stop]
            # The mask is aligned with labels: entry j is about predicting token j + 1.
            yield row, ids[1:][mask[:-1] != 0].tolist()


def answers_of(chat: dict[str, Any]) -> list[str]:
    """The text, or the arguments of the tool call, of each message that is trained on."""
    answers = []
    for message in chat["messages"]:
        if message["role"] == "assistant" and message.get("train", True) and message.get("weight", 1):
            content = message["content"]
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
            answers.append(content or message["tool_calls"][0]["function"]["arguments"])
    return answers


if __name__ == "__main__":
    main()
