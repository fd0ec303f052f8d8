"""DPO loss and gradient of pairs in packs equal those computed pair by pair."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from blends import build, config_of
from columned import unchecked
from gpt_model import model_inputs, seed_everything
from megatron.core.models.gpt import GPTModel
from training_twin import Pair, batch_of, lone_process, random_sequences

from megatron_sft_idx.errors import CorruptShardError, FormatError, SequenceError
from megatron_sft_idx.layout.column import PAIR, ColumnSpec
from megatron_sft_idx.packing import PackPlan, pack_sequences
from megatron_sft_idx.shard import Shard, ShardWriter, write_column
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler, Tensors
from megatron_sft_idx.training.losses import PairLosses, dpo_losses, sequence_logp
from megatron_sft_idx.training.sources import PlannedPacks, PlanOptions, StoredPacks

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
    """Return chosen and rejected sequences in turn. Both begin with the prompt, and answers are trained."""
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
    """Compute pair by pair: log-probabilities of the reference model [2 x pairs], losses [pairs], and the gradient."""
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


def packed(folder: Path, sequences: list[Pair], groups: np.ndarray, multiple: int = 1) -> PackPlan:
    """Write all packs with the column ``pair``, and return the plan."""
    lengths = [len(ids) for ids, _ in sequences]
    plan = pack_sequences(lengths, LENGTH, groups=groups, sequence_multiple=multiple, seed=1)
    options = {"capacity": LENGTH, "sequence_multiple": multiple, "durable": False, "columns": {"pair": PAIR}}
    # This includes torn pairs; the writer's own check is tested with columns.
    with unchecked(), ShardWriter(folder / "x", **options) as writer:
        for first, last in pairwise(plan.offsets):
            row = plan.sequences[first:last]
            ids, masks = (np.concatenate(parts) for parts in zip(*(sequences[s] for s in row), strict=True))
            pair = np.stack([row // 2, row % 2], 1)
            writer.add_pack(ids, masks, np.cumsum([0, *(lengths[s] for s in row[:-1])]), columns={"pair": pair})
        writer.finalize()
    return plan


def batch_from(folder: Path, columns: tuple[str, ...], multiple: int = 1) -> Tensors:
    """Return all packs of a shard as one batch."""
    source = StoredPacks(ShardSet.open(folder / "x", columns=columns))
    assembler = BatchAssembler(source, LENGTH, sequence_multiple=multiple, columns=columns)
    return assembler.assemble(range(source.num_packs))


def attach_reference(script: ModuleType, folder: Path, multiple: int) -> torch.Tensor:
    """Attach the column ``ref_logp``: the log-probability of each sequence under the reference model, in order."""
    batch, reference = batch_from(folder, (), multiple), model_of(script, 1)
    with torch.no_grad():
        logp = sequence_logp(logp_of(reference, batch), batch)
    counts = np.diff(Shard(folder / "x").sequence_offsets)
    column = torch.cat([row[:count] for row, count in zip(logp, counts, strict=True)])
    write_column(folder / "x", "ref_logp", column.numpy(), per="sequence")
    return column


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
    plan = packed(tmp_path, sequences, np.arange(len(sequences)) // 2, multiple)
    assert plan.num_packs < PAIRS / 2
    column = attach_reference(script, tmp_path, multiple)
    found, packed_gradient = losses_of(script, batch_from(tmp_path, ("pair", "ref_logp"), multiple))
    pairs = torch.from_numpy(plan.sequences[::2] // 2)
    apart = [difference(column, refs[plan.sequences]), difference(found.losses, losses[pairs])]
    apart.append(difference(packed_gradient, gradient))
    print(f"multiple {multiple}: reference {apart[0]:.1e}, losses {apart[1]:.1e}, gradient {apart[2]:.1e}")
    assert max(apart) < TOLERANCE
    rewarded = torch.sigmoid(found.chosen_rewards - found.rejected_rewards)
    assert difference(-torch.log(rewarded), losses[pairs]) < TOLERANCE


def test_rows_that_only_fill_up_a_batch_hold_no_pairs(
    script: ModuleType, sequences: list[Pair], tmp_path: Path
) -> None:
    packed(tmp_path, sequences, np.arange(len(sequences)) // 2)
    attach_reference(script, tmp_path, 1)
    source = StoredPacks(ShardSet.open(tmp_path / "x", columns=("pair", "ref_logp")))
    assembler = BatchAssembler(source, LENGTH, columns=("pair", "ref_logp"))
    found = []
    for packs, masked in (([0, 1], None), ([0, 1, 0], np.array([False, False, True]))):
        batch = assembler.assemble(packs, masked=masked)
        found.append(dpo_losses(torch.zeros(batch["loss_mask"].shape), batch))
    assert all(torch.equal(*values) for values in zip(*found, strict=True))


def test_pairs_count_however_many_tokens_they_train_and_whatever_the_mask_is() -> None:
    pair, reference = torch.tensor([[[0, 0], [0, 1]]]), torch.zeros(1, 2)
    bounds = torch.tensor([[0, 300, 600]], dtype=torch.int32)
    mask = (torch.arange(600) % 300 < 256)[None]
    batch = {"cu_seqlens": bounds, "pair": pair, "ref_logp": reference}
    logp = -torch.ones(1, 600).masked_fill(~mask, torch.inf)  # untrained tokens may have probability 0
    narrow, wide = (dpo_losses(logp, {**batch, "loss_mask": mask.to(dtype)}) for dtype in (torch.uint8, torch.float))
    assert wide.losses.isfinite().all()
    assert len(wide.losses) == 1
    assert all(torch.equal(*values) for values in zip(narrow, wide, strict=True))


def test_torn_pairs_are_told(script: ModuleType, sequences: list[Pair], tmp_path: Path) -> None:
    plan = packed(tmp_path, sequences, np.arange(len(sequences)))
    assert (plan.sequences[1::2] != plan.sequences[::2] + 1).any()
    batch = batch_from(tmp_path, ("pair",))
    batch["ref_logp"] = torch.zeros(batch["pair"].shape[:2])
    with pytest.raises(ValueError, match=r"row \d+: sequence \d+ \(pair \d+\) is not next to its partner"):
        losses_of(script, batch)


@pytest.mark.parametrize("wrong", ["partners", "reference", "boundaries"])
def test_the_check_finds_what_is_wrong(
    script: ModuleType, sequences: list[Pair], alone: Alone, wrong: str, tmp_path: Path
) -> None:
    """Tests torn pairs with a false column, a reference in another order, and missing boundaries."""
    refs, _, gradient = alone
    tear = wrong == "partners"
    plan = packed(tmp_path, sequences, np.arange(len(sequences)) // (1 if tear else 2))
    column = refs[plan.sequences[::-1].copy() if wrong == "reference" else plan.sequences]
    write_column(tmp_path / "x", "ref_logp", column.numpy(), per="sequence")
    batch = batch_from(tmp_path, ("pair", "ref_logp"))
    if tear:  # neighbours, even if they are no pair
        for row, count in enumerate(np.diff(plan.offsets) // 2 * 2):
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


@pytest.mark.parametrize("ends", [(0, None), (3, 21)])
def test_packing_at_start_up_keeps_pairs_together(
    sequences: list[Pair], tmp_path: Path, ends: tuple[int, int | None]
) -> None:
    packed(tmp_path, sequences, np.arange(len(sequences)) // 2)
    shards = ShardSet.open(tmp_path / "x", columns=("pair",))
    source = PlannedPacks(shards, PlanOptions(2 * LENGTH), cache=tmp_path / "cache", first=ends[0], last=ends[1])
    batch = BatchAssembler(source, 2 * LENGTH, columns=("pair",)).assemble(range(source.num_packs))
    found = []
    for row, count in zip(batch["pair"].tolist(), np.diff(source.plan.offsets).tolist(), strict=True):
        assert [pair[1] for pair in row[:count]] == [0, 1] * (count // 2)
        assert [pair[0] for pair in row[:count:2]] == [pair[0] for pair in row[1:count:2]]
        found += [pair[0] for pair in row[:count:2]]
    stored = Shard(tmp_path / "x").columns["pair"].values[:, 0][ends[0] // 2 * 2 : ends[1] and ends[1] // 2 * 2 : 2]
    assert sorted(found) == sorted(stored.tolist())
    with pytest.raises(SequenceError, match=r"\d+ of 14 pairs are longer than 24 tokens"):
        PlannedPacks(shards, PlanOptions(24))
    torn = paired_wrong(tmp_path)
    with pytest.raises(CorruptShardError, match="C10"):
        PlannedPacks(ShardSet.open(torn, columns=("pair",)), PlanOptions(LENGTH))


def paired_wrong(folder: Path) -> Path:
    """Write a shard in which all sequences are chosen ones."""
    with unchecked(), ShardWriter(folder / "y", columns={"pair": PAIR}, durable=False) as writer:
        writer.add_pack(np.arange(6), np.zeros(6), [0, 3], columns={"pair": [[0, 0], [0, 0]]})
        writer.finalize()
    return folder / "y"


def test_pairs_that_fit_no_pack_once_padded_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    """The configuration, which every rank creates, checks it. One rank makes the plan while the others wait."""
    with ShardWriter(tmp_path / "x", capacity=16, columns={"pair": PAIR}, durable=False) as writer:
        writer.add_pack(np.arange(8), np.zeros(8), [0, 3], columns={"pair": [[0, 0], [0, 1]]})
    options = {"sequence_length": 8, "index_only_packing": True, "columns": ("pair",)}
    assert config_of(str(tmp_path / "x"), **options).sequence_multiple == 1
    with pytest.raises(SequenceError, match=r"1 of 1 pairs are longer than 8 tokens \(the longest has 12\)"):
        config_of(str(tmp_path / "x"), sequence_multiple=4, **options)


def test_judged_answers_are_not_trained_on_as_if_they_were_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    with ShardWriter(tmp_path / "x", capacity=LENGTH, columns={"pair": PAIR}, durable=False) as writer:
        for number in range(20):
            (ids, mask), (more, masked) = random_sequences(rng, [20, 30], VOCABULARY)
            writer.add_pack(
                np.concatenate([ids, more]), np.concatenate([mask, masked]), [0, 20],
                columns={"pair": [[number, 0], [number, 1]]},
            )  # fmt: skip
        writer.finalize()
    train, *_ = build(config_of(str(tmp_path / "x"), sequence_length=LENGTH, columns=("pair",)))
    assert {"pair", "cu_seqlens"} <= train[0].keys()
    with pytest.raises(FormatError, match=r"holds preference pairs .column 'pair'.*; request .*columns="):
        build(config_of(str(tmp_path / "x"), sequence_length=LENGTH))


def test_a_column_of_ones_own_that_is_called_label_may_be_left_out(tmp_path: Path) -> None:
    spec = ColumnSpec("token", np.float32)
    with ShardWriter(tmp_path / "x", capacity=LENGTH, columns={"label": spec}, durable=False) as writer:
        writer.add_pack([1, 2, 3], [1, 1, 0], [0], columns={"label": [0.5, 1, 2]})
    for columns in ((), ("label",)):
        train, *_ = build(config_of(str(tmp_path / "x"), sequence_length=LENGTH, columns=columns))
        assert ("label" in train[0]) == bool(columns)
