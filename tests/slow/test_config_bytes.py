"""Twenty random command lines of preprocess give the same bytes when run again from their printed configurations."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chats import CHATS, TOKENIZER, command, files_of

pytestmark = pytest.mark.slow

# One line of each list is chosen; all combinations are valid.
CHOICES: list[list[list[object]]] = [
    [[], ["--packing", "sequential"], ["--packing", "none"], ["--packing-effort", "high"]],
    [["--earlier-reasoning", "drop"], ["--earlier-reasoning", "split"]],
    [["--overlong", "split"], ["--overlong", "drop"], ["--overlong", "truncate"]],
    [[], ["--append-eod"], ["--no-train-on-thinking"], ["--no-train-on-tool-calls", "--span-by-span"]],
    [[], ["--dedup", "exact"], ["--sample", "0.5"], ["--valid-fraction", "0.2"], ["--max-rows", 90]],
    [[], ["--repeat", "*.jsonl=2"], ["--repeat", "chats.jsonl=1.5", "--shuffle"]],
    [[], ["--loss-weight", "chats.jsonl=0.5"], ["--train-on", "last-turn"], ["--straddling", "exclude"]],
    [[], ["--sequence-multiple", 8], ["--max-sequences-per-pack", 3], ["--drop-untrained"]],
    [[], ["--where", "source == chats.jsonl"], ["--no-source"]],
    [[], ["--chat-template-kwargs", '{"enable_thinking": false, "no": "no", "n": 1.50}'], ["--system-starts", "turn"]],
    [[], ["--roles", "Kunde=user", "a=b=assistant"], ["--fields", "messages=messages"], ["--ignore-field", "x y"]],
]


@pytest.mark.parametrize("seed", range(20))
def test_a_printed_command_line_makes_the_same_bytes(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(seed)
    words = [word for choice in CHOICES for word in draw.choice(choice)]
    usual = ["--input", CHATS, "--tokenizer", TOKENIZER, "--seq-length", draw.choice([256, 1024]), "--seed", seed]
    usual += ["--workers", 0, "--output-prefix", "x/train"]
    for folder in ("x", "y"):
        Path(folder).mkdir()
    shown = command("preprocess", *usual, *words, "--print-config")
    assert shown.code == 0, shown.err
    Path("run.yaml").write_text(shown.out, encoding="utf-8")
    made = command("preprocess", *usual, *words)
    assert made.code == 0, made.err
    again = command("preprocess", "--config", "run.yaml", "--output-prefix", "y/train")
    assert again.code == 0, again.err
    names = sorted(path.name.removesuffix(".seq.idx") for path in Path("x").glob("*.seq.idx"))
    assert names
    for name in names:
        assert files_of(Path("x", name)) == files_of(Path("y", name))
