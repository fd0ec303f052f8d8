"""A sample of a matrix has every value of each parameter, and is the same in every run."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
from hypothesis import settings
from sampling import sample, with_fewer_examples

MATRIX = [
    SimpleNamespace(nodeid=f"t[{a}-{b}]", callspec=SimpleNamespace(params={"a": a, "b": b}))
    for a, b in itertools.product(range(7), "abc")
]


def names(count: int, seed: int = 0) -> list[str]:
    return [item.nodeid for item in sample(random.Random(seed).sample(MATRIX, len(MATRIX)), count)]


def test_every_value_of_each_parameter_is_in_it() -> None:
    few = [item.callspec.params for item in sample(MATRIX, 7)]
    assert {params["a"] for params in few} == {*range(7)}
    assert {params["b"] for params in few} == {*"abc"}


def test_it_is_the_same_in_whatever_order_the_tests_are_collected() -> None:
    assert names(9, seed=1) == names(9, seed=2)
    assert names(9) == names(20)[:9]
    assert len(set(names(20))) == 20


def test_a_small_matrix_is_run_whole() -> None:
    assert sorted(names(99)) == sorted(item.nodeid for item in MATRIX)
    assert list(sample([SimpleNamespace(nodeid="t")], 5)) == [SimpleNamespace(nodeid="t")]


@pytest.mark.parametrize(("whole", "fewer"), [(400, 40), (60, 6), (20, 5), (4, 4)])
def test_property_tests_get_fewer_examples(whole: int, fewer: int) -> None:
    assert with_fewer_examples(settings(max_examples=whole)).max_examples == fewer
