"""Comma- and tab-separated files: the rows written by Python's csv module, for any size of pieces, or an error."""

import csv
import gzip
import io

import pytest
from chats import command, files_of, preprocess, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sft_idx.chat.inputs import expand_inputs, iter_pieces
from megatron_sft_idx.errors import SequenceError
from megatron_sft_idx.shard import Shard

FIELDS = st.lists(st.sampled_from(["a", "é", '"', ",", "\t", "\n", "\r\n", " ", "7"]), max_size=8).map("".join)


def rows_of(path, piece_nbytes=1 << 20):
    return [row for piece in iter_pieces(expand_inputs([path]), piece_nbytes=piece_nbytes) for row in piece.rows()]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(FIELDS, FIELDS, FIELDS), max_size=12),
    st.sampled_from([("csv", ","), ("tsv", "\t")]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.integers(1, 200),
)
def test_rows_are_those_that_were_written(tmp_path_factory, rows, kind, line_end, quoting, piece_nbytes):
    suffix, delimiter = kind
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=line_end, quoting=quoting)
    writer.writerows([("x", "y.z", "label"), *rows])
    path = tmp_path_factory.mktemp("separated") / f"rows.{suffix}.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.getvalue().encode()))
    wanted = [{name: value or None for name, value in zip(("x", "y.z", "label"), row, strict=True)} for row in rows]
    read = rows_of(path, piece_nbytes)
    assert [row.data for row in read] == wanted
    assert [row.position for row in read] == list(range(2, len(rows) + 2))


def test_an_index_without_a_name_is_read_over(tmp_path):
    (tmp_path / "rows.csv").write_text(",prompt,completion\n0,Q,A\n")
    (row,) = rows_of(tmp_path / "rows.csv")
    assert row.data == {"": "0", "prompt": "Q", "completion": "A"}
    assert preprocess(tmp_path / "s", "--input", tmp_path / "rows.csv").code == 0


BAD = {
    "too few fields": (b"a\n", "1 fields, but the header has 2"),
    "too many fields": (b"a,b,c\n", "3 fields, but the header has 2"),
    "quote in a field": (b'5" pipe,a\nb,6" pipe\n', "a quote in a field that is not quoted|new-line character"),
    "text behind a quote": (b'"a"b,c\n', "not a valid record of separated values"),
    "open quote": (b'"a,b\n', "not a valid record of separated values"),
    "bytes": (b"\xff,b\n", "not valid UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_named_by_its_number(tmp_path, name):
    record, reason = BAD[name]
    path = tmp_path / "rows.csv"
    path.write_bytes(b"x,y\na,b\n\n" + record)
    good, bad = rows_of(path)
    assert (good.position, good.data) == (2, {"x": "a", "y": "b"})
    assert isinstance(bad.data, SequenceError)
    assert bad.position == 4
    with pytest.raises(SequenceError, match=rf"rows\.csv:4: .*({reason})"):
        raise bad.data


def test_a_shard_of_a_table_equals_that_of_json_lines(tmp_path):
    rows = [{"prompt": f'How many,\n"{n}"?', "completion": f"{n}\t{n}"} for n in range(40)]
    write_rows(tmp_path / "rows.jsonl", rows)
    made = [preprocess(tmp_path / "lines", "--input", tmp_path / "rows.jsonl")]
    for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
        with open(tmp_path / f"rows.{suffix}", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerows(
                [("prompt", "completion", "system"), *((row["prompt"], row["completion"], "") for row in rows)]
            )
        for workers in (0, 2):
            prefix = tmp_path / f"{suffix}{workers}"
            made.append(preprocess(prefix, "--input", tmp_path / f"rows.{suffix}", "--workers", workers))
            for name in (".bin", ".loss.bin", ".idx", ".seq.bin"):
                assert files_of(prefix)[name] == files_of(tmp_path / "lines")[name]
    assert [outcome.code for outcome in made] == [0] * 5


def test_the_source_of_a_sequence_is_the_record(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,completion\nQ,first\n\nQ,second\n")
    assert preprocess(tmp_path / "s", "--input", tmp_path / "rows.csv").code == 0
    source = Shard(tmp_path / "s").columns["source"].values
    assert sorted(source[:, 1].tolist()) == [1, 3]  # counted from 0
    assert command("inspect", tmp_path / "s", "--row", "rows.csv:4").code == 0
    assert command("inspect", tmp_path / "s", "--row", "rows.csv:3").code == 1


@pytest.mark.parametrize("label", ["false", "True", "FALSE"])
def test_a_verdict_that_is_text_is_a_verdict(tmp_path, label):
    (tmp_path / "rows.csv").write_text(f"prompt,completion,label\nQ,A,{label}\n")
    refused = preprocess(tmp_path / "s", "--input", tmp_path / "rows.csv")
    assert refused.code == 1
    assert f"rows.csv:2: label is {label.lower()}: this is a KTO row" in refused.err
    assert preprocess(tmp_path / "s", "--input", tmp_path / "rows.csv", "--row-kind", "kto").code == 0
