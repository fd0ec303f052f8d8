"""Import Megatron-Bridge's own data modules without a GPU, from the installation or a checkout (MEGATRON_BRIDGE).

Bridge's packages import all of its models, and these import Transformer Engine, which is compiled against CUDA.
Therefore the ``__init__`` of three packages is replaced by an empty one with only the names of the data configurations.
The modules in these packages are Bridge's own, unchanged.
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

# A folder with the sources of Megatron-Bridge, to use instead of the installed version.
CHECKOUT = os.environ.get("MEGATRON_BRIDGE")
BARE = ("megatron.bridge", "megatron.bridge.data", "megatron.bridge.data.builders")
# Our modules that import it.
OURS = ("megatron_sft_idx.training.packed_shard", "megatron_sft_idx.training.bridge_config")
MISSING = "megatron-bridge is not installed: make test-megatron has it, for Python 3.12"


def bridge_folder() -> Path | None:
    """Return the folder of the package ``megatron.bridge``, or None if there is none."""
    if CHECKOUT:
        return Path(CHECKOUT, "src", "megatron", "bridge")
    if find_spec("megatron") is None or (spec := find_spec("megatron.bridge")) is None:
        return None
    (folder,) = spec.submodule_search_locations or ()
    return Path(folder)


def make_bare(more: Sequence[str] = ()) -> None:
    """Put the empty packages, and the packages in ``more``, into ``sys.modules``.

    Raise AssertionError if Bridge is missing.
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
    """Remove Bridge's modules, except ``before``, from ``sys.modules``, and our modules that imported them."""
    for name in set(sys.modules) - before:
        if name.startswith("megatron.bridge") or name in OURS:
            del sys.modules[name]
