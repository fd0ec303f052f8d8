"""Columns of every pyarrow type: a needed field is read or rejected in one line, and other fields change nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_types import ROWS, columns, is_of_json, types, values_of
from test_chat_tables import KINDS, PLACES, chats, data_of, prints_of, run, write

from megatron_sft_idx import open_dataset
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.chat.values import read_values
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.tokenize.encoding import read_row

# Types that pyarrow can read but not create.
_NOT_MADE = {"Type_INTERVAL_DAY_TIME", "Type_INTERVAL_MONTHS"}


def test_no_type_is_missing() -> None:
    ids = {kind.id for kind in types().values()}
    missing = {name for name in dir(pa.lib) if name.startswith("Type_") and getattr(pa.lib, name) not in ids}
    assert missing <= _NOT_MADE


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_few_types_cannot_be_written(kind: str) -> None:
    """The number of tested types is checked, so that no type is left out without notice."""
    made = [how for places in columns(kind).values() for how in places]
    assert len(made) > (750 if kind == "parquet" else 1100)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_all_types_are_read_as_they_are(kind: str, tmp_path: Path) -> None:
    compared = 0
    for number, places in enumerate(columns(kind).values()):
        table = pa.table(places | {"k": ["a", "b", "c"]})
        rows = data_of(path := write(tmp_path / str(number), kind, table))
        assert [row["k"] for row in rows] == ["a", "b", "c"]
        prints_of(path)
        for how, array in places.items():
            if is_of_json(array.type):
                expected = [read_values({"x": values_of(value, array.type)})[0] for value in array.to_pylist()]
                assert repr([row.get(how) for row in rows]) == repr([each.get("x") for each in expected]), array
                compared += 1
    assert compared > 100


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_all_types_change_nothing(kind: str, tmp_path: Path) -> None:
    plain = pa.table({"messages": pa.array(chats())})
    assert run(tmp_path / "plain", write(tmp_path / "in", kind, plain)).code == 0
    others = {f"{name} {how}": array for name, places in columns(kind).items() for how, array in places.items()}
    source = write(tmp_path / "more in", kind, pa.table({"messages": plain["messages"], **others}))
    done = run(tmp_path / "more", source)
    assert done.code == 0, done.err
    for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx"):
        assert (tmp_path / f"more{suffix}").read_bytes() == (tmp_path / f"plain{suffix}").read_bytes()


def test_needed_fields_of_all_types_are_read_or_refused(tmp_path: Path) -> None:
    """Each type is tested in a few places. Each row is read, or rejected in one line with the field's name."""
    chance = random.Random(7)
    refused = 0
    for number, (name, places) in enumerate(columns("arrow").items()):
        for place in chance.sample([*PLACES], 3):
            how = chance.choice([*places])
            path = write(tmp_path / f"{number} {place}", "arrow", pa.table(PLACES[place](places[how])))
            rows = data_of(path)
            assert len(rows) == ROWS
            for row in rows:
                for options in (RowOptions(), RowOptions(kind="preference"), RowOptions(kind="kto")):
                    error = error_of(row, options)
                    assert "\n" not in error, (name, place, how)
                    refused += bool(error)
    assert refused > 500


def error_of(row: Any, options: RowOptions) -> str:
    try:
        read_row(row, options)
    except RowError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "name", ["timestamp[ns, tz=Mars/Olympus_Mons]", "decimal256(76, 76)", "duration[s]", "halffloat"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_in_one_line(name: str, kind: str, tmp_path: Path) -> None:
    tools = columns(kind)[name]["list"]
    path = write(tmp_path / "in", kind, pa.table({"messages": pa.array(chats()), "tools": tools}))
    done = run(tmp_path / "x", path)
    assert done.code in (0, 1)
    assert done.err.count("\n") == done.code


# ---- packs in Parquet ----

_LENGTHS = {"input_ids": pa.int32(), "loss_mask": pa.uint8(), "seq_start_id": pa.int32()}
_PACKS = dict(zip(_LENGTHS, ([[1, 2, 3], [4], [5]], [[1, 1, 0], [1], [0]], [[0, 1], [0], [0]]), strict=True))
PACKS = {name: pa.array(_PACKS[name], pa.list_(kind)) for name, kind in _LENGTHS.items()}


def test_other_fields_of_packs_are_never_read(tmp_path: Path) -> None:
    for number, places in enumerate(columns("parquet").values()):
        others = {f"input_ids.{how}": array for how, array in places.items()} | places
        packs = open_dataset(write(tmp_path / str(number), "parquet", pa.table(PACKS | others)))
        assert [packs[i]["input_ids"].tolist() for i in range(3)] == _PACKS["input_ids"]


def test_fields_of_packs_are_read_or_refused(tmp_path: Path) -> None:
    chance = random.Random(8)
    for number, places in enumerate(columns("parquet").values()):
        for how, array in places.items():
            needed = {chance.choice([*PACKS]): array}
            path = write(tmp_path / f"{number} {how}", "parquet", pa.table(PACKS | needed))
            for kind in (None, "parquet"):
                said = error_of_packs(path, kind)
                assert not said or str(path) in said
                assert "\n" not in said


def error_of_packs(path: Path, kind: Any) -> str:
    try:
        packs = open_dataset(path, format=kind)
        assert all(len(packs[i]["input_ids"]) for i in range(3))
    except (FormatError, SequenceError) as error:
        return str(error)
    return ""
