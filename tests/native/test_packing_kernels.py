"""Packing kernels compared with their plain-Python twins."""

from collections import Counter
from itertools import pairwise

import numpy as np
import packing_twins as twin
import pytest

from megatron_sft_idx import _native

PLANNERS = ["best-fit", "first-fit-decreasing", "exact-fill-average", "exact-fill-fewest"]
NO_CAP = 2**31 - 1


def shapes():
    """Yield lengths, capacity, multiple and cap: few and many classes, tight and loose packs, effective caps."""
    random = np.random.default_rng(20261121)
    uniform = random.integers(1, 513, 700)
    lognormal = np.clip(random.lognormal(4.5, 1.0, 900), 1, 512).astype(np.int64)
    first = random.integers(1, 340, 200)
    second = 1 + (random.random(200) * (511 - first)).astype(np.int64)
    triples = np.concatenate([first, second, np.maximum(1, 512 - first - second)])
    wide = random.integers(1, 9000, 300)
    yield pytest.param(uniform, 512, 1, NO_CAP, id="uniform")
    yield pytest.param(uniform, 512, 1, 2, id="uniform-cap-2")
    yield pytest.param(uniform, 515, 8, NO_CAP, id="uniform-multiple-8")
    yield pytest.param(lognormal, 512, 1, NO_CAP, id="lognormal")
    yield pytest.param(lognormal, 512, 4, 5, id="lognormal-multiple-4-cap-5")
    yield pytest.param(triples, 512, 1, NO_CAP, id="triples")
    yield pytest.param(random.integers(171, 256, 500), 512, 1, NO_CAP, id="two-a-pack")
    yield pytest.param(random.choice([7, 90, 101, 333], 600), 512, 1, NO_CAP, id="four-classes")
    yield pytest.param(np.full(100, 3), 512, 1, 50, id="one-class-at-the-cap")
    yield pytest.param(wide, 100_000, 1, NO_CAP, id="few-classes-beside-the-capacity")
    yield pytest.param(wide, 2**31 - 1, 1, NO_CAP, id="largest-capacity")
    yield pytest.param(np.array([5]), 5, 1, 1, id="one-sequence")
    yield pytest.param(np.ones(40, np.int64), 1, 1, NO_CAP, id="capacity-one")


NAMES = ("lengths", "capacity", "multiple", "most")
CASES = pytest.mark.parametrize(NAMES, list(shapes()))
# Exact fill's twin walks every position of the capacity.
SMALL_CASES = pytest.mark.parametrize(NAMES, [case for case in shapes() if case.values[1] < 2**20])


def classes(lengths, capacity, multiple):
    sizes, counts, _ = _native.packing_histogram(lengths, capacity, multiple)
    return sizes, counts, capacity // multiple


def plan_of(sizes, counts, units, most, *, planner, seed=0):
    offsets, entries, packs = _native.packing_plan(sizes, counts, units, most, planner, seed)
    contents = [
        [(int(sizes[c]), int(times)) for c, times in entries[offsets[p] : offsets[p + 1]]] for p in range(len(packs))
    ]
    return list(zip(packs.tolist(), contents, strict=True))


def as_packs(offsets, sequences):
    return [sequences[a:b].tolist() for a, b in pairwise(offsets)]


@CASES
@pytest.mark.parametrize("planner", ["exact-fill-average", "exact-fill-fewest"])
def test_exact_fill_is_bounded_by_counted_steps(lengths, capacity, multiple, most, planner):
    sizes, counts, units = classes(lengths, capacity, multiple)
    problem = sizes, counts, units, most

    def bounded(steps):
        offsets, entries, packs = _native.packing_plan(*problem, planner, 3, steps)
        times = np.bincount(entries[:, 0], entries[:, 1] * np.repeat(packs, np.diff(offsets)), len(sizes))
        assert times.tolist() == counts.tolist()
        assert np.add.reduceat(sizes[entries[:, 0]] * entries[:, 1], offsets[:-1]).max() <= units
        assert np.add.reduceat(entries[:, 1], offsets[:-1]).max() <= most
        return [array.tolist() for array in (offsets, entries, packs)]

    fallback = [array.tolist() for array in _native.packing_plan(*problem, "best-fit", 0)]
    assert bounded(0) == fallback
    assert bounded(2**62) == [array.tolist() for array in _native.packing_plan(*problem, planner, 3)]
    for steps in (1, 10, 100, 1000, 10_000):  # begins with exact fill, ends with best fit
        assert bounded(steps) == bounded(steps)


