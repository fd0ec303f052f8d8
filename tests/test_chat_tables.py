"""Columns of every Arrow type: what is needed is read or refused by name, and what is not needed changes nothing."""

from __future__ import annotations

import datetime
import decimal
import json
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import TOKENIZER, command, files_of
from test_chat_files import save_to_disk

from megatron_sft_idx.chat.inputs import expand_inputs, iter_pieces
from megatron_sft_idx.chat.values import Undecoded
from megatron_sft_idx.shard import read_header

_FAR = 2**62 // 1000  # a time in the year 148,000


def _opaque(kind: pa.DataType, name: str = "acme.thing") -> pa.Array:
    return pa.array(["a", None, "c"], kind)


def _binary_text() -> pa.Array:
    return pa.array([b"ok", b"\xff", b"fine"]).view(pa.string())


def _union(dense: bool) -> pa.Array:
    ids, children = pa.array([0, 1, 0], pa.int8()), [pa.array([1, 2, 3]), pa.array(["a", "b", "c"])]
    if dense:
        return pa.UnionArray.from_dense(ids, pa.array([0, 1, 2], pa.int32()), children)
    return pa.UnionArray.from_sparse(ids, children)


_TIME, _DATE = datetime.time(1, 2, 3), datetime.date(2024, 5, 6)
_PLAIN_WORDS = ["one", None, "three"]
# By name: three values of a type, and what rows have for them; None where they are not decoded.
ARRAYS: dict[str, tuple[pa.Array, list[Any] | None]] = {
    "string": (pa.array(_PLAIN_WORDS), _PLAIN_WORDS),
    "large_string": (pa.array(_PLAIN_WORDS, pa.large_string()), _PLAIN_WORDS),
    "string_view": (pa.array(_PLAIN_WORDS, pa.string_view()), _PLAIN_WORDS),
    "null": (pa.nulls(3), [None] * 3),
    "bool": (pa.array([True, None, False]), [True, None, False]),
    "bool8": (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None, 0], pa.int8())), [True, None, False]),
    "uint64": (pa.array([2**64 - 1, None, 0], pa.uint64()), [2**64 - 1, None, 0]),
    "int8": (pa.array([-1, None, 0], pa.int8()), [-1, None, 0]),
    "half": (pa.array([0.5, None, 1.25], pa.float16()), [0.5, None, 1.25]),
    "float": (pa.array([0.5, None, 1.25], pa.float32()), [0.5, None, 1.25]),
    "dictionary": (pa.array(_PLAIN_WORDS).dictionary_encode(), _PLAIN_WORDS),
    "dictionary of views": (
        pa.DictionaryArray.from_arrays(pa.array([1, None, 0]), pa.array(["a", "b"], pa.string_view())),
        ["b", None, "a"],
    ),
    "dictionary of structs": (
        pa.DictionaryArray.from_arrays(pa.array([1, None, 0]), pa.array([{"a": 1}, {"a": 2}])),
        [{"a": 2}, None, {"a": 1}],
    ),
    "run ends": (pa.RunEndEncodedArray.from_arrays([1, 2, 3], _PLAIN_WORDS), _PLAIN_WORDS),
    "list": (pa.array([[1, None], None, []]), [[1, None], None, []]),
    "large_list": (pa.array([["a"], None, []], pa.large_list(pa.string())), [["a"], None, []]),
    "list_view": (pa.array([["a"], None, []], pa.list_view(pa.string())), [["a"], None, []]),
    "list_view of views": (pa.array([["a"], None, []], pa.list_view(pa.string_view())), [["a"], None, []]),
    "fixed list of views": (
        pa.array([["a", "b"], None, ["c", None]], pa.list_(pa.string_view(), 2)),
        [["a", "b"], None, ["c", None]],
    ),
    "fixed list": (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)), [[1, 2], None, [3, 4]]),
    "struct": (pa.array([{"a": 1, "b": None}, None, {"a": None, "b": "x"}]), [{"a": 1}, None, {"b": "x"}]),
    "empty struct": (pa.array([{}, None, {}], pa.struct([])), [{}, None, {}]),
    "map": (
        pa.array([[("a", 1), ("b", None)], None, []], pa.map_(pa.string(), pa.int64())),
        [{"a": 1}, None, {}],
    ),
    "typed JSON": (pa.array(['{"a": null}', None, "[1]"], pa.json_()), [{"a": None}, None, [1]]),
    "timestamp s": (pa.array([0, None, 1], pa.timestamp("s")), None),
    "timestamp ns": (pa.array([1, None, 2], pa.timestamp("ns")), None),
    "timestamp far": (pa.array([_FAR, None, -_FAR], pa.timestamp("ms")), None),
    "timestamp of Mars": (pa.array([1, None, 2], pa.timestamp("us", "Mars/Olympus_Mons")), None),
    "duration": (pa.array([2**62, None, 1], pa.duration("ns")), None),
    "duration far": (pa.array([2**62, None, 1], pa.duration("s")), None),
    "date32": (pa.array([_DATE, None, _DATE], pa.date32()), None),
    "date32 far": (pa.array([2**30, None, 1], pa.int32()).view(pa.date32()), None),
    "date64": (pa.array([_DATE, None, _DATE], pa.date64()), None),
    "time32": (pa.array([_TIME, None, _TIME], pa.time32("ms")), None),
    "time64": (pa.array([_TIME, None, _TIME], pa.time64("ns")), None),
    "interval": (pa.array([(1, 2, 3), None, (4, 5, 6)], pa.month_day_nano_interval()), None),
    "binary": (pa.array([b"\xff", None, b""]), None),
    "binary_view": (pa.array([b"\xff" * 20, None, b""], pa.binary_view()), None),
    "fixed binary": (pa.array([b"ab", None, b"cd"], pa.binary(2)), None),
    "sparse union": (_union(False), None),
    "dense union": (_union(True), None),
    "uuid": (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, None, b"1" * 16], pa.binary(16))), None),
    "map of numbers": (pa.array([[(1, "a")], None, []], pa.map_(pa.int64(), pa.string())), None),
    **{
        f"decimal{width}": (pa.array([decimal.Decimal("1.10"), None, decimal.Decimal(2)], kind), None)
        for width, kind in {
            32: pa.decimal32(5, 2),
            64: pa.decimal64(10, 2),
            128: pa.decimal128(30, 2),
            256: pa.decimal256(60, 2),
        }.items()
    },
}


