"""Conditions on columns, such as ``score >= 0.5``, and the sequences of a shard that satisfy them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.layout.column import ColumnSpec, is_source, number_of
from megatron_sft_idx.layout.files import no_column
from megatron_sft_idx.lines import on_one_line
from megatron_sft_idx.packs.run import Window, windows
from megatron_sft_idx.packs.source_names import find_name, listed_names, shortest_names, told_apart
from megatron_sft_idx.shard import Shard, pair_numbers
from megatron_sft_idx.storage.progress import Update

_FORM = re.compile(r"\s*([a-z][a-z0-9_]*)\s*(==|!=|<=|>=|<|>)\s*(.*\S)\s*", re.DOTALL)
_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,6})?|[+-]?inf")
_BOOLEANS = {"true": "1", "false": "0"}
_COMPARE: dict[str, Callable[[Any, Any], NDArray[np.bool_]]] = {
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
_SOURCE = "source"


class BoundCondition(NamedTuple):
    """A condition on a column whose kind is known.

    Attributes:
        column: name of the column.
        compare: the comparison, a numpy function.
        value: the value to compare with, in the column's dtype; for ``source``, the number of a file. NaN stands for an
            integer that no row is equal to.
        of_files: whether the column is ``source``, of whose rows only the file number is compared.
    """

    column: str
    compare: Callable[[Any, Any], NDArray[np.bool_]]
    value: Any
    of_files: bool = False

    def holds(self, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """Return whether the condition holds for all values of each row, bool [rows]. NaN is equal to nothing."""
        holds: NDArray[np.bool_] = self.compare(rows[:, 0] if self.of_files else rows, self.value)
        if holds.ndim > 1:
            holds = np.logical_and.reduce(holds, 1)
        return holds


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of a column with a value.

    Attributes:
        column: name of the column.
        operator: one of ``==``, ``!=``, ``<``, ``<=``, ``>``, ``>=``.
        value: the text after the operator.
    """

    column: str
    operator: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition such as ``score>=0.5``; spaces between its three parts are optional.

        Raises:
            FormatError: the text has another form, or is an order comparison of ``source`` files.

        Example:
            >>> Condition.parse("score>=0.5")
            Condition(column='score', operator='>=', value='0.5')
            >>> str(Condition.parse("source == b/train.jsonl"))
            'source == b/train.jsonl'
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise FormatError(
                f"--where {brief(text)}: expected 'NAME OP VALUE' with one of {', '.join(_COMPARE)}, such as"
                " 'score >= 0.5'"
            )
        condition = cls(*match.groups())
        if condition.column == _SOURCE and condition.operator not in ("==", "!="):
            raise FormatError(f"--where {on_one_line(str(condition))}: a file can only be compared with == or !=")
        return condition

    @property
    def _where(self) -> str:
        """The beginning of error messages."""
        return f"--where {on_one_line(str(self))}"

    def __str__(self) -> str:
        return f"{self.column} {self.operator} {self.value}"

    def named(self, paths: Sequence[str]) -> Condition:
        """Return the same condition; for ``source``, with the name of the matching input file.

        Only a job that reads the input knows ``paths``. Headers and the column contain only names.

        Raises:
            FormatError: see ``find_name``.
        """
        if self.column != _SOURCE:
            return self
        names = told_apart(shortest_names(paths))
        named = replace(self, value=names[find_name(self.value, names, self._where, paths)])
        # A condition cannot express a name that begins or ends with a space.
        return named if Condition.parse(str(named)) == named else self

    def bind(self, spec: ColumnSpec) -> BoundCondition:
        """Return the condition for a column of this kind.

        Raises:
            FormatError: the column's dtype cannot represent the value; or no file of ``source``, or more than one,
                matches.
        """
        where, compare = self._where, _COMPARE[self.operator]
        if self.column == _SOURCE:
            if not is_source(spec):
                raise FormatError(
                    f"{where}: this column source contains no file names; only a column source written by preprocess"
                    " does"
                )
            file = find_name(self.value, listed_names(spec), where)
            return BoundCondition(self.column, compare, np.uint32(file), of_files=True)
        text = _BOOLEANS.get(self.value, self.value)
        if spec.dtype.kind == "f":
            return BoundCondition(self.column, *_float_comparison(self.operator, text, spec.dtype, where))
        limits = np.iinfo(spec.dtype)
        if not _WHOLE.fullmatch(text) or not limits.min <= int(text) <= limits.max:
            raise FormatError(
                f"{where}: the column has dtype {spec.dtype}; the value must be a whole number from {limits.min} to"
                f" {limits.max}"
            )
        return BoundCondition(self.column, compare, spec.dtype.type(int(text)))


