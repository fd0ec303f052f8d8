"""``dpo_loss`` on batches of ``as_torch``: loss and gradient equal TRL's, for any distribution of pairs to packs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from chats import TOKENIZER
from tiny_models import sequence_parts, tiny_llama
from torch import Tensor
from torch.nn.functional import logsigmoid, pad
from torch.utils.data import ConcatDataset, DataLoader, Subset

from megatron_sft_idx import (
    FormatError,
    SFTIndexError,
    Shard,
    ShardWriter,
    as_torch,
    dpo_loss,
    open_dataset,
    preprocess,
)
from megatron_sft_idx.dataset import SFTIndexedDataset
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.shard import Pack
from megatron_sft_idx.training.losses import model_inputs
from megatron_sft_idx.training.torch_packs import Layout

pytest.importorskip("transformers")

BETA, PAIRS = 0.3, 11


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Provide a shard of pairs of very different lengths, with several pairs per pack."""
    rng = np.random.default_rng(2)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choice(["seven", "is", "a", "prime", "of", "all", "numbers"], rng.integers(low, high)))

    rows = [
        {"prompt": f"{n}? {text(1, 9)}", "chosen": f"y {text(1, 30)}", "rejected": f"n {text(1, 30)}"}
        for n in range(PAIRS)
    ]
    prefix = tmp_path_factory.mktemp("pairs") / "x"
    preprocess(
        rows, output_prefix=prefix, tokenizer=TOKENIZER, seq_length=384, row_kind="preference", workers=0,
        log_interval=0,
    )  # fmt: skip
    assert 1 < len(Shard(prefix)) < PAIRS
    return str(prefix)


@pytest.fixture(scope="module")
def models(pairs: str) -> tuple[Any, Any]:
    """Provide the trained model and the reference, in float64, so that only the method makes a difference."""
    policy, reference = (tiny_llama(Shard(pairs).header.vocab_size, seed).double() for seed in (1, 2))
    return policy, reference