class _Thing(pa.ExtensionType):
    """A type that no other program knows; what is read must not depend on whether this one does."""

    def __init__(self) -> None:
        super().__init__(pa.string(), "acme.thing")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> _Thing:
        return cls()


ARRAYS["extension"] = (pa.ExtensionArray.from_storage(_Thing(), pa.array(_PLAIN_WORDS)), _PLAIN_WORDS)
# Parquet has no such types.
_NOT_IN_PARQUET = {"sparse union", "dense union", "interval", "run ends", "empty struct", "dictionary of structs"}
# pyarrow cannot write these within lists.
_NOT_IN_PARQUET |= {"string_view", "binary_view", "dictionary of views", "list_view of views", "fixed list of views"}
KINDS = ("parquet", "arrow", "saved")


def write(folder: Path, kind: str, table: pa.Table) -> Path:
    """A table as a file, or as a folder of save_to_disk."""
    folder.mkdir(exist_ok=True)
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        save_to_disk(path, [table.slice(0, 2), table.slice(2)])
    return path


def data_of(path: Path, piece_nbytes: int = 8 << 20) -> list[Any]:
    pieces = iter_pieces(expand_inputs([path]), piece_nbytes=piece_nbytes)
    return [row.data for piece in pieces for row in piece.rows()]


def prints_of(path: Path) -> list[str]:
    return [piece.fingerprint() for piece in iter_pieces(expand_inputs([path]))]


