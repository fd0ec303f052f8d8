"""Megatron-LM's own ``pretrain()`` with our provider: losses are equal in all set-ups, and differ after errors.

GPTModel is trained in every set-up, HybridModel in some. Slow tests add the rest, which the table of
``megatron_setups`` shows too.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from importlib.util import find_spec
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_setups import (
    EVALUATED,
    KILLED,
    REFUSED,
    SAVED,
    SETUPS,
    STEPS,
    WRONG,
    difference,
    of_hybrid,
    prepare,
    run_all,
    script_losses,
    table,
)

LOSS, NORM, ANOTHER = 1e-6, 1e-4, 1e-4
OTHERS = (*WRONG, *REFUSED, "scheduler, no room given", "blend, killed", "pretraining, killed")
HYBRID = {name for name, setup in SETUPS.items() if setup.model == "Hybrid"}
RIGHT = [name for name in SETUPS if name not in {*OTHERS, *map(of_hybrid, OTHERS)}]
# Set-ups of HybridModel that other tests here need, and set-ups with two processes.
SAMPLE = {of_hybrid(name) for name in ("one process", *WRONG)} | {"Hybrid, from a checkpoint of GPT"}
TWO = sorted(name for name in HYBRID.intersection(RIGHT) if SETUPS[name].ranks == 2)
SAMPLE |= set(random.Random(43).sample(TWO, min(len(TWO), 2)))


def marked(names: Iterable[str]) -> list[Any]:
    """Return names of set-ups as parameters, marked slow if they are not in the sample."""
    slow = HYBRID - SAMPLE
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in names]


def both(names: Iterable[str]) -> list[Any]:
    """Return set-ups of GPTModel and HybridModel as parameters, as far as this Megatron has them."""
    return marked(name for each in names for name in (each, of_hybrid(each)) if name in SETUPS)


def folder_of(name: str, option: str) -> str | None:
    """Return the folder of checkpoints that an option of a set-up gives."""
    setup = SETUPS[name]
    if option not in setup.options:
        return None
    return setup.options[setup.options.index(option) + 1].replace("{model}", setup.model)


def needed(names: Iterable[str]) -> list[str]:
    """Return these set-ups, with the set-ups that they are compared with or load checkpoints of, in order."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        found.add(name)
        setup = SETUPS[name]
        waiting += [setup.like] if setup.like else []
        if "--load" in setup.options:
            waiting += [each for each in SETUPS if folder_of(each, "--save") == folder_of(name, "--load")]
    return [name for name in SETUPS if name in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("megatron.training") is None:
        pytest.skip("no megatron.training: it is in the wheel of megatron-core from 0.19 on, for Python 3.12 on")
    folder = tmp_path_factory.mktemp("pretrain")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the results of the set-ups that the selected tests need."""
    selected = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in selected if hasattr(item, "callspec")]
    names = {each["name"] for each in parameters if "name" in each}
    found: dict[str, Any] = run_all(folder, needed({*names, "one process", "blend, resumed"}))
    return found


@pytest.fixture(scope="module")
def script(folder: Path, found: dict[str, Any]) -> dict[str, list[float]]:
    losses: dict[str, list[float]] = script_losses(folder, found)
    print(*table(found, losses), sep="\n")
    return losses


@pytest.mark.parametrize("name", marked(RIGHT))
def test_losses_and_gradients_are_the_same(name: str, found: dict[str, Any], script: dict[str, list[float]]) -> None:
    left, like = found[name], SETUPS[name].like
    assert left["error"] is None
    steps = STEPS - SAVED if "--load" in SETUPS[name].options else STEPS
    assert len(left["losses"]) == len(set(left["losses"])) == steps
    assert len(left["norms"]) == steps
    assert len(set(left["norms"])) > 1
    evaluated = set(EVALUATED) <= set(SETUPS[name].options)
    assert len(left["validation"]) >= steps // int(EVALUATED[-1]) if evaluated else not left["validation"]
    assert all(np.isfinite(left[what]).all() for what in ("losses", "norms", "validation"))
    if like is None:
        assert difference(left["losses"], script[name]) < LOSS
    else:
        assert difference(left["losses"], found[like]["losses"]) < LOSS
        assert difference(left["norms"], found[like]["norms"]) < NORM
        assert difference(left["validation"], found[like]["validation"]) < LOSS


def test_a_difference_is_of_the_last_values_and_nan_where_one_of_them_is() -> None:
    assert difference([2.0, 5.0], [9.0, 2.0, 4.0]) == 0.25
    assert difference([], []) == 0.0
    for found in ([1.0, nan], [nan, 1.0]):
        assert isnan(difference(found, [1.0, 1.0]))
        assert isnan(difference([1.0, 1.0], found))


@pytest.mark.parametrize(("found", "said"), [([], "no values, 2 are"), ([1.0] * 3, "3 values, at most 2 are")])
def test_values_that_are_missing_or_too_many_are_no_difference_of_zero(found: list[float], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        difference(found, [1.0, 1.0])


@pytest.mark.parametrize("name", marked(name for name, setup in SETUPS.items() if "alone" in setup.more))
def test_each_trained_segment_alone_has_the_same_loss(name: str, found: dict[str, Any]) -> None:
    worst, segments = found[name]["alone"]
    assert segments > 300
    assert worst < LOSS


@pytest.mark.parametrize("name", both(WRONG))
def test_a_mistake_shows(name: str, found: dict[str, Any]) -> None:
    assert found[name]["error"] is None
    assert difference(found[name]["losses"], found[SETUPS[name].like or ""]["losses"]) > ANOTHER


@pytest.mark.skipif(not HYBRID, reason="no HybridModel: megatron-core has it from 0.18 on")
def test_both_models_begin_and_train_alike(found: dict[str, Any]) -> None:
    assert difference(found[of_hybrid("one process")]["losses"], found["one process"]["losses"]) < LOSS


def test_a_killed_run_left_its_checkpoint(folder: Path, found: dict[str, Any]) -> None:
    assert KILLED > SAVED
    assert not (folder / "blend, killed.0.json").exists()
    assert (folder / "killed GPT/latest_checkpointed_iteration.txt").read_text() == str(SAVED)
    assert found["blend, resumed"]["losses"][0] == found["blend, split, evaluation"]["losses"][SAVED]


@pytest.mark.parametrize("name", both(REFUSED))
def test_what_would_hang_is_refused_on_every_rank(name: str, found: dict[str, Any]) -> None:
    assert f"{REFUSED[name.removeprefix(of_hybrid(''))]} is missing" in found[name]["error"]
    assert not found[name]["losses"]