def sums_of_trl(model: Any, sequences: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute as TRL does: sequences padded to one length, log-softmax of all logits, sum over completion tokens."""
    longest = max(len(ids) for ids, _ in sequences)
    ids = torch.stack([pad(each, (0, longest - len(each))) for each, _ in sequences])
    seen = torch.stack([pad(torch.ones_like(each), (0, longest - len(each))) for each, _ in sequences])
    completion = torch.stack([pad(mask, (1, longest - len(mask)))[:longest] for _, mask in sequences])
    logp = model(input_ids=ids, attention_mask=seen).logits[:, :-1].log_softmax(-1)
    per_token = logp.gather(2, ids[:, 1:, None])[..., 0]
    return (per_token * completion[:, 1:]).sum(1)  # type: ignore[no-any-return]


def loss_of_trl(models: tuple[Any, Any], packs: Sequence[Pack]) -> tuple[Tensor, dict[str, float]]:
    sequences = [part for pack in packs for part in sequence_parts(pack)]
    own = sums_of_trl(models[0], sequences)
    with torch.no_grad():
        reference = sums_of_trl(models[1], sequences)
    chosen, rejected = (own[at::2] - reference[at::2] for at in (0, 1))
    loss = -logsigmoid(BETA * (chosen - rejected)).mean()
    chosen, rejected = (BETA * each.detach() for each in (chosen, rejected))
    return loss, {
        "rewards/chosen": chosen.mean().item(),
        "rewards/rejected": rejected.mean().item(),
        "rewards/accuracies": (chosen > rejected).double().mean().item(),
        "rewards/margins": (chosen - rejected).mean().item(),
    }


def gradient(model: Any) -> Tensor:
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return found


@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("layout", get_args(Layout))
def test_loss_metrics_and_gradient_are_those_of_trl(
    pairs: str, models: tuple[Any, Any], layout: Layout, count: int, multiple: int
) -> None:
    packs = Shard(pairs)[0:count]
    wanted, metrics = loss_of_trl(models, packs)
    wanted.backward()
    wanted_gradient = gradient(models[0])
    ds = as_torch(pairs, layout, preferences=True, pad_to_multiple_of=multiple)
    batch = ds.collate([ds[i] for i in range(count)])
    assert batch["input_ids"].shape[1] % multiple == 0
    inputs = model_inputs(batch)
    with torch.no_grad():
        reference = models[1](**inputs).logits
    found = dpo_loss(models[0](**inputs).logits, reference, batch, beta=BETA)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(wanted.item(), rel=1e-9)
    assert {name: value.item() for name, value in found.metrics.items()} == pytest.approx(metrics, rel=1e-9)
    difference = (gradient(models[0]) - wanted_gradient).abs().max() / wanted_gradient.abs().max()
    assert difference < 1e-9
    assert len(found.pairs.losses) == sum(len(pack["seq_boundaries"]) - 1 for pack in packs) // 2


def test_half_precision_logits_are_summed_in_float32(pairs: str, models: tuple[Any, Any]) -> None:
    ds = as_torch(pairs, preferences=True)
    batch = ds.collate([ds[0]])
    with torch.no_grad():
        policy, reference = (model(**model_inputs(batch)).logits for model in models)
    half = [logits.bfloat16() for logits in (policy, reference)]
    found, wanted = dpo_loss(*half, batch), dpo_loss(*(logits.float() for logits in half), batch)
    assert found.loss.dtype == torch.float32
    assert torch.equal(found.loss, wanted.loss)


@pytest.mark.parametrize("layout", get_args(Layout))
def test_batches_of_pairs_have_no_labels(pairs: str, layout: Layout) -> None:
    """A model's own loss would train on the rejected answers; without labels it has none."""
    ds = as_torch(pairs, layout, preferences=True)
    model = tiny_llama(Shard(pairs).header.vocab_size)
    for batch in DataLoader(ds, batch_size=2, collate_fn=ds.collate):
        assert "labels" not in batch
        assert model(**model_inputs(batch)).loss is None


def test_a_blend_of_pairs_keeps_pairs_of_one_number_apart(pairs: str, models: tuple[Any, Any]) -> None:
    """Two members use the same pair numbers."""
    ds = as_torch([0.5, pairs, 0.5, pairs], preferences=True)
    batch = ds.collate([ds[i] for i in range(len(ds))])
    with torch.no_grad():
        policy, reference = (model(**model_inputs(batch)).logits for model in models)
    found = dpo_loss(policy, reference, batch, beta=BETA)
    assert len(found.pairs.losses) == 2 * PAIRS
    assert found.loss.item() == pytest.approx(loss_of_trl(models, Shard(pairs)[:])[0].item(), rel=1e-9)


@pytest.mark.parametrize("wrong", ["torn", "no pair", "no weights", "logits"])
def test_a_batch_that_is_none_of_pairs(pairs: str, wrong: str) -> None:
    ds = as_torch(pairs, "padded", preferences=True)
    batch = ds.collate([ds[0]])
    logits = torch.zeros(*batch["input_ids"].shape, Shard(pairs).header.vocab_size)
    if wrong == "torn":
        batch["pair"] = batch["pair"].flip(0)
    elif wrong == "logits":
        logits = logits[:, 1:]
    else:
        del batch["pair" if wrong == "no pair" else "loss_weights"]
    reason = {"torn": "not next to its partner", "no pair": "preferences=True", "no weights": "loss_weights=True"}
    with pytest.raises(ValueError, match=reason.get(wrong, r"logits: shape \[.*\], expected \[")):
        dpo_loss(logits, logits, batch)


def test_sources_that_bring_pairs(pairs: str) -> None:
    opened = [
        pairs,
        [pairs],
        open_dataset(pairs, columns=["pair"]),
        Shard(pairs, columns=["pair"]),
        SFTIndexedDataset(pairs, columns=["pair"]),
    ]
    found = [as_torch(source, preferences=True)[0] for source in opened]
    assert all(torch.equal(each["pair"], found[0]["pair"]) for each in found)
    for source in (open_dataset(pairs), Shard(pairs)):
        with pytest.raises(FormatError, match=r"open the dataset with columns=\['pair'\]"):
            as_torch(source, preferences=True)


def test_pairs_are_no_chats_in_a_wrapper(pairs: str) -> None:
    opened = open_dataset(pairs, columns=["pair"])
    for source in (Subset(opened, [0]), Subset(Subset(Shard(pairs), [0]), [0]), ConcatDataset([Shard(pairs)] * 2)):
        with pytest.raises(FormatError, match="holds preference pairs"):
            as_torch(source)
    assert len(as_torch(Subset(opened, [0]), preferences=True)) == 1
    for made in (as_torch(pairs, preferences=True), as_torch([1, pairs], preferences=True).packs):
        with pytest.raises(FormatError, match="already a result of as_torch; pass its original source"):
            as_torch(made)


def test_kto_labels_and_chats_are_no_pairs(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "kto", columns={"label": ColumnSpec("sequence", "u1")}) as writer:
        writer.add_pack([1, 2], [1, 0], [0], columns={"label": [1]})
    with ShardWriter(tmp_path / "chats") as writer:
        writer.add_pack([1, 2], [1, 0], [0])
    with pytest.raises(SFTIndexError, match="has no column pair"):
        as_torch(tmp_path / "chats", preferences=True)
    with pytest.raises(FormatError, match=r"holds KTO labels .*; use BatchAssembler with columns=\['label'\]"):
        as_torch(Shard(tmp_path / "kto"), preferences=True)
