"""Models with processors that need torchvision: packed chats give the same loss and gradients as single chats."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchvision", reason="torchvision is not installed; make test-media has an environment with it")

import numpy as np
import torch
from media_processors import png, qwen2_5_omni, wav
from tiny_media_models import Case, as_trained, wrongly_trained
from transformers import Qwen2_5OmniThinkerConfig

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.training.media import BatchItem, MediaBatch, MediaInputs

TOLERANCE = 1e-5
# The last three also work without torchvision, by other code of transformers.
NAMES = ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen2-audio", "llava", "idefics3"]


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


def test_batches_without_images_are_of_text(case: Case, tmp_path: Path) -> None:
    texts = case.of_text(tmp_path)
    (batch,) = texts.batches("flattened")
    assert set(batch) == {"input_ids", "labels", "position_ids", "use_cache"}
    dimensions = 4 if hasattr(case.model.model, "get_rope_index") else 1
    assert batch["position_ids"].numel() == dimensions * batch["input_ids"].numel()
    assert texts.difference([batch]) < TOLERANCE


def test_positions_that_depend_on_more_than_is_known_are_an_error(tmp_path: Path) -> None:
    """Qwen2.5-Omni computes positions of recordings from their frames."""
    processor = qwen2_5_omni(tmp_path)
    number_of = processor.tokenizer.convert_tokens_to_ids
    names = {"image_token_index": "<|IMAGE|>", "audio_token_index": "<|AUDIO|>"}
    names |= {"vision_start_token_id": "<|vision_bos|>", "audio_start_token_id": "<|audio_bos|>"}
    config = Qwen2_5OmniThinkerConfig(**{name: number_of(token) for name, token in names.items()})
    tokens = [
        "<|vision_bos|>",
        *4 * ["<|IMAGE|>"],
        "<|vision_eos|>",
        "<|audio_bos|>",
        *12 * ["<|AUDIO|>"],
        "<|audio_eos|>",
    ]
    ids = torch.tensor([[number_of(token) for token in tokens]])
    items = [BatchItem("image", 1, 4, png(56, 56), 0, 0), BatchItem("audio", 7, 12, wav(8_000), 0, 0)]
    lengths = np.array([len(tokens)])
    batch = MediaBatch(ids, torch.arange(len(tokens))[None], np.zeros(1, int), np.zeros(1, int), lengths, items)
    with pytest.raises(FormatError, match="get_rope_index of the model fails with input_ids, image_grid_thw"):
        MediaInputs(processor, config)(batch)
