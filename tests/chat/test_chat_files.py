"""Input files to rows: all containers give the same rows at the same positions, for any size of pieces."""

import gzip
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sft_idx.chat.chat_rows import to_sequence_source
from megatron_sft_idx.chat.inputs import expand_inputs, iter_pieces, total_bytes
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.errors import FormatError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ['"', "\\", '\\"],[', "\r\n", "\x00", "\u2028", "é" * 40]
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXTS, "content": TEXTS}), min_size=1, max_size=3)
ROWS = st.lists(st.fixed_dictionaries({"messages": MESSAGES, "n": st.integers(-(2**63), 2**63 - 1)}), max_size=12)
CONTAINERS = ["jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz", "json.zst", "parquet", "arrow", "saved"]


def compress(data, suffix, split):
    """Compress as one member or frame, or as two, concatenated."""
    parts = [data[:split], data[split:]]
    if suffix == "gz":
        return b"".join(map(gzip.compress, parts))
    if suffix == "zst":
        import zstandard

        return b"".join(map(zstandard.ZstdCompressor().compress, parts))
    return data


def stored(data):
    """Return a Zstandard frame of one uncompressed block."""
    return b"\x28\xb5\x2f\xfd\x20" + bytes([len(data)]) + (len(data) << 3 | 1).to_bytes(3, "little") + data


def write_rows(folder, container, rows, *, indent=None, split=0, newline=True):
    """Write the rows and return the value for ``--input``."""
    path = folder / f"rows.{container}"
    kind, _, compression = container.partition(".")
    if kind == "jsonl":
        data = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode() + b"\n" * newline
        path.write_bytes(compress(data, compression, split))
    elif kind == "json":
        path.write_bytes(compress(json.dumps(rows, indent=indent).encode(), compression, split))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        messages = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
        table = pa.Table.from_pylist(rows, schema=pa.schema({"messages": messages, "n": pa.int64()}))
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=max(1, split))
        elif kind == "arrow":
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=max(1, split))
        else:
            path = folder / "saved"
            save_to_disk(path, [table.slice(0, split), table.slice(split)])
    return str(path)


