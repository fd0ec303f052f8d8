"""Blocks of README.md and docs/ that are no commands: code for somebody else's files, and lists, held to what is so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from columned import SOURCE, write_columned
from doc_blocks import Block
from house import LAYERS
from megatron.core import utils as megatron_utils
from packs import demo_samples, write_samples
from test_bridge_collate import expected, packed_collate, trained
from torch.utils.data import default_collate
from trainer_glue import GLUE
from training_twin import lone_process

from megatron_sft_idx.cli.main import build_parser
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.training.provider import train_valid_test_datasets_provider
from megatron_sft_idx.training.rows import rows_of


class FollowsTheirs:
    """What Megatron-Bridge's packed data set does around the two methods that our class replaces."""

    def __init__(self, file_path: str, mapping: list[int] | None) -> None:
        self.file_path, self.samples_mapping = file_path, mapping
        self._load_dataset()

    def _load_dataset(self) -> None:
        raise AssertionError("our class replaces this")


def check_bridge(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ModuleType("megatron.bridge.data.datasets.sft")
    theirs.GPTSFTPackedDataset = FollowsTheirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    for parent in ("megatron.bridge", "megatron.bridge.data", "megatron.bridge.data.datasets"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    packs = demo_samples()
    write_samples(tmp_path / "x", packs)
    names: dict[str, Any] = {}
    exec(block.text, names)
    for mapping in (None, list(range(len(packs)))[::-1]):
        dataset = names["PackedShard"](str(tmp_path / "x"), mapping)
        order = mapping or list(range(len(packs)))
        batch = packed_collate([dataset[i] for i in range(len(packs))], 64, 8)
        for row, pack in enumerate(order):
            assert trained(batch, row) == expected(packs[pack])
        padding = dataset[-1]
        assert not padding["loss_mask"].any()
        assert np.array_equal(padding["input_ids"], dataset[len(packs) - 1]["input_ids"])


def micro_batch(script: ModuleType, folder: Path) -> dict[str, Any]:
    """A row as Megatron-LM's loader hands it on."""
    write_samples(folder / "x", demo_samples(8), capacity=32)
    args = script.parse_arguments(["--data-path", str(folder / "x"), "--seq-length", "32"])
    train, *_ = train_valid_test_datasets_provider([8, 0, 0], args=args)
    batch: dict[str, Any] = default_collate([train[0]])
    return batch


def check_get_batch(block: Block, tmp_path: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec(f"def flattened(cu_seqlens):\n{block.text}    return cu_seqlens\n", names)
    assert names["flattened"](None) is None
    with lone_process() as script:
        batch = micro_batch(script, tmp_path)
        assert batch["cu_seqlens"].dim() == 2
        if flatten := getattr(megatron_utils, "flatten_batch_for_packed_sequences", None):
            flat = flatten(batch)  # later releases, of which the page says that nothing else changes
            assert flat["cu_seqlens"].shape[0] == 1
            assert int(flat["cu_seqlens"].max()) == flat["tokens"].numel() == 32
            return
        boundaries, longest = names["flattened"](batch.pop("cu_seqlens")), batch.pop("max_seqlen")
        _, params = megatron_utils.get_thd_batch_on_this_cp_rank(batch, boundaries, None, longest)
    assert params.cu_seqlens_q.dim() == 1
    assert int(params.cu_seqlens_q[-1]) == 32


def check_tp_rank(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    names: dict[str, Any] = {"torch": torch}
    exec(block.text.strip(), names)
    with lone_process() as script:
        sent = micro_batch(script, tmp_path)["max_seqlen"]
    assert (names["max_seqlen"].shape, names["max_seqlen"].dtype) == (sent.shape, sent.dtype)


def check_files(block: Block, _folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(line.split()[0] for line in block.text.splitlines()) == sorted(f"X{suffix}" for suffix in SUFFIXES)


def check_layers(block: Block, _folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    """The names before the first gap are those of the layers, from the top down; what stands below tools/ is ours."""
    named = [set(line.split("  ")[0].split()) for line in block.text.splitlines()]
    assert named[0] == {"tools/"}
    assert named[1:] == [names - {"__main__"} for names in reversed(LAYERS)]


def check_columns(block: Block, tmp_path: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec(block.text, names)
    write_columned(tmp_path / "x", demo_samples(8), {"source": SOURCE}, capacity=32)
    with lone_process() as script:
        args = script.parse_arguments(["--data-path", str(tmp_path / "x"), "--seq-length", "32"])
        train, *_ = names["with_source"]([8, 0, 0], args=args)
        assert names["with_source"].is_distributed
        batches = [default_collate([train[i], train[i + 1]]) for i in range(0, 8, 2)]
        taken = names["WithFiles"](iter([dict(batch) for batch in batches]))
        count = len(rows_of(train).assembler.source_files)
        for batch, whole in zip(taken, batches, strict=True):
            assert batch.keys() == whole.keys() - {"source"}
            ones = torch.ones_like(batch["loss_mask"])
            found = names["sums_by_file"](ones, batch["loss_mask"], taken.files, count)[:, 0]
            slow = [0.0] * count
            for row, bounds in enumerate(whole["cu_seqlens"].tolist()):
                for k, (start, stop) in enumerate(pairwise(bounds)):
                    slow[int(whole["source"][row, k, 0])] += float(whole["loss_mask"][row, start:stop].sum())
            assert found.tolist() == slow


def check_config(block: Block, tmp_path: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text(block.text, encoding="utf-8")
    parsed = vars(build_parser("preprocess").parse_args(["preprocess", "--config", str(tmp_path / "run.yaml")]))
    assert parsed["repeat"] == {"more.parquet": 2}
    assert parsed["chat_template_kwargs"] == {"enable_thinking": False}
    assert len(parsed["input"]) == len(parsed["ignore_fields"]) == 2
    assert parsed["keep_corpus"] is True


CHECKS: dict[str, Callable[[Block, Path, pytest.MonkeyPatch], None]] = {
    **GLUE,
    "python bridge": check_bridge,
    "python columns": check_columns,
    "python get_batch": check_get_batch,
    "python tp_rank": check_tp_rank,
    "text files": check_files,
    "text layers": check_layers,
    "yaml config": check_config,
}
