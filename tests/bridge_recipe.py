"""Run the script of docs/bridge.md in the current folder, up to the batches that Megatron-Bridge would train on.

``python tests/bridge_recipe.py SCRIPT OUT`` keeps the batches of two epochs of training, and of one of validation, in
the file OUT. Data set, collate function, sampler and loader are Bridge's own. They are called as in Bridge's
``data/loaders.py``, which itself needs packages for a GPU. OUT has ``train`` and ``valid``, lists of batches or None,
and ``eos_id``.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module
from typing import Any

import torch
from bridge_modules import make_bare

TRAIN_EPOCHS = 2


def build(config: Any, tokenizer: Any) -> Any:
    """Build the data sets as Bridge does: with the provider's own method if it has one, otherwise with the builder."""
    base = import_module("megatron.bridge.data.base")
    if isinstance(config, base.DatasetProvider):
        samples = {"train_samples": 8, "valid_samples": 4, "test_samples": 4}
        return config.build_datasets(base.DatasetBuildContext(**samples, tokenizer=tokenizer))
    return import_module("megatron.bridge.data.builders").GPTSFTDatasetBuilder(config, tokenizer).build()


def batches_of(config: Any, dataset: Any, batch: int, training: bool) -> list[dict[str, Any]] | None:
    """Return global batches as the loader of one data-parallel rank returns them."""
    if dataset is None:
        return None
    own = type(config).__name__.startswith("GPTSFT")  # Bridge fills up the last batch of validation
    load = import_module("megatron.bridge.data.samplers").build_pretraining_data_loader
    found = []
    for epoch in range(TRAIN_EPOCHS if training else 1):
        drop_last = config.drop_last if training else not own
        loader = load(
            dataset,
            epoch * (len(dataset) // batch * batch),
            config.dataloader_type,
            1,
            0,
            config.data_sharding,
            collate_fn=dataset.collate_fn,
            persistent_workers=False,
            data_parallel_rank=0,
            data_parallel_size=1,
            global_batch_size=batch,
            drop_last=drop_last,
            seed=config.seed,
        )
        found += list(loader)
    return found


def main(script: str, out: str) -> None:
    make_bare()
    names = runpy.run_path(script, run_name="recipe")
    config = names["dataset"]
    config.finalize()
    tokens = import_module("megatron.bridge.training.tokenizers.config").TokenizerConfig
    make = import_module("megatron.bridge.training.tokenizers.tokenizer").build_tokenizer
    tokenizer = make(tokens(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=os.environ["MODEL"]))
    train, valid, test = build(config, tokenizer)
    assert test is None
    found = {
        "train": batches_of(config, train, names["BATCH"], True),
        "valid": batches_of(config, valid, names["BATCH"], False),
        "eos_id": tokenizer.eos_id,
    }
    torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
