"""The script of docs/bridge.md, run in an empty folder: batches of Megatron-Bridge contain exactly the shard's packs.

It uses the installed Bridge, or the checkout in MEGATRON_BRIDGE.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_modules import MISSING, bridge_folder
from chats import TOKENIZER, command, write_rows
from doc_blocks import blocks_of, fast_environment, paste
from test_bridge_parquet import chats

from megatron_sft_idx.shard import Shard

pytestmark = pytest.mark.skipif(bridge_folder() is None, reason=MISSING)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/megatron_bridge.py"
BLOCKS = blocks_of("docs/bridge.md")
LENGTH, BATCH = 1024, 4
# The key of a row of a batch: its values at each trained position, and the starts of sequences.
Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def scripts() -> dict[str, str]:
    """Return the script of the page, and variants with each of the other data sets."""
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
    """Provide a new folder in which the page's commands were run."""
    here, names = tmp_path_factory.mktemp("pasted"), tmp_path_factory.mktemp("names")
    (names / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats()), encoding="utf-8")
    mine = {"MODEL": str(TOKENIZER), "CHATS": str(names / "chats.jsonl")}
    commands = [block for block in BLOCKS if block.kind == "sh bridge"]
    assert len(commands) == 2
    paste(commands, here, {**fast_environment(names), **mine, "PYTHONPATH": str(ROOT)}, 300)
    assert len(Shard(here / "chats")) > 4 * BATCH
    return here


def run(script: str, folder: Path) -> dict[str, Any]:
    """Run a script with ``bridge_recipe`` and return its batches."""
    (folder / "finetune.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/bridge_recipe.py"), "finetune.py", "batches.pt"]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "MODEL": str(TOKENIZER), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = torch.load(folder / "batches.pt", weights_only=False)
    return found


def expected_row(pack: Any, eos_id: int) -> Row:
    """Return a pack as a row of a batch, without the last position of each sequence. Padding is one more sequence."""
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
    """Return all differences between rows of batches and the shard, and packs that do not come once per epoch."""
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


def test_the_example_trains_on_the_shards_of_the_other_example(tmp_path: Path) -> None:
    """``examples/megatron_bridge.py``, with the length and the batch of the other scripts here."""
    given = ["--input", write_rows(tmp_path / "rows.jsonl", chats()), "--tokenizer", TOKENIZER, "--workers", 0]
    smaller = ["--seq-length", LENGTH, "--valid-fraction", 0.2, "--earlier-reasoning", "drop"]
    config, prefix = ROOT / "examples/sft_qwen3.yaml", tmp_path / "data/sft"
    made = command("preprocess", "--config", config, *given, *smaller, "--output-prefix", prefix)
    assert made.code == 0, made.err
    script = EXAMPLE.read_text(encoding="utf-8")
    sizes = "LENGTH, BATCH = 4096, 32\n"
    assert script.count(sizes) == 1
    found = run(script.replace(sizes, f"LENGTH, BATCH = {LENGTH}, {BATCH}\n"), tmp_path)
    assert not differences(found["train"], prefix, found["eos_id"], 2, whole=False)
    assert not differences(found["valid"], tmp_path / "data/sft.valid", found["eos_id"], 1, whole=False)


@pytest.mark.parametrize("name", ["page", "example"])
def test_what_a_script_imports_and_sets_is_in_the_sources_of_bridge(name: str) -> None:
    """Its ``main()`` needs GPUs, so this test reads the sources of Bridge, and of the Megatron that it builds on."""
    text = scripts()["Parquet"] if name == "page" else EXAMPLE.read_text(encoding="utf-8")
    bridge, core = bridge_folder(), find_spec("megatron.training")
    assert bridge is not None
    assert core is not None
    fields = [bridge / "training/config.py", bridge / "models/gpt_provider.py"]
    fields += Path(*(core.submodule_search_locations or ())).glob("config/*.py")
    settings = "\n".join(path.read_text(encoding="utf-8") for path in fields)
    (main,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    checked = 0
    for node in ast.walk(main):
        if isinstance(node, ast.ImportFrom):
            place = Path(bridge, *str(node.module).split(".")[2:])
            files = place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]
            sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
            for imported in node.names:
                assert re.search(rf"^def {imported.name}\(| as {imported.name},$", sources, re.MULTILINE), imported.name
                checked += 1
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            assert re.search(rf"^    {node.attr}: ", settings, re.MULTILINE), node.attr
            checked += 1
    assert checked > 7


def test_a_mask_that_is_off_by_one_is_seen(folder: Path) -> None:
    """This is the control: in each row, one trained position is moved, or two are exchanged."""
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
