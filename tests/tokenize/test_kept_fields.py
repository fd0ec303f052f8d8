"""Fields of rows become columns with exact values, for any engine; and they select rows and weight losses."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import TOKENIZER, command, files_of, preprocess, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupted_runs import be_quick

from megatron_sft_idx import preprocess as preprocess_rows
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout.column import COLUMN_DTYPES
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.tokenize.kept_fields import read_keep_fields, values_of

KEEP = ("--keep-field", "score=float32", "--keep-field", "rank=int16", "--keep-field", "good=uint8")


def rows(count: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {
            "messages": [
                {"role": "user", "content": f"Is it {number}?"},
                {"role": "assistant", "content": " ".join(["yes"] * chance.randint(1, 60))},
            ],
            "rank": number,
            "score": chance.choice([0, 0.5, 1, 2.25]),
            "good": chance.random() < 0.5,
        }
        for number in range(count)
    ]


def kept(prefix: Path | str, *names: str) -> list[tuple[Any, ...]]:
    """Return for every sequence its ids, its mask, and its values of these columns."""
    shard, found = Shard(prefix, columns=[*names]), []
    for number in range(len(shard)):
        values = zip(*(shard[number][name].tolist() for name in names), strict=True)
        for (ids, mask), row in zip(shard.sequences(number), values, strict=True):
            found.append((ids.tobytes(), tuple(mask.tolist()), *row))
    return sorted(found)


def test_every_sequence_has_the_values_of_its_row_whoever_works(tmp_path: Path, monkeypatch: Any) -> None:
    be_quick(monkeypatch)
    given = rows()
    source = write_rows(tmp_path / "rows.jsonl", given)
    common = ("--input", source, *KEEP, "--overlong", "split", "--seq-length", 24)
    assert preprocess(tmp_path / "one/x", *common, "--keep-corpus").code == 0
    shard = Shard(tmp_path / "one/x")
    kinds = {name: shard.columns[name].spec.kind for name in ("score", "rank", "good")}
    assert kinds == {
        "score": ("sequence", "<f4", 1, "token"),
        "rank": ("sequence", "<i2", 1, "token"),
        "good": ("sequence", "|u1", 1, "token"),
    }
    found = kept(tmp_path / "one/x", "source", "rank", "score", "good")
    assert len(found) > len(given)  # long sequences are cut
    for _, _, (file, row), rank, score, good in found:
        assert (file, row) == (0, rank)
        assert (score, good) == (given[rank]["score"], int(given[rank]["good"]))
    corpus = kept(tmp_path / "one/x.unpacked", "rank", "score", "good")
    assert sorted(rank for *_, rank, _, _ in corpus) == [*range(60)]
    for number, more in enumerate((("--workers", 2), ("--workers", 0))):
        assert preprocess(tmp_path / f"{number}/x", *common, *more).code == 0
        assert files_of(tmp_path / f"{number}/x") == files_of(tmp_path / "one/x")
    assert verify_shard(tmp_path / "one/x", full=True).ok
    assert shard.header.metadata["options"]["keep_fields"] == {"good": "uint8", "rank": "int16", "score": "float32"}
    # Another dtype gives another shard and other parts.
    other = preprocess(tmp_path / "0/x", *common, "--keep-field", "more")
    assert (other.code, "keep fields more was None, is 'float64'" in other.err) == (1, True), other


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("corpus", [(), ("--keep-corpus",)])
def test_rows_are_chosen_and_weighted_by_what_was_kept(
    tmp_path: Path, workers: int, corpus: tuple[str, ...], monkeypatch: Any
) -> None:
    be_quick(monkeypatch)
    given = rows()
    source = write_rows(tmp_path / "rows.jsonl", given)
    common = ("--input", source, *KEEP, "--workers", workers)
    assert preprocess(tmp_path / "all/x", *common).code == 0
    choose = ("--where", "score>0", "--where", "good == true", "--loss-weight-column", "score")
    done = preprocess(tmp_path / "x", *common, *choose, *corpus)
    assert done.code == 0, done
    expected = [
        (ids, tuple(float(np.float32(each) * np.float32(score)) for each in mask), rank, score, good)
        for ids, mask, rank, score, good in kept(tmp_path / "all/x", "rank", "score", "good")
        if score > 0 and good
    ]
    assert kept(tmp_path / "x", "rank", "score", "good") == sorted(expected)
    header = Shard(tmp_path / "x").header
    assert header.mask_dtype == np.float32
    packing = header.metadata["packing"]
    assert packing["where"] == ["score > 0", "good == true"]
    assert (packing["loss_weight_column"], packing["left_out"]) == ("score", 60 - len(expected))
    assert header.metadata["loss_weight_columns"] == ["score"]
    assert f"left out        {60 - len(expected)} sequences left out by --where" in done.out
    assert preprocess(tmp_path / "x", *common, *choose, *corpus).out.startswith("found ")
    assert verify_shard(tmp_path / "x", full=True).ok
    if corpus:  # the corpus has all sequences, in the order of the input
        assert kept(tmp_path / "x.unpacked", "rank", "score", "good") == kept(
            tmp_path / "all/x", "rank", "score", "good"
        )
        again = ("--seq-length", 1024, *choose, "--output-prefix", tmp_path / "y")
        assert command("pack", tmp_path / "x.unpacked", *again).code == 0
        assert kept(tmp_path / "y", "rank", "score", "good") == sorted(expected)
    other = preprocess(tmp_path / "x", *common, "--where", "score > 1")
    assert (other.code, "packing where was ['score > 0', 'good == true'], is ['score > 1']" in other.err) == (1, True)


def test_weights_of_0_and_1_keep_masks_small(tmp_path: Path) -> None:
    given = rows(20)
    assert preprocess(tmp_path / "x", *KEEP, "--loss-weight-column", "good", "--drop-untrained", rows=given).code == 0
    shard = Shard(tmp_path / "x")
    assert shard.header.mask_dtype == np.uint8
    assert sorted(one[2] for one in kept(tmp_path / "x", "rank")) == [n for n in range(20) if given[n]["good"]]


def test_selection_comes_before_conditions(tmp_path: Path) -> None:
    given = rows()
    source = write_rows(tmp_path / "rows.jsonl", given)
    common = ("--input", source, *KEEP, "--valid-fraction", 0.3, "--repeat", "rows.jsonl=2", "--output-shards", 2)
    assert preprocess(tmp_path / "all/x", *common).code == 0
    done = preprocess(tmp_path / "x", *common, "--where", "score >= 1", "--loss-weight-column", "rank")
    assert done.code == 0, done
    for which in ("-00000-of-00002", "-00001-of-00002", ".valid"):
        assert Shard(f"{tmp_path}/x{which}").header.mask_dtype == np.float32
    for shards in (["-00000-of-00002", "-00001-of-00002"], [".valid"]):
        found, everything = (
            [one for which in shards for one in kept(f"{at}/x{which}", "rank", "score")]
            for at in (tmp_path, tmp_path / "all")
        )
        expected = Counter(rank for *_, rank, score in everything if score >= 1)
        assert Counter(rank for *_, rank, _ in found) == expected
        assert all(set(mask) <= {0, rank} for _, mask, rank, _ in found)
        left_out = Shard(f"{tmp_path}/x{shards[0]}").header.metadata["packing"]["left_out"]
        assert left_out == len(everything) - len(found)
    refused = preprocess(tmp_path / "none", *common, "--where", "rank > 1000")
    assert (refused.code, "sequences matches --where" in refused.err) == (1, True), refused


def test_pairs_and_verdicts_keep_fields_too(tmp_path: Path) -> None:
    chance = random.Random(0)
    given = [
        {
            "prompt": [{"role": "user", "content": f"Is it {number}?"}],
            "chosen": "yes " * chance.randint(1, 9),
            "rejected": "no " * chance.randint(1, 9),
            "margin": chance.choice([0.25, 1.5]),
        }
        for number in range(30)
    ]
    preference = ("--row-kind", "preference", "--keep-field", "margin")
    assert preprocess(tmp_path / "p/x", *preference, rows=given).code == 0
    where = ("--where", "margin > 1", "--loss-weight-column", "margin")
    assert preprocess(tmp_path / "p/y", *preference, *where, rows=given, capacity=128).code == 0
    for name, wanted in (("x", [*range(30)]), ("y", [n for n in range(30) if given[n]["margin"] > 1])):
        shard = Shard(tmp_path / "p" / name)
        pairs, margins = (shard.columns[each].values[:] for each in ("pair", "margin"))
        assert sorted(pairs[::2, 0].tolist()) == wanted
        assert margins.tolist() == [given[pair]["margin"] for pair in pairs[:, 0].tolist()]
        assert verify_shard(tmp_path / "p" / name, full=True).ok
    assert {value for one in Shard(tmp_path / "p/y") for value in one["loss_mask"].tolist()} == {0, 1.5}
    # A pair is kept only if both sequences meet the condition; never are both the chosen one of pair 0.
    refused = preprocess(tmp_path / "p/z", *preference, "--where", "pair == 0", rows=given)
    assert (refused.code, "none of 60 sequences matches" in refused.err) == (1, True), refused
    verdicts = [{**row, "completion": row["chosen"], "label": n % 2 == 0} for n, row in enumerate(given)]
    for row in verdicts:
        row["prompt"] = row["prompt"][0]["content"]
        del row["chosen"], row["rejected"]
    kto = ("--row-kind", "kto", "--keep-field", "margin=float16", "--where", "label == true")
    done = preprocess(tmp_path / "k/x", *kto, rows=verdicts)
    assert done.code == 0, done
    found = kept(tmp_path / "k/x", "source", "label", "margin")
    assert sorted(row for _, _, (_, row), label, margin in found if label == 1) == [*range(0, 30, 2)]
    assert all(given[row]["margin"] == margin for _, _, (_, row), _, margin in found)


def test_a_row_that_makes_several_sequences_gives_its_value_to_each(tmp_path: Path) -> None:
    given = [
        {"input_ids": [*range(1, 9)], "loss_mask": [0, 1] * 4, "seq_lengths": [3, 5], "rank": 7},
        {"input_ids": [11, 12, 13], "loss_mask": [0, 1, 1], "rank": -2},
    ]
    assert preprocess(tmp_path / "x", "--keep-field", "rank=int8", rows=given).code == 0
    assert sorted((len(ids) // 2, rank) for ids, _, rank in kept(tmp_path / "x", "rank")) == [(3, -2), (3, 7), (5, 7)]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (300, "rank is 300, which does not fit into int8, a whole number from -128 to 127"),
        (1.5, "rank is 1.5, which does not fit into int8"),
        ("seven", "rank is 'seven', expected a finite number to store as int8"),
        (None, "the row has no value for rank, which --keep-field stores"),
        ([7], "rank is a list, expected a finite number"),
        ({"a": 1}, "rank is a dict, expected a finite number"),
    ],
)
def test_a_value_that_does_not_fit_is_a_bad_row(value: Any, said: str, tmp_path: Path) -> None:
    given = rows(6)
    given[3]["rank"] = value
    refused = preprocess(tmp_path / "x", "--keep-field", "rank=int8", rows=given)
    assert (refused.code, f"rows.jsonl:4: {said}" in refused.err) == (1, True), refused
    del given[3]["rank"]
    refused = preprocess(tmp_path / "x", "--keep-field", "rank=int8", rows=given)
    assert (refused.code, "rows.jsonl:4: the row has no value for rank" in refused.err) == (1, True), refused
    done = preprocess(tmp_path / "x", "--keep-field", "rank=int8", "--on-bad-row", "skip", rows=given)
    assert done.code == 0, done
    assert sorted(rank for *_, rank in kept(tmp_path / "x", "rank")) == [0, 1, 2, 4, 5]


@settings(max_examples=400)
@given(
    st.sampled_from([dtype.name for dtype in COLUMN_DTYPES.values()]),
    st.integers(-(2**70), 2**70) | st.integers(-300, 300) | st.floats() | st.booleans(),
)
def test_a_value_is_stored_as_it_is_or_refused(dtype: str, value: Any) -> None:
    try:
        (stored,) = values_of({"x": value}, {"x": dtype})
    except RowError:
        with np.errstate(over="ignore", under="ignore"):
            if math.isfinite(value) and np.dtype(dtype).kind == "f":
                held = float(np.array(float(value)).astype(dtype))
                assert math.isinf(held) or (held != value and (value == int(value) or not held))
            elif math.isfinite(value):
                limits = np.iinfo(dtype)
                assert value != int(value) or not limits.min <= value <= limits.max
        return
    held = np.array([stored], dtype)[0]
    assert held == stored
    if np.dtype(dtype).kind == "f" and isinstance(value, float):
        assert held == np.array(value).astype(dtype)
        assert math.isfinite(held)
        assert bool(held) == bool(value)
    else:
        assert int(held) == value


@pytest.mark.parametrize(
    ("value", "dtype", "rounded"),
    [
        (2**53 + 1, "float64", "9007199254740992.0"),
        ("9007199254740993", "float64", "9007199254740992.0"),
        ("9007199254740993.0", "float64", "9007199254740992.0"),
        (16777217.0, "float32", "16777216.0"),
        ("16777217.00", "float32", "16777216.0"),
        ("1.6777217e7", "float32", "16777216.0"),
        (np.float64(2049), "float16", "2048.0"),
    ],
)
def test_a_whole_number_is_never_rounded(value: Any, dtype: str, rounded: str) -> None:
    said = f"which does not fit into {dtype}: it would become {rounded}; choose another dtype (--keep-field x=DTYPE)"
    with pytest.raises(RowError) as refused:
        values_of({"x": value}, {"x": dtype})
    assert said in str(refused.value)
    assert values_of({"x": value}, {"x": "int64"}) == (
        int(float(value)) if "e" in str(value) else int(str(value).partition(".")[0]),
    )


def test_rounding_is_refused_in_files_too(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion,x\na,b,1.5\nc,d,9007199254740993.0\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "completion": "b", "x": 9007199254740993}\n')
    for name in ("a.csv", "b.jsonl"):
        refused = preprocess(tmp_path / "x", "--input", tmp_path / name, "--keep-field", "x")
        assert (refused.code, "which does not fit into float64: it would become" in refused.err) == (1, True), refused
    done = preprocess(tmp_path / "x", "--input", tmp_path / "b.jsonl", "--keep-field", "x=int64")
    assert done.code == 0, done
    assert [x for *_, x in kept(tmp_path / "x", "x")] == [2**53 + 1]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("source", "preprocess writes a column with this name itself"),
        ("pair=int8", "preprocess writes a column with this name itself"),
        ("label", "preprocess writes a column with this name itself"),
        ("loss_mask", "this name has another meaning in packs or batches; choose another name; rename the field"),
        ("meta.score", "a name of at most 64 lower-case letters, digits and _"),
        ("Score", "a name of at most 64 lower-case letters, digits and _"),
        ("", "a name of at most 64 lower-case letters, digits and _"),
        (
            "score=",
            "unknown dtype; choose one of float16, float32, float64, int16, int32, int64, int8, uint16, uint32, uint8",
        ),
        ("score=bfloat16", "unknown dtype; choose one of "),
        ("score=int8 --keep-field score", "this field is given twice"),
    ],
)
def test_a_field_that_cannot_be_kept_is_wrong_usage(field: str, said: str, tmp_path: Path) -> None:
    words = ["--keep-field", *field.split(" ")] if field else ["--keep-field", ""]
    refused = preprocess(tmp_path / "x", *words)
    assert (refused.code, said in refused.err) == (2, True), refused
    assert not [*tmp_path.iterdir()]
    with pytest.raises(FormatError, match=said):
        read_keep_fields([each for each in words if each != "--keep-field"])


def test_conditions_and_weights_need_a_column_before_anything_is_read(tmp_path: Path) -> None:
    for words, said in (
        (("--where", "score > 1"), "has no column score; it has source"),
        ((*KEEP, "--where", "rank == 40000"), "the value must be a whole number from -32768 to 32767"),
        (("--loss-weight-column", "score"), "has no column score; it has source"),
        (("--loss-weight-column", "source"), "column source has 2 values per row"),
    ):
        for more in ((), ("--dry-run",)):
            refused = preprocess(tmp_path / "x", *words, *more)
            assert (refused.code, said in refused.err) == (2, True), refused
    assert not [*tmp_path.iterdir()]


def test_weights_that_are_negative_name_their_row(tmp_path: Path) -> None:
    given = rows(6)
    given[4]["score"] = -1
    refused = preprocess(tmp_path / "x", *KEEP, "--loss-weight-column", "score", rows=given)
    assert (refused.code, "rows.jsonl:5: --loss-weight-column score: the weight is -1" in refused.err) == (1, True)


def test_a_field_whose_name_speaks_of_training_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    given = [{**row, "weight": 0.5} for row in rows(6)]
    refused = preprocess(tmp_path / "x", rows=given)
    assert (refused.code, "the row has weight" in refused.err) == (1, True), refused
    done = preprocess(tmp_path / "x", "--keep-field", "weight", "--loss-weight-column", "weight", rows=given)
    assert done.code == 0, done
    assert {value for _, mask in (one[:2] for one in kept(tmp_path / "x", "weight")) for value in mask} == {0, 0.5}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dry_run_shows_what_is_kept_and_left_out(tmp_path: Path, workers: int) -> None:
    given = rows()
    chosen = sum(row["score"] > 1 for row in given)
    common = (*KEEP, "--where", "score > 1", "--where", "source == rows.jsonl", "--dry-run", "--workers", workers)
    for more in ((), ("--full",)):
        done = preprocess(tmp_path / "x", *common, *more, rows=given)
        assert done.code == 0, done
        assert "kept field      score, float32\n" in done.out
        assert f"left out        {60 - chosen} of 60 sequences left out by --where\n" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    given[2]["score"] = "high"
    done = preprocess(tmp_path / "x", *common, rows=given)
    said = "rows.jsonl:3: score is 'high', expected a finite number to store as float32: correct the value; if"
    assert said in done.out


@pytest.mark.sample(6)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "more",
    [
        ("--loss-weight-column", "score"),
        ("--loss-weight-column", "score", "--no-source"),
        ("--loss-weight-column", "score", "--where", "rank < 4000", "--max-rows", 4100),
        ("--loss-weight-column", "score", "--where", "rank < 4000", "--where", "source == rows.jsonl"),
        ("--loss-weight-column", "score", "--valid-fraction", 0.5, "--max-rows", 4100),
        ("--loss-weight-column", "score", "--loss-weight", "rows.jsonl=1e-30", "--where", "rank < 4000"),
        ("--loss-weight-column", "score", "--max-rows", 1000),
        ("--where", "score > 3"),
        ("--where", "score > 2", "--where", "score < 1", "--loss-weight-column", "score", "--max-rows", 4000),
        ("--where", "rank == 4190", "--sample", 0.2),
        ("--where", "rank == 5", "--valid-fraction", 0.5),
        ("--repeat", "rows.jsonl=0"),
        ("--sample", 0.5, "--seq-length", 64),
        ("--drop-untrained", "--seq-length", 64),
    ],
)
def test_a_full_dry_run_says_why_the_run_would_stop(tmp_path: Path, more: tuple[object, ...], workers: int) -> None:
    given = [{**row, "rank": number} for number, row in enumerate(rows(60) * 70)]
    given[4050]["score"] = -0.5
    given[7]["score"] = 1e-20
    common = (tmp_path / "x", *KEEP, "--workers", workers, *more)
    dry = preprocess(*common, "--dry-run", "--full", rows=given)
    run = preprocess(*common, rows=given)
    assert dry.code == run.code, dry
    said = [line.removeprefix("would stop").strip() for line in dry.out.splitlines() if line.startswith("would stop")]
    stopped = [line.removeprefix("megatron-sft-idx: error: ") for line in run.err.splitlines() if " error: " in line]
    assert said[:1] == stopped, (dry.out, run.err)
    assert bool(stopped) == (run.code != 0)
    if not stopped:
        assert f"packs           {len(Shard(tmp_path / 'x'))} " in dry.out


def test_first_rows_with_a_wrong_weight_would_stop_the_run(tmp_path: Path) -> None:
    given = rows()
    given[3]["score"] = -1
    common = (tmp_path / "x", *KEEP, "--loss-weight-column", "score", "--dry-run")
    said = "would stop      rows.jsonl:4: --loss-weight-column score: the weight is -1, expected"
    assert said in preprocess(*common, rows=given).out
    for more in (("--where", "score >= 0"), ("--where", "score > 9"), ("--sample", 0.1)):
        assert "would stop" not in preprocess(*common, *more, rows=given).out


def test_programs_ask_for_the_same(tmp_path: Path) -> None:
    given = rows(12)
    common: dict[str, Any] = {"tokenizer": str(TOKENIZER), "seq_length": 512, "workers": 0}
    columns: dict[str, Any] = {"keep_fields": ["score=float32", "rank"], "where": ["score > 0"]}
    report = preprocess_rows(
        given,
        output_prefix=tmp_path / "x",
        **common,
        **columns,
        loss_weight_column="score",
        summary=tmp_path / "s.json",
    )
    expected = [row["rank"] for row in given if row["score"] > 0]
    assert (report.packing.sequences, report.packing.left_out) == (len(expected), 12 - len(expected))
    assert sorted(rank for *_, rank in kept(tmp_path / "x", "rank")) == expected
    options = json.loads((tmp_path / "s.json").read_text())["options"]
    assert options["keep_fields"] == {"rank": "float64", "score": "float32"}
    assert (options["where"], options["loss_weight_column"]) == (["score > 0"], "score")
    given[2]["rank"] = "third"
    with pytest.raises(SequenceError, match="rows:3: rank is 'third'"):
        preprocess_rows(given, output_prefix=tmp_path / "y", **common, **columns)
