"""Chats to data on disk that can be trained on, the whole job: ``python tools/bench/whole_job.py``.

All use the same chats, tokenizer and template and two processes. Every run is its own command; the commands take turns,
and wall time is measured. The peers are ``datasets.map`` with transformers' template, TRL's ``pack_dataset`` and
``save_to_disk``; and Megatron-Bridge's own preparation to packed Parquet, in the environment of `make test-megatron` or
of ``--bridge-python``. Without such an environment, Bridge is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from report import Bench

ROOT = Path(__file__).resolve().parents[2]
CAPACITY, PROCESSES = 4096, 2
BRIDGE_PYTHON = ROOT / ".venv-megatron-3.12/bin/python"
OURS, BRIDGE = "ours, `preprocess`", "Megatron-Bridge's own preparation"
TRL = "`datasets.map`, TRL's `pack_dataset`, `save_to_disk`"
# Their __init__ imports models that need a GPU's kernels: made bare, what is in them is Bridge's own.
BARE = ("megatron.bridge", "megatron.bridge.data", "megatron.bridge.data.builders")


class Done(NamedTuple):
    """One run: seconds, bytes on disk, packs, tokens, and trained tokens."""

    seconds: float
    nbytes: int
    packs: int
    tokens: int
    trained: int


# ---- the peers, each in a separate process; counting starts after the clock has stopped ----


def by_trl(folder: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl.data_utils import pack_dataset

    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def work(rows: Any) -> dict[str, Any]:
        out = tokenizer.apply_chat_template(rows["messages"], return_assistant_tokens_mask=True, return_dict=True)
        return {"input_ids": out["input_ids"], "assistant_masks": out["assistant_masks"]}

    file, cache = str(folder / "chats.jsonl"), str(folder / "trl-cache")
    chats = load_dataset("json", data_files=file, split="train", cache_dir=cache)
    rows = chats.map(work, batched=True, num_proc=PROCESSES, remove_columns=chats.column_names)
    packed = pack_dataset(rows, CAPACITY, "bfd", {"num_proc": PROCESSES})
    packed.save_to_disk(folder / "trl", num_proc=PROCESSES)


def by_bridge(folder: Path) -> None:
    spec: Any = import_module("megatron")
    (home,) = (place for place in spec.__path__ if Path(place, "bridge").exists())
    for name in BARE:
        package = ModuleType(name)
        package.__path__ = [str(Path(home, *name.split(".")[1:]))]
        sys.modules[name] = package
    tokenizers: Any = import_module("megatron.bridge.training.tokenizers.tokenizer")
    config: Any = import_module("megatron.bridge.training.tokenizers.config")
    made = config.TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer"))
    (folder / "bridge").mkdir()
    offline: Any = import_module("megatron.bridge.data.packing.offline")
    kwargs = {"chat": True, "use_hf_tokenizer_chat_template": True, "index_mapping_dir": str(folder / "bridge-index")}
    offline.prepare_gpt_sft_packed_data(
        input_path=folder / "chats.jsonl",
        output_path=folder / "bridge/packed.idx.parquet",
        output_metadata_path=folder / "bridge/metadata.json",
        packed_sequence_size=CAPACITY,
        max_seq_length=CAPACITY,
        tokenizer=tokenizers.build_tokenizer(made),
        dataset_kwargs=kwargs,
        num_tokenizer_workers=PROCESSES,
        dataset_builder=import_module("megatron.bridge.data.builders.gpt_sft").build_gpt_sft_split,
    )


PEERS = {"trl": by_trl, "bridge": by_bridge}


# ---- runs ----


def timed_run(command: list[object]) -> float:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    begin = time.monotonic()
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - begin
    if done.returncode:
        raise SystemExit(f"{command[0]}: {done.stderr[-2000:]}")
    return seconds


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run_ours(folder: Path) -> Done:
    from megatron_sft_idx import SFTIndexedDataset

    arguments = ["--input", folder / "chats.jsonl", "--tokenizer", folder / "tokenizer", "--seq-length", CAPACITY]
    arguments += ["--workers", PROCESSES, "--output-prefix", folder / "ours/x", "--log-interval", 0]
    seconds = timed_run([sys.executable, "-m", "megatron_sft_idx", "preprocess", *arguments])
    packs = SFTIndexedDataset(str(folder / "ours/x"))
    counts = [(len(pack["input_ids"]), int(pack["loss_mask"].sum())) for pack in packs]
    return Done(seconds, size(folder / "ours"), len(counts), *map(sum, zip(*counts, strict=True)))


def run_peer(folder: Path, name: str, python: object = sys.executable) -> Done:
    """Run a peer, and count the content of its table."""
    seconds = timed_run([python, __file__, "--worker", name, folder])
    if name == "trl":
        from datasets import load_from_disk

        table, mask = load_from_disk(folder / name).data.table, "assistant_masks"
    else:
        import pyarrow.parquet as pq

        table, mask = pq.read_table(folder / name / "packed.idx.parquet"), "loss_mask"
    ids, trained = (table.column(column).combine_chunks().flatten().to_numpy() for column in ("input_ids", mask))
    return Done(seconds, size(folder / name), len(table), len(ids), int(trained.sum()))


def clean(folder: Path) -> None:
    """Remove what runs have left, caches and indexes too."""
    for name in ("ours", "trl", "trl-cache", "bridge", "bridge-index"):
        subprocess.run(["rm", "-rf", folder / name], check=True)


# ---- the table ----


def has_bridge(python: Path) -> bool:
    probe = "from importlib.util import find_spec as f; raise SystemExit(not (f('megatron.bridge') and f('datasets')))"
    return python.exists() and not subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    ways: dict[str, Callable[[Path], Done]] = {OURS: run_ours, TRL: lambda folder: run_peer(folder, "trl")}
    if has_bridge(python := Path(options.bridge_python)):
        ways[BRIDGE] = lambda folder: run_peer(folder, "bridge", python)
    make_input(folder, options.count, seed=0)
    input_nbytes = (folder / "chats.jsonl").stat().st_size
    runs: dict[str, list[Done]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, run in ways.items():
            runs[way].append(run(folder))
            clean(folder)
    ours = runs[OURS]
    for way, every in runs.items():
        if (every[0].tokens, every[0].trained) != (ours[0].tokens, ours[0].trained):
            raise SystemExit(f"{way} has other tokens than ours: {every[0]}, {ours[0]}; no table written")
    bench.say(
        f"{options.count:,} generated chats, {input_nbytes / 1e6:.0f} MB of JSON lines, {ours[0].tokens:,} tokens, to"
        f" packs of {CAPACITY:,}; {PROCESSES} processes each, a fresh command every time, caches removed each time. All"
        " train on the same tokens; ours is checksummed and synced to disk."
    )
    seconds = {way: [one.seconds for one in every] for way, every in runs.items()}
    rows = []
    for way, (one, *_) in runs.items():
        spent = median(seconds[way])
        rows.append((way, *cells(".1f ,.0f , .0f", spent, options.count / spent, one.packs, one.nbytes / 1e6)))
    bench.table(("way", "seconds", "chats/s", "packs", "MB on disk"), rows)
    bench.headline("chats", "the whole job: chats", [options.count], "chats")
    for key, peer in (("trl", TRL), ("bridge", BRIDGE)):
        if peer in runs:
            what = f"the whole job: {options.count:,} chats to packed data on disk, two processes"
            bench.headline(key, what, seconds[OURS], "s", peer=peer, theirs=seconds[peer], short=True)


if __name__ == "__main__":
    # Bridge's environment has neither this package nor what the tables need.
    if sys.argv[1:2] == ["--worker"]:
        PEERS[sys.argv[2]](Path(sys.argv[3]))
    else:
        from report import Bench, cells, run_bench
        from tokenising import make_input

        sizes = {
            "count": (10_000, 100_000, "chats to make"),
            "bridge_python": (str(BRIDGE_PYTHON), str(BRIDGE_PYTHON), "a Python that has megatron-bridge"),
        }
        title = "The whole job: chats to packed data on disk"
        run_bench(title, ("transformers", "datasets", "trl", "gigatoken"), report, sizes, rounds=(3, 5))