@CASES
def test_histogram(lengths, capacity, multiple, most):
    sizes, counts, total = _native.packing_histogram(lengths, capacity, multiple)
    assert (sizes.tolist(), counts.tolist(), total) == twin.histogram(lengths.tolist(), multiple)


@CASES
def test_lower_bound(lengths, capacity, multiple, most):
    lengths = lengths[:50]  # fractions are slow
    sizes, counts, units = classes(lengths, capacity, multiple)
    found = _native.packing_lower_bound(sizes, counts, units, most)
    assert found == twin.lower_bound(sizes.tolist(), counts.tolist(), units, most)


@CASES
@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_are_valid(lengths, capacity, multiple, most, planner):
    sizes, counts, units = classes(lengths, capacity, multiple)
    plan = plan_of(sizes, counts, units, most, planner=planner)
    used = Counter()
    for packs, content in plan:
        assert sum(size * times for size, times in content) <= units
        assert sum(times for _, times in content) <= most
        for size, times in content:
            used[size] += packs * times
    assert used == dict(zip(sizes.tolist(), counts.tolist(), strict=True))
    assert sum(packs for packs, _ in plan) >= _native.packing_lower_bound(sizes, counts, units, most)


@CASES
@pytest.mark.parametrize("planner", ["best-fit", "first-fit-decreasing"])
def test_fit_decreasing_is_item_by_item(lengths, capacity, multiple, most, planner):
    best = planner == "best-fit"
    sizes, counts, units = classes(lengths, capacity, multiple)
    plan = plan_of(sizes, counts, units, most, planner=planner)
    packs = [
        tuple(size for size, times in content for _ in range(times)) for used, content in plan for _ in range(used)
    ]
    expected = twin.fit_decreasing(sizes.tolist(), counts.tolist(), units, most, best)
    if best:  # packs of equal free space may swap further items
        if most == NO_CAP:
            assert sorted(map(sum, packs)) == sorted(map(sum, expected))
    else:
        assert sorted(packs) == sorted(map(tuple, expected))


@SMALL_CASES
@pytest.mark.parametrize("planner", ["exact-fill-average", "exact-fill-fewest"])
def test_exact_fill_is_its_twin(lengths, capacity, multiple, most, planner):
    sizes, counts, units = classes(lengths, capacity, multiple)
    for seed in (0, 2**64 - 1):
        average = planner == "exact-fill-average"
        expected = twin.exact_fill(sizes.tolist(), counts.tolist(), units, most, average=average, seed=seed)
        found = [
            (packs, [size for size, times in content for _ in range(times)])
            for packs, content in plan_of(sizes, counts, units, most, planner=planner, seed=seed)
        ]
        assert found == expected


@CASES
def test_hand_out(lengths, capacity, multiple, most):
    sizes, counts, units = classes(lengths, capacity, multiple)
    patterns = _native.packing_plan(sizes, counts, units, most, "best-fit", 0)
    packs = as_packs(*_native.packing_hand_out(lengths, multiple, sizes, *patterns, 7))
    plan = plan_of(sizes, counts, units, most, planner="best-fit")
    assert packs == twin.hand_out(lengths.tolist(), multiple, plan, 7)


@CASES
def test_first_fit_shuffle(lengths, capacity, multiple, most):
    packs = as_packs(*_native.packing_first_fit_shuffle(lengths, capacity, multiple, most, 3))
    assert packs == twin.first_fit_shuffle(lengths.tolist(), capacity, multiple, most, 3)


@CASES
def test_sequential(lengths, capacity, multiple, most):
    offsets = _native.packing_sequential(lengths, capacity, multiple, most)
    packs = as_packs(offsets, np.arange(len(lengths)))
    assert packs == twin.sequential(lengths.tolist(), capacity, multiple, most)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
def test_permutation(count):
    expected = twin.shuffle(list(range(count)), twin.Random(5, twin.ORDER))
    assert _native.packing_permutation(count, 5).tolist() == expected