def save_to_disk(folder, tables):
    """Write a folder like Hugging Face datasets: Arrow streams and a list of them."""
    import pyarrow as pa

    folder.mkdir()
    names = [f"data-{i:05d}-of-{len(tables):05d}.arrow" for i in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def read_all(given_input, piece_nbytes=8 << 20):
    """Return every (file name, position, row), after pickling, as in workers."""
    return [
        (piece.path, position, row)
        for piece in iter_pieces(expand_inputs([given_input]), piece_nbytes=piece_nbytes)
        for position, row, _ in pickle.loads(pickle.dumps(piece)).rows()
    ]


@pytest.mark.parametrize("container", CONTAINERS)
@settings(max_examples=30, deadline=None)
@given(
    rows=ROWS,
    style=st.fixed_dictionaries(
        {"indent": st.sampled_from([None, 0, 3]), "split": st.integers(0, 12), "newline": st.booleans()}
    ),
    piece_nbytes=st.sampled_from([1, 10, 100, 1 << 20]),
)
def test_rows_come_back(tmp_path_factory, container, rows, style, piece_nbytes):
    got = read_all(write_rows(tmp_path_factory.mktemp("in"), container, rows, **style), piece_nbytes)
    assert [row for _, _, row in got] == rows
    by_file: dict[str, list[int]] = {}
    for path, position, _ in got:
        by_file.setdefault(path, []).append(position)
    assert all(positions == list(range(1, len(positions) + 1)) for positions in by_file.values())


@pytest.mark.parametrize("container", CONTAINERS)
def test_pieces_are_small_and_add_up(tmp_path, container):
    rows = [{"messages": [{"role": "user", "content": "x" * (i % 50)}], "n": i} for i in range(1000)]
    files = expand_inputs([write_rows(tmp_path, container, rows, split=300)])
    pieces = list(iter_pieces(files, piece_nbytes=4096))
    assert 10 < len(pieces) < 100
    overhead = 1500 if container in ("parquet", "arrow", "saved") else 0
    assert max(len(piece.payload) for piece in pieces) <= 4096 + overhead
    assert all(piece.num_bytes >= 0 for piece in pieces)
    assert 0.5 * total_bytes(files) < sum(piece.num_bytes for piece in pieces) <= total_bytes(files)
    again = list(iter_pieces(files, piece_nbytes=4096))
    assert [piece.fingerprint() for piece in pieces] == [piece.fingerprint() for piece in again]
    assert len({piece.fingerprint() for piece in pieces}) == len(pieces)


@given(st.binary(max_size=200), st.integers(1, 50), st.lists(st.integers(1, 9)))
def test_cuts_do_not_depend_on_how_the_bytes_arrive(data, piece_nbytes, sizes):
    from megatron_sft_idx.chat.inputs import cut_lines

    def runs(blocks):
        cut = cut_lines(iter(blocks), path="x", piece_nbytes=piece_nbytes)
        return [(run.payload, run.ends.tolist()) for run in cut]

    edges = [*np.cumsum(sizes), len(data)]
    blocks = [(data[a:b], 0) for a, b in zip([0, *edges], edges, strict=False) if a < b]
    assert runs(blocks) == runs([(data, 0)] if data else [])
    payloads = [payload for payload, _ in runs(blocks)]
    assert b"\n".join(payloads) == data.removesuffix(b"\n")
    assert all(len(p) <= piece_nbytes or b"\n" not in p for p in payloads)


def test_the_same_pieces_compressed_or_not(tmp_path):
    rows = [{"n": i, "text": "y" * (i % 70)} for i in range(500)]
    prints = []
    for container in ("jsonl", "jsonl.gz", "jsonl.zst"):
        files = expand_inputs([write_rows(tmp_path, container, rows, split=1234)])
        prints.append([(p.first, p.fingerprint()) for p in iter_pieces(files, piece_nbytes=1000)])
    assert prints[0] == prints[1] == prints[2]


def test_the_fingerprint_of_arrow_rows_is_of_their_values(tmp_path):
    """Dictionaries, offset widths, chunks, empty columns and the writer do not change the rows."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [
        {"messages": [{"role": "user", "content": "häuser"}, {"role": "assistant", "content": ""}], "n": 1, "w": 0.5},
        {"messages": [], "n": None, "w": None, "tag": "a"},
        {"messages": [{"role": "user", "content": None}], "n": -3, "w": 2.0, "tag": "a"},
    ]
    plain = pa.Table.from_pylist(rows + rows, pa.schema([*pa.Table.from_pylist(rows).schema, ("tag", pa.string())]))
    text = pa.large_string()
    messages = pa.large_list(pa.struct([("role", text), ("content", pa.string()), ("name", pa.string())]))
    other = pa.Table.from_pylist(
        rows + rows, pa.schema([("messages", messages), ("n", pa.int32()), ("w", pa.float64()), ("tag", text)])
    )
    coded = other.set_column(3, "tag", other["tag"].dictionary_encode()).append_column("none", pa.nulls(6, text))
    encodings = [plain, other, coded, pa.concat_tables([coded.slice(0, 1), coded.slice(1)])]

    def prints(table, name="x.arrow", write=None):
        with pa.OSFile(str(tmp_path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        if write:
            write(table, tmp_path / name)
        (piece,) = iter_pieces(expand_inputs([str(tmp_path / name)]))
        return piece.fingerprint(), [row.data for row in piece.rows()]

    found = [prints(table) for table in encodings] + [prints(plain, "x.parquet", pq.write_table)]
    assert found == [found[0]] * 5
    for changed in (
        plain.set_column(1, "n", pa.array([1, None, -3, 1, None, 3])),
        plain.set_column(1, "n", pa.array([1.0, None, -3.0] * 2)),
        plain.set_column(1, "n", pa.array([None, 1, -3, 1, None, -3])),
        plain.set_column(2, "w", pa.array([0.5, None, 2.5] * 2)),
        plain.rename_columns(["messages", "m", *plain.column_names[2:]]),
        plain.set_column(plain.column_names.index("tag"), "tag", pa.array([None, "aa", ""] * 2)),
        plain.slice(1),
    ):
        assert prints(changed)[0] != found[0][0]


def test_json_lines_as_people_write_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\n{"a": 1}\r\n\r\n  \t\n {"a": "\\u0000\\ud83d\\ude00"} \n{"a": 1, "a": 2}')
    for piece_nbytes in (1, 1000):
        assert [(at, row) for _, at, row in read_all(str(path), piece_nbytes)] == [
            (2, {"a": 1}),
            (5, {"a": "\0😀"}),
            (6, {"a": 2}),
        ]


def test_integers_stay_exact(tmp_path):
    numbers = [2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(f'{{"a": {n}, "b": "{"1" * 30}", "c": 0.5}}' for n in numbers))
    assert [row["a"] for _, _, row in read_all(str(path))] == numbers
    path.write_text('{"a": 1.0000000000000000000001, "b": 12345678901234567890123.0}')
    [(_, _, row)] = read_all(str(path))
    assert row == {"a": 1.0, "b": 1.2345678901234568e22}


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.json", b"[]", []),
        ("a.json", b" \xef", None),
        ("a.json", b"\xef\xbb\xbf [ ]\n", []),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        ("a.json", b'{"a": 1}', [{"a": 1}]),
        ("a.jsonl", b'[{"a": 1},\n {"a": 2}]', [{"a": 1}, {"a": 2}]),
        ("a.jsonl", b'[\n {"a": 1}\n]', [{"a": 1}]),
        ("a", b'{"a": 1}', [{"a": 1}]),
        ("a.jsonl", b"", []),
        ("a.jsonl", b"\n\n", []),
        ("a.json", gzip.compress(b'[{"a": 1}]', mtime=0), [{"a": 1}]),
        ("a.jsonl", b"\x50\x2a\x4d\x18\x02\x00\x00\x00hi" + stored(b'{"a": 1}'), [{"a": 1}]),
    ],
)
def test_content_decides_the_kind(tmp_path, name, content, rows):
    path = tmp_path / name
    path.write_bytes(content)
    if rows is None:
        with pytest.raises(FormatError, match="unknown file format"):
            read_all(str(path))
    else:
        assert [row for _, _, row in read_all(str(path))] == rows


def test_arrays_of_anything_are_split_as_the_parser_does(tmp_path):
    values = [1, -2.5, "a,]b", None, True, [], {}, [[[{"x": "}"}]]], "\\", "é"]
    path = tmp_path / "a.json"
    for indent in (None, 2):
        path.write_text(json.dumps(values, indent=indent))
        for piece_nbytes in (1, 7, 1000):
            assert [row for _, _, row in read_all(str(path), piece_nbytes)] == values


def test_nulls_of_columns_are_absent_keys(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "calls": [{"x": 1}]}]},
        {"tools": "[]"},
    ]
    pq.write_table(pa.Table.from_pylist([rows[0] | {"tools": None}, rows[1]]), tmp_path / "a.parquet")
    assert [row for _, _, row in read_all(str(tmp_path / "a.parquet"))] == rows


def test_text_that_is_not_utf8_is_an_error_where_it_is_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    bad = pa.array([b"good", b"\xff", b"fine"]).view(pa.string())
    pq.write_table(pa.table({"prompt": bad}), tmp_path / "a.parquet")
    rows = read_all(str(tmp_path / "a.parquet"))
    assert [rows[0][2], rows[2][2]] == [{"prompt": "good"}, {"prompt": "fine"}]
    with pytest.raises(RowError, match="prompt cannot be read: 'utf-8' codec"):
        to_sequence_source({**rows[1][2], "completion": "Yes."})


def test_globs_folders_and_order(tmp_path):
    import pyarrow as pa

    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "x[1].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"a": 1}')
    save_to_disk(tmp_path / "sub" / "ds", [pa.table({"n": [1]}), pa.table({"n": [2]})])
    (tmp_path / "sub" / "old").mkdir()
    with pa.ipc.new_stream(tmp_path / "sub" / "old" / "cache.arrow", pa.schema({"n": pa.int64()})):
        pass
    (tmp_path / "sub" / "old" / "dataset_info.json").write_text("{}")

    def names(*patterns):
        files = expand_inputs([f"{tmp_path}/{pattern}" for pattern in patterns])
        return [file.path.removeprefix(f"{tmp_path}/") for file in files]

    arrows = [f"sub/ds/data-0000{i}-of-00002.arrow" for i in (0, 1)]
    assert names("*.jsonl") == ["a.jsonl", "b.jsonl", "x[1].jsonl"]
    assert names("b.jsonl", "a.jsonl") == ["b.jsonl", "a.jsonl"]
    assert names("x[1].jsonl") == ["x[1].jsonl"]
    assert names("sub/ds") == arrows
    (tmp_path / "sub" / "dataset_dict.json").write_text('{"splits": ["ds", "old"]}')
    assert names("sub/ds", "sub/old") == [*arrows, "sub/old/cache.arrow"]
    (tmp_path / "sub" / "dataset_dict.json").unlink()
    assert names("**") == ["a.jsonl", "b.jsonl", "sub/c.jsonl", *arrows, "sub/old/cache.arrow", "x[1].jsonl"]
    assert [file.path for file in expand_inputs(tmp_path / "a.jsonl")] == [str(tmp_path / "a.jsonl")]
