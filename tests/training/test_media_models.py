"""Models that take images or audio: packed chats give the same loss and gradients as single chats.

Models with processors that need torchvision are tested in ``tests/media_models``.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from tiny_media_models import (
    FAMILIES,
    Case,
    alone,
    as_trained,
    boundaries_ignored,
    chats,
    shard_of,
    use_flash_attention,
    wrongly_trained,
)

from megatron_sft_idx import as_torch
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.training.media import MediaInputs, keep_items

TOLERANCE = 1e-5
NAMES = ["llava", "llava-next", "idefics3", "smolvlm", "qwen2-audio"]


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.of(request.param, tmp_path_factory.mktemp("case"))


def test_packed_chats_train_like_each_alone(case: Case) -> None:
    found = as_trained(case)
    print(type(case.model).__name__, *(f"{name}: {value:.1e}" for name, value in found.items()), sep=", ")
    assert max(found.values()) < TOLERANCE


def test_what_is_trained_wrongly_is_seen(case: Case) -> None:
    found = wrongly_trained(case)
    print(type(case.model).__name__, *(f"{name}: {value:.1e}" for name, value in found.items()), sep=", ")
    assert min(found.values()) > 1000 * TOLERANCE


def test_flash_attention_finds_the_sequences_by_their_positions(case: Case, tmp_path: Path) -> None:
    model = copy.deepcopy(case.model)
    use_flash_attention(model)
    with_flash = replace(case, model=model)
    assert with_flash.difference(with_flash.batches("flattened")) < TOLERANCE
    ignored = [boundaries_ignored(model, batch) for batch in with_flash.batches("flattened")]
    assert with_flash.difference(ignored) > 1000 * TOLERANCE


def test_the_layout_flash_is_refused(tmp_path: Path) -> None:
    """LLaVA's image encoder would use the boundaries of the texts."""
    case = Case.of("llava", tmp_path)
    with pytest.raises(FormatError, match="layout 'flash' cannot be combined with media"):
        as_torch(case.shard, "flash", media=case.inputs())
    use_flash_attention(case.model)
    flash = as_torch(case.shard, "flash", ignore_media=True)
    batches = []
    for pack, batch in enumerate(case.batches("flattened", batch_size=1)):
        texts = flash.collate([flash[pack]])
        assert all(torch.equal(texts[name], batch[name]) for name in ("input_ids", "labels", "position_ids"))
        batches.append({**texts, "pixel_values": batch["pixel_values"]})
    assert case.difference(batches) > 1000 * TOLERANCE


def test_a_model_whose_attention_is_not_causal_in_images_is_refused(tmp_path: Path) -> None:
    """In packed rows, Gemma 3 in transformers attends to other positions than in single rows."""
    family = FAMILIES["gemma3"]
    processor = family.processor(tmp_path / "processor")
    model = family.model(processor)
    with pytest.raises(FormatError, match="Gemma3Model: its attention is not causal inside images"):
        MediaInputs(processor, model.config)
    for name in ("Gemma4Config", "Molmo2Config", "PaliGemmaConfig"):
        with pytest.raises(FormatError, match="its attention is not causal inside images"):
            MediaInputs(processor, getattr(transformers, name)())
    rows = chats(family.kind)
    shard = shard_of(rows, tmp_path, tmp_path / "processor", family.seq_length)
    case = Case(family.kind, tmp_path, processor, model, rows, shard, alone(model, processor, rows, shard))

    def batches(layout: Any) -> Iterator[dict[str, Any]]:
        packs = as_torch(shard, layout, media=keep_items)
        for number in range(len(shard)):
            batch = packs.collate([packs[number]])
            images = [Image.open(io.BytesIO(item.data)) for item in batch.pop("media")]
            types = torch.tensor(processor.create_mm_token_type_ids(batch["input_ids"].tolist()))
            batch["token_type_ids"] = types
            if images:
                text = processor.image_token * len(images)
                made = processor(text=[text], images=[images], return_tensors="pt")
                batch["pixel_values"] = made["pixel_values"]
            yield batch

    assert case.difference(batches("padded")) < TOLERANCE
    assert case.difference(batches("flattened")) > 100 * TOLERANCE


def test_batches_without_images_are_of_text(case: Case, tmp_path: Path) -> None:
    texts = case.of_text(tmp_path)
    (batch,) = texts.batches("flattened")
    assert set(batch) == {"input_ids", "labels", "position_ids", "use_cache"}
    assert texts.difference([batch]) < TOLERANCE


def test_the_trainer_has_the_loss_of_all_chats(tmp_path: Path) -> None:
    """Images are decoded in the Trainer's workers, and gradients are accumulated pack by pack."""
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it: pip install accelerate")
    case = Case.of("llava", tmp_path)
    ds = as_torch(case.shard, media=case.inputs())
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(ds),
        dataloader_num_workers=2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(case.model, arguments, train_dataset=ds, data_collator=ds.collate)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(case.wanted.loss, rel=1e-4)
