"""``pack_sequences`` and related functions, by their public interface."""

import hashlib
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_sft_idx.errors import SequenceError
from megatron_sft_idx.packing import METHODS, WindowPacker, linear_program, pack_sequences

OTHERS = [method for method in METHODS if method != "auto"]
EACH_METHOD = pytest.mark.parametrize("method", METHODS)


def packs_of(plan):
    return [plan.sequences[a:b].tolist() for a, b in pairwise(plan.offsets)]


def check(plan, lengths, capacity, *, most=None, multiple=1):
    """Check all guarantees of a plan."""
    lengths = np.asarray(lengths, np.int64)
    assert plan.offsets.dtype == plan.sequences.dtype == np.int64
    assert plan.offsets[0] == 0
    assert plan.offsets[-1] == len(lengths)
    assert (np.diff(plan.offsets) > 0).all()
    assert sorted(plan.sequences.tolist()) == list(range(len(lengths)))
    packs = packs_of(plan)
    rounded = -(-lengths // multiple) * multiple
    assert all(rounded[pack].sum() <= capacity for pack in packs)
    assert plan.num_packs == len(packs) >= plan.lower_bound > 0
    assert plan.longest == max(int(lengths[pack].sum()) for pack in packs)
    assert plan.most_sequences == max(map(len, packs))
    assert most is None or plan.most_sequences <= most
    assert plan.fill == lengths.sum() / (len(packs) * capacity)


@st.composite
def problems(draw):
    capacity = draw(st.integers(1, 300))
    multiple = draw(st.sampled_from([m for m in (1, 2, 3, 8) if m <= capacity]))
    usable = capacity // multiple * multiple
    low = draw(st.integers(1, usable))
    high = draw(st.integers(low, usable))
    lengths = draw(st.lists(st.integers(low, high), min_size=1, max_size=120))
    return {
        "lengths": lengths,
        "capacity": capacity,
        "sequence_multiple": multiple,
        "max_sequences_per_pack": draw(st.one_of(st.none(), st.integers(1, 9))),
        "seed": draw(st.integers(0, 2**64 - 1)),
    }


PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@PROPERTY
@given(problems())
def test_every_method_keeps_its_promises_and_auto_is_never_behind(problem):
    plans = {method: pack_sequences(**problem, method=method) for method in METHODS}
    for plan in plans.values():
        check(
            plan,
            problem["lengths"],
            problem["capacity"],
            most=problem["max_sequences_per_pack"],
            multiple=problem["sequence_multiple"],
        )
    assert plans["auto"].num_packs == min(plan.num_packs for plan in plans.values())
    assert len({plan.lower_bound for plan in plans.values()}) == 1


@settings(PROPERTY, max_examples=40)
@given(problems())
def test_high_effort_is_never_behind_either(problem):
    high = pack_sequences(**problem, effort="high")
    limits = {"most": problem["max_sequences_per_pack"], "multiple": problem["sequence_multiple"]}
    check(high, problem["lengths"], problem["capacity"], **limits)
    assert high.num_packs <= pack_sequences(**problem).num_packs


@settings(PROPERTY, max_examples=60)
@given(problems())
def test_the_same_seed_gives_the_same_packs(problem):
    for method in METHODS:
        one, two = (pack_sequences(**problem, method=method) for _ in range(2))
        assert one.sequences.tolist() == two.sequences.tolist()
        assert one.offsets.tolist() == two.offsets.tolist()


@settings(PROPERTY, max_examples=60)
@given(problems(), st.integers(1, 50), st.lists(st.integers(0, 60), max_size=5))
def test_a_stream_is_packed_whatever_the_pieces(problem, window, pieces):
    lengths = np.array(problem.pop("lengths"))
    capacity = problem.pop("capacity")
    whole = WindowPacker(capacity, window=window, **problem)
    packs = whole.add(lengths) + whole.finish()
    assert sorted(np.concatenate(packs).tolist()) == list(range(len(lengths)))
    multiple, most = problem["sequence_multiple"], problem["max_sequences_per_pack"]
    rounded = -(-lengths // multiple) * multiple
    assert all(rounded[pack].sum() <= capacity and (most is None or len(pack) <= most) for pack in packs)
    cut = WindowPacker(capacity, window=window, **problem)
    parts = np.split(lengths, np.minimum(np.cumsum(pieces), len(lengths)))
    again = [pack for part in parts for pack in cut.add(part)] + cut.finish()
    assert [pack.tolist() for pack in again] == [pack.tolist() for pack in packs]


# ---- groups ----


@st.composite
def grouped_problems(draw):
    """Draw problems with sequences in groups that fit. Group numbers are random, and each group is contiguous."""
    problem = draw(problems())
    multiple, usable = problem["sequence_multiple"], problem["capacity"] // problem["sequence_multiple"]
    same = draw(st.one_of(st.none(), st.integers(1, 3)))
    groups, rooms, lengths = [], [], []
    for length in problem["lengths"]:
        units = -(-length // multiple)
        in_group = same is None or groups.count(groups[-1] if groups else None) < same
        if not groups or not in_group or rooms[-1] + units > usable or (same is None and draw(st.booleans())):
            if same and groups and groups.count(groups[-1]) < same:
                continue  # would change the size of a group
            groups.append(len(rooms))
            rooms.append(0)
        else:
            groups.append(groups[-1])
        rooms[-1] += units
        lengths.append(length)
    if same:
        full = len(groups) // same * same
        lengths, groups = lengths[:full] or [1], groups[:full] or [0]
        same = same if full else 1
    names = np.array(draw(st.permutations(range(len(rooms)))))
    most = problem["max_sequences_per_pack"]
    problem["max_sequences_per_pack"] = None if most is None or same is None else max(most, same)
    return problem | {"lengths": lengths, "groups": names[groups]}


@PROPERTY
@given(grouped_problems())
def test_no_group_is_torn_and_packs_are_those_of_sequences_as_long(problem):
    lengths, groups = np.array(problem["lengths"]), problem["groups"]
    multiple, most = problem["sequence_multiple"], problem["max_sequences_per_pack"]
    # The slow twin treats each group as one sequence of its rounded length.
    members = {number: np.flatnonzero(groups == number) for number in dict.fromkeys(groups.tolist())}
    rounded = -(-lengths // multiple) * multiple
    alone = problem | {"lengths": [int(rounded[each].sum()) for each in members.values()]}
    del alone["groups"]
    alone["max_sequences_per_pack"] = most and most // len(next(iter(members.values())))
    for method in METHODS:
        plan, twin = pack_sequences(**problem, method=method), pack_sequences(**alone, method=method)
        check(plan, lengths, problem["capacity"], most=most, multiple=multiple)
        numbered = list(members.values())
        assert packs_of(plan) == [np.concatenate([numbered[g] for g in pack]).tolist() for pack in packs_of(twin)]
        assert (plan.lower_bound, plan.method) == (twin.lower_bound, twin.method)
    best_fit = pack_sequences(**alone, method="best-fit")
    assert pack_sequences(**problem, effort="high").num_packs <= pack_sequences(**problem).num_packs
    assert pack_sequences(**problem).num_packs <= best_fit.num_packs


def test_each_sequence_its_own_group_is_no_groups():
    lengths = lognormal(3000)
    plans = [pack_sequences(lengths, 4096, seed=5, **groups) for groups in ({}, {"groups": np.arange(3000)[::-1]})]
    assert packs_of(plans[0]) == packs_of(plans[1])


@pytest.mark.parametrize(
    ("lengths", "options", "error", "words"),
    [
        ([3, 3, 4], {"groups": [0, 0]}, ValueError, r"groups has shape \(2,\), expected \(3,\)"),
        ([3, 3], {"groups": [0.0, 0.0]}, TypeError, "groups has dtype float64"),
        ([3, 3, 3, 3], {"groups": [7, 8, 8, 7]}, ValueError, "group 7 occurs in 2 separate places"),
        ([3, 3, 6, 5], {"groups": [0, 0, 1, 1]}, SequenceError, "lengths:2: the group that begins here has 11 tokens"),
        ([3, 11], {"groups": [0, 0]}, SequenceError, "length 11 does not fit into the capacity 10"),
        (
            [3, 2, 4],
            {"groups": [0, 0, 0], "sequence_multiple": 4},
            SequenceError,
            "12 tokens, each sequence rounded up",
        ),
        ([3, 3, 3], {"groups": [0, 0, 1], "max_sequences_per_pack": 4}, ValueError, "needs groups of equal size"),
        ([3, 3], {"groups": [0, 0], "max_sequences_per_pack": 1}, ValueError, "but groups have 2 sequences"),
    ],
)
def test_groups_that_cannot_be_are_refused(lengths, options, error, words):
    with pytest.raises(error, match=words):
        pack_sequences(lengths, 10, **options)


def test_no_sequences_make_no_groups():
    assert pack_sequences([], 10, groups=[]).num_packs == 0


def lognormal(count, capacity=4096, seed=0):
    """Return lengths from integer arithmetic only, so that they are the same on any machine."""
    random = np.random.Generator(np.random.PCG64(seed))
    halvings, mantissas = random.geometric(0.4, count), random.integers(capacity // 2, capacity + 1, count)
    return np.maximum(1, mantissas >> np.minimum(halvings - 1, 40)).astype(np.int64)


@EACH_METHOD
def test_seeds_differ_where_anything_is_shuffled(method):
    lengths = lognormal(500)
    plans = [pack_sequences(lengths, 4096, method=method, seed=seed) for seed in (0, 1, 2**64 - 1)]
    distinct = len({tuple(plan.sequences.tolist()) for plan in plans})
    assert distinct == (1 if method == "sequential" else 3)


def test_sequential_keeps_the_order():
    plan = pack_sequences([3, 3, 3, 5, 2, 8, 1], 8, method="sequential", seed=9)
    assert packs_of(plan) == [[0, 1], [2, 3], [4], [5], [6]]


def test_auto_takes_a_perfect_order_and_shuffles_its_packs():
    # Triples that sum to 1731, in order. Found by a search, because planners that sort seldom miss it.
    lengths = [630, 554, 547, 586, 609, 536, 575, 530, 626, 645, 430, 656, 494, 701]
    lengths += [536, 655, 570, 506, 650, 525, 556, 584, 578, 569, 480, 627, 624]
    others = {method: pack_sequences(lengths, 1731, method=method).num_packs for method in OTHERS}
    assert others.pop("sequential") == 9 < min(others.values())
    plans = [pack_sequences(lengths, 1731, seed=seed) for seed in (0, 1)]
    for plan in plans:
        check(plan, lengths, 1731)
        assert plan.num_packs == 9
        assert sorted(packs_of(plan)) == [[i, i + 1, i + 2] for i in range(0, 27, 3)]
    assert packs_of(plans[0]) != packs_of(plans[1])


def test_auto_beats_its_own_parts_on_common_shapes():
    lengths = lognormal(20_000)
    plan = pack_sequences(lengths, 4096)
    assert plan.num_packs == plan.lower_bound
    assert plan.method == "exact-fill"
    assert plan.most_sequences < pack_sequences(lengths, 4096, method="best-fit").most_sequences


def test_high_effort_closes_a_gap():
    # Few sizes, two to four per pack: greedy planners waste four percent.
    lengths = [19, 20, 36, 40, 43] * 800
    normal, high = (pack_sequences(lengths, 100, effort=effort) for effort in ("normal", "high"))
    check(high, lengths, 100)
    assert high.num_packs < normal.num_packs
    assert high.method == "linear-program"
    assert high.num_packs <= high.lower_bound * 1.002


def mixed(seed, share, low, high, count=20_000):
    """Return lengths: a share of any size, and the rest between two bounds."""
    rng, some = np.random.default_rng(seed), int(count * share)
    return np.concatenate([rng.integers(1, 4097, some), rng.integers(low, high, count - some)])


@pytest.mark.parametrize(
    ("lengths", "packs"),
    [
        (mixed(1, 0.0, 800, 2000), 6910),  # 7,260 without the program
        (mixed(3, 0.03, 1100, 1700), 7250),  # 7,680 without it
        (mixed(3, 0.1, 900, 1200), 5880),  # 6,040 without it
    ],
)
def test_high_effort_keeps_its_gain_beside_lengths_of_all_kinds(lengths, packs, monkeypatch):
    monkeypatch.setattr(linear_program, "_MAX_WORK", 150_000_000, raising=False)  # a fraction of the default
    high = pack_sequences(lengths, 4096, effort="high")
    check(high, lengths, 4096)
    assert (high.method, high.num_packs < packs) == ("linear-program", True)


def test_high_effort_is_not_spent_where_no_pattern_of_the_grid_can_gain_a_pack(monkeypatch):
    def work(*arguments):
        raise AssertionError(arguments)

    lengths = np.concatenate([mixed(1, 0.8, 1100, 2700), np.full(17, 4096)])
    normal = pack_sequences(lengths, 4096, method="best-fit")
    assert normal.num_packs > normal.lower_bound * 1.0001 + 1
    monkeypatch.setattr(linear_program, "_solve", work)
    sizes, counts = np.unique(lengths, return_counts=True)
    assert linear_program.plan_by_linear_program(sizes, counts, 4096, 2**31 - 1, 0, normal.num_packs) is None
    with pytest.raises(AssertionError):
        linear_program.plan_by_linear_program(sizes, counts, 4096, 2**31 - 1, 0, 2 * normal.num_packs)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=24, unique=True), st.integers(1, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_the_first_patterns_pack_all_that_there_is(sizes, max_sequences, data):
    present, grid = np.sort(np.array(sizes)), 60
    demand = np.array(data.draw(st.lists(st.integers(1, 500), min_size=len(sizes), max_size=len(sizes))))
    columns, inverse, amounts = linear_program._first_patterns(present, demand, grid, max_sequences)
    assert (columns @ present <= grid).all()
    assert (columns.sum(axis=1) <= max_sequences).all()
    np.testing.assert_allclose(inverse @ columns.T, np.eye(len(sizes)), atol=1e-6)
    np.testing.assert_allclose(amounts @ columns, demand, rtol=1e-9)
    assert (amounts >= 0).all()


@pytest.mark.parametrize(
    ("method", "digest"),
    [
        ("auto", "81621f7b78c39d86"),
        ("best-fit", "2f626ad7c0ac5b1d"),
        ("exact-fill", "81621f7b78c39d86"),
        ("first-fit-shuffle", "75c1e6db02ddba25"),
        ("first-fit-decreasing", "35d21123b7f06999"),
        ("sequential", "184675a2b7b24191"),
    ],
)
def test_the_same_bytes_on_any_machine(method, digest):
    lengths = [(i * i * 7919 + i * 104_729) % 997 + 3 for i in range(3000)]
    plan = pack_sequences(lengths, 2048, method=method, sequence_multiple=4, seed=20_261_121)
    content = plan.offsets.astype("<i8").tobytes() + plan.sequences.astype("<i8").tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == digest


def test_a_small_plan_in_full():
    plan = pack_sequences([6, 4, 4, 3, 3, 2, 8, 1, 1], 8, seed=1)
    assert packs_of(plan) == [[6], [1, 2], [3, 4, 8, 7], [0, 5]]


@EACH_METHOD
def test_no_lengths_make_no_packs(method):
    for lengths in ([], np.zeros(0, np.int32), np.zeros(0)):
        plan = pack_sequences(lengths, 8, method=method)
        assert plan.offsets.tolist() == [0]
        assert plan.method in OTHERS
        assert plan.sequences.dtype == np.int64
        assert (plan.num_packs, plan.fill, plan.lower_bound, plan.longest, plan.most_sequences) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4"])
def test_any_integer_dtype(dtype):
    lengths = lognormal(200, 100)
    expected = pack_sequences(lengths.tolist(), 100)
    strided = np.stack([lengths, lengths], 1).astype(dtype)[:, 0]
    assert packs_of(pack_sequences(strided, 100)) == packs_of(expected)


@EACH_METHOD
@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([5, 11, 12, 3], ["lengths:1:", "length 11", "capacity 10", "overlong sequences: 2", "longest has 12"]),
        (np.array([2**64 - 1], np.uint64), ["lengths:0:", "capacity 10"]),
        ([5, 0, 99], ["lengths:1:", "length 0", "at least one token"]),
        ([5, -3], ["lengths:1:", "length -3"]),
    ],
)
def test_lengths_that_do_not_fit_are_named(method, lengths, words):
    with pytest.raises(SequenceError) as caught:
        pack_sequences(lengths, 10, method=method)
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)


def test_a_length_that_fits_only_before_rounding_up_is_named():
    pack_sequences([8, 9], 10, sequence_multiple=1)
    with pytest.raises(SequenceError, match="lengths:1: length 9 rounded up to a multiple of 4"):
        pack_sequences([8, 9], 10, sequence_multiple=4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "worst-fit"}, ValueError, "auto, best-fit, exact-fill"),
        ({"effort": "max"}, ValueError, "normal, high"),
        ({"effort": "high", "method": "best-fit"}, ValueError, "needs method='auto'"),
        ({"capacity": 0}, ValueError, "capacity is 0"),
        ({"capacity": 2**31}, ValueError, "capacity is 2147483648"),
        ({"capacity": 8.0}, TypeError, "capacity is 8.0"),
        ({"capacity": True}, TypeError, "capacity is True"),
        ({"max_sequences_per_pack": 0}, ValueError, "max_sequences_per_pack is 0"),
        ({"sequence_multiple": 0}, ValueError, "sequence_multiple is 0"),
        ({"sequence_multiple": 9}, ValueError, "sequence_multiple is 9"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"seed": 2**64}, ValueError, "seed is"),
        ({"seed": None}, TypeError, "seed is None"),
        ({"lengths": [1.0]}, TypeError, "float64"),
        ({"lengths": [True]}, TypeError, "bool"),
        ({"lengths": ["1"]}, TypeError, "expected integers"),
        ({"lengths": [2**70]}, TypeError, "expected integers"),
        ({"lengths": [[1]]}, ValueError, "2 dimensions"),
        ({"lengths": 5}, ValueError, "0 dimensions"),
    ],
)
def test_options_out_of_range_are_refused(options, error, words):
    arguments = {"lengths": [1, 2], "capacity": 8, **options}
    with pytest.raises(error, match=words.replace("(", r"\(")):
        pack_sequences(**arguments)


