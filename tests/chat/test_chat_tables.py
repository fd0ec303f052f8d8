"""Columns of every Arrow type: needed fields are read or rejected by name, and other fields change nothing."""

from __future__ import annotations

import datetime
import decimal
import json
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import TOKENIZER, command, sequences_of, write_rows
from test_chat_files import save_to_disk

from megatron_sft_idx import preprocess
from megatron_sft_idx.chat.chat_rows import to_sequence_source
from megatron_sft_idx.chat.inputs import expand_inputs, iter_pieces
from megatron_sft_idx.chat.tables import _Column, _values
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.chat.values import JsonText, Undecoded, read_values
from megatron_sft_idx.shard import read_header

ROWS = Path(__file__).parents[1] / "rows"
_FAR = 2**62 // 1000  # a time in the year 148,000


def _union(dense: bool) -> pa.Array:
    ids, children = pa.array([0, 1, 0], pa.int8()), [pa.array([1, 2, 3]), pa.array(["a", "b", "c"])]
    if dense:
        return pa.UnionArray.from_dense(ids, pa.array([0, 1, 2], pa.int32()), children)
    return pa.UnionArray.from_sparse(ids, children)


_TIME, _DATE = datetime.time(1, 2, 3), datetime.date(2024, 5, 6)
_PLAIN_WORDS = ["one", None, "three"]
# By name: three values of a type, and the values in rows; None if they are not decoded.
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
    """An extension type that no other program knows. Results must not depend on whether it is registered."""

    def __init__(self) -> None:
        super().__init__(pa.string(), "acme.thing")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> _Thing:
        return cls()


ARRAYS["extension"] = (pa.ExtensionArray.from_storage(_Thing(), pa.array(_PLAIN_WORDS)), _PLAIN_WORDS)
# Types that Parquet does not have.
_NOT_IN_PARQUET = {"sparse union", "dense union", "interval", "run ends", "empty struct", "dictionary of structs"}
# Types that only images and audio may have. pyarrow cannot write them within lists.
BINARY = ("binary", "binary_view", "fixed binary")
_NOT_IN_PARQUET |= {"string_view", "binary_view", "dictionary of views", "list_view of views", "fixed list of views"}
KINDS = ("parquet", "arrow", "saved")


def write(folder: Path, kind: str, table: pa.Table) -> Path:
    """Write a table as a file, or as a folder of save_to_disk."""
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
    """Return chats of two messages each. ``of_answers`` has the value of a field for each answer."""
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
    """Return the values as they are, and in lists and structs."""
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
        assert all(value is None or isinstance(value, Undecoded) for value in found)
        if name in BINARY:
            assert [value and value.read() for value in found] == array.to_pylist()
        named = next(value for value in found if value is not None)
        assert named.field == {"plain": "c", "struct": "c.x", "list of structs": "c[].x"}[how]


