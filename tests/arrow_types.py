"""All kinds of pyarrow types, with values for each, including the strangest values that the bytes allow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 3


class Unknown(pa.ExtensionType):
    """An extension type that is never registered, so no other program knows it."""

    def __init__(self, storage: pa.DataType) -> None:
        super().__init__(storage, "acme.unknown")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"\xff\x00"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Unknown:
        return cls(storage_type)


_UNITS = ("s", "ms", "us", "ns")
_ZONES = (None, "UTC", "Mars/Olympus_Mons", "+99:99", "")
_PLAIN = "null bool_ int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 date32 date64"
_PLAIN += " string large_string string_view binary large_binary binary_view month_day_nano_interval"


@cache
def flat_types() -> dict[str, pa.DataType]:
    """Return the types without child arrays, by name."""
    found = [getattr(pa, name)() for name in _PLAIN.split()]
    found += [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"), pa.binary(3), pa.binary(0)]
    found += [pa.timestamp(unit, zone) for unit, zone in itertools.product(_UNITS, _ZONES)]
    found += [pa.duration(unit) for unit in _UNITS]
    for bits, digits in {32: 9, 64: 18, 128: 38, 256: 76}.items():
        make = getattr(pa, f"decimal{bits}")
        found += [make(width, scale) for width, scale in ((1, 0), (digits, 0), (digits, digits), (digits, -3), (5, 2))]
    return {str(kind): kind for kind in found}


@cache
def types() -> dict[str, pa.DataType]:
    """Return flat types and nested types, by name."""
    text, number, time = pa.string(), pa.int64(), pa.timestamp("ns")
    fields = [pa.field("a", pa.float16()), pa.field("b", pa.decimal256(40, 3)), pa.field("c", pa.string_view())]
    found = [*flat_types().values(), pa.struct(fields), pa.struct([])]
    for inner in (text, number, time, pa.binary_view(), pa.struct(fields)):
        found += [make(inner) for make in (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)]
        found += [pa.list_(inner, 2), pa.list_(inner, 0), pa.map_(text, inner), pa.map_(number, inner)]
        found += [pa.map_(pa.large_string(), inner), pa.map_(time, inner)]
        found += [pa.dictionary(index, inner) for index in (pa.int8(), pa.uint16(), pa.int64())]
        found += [pa.run_end_encoded(ends, inner) for ends in (pa.int16(), pa.int32(), pa.int64())]
    found += [make(fields) for make in (pa.sparse_union, pa.dense_union)]
    found += [pa.sparse_union(fields, [7, 5, 3])]
    found += [pa.bool8(), pa.uuid(), pa.json_(), pa.opaque(pa.binary(), "kind", "vendor")]
    found += [pa.fixed_shape_tensor(pa.int32(), [2, 3]), pa.fixed_shape_tensor(pa.float64(), [2], ["x"])]
    named = {str(kind): kind for kind in found}
    named["JSON of large text"] = pa.json_(pa.large_string())
    named |= {f"opaque {inner}": pa.opaque(inner, "kind", "vendor") for inner in (pa.null(), text, pa.list_(number))}
    inside = (text, number, time, pa.list_(number), pa.struct(fields))
    return named | {f"unknown {inner}": Unknown(inner) for inner in inside}


_WORDS = ["", "one", "a longer word than a view holds", "\x00\n\u2028\U0001f600", '{"a": null}', "[1"]


def array_of(  # noqa: PLR0912 - one branch per kind of type
    kind: pa.DataType, count: int, chance: random.Random, nulls: bool = True
) -> pa.Array:
    """Return an array of a type. With ``nulls``, about one value in four is null."""
    is_null = [nulls and chance.random() < 0.25 for _ in range(count)]
    mask = pa.array(is_null, pa.bool_())
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, array_of(kind.storage_type, count, chance, nulls))
    if pa.types.is_null(kind):
        return pa.nulls(count)
    if pa.types.is_struct(kind):
        children = [array_of(field.type, count, chance) for field in kind]
        if not children:
            return pa.array([None if null else {} for null in is_null], kind)
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if pa.types.is_union(kind):
        children = [array_of(field.type, count, chance) for field in kind]
        codes = (
            pa.array([chance.choice(kind.type_codes) for _ in range(count)], pa.int8())
            if children
            else pa.array([], pa.int8())
        )
        names = [field.name for field in kind]
        if kind.mode == "sparse":
            return pa.UnionArray.from_sparse(codes, children, names, kind.type_codes)
        offsets = pa.array([chance.randrange(count) for _ in range(len(codes))], pa.int32())
        return pa.UnionArray.from_dense(codes, offsets, children, names, kind.type_codes)
    if pa.types.is_dictionary(kind):
        values = array_of(kind.value_type, 4, chance)
        indices = [None if null else chance.randrange(4) for null in is_null]
        return pa.DictionaryArray.from_arrays(pa.array(indices, kind.index_type), values)
    if pa.types.is_run_end_encoded(kind):
        ends = pa.array(range(1, count + 1), kind.run_end_type)
        values = array_of(kind.value_type, count, chance)
        try:
            return pa.RunEndEncodedArray.from_arrays(ends, values, kind)
        except pa.ArrowInvalid:  # pyarrow cannot run-end encode decimals with too many digits
            return pa.RunEndEncodedArray.from_arrays(ends, pa.nulls(count, kind.value_type), kind)
    if pa.types.is_map(kind):
        lengths = [chance.randrange(3) for _ in range(count)]
        offsets = pa.array([*itertools.accumulate(lengths, initial=0)], pa.int32())
        keys = array_of(kind.key_type, sum(lengths), chance, nulls=False)
        items = array_of(kind.item_type, sum(lengths), chance)
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=mask)
    if pa.types.is_fixed_size_list(kind) and not kind.list_size:  # from_arrays divides by the list size
        return pa.array([None if null else [] for null in is_null], kind)
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(
            array_of(kind.value_type, count * kind.list_size, chance), type=kind, mask=mask
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = [chance.randrange(3) for _ in range(count)]
        offsets = [*itertools.accumulate(lengths, initial=0)]
        make = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
        width = pa.int64() if pa.types.is_large_list(kind) else pa.int32()
        return make.from_arrays(
            pa.array(offsets, width), array_of(kind.value_type, sum(lengths), chance), type=kind, mask=mask
        )
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        items = array_of(kind.value_type, 5, chance)
        starts = [chance.randrange(4) for _ in range(count)]
        sizes = [chance.randrange(5 - start + 1) for start in starts]
        is_large = pa.types.is_large_list_view(kind)
        make, width = (pa.LargeListViewArray, pa.int64()) if is_large else (pa.ListViewArray, pa.int32())
        return make.from_arrays(pa.array(starts, width), pa.array(sizes, width), items, type=kind, mask=mask)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.array([None if null else chance.choice(_WORDS) for null in is_null], kind)
    if pa.types.is_fixed_size_binary(kind):
        values = [None if null else chance.randbytes(kind.byte_width) for null in is_null]
        return pa.array(values, kind)
    if "binary" in str(kind):
        return pa.array([None if null else chance.randbytes(chance.randrange(20)) for null in is_null], kind)
    return _of_bits(kind, is_null, chance)


def _of_bits(kind: pa.DataType, is_null: list[bool], chance: random.Random) -> pa.Array:
    """Return numbers, times and similar values of random bits, including years beyond 9999, NaN and too many digits."""
    nbytes = -(-kind.bit_width // 8)
    extremes = [b"\x00" * nbytes, b"\xff" * nbytes, b"\xff" * (nbytes - 1) + b"\x7f", b"\x00" * (nbytes - 1) + b"\x80"]
    raw = b"".join(chance.choice([*extremes, chance.randbytes(nbytes)]) for _ in is_null)
    valid = sum(1 << at for at, null in enumerate(is_null) if not null)
    bits = pa.py_buffer(valid.to_bytes(8 * (1 + len(is_null) // 64), "little"))
    return pa.Array.from_buffers(kind, len(is_null), [bits, pa.py_buffer(raw)])


def places(array: pa.Array, chance: random.Random) -> Iterator[tuple[str, pa.Array]]:
    """Yield an array as it is, and inside structs, lists, maps and dictionaries, each with the name of that form."""
    yield "plain", array
    yield "struct", pa.StructArray.from_arrays([array, pa.array(range(len(array)))], ["x", "n"])
    ends = pa.array(range(len(array) + 1), pa.int32())
    yield "list", pa.ListArray.from_arrays(ends, array)
    keys = pa.array(["k"] * len(array))
    yield "map", pa.MapArray.from_arrays(ends, keys, array)
    yield "list of structs", pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays([array], ["x"]))
    indices = pa.array([chance.randrange(len(array)) for _ in range(len(array))], pa.int8())
    yield "dictionary", pa.DictionaryArray.from_arrays(indices, array)
    yield "sliced", pa.concat_arrays([array, array]).slice(1, len(array)) if _can_be_joined(array) else array
    views = pa.ListViewArray.from_arrays(
        pa.array(range(len(array)), pa.int32()), pa.array([1] * len(array), pa.int32()), array
    )
    yield "list view", views


def _can_be_joined(array: pa.Array) -> bool:
    try:
        pa.concat_arrays([array, array])
    except pa.ArrowException:
        return False
    return True


# ---- what pyarrow itself can write ----


def written(array: pa.Array, kind: str) -> bool:
    """Return whether pyarrow can write a column as a file of this kind and reads the same values from it."""
    if kind == "parquet" and "[0]" in str(array.type):
        return False  # pyarrow 26 crashes the process
    sink, table = pa.BufferOutputStream(), pa.table({"k": range(len(array)), "c": array})
    try:
        if kind == "parquet":
            pq.write_table(table, sink)
            found = pq.read_table(sink.getvalue())
        else:
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            found = pa.ipc.open_stream(sink.getvalue()).read_all()
            found.validate()
    except (pa.ArrowException, OSError):
        return False
    try:
        return repr(found["c"].to_pylist()) == repr(array.to_pylist())
    except (ValueError, OverflowError, TypeError, KeyError, pa.ArrowException):
        return True  # Python cannot have these values


@cache
def columns(kind: str) -> dict[str, dict[str, pa.Array]]:
    """Return columns of all types that pyarrow can write as this kind of file, by name of the type and by form."""
    chance = random.Random(kind)
    found: dict[str, dict[str, pa.Array]] = {}
    for name, each in types().items():
        of_type = dict(places(array_of(each, ROWS, chance), chance))
        found[name] = {how: array for how, array in of_type.items() if written(array, kind)}
    return found


# ---- what rows have for them ----

_AS_IN_JSON = {
    "null",
    "bool",
    "string",
    "large_string",
    "string_view",
    "int64",
    "uint64",
    "double",
    "float",
    "halffloat",
}
_AS_IN_JSON |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32)}


def is_of_json(kind: pa.DataType) -> bool:
    """Return whether JSON can represent all values of a type."""
    if pa.types.is_map(kind):
        return str(kind.key_type) in ("string", "large_string") and is_of_json(kind.item_type)
    if pa.types.is_struct(kind):
        return all(is_of_json(field.type) for field in kind)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind) or "list" in str(kind).split("<", 1)[0]:
        return is_of_json(kind.value_type)
    return str(kind) in _AS_IN_JSON


def values_of(value: Any, kind: pa.DataType) -> Any:
    """Return a value of a type as rows must have it. ``value`` is pyarrow's own conversion to Python."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return {key: values_of(item, kind.item_type) for key, item in value}
    if pa.types.is_struct(kind):
        return {field.name: values_of(value[field.name], field.type) for field in kind}
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return values_of(value, kind.value_type)
    if "list" in str(kind).split("<", 1)[0]:
        return [values_of(item, kind.value_type) for item in value]
    return float(value) if "float" in str(kind) or str(kind) == "double" else value
