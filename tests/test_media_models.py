"""Models that take images or audio: packed chats give the loss and the gradients that each chat gives alone.

``tests/media_models`` has the models whose processors need torchvision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_media_models import FAMILIES, Case, as_trained, use_flash_attention, wrongly_trained

from megatron_sft_idx import as_torch
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.training.media import MediaInputs

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
