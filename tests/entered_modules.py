"""Count the modules of the package that one piece of work uses, with ``sys.setprofile`` in a separate process.

``python tests/entered_modules.py WORK FOLDER`` prints one module per line: the modules in which a Python function is
called, as seen when following the work in a debugger. Modules are imported before, so code that runs during import does
not count. Results that are computed once and cached do count, such as the turns of a template. WORK is a key of
``WORKS``; FOLDER is the folder that ``prepare`` filled.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from house import PACKAGE, is_light, modules
from sample_packs import demo_samples, write_samples

ROOT = Path(__file__).parents[1]
CHATS, TOKENIZER = ROOT / "tools/demo/chats.jsonl", ROOT / "tools/demo/tokenizer"


def prepare(folder: Path) -> None:
    """Write one chat as a JSON line, and a shard of a few packs."""
    with open(CHATS, encoding="utf-8") as chats:
        (folder / "chat.jsonl").write_text(chats.readline(), encoding="utf-8")
    write_samples(folder / "x", demo_samples(), capacity=32)


def entered_by(work: Callable[[], object]) -> list[str]:
    """Return the modules of the package in which ``work``, or a thread that it starts, calls a function; sorted."""
    entered: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.add(frame.f_globals.get("__name__", ""))

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(name for name in entered if name.split(".")[0] == PACKAGE)


# ---- the works: each prepares something and returns the function to count ----


def row(folder: Path) -> Callable[[], object]:
    """Convert a chat from its JSON line to a published shard, without worker processes."""
    from megatron_sft_idx.tokenize import EncodingOptions, PackOptions, PreprocessOptions, make_shards

    inputs, encoding = [str(folder / "chat.jsonl")], EncodingOptions(str(TOKENIZER))
    options = PreprocessOptions(inputs, str(folder / "made"), encoding, PackOptions(capacity=1024), workers=0)
    return lambda: make_shards(options)


def item(folder: Path) -> Callable[[], object]:
    """Open a shard with ``SFTIndexedDataset`` and read a pack."""
    from megatron_sft_idx.dataset import SFTIndexedDataset

    return lambda: SFTIndexedDataset(str(folder / "x"))[3]


def batch(folder: Path) -> Callable[[], object]:
    """Open a shard and make a batch of shuffled packs in a thread, as for a trainer."""
    from megatron_sft_idx.shard.shard_set import ShardSet
    from megatron_sft_idx.training.loader import BatchLoader
    from megatron_sft_idx.training.rows import PackedRows
    from megatron_sft_idx.training.sources import StoredPacks

    def first() -> object:
        source = StoredPacks(ShardSet([str(folder / "x")]))
        rows = PackedRows(source, 1234, "train", source.num_packs, seq_length=32)
        with iter(BatchLoader(rows.assembler, rows.micro_batches([[0, 1], [2, 3]]))) as batches:
            return next(batches)

    return first


def conversion(folder: Path) -> Callable[[], object]:
    """Convert a shard to another format, then read it again and compare, as ``convert`` does by default."""
    from megatron_sft_idx.formats.convert import convert

    return lambda: convert(str(folder / "x"), str(folder / "padded"), "memmap")


WORKS = {"row": row, "item": item, "batch": batch, "conversion": conversion}


def main(name: str, folder: str) -> None:
    """Print the modules that the work with this name uses."""
    work = WORKS[name](Path(folder))
    with_megatron = "torch" in sys.modules
    for module, _, _ in modules(ROOT):
        if not module.endswith("__main__") and (with_megatron or is_light(module)):
            with contextlib.suppress(ModuleNotFoundError):  # a module of an extra that is not installed
                import_module(module)
    print(*entered_by(work), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