def chats(count: int = 3, **of_answers: list[Any]) -> list[Any]:
    """Chats of two messages each; ``of_answers`` has a field's value in each answer."""
    return [
        [
            {"role": "user", "content": f"Is it {n}?"},
            {"role": "assistant", "content": f"Yes, {n}.", **{name: each[n] for name, each in of_answers.items()}},
        ]
        for n in range(count)
    ]


def run(prefix: Path, source: Path, *options: object) -> Any:
    given = ("--tokenizer-model", TOKENIZER, "--seq-length", 512, "--output-prefix", prefix, "--workers", 0)
    return command("preprocess", "--input", source, *given, *options)


def cases() -> Iterator[Any]:
    for name in ARRAYS:
        for kind in KINDS:
            if kind != "parquet" or name not in _NOT_IN_PARQUET:
                yield pytest.param(name, kind, id=f"{name}-{kind}")


def nested(array: pa.Array) -> dict[str, pa.Array]:
    """The values as they are, and in lists and structs."""
    struct = pa.StructArray.from_arrays([array, pa.array([7, 8, 9])], ["x", "n"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), struct)
    return {"plain": array, "struct": struct, "list of structs": lists}


@pytest.mark.parametrize(("name", "kind"), [*cases()])
def test_values_are_those_of_json_or_are_not_decoded(name: str, kind: str, tmp_path: Path) -> None:
    array, expected = ARRAYS[name]
    for how, values in nested(array).items():
        rows = data_of(write(tmp_path / how, kind, pa.table({"c": values, "k": ["a", "b", "c"]})))
        assert [row["k"] for row in rows] == ["a", "b", "c"]
        if how == "plain":
            found = [row.get("c") for row in rows]
        elif how == "struct":
            found = [row["c"].get("x") for row in rows]
        else:
            found = [row["c"][0].get("x") for row in rows]
        if expected is not None:
            assert repr(found) == repr(expected)
            continue
        is_null = [not valid for valid in array.is_valid().to_pylist()]
        assert [value is None for value in found] == is_null
        assert all(value is None or type(value) is Undecoded for value in found)
        named = next(value for value in found if value is not None)
        assert named.field == {"plain": "c", "struct": "c.x", "list of structs": "c[].x"}[how]


def columns_of(kind: str) -> dict[str, pa.Array]:
    """Columns of all types at once, at every depth."""
    return {
        f"{name} {how}": values
        for name, (array, _) in ARRAYS.items()
        if kind != "parquet" or name not in _NOT_IN_PARQUET
        for how, values in nested(array).items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_nobody_needs_change_nothing(kind: str, tmp_path: Path) -> None:
    plain = pa.table({"messages": pa.array(chats())})
    assert run(tmp_path / "plain", write(tmp_path / "in", kind, plain)).code == 0
    columns = columns_of(kind)
    assert len(columns) > 100
    more = pa.table({"messages": plain["messages"], **columns})
    assert run(tmp_path / "more", write(tmp_path / "more in", kind, more)).code == 0
    # Indexes and columns hold the fingerprint of the input, of which other columns are a part.
    for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx"):
        assert (tmp_path / f"more{suffix}").read_bytes() == (tmp_path / f"plain{suffix}").read_bytes()
    headers = [read_header(tmp_path / name).metadata for name in ("plain", "more")]
    assert headers[0]["notes"] == headers[1]["notes"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_decoded_is_no_part_of_the_fingerprint(kind: str, tmp_path: Path) -> None:
    for name, (array, expected) in ARRAYS.items():
        if name in _NOT_IN_PARQUET and kind == "parquet":
            continue
        turned = pa.chunked_array([array.slice(i, 1) for i in (2, 1, 0)])
        prints = [
            prints_of(write(tmp_path / f"{name} {i}", kind, pa.table({"c": each, "n": [1, 2, 3]})))
            for i, each in enumerate((array, turned))
        ]
        assert (prints[0] == prints[1]) == (expected in (None, [None] * 3, [{}, None, {}])), name