def test_first_fit_keeps_its_tree_true_over_thousands_of_packs():
    # Three levels of the tree with almost full packs: most searches end at the last pack.
    lengths = np.random.default_rng(1).integers(300, 700, 6000)
    packs = as_packs(*_native.packing_first_fit_shuffle(lengths, 1000, 1, NO_CAP, 0))
    assert len(packs) > 256
    assert packs == twin.first_fit_shuffle(lengths.tolist(), 1000, 1, NO_CAP, 0)


def test_counts_and_totals_beyond_32_bits():
    capacity = 2**31 - 1
    sizes, counts = np.array([capacity // 3, capacity]), np.array([3 * 10**12, 10**11])
    assert _native.packing_lower_bound(sizes, counts, capacity, NO_CAP) == 10**12 + 10**11
    for planner in PLANNERS:
        packs = _native.packing_plan(sizes, counts, capacity, NO_CAP, planner, 0)[2]
        assert packs.sum() == 10**12 + 10**11


@pytest.mark.parametrize("bad", [0, -1, 9, -(2**63), 2**63 - 1])
def test_lengths_out_of_range_are_refused(bad):
    lengths = np.array([4, bad], np.int64)
    patterns = (np.array([0, 1]), np.array([[0, 2]], np.int32), np.array([1]))
    for call in (
        lambda: _native.packing_histogram(lengths, 8, 1),
        lambda: _native.packing_sequential(lengths, 8, 1, 2),
        lambda: _native.packing_first_fit_shuffle(lengths, 8, 1, 2, 0),
        lambda: _native.packing_hand_out(lengths, 1, np.array([4]), *patterns, 0),
    ):
        with pytest.raises(ValueError, match=r"lengths\[1\] is"):
            call()


@pytest.mark.parametrize(
    ("sizes", "counts", "capacity", "most"),
    [
        ([2, 2], [1, 1], 8, 8),
        ([3, 2], [1, 1], 8, 8),
        ([0, 2], [1, 1], 8, 8),
        ([2, 9], [1, 1], 8, 8),
        ([2, 3], [1, 0], 8, 8),
        ([2, 3], [1], 8, 8),
        ([2, 3], [1, 1], 2**31, 8),
        ([2, 3], [1, 1], 8, 0),
    ],
)
def test_problems_out_of_range_are_refused(sizes, counts, capacity, most):
    with pytest.raises(ValueError):
        _native.packing_lower_bound(np.array(sizes), np.array(counts), capacity, most)
    with pytest.raises(ValueError):
        _native.packing_plan(np.array(sizes), np.array(counts), capacity, most, "best-fit", 0)


@pytest.mark.parametrize(
    ("offsets", "entries", "packs"),
    [
        ([0, 1], [[0, 3]], [1]),  # three items of a class with two
        ([0, 1], [[1, 2]], [1]),  # no such class
        ([0, 1], [[-1, 2]], [1]),
        ([0, 1], [[0, -2]], [-1]),
        ([0, 2], [[0, 2]], [1]),  # missing entries
        ([1, 1], [[0, 2]], [1]),
        ([0, 1, 0, 1], [[0, 2]], [1, 1, 1]),
        ([0], [[0, 2]], []),
        ([0, 1], [[0, 1]], [1]),  # one sequence left out
    ],
)
def test_patterns_that_do_not_belong_to_the_lengths_are_refused(offsets, entries, packs):
    with pytest.raises(ValueError):
        _native.packing_hand_out(
            np.array([4, 4]),
            1,
            np.array([4]),
            np.array(offsets, np.int64),
            np.array(entries, np.int32),
            np.array(packs, np.int64),
            0,
        )


def test_patterns_with_another_split_of_the_classes_are_refused():
    patterns = (np.array([0, 1, 2]), np.array([[0, 1], [1, 1]], np.int32), np.array([1, 2]))
    with pytest.raises(ValueError, match="as often as it occurs"):
        _native.packing_hand_out(np.array([4, 4, 5]), 1, np.array([4, 5]), *patterns, 0)


def test_other_dtypes_are_not_converted():
    with pytest.raises(TypeError):
        _native.packing_histogram(np.array([1, 2], np.int32), 8, 1)
