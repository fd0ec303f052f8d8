"""Batches with images for Megatron-Bridge's packed step equal batches of its own collate function for the same chats.

The tests use the installed Bridge, or the checkout in MEGATRON_BRIDGE. Bridge's step and Qwen-VL models train on the
batches in ``bridge_vlm_steps``, which lists the replacements for code that needs a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bridge_modules import MISSING, bridge_folder, forget, make_bare
from doc_blocks import blocks_of
from torch import Tensor

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.shard.writer import ShardWriter
from megatron_sft_idx.training import BatchAssembler
from megatron_sft_idx.training.sources import StoredPacks
from megatron_sft_idx.training.vlm_batch import VLMPacks, bridge_vlm_batch

pytestmark = pytest.mark.skipif(bridge_folder() is None, reason=MISSING)

ROOT = Path(__file__).parents[2]
# Packages that the models and the collate function import, in addition to Bridge's data modules.
NEEDED = ("einops", "omegaconf", "qwen_vl_utils", "torchvision")
ABSENT = [name for name in NEEDED if find_spec(name) is None]
LENGTH = 40


# ---- training ----


@pytest.fixture(scope="module", params=["qwen2.5", "qwen3"])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run ``bridge_vlm_steps`` for a model and return its results."""
    if ABSENT:
        pytest.skip(f"{', '.join(ABSENT)} is not installed: make test-megatron has it, for Python 3.12")
    folder = tmp_path_factory.mktemp("vlm")
    (script,) = (block.text for block in blocks_of("docs/media.md") if block.kind == "python bridge-vlm")
    (folder / "finetune_vlm.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "tests/bridge_vlm_steps.py", request.param]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tools"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command += [str(folder), str(folder / "found.json")]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert found["packs"] == 2
    assert sorted(found["chats"]) == list(range(5))
    print(json.dumps(found, indent=1))
    return found


def test_a_batch_is_what_bridge_makes_of_the_chats(measured: dict[str, Any]) -> None:
    assert len(measured["unequal"]) in (4, 5)
    for name, differing in measured["unequal"].items():
        expected = ["visual_inputs: image_grid_thw", "visual_inputs: pixel_values"] if name == "swapped" else []
        assert differing == expected, name


def test_the_loader_of_bridge_gives_every_pack_once(measured: dict[str, Any]) -> None:
    assert sorted(measured["loaded"]) == [[False, True], [True, False]]


def test_bridge_trains_on_packs_as_on_its_own_batches_of_single_chats(measured: dict[str, Any]) -> None:
    assert len(measured["losses"]) == 5
    for name, difference in measured["losses"].items():
        assert difference < 1e-5, name


def test_wrong_images_boundaries_and_positions_are_seen(measured: dict[str, Any]) -> None:
    assert len(measured["controls"]) in (2, 4)
    for name, difference in measured["controls"].items():
        assert difference > 1e-2, name


# ---- rows ----


@pytest.fixture
def bridge() -> Iterator[Any]:
    """Provide Bridge's own function that packs sequences when it collates."""
    before = set(sys.modules)
    make_bare()
    yield import_module("megatron.bridge.data.packing.in_batch").build_mcore_thd_sequence_batch_from_rows
    forget(before)


def source_of(path: Path, packs: list[list[int]], seed: int = 0) -> StoredPacks:
    """Return packs with sequences of these lengths."""
    rng = np.random.default_rng(seed)
    with ShardWriter(path) as writer:
        for lengths in packs:
            mask = rng.integers(0, 2, sum(lengths))
            mask[np.cumsum(lengths) - 1] = 0
            writer.add_pack(rng.integers(1, 90, sum(lengths)), mask, np.cumsum([0, *lengths[:-1]]))
    return StoredPacks(ShardSet([str(path)]))


def rows_of(source: StoredPacks) -> list[dict[str, Tensor]]:
    """Return the sequences in the form of Bridge's collate functions before packing."""
    rows = []
    for pack in source.shards:
        bounds = pack["seq_boundaries"].tolist()
        for a, b in pairwise(bounds):
            ids = torch.from_numpy(pack["input_ids"][a:b].astype(np.int64))
            mask = torch.from_numpy(pack["loss_mask"][a:b].astype(np.float32))
            labels = torch.cat([ids[1:], torch.tensor([-100])]).masked_fill(mask == 0, -100)
            positions = torch.arange(len(ids))
            rows.append({"input_ids": ids, "position_ids": positions, "labels": labels, "loss_mask": mask})
    return rows


def test_rows_are_packed_as_bridge_packs_them(tmp_path: Path, bridge: Any) -> None:
    rng = np.random.default_rng(1)
    for seed in range(30):
        packs = [rng.integers(1, 9, rng.integers(1, 5)).tolist() for _ in range(rng.integers(1, 4))]
        source = source_of(tmp_path / f"x{seed}", packs, seed)
        multiple, within = int(rng.choice([1, 2, 4, 6])), int(rng.choice([1, 5]))
        assembler = BatchAssembler(source, 160, sequence_multiple=within, padding_mask=True)
        made = bridge_vlm_batch(assembler.assemble(range(len(packs))), sequence_multiple=multiple)
        wanted = bridge(rows_of(source), pad_to_multiple_of=multiple)
        if multiple > 1 and "cu_seqlens_q_padded" not in made:  # 0.6.2 has them even if nothing is padded
            for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
                assert torch.equal(wanted.pop(name, made["cu_seqlens_q"]), made["cu_seqlens_q"])
        assert vars(made.pop("visual_inputs")) == dict.fromkeys(vars(container()))
        assert made.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, Tensor):
                assert made[name].dtype == value.dtype
                assert torch.equal(made[name], value), name
            else:
                assert made[name] == value


