"""The fuzz targets by name. A new parser gets a module beside these, a line here, and seeds in ``corpus/NAME``."""

from __future__ import annotations

import importlib
from pathlib import Path

from fuzz.contract import Run, Target

__all__ = ["CORPUS", "TARGETS", "load"]

CORPUS = Path(__file__).parent / "corpus"

TARGETS = {
    "header": Target("fuzz_header", 1024),
    "journal": Target("fuzz_journal", 1024),
    "shard": Target("fuzz_shard", 2048),
    "json-lines": Target("fuzz_json_lines", 1024),
    "json-array": Target("fuzz_json_array", 1024),
    "input-file": Target("fuzz_input_file", 4096),
    "rows": Target("fuzz_rows", 1024),
    # CPython's unpickler gives its memo as many entries as a file asks for, up to 64 GiB (gh-115952): a MemoryError.
    "legacy-npy": Target("fuzz_legacy_npy", 4096, memory_mib=1024),
    "pack-stage": Target("fuzz_pack_stage", 512),
    "offsets": Target("fuzz_offsets", 128),
}


def load(name: str) -> Run:
    """The function that takes one input of a target."""
    run: Run = importlib.import_module(f"fuzz.{TARGETS[name].module}").run
    return run
