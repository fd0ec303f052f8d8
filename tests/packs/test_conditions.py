"""Conditions on columns: parsing of any text and binding to any column never change the written value."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
from columned import OPERATORS
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.column import COLUMN_DTYPES, ColumnSpec
from megatron_sft_idx.packs.conditions import Condition, bind_all, whole_pairs

NAMES = st.from_regex("[a-z][a-z0-9_]{0,8}", fullmatch=True)
SPACES = st.text(" \t\n", max_size=2)
DTYPES = st.sampled_from([*COLUMN_DTYPES.values()])
NUMBERS = (
    st.integers(-(2**70), 2**70).map(str)
    | st.floats(allow_nan=False).map(repr)
    | st.sampled_from(["0", "-0", "+1", "1e5", "1.", ".5", "1e-60", "1e400", "true", "false", "inf", "-inf"])
    | st.sampled_from(["9007199254740993.0", "16777217.", "1.6777217e7", "-2049", "65510"])
)


@given(NAMES, st.sampled_from([*OPERATORS]), st.text(min_size=1).filter(lambda text: text == text.strip()), SPACES)
def test_a_condition_is_read_as_it_was_written(name: str, op: str, value: str, space: str) -> None:
    if op in ("<", ">") and value.startswith("="):
        return  # the longer operator
    text = space.join(("", name, op, value, ""))
    if name == "source" and op not in ("==", "!="):
        with pytest.raises(FormatError, match="compared with == or !="):
            Condition.parse(text)
        return
    condition = Condition.parse(text)
    assert condition == Condition(name, op, value)
    assert Condition.parse(str(condition)) == condition


@settings(max_examples=300)
@given(st.text(alphabet="ab0_=<>! .-e\n\x00é") | st.text() | st.tuples(NAMES, NUMBERS).map("".join))
@example("a = 1")
@example("a == ")
@example("A == 1")
@example("== 1")
@example("")
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    try:
        condition = Condition.parse(text)
    except FormatError as error:
        said = [str(error)]
    else:
        said = []
        for dtype in COLUMN_DTYPES.values():
            try:
                condition.bind(ColumnSpec("sequence", dtype))
            except FormatError as error:
                said.append(str(error))
    assert not [each for each in said if "\n" in each]


def exact(text: str) -> Fraction | float | None:
    """Return the number that a text represents; None for infinity, which is not a fraction."""
    text = {"true": "1", "false": "0"}.get(text, text)
    return None if text.lstrip("+-").startswith("inf") else Fraction(text)


@settings(max_examples=500)
@given(DTYPES, NUMBERS, st.sampled_from([*OPERATORS]), st.data())
def test_a_value_is_held_by_the_dtype_or_refused(dtype: np.dtype, text: str, op: str, data: st.DataObject) -> None:
    number, condition = exact(text), Condition("score", op, text)
    spec = ColumnSpec("sequence", dtype)
    try:
        (bound,) = bind_all([condition], {"score": spec}, "x")
    except FormatError:
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            plain = (number is not None and text.lstrip("+-").isdigit()) or text in ("true", "false")
            assert not (plain and limits.min <= number <= limits.max)
        else:
            # Too large, or so small that it would become 0.
            assert number is not None
            largest, smallest = (
                Fraction(float(np.finfo(dtype).max)),
                Fraction(float(np.finfo(dtype).smallest_subnormal)),
            )
            assert abs(number) > largest or 0 < abs(number) <= smallest / 2
        return
    assert bound.value.dtype == dtype
    if dtype.kind in "iu":
        assert int(bound.value) == number
    elif number is None:
        assert np.isinf(bound.value)
    elif not re.fullmatch(r"[+-]?[0-9]+(\.0*)?", text):  # the form in which Python prints the value of a column
        assert bound.value == dtype.type(float(number))
        number = Fraction(float(bound.value))
    values = data.draw(st.lists(st.integers(0, 100), max_size=8))
    rows = np.append(np.array(values, dtype), [bound.value] * (not np.isnan(bound.value)))
    if number is not None and dtype.kind == "f":
        nearest = dtype.type(float(number))
        higher = np.inf if nearest == np.finfo(dtype).max else np.nextafter(nearest, dtype.type(np.inf))
        rows = np.append(rows, [nearest, np.nextafter(nearest, dtype.type(0)), higher])
    wanted = float(bound.value) if number is None else number
    assert bound.holds(rows).tolist() == [OPERATORS[op](row, wanted) for row in rows.tolist()]


@pytest.mark.parametrize(
    ("dtype", "whole"), [("f8", 2**53 + 1), ("f4", 2**24 + 1), ("f2", 2**11 + 1), ("f4", -(2**24) - 1)]
)
@pytest.mark.parametrize("end", ["", ".", ".00"])
def test_a_whole_number_between_two_values_is_compared_exactly(dtype: str, whole: int, end: str) -> None:
    rows = np.array([whole - 1, whole + 1, np.nan, np.inf], dtype)
    for op, compare in OPERATORS.items():
        bound = Condition("x", op, f"{whole}{end}").bind(ColumnSpec("sequence", dtype))
        assert bound.holds(rows).tolist() == [compare(row, whole) for row in rows.tolist()]


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3))), st.sampled_from([*OPERATORS]), st.integers(-3, 3))
def test_of_a_row_with_several_values_all_must_hold(rows: list[tuple[int, int]], op: str, value: int) -> None:
    bound = Condition("wide", op, str(value)).bind(ColumnSpec("sequence", np.int8, 2))
    values = np.array(rows, np.int8).reshape(-1, 2)
    assert bound.holds(values).tolist() == [all(OPERATORS[op](each, value) for each in row) for row in rows]


def test_numbers_of_thousands_of_digits() -> None:
    spec = ColumnSpec("sequence", "f8")
    assert Condition("x", "==", "0" * 5000 + "1." + "0" * 5000).bind(spec).holds(np.array([1.0, 2.0])).tolist() == [
        True,
        False,
    ]
    with pytest.raises(FormatError, match="the number does not fit into float64, it would become inf"):
        Condition("x", "==", "1" * 5000).bind(spec)


def test_nan_equals_nothing_and_is_no_value() -> None:
    rows = np.array([np.nan, 1.0], np.float32)
    for op, expected in (("==", [False, True]), ("!=", [True, False]), ("<", [False, False]), (">=", [False, True])):
        assert Condition("x", op, "1").bind(ColumnSpec("sequence", "f4")).holds(rows).tolist() == expected
    with pytest.raises(FormatError, match="the value must be a number"):
        Condition("x", "==", "nan").bind(ColumnSpec("sequence", "f4"))


@given(st.lists(st.tuples(st.booleans(), st.booleans())))
def test_half_a_pair_is_no_pair(pairs: list[tuple[bool, bool]]) -> None:
    flat = np.array(pairs, bool).reshape(-1)
    assert whole_pairs(flat).tolist() == [both for a, b in pairs for both in (a and b,) * 2]


@pytest.mark.parametrize(("dtype", "text"), [("f8", "4.935701944763647e+16"), ("f4", "1e+11"), ("f4", "3.0000001e7")])
def test_a_number_as_python_prints_it_is_the_value_that_it_was_printed_of(dtype: str, text: str) -> None:
    (bound,) = bind_all([Condition("score", "==", text)], {"score": ColumnSpec("sequence", np.dtype(dtype))}, "x")
    printed = np.dtype(dtype).type(float(text))
    assert bound.holds(np.array([printed, printed + printed], dtype)).tolist() == [True, False]
