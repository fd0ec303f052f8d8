"""The configurations in examples/ make what their comments describe, from rows like the one in each comment."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import TOKENIZER, Outcome, command, sequences_of, write_rows
from tokenizers import Tokenizer

from megatron_sft_idx.shard import Shard

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CONFIGS = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
EMPTY = "<think>\n\n</think>\n\n"


def comment_of(name: str) -> str:
    """The comment that a configuration begins with."""
    text = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")
    return "".join(f"{line[2:]}\n" for line in text.partition("\n\n")[0].splitlines())


def row_of(name: str) -> dict[str, Any]:
    """The row in the comment."""
    comment = comment_of(name)
    row: dict[str, Any]
    row, _ = json.JSONDecoder().raw_decode(comment, comment.index("{"))
    return row


def changed(row: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The row with another word."""
    text = json.dumps(row)
    assert old in text
    made: dict[str, Any] = json.loads(text.replace(old, new))
    return made


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled tokenizer, with what Qwen3's template has besides: a block for reasoning in every last answer."""
    folder = tmp_path_factory.mktemp("tokenizer") / "qwen3"
    shutil.copytree(TOKENIZER, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for old, new in {
        "if message.reasoning_content and": "if (loop.last or message.reasoning_content) and",
        "+ message.reasoning_content +": "+ (message.reasoning_content or '') +",
    }.items():
        assert config["chat_template"].count(old) == 1
        config["chat_template"] = config["chat_template"].replace(old, new)
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


def run(name: str, prefix: Path, rows: list[Any], tokenizer: Path, *options: object) -> Outcome:
    """``preprocess`` with a configuration, on these rows and a small tokenizer."""
    given = ["--input", write_rows(prefix.parent / "rows.jsonl", rows), "--tokenizer", tokenizer, "--workers", 0]
    return command("preprocess", "--config", EXAMPLES / f"{name}.yaml", *given, "--output-prefix", prefix, *options)


def made_by(outcome: Outcome, prefix: Path) -> list[tuple[str, str]]:
    """The text of each sequence, and its trained words."""
    assert outcome.code == 0, outcome.err
    decode = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).decode
    return [
        (decode(ids, skip_special_tokens=False), decode(ids[mask > 0], skip_special_tokens=False))
        for ids, mask in sequences_of(prefix)
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_comment_has_the_command(name: str) -> None:
    assert f"\n  megatron-sft-idx preprocess --config examples/{name}.yaml\n" in comment_of(name)


def test_the_page_lists_every_example() -> None:
    listed = re.findall(r"^\| \[`([^`]+)`\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.M)
    assert all(name == link for name, link in listed)
    there = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert sorted(name for name, _ in listed) == sorted(there)


def test_sft(tmp_path: Path, tokenizer: Path) -> None:
    row = row_of("sft_qwen3")
    rows = [changed(row, "blue?", f"blue, {number}?") for number in range(40)]
    rows += [rows[0], changed(row, "blue?", "blue? " * 4096)]
    outcome = run("sft_qwen3", tmp_path / "sft", rows, tokenizer, "--valid-fraction", 0.25)
    train = made_by(outcome, tmp_path / "sft")
    valid = made_by(outcome, tmp_path / "sft.valid")
    assert (len(Shard(tmp_path / "sft")), Shard(tmp_path / "sft").header.capacity) == (1, 4096)
    assert len(train) > len(valid) > 0
    assert len({text for text, _ in train + valid}) == len(train + valid) == 40
    answer = row["messages"][-1]["content"] + "<|im_end|>"
    for text, trained in train + valid:
        assert trained == answer
        assert text.endswith(f"<|im_start|>assistant\n{EMPTY}{answer}\n")


def test_tool_calls(tmp_path: Path) -> None:
    row = row_of("tool_calls")
    rows = [changed(row, "Oslo", f"Oslo {number}") for number in range(120)]
    outcome = run("tool_calls", tmp_path / "tools", [*rows, {"messages": []}], TOKENIZER)
    sequences = made_by(outcome, tmp_path / "tools")
    assert re.search(r"^  skipped +1$", outcome.out, re.M), outcome.out
    assert len(sequences) == 120
    for text, trained in sequences:
        (city,) = set(re.findall(r"Oslo \d+", text))
        call = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call><|im_end|>'
        assert trained == f"{call}Yes, it is raining.<|im_end|>"
        assert '"description": "The weather in a city"' in text
        assert "<tool_response>\nrain, 9 degrees\n</tool_response>" in text
    assert run("tool_calls", tmp_path / "more", [*rows, *2 * [{"messages": []}]], TOKENIZER).code == 1


def test_reasoning(tmp_path: Path, tokenizer: Path) -> None:
    rows = [row_of("reasoning")]
    first, second = (
        "<think>\n17 * 3 = 30 + 21.\n</think>\n\n51.<|im_end|>",
        "<think>\n51 / 2 = 25.5.\n</think>\n\n25.5.<|im_end|>",
    )
    sequences = made_by(run("reasoning", tmp_path / "turns", rows, tokenizer), tmp_path / "turns")
    assert {trained for _, trained in sequences} == {first, second}
    whole = max((text for text, _ in sequences), key=len)
    assert "<|im_start|>assistant\n51.<|im_end|>" in whole
    assert "30 + 21" not in whole
    dropped = run("reasoning", tmp_path / "whole", rows, tokenizer, "--earlier-reasoning", "drop")
    assert made_by(dropped, tmp_path / "whole") == [(whole, f"51.<|im_end|>{second}")]
    assert run("reasoning", tmp_path / "none", rows, tokenizer, "--earlier-reasoning", "error").code == 1


def test_dpo(tmp_path: Path, tokenizer: Path) -> None:
    row = row_of("dpo")
    rows = [changed(row, "prime number", f"prime number above {number}") for number in range(10)]
    rows.append(changed(row, "Eight", "Eight or " * 4096))
    outcome = run("dpo", tmp_path / "pairs", rows, tokenizer)
    sequences = made_by(outcome, tmp_path / "pairs")
    shard = Shard(tmp_path / "pairs", columns=("pair",))
    pairs = [pair for pack in shard for pair in pack["pair"].tolist()]
    assert sorted(pairs) == [[number, side] for number in range(10) for side in (0, 1)]
    assert all(a[0] == b[0] for a, b in zip(pairs[::2], pairs[1::2], strict=True))
    for (number, side), (text, trained) in zip(pairs, sequences, strict=True):
        assert f"above {number}.<|im_end|>" in text
        assert trained == ("Eight.", f"Seven is a prime number above {number}.")[1 - side] + "<|im_end|>"


def test_images(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from media_processors import llava_next, png

    row = row_of("images")
    rows = [changed(row, "red", colour) for colour in ("red", "blue", "red")]
    (tmp_path / "photos").mkdir()
    for number, colour in enumerate(("red", "blue")):
        (tmp_path / f"photos/{colour}.png").write_bytes(png(80, 60, number))
    folder = tmp_path / "processor"
    decode = llava_next(folder).tokenizer.decode
    outcome = run("images", tmp_path / "pictures", rows, folder, "--processor", folder, "--media-root", tmp_path)
    assert outcome.code == 0, outcome.err
    (pack,) = Shard(tmp_path / "pictures")
    assert len(pack["media"]) == 3
    assert len({bytes(item.data) for item in pack["media"]}) == 2
    for item, (start, stop) in zip(pack["media"], pairwise(pack["seq_boundaries"].tolist()), strict=True):
        assert start < item.start < item.start + item.length < stop
        assert not pack["loss_mask"][item.start - 1 : item.start + item.length - 1].any()
        learnt = pack["input_ids"][start + 1 : stop][pack["loss_mask"][start : stop - 1] > 0]
        colour = "red" if bytes(item.data) == png(80, 60, 0) else "blue"
        assert decode(learnt.astype(np.int64)) == f"It is {colour}.<|im_end|>"
