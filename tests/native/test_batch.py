"""Native assembly of micro-batches, compared with the slow and simple way; and errors."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_twin import slow_batch, slow_column
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sft_idx import _native

LOW, HIGH = -(2**63), 2**63 - 1
PAD = 7


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class Case:
    """Arguments of one call, by default for a batch of two rows from two shards."""

    shards: list[Any] = field(
        default_factory=lambda: [
            (np.arange(20, dtype="u2"), np.ones(20, "u1")),
            (np.arange(100, 110, dtype="i4"), np.full(10, 0.5, "f4")),
        ]
    )
    offsets: np.ndarray = field(default_factory=lambda: longs(0, 2, 3))
    segment_shards: np.ndarray = field(default_factory=lambda: ints(0, 1, 0))
    starts: np.ndarray = field(default_factory=lambda: longs(3, 0, 0))
    lengths: np.ndarray = field(default_factory=lambda: longs(5, 2, 8))
    seq_length: int = 8
    width: int = 4
    multiple: int = 1
    pad_id: int = PAD
    columns: tuple[Any, ...] = ()
    replaced: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return max(len(self.offsets) - 1, 0)

    def outputs(self, narrow: str | None) -> dict[str, Any]:
        """Return buffers full of values that no batch has."""
        row, bounds = (self.rows, self.seq_length), (self.rows, self.width)
        wide = {"tokens": "i8", "labels": "i8", "position_ids": "i8", "loss_mask": "f4"}
        dtypes = {"tokens": "i4", "labels": None, "position_ids": None, "loss_mask": narrow} if narrow else wide
        out: dict[str, Any] = {name: dtype and np.full(row, 99, dtype) for name, dtype in dtypes.items()}
        out["cu_seqlens"] = np.full(bounds, -9, "i4")
        out["cu_seqlens_padded"] = np.full(bounds, -9, "i4") if self.multiple > 1 else None
        out["max_seqlen"] = np.full(self.rows, -9, "i4")
        return {**out, **self.replaced}

    def run(self, narrow: str | None = None) -> dict[str, np.ndarray]:
        out = self.outputs(narrow)
        where = self.offsets, self.segment_shards, self.starts, self.lengths
        _native.assemble(self.shards, *where, self.multiple, self.pad_id, *out.values(), self.columns)
        return {name: array for name, array in out.items() if array is not None}

    def slow(self) -> dict[str, list[Any]]:
        rows = []
        for first, last in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            row = []
            for s in range(first, last):
                ids, mask = self.shards[self.segment_shards[s]]
                part = slice(self.starts[s], self.starts[s] + self.lengths[s])
                row.append((ids[part].tolist(), mask[part].tolist()))
            rows.append(row)
        return slow_batch(rows, self.seq_length, self.width, self.multiple, self.pad_id)


def round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw any number of rows, from only padding to exactly full, from one to three shards."""
    multiple = draw(st.sampled_from([1, 2, 4, 8]))
    shards, total = [], draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(["u2", "i4"]))
        ids = rng.integers(0, 2**16 if dtype == "u2" else 2**31, total).astype(dtype)
        flags = draw(st.booleans())
        mask = rng.integers(0, 2, total).astype("u1") if flags else rng.random(total).astype("f4")
        shards.append((ids, mask))
    rows = draw(st.lists(st.lists(st.tuples(st.integers(1, total), st.integers(0, 2)), max_size=5), max_size=4))
    lengths = [length for row in rows for length, _ in row]
    fullest = max((sum(round_up(length, multiple) for length, _ in row) for row in rows), default=0)
    spare = draw(st.sampled_from([0, 0, multiple, 3 * multiple]))
    return Case(
        shards,
        np.cumsum([0, *map(len, rows)], dtype=np.int64),
        ints(*(shard % len(shards) for row in rows for _, shard in row)),
        longs(*(draw(st.integers(0, total - length)) for length in lengths)),
        longs(*lengths),
        max(fullest + spare, multiple),
        max(map(len, rows), default=0) + 2 + draw(st.integers(0, 2)),
        multiple,
        draw(st.sampled_from([0, 1, 2**31 - 1])),
    )


