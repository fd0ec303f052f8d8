"""Models whose processors need torchvision: packed chats give the loss and the gradients that each chat gives alone."""

from __future__ import annotations

import pytest

pytest.importorskip("torchvision", reason="torchvision is not installed; make test-media has an environment with it")

from tiny_media_models import Case, as_trained, wrongly_trained

TOLERANCE = 1e-5
# The last three also without torchvision, by other code of transformers.
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
