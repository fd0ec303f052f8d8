"""The DPO loss of pairs in packs is that of pairs one by one, and so is its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from training_twin import Pair, batch_of, lone_process, random_sequences

from megatron_sft_idx.packing import pack_sequences
from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.attention import model_inputs
from megatron_sft_idx.training.batch import BatchAssembler, Tensors
from megatron_sft_idx.training.cpu import seed_everything
from megatron_sft_idx.training.dpo import PairLosses, dpo_losses, sequence_logp
from megatron_sft_idx.training.sources import StoredPacks

VOCABULARY, LENGTH, PAIRS, BETA = 256, 96, 14, 0.1
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with lone_process() as module:
        yield module


def model_of(script: ModuleType, seed: int) -> GPTModel:
    seed_everything(seed)
    options = ["--data-path", "-", "--seq-length", LENGTH, "--vocab-size", VOCABULARY, "--attention", "thd"]
    args = script.parse_arguments([str(option) for option in [*options, "--init-method-std", 0.1]])
    return script.build_model(args).module


def logp_of(model: GPTModel, batch: Tensors) -> torch.Tensor:
    return -model(**model_inputs(batch, "thd")[0])


def gradients(model: GPTModel) -> torch.Tensor:
    return torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()])


@pytest.fixture(scope="module")
def sequences() -> list[Pair]:
    """Chosen and rejected, chosen and rejected: a prompt that both begin with, and answers that are trained on."""
    rng = np.random.default_rng(3)
    made = []
    for prompt, *answers in rng.integers(2, 15, (PAIRS, 3)).tolist():
        asked = random_sequences(rng, [prompt], VOCABULARY)[0][0]
        for answer in answers:
            ids = np.concatenate([asked, random_sequences(rng, [answer], VOCABULARY)[0][0]])
            trained = np.arange(len(ids)) >= prompt - 1
            trained[-1] = False
            made.append((ids, trained.astype(np.float32)))
    return made


Alone = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def alone(script: ModuleType, sequences: list[Pair]) -> Alone:
    """Pair by pair: log-probabilities of the reference model [2 x pairs], losses [pairs], and the gradient."""
    reference, model = model_of(script, 1), model_of(script, 2)
    refs, losses = [], []
    for at in range(0, len(sequences), 2):
        batches = [batch_of([[one]], len(one[0]), 2) for one in sequences[at : at + 2]]
        with torch.no_grad():
            refs += [(logp_of(reference, batch)[0] * batch["loss_mask"][0]).sum() for batch in batches]
        chosen, rejected = ((logp_of(model, batch)[0] * batch["loss_mask"][0]).sum() for batch in batches)
        loss = -torch.log(torch.sigmoid(BETA * ((chosen - refs[-2]) - (rejected - refs[-1]))))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(refs), torch.stack(losses), gradients(model)


def packed(
    folder: Path, sequences: list[Pair], groups: np.ndarray, multiple: int = 1
) -> tuple[Tensors, list[int], np.ndarray]:
    """All packs as one batch, with the column ``pair``; which sequence stands where, and where each pack begins."""
    lengths = [len(ids) for ids, _ in sequences]
    plan = pack_sequences(lengths, LENGTH, groups=groups, sequence_multiple=multiple, seed=1)
    with ShardWriter(folder / "x", capacity=LENGTH, sequence_multiple=multiple, durable=False) as writer:
        for first, last in pairwise(plan.offsets):
            row = plan.sequences[first:last]
            ids, masks = (np.concatenate(parts) for parts in zip(*(sequences[s] for s in row), strict=True))
            writer.add_pack(ids, masks, np.cumsum([0, *(lengths[s] for s in row[:-1])]))
        writer.finalize()
    batch = BatchAssembler(StoredPacks(ShardSet.open(folder / "x")), LENGTH, sequence_multiple=multiple).assemble(
        range(plan.num_packs)
    )
    column = np.stack([plan.sequences // 2, plan.sequences % 2], 1)
    batch["pair"] = by_row(torch.from_numpy(column), plan.offsets)
    return batch, plan.sequences.tolist(), plan.offsets


def by_row(values: torch.Tensor, offsets: np.ndarray) -> torch.Tensor:
    """A sequence column as a batch holds it: a row a pack, zeros behind its last sequence."""
    rows = [values[first:last] for first, last in pairwise(offsets)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def reference_column(script: ModuleType, batch: Tensors, offsets: np.ndarray) -> torch.Tensor:
    """The column ``ref_logp`` of a shard: what the reference model says of each sequence, in their order."""
    reference = model_of(script, 1)
    with torch.no_grad():
        logp = sequence_logp(logp_of(reference, batch), batch)
    return torch.cat([row[:count] for row, count in zip(logp, np.diff(offsets), strict=True)])


def losses_of(script: ModuleType, batch: Tensors) -> tuple[PairLosses, torch.Tensor]:
    model = model_of(script, 2)
    found = dpo_losses(logp_of(model, batch), batch, beta=BETA)
    found.losses.sum().backward()
    return found, gradients(model)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("multiple", [1, 4])
def test_pairs_in_packs_are_pairs_one_by_one(
    script: ModuleType, sequences: list[Pair], alone: Alone, multiple: int, tmp_path: Path
) -> None:
    refs, losses, gradient = alone
    batch, order, offsets = packed(tmp_path, sequences, np.arange(len(sequences)) // 2, multiple)
    assert len(offsets) - 1 < PAIRS / 2
    column = reference_column(script, batch, offsets)
    batch["ref_logp"] = by_row(column, offsets)
    found, packed_gradient = losses_of(script, batch)
    pairs = torch.tensor(order[::2]) // 2
    apart = [difference(column, refs[order]), difference(found.losses, losses[pairs])]
    apart.append(difference(packed_gradient, gradient))
    print(f"multiple {multiple}: reference {apart[0]:.1e}, losses {apart[1]:.1e}, gradient {apart[2]:.1e}")
    assert max(apart) < TOLERANCE
    rewarded = torch.sigmoid(found.chosen_rewards - found.rejected_rewards)
    assert difference(-torch.log(rewarded), losses[pairs]) < TOLERANCE


def test_torn_pairs_are_told(script: ModuleType, sequences: list[Pair], tmp_path: Path) -> None:
    batch, order, _ = packed(tmp_path, sequences, np.arange(len(sequences)))
    assert any(order[at + 1] != order[at] + 1 for at in range(0, len(order) - 1, 2))
    batch["ref_logp"] = torch.zeros(batch["pair"].shape[:2])
    with pytest.raises(
        ValueError, match=r"row \d+: sequence \d+ \(pair \d+\) is not beside its partner; pack by pairs"
    ):
        losses_of(script, batch)


@pytest.mark.parametrize("wrong", ["partners", "reference", "boundaries"])
def test_the_check_finds_what_is_wrong(
    script: ModuleType, sequences: list[Pair], alone: Alone, wrong: str, tmp_path: Path
) -> None:
    """Torn pairs whose column was made up to look whole, a reference in another order, forgotten boundaries."""
    refs, _, gradient = alone
    tear = wrong == "partners"
    batch, order, offsets = packed(tmp_path, sequences, np.arange(len(sequences)) // (1 if tear else 2))
    batch["ref_logp"] = by_row(refs[order[::-1] if wrong == "reference" else order], offsets)
    if tear:  # neighbours, whosever they are
        for row, count in enumerate(np.diff(offsets) // 2 * 2):
            batch["pair"][row, :count] = torch.stack([torch.arange(count) // 2, torch.arange(count) % 2], 1)
            batch["loss_mask"][row, int(batch["cu_seqlens"][row, count]) :] = 0
    if wrong == "boundaries":
        batch["max_seqlen"][:], batch["position_ids"][:] = LENGTH, torch.arange(LENGTH)
        attended = {**batch, "cu_seqlens": torch.tensor([[0, LENGTH]] * len(batch["tokens"]), dtype=torch.int32)}
        model = model_of(script, 2)
        dpo_losses(logp_of(model, attended), batch, beta=BETA).losses.sum().backward()
        packed_gradient = gradients(model)
    else:
        packed_gradient = losses_of(script, batch)[1]
    assert difference(packed_gradient, gradient) > 1000 * TOLERANCE
