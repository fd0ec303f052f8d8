"""Every sequence says which file and row it was made from, and there is that row."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from chats import CHATS, TOKENIZER, files_of, preprocess, write_rows

from megatron_sft_idx.chat.pieces import JsonPiece
from megatron_sft_idx.chat.template import MaskOptions
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.tokenize.cut import Cutting
from megatron_sft_idx.tokenize.encoding import EncodingOptions, RowEncoder

CAPACITY = 256
BAD = {"messages": [{"role": "user", "content": "nobody answers"}]}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Files of some kilobytes are cut into many parts, as large ones are."""
    monkeypatch.setattr(Cutting, "of", classmethod(lambda cls, files: cls(3000, 2)))


@pytest.fixture(scope="module")
def encoder():
    return RowEncoder(EncodingOptions(str(TOKENIZER), masks=MaskOptions(turns="whole"), on_bad_row="skip"))


def inputs(folder: Path) -> list[Path]:
    """The bundled chats, shared out among files of all kinds, with rows among them that make no sequence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    made = [folder / name for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.parquet", "e.jsonl", "last.jsonl")]
    made[0].write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(["", *lines[::2], json.dumps(BAD), lines[1], ""]).encode())
    made[1].write_bytes(gzip.compress("\n".join([lines[3], "", "  ", *lines[1::2]]).encode()))
    made[2].write_text(json.dumps([*rows[:9], BAD, *rows[9:20]]), encoding="utf-8")
    pq.write_table(pa.table({"messages": [json.dumps(row["messages"]) for row in rows[:30]]}), made[3])
    tokens = [{"input_ids": [5, 6, 7 + i], "loss_mask": [0, 1, 1]} for i in range(300)]
    made[4].write_text("\n\n".join(map(json.dumps, tokens)))
    made[5].write_text(lines[0])
    return made


def rows_of(path: Path) -> dict[int, bytes]:
    """The rows of a file by number: of JSON lines, of the line."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return {i: json.dumps({"messages": json.loads(row["messages"])}).encode()
                for i, row in enumerate(pq.read_table(path).to_pylist())}  # fmt: skip
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if path.suffix == ".json":
        return dict(enumerate(json.dumps(row).encode() for row in json.loads(raw)))
    return dict(enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n")))


def expected(paths, encoder: RowEncoder) -> Counter[tuple[int, int, bytes]]:
    """File, row and ids of all sequences, each row encoded by itself; long ones are split."""
    found: Counter[tuple[int, int, bytes]] = Counter()
    for file, path in enumerate(paths):
        for number, raw in rows_of(path).items():
            done = encoder.encode(JsonPiece("a row", 1, 0, raw, np.array([len(raw)]), is_array=False))
            for start, stop in pairwise([0, *np.cumsum(done.lengths).tolist()]):
                ids = done.input_ids[start:stop]
                found.update((file, number, ids[at : at + CAPACITY].tobytes()) for at in range(0, len(ids), CAPACITY))
    return found


def sources(prefix: Path) -> Counter[tuple[int, int, bytes]]:
    """What a shard says of its sequences."""
    shard = Shard(prefix, columns=["source"])
    return Counter(
        (*place, ids.tobytes())
        for number in range(len(shard))
        for place, (ids, _) in zip(shard[number]["source"].tolist(), shard.sequences(number), strict=True)
    )


def built(prefix: Path, paths, *options: object) -> Path:
    done = preprocess(
        prefix,
        *("--source", "--input", *paths, "--overlong", "split", "--on-bad-row", "skip", *options),
        capacity=CAPACITY,
    )
    assert done.code == 0, done.err
    return prefix


def test_every_sequence_names_its_row(tmp_path, encoder):
    paths = inputs(tmp_path)
    whole = expected(paths, encoder)
    assert sources(built(tmp_path / "one", paths, "--keep-corpus")) == whole
    corpus = Shard(tmp_path / "one.unpacked", columns=["source"])
    places = [corpus[i]["source"][0].tolist() for i in range(len(corpus))]
    assert places == sorted(places)  # the corpus is in the order of the input
    assert len({(file, row) for file, row, _ in whole}) == len({(file, row) for file, row in map(tuple, places)})
    column = corpus.columns["source"]
    assert [file["name"] for file in column.spec.metadata["files"]] == [path.name for path in paths]
    assert str(tmp_path).encode() not in b"".join(files_of(tmp_path / "one").values())

    # Whoever makes it, however often: the same bytes.
    for number, options in enumerate((["--workers", 2], ["--workers", 2, "--output-shards", 1], ["--resume"])):
        assert files_of(built(tmp_path / f"again{number}", paths, *options)) == files_of(tmp_path / "one")
    shards = tmp_path / "three"
    built(shards, paths, "--output-shards", 3, "--workers", 2)
    assert sum((sources(Path(f"{shards}-{n:05d}-of-00003")) for n in range(3)), Counter()) == whole


def test_what_was_tokenised_before_an_interruption_keeps_its_rows(tmp_path, encoder):
    paths = inputs(tmp_path)
    built(tmp_path / "one", paths)
    late = paths[-1].read_bytes()
    paths[-1].write_text("{")  # the last row stops it, after all others became parts
    stopped = preprocess(tmp_path / "x", "--source", "--input", *paths, "--overlong", "split", "--on-bad-row", "error")
    assert stopped.code == 1
    paths[-1].write_bytes(late)
    assert not (tmp_path / "x.seq.idx").exists()
    assert files_of(built(tmp_path / "x", paths, "--overwrite")) == files_of(tmp_path / "one")


def test_a_shard_without(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [json.loads(line) for line in CHATS.open(encoding="utf-8")])
    plain = built(tmp_path / "plain", [rows], "--no-source")
    assert not list(Shard(plain).columns)
    assert not Path(f"{plain}.source.col").exists()
    named = built(tmp_path / "named", [rows])
    assert all(files_of(named)[end] == raw for end, raw in files_of(plain).items() if end != ".seq.idx")
    other = preprocess(
        plain, "--source", "--input", rows, "--overlong", "split", "--on-bad-row", "skip", "--resume", capacity=256
    )
    assert other.code == 1
    assert "source was None, is True" in other.err
