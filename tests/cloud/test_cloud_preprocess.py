"""``preprocess`` from a bucket to a bucket gives the bytes of a local run, also after interruptions."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import disks
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from chats import CHATS, TOKENIZER, preprocess
from copies import command, ended, five_keys, keys, remote_files, run, wait_until, write_shard
from faults import Faults
from sample_packs import five_files
from swift_server import SwiftServer

from megatron_sft_idx.chat import inputs
from megatron_sft_idx.chat.inputs import expand_inputs, iter_pieces
from megatron_sft_idx.errors import FormatError

pytestmark = pytest.mark.cloud

_OPTIONS = ("--tokenizer-model", str(TOKENIZER), "--seq-length", "1024", "--workers", "2")


# Rows of one shape, so that Arrow has a type for them.
_ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {i} times {i}?"},
            {"role": "assistant", "content": f"It is {i * i}. " + "And so on. " * (i % 23)},
        ]
    }
    for i in range(200)
]


def test_every_kind_of_input_gives_the_local_bytes(s3: Any, bucket: str, tmp_path: Path) -> None:
    assert preprocess(tmp_path / "local/train", rows=_ROWS).code == 0
    text, expected = (tmp_path / "local/rows.jsonl").read_bytes(), five_files(tmp_path / "local/train")
    table = tmp_path / "chats.parquet"
    pq.write_table(pa.Table.from_pylist(_ROWS), table, row_group_size=7)
    for name, body in {
        "chats.jsonl": text,
        "chats.json": json.dumps(_ROWS).encode(),
        "chats.jsonl.gz": gzip.compress(text),
        "chats.jsonl.zst": zstandard.ZstdCompressor().compress(text),
        "chats.parquet": table.read_bytes(),
    }.items():
        s3.put_object(Bucket=bucket, Key=f"raw/{name}", Body=body)
        code, said = run(
            "preprocess", "--input", f"s3://{bucket}/raw/{name}", *_OPTIONS,
            "--staging", str(tmp_path / "staging"), "--output-prefix", f"s3://{bucket}/out/{name}",
        )  # fmt: skip
        assert code == 0, said
        found = remote_files(s3, bucket, f"out/{name}")
        for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx"):  # .seq.idx holds the fingerprint of the input's bytes
            assert found[suffix] == expected[suffix], name
    assert not (tmp_path / "staging").exists()


def test_parts_of_an_input_by_pattern_and_the_corpus_beside_the_shard(s3: Any, bucket: str, tmp_path: Path) -> None:
    lines = CHATS.read_bytes().splitlines(keepends=True)
    for number, begin in enumerate(range(0, len(lines), 20)):
        s3.put_object(Bucket=bucket, Key=f"raw/part-{number:03}.jsonl", Body=b"".join(lines[begin : begin + 20]))
    code, said = run(
        "preprocess", "--input", f"s3://{bucket}/raw/", *_OPTIONS, "--keep-corpus", "--earlier-reasoning", "drop",
        "--staging", str(tmp_path / "staging"), "--output-prefix", f"s3://{bucket}/out/train",
    )  # fmt: skip
    assert code == 0, said
    assert f"wrote s3://{bucket}/out/train" in said
    assert preprocess(tmp_path / "local/train").code == 0
    assert remote_files(s3, bucket, "out/train")[".bin"] == five_files(tmp_path / "local/train")[".bin"]
    assert keys(s3, bucket, "out/") == {
        *five_keys("out/train"), *five_keys("out/train.unpacked"),
        "out/train.source.col", "out/train.unpacked.source.col",
    }  # fmt: skip


def test_an_input_replaced_while_it_is_read_is_an_error(
    s3: Any, bucket: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(inputs.read_ahead.__kwdefaults__, "range_nbytes", 5000)
    text = CHATS.read_bytes() * 4
    for begun in (False, True):
        s3.put_object(Bucket=bucket, Key="raw.jsonl", Body=text)
        pieces = iter_pieces(expand_inputs([f"s3://{bucket}/raw.jsonl"]), piece_nbytes=10_000)
        if begun:
            next(pieces)
        s3.put_object(Bucket=bucket, Key="raw.jsonl", Body=text[::-1])
        with pytest.raises(FormatError, match="was replaced during the run"):
            list(pieces)
        faults.count("input replaced under a run", "refused")


def test_an_upload_that_fails_keeps_what_was_built_and_says_how_to_send_it(
    swift: SwiftServer, s3: Any, bucket: str, tmp_path: Path, faults: Faults
) -> None:
    large, staging = write_shard(tmp_path / "large", 8000, 8), tmp_path / "staging"
    output = ("--staging", str(staging), "--output-prefix", f"s3://{bucket}/merged")
    process = command("merge", large, large, *output)
    wait_until(
        lambda: s3.list_multipart_uploads(Bucket=bucket).get("Uploads") or process.poll() is not None, "an upload"
    )
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert code == 143, said
    (kept,) = [path for path in staging.iterdir() if path.name.endswith(".seq.idx")]
    hint = f"megatron-sft-idx copy {str(kept).removesuffix('.seq.idx')} s3://{bucket}/merged"
    assert hint in said
    assert "merged.seq.idx" not in keys(s3, bucket)
    code, said = run(*hint.split()[1:])
    assert code == 0, said
    assert remote_files(s3, bucket, "merged") == five_files(str(kept).removesuffix(".seq.idx"))
    faults.count("upload of a built shard terminated", "kept, and sent by copy")


def test_a_full_staging_disk(s3: Any, bucket: str, tmp_path: Path, faults: Faults) -> None:
    shard = write_shard(tmp_path / "source", 100, 9)
    with disks.mounted("size=1m") as disk:
        code, said = run(
            "pack", shard, "--seq-length", "8192", "--staging", str(disk), "--output-prefix", f"s3://{bucket}/x"
        )
        assert (code, "No space left on device" in said) == (1, True), said
        assert not [path for path in disk.iterdir() if path.name.endswith(".seq.idx")]
    assert keys(s3, bucket) == set()
    faults.count("staging disk full", "refused")


def test_a_wrong_bucket_is_found_before_the_work(bucket: str, tmp_path: Path) -> None:
    code, said = run(
        "preprocess", "--input", str(CHATS), *_OPTIONS,
        "--staging", str(tmp_path / "staging"), "--output-prefix", "s3://there-is-none/train",
    )  # fmt: skip
    assert (code, "no such bucket" in said) == (1, True), said
    assert "tokenising" not in said
    assert not (tmp_path / "staging").exists()