def assert_equal(made: dict[str, np.ndarray], slow: dict[str, list[Any]]) -> None:
    assert made.keys() == slow.keys()
    for name, array in made.items():
        assert array.tolist() == slow[name], name


@settings(deadline=None, max_examples=300)
@given(cases())
def test_wide_batch_is_the_slow_one(case: Case) -> None:
    assert_equal(case.run(), case.slow())


@settings(deadline=None)
@given(cases())
def test_narrow_batch_is_the_slow_one_without_what_follows_from_it(case: Case) -> None:
    slow = {name: rows for name, rows in case.slow().items() if name not in ("labels", "position_ids")}
    assert_equal(case.run("f4"), slow)
    if all(mask.dtype == np.uint8 for _, mask in case.shards):
        assert_equal(case.run("u1"), slow)


@settings(deadline=None)
@given(cases())
def test_boundaries_keep_what_attention_needs(case: Case) -> None:
    """Without the twin: segments are divisible and inside the row, and both boundaries have the same sequences."""
    made = case.run()
    physical = made.get("cu_seqlens_padded", made["cu_seqlens"])
    for row in range(case.rows):
        own = case.lengths[case.offsets[row] : case.offsets[row + 1]]
        sizes = np.diff(physical[row])
        assert (sizes >= 0).all()
        assert (sizes % case.multiple == 0).all()
        assert physical[row][0] == 0
        assert physical[row][-1] == case.seq_length
        assert made["max_seqlen"][row] == sizes.max()
        assert sizes[: len(own)].tolist() == [round_up(length, case.multiple) for length in own.tolist()]
        if case.multiple > 1:
            logical = np.diff(made["cu_seqlens"][row])
            assert logical.tolist() == own.tolist() + [0] * (case.width - 1 - len(own))
            assert (logical <= sizes).all()
        trained = made["loss_mask"][row] != 0
        ends = physical[row][: len(own)] + own - 1
        assert not trained[ends].any()
        assert (made["labels"][row][~trained & (made["labels"][row] != case.pad_id)] >= 0).all()


def test_a_row_in_full() -> None:
    made = Case(multiple=4, seq_length=16, width=5).run()
    assert {name: array[0].tolist() for name, array in made.items()} == {
        "tokens": [3, 4, 5, 6, 7, PAD, PAD, PAD, 100, 101, PAD, PAD, PAD, PAD, PAD, PAD],
        "labels": [4, 5, 6, 7, PAD, PAD, PAD, PAD, 101, PAD, PAD, PAD, PAD, PAD, PAD, PAD],
        "position_ids": [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3],
        "loss_mask": [1, 1, 1, 1, 0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0],
        "cu_seqlens": [0, 5, 7, 7, 7],
        "cu_seqlens_padded": [0, 8, 12, 16, 16],
        "max_seqlen": 8,
    }


def test_a_shard_that_no_segment_names_may_be_absent() -> None:
    case = Case()
    case.shards = [None, *case.shards, None]
    case.segment_shards += 1
    assert_equal(case.run(), case.slow())


def test_mask_at_a_sequences_end_counts_for_nothing() -> None:
    assert not Case().run()["loss_mask"][[0, 0, 1], [4, 6, 7]].any()


# ---- columns ----

PER = {"token": 1, "sequence": 2, "pack": 3}


def column_of(case: Case, per: str, shards: list[np.ndarray], slots: np.ndarray, starts: np.ndarray) -> tuple[Any, ...]:
    """Return a column in the form for ``assemble``, with an output full of other values."""
    entries = {"token": (case.seq_length,), "sequence": (case.width - 1,), "pack": ()}[per]
    shape, dtype = shards[0].shape[1:], shards[0].dtype
    nbytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    return PER[per], nbytes, tuple(shards), slots, starts, np.full((case.rows, *entries, *shape), 99, dtype)


