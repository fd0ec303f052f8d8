"""Malformed input files and input names: each is an error with the file and the remedy."""

import bz2
import gzip
import json
import lzma
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron_sft_idx.chat import inputs
from megatron_sft_idx.chat.inputs import expand_inputs, iter_pieces
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError

LINES = b"".join(b'{"n": %d}\n' % i for i in range(1000))
ZST = zstandard.ZstdCompressor(write_checksum=True).compress(LINES)
GZ = gzip.compress(LINES)


def parquet_bytes(tmp_path):
    pq.write_table(pa.table({"n": range(1000)}), tmp_path / "whole")
    return (tmp_path / "whole").read_bytes()


def stream_bytes(tmp_path):
    table = pa.table({"n": range(1000)})
    with pa.ipc.new_stream(tmp_path / "whole", table.schema) as writer:
        writer.write_table(table)
    return (tmp_path / "whole").read_bytes()


def read_all(*inputs):
    return [row[:2] for piece in iter_pieces(expand_inputs(inputs), piece_nbytes=100) for row in piece.rows()]


BROKEN_FILES = {
    "gz-cut": ("a.jsonl.gz", GZ[:-20], "broken gzip data: .*; compress or download the file again"),
    "gz-no-trailer": ("a.jsonl.gz", GZ[:-4], "broken gzip data"),
    "gz-head-only": ("a.jsonl.gz", GZ[:8], "broken gzip data"),
    "gz-flipped": ("a.jsonl.gz", GZ[:300] + bytes([GZ[300] ^ 255]) + GZ[301:], "broken gzip data"),
    "gz-wrong-sum": ("a.jsonl.gz", GZ[:-8] + b"\0\0\0\0" + GZ[-4:], "broken gzip data: .*incorrect data check"),
    "gz-junk-after": ("a.jsonl.gz", GZ + b"junk", "broken gzip data: .*incorrect header check"),
    "zst-cut": ("a.jsonl.zst", ZST[:-20], "broken zstd data: ends inside a frame"),
    "zst-head-only": ("a.jsonl.zst", ZST[:6], "broken zstd data: ends inside a frame"),
    "zst-flipped": ("a.jsonl.zst", ZST[:60] + bytes([ZST[60] ^ 255]) + ZST[61:], "broken zstd data"),
    "zst-junk-after": ("a.jsonl.zst", ZST + b"junk", "broken zstd data"),
    "zst-cut-between": ("a.jsonl.zst", ZST + ZST[:10], "broken zstd data: ends inside a frame"),
    "bz2": (
        "a.jsonl.bz2",
        bz2.compress(LINES),
        "unknown file format, the file begins with b'BZh.*; expected .json, .jsonl",
    ),
    "xz": ("a.jsonl.xz", lzma.compress(LINES), "unknown file format, the file begins with .*7zXZ"),
    "zip": ("a.zip", b"PK\x03\x04....", "unknown file format, the file begins with b'PK"),
    "utf16": ("a.json", '{"a": 1}'.encode("utf-16"), "unknown file format"),
    "npy": ("a.npy", b"\x93NUMPY\x01\x00", "unknown file format, the file begins with .*NUMPY"),
    "text": ("a.txt", b"prompt,answer\n1,2\n", "unknown file format, the file begins with b'prompt,answer"),
    "gz-of-text": ("a.gz", gzip.compress(b"prompt,answer\n1,2\n"), "unknown file format"),
    "csv with semicolons": ("a.csv", b"prompt;answer\n1;2\n", "the header is one column, .*; expected commas .*';'"),
    "csv with a name twice": ("a.csv", b"prompt,prompt\n1,2\n", "the header has 'prompt' twice"),
    "csv with an empty line first": ("a.csv", b"\nprompt,answer\n1,2\n", "the first line is empty"),
    "csv with no name": ("a.csv", b"prompt,\n1,2\n", "a column without a name"),
    "csv of another encoding": ("a.csv", b"prompt,r\xe9ponse\n1,2\n", "header: not valid UTF-8"),
    "tsv with commas": ("a.tsv", b"prompt,answer\n1,2\n", "expected tabs between columns, found ','"),
    "gz-of-parquet": ("a.parquet.gz", gzip.compress(b"PAR1..."), "unknown file format, the file begins with b'PAR1"),
    "array-cut": ("a.json", b'[{"n": 1}, {"n": 2', "the JSON array is not closed after 18 bytes"),
    "array-cut-in-string": ("a.json", b'[{"n": "1}]', "the JSON array is not closed"),
    "array-closed-by-brace": ("a.json", b'[{"n": 1}, {"n": 2}}', r"the JSON array ends with '}', expected ']'"),
    "array-of-nothing-closed-by-brace": ("a.json", b"[}", r"the JSON array ends with '}', expected ']'"),
    "array-open-only": ("a.json", b" [", "the JSON array is not closed"),
    "array-twice": ("a.json", b'[{"n": 1}]\n[{"n": 2}]', r"data after the end .* b'\[\{\"n\": 2\}\]'"),
    "array-and-bracket": ("a.json", b'[{"n": 1}]]', "data after the end of the JSON array"),
    "object-of-rows": ("a.json", b'{\n "data": [\n  {"n": 1}\n ]\n}\n', "one JSON object over several lines"),
    "scalar": ("a.json", b'"text"', "unknown file format"),
    "parquet-cut": ("a.parquet", lambda p: parquet_bytes(p)[:-30], "not a readable Parquet file"),
    "parquet-head-only": ("a.parquet", b"PAR1", "not a readable Parquet file"),
    "parquet-hole": (
        "a.parquet",
        lambda p: b"PAR1" + b"\xff" * 400 + parquet_bytes(p)[404:],
        "not a readable Parquet file",
    ),
    "arrow-cut": ("a.arrow", lambda p: stream_bytes(p)[:-3000], "not a readable Arrow file"),
    "arrow-head-only": ("a.arrow", b"\xff\xff\xff\xff\x10", "not a readable Arrow file"),
    "feather-head-only": ("a.arrow", b"ARROW1\0\0", "not a readable Arrow file"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_file(tmp_path, case):
    name, content, message = BROKEN_FILES[case]
    path = tmp_path / name
    path.write_bytes(content(tmp_path) if callable(content) else content)
    with pytest.raises(FormatError, match=message) as caught:
        read_all(path)
    assert str(caught.value).startswith(f"{path}: ")


BAD_LINES = {
    b'{"a": 1,}': "not valid JSON: .* \\(character 8 of the row\\)",
    b'{"a": 1} {"a": 2}': "not valid JSON: .*character 10",
    b"{'a': 1}": "not valid JSON",
    b'{"a": ': "not valid JSON: unexpected end of data",
    b'{"a": NaN}': "NaN and Infinity are not JSON, write null",
    b'{"a": -Infinity}': "NaN and Infinity are not JSON",
    b'{"a": 1e999}': "not valid JSON: number is infinity",
    b'{"a": "\xff"}': "not valid UTF-8: invalid start byte \\(byte 8 of the row\\); convert the file",
    b'{"a": "\xed\xa0\x80"}': "not valid UTF-8",
    b'{"a": "\\ud800"}': "not valid JSON: no low surrogate",
    b"\0\0\0\0": "not valid JSON",
    b'{"a": "\0"}': "not valid JSON",
    b"[" * 1500 + b"]" * 1500: "nested more than 128 levels deep; flatten it",
    b'{"a": ' + b"1" * 5000 + b"}": "number is infinity|cannot be parsed",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_line_between_good_ones(tmp_path, bad):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 0}\n\n' + bad + b'\n{"a": 3}')
    (one, first), (three, error), (four, last) = read_all(path)
    assert (one, first, three, four, last) == (1, {"a": 0}, 3, 4, {"a": 3})
    assert isinstance(error, SequenceError)
    assert (error.source, error.position) == (str(path), 3)
    with pytest.raises(SequenceError, match=BAD_LINES[bad]):
        raise error


@pytest.mark.parametrize(
    ("content", "bad", "message"),
    [
        (b'[{"a": 1}, {"a" 2}, {"a": 3}]', 2, "not valid JSON"),
        (b'[{"a": 1}, {"a": 2], {"a": 3}]', 2, "not valid JSON"),
        (b'[{"a": 1}, , {"a": 3}]', 2, "an extra comma"),
        (b'[{"a": 1}, {"a": 3}, ]', 3, "an extra comma"),
        (b"[,]", 1, "an extra comma"),
        # The blank element is a separate piece, because the next element does not fit into it.
        (b'[, {"a": "' + b"x" * 200 + b'"}]', 1, "an extra comma"),
        (b'[{"a": 1} {"a": 2}]', 1, "not valid JSON"),
        (b'[{"a": "\xff"}, {"a": 3}]', 1, "not valid UTF-8"),
    ],
)
def test_bad_element_of_an_array(tmp_path, content, bad, message):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    errors = {at: row for at, row in read_all(path) if isinstance(row, SequenceError)}
    assert min(errors) == bad
    with pytest.raises(SequenceError, match=message):
        raise errors[bad]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("row", [b'"' + b"x" * 5000 + b'"', b'"' + b"x" * 5000])
def test_a_row_without_end_stops_before_it_fills_the_memory(tmp_path, monkeypatch, name, row):
    monkeypatch.setattr(inputs, "MAX_ROW_NBYTES", 4000)
    path = tmp_path / name
    path.write_bytes(b'[{"a": 1}, ' + row if name == "a.json" else b'{"a": 1}\n' + row)
    if row.endswith(b'x"') and name == "a.json":
        path.write_bytes(path.read_bytes() + b"]")
    with pytest.raises(FormatError, match=r"row 2 is longer than 4000 bytes; expected one JSON object per line"):
        list(iter_pieces(expand_inputs([path]), piece_nbytes=100))


def saved(folder, state='{"_data_files": [{"filename": "d.arrow"}]}'):
    folder.mkdir()
    (folder / "state.json").write_text(state)
    return folder


def splits(folder):
    folder.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return folder


def twice(folder):
    folder.write_text("{}")
    return folder


BAD_INPUTS = {
    "none": (lambda p: [], "no input: pass at least one file"),
    "empty": (lambda p: [""], "an input is an empty string"),
    "missing": (lambda p: [p / "nope.jsonl"], "nope.jsonl: no such file or folder"),
    "glob": (lambda p: [f"{p}/*.jsonl"], r"\*.jsonl: no file matches"),
    "glob-of-folders": (lambda p: [(p / "d").mkdir(), f"{p}/*"][1:], "no file matches"),
    "folder": (lambda p: [p], r"was not written by save_to_disk; .* such as '.*\*.jsonl'"),
    "splits": (lambda p: [splits(p / "ds")], "several splits; choose one: .*ds/train, .*ds/test"),
    "state-broken": (lambda p: [saved(p / "ds", "{")], "ds/state.json: not valid JSON"),
    "state-list": (lambda p: [saved(p / "ds", "[]")], "ds/state.json: expected a JSON object"),
    **{
        f"state-files-{number}": (lambda p, state=state: [saved(p / "ds", state)], "expected a list of file names")
        for number, state in enumerate(
            ("{}", '{"_data_files": 5}', '{"_data_files": [1]}', '{"_data_files": [{"x": 1}]}')
        )
    },
    "state-file-number": (lambda p: [saved(p / "ds", '{"_data_files": [{"filename": 5}]}')], "are missing: 5"),
    "state-empty": (lambda p: [saved(p / "ds", '{"_data_files": []}')], "are missing: no .arrow files"),
    "state-missing": (lambda p: [saved(p / "ds")], "ds: data files of this saved dataset are missing: d.arrow"),
    "state-selection": (lambda p: [saved(p / "ds", '{"_indices_data_files": [1]}')], r"flatten_indices\(\)"),
    "twice": (lambda p: [twice(p / "a.jsonl")] * 2, "a.jsonl: matched twice"),
    "twice-by-glob": (lambda p: [twice(p / "a.jsonl"), f"{p}/*"], r"matched twice, by '.*a.jsonl' and '.*/\*'"),
    "dangling": (lambda p: [(p / "a.jsonl").symlink_to("gone"), p / "a.jsonl"][1:], "cannot be read: No such"),
    "pipe": (lambda p: [os.mkfifo(p / "a.jsonl"), p / "a.jsonl"][1:], "not a regular file"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_name(tmp_path, case):
    make, message = BAD_INPUTS[case]
    with pytest.raises(FormatError, match=message):
        expand_inputs(make(tmp_path))


def test_the_same_file_by_two_links_is_named_twice(tmp_path):
    twice(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    with pytest.raises(FormatError, match=r"b.jsonl: matched twice"):
        expand_inputs([f"{tmp_path}/*.jsonl"])


def test_a_file_that_vanishes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    files = expand_inputs([path])
    path.unlink()
    with pytest.raises(FormatError, match=r"a.jsonl: cannot be read: No such file"):
        list(iter_pieces(files))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(FormatError, match=r"a.jsonl: cannot be read: Permission denied"):
        expand_inputs([path])


@pytest.mark.parametrize(
    "extra",
    [
        ("zstandard", "a.zst", ZST, r"reading .zst needs zstandard: pip install 'megatron-sft-idx\[zstd\]'"),
        ("pyarrow", "a.parquet", b"PAR1", r"reading Parquet files needs pyarrow: pip install 'mega.*\[parquet\]'"),
        ("pyarrow", "a.arrow", b"ARROW1\0\0", r"reading Arrow files needs pyarrow"),
    ],
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, extra):
    module, name, content, message = extra
    path = tmp_path / name
    path.write_bytes(content)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SFTIndexError, match=message):
        read_all(path)