def columns_of(kind: str) -> dict[str, pa.Array]:
    """Return columns of all types, at every depth."""
    return {
        f"{name} {how}": values
        for name, (array, _) in ARRAYS.items()
        if kind != "parquet" or name not in _NOT_IN_PARQUET
        for how, values in nested(array).items()
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_nobody_needs_change_nothing(kind: str, tmp_path: Path) -> None:
    plain = pa.table({"messages": pa.array(chats())})
    assert run(tmp_path / "plain", write(tmp_path / "in", kind, plain)).code == 0
    columns = columns_of(kind)
    assert len(columns) > 100
    more = pa.table({"messages": plain["messages"], **columns})
    assert run(tmp_path / "more", write(tmp_path / "more in", kind, more)).code == 0
    # The files left out here contain the fingerprint of the input, which covers other columns too.
    for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx"):
        assert (tmp_path / f"more{suffix}").read_bytes() == (tmp_path / f"plain{suffix}").read_bytes()
    headers = [read_header(tmp_path / name).metadata for name in ("plain", "more")]
    assert headers[0]["notes"] == headers[1]["notes"]


def test_a_length_that_is_no_number_of_tokens_is_not_needed(tmp_path: Path) -> None:
    for name in ("duration", "decimal128"):
        (row, *_) = data_of(write(tmp_path / name, "arrow", pa.table(TOKENS | {"length": ARRAYS[name][0]})))
        assert to_sequence_source(row).input_ids.tolist() == [1, 2]


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
        is_left_out = name not in BINARY and expected in (None, [None] * 3, [{}, None, {}])
        assert (prints[0] == prints[1]) == is_left_out, name


# ---- fields that are needed ----


def one_each(items: pa.Array) -> pa.Array:
    """Return a list of one item for each row."""
    return pa.ListArray.from_arrays(pa.array(range(len(items) + 1), pa.int32()), items)


def struct(**fields: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([*fields.values()], [*fields])


def answers(**fields: pa.Array) -> dict[str, pa.Array]:
    """Return rows of one message, an answer with these fields."""
    plain = {"role": pa.array(["assistant"] * 3), "content": pa.array(["Yes."] * 3)}
    return {"messages": one_each(struct(**{**plain, **fields}))}


def calls(arguments: pa.Array) -> dict[str, pa.Array]:
    return answers(tool_calls=one_each(struct(name=pa.array(["f"] * 3), arguments=arguments)))


PAIRS = {"prompt": pa.array(["Is it?"] * 3), "completion": pa.array(["Yes."] * 3)}
TOKENS = {"input_ids": pa.array([[1, 2]] * 3), "loss_mask": pa.array([[0, 1]] * 3)}
# Functions that put a value into a field that is read, by the name of the field in errors.
PLACES: dict[str, Callable[[pa.Array], dict[str, pa.Array]]] = {
    "messages": lambda values: {"messages": values},
    "messages[]": lambda values: {"messages": one_each(values)},
    **{name: lambda values, name=name: PAIRS | {name: values} for name in PAIRS},
    **{name: lambda values, name=name: TOKENS | {name: one_each(values)} for name in TOKENS},
    **{
        name: lambda values, name=name: answers() | {name: values}
        for name in ("tools", "system", "chat_template_kwargs", "images", "chosen")
    },
    **{
        f"messages[].{name}": lambda values, name=name: answers(**{name: values})
        for name in ("role", "content", "tool_calls", "name", "weight", "train", "reasoning_content")
    },
    "messages[].tool_calls[].arguments": calls,
    "messages[].tool_calls[].arguments.x": lambda values: calls(struct(x=values)),
    "tools[].parameters.x": lambda values: (
        answers() | {"tools": one_each(struct(name=pa.array(["f"] * 3), parameters=struct(x=values)))}
    ),
    "chat_template_kwargs.x": lambda values: answers() | {"chat_template_kwargs": struct(x=values)},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_field_that_is_needed_is_read_or_refused_by_name(place: str, tmp_path: Path) -> None:
    for name, (array, expected) in ARRAYS.items():
        rows = data_of(write(tmp_path / name, "arrow", pa.table(PLACES[place](array))))
        outcomes = []
        for row in rows:
            try:
                outcomes.append(to_sequence_source(row))
            except RowError as error:
                outcomes.append(error)
        if expected is None:
            assert isinstance(outcomes[0], RowError), name
            assert place in str(outcomes[0])
            assert "\n" not in str(outcomes[0])


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["timestamp ns", "timestamp of Mars", "decimal128", "binary", "typed JSON"])
def test_an_error_names_file_row_and_field(name: str, kind: str, tmp_path: Path) -> None:
    array = pa.array(["{}", '{"x": 1}', '{"x": 1,}'], pa.json_()) if name == "typed JSON" else ARRAYS[name][0]
    tools = one_each(struct(name=pa.array(["f"] * 3), parameters=struct(x=array)))
    source = write(tmp_path / "in", kind, pa.table({"messages": pa.array(chats()), "tools": tools}))
    refused = run(tmp_path / "x", source)
    row = 3 if name == "typed JSON" else 1
    path = source if kind != "saved" else source / f"data-0000{int(row == 3)}-of-00002.arrow"
    row = 1 if kind == "saved" else row
    said = {
        "typed JSON": "has the type JSON, but is not valid JSON: ",
        "timestamp ns": "is timestamp[ns], expected a list of tool schemas; cast the column",
    }
    assert refused.code == 1
    assert f"error: {path}:{row}: tools[].parameters.x {said.get(name, 'is ')}" in refused.err
    assert refused.err.count("\n") == 1
    skipped = run(tmp_path / "x", source, "--on-bad-row", "skip")
    assert skipped.code == 0
    assert f"skipped       {2 - (name == 'typed JSON')}" in skipped.out


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_messages_that_no_template_writes_change_nothing(kind: str, tmp_path: Path) -> None:
    assert run(tmp_path / "plain", write(tmp_path / "in", kind, pa.table(answers()))).code == 0
    columns = {
        name.replace(" ", "_"): each
        for name, each in columns_of(kind).items()
        if "timestamp" in name or "decimal" in name
    }
    source = write(tmp_path / "more in", kind, pa.table(answers(**columns)))
    assert run(tmp_path / "more", source).code == 0
    for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx"):
        assert (tmp_path / f"more{suffix}").read_bytes() == (tmp_path / f"plain{suffix}").read_bytes()
    assert run(tmp_path / "some", source, "--dedup", "exact").code == 0
    template = tmp_path / "template.jinja"
    for written in (
        "{{ message['timestamp_ns_plain'] }}",
        "{{ message['timestamp_ns_struct'] }}",
        "{{ message | tojson }}",
    ):
        template.write_text(
            "{% for message in messages %}{{ message.role }}: {{ message.content }}" + written + "{% endfor %}"
        )
        refused = run(tmp_path / "y", source, "--chat-template", template)
        assert refused.code == 1
        named = re.search(r"messages\[\]\.timestamp_ns_(plain|struct\.x) is timestamp\[ns\]", refused.err)
        assert named or "Undecoded" in refused.err


def test_nothing_depends_on_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pandas, pyarrow creates pandas Timestamps, and fails on times that these cannot hold."""
    table = pa.table({"messages": pa.array(chats()), **columns_of("arrow")})
    source = write(tmp_path / "in", "arrow", table)
    before = prints_of(source), [list(row) for row in data_of(source)]

    class Pandas(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"pandas.{name} was used")

    monkeypatch.setitem(sys.modules, "pandas", Pandas("pandas"))
    assert (prints_of(source), [list(row) for row in data_of(source)]) == before


# ---- typed JSON ----


def random_json(chance: random.Random, depth: int = 3) -> Any:
    kinds = ["text", "number", "float", "bool", "null", *(["list", "object"] * 2 if depth else [])]
    kind = chance.choice(kinds)
    if kind == "list":
        return [random_json(chance, depth - 1) for _ in range(chance.randrange(4))]
    if kind == "object":
        return {chance.choice('abc"é\n') * chance.randrange(1, 3): random_json(chance, depth - 1) for _ in range(3)}
    simple = {"text": 'say "null" \\ ✓', "number": 2**70, "float": 0.25, "bool": True, "null": None}
    return simple[kind]


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("storage", [pa.string(), pa.large_string(), pa.string_view()])
@pytest.mark.parametrize("kind", KINDS)
def test_typed_json_is_parsed_at_any_depth_as_it_is(kind: str, storage: pa.DataType, tmp_path: Path) -> None:
    chance = random.Random(1)
    typed = pa.json_(storage)
    for number in range(30):
        values = [random_json(chance) for _ in range(3)]
        texts = pa.array([json.dumps(value) for value in values]).cast(storage)
        array = pa.ExtensionArray.from_storage(typed, texts)
        if storage == pa.string_view() and kind == "parquet":
            return  # pyarrow cannot write it
        for how, deep in nested(array).items():
            rows = data_of(write(tmp_path / f"{number} {how}", kind, pa.table({"c": deep})), 64)
            if how == "plain":
                found, expected = [row.get("c") for row in rows], values
            else:
                found, expected = (
                    [row["c"] for row in rows],
                    [{"x": value, "n": 7 + i} for i, value in enumerate(values)],
                )
                expected = [[each] for each in expected] if how == "list of structs" else expected
            assert found == expected


def test_typed_json_is_known_by_the_metadata_of_its_field(tmp_path: Path) -> None:
    """If pyarrow does not know the type, it returns text, and the metadata of the field has the type."""
    field = pa.field("x", pa.string(), metadata={b"ARROW:extension:name": b"arrow.json"})
    inner = pa.StructArray.from_arrays([pa.array(['{"a": null}', None, "[]"])], fields=[field])
    for name, array, of, text in (
        ("plain", inner.field(0), field, "c"),
        ("struct", inner, pa.field("c", inner.type), "c.x"),
    ):
        values = _values(_Column.of(array, of, "c"))
        values = values if name == "plain" else [each["x"] for each in values]
        assert [type(each) for each in values] == [JsonText, type(None), JsonText]
        assert values[0].field == text


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_datasets_make_the_text_of_their_json_lines(kind: str, tmp_path: Path) -> None:
    """Rows with typed JSON give the same text as plain rows in transformers."""
    for name in ("typed_json_tools", "typed_json_messages"):
        table = pq.read_table(ROWS / f"{name}.parquet")
        rows = [plain_json(row) for row in table.to_pylist()]
        lines = write_rows(tmp_path / f"{name}.jsonl", rows)
        assert run(tmp_path / name, lines).code == 0
        assert run(tmp_path / f"{name}-{kind}", write(tmp_path / f"{name} in", kind, table)).code == 0
        ours, theirs = (sequences_of(tmp_path / each) for each in (f"{name}-{kind}", name))
        assert [ids.tolist() for ids, _ in ours] == [ids.tolist() for ids, _ in theirs]
        assert [mask.tolist() for _, mask in ours] == [mask.tolist() for _, mask in theirs]


def plain_json(value: Any) -> Any:
    """Return a value with each string that is a JSON object parsed."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(plain_json, value))
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def test_tables_of_python_are_read(tmp_path: Path) -> None:
    table = pq.read_table(ROWS / "typed_json_messages.parquet")
    given = {"tokenizer": TOKENIZER, "seq_length": 512, "workers": 0}
    preprocess(ROWS / "typed_json_messages.parquet", output_prefix=tmp_path / "file", **given)
    for name, rows in (
        ("table", table),
        ("reader", table.to_reader()),
        ("batch", table.combine_chunks().to_batches()[0]),
    ):
        preprocess(rows, output_prefix=tmp_path / name, **given)
        assert (tmp_path / f"{name}.bin").read_bytes() == (tmp_path / "file.bin").read_bytes()


# ---- nulls ----


def fill(value: Any, like: list[Any]) -> Any:
    """Return a value with a null for each key that only other values have, as in a table."""
    if isinstance(value, dict):
        keys = {key: None for each in like if isinstance(each, dict) for key in each}
        of = {key: [each[key] for each in like if isinstance(each, dict) and key in each] for key in keys}
        return {key: fill(value[key], of[key]) if key in value else None for key in keys}
    if isinstance(value, list):
        items = [item for each in like if isinstance(each, list) for item in each]
        return [fill(item, items) for item in value]
    return value


def called(chance: random.Random, share: float = 0.5) -> dict[str, Any]:
    """Return a chat with calls. Their arguments have different keys, with one type per key."""
    values = {"city": "Paris", "limit": 3, "deep": {"a": 1, "b": "x"}, "list": [{"p": 1}, {"q": 2.5}]}

    def some() -> dict[str, Any]:
        chosen = {name: value for name, value in values.items() if chance.random() < share}
        if "deep" in chosen:
            chosen["deep"] = {name: value for name, value in values["deep"].items() if chance.random() < share}
        return chosen

    call = {"type": "function", "function": {"name": "f", "arguments": some()}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": some()}}}
    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {
        "messages": [*messages, {"role": "tool", "content": "Yes."}, {"role": "assistant", "content": "Yes."}],
        "tools": [tool],
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_nulls_that_fill_missing_keys_change_no_text_and_are_counted(kind: str, tmp_path: Path) -> None:
    chance = random.Random(2)
    rows = [called(chance, share=1), *(called(chance) for _ in range(20))]
    filled = fill(rows, [rows])
    texts = {}
    sources = {
        "lines": write_rows(tmp_path / "lines.jsonl", rows),
        "filled": write_rows(tmp_path / "filled.jsonl", filled),
        "table": write(tmp_path / "in", kind, pa.Table.from_pylist(rows)),
    }
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ tools | tojson }}{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
    )
    notes = {}
    for name, source in sources.items():
        done = run(tmp_path / name, source, "--chat-template", template, "--packing", "none", "--train-on", "all")
        assert done.code == 0, done.err
        texts[name] = [ids.tolist() for ids, _ in sequences_of(tmp_path / name)]
        notes[name] = read_header(tmp_path / name).metadata["notes"]
    assert texts["lines"] == texts["filled"] == texts["table"]
    assert "nulls_in_arguments" not in notes["lines"]
    assert notes["filled"]["nulls_in_arguments"] == notes["table"]["nulls_in_arguments"] > 20
    assert notes["filled"]["nulls_in_tools"] == notes["table"]["nulls_in_tools"] > 20
    assert f"{notes['table']['nulls_in_arguments']:,} nulls left out of tool call arguments" in done.out


def test_nulls_of_json_text_stay() -> None:
    call = {"name": "f", "arguments": '{"limit": null}'}
    row, notes = read_values(
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "system": None}
    )
    (message,) = to_sequence_source(row).messages
    assert message["tool_calls"][0]["function"]["arguments"] == {"limit": None}
    assert (row.keys(), notes) == ({"messages"}, {})
    typed = read_values({"tool_calls": [{"name": "f", "arguments": JsonText('{"limit": null}', "x")}]})
    assert typed == ({"tool_calls": [{"name": "f", "arguments": {"limit": None}}]}, {})
    filled = read_values(
        {"tool_calls": [{"name": "f", "arguments": {"limit": None, "deep": {"a": None}, "list": [None]}}]}
    )
    assert filled == (
        {"tool_calls": [{"name": "f", "arguments": {"deep": {}, "list": [None]}}]},
        {"nulls_in_arguments": 2},
    )


def test_the_case_of_filled_nulls(tmp_path: Path) -> None:
    source = ROWS / "null_filled_arguments.jsonl"
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    done = run(tmp_path / "lines", source)
    assert "2 nulls left out of tool call arguments" in done.out
    assert run(tmp_path / "table", write(tmp_path / "in", "parquet", pa.Table.from_pylist(rows))).code == 0
    assert (tmp_path / "lines.bin").read_bytes() == (tmp_path / "table.bin").read_bytes()