def test_few_lengths_in_a_large_capacity_cost_little_memory():
    # In a separate process, because a table over the capacity would need gigabytes.
    code = (
        "import resource, numpy; from megatron_sft_idx.packing import METHODS, pack_sequences\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for m in METHODS: pack_sequences([2**30, 2**29, 5, 7] * 20, 2**31 - 1, method=m)\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8192"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_many_distinct_lengths_in_a_huge_capacity_end():
    lengths = np.random.default_rng(0).integers(1, 2**20 + 1, 200_000)
    for method in ("auto", "exact-fill"):
        plan = pack_sequences(lengths, 2**30, method=method)
        check(plan, lengths, 2**30)
        assert plan.num_packs <= pack_sequences(lengths, 2**30, method="best-fit").num_packs


def test_a_window_costs_little_fill():
    lengths = lognormal(60_000)
    packer = WindowPacker(4096)
    packs = packer.add(lengths) + packer.finish()
    assert len(packs) <= pack_sequences(lengths, 4096).num_packs * 1.001


def test_no_sequence_waits_for_ever():
    # No two sequences share a pack, and no pack is full, but packs must be returned anyway.
    packer = WindowPacker(100, window=10)
    given_out = sum(len(packer.add([60] * 10)) for _ in range(10))
    assert given_out >= 70
    assert given_out + len(packer.finish()) == 100
    assert packer.finish() == []


def test_a_sequential_stream_stays_in_order():
    lengths = lognormal(1000, 100)
    packer = WindowPacker(100, window=64, method="sequential")
    packs = packer.add(lengths) + packer.finish()
    assert np.concatenate(packs).tolist() == list(range(1000))
    assert len(packs) == pack_sequences(lengths, 100, method="sequential").num_packs


def test_a_stream_names_positions_and_options():
    packer = WindowPacker(100, window=4)
    packer.add([1, 2, 3, 4, 5])
    with pytest.raises(SequenceError, match="lengths:6: length 101"):
        packer.add([6, 101])
    packer.add([6])  # the rejected call had no effect
    assert sorted(np.concatenate(packer.finish()).tolist()) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="unknown method 'no'"):
        WindowPacker(100, method="no")
    with pytest.raises(ValueError, match="full is 2"):
        WindowPacker(100, full=2)
