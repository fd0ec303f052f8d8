"""NeMo Automodel: our data set in its own loader configuration, collater and conversion to THD."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from trainer_shards import SEQ_LENGTH, Trained, told, trained_of

pytest.importorskip(
    "nemo_automodel", reason="nemo-automodel is not installed; make test-trainers has an environment for it"
)

from nemo_automodel.components.datasets.loader import DataloaderConfig, make_dataset_config, make_packing_config
from nemo_automodel.components.datasets.utils import packed_sequence_thd_collater
from nemo_automodel.components.distributed.thd_utils import process_input_for_thd


def loader(prefix: Path, **options: Any) -> Any:
    target = "megatron_sft_idx.training.adapters.AutomodelPacks"
    row = -(-SEQ_LENGTH // 8) * 8 + 64 * (options.get("sequence_multiple", 1) > 1)
    dataset = make_dataset_config(target, {"source": str(prefix), "seq_length": row, **options})
    packing = make_packing_config("thd", {"packed_sequence_size": row, "prepacked": True})
    config = DataloaderConfig(
        dataset_config=dataset, packing=packing, collate_fn=packed_sequence_thd_collater, batch_size=2, shuffle=False
    )
    return config.build(dp_rank=0, dp_world_size=1)


def found(prefix: Path, **options: Any) -> list[Trained]:
    sequences = []
    for batch in loader(prefix, **options):
        lengths = [each for row in batch["seq_lens"].tolist() for each in row if each > 0]
        thd = process_input_for_thd(batch)
        ids, labels, positions = (thd[name].tolist() for name in ("input_ids", "labels", "position_ids"))
        bounds = thd.get("cu_seqlens_padded", thd["cu_seqlens"]).tolist()
        assert bounds[-1] == len(ids)
        for (start, stop), length in zip(pairwise(bounds), lengths, strict=True):
            assert positions[start : start + length] == list(range(length))
            learnt = [False]
            for at in range(start, stop):  # a label is the next token; a sequence's last token has none
                assert labels[at] == -100 or (at + 1 < start + length and labels[at] == ids[at + 1])
                learnt.append(labels[at] != -100)
            sequences.append(Trained(ids[start : start + length], learnt[:length]))
    return sequences


def test_automodel_trains_what_the_shard_says(shards: tuple[Path, Path]) -> None:
    train, later = shards
    assert found(train) == trained_of(train)
    assert found(train, sequence_multiple=8) == trained_of(train)
    assert found(later) != trained_of(train)
    told("nemo-automodel", trained_of(train))
