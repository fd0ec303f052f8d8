"""Megatron-Bridge's own data modules without a GPU: those that are installed, or of the checkout in MEGATRON_BRIDGE.

Its packages import all of its models, and these Transformer Engine, which is compiled against CUDA. Three packages are
made bare for that, but for the names of its data configurations; the modules in them are its own, whole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# A folder with the sources of Megatron-Bridge, in place of what is installed.
CHECKOUT = os.environ.get("MEGATRON_BRIDGE")
BARE = ("megatron.bridge", "megatron.bridge.data", "megatron.bridge.data.builders")
# Modules of ours that import it.
OURS = ("megatron_sft_idx.training.packed_shard", "megatron_sft_idx.training.bridge_config")
MISSING = "megatron-bridge is not installed: make test-megatron has it, for Python 3.12"


def bridge_folder() -> Path | None:
    """The folder of the package ``megatron.bridge``; None where there is none."""
    if CHECKOUT:
        return Path(CHECKOUT, "src", "megatron", "bridge")
    if find_spec("megatron") is None or (spec := find_spec("megatron.bridge")) is None:
        return None
    (folder,) = spec.submodule_search_locations or ()
    return Path(folder)


def make_bare(more: Sequence[str] = ()) -> None:
    """Put the bare packages, and ``more`` of them, where Python looks for modules.

    AssertionError where Bridge is not there.
    """
    folder = bridge_folder()
    assert folder is not None, MISSING
    for name in (*BARE, *more):
        package = ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")[2:]))]
        sys.modules[name] = package

    def of_builders(name: str) -> Any:
        if name.startswith("GPTSFT"):
            return getattr(import_module("megatron.bridge.data.builders.gpt_sft"), name)
        raise AttributeError(name)

    sys.modules[BARE[-1]].__getattr__ = of_builders  # type: ignore[method-assign]


def forget(before: set[str]) -> None:
    """Take its modules out again, but for those of ``before``, and ours that have imported them."""
    for name in set(sys.modules) - before:
        if name.startswith("megatron.bridge") or name in OURS:
            del sys.modules[name]