@settings(deadline=None, max_examples=300)
@given(cases(), st.data())
def test_columns_are_the_slow_ones(case: Case, data: st.DataObject) -> None:
    """Tests several columns at once, of any kind, dtype and width, each at its own places."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    expected = []
    for _ in range(data.draw(st.integers(0, 3))):
        per = data.draw(st.sampled_from(list(PER)))
        dtype, shape = (
            data.draw(st.sampled_from(["u1", "f2", "i4", "f4", "f8"])),
            data.draw(st.sampled_from([(), (3,)])),
        )
        counts = rng.integers(1, 40, 2) + (case.lengths.max(initial=0) if per == "token" else 0)
        shards = [rng.integers(1, 100, (count, *shape)).astype(dtype) for count in counts.tolist()]
        entries = case.rows if per == "pack" else len(case.lengths)
        slots = rng.integers(0, 2, entries).astype("i4")
        taken = case.lengths if per == "token" else np.ones(entries, "i8")
        starts = rng.integers(0, counts[slots] - taken + 1)
        case.columns += (column_of(case, per, shards, slots, starts),)
        places = zip(slots, starts, taken, strict=True)
        parts = [shards[slot][start : start + count].tolist() for slot, start, count in places]
        values = parts if per == "token" else [part[0] for part in parts]
        rows = values if per == "pack" else [values[a:b] for a, b in pairwise(case.offsets)]
        zero = np.zeros(shape).tolist()
        expected.append(slow_column(per, rows, case.seq_length, case.width, case.multiple, zero))
    assert_equal(case.run(), case.slow())
    assert [column[-1].tolist() for column in case.columns] == expected


PLACES = ints(0, 1, 0), longs(3, 0, 0)
BAD_COLUMNS = [
    ("token", ints(0, 2, 0), longs(3, 0, 0), "row 0: needs 2 rows of a column from row 0 of shard 2, which has 0"),
    ("token", ints(0, -1, 0), longs(3, 0, 0), "of shard -1, which has 0"),
    ("token", ints(0, 1, 0), longs(6, 0, 0), "5 rows of a column from row 6 of shard 0, which has 10"),
    ("token", ints(0, 1, 1), longs(3, 0, 0), "row 1: needs 8 rows of a column from row 0 of shard 1, which has 4"),
    ("token", ints(0, 1, 0), longs(3, -1, 0), "rows of a column from row -1 of"),
    ("token", ints(0, 1, 0), longs(3, HIGH, 0), f"rows of a column from row {HIGH} of"),
    ("sequence", ints(0, 1, 0), longs(3, 4, 0), "1 rows of a column from row 4 of shard 1, which has 4"),
    ("sequence", ints(0, 1, 0), longs(LOW, 0, 0), f"rows of a column from row {LOW} of"),
    ("pack", ints(0, 1), longs(0, 4), "row 1: needs 1 rows of a column from row 4 of shard 1, which has 4"),
    ("pack", ints(0, 2**31 - 1), longs(0, 0), "row 1: needs 1 rows of a column"),
    ("pack", *PLACES, "one shard and one first row per segment or pack"),
    ("token", ints(0, 0), longs(0, 0), "one shard and one first row"),
]


@pytest.mark.parametrize(("per", "slots", "starts", "word"), BAD_COLUMNS)
def test_a_column_that_does_not_fit_is_refused_before_anything_is_written(
    per: str, slots: np.ndarray, starts: np.ndarray, word: str
) -> None:
    case = Case()
    case.replaced = out = case.outputs(None)
    case.columns = (column_of(case, per, [np.ones((10, 2), "f4"), np.ones((4, 2), "f4")], slots, starts),)
    with pytest.raises(ValueError, match=word):
        case.run()
    for array in (*out.values(), case.columns[0][-1]):
        assert array is None or np.isin(array, (99, -9)).all()


ROWS = np.ones((10, 2), "f4")
MALFORMED_COLUMNS = [
    ((0, 8, (ROWS,) * 2, *PLACES, np.ones((2, 8, 2), "f4")), ValueError, "1, 2 or 3"),
    ((1, 0, (ROWS,) * 2, *PLACES, np.ones((2, 8, 2), "f4")), ValueError, "at least one byte"),
    ((1, 8, (ROWS,) * 2, *PLACES, np.ones((2, 8, 1), "f4")), ValueError, "with the number of rows of the batch"),
    ((1, 8, (ROWS,) * 2, *PLACES, np.ones((2, 8, 4), "f4")[..., ::2]), ValueError, "an output must be contiguous"),
    ((1, 8, (ROWS,) * 2, *PLACES, np.ones(33, "f4")), ValueError, "with the number of rows of the batch"),
    (
        (1, 8, (ROWS, ROWS[:, :1]), *PLACES, np.ones((2, 8, 2), "f4")),
        ValueError,
        "the rows of a shard must be contiguous",
    ),
    ((1, 8, (ROWS, np.ones(3, "f4")), *PLACES, np.ones((2, 8, 2), "f4")), ValueError, "contiguous and complete"),
    ((2, 8, (ROWS,) * 2, *PLACES, np.ones((2, 4, 2), "f4")), ValueError, "with the number of rows of the batch"),
    (
        (1, 8, (ROWS,) * 2, PLACES[1], PLACES[1], np.ones((2, 8, 2), "f4")),
        TypeError,
        "shards must be int32, and first rows int64",
    ),
    (
        (1, 8, (ROWS,) * 2, PLACES[0], PLACES[0], np.ones((2, 8, 2), "f4")),
        TypeError,
        "shards must be int32, and first rows int64",
    ),
    ([1, 8, (ROWS,) * 2, *PLACES, np.ones((2, 8, 2), "f4")], TypeError, "a column must be a tuple"),
    (
        (1, 8, (ROWS,) * 2, *PLACES, np.broadcast_to(np.float32(1), (2, 8, 2))),
        ValueError,
        "an output must be contiguous",
    ),
]


@pytest.mark.parametrize(("column", "error", "word"), MALFORMED_COLUMNS)
def test_what_is_no_column_is_refused(column: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        Case(columns=(column,)).run()
    frozen = (1, 8, (ROWS,) * 2, *PLACES, np.ones((2, 8, 2), "f4"))
    frozen[-1].flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        Case(columns=(frozen,)).run()


# ---- refused ----

REFUSED = [
    ({"offsets": longs(0, 2, 4)}, "row 1: its offsets"),
    ({"offsets": longs(0, HIGH, 3)}, "row 0: its offsets"),
    ({"offsets": longs(0, 3, 2)}, "row 1: its offsets"),
    ({"offsets": longs(-1, 2, 3)}, "row 0: its offsets"),
    ({"offsets": longs(LOW, 2, 3)}, "row 0: its offsets"),
    ({"offsets": longs()}, r"rows \+ 1 offsets"),
    ({"lengths": longs(5, 2)}, "one shard, start and length per segment"),
    ({"segment_shards": ints(0, 2, 0)}, "row 0: segment 1 refers to shard 2, which does not exist"),
    ({"segment_shards": ints(0, -1, 0)}, "row 0: segment 1 refers to shard -1, which does not exist"),
    ({"segment_shards": ints(0, 0, 2**31 - 1)}, "row 1: segment 2 refers to shard 2147483647"),
    ({"starts": longs(3, 9, 0)}, "begins at 9 and has 2 tokens, but shard 1 has 10"),
    ({"starts": longs(3, -1, 0)}, "begins at -1"),
    ({"starts": longs(3, HIGH, 0)}, "row 0: segment 1 begins"),
    ({"starts": longs(3, LOW, 0)}, "row 0: segment 1 begins"),
    ({"lengths": longs(5, 0, 8)}, "has 0 tokens"),
    ({"lengths": longs(5, -1, 8)}, "has -1 tokens"),
    ({"lengths": longs(5, HIGH, 8)}, "row 0: segment 1 begins"),
    ({"lengths": longs(LOW, 2, 8)}, "row 0: segment 0 begins"),
    ({"lengths": longs(5, 2, 9)}, "row 1: its sequences, each padded to a multiple of 1, need more than 8"),
    ({"lengths": longs(5, 4, 8)}, "row 0: its sequences"),
    ({"multiple": 4, "lengths": longs(5, 2, 8)}, "row 0: its sequences, each padded to a multiple of 4"),
    ({"multiple": 3}, "sequence length 8 is not"),
    ({"multiple": 0}, "sequence multiple"),
    ({"multiple": -2}, "sequence multiple"),
    ({"seq_length": 0}, "sequence length 0"),
    ({"width": 3}, "row 0: cu_seqlens of width 3 have no room for its 4 boundaries"),
    ({"width": 1}, "width of at least 2"),
    ({"width": 0}, "width of at least 2"),
    ({"pad_id": -1}, "pad id is negative"),
]


@pytest.mark.parametrize("narrow", [None, "f4"])
@pytest.mark.parametrize(("change", "word"), REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    narrow: str | None, change: dict[str, Any], word: str
) -> None:
    case = Case(**change)
    out = case.outputs(narrow)
    case.replaced = out
    with pytest.raises(ValueError, match=word):
        case.run(narrow)
    for array in out.values():
        assert array is None or np.isin(array, (99, -9)).all()


def test_absent_shard_is_refused() -> None:
    case = Case()
    case.shards[1] = None
    with pytest.raises(ValueError, match="refers to shard 1, which does not exist"):
        case.run()


def test_weights_do_not_go_into_a_flag_mask() -> None:
    with pytest.raises(ValueError, match="request a float32 mask"):
        Case().run("u1")


BAD_SHARDS = [
    ((np.zeros(20, "u2"), np.zeros(19, "u1")), ValueError, "19 loss mask values for 20 tokens"),
    ((np.zeros((2, 10), "u2"), np.zeros(20, "u1")), ValueError, "one-dimensional"),
    ((np.zeros(40, "u2")[::2], np.zeros(20, "u1")), ValueError, "contiguous"),
    ((np.frombuffer(bytes(81), "i4", offset=1), np.zeros(20, "u1")), ValueError, "aligned"),
    ((np.zeros(20, "i8"), np.zeros(20, "u1")), TypeError, "tokens must be uint16 or int32"),
    ((np.zeros(20, ">i4"), np.zeros(20, "u1")), TypeError, "tokens must be uint16 or int32"),
    ((np.zeros(20, "i2"), np.zeros(20, "u1")), TypeError, "tokens must be uint16 or int32"),
    ((np.zeros(20, "u2"), np.zeros(20, "f8")), TypeError, "masks must be uint8 or float32"),
    ((np.zeros(20, "u2"), np.zeros(20, "i1")), TypeError, "masks must be uint8 or float32"),
    ((np.zeros(20, "u2"),), TypeError, "a pair of arrays"),
    (([0] * 20, [0] * 20), TypeError, "a pair of arrays"),
]


@pytest.mark.parametrize(("shard", "error", "word"), BAD_SHARDS)
def test_arrays_that_are_no_shard_are_refused(shard: Any, error: type[Exception], word: str) -> None:
    case = Case()
    case.shards[0] = shard
    with pytest.raises(error, match=word):
        case.run()


BAD_OUTPUTS = [
    ("tokens", np.zeros((3, 8), "i8")),
    ("tokens", np.zeros(16, "i8")),
    ("labels", np.zeros((2, 7), "i8")),
    ("position_ids", np.zeros((1, 8), "i8")),
    ("loss_mask", np.zeros((2, 9), "f4")),
    ("cu_seqlens", np.zeros((1, 4), "i4")),
    ("cu_seqlens", np.zeros(8, "i4")),
    ("cu_seqlens_padded", np.zeros((2, 4), "i4")),
    ("max_seqlen", np.zeros(3, "i4")),
    ("max_seqlen", np.zeros((2, 1), "i4")),
]


@pytest.mark.parametrize(("name", "array"), BAD_OUTPUTS)
def test_outputs_of_another_shape_are_refused(name: str, array: np.ndarray) -> None:
    with pytest.raises(ValueError, match=name):
        Case(replaced={name: array}).run()


def test_padded_boundaries_go_with_a_multiple() -> None:
    for other in (None, np.zeros((2, 3), "i4")):
        with pytest.raises(ValueError, match="cu_seqlens_padded"):
            Case(multiple=2, seq_length=16, replaced={"cu_seqlens_padded": other}).run()


@pytest.mark.parametrize("name", ["tokens", "labels", "position_ids", "loss_mask", "cu_seqlens", "max_seqlen"])
def test_outputs_are_not_converted_and_read_only_ones_not_written(name: str) -> None:
    good = Case().outputs(None)[name]
    for other in (good.astype("f8"), np.repeat(good, 2, axis=-1)[..., ::2]):
        with pytest.raises((TypeError, ValueError)):
            Case(replaced={name: other}).run()
    frozen = good.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        Case(replaced={name: frozen}).run()
    assert (frozen == good).all()


# ---- advice ----


@pytest.fixture
def mapped(tmp_path: Path) -> np.ndarray:
    """Return eight pages of int32, mapped from a file."""
    path = tmp_path / "eight"
    np.arange(8 * mmap.PAGESIZE // 4, dtype="i4").tofile(path)
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), "i4")


PAGE = mmap.PAGESIZE // 4


@pytest.mark.parametrize(
    ("starts", "stops", "requests"),
    [
        ((), (), 0),
        ((5,), (5,), 0),
        ((5,), (6,), 1),
        ((0,), (8 * PAGE,), 1),
        ((8 * PAGE - 1,), (8 * PAGE,), 1),
        ((0, 10, PAGE - 1), (10, PAGE - 1, PAGE + 1), 1),
        ((0, 3 * PAGE, 5 * PAGE + 1), (1, 3 * PAGE + 1, 5 * PAGE + 2), 3),
        ((5 * PAGE, 0), (6 * PAGE, PAGE), 2),
        ((0, PAGE), (PAGE, 2 * PAGE), 1),
    ],
)
def test_pages_that_touch_are_asked_for_together(
    mapped: np.ndarray, starts: tuple[int, ...], stops: tuple[int, ...], requests: int
) -> None:
    assert _native.will_need(mapped, longs(*starts), longs(*stops)) == requests
    assert (mapped == np.arange(len(mapped))).all()


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (0, 8 * PAGE + 1), (5, 4), (LOW, HIGH), (HIGH, HIGH)])
def test_advice_about_what_is_outside_is_refused(mapped: np.ndarray, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="range 1 is outside"):
        _native.will_need(mapped, longs(0, start), longs(1, stop))


def test_advice_without_a_map_does_no_harm(mapped: np.ndarray) -> None:
    plain = np.arange(10_000, dtype="u2")
    _native.will_need(plain, longs(17, 9_000), longs(18, 10_000))
    _native.will_need(plain[:0], longs(0), longs(0))
    assert (plain == np.arange(10_000)).all()
    with pytest.raises(ValueError, match="one start and one stop"):
        _native.will_need(plain, longs(1), longs())
