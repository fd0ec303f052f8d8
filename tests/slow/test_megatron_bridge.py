"""``PackedShard`` with an older Megatron-Bridge's packed data set and collate function, taken from its wheel."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from sample_packs import demo_samples, write_samples
from test_bridge_collate import expected, trained

pytestmark = pytest.mark.slow

# The last release that does not require Python 3.12; this part has not changed since.
WHEEL = "megatron-bridge==0.3.1"
# Their __init__ would import models, which need GPU kernels, so it is replaced; their modules are unchanged.
PACKAGES = ("", "data", "data.datasets", "training", "training.tokenizers", "training.utils", "utils")

# Options that Megatron-Bridge's recipes pass. Packed data uses only the length.
THEIR_OPTIONS = {
    "max_seq_length": 64,
    "prompt_template": "{input} {output}",
    "label_key": "output",
    "truncation_field": "input",
}


@pytest.fixture
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make ``megatron.bridge`` importable."""
    pytest.importorskip("datasets", reason="Megatron-Bridge's data sets need it: pip install datasets")
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--ignore-requires-python"]
    if subprocess.run([*pip, "--dest", str(tmp_path), WHEEL], capture_output=True, check=False).returncode:
        pytest.skip(f"no package index has {WHEEL}")
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "wheel")
    before = set(sys.modules)
    for name in PACKAGES:
        package = ModuleType(f"megatron.bridge.{name}".rstrip("."))
        package.__path__ = [str(tmp_path / "wheel" / package.__name__.replace(".", "/"))]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    importlib.import_module("megatron.bridge.data.datasets.sft")
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("megatron.bridge", "megatron_sft_idx.training.packed_shard")):
            del sys.modules[name]


@pytest.mark.usefixtures("bridge")
def test_shards_feed_their_collate(tmp_path: Path) -> None:
    packs = demo_samples()
    write_samples(tmp_path / "x", packs, capacity=64)
    packed_shard = importlib.import_module("megatron_sft_idx.training.packed_shard").PackedShard
    make = partial(packed_shard, str(tmp_path / "x"), SimpleNamespace(eos_id=60_000), **THEIR_OPTIONS)
    dataset = make()
    assert len(dataset.indexed_dataset) == len(packs)
    batch = dataset.collate_fn([dataset[i] for i in range(len(packs))])
    for row, pack in enumerate(packs):
        assert trained(batch, row) == expected(pack)
    assert not dataset[-1]["loss_mask"].any()

    epochs = make(max_num_samples=2 * len(packs))
    assert len(epochs) == 2 * len(packs)
    numbers = epochs.samples_mapping.tolist()
    assert [epochs[i]["input_ids"].tolist() for i in range(len(epochs))] == [packs[n].tokens for n in numbers]