def container() -> Any:
    return import_module("megatron.bridge.training.utils.visual_inputs").GenericVisualInputs()


@pytest.mark.usefixtures("bridge")
def test_a_row_is_filled_up_behind_its_last_sequence(tmp_path: Path) -> None:
    source = source_of(tmp_path / "x", [[5, 2], [3]])
    batch = BatchAssembler(source, LENGTH, padding_mask=True).assemble([0, 1])
    made = bridge_vlm_batch(batch, sequence_multiple=4, length=20, pad_id=9)
    assert made["cu_seqlens_q"].tolist() == [0, 5, 7, 10]
    assert made["cu_seqlens_q_padded"].tolist() == [0, 8, 12, 20]
    assert (made["total_tokens"], int(made["max_seqlen_q"])) == (20, 8)
    assert made["position_ids"].tolist() == [[*range(8), *range(4), *range(8)]]
    outside = torch.tensor([*[0] * 5, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, *[1] * 5]).bool()
    assert (made["input_ids"][0, outside] == 9).all()
    assert (made["labels"][0, outside] == -100).all()
    assert not made["loss_mask"][0, outside].any()
    with pytest.raises(ValueError, match=r"length 15: the sequences of this batch need 16 positions, each padded"):
        bridge_vlm_batch(batch, sequence_multiple=4, length=15)
    with pytest.raises(ValueError, match="sequence_multiple 0: expected a whole number of at least 1"):
        bridge_vlm_batch(batch, sequence_multiple=0)


@pytest.mark.usefixtures("bridge")
def test_what_bridge_cannot_be_given_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path / "x", [[5, 2], [3]])
    whole = BatchAssembler(source, LENGTH, padding_mask=True).assemble([0, 1])
    for name, pattern in {
        "padding_mask": "has no 'padding_mask'; make batches with padding_mask=True, which marks the ends of sequences",
        "labels": "has no 'labels'; make batches with form=\"wide\"",
        "cu_seqlens": "has no 'cu_seqlens'; pass whole batches",
        "tokens": "has no 'tokens'; pass a batch of BatchAssembler or BatchLoader",
    }.items():
        with pytest.raises(FormatError, match=pattern):
            bridge_vlm_batch({key: value for key, value in whole.items() if key != name})
    for name in ("media", "input_features", "source"):
        with pytest.raises(FormatError, match=rf"has '{name}', which .* does not accept; it accepts pixel_values, "):
            bridge_vlm_batch({**whole, name: torch.zeros(1)})
    with pytest.raises(FormatError, match="has no tokens"):
        bridge_vlm_batch({**whole, "padding_mask": torch.ones_like(whole["padding_mask"])})


def test_a_run_that_does_not_fit_the_shard_is_refused(tmp_path: Path) -> None:
    before = set(sys.modules)
    make_bare()
    try:
        config_of = import_module("megatron_sft_idx.training.bridge_config").BridgeVLMConfig
        context = import_module("megatron.bridge.data.base").DatasetBuildContext
        ranks = SimpleNamespace(cp=SimpleNamespace(size=lambda: 2))
        config = config_of(path=str(tmp_path / "x"), seq_length=LENGTH, processor="no", sequence_multiple=2)
        with pytest.raises(
            FormatError, match=r"sequence_multiple 2: with 2 context-parallel ranks, .* multiples of 4;"
        ):
            config.build_datasets(context(1, 1, 1, pg_collection=ranks))
    finally:
        forget(before)


def test_packs_are_numbers_until_bridge_collates_them(tmp_path: Path, bridge: Any) -> None:
    source = source_of(tmp_path / "x", [[5, 2], [3], [4, 4]])
    packs = VLMPacks(BatchAssembler(source, LENGTH, sequence_multiple=4, padding_mask=True))
    assert (len(packs), packs[2]) == (3, 2)
    with pytest.raises(IndexError, match="there is no pack 3; the number of packs is 3"):
        packs[3]
    made = packs.collate_fn([2])
    wanted = bridge(rows_of(source)[3:], pad_to_multiple_of=4)
    assert made["input_ids"].shape == (1, LENGTH)
    assert torch.equal(made["input_ids"][:, :8], wanted["input_ids"])
    assert torch.equal(made["labels"][:, :8], wanted["labels"])
    assert made["cu_seqlens_q"].tolist() == wanted["cu_seqlens_q"].tolist()
