"""Writes the seeds of ``corpus/``, one small good input of each shape: ``python tests/fuzz/seeds.py``.

Inputs that once broke the contract stand beside them and are not made here.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zstandard

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from fuzz.fuzz_shard import join  # noqa: E402 - the folders above are where these are found
from fuzz.targets import CORPUS  # noqa: E402
from packs import demo_samples, five_files, write_samples  # noqa: E402

from megatron_sft_idx.layout.journal import DONE, MASK, PACK, encode_block, encode_head  # noqa: E402

CALL = {"type": "function", "function": {"name": "look_up", "arguments": '{"word": "é"}'}}
ROWS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "weight": 0.5}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}], "system": "Be kind"},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": "[{}]"},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "a"},
        ]
    },
    {"prompt": "Hi", "completion": "Yes", "chat_template_kwargs": {"thinking": True}},
    {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Yes"}]},
    {"instruction": "Say", "input": "yes", "output": "Yes", "history": [["Hi", "Hello"]]},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0.5], "attention_mask": [1, 1, 1]},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
]
ODD_JSON = [b'{"a": 1e308, "b": -0.0, "c": 18446744073709551616}', b'"\\ud83d\\ude00\\u0000"', b"[[[{}]], []]", b"null"]


def shards() -> Iterator[dict[str, bytes]]:
    """Small shards of either token and mask dtype, one of them empty."""
    with tempfile.TemporaryDirectory() as folder:
        for count, token, mask in ((3, np.uint16, np.uint8), (1, np.int32, np.float32), (0, np.int32, np.uint8)):
            prefix = Path(folder) / f"x{count}"
            write_samples(prefix, demo_samples(count), token_dtype=token, mask_dtype=mask, metadata={"a": ["é", 1.5]})
            yield five_files(prefix)


def journals() -> Iterator[bytes]:
    head = encode_head({"token_dtype": 4, "mask_dtype": 1, "capacity": None, "metadata": {"a": 1}})
    packs = encode_block(PACK, np.array([[3, 1], [9, 4]], np.uint32))
    mask = encode_block(MASK, np.array([[7, 0]], np.uint32))
    done = encode_block(DONE, np.empty((0, 2), np.uint32))
    yield from (head, head + packs, head + packs + mask + packs + done)


def legacy_files() -> Iterator[bytes]:
    values = {"input_ids": [1, 2, 3], "loss_mask": [1, 0, 0], "seq_start_id": [0, 1]}
    for make in (list, np.array, lambda v: [np.int32(i) for i in v]):
        for protocol in (0, 2, 4):
            array = np.empty(2, dtype=object)
            array[:] = [{key: make(value) for key, value in values.items()}] * 2
            file = io.BytesIO()
            np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (2,)})
            pickle.dump(array, file, protocol=protocol)
            yield file.getvalue()


def inputs() -> Iterator[tuple[str, list[bytes]]]:
    """Seeds by target."""
    whole = list(shards())
    rows = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
    lines = b"\n\r\n".join(rows[:2] + ODD_JSON)
    array = b"[" + b", ".join(rows[:2] + ODD_JSON) + b"]\n"
    frame = zstandard.ZstdCompressor(level=19)
    yield "header", [files[".seq.idx"] for files in whole]
    yield "journal", list(journals())
    yield "shard", [join(files) for files in whole]
    yield "json-lines", [lines, rows[2], b"\xef\xbb\xbf\n\n"]
    yield "json-array", [array, b" [] ", b'[1, [2, {"a": "]\\\\\\""}],\n3]']
    yield (
        "input-file",
        [b"\0" + lines, b"\1" + array, b"\2" + gzip.compress(lines, mtime=0), b"\3" + frame.compress(array) * 2],
    )
    yield "rows", rows
    yield "legacy-npy", list(legacy_files())
    yield "pack-stage", [bytes([t, m, 39, 0, i, i, a, *b"1\3" b"2\0" b"3\4" b"4\2" b"5\3" b"6\0"]) for t, m, i, a in
                         ((0, 0, 0, 0), (1, 1, 2, 1), (0, 1, 1, 0))]  # fmt: skip
    yield "offsets", [bytes([2, 3, 0, 2, 3, 0, 5, 7, 0, 3, 0]), bytes([1, 1, 0, 1, 0, 241, 0])]


def main() -> None:
    for name, seeds in inputs():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds):
            (folder / f"seed-{number}").write_bytes(seed)


if __name__ == "__main__":
    main()
