"""Every public class has a ``repr`` of one short line, which never raises."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blends import build, config_of
from bridge_modules import OURS
from sample_packs import demo_samples, write_samples
from torch.utils.data import DataLoader

import megatron_sft_idx as package
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.rows import rows_of
from megatron_sft_idx.training.sources import JoinedPacks, PlannedPacks, PlanOptions, StoredPacks

# Classes without direct instances.
_ABSTRACT = {"Record"}


def public_classes() -> Iterator[type]:
    """Yield the public classes of the package, and all others of ``training`` and ``live`` without an underscore.

    Classes in modules that need Megatron-Bridge are left out.
    """
    yield from filter(inspect.isclass, (getattr(package, name) for name in package.__all__))
    for folder in ("training", "live"):
        path = importlib.import_module(f"{package.__name__}.{folder}").__path__
        names = [f"{package.__name__}.{folder}.{info.name}" for info in pkgutil.iter_modules(path)]
        for module in map(importlib.import_module, filter(lambda name: name not in OURS, names)):
            own = (each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__)
            yield from (each for each in own if inspect.isclass(each) and not each.__name__.startswith("_"))


CLASSES = sorted(
    {
        kind
        for kind in public_classes()
        if not issubclass(kind, BaseException)
        and not getattr(kind, "_is_protocol", False)
        and kind.__name__ not in _ABSTRACT
    },
    key=lambda kind: kind.__name__,
)


def require_short(text: str, name: str, limit: int = 300) -> None:
    assert text.isprintable(), text
    assert len(text) <= limit, text
    assert name in text
    assert " object at 0x" not in text
    assert "not open" not in text


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_no_class_has_the_repr_of_object(kind: Any) -> None:
    assert kind.__repr__ is not object.__repr__
    if not inspect.isabstract(kind):
        half_built = tuple.__new__(kind) if issubclass(kind, tuple) else object.__new__(kind)
        assert kind.__name__ in repr(half_built)
        assert repr(half_built).isprintable()


def test_the_classes_are_found() -> None:
    names = {kind.__name__ for kind in CLASSES}
    assert len(names) > 50
    assert names >= {"Shard", "SFTIndexedDataset", "TorchPacks", "BatchAssembler", "LiveLoader", "PackPlan", "Segments"}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    write_samples(tmp_path / "line\nend", demo_samples())
    return str(tmp_path / "line\nend")


def test_objects_in_use_say_what_they_are(prefix: str, tmp_path: Path) -> None:
    stored = StoredPacks(ShardSet.open(prefix))
    planned = PlannedPacks(ShardSet.open(prefix), PlanOptions(16))
    assembler = BatchAssembler(stored, 16)
    batches = iter(BatchLoader(assembler, [[0], [1]]))
    next(batches)
    (train, *_) = build(config := config_of(prefix, sequence_length=16))
    torch_packs = package.as_torch(prefix)
    objects: list[tuple[Any, str]] = [
        (Shard(prefix), "7 packs"),
        (package.SFTIndexedDataset(prefix), "7 packs"),
        (package.open_dataset(prefix), "7 packs"),
        (ShardSet.open(prefix), "7 packs"),
        (stored, "7 packs of up to 12 tokens"),
        (planned, "packs of up to 16 tokens"),
        (JoinedPacks([stored, planned]), "2 sources"),
        (assembler, "rows of 16 tokens"),
        (BatchLoader(assembler, []), "prefetch 2"),
        (batches, "open"),
        (train, "split train"),
        (rows_of(train), "samples of <StoredPacks"),
        (config, "sequence_length=16"),
        (torch_packs, "flattened: 7 packs"),
        (assembler.rows([0, 1]), "2 x 16 tokens"),
        (package.pack_sequences([3, 4, 5], 8), "offsets=int64 [3]"),
        (stored.segments(np.arange(3)), "lengths=int64"),
        (torch_packs[0], "input_ids ["),
        (package.MediaItem("image", 3, 4, bytes(5000)), "length=4, data=5,000 bytes"),
        (package.MediaItem("audio", 3, 4, memoryview(b"abc")), "data=3 bytes"),
    ]
    for each, words in objects:
        require_short(repr(each), type(each).__name__, 1000)
        assert words in repr(each)
    batches.close()
    assert "closed" in repr(batches)
    assert repr(DataLoader(torch_packs).dataset) == repr(torch_packs)


def test_writers_say_how_far_they_are(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x") as writer, package.SFTIndexedDatasetBuilder(str(tmp_path / "y.bin")) as builder:
        for each in (writer, builder):
            each.add_pack([1, 2, 3], [1, 1, 0], [0])
            require_short(repr(each), f"{type(each).__name__} {tmp_path}")
            assert repr(each).endswith(": 1 packs, 3 tokens; open>")
    assert repr(writer) == f"<ShardWriter {tmp_path}/x: 1 packs, 3 tokens; finalized>"
    assert repr(builder) == f"<SFTIndexedDatasetBuilder {tmp_path}/y: 1 packs, 3 tokens; finalized>"
    with package.MemmapShardWriter(tmp_path / "z", 1, 8, 1) as memmap:
        memmap.write_bin(0, [1, 2], [1, 0], [0])
        assert repr(memmap).endswith(": 1 packs, 2 tokens; open>")
        memmap.finalize()
    assert repr(memmap).endswith("published>")
