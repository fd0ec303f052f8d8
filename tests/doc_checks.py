"""Check blocks in README.md and docs/ that are not commands: code for the reader's own files, and lists."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from columned import SOURCE, write_columned
from doc_blocks import Block
from house import LAYERS
from megatron.core import utils as megatron_utils
from megatron_setups import FLAGS
from sample_packs import demo_samples, write_samples
from torch.utils.data import default_collate
from trainer_glue import GLUE
from training_twin import lone_process

from megatron_sft_idx import pretrain
from megatron_sft_idx.cli.main import build_parser
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.training.provider import train_valid_test_datasets_provider
from megatron_sft_idx.training.rows import rows_of


def micro_batch(script: ModuleType, folder: Path) -> dict[str, Any]:
    """Return a micro-batch in the form that Megatron-LM's loader returns."""
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
            flat = flatten(batch)  # later releases: the page promises that nothing else changes
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
    """Check that the names before the first gap are the layers, from the top down, below tools/."""
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


def check_runner(block: Block, _tmp_path: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    launched, _, words = block.text.replace("\\\n", " ").partition(" -m megatron_sft_idx.pretrain ")
    assert launched.startswith("torchrun ")
    script, options, rest = pretrain.divide(pretrain.build_parser(), words.split())
    assert (script, options, rest[0]) == ("Megatron-LM/pretrain_gpt.py", {}, "--data-path")
    assert set(FLAGS) <= set(rest)


CHECKS: dict[str, Callable[[Block, Path, pytest.MonkeyPatch], None]] = {
    **GLUE,
    "python columns": check_columns,
    "python get_batch": check_get_batch,
    "python tp_rank": check_tp_rank,
    "sh runner": check_runner,
    "text files": check_files,
    "text layers": check_layers,
    "yaml config": check_config,
}
