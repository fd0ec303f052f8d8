"""LLaMA-Factory: our data in its own loading of ``tokenized_path`` and its collator for packed rows."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from trainer_shards import ROOT, Trained, told, trained_of

from megatron_sft_idx.formats.convert import ConvertOptions, convert

pytest.importorskip(
    "llamafactory", reason="llamafactory is not installed; make test-trainers has an environment for it"
)

if find_spec("torchaudio") is None:  # it is imported only for audio, and its wheels need a torch with CUDA
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import DataArguments, ModelArguments
from transformers import AutoTokenizer, Seq2SeqTrainingArguments


def batches(prefix: Path, folder: Path, attention: str, size: int) -> Any:
    """Return batches as made by LLaMA-Factory's ``run_sft``."""
    convert(str(prefix), str(folder / "hf"), "save_to_disk", ConvertOptions(overwrite=True))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tools/demo/tokenizer", padding_side="right")
    data = DataArguments(template="chatml", tokenized_path=str(folder / "hf"), neat_packing=True, packing=True)
    template = get_template_and_fix_tokenizer(tokenizer, data)
    training, model = Seq2SeqTrainingArguments(str(folder / "out"), use_cpu=True), ModelArguments("none")
    dataset = get_dataset(template, model, data, training, stage="sft", tokenizer=tokenizer)["train_dataset"]
    collate = SFTDataCollatorWith4DAttentionMask(
        template=template,
        tokenizer=tokenizer,
        pad_to_multiple_of=8,
        label_pad_token_id=-100,
        block_diag_attn=attention != "flash_attention_2",
        neat_packing=True,
        attn_implementation=attention,
        compute_dtype=torch.float32,
    )
    if size > 1:  # docs: remove this column, because its lists have different lengths
        dataset = dataset.remove_columns("seq_lengths")
    rows = [dataset[i] for i in range(len(dataset))]
    return [collate(rows[i : i + size]) for i in range(0, len(rows), size)]


def found(batch: dict[str, Any]) -> list[Trained]:
    """Return the sequences of a batch. Check that they begin where positions restart, and attend only to themselves."""
    sequences = []
    for row, (ids, labels, positions) in enumerate(
        zip(*(batch[name].tolist() for name in ("input_ids", "labels", "position_ids")), strict=True)
    ):
        bounds = [*(at for at, position in enumerate(positions) if position == 0), len(ids)]
        sees = None if batch["attention_mask"] is None else batch["attention_mask"][row, 0] == 0
        for start, stop in pairwise(bounds):
            if sees is not None:
                if not sees[start, start]:  # padding attends to nothing
                    assert not sees[start:stop].any()
                    assert set(labels[start:stop]) == {-100}
                    continue
                expected = torch.zeros(stop - start, len(ids), dtype=torch.bool)
                expected[:, start:stop] = torch.ones(stop - start, stop - start).tril() > 0
                assert torch.equal(sees[start:stop], expected)
            assert all(label in (-100, token) for token, label in zip(ids[start:stop], labels[start:stop], strict=True))
            sequences.append(Trained(ids[start:stop], [label != -100 for label in labels[start:stop]]))
    return sequences


@pytest.mark.parametrize(("attention", "size"), [("sdpa", 2), ("eager", 1), ("flash_attention_2", 1)])
def test_llamafactory_trains_what_the_shard_says(
    shards: tuple[Path, Path], tmp_path: Path, attention: str, size: int
) -> None:
    train, later = shards
    for prefix in (train, later):
        sequences = [each for batch in batches(prefix, tmp_path, attention, size) for each in found(batch)]
        assert (sequences == trained_of(train)) == (prefix == train)
    told(f"llamafactory, {attention}", trained_of(train))
