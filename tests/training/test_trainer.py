"""The ``Trainer`` of transformers, with its defaults, trains exactly on the tokens of our masks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from chats import CHATS, TOKENIZER
from sample_packs import demo_samples, write_samples
from tiny_models import loss_alone, tiny_llama
from torch.utils.data import Subset

from megatron_sft_idx import Shard, ShardWriter, as_torch, preprocess
from megatron_sft_idx.shard import Pack
from megatron_sft_idx.training.losses import model_inputs, weighted_loss
from megatron_sft_idx.training.torch_packs import Layout, TorchPacks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs it: pip install accelerate")

STEPS, BATCH, VOCABULARY = 3, 2, 2000


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("demo") / "chats"
    rows = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()[:100]]
    preprocess(
        rows, output_prefix=prefix, tokenizer=TOKENIZER, seq_length=512, earlier_reasoning="drop", workers=0,
        log_interval=0, overlong="drop",
    )  # fmt: skip
    return str(prefix)


class Recorder:
    """The ``collate`` of a dataset, which records the packs of each batch."""

    def __init__(self, dataset: TorchPacks) -> None:
        self.collate = dataset.collate
        self.batches: list[list[list[int]]] = []

    def __call__(self, packs: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        self.batches.append([pack["input_ids"].tolist() for pack in packs])
        return self.collate(packs)


def arguments(folder: Path, accumulated: int) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulated,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )


def by_hand(model: Any, steps: Sequence[Sequence[Pack]], loss_of: Callable[[Any, Sequence[Pack]], Any]) -> list[float]:
    """Train like the Trainer with its defaults, and return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, STEPS)
    losses = []
    for packs in steps:
        loss = loss_of(model, packs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def packs_of(batches: Sequence[Sequence[list[int]]], prefix: str, accumulated: int) -> list[list[Pack]]:
    """Return the packs of each step, found by the recorded ids."""
    by_ids = {tuple(pack["input_ids"].tolist()): pack for pack in Shard(prefix)}
    flat = [[by_ids[tuple(ids)] for ids in batch] for batch in batches]
    firsts = range(0, STEPS * accumulated, accumulated)
    return [[pack for batch in flat[first : first + accumulated] for pack in batch] for first in firsts]


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def apart(model: Any, other: Any) -> float:
    """Return the largest difference of a parameter, relative to the largest parameter."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((mine - its).detach().abs().max() / its.detach().abs().max()) for mine, its in pairs)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("layout", get_args(Layout))
def test_the_trainer_with_its_defaults_has_the_loss_of_our_masks(
    demo: str, layout: Layout, accumulated: int, tmp_path: Path
) -> None:
    model = tiny_llama(Shard(demo).header.vocab_size)
    untrained, twin = copy.deepcopy(model), copy.deepcopy(model)
    ds = as_torch(demo, layout, pad_to_multiple_of=16)
    recorder = Recorder(ds)
    trainer = transformers.Trainer(
        model=model,
        args=arguments(tmp_path, accumulated),
        train_dataset=ds,
        eval_dataset=Subset(ds, range(3)),
        data_collator=recorder,
    )
    assert trainer.args.remove_unused_columns
    before = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        assert before == pytest.approx(loss_alone(untrained, Shard(demo)[0:3]).item(), rel=1e-5)
    recorder.batches.clear()
    trainer.train()
    steps = packs_of(recorder.batches, demo, accumulated)
    assert losses_of(trainer) == pytest.approx(by_hand(twin, steps, loss_alone), rel=1e-3)
    assert apart(model, twin) < 1e-3
    assert apart(model, untrained) > 1e-2


def test_a_model_whose_forward_has_no_positions_is_trained_too(demo: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=Shard(demo).header.vocab_size, hidden_size=16, n_layer=1, n_head=2)
    ds = as_torch(demo, "padded")
    model = transformers.BloomForCausalLM(config)
    twin, recorder = copy.deepcopy(model), Recorder(ds)
    trainer = transformers.Trainer(model=model, args=arguments(tmp_path, 1), train_dataset=ds, data_collator=recorder)
    trainer.train()
    wanted = by_hand(twin, packs_of(recorder.batches, demo, 1), loss_alone)
    assert losses_of(trainer) == pytest.approx(wanted, rel=1e-3)


class WeightedTrainer(transformers.Trainer):  # type: ignore[misc]
    """The class in docs/transformers.md."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**model_inputs(inputs))
        loss = weighted_loss(outputs.logits, inputs)
        return (loss, outputs) if return_outputs else loss


@pytest.fixture(scope="module")
def weighted(demo: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Provide the demo's packs with random weights on trained tokens."""
    prefix = str(tmp_path_factory.mktemp("weighted") / "x")
    rng = np.random.default_rng(5)
    with ShardWriter(prefix, mask_dtype=np.float32) as writer:
        for pack in Shard(demo):
            weights = pack["loss_mask"] * rng.uniform(0.1, 2, len(pack["loss_mask"])).astype(np.float32)
            writer.add_pack(pack["input_ids"], weights, pack["seq_boundaries"][:-1])
    return prefix


@pytest.mark.parametrize("layout", get_args(Layout))
def test_weights_of_the_mask_are_those_of_the_loss(weighted: str, layout: Layout, tmp_path: Path) -> None:
    model = tiny_llama(VOCABULARY)
    twin = copy.deepcopy(model)
    ds = as_torch(weighted, layout, loss_weights=True)
    recorder = Recorder(ds)
    trainer = WeightedTrainer(model=model, args=arguments(tmp_path, 1), train_dataset=ds, data_collator=recorder)
    trainer.train()
    wanted = by_hand(twin, packs_of(recorder.batches, weighted, 1), loss_alone)
    assert losses_of(trainer) == pytest.approx(wanted, rel=1e-3)
    assert apart(model, twin) < 1e-3


@pytest.mark.parametrize("layout", get_args(Layout))
def test_a_plain_trainer_cannot_overlook_weights(weighted: str, layout: Layout, tmp_path: Path) -> None:
    ds = as_torch(weighted, layout, loss_weights=True)
    trainer = transformers.Trainer(
        model=tiny_llama(VOCABULARY), args=arguments(tmp_path, 1), train_dataset=ds, data_collator=ds.collate
    )
    with pytest.raises(ValueError, match="did not return a loss"):
        trainer.train()


def test_weights_0_and_1_give_the_loss_of_labels(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    model = tiny_llama(128).eval()
    for layout in get_args(Layout):
        with_labels, with_weights = (as_torch(str(tmp_path / "x"), layout, loss_weights=each) for each in (False, True))
        packs = range(len(with_labels))
        batch, weighed = (ds.collate([ds[i] for i in packs]) for ds in (with_labels, with_weights))
        assert "labels" not in weighed
        with torch.no_grad():
            wanted = model(**batch).loss
            found = weighted_loss(model(**model_inputs(weighed)).logits, weighed)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
        flat = weighted_loss(torch.zeros(*batch["input_ids"].shape, 128), weighed, divisor=2)
        assert flat.item() == pytest.approx(weighed["loss_weights"].sum().item() * np.log(128) / 2, rel=1e-6)