def _float_comparison(
    operator: str, text: str, dtype: np.dtype[Any], where: str
) -> tuple[Callable[[Any, Any], NDArray[np.bool_]], Any]:
    """Convert a comparison with a number to one with a value of a float dtype.

    A fraction, or a number with an exponent, is rounded to a value of the dtype. An integer in digits that would be
    rounded is compared exactly: it is greater than the next lower value, less than the next higher one, and equal to
    neither.
    """
    if not _NUMBER.fullmatch(text):
        raise FormatError(f"{where}: the column has dtype {dtype}; the value must be a number")
    number = number_of(text)
    try:
        with np.errstate(over="ignore", under="ignore"):
            value = dtype.type(float(number))
    except OverflowError:
        value = dtype.type(np.inf)
    is_inf = text.endswith("inf")
    is_zero = not text.lower().partition("e")[0].strip("+-0.")
    if np.isinf(value) != is_inf or (value == 0) != is_zero:
        raise FormatError(f"{where}: the number does not fit into {dtype}, it would become {value}")
    if isinstance(number, float) or float(value) == number:
        return _COMPARE[operator], value
    if operator in ("==", "!="):
        return _COMPARE[operator], dtype.type(np.nan)
    if operator in ("<", "<="):
        return np.less_equal, value if float(value) < number else np.nextafter(value, dtype.type(-np.inf))
    with np.errstate(over="ignore"):  # the value after the largest one is infinite
        return np.greater_equal, value if float(value) > number else np.nextafter(value, dtype.type(np.inf))


def bind_all(conditions: Iterable[Condition], columns: Mapping[str, ColumnSpec], where: str) -> list[BoundCondition]:
    """Bind all conditions to columns of these kinds.

    Args:
        conditions: the conditions; all must hold.
        columns: the existing columns, by name.
        where: the name used in errors for the owner of these columns.

    Raises:
        FormatError: a column does not exist, or see ``Condition.bind``.
    """
    tests = []
    for condition in conditions:
        if condition.column not in columns:
            said = on_one_line(str(condition))
            raise FormatError(f"{where}: {no_column(condition.column, columns)}; --where {said} needs it")
        tests.append(condition.bind(columns[condition.column]))
    return tests


def holding(tests: Sequence[BoundCondition], columns: Mapping[str, NDArray[Any]], num_rows: int) -> NDArray[np.bool_]:
    """Return the rows for which all conditions hold, bool [rows]; ``columns`` are values by name, one row for each."""
    holds = np.ones(num_rows, bool)
    for test in tests:
        holds &= test.holds(columns[test.column])
    return holds


def whole_pairs(selected: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """For each pair of sequences 2k and 2k + 1, select both if both are selected, else none: bool [sequences]."""
    return np.repeat(selected.reshape(-1, 2).all(1), 2)


def conditions_of(shard: Shard, where: Iterable[str]) -> list[BoundCondition]:
    """Return conditions on the columns of a shard. See ``Condition.parse`` and ``bind_all`` for errors."""
    conditions = [Condition.parse(text) for text in where]
    needed = {condition.column for condition in conditions} & {*shard.columns}
    specs = {name: shard.columns[name].spec for name in needed}
    if missing := [condition for condition in conditions if condition.column not in needed]:
        specs = {name: column.spec for name, column in shard.columns.items()}  # all are listed
        return bind_all(missing, specs, shard.prefix)
    return bind_all(conditions, specs, shard.prefix)


def selected_sequences(shard: Shard, where: Iterable[str], *, on_progress: Update | None = None) -> NDArray[np.bool_]:
    """Return the sequences of a shard for which all conditions hold, bool [sequences].

    A condition on a column per pack applies to all sequences of the pack. A condition on a column per token holds if it
    does for all tokens of the sequence. For a row with several values, it must hold for all. A pair is selected if both
    of its sequences are.

    Args:
        shard: the shard; all kinds of columns work, including attached ones.
        where: conditions in the form of ``Condition.parse``.
        on_progress: called after each window with its tokens and packs.

    Raises:
        FormatError: a condition is invalid, or the shard does not have its column.
        CorruptShardError: the column ``pair`` does not form pairs.
    """
    tests = conditions_of(shard, where)
    selected = np.ones(shard.header.num_sequences, bool)
    for window in windows(shard.files, columns={test.column: shard.columns[test.column] for test in tests}):
        last = window.first_sequence + len(window.bounds) - 1
        for test in tests:
            selected[window.first_sequence : last] &= _of_sequences(test, window)
        if on_progress:
            on_progress(window.num_tokens, len(window))
    return selected if pair_numbers(shard) is None else whole_pairs(selected)


def _of_sequences(test: BoundCondition, window: Window) -> NDArray[np.bool_]:
    column = window.columns[test.column]
    holds = test.holds(column.values)
    if column.spec.per == "pack":
        return np.repeat(holds, np.diff(window.sequence_offsets))
    if column.spec.per == "token":
        return np.logical_and.reduceat(holds, window.bounds[:-1])
    return holds
