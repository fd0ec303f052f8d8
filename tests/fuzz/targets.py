"""The fuzz targets by name. A new parser needs a module in this folder, a line here, and seeds in ``corpus/NAME``."""

from __future__ import annotations

import importlib
from pathlib import Path

from fuzz.contract import Run, Target

__all__ = ["CORPUS", "TARGETS", "load"]

CORPUS = Path(__file__).parent / "corpus"

TARGETS = {
    "header": Target("fuzz_header", 1024),
    "column": Target("fuzz_column", 1024),
    "media": Target("fuzz_media", 2048),
    "building": Target("fuzz_building", 1024),
    "shard": Target("fuzz_shard", 2048),
    "json-lines": Target("fuzz_json_lines", 1024),
    "json-array": Target("fuzz_json_array", 1024),
    "input-file": Target("fuzz_input_file", 4096),
    "rows": Target("fuzz_rows", 1024),
    "legacy-npy": Target("fuzz_legacy_npy", 4096),
    "pickled-pairs": Target("fuzz_pickled_pairs", 512),
    "pbin": Target("fuzz_pbin", 1024),
    "raw-index": Target("fuzz_raw_index", 1024),
    "jsonl-chunks": Target("fuzz_jsonl_chunks", 1024),
    "memmap": Target("fuzz_memmap", 2048),
    "stock": Target("fuzz_stock", 1024),
    "verify": Target("fuzz_verify", 2048),
    "rebuild": Target("fuzz_rebuild", 2048),
    "recover": Target("fuzz_recover", 2048),
    "pack-stage": Target("fuzz_pack_stage", 512),
    "offsets": Target("fuzz_offsets", 128),
}


def load(name: str) -> Run:
    """Return the function that takes one input of a target."""
    run: Run = importlib.import_module(f"fuzz.{TARGETS[name].module}").run
    return run
