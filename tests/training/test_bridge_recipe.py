"""The recipe of docs/bridge.md, pasted into an empty folder: each batch of Megatron-Bridge is one of the shard.

It runs on the Bridge that is installed, or on the checkout in MEGATRON_BRIDGE.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_modules import MISSING, bridge_folder
from chats import TOKENIZER
from doc_blocks import blocks_of, fast_environment, paste
from test_bridge_parquet import chats

from megatron_sft_idx.shard import Shard

pytestmark = pytest.mark.skipif(bridge_folder() is None, reason=MISSING)

ROOT = Path(__file__).parents[2]
BLOCKS = blocks_of("docs/bridge.md")
LENGTH, BATCH = 1024, 4
# How a row of a batch is told from all others: what it holds at each trained position, and where sequences begin.
Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def scripts() -> dict[str, str]:
    """The script of the page, and the same with each of the other data sets."""
    (whole,) = (block.text for block in BLOCKS if block.kind == "python bridge")
    (place,) = (node for node in ast.parse(whole).body if isinstance(node, ast.Assign) and is_dataset(node))
    lines = whole.splitlines(keepends=True)
    assert place.end_lineno is not None
    before, after = "".join(lines[: place.lineno - 1]), "".join(lines[place.end_lineno :])
    others = [before + block.text + after for block in BLOCKS if block.kind == "python bridge-dataset"]
    return dict(zip(("Parquet", "no validation", "npy", "shard"), [whole, *others], strict=True))


def is_dataset(node: ast.Assign) -> bool:
    return [ast.unparse(target) for target in node.targets] == ["dataset"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What was an empty folder before the page's commands were pasted into it."""
    here, names = tmp_path_factory.mktemp("pasted"), tmp_path_factory.mktemp("names")
    (names / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats()), encoding="utf-8")
    mine = {"MODEL": str(TOKENIZER), "CHATS": str(names / "chats.jsonl")}
    commands = [block for block in BLOCKS if block.kind == "sh bridge"]
    assert len(commands) == 2
    paste(commands, here, {**fast_environment(names), **mine, "PYTHONPATH": str(ROOT)}, 300)
    assert len(Shard(here / "chats")) > 4 * BATCH
    return here


def run(script: str, folder: Path) -> dict[str, Any]:
    """What ``bridge_recipe`` keeps of a script."""
    (folder / "finetune.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/bridge_recipe.py"), "finetune.py", "batches.pt"]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "MODEL": str(TOKENIZER), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = torch.load(folder / "batches.pt", weights_only=False)
    return found


def expected_row(pack: Any, eos_id: int) -> Row:
    """A pack as a row of a batch, without the last position of each sequence; all padding is one more sequence."""
    columns: tuple[list[int], ...] = ([], [], [], [])
    bounds = [0]
    ids, mask = pack["input_ids"].tolist(), pack["loss_mask"].tolist()
    for start, stop in pairwise(pack["seq_boundaries"].tolist()):
        for j in range(start, stop - 1):
            for column, value in zip(columns, (ids[j], ids[j + 1], mask[j], j - start), strict=True):
                column.append(value)
        bounds.append(len(columns[0]))
    missing = LENGTH - len(columns[0])
    for column, value in zip(columns, (eos_id, eos_id, 0, 0), strict=True):
        column.extend([value] * missing)
    tokens, labels, trained, positions = map(tuple, columns)
    return tokens, labels, trained, positions, tuple(dict.fromkeys([*bounds, LENGTH]))


def rows_of_batch(batch: dict[str, Any]) -> list[Row]:
    names = ("tokens", "labels", "loss_mask", "position_ids")
    assert batch["attention_mask"] is None
    assert torch.equal(batch["cu_seqlens_q"], batch["cu_seqlens_kv"])
    rows = []
    for row, bounds in enumerate(batch["cu_seqlens_q"].tolist()):
        distinct = tuple(dict.fromkeys(bounds))
        assert int(batch["max_seqlen_q"][row]) == max(b - a for a, b in pairwise(distinct))
        if "padding_mask" in batch:
            assert int((~batch["padding_mask"][row]).sum()) == batch["token_count"][row]
        rows.append((*(tuple(batch[name][row].tolist()) for name in names), distinct))
    return rows


def differences(batches: list[dict[str, Any]], shard: Path, eos_id: int, epochs: int, whole: bool) -> list[str]:
    """What rows of all batches are not as the shard has them; empty where all are, and each in each epoch."""
    packs = [expected_row(pack, eos_id) for pack in Shard(shard)]
    known, masked = Counter(packs), {(t, la, (0,) * LENGTH, p, b) for t, la, _, p, b in packs}
    per_epoch = len(packs) // BATCH
    complaints, filled = [], 0
    assert len(batches) == epochs * (-(-len(packs) // BATCH) if whole else per_epoch)
    for epoch in range(epochs):
        size = len(batches) // epochs
        seen: Counter[Row] = Counter()
        for number, batch in enumerate(batches[epoch * size :][:size], epoch * size):
            rows = rows_of_batch(batch)
            assert len(rows) == BATCH
            for row in rows:
                if row in known:
                    seen[row] += 1
                elif whole and row in masked:
                    filled += 1
                else:
                    complaints.append(f"batch {number}: a row that is none of the shard's")
        if seen - known:
            complaints.append(f"epoch {epoch}: packs that come twice")
    if filled != (len(batches) * BATCH - len(packs) if whole else 0):
        complaints.append(f"{filled} rows without a trained token")
    return complaints


@pytest.mark.parametrize("name", scripts())
def test_batches_are_those_of_the_shard(name: str, folder: Path) -> None:
    found = run(scripts()[name], folder)
    validated = name != "no validation"
    assert (found["valid"] is not None) == validated
    assert not differences(found["train"], folder / "chats", found["eos_id"], 2, whole=False)
    if validated:
        assert not differences(found["valid"], folder / "chats.valid", found["eos_id"], 1, whole=name != "shard")
    tokens = sum(sum(batch["token_count"]) for batch in found["train"] + (found["valid"] or []))
    print(f"{name}: {len(found['train'])} and {len(found['valid'] or [])} batches, {tokens} tokens equal")


def test_a_mask_that_is_off_by_one_is_seen(folder: Path) -> None:
    """The control: of each row, one position that counts is taken for one that does not, or two are exchanged."""
    found = run(scripts()["Parquet"], folder)
    for key, change in {
        "loss_mask": lambda values: values.roll(1, 1),
        "labels": lambda values: values.roll(1, 1),
        "tokens": lambda values: values.flip(1),
        "position_ids": lambda values: torch.arange(LENGTH).expand_as(values),
        "cu_seqlens_q": lambda values: values[:, [0, -1]],
    }.items():
        wrong = [{**batch, key: change(batch[key])} for batch in found["train"]]
        if key == "cu_seqlens_q":
            for batch in wrong:
                batch["cu_seqlens_kv"], batch["max_seqlen_q"] = batch[key], torch.full((BATCH, 1), LENGTH)
        complaints = differences(wrong, folder / "chats", found["eos_id"], 2, whole=False)
        assert len(complaints) == BATCH * len(wrong), key
