"""Write the seeds of ``corpus/``, one small valid input of each shape: ``python tests/fuzz/seeds.py``.

Inputs that once broke the contract are next to them, and are not made here.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zstandard

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from columned import SPECS, write_columned  # noqa: E402
from fuzz.fuzz_column import PACKS as COLUMNED  # noqa: E402
from fuzz.fuzz_media import SAMPLES as SHOWN  # noqa: E402
from fuzz.fuzz_memmap import NAMES  # noqa: E402
from fuzz.fuzz_recover import NAMES as KILLED  # noqa: E402
from fuzz.fuzz_shard import join as join_shard  # noqa: E402 - the folders above are where these are found
from fuzz.pieces import join  # noqa: E402
from fuzz.targets import CORPUS  # noqa: E402
from kills import leave_complete  # noqa: E402
from media_samples import write_media  # noqa: E402
from memmap_folders import make_folder  # noqa: E402
from pbins import merged, pbin_of  # noqa: E402
from sample_packs import demo_samples, five_files, write_samples  # noqa: E402

from megatron_sft_idx.layout.column import ColumnSpec  # noqa: E402
from megatron_sft_idx.layout.files import IDX_HEADER  # noqa: E402
from megatron_sft_idx.shard import ShardWriter  # noqa: E402
from megatron_sft_idx.storage.building import Building  # noqa: E402

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
    """Yield small shards of all token and mask dtypes, one of them empty."""
    with tempfile.TemporaryDirectory() as folder:
        for count, token, mask in ((3, np.uint16, np.uint8), (1, np.int32, np.float32), (0, np.int32, np.uint8)):
            prefix = Path(folder) / f"x{count}"
            write_samples(prefix, demo_samples(count), token_dtype=token, mask_dtype=mask, metadata={"a": ["é", 1.5]})
            yield five_files(prefix)


def columns() -> Iterator[bytes]:
    """Yield a column of each kind for the shard of the target."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "x"
        write_columned(prefix, COLUMNED)
        for name in sorted(SPECS):
            yield Path(f"{prefix}.{name}.col").read_bytes()


def media_items() -> Iterator[bytes]:
    """Yield the items of the target's shard, of packs without items, and of a few others."""
    with tempfile.TemporaryDirectory() as folder:
        for number, samples in enumerate((SHOWN, SHOWN[:1], [], SHOWN[::-1])):
            write_media(Path(folder) / f"x{number}", samples, metadata={"a": "é"} if number else {})
            yield (Path(folder) / f"x{number}.media.items").read_bytes()


def building_notes() -> Iterator[bytes]:
    """Yield the files of builds with and without columns, of a complete build, and of several outputs."""
    with tempfile.TemporaryDirectory() as name:
        prefix = Path(name) / "x"

        def notes() -> bytes:
            files = (Path(f"{prefix}.building/{each}") for each in ("build.json", "done.json", "packs"))
            return join([file.read_bytes() if file.exists() else b"" for file in files])

        for specs in ({}, {"grade": ColumnSpec("pack", "u1")}):
            writer = ShardWriter(prefix, capacity=40, metadata={"a": 1}, columns=specs, durable=False)
            for pack in demo_samples(3):
                columns = {"grade": [1]} if specs else None
                writer.add_pack(pack.tokens, pack.label_mask, pack.starts, columns=columns)
                writer.flush()
            yield notes()
            leave_complete(writer.finalize)
            yield notes()
            shutil.rmtree(f"{prefix}.building")
        with Building.take(str(prefix)) as job:
            job.begin({"work": "split"})
            job.stage([], {".seq.idx": 7})
            job.complete(["-00000-of-00002", "-00001-of-00002"])
            yield notes()


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


def pbins() -> Iterator[bytes]:
    documents = [[1, 2, 3], [], [4], [5, 6]]
    for generation, nbytes, protocol in ((1, 4, 2), (2, 2, 3), (3, 2, 4), (4, 1, None), (4, 4, 0), (4, 2, 1)):
        yield pbin_of(documents, generation=generation, token_nbytes=nbytes, protocol=protocol)
    yield merged([pbin_of([[7, 8, 9]] * 3), pbin_of(documents), pbin_of(documents[1:])])


def chunk_lines() -> Iterator[bytes]:
    for pack in demo_samples(4):
        lengths = [b - a for a, b in zip(pack.bounds, pack.bounds[1:], strict=False)]
        labels = [token if trained else -100 for token, trained in zip(pack.tokens, pack.mask, strict=True)]
        row = {"input_ids": pack.tokens, "labels": labels,
               "position_ids": [i for n in lengths for i in range(n)], "lengths": lengths,
               "pack_length": len(pack.tokens), "num_samples": len(lengths)}  # fmt: skip
        yield json.dumps(row).encode() + b"\n"


def memmap_folders() -> Iterator[bytes]:
    packs = demo_samples(3)
    weights = np.full((3, 12), 0.5, ">f4")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, changes in enumerate(({}, {"loss_mask": np.zeros((3, 12), "u1")}, {"loss_mask": weights})):
            made = make_folder(folder / str(number), packs, 12, **changes)
            yield join([(made / part).read_bytes() for part in NAMES])


def stock_datasets() -> Iterator[bytes]:
    for code, mask_code in ((8, 1), (4, 7), (5, 6)):
        files = []
        for number, value in ((code, 9), (mask_code, 0)):
            dtype = {1: "u1", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}[number]
            lengths = np.array([3, 1, 2], "<i4")
            pointers = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(dtype).itemsize
            header = IDX_HEADER.pack(b"MMIDIDX\0\0", 1, number, 3, 4)
            files += [header + lengths.tobytes() + pointers.tobytes() + np.arange(4, dtype="<i8").tobytes(),
                      np.full(6, value, dtype).tobytes()]  # fmt: skip
        yield join(files)


def killed_builds() -> Iterator[bytes]:
    """Yield builds killed while writing, with and without weights, and killed before the renames."""
    packs = demo_samples(3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        left = [folder / part for part in KILLED]
        for weights in (False, True):
            mask_dtype = np.float32 if weights else np.uint8
            writer = ShardWriter(folder / "x", durable=False, mask_dtype=mask_dtype, capacity=40, metadata={"a": 1})
            for pack in packs:
                writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
                writer.flush()
            if weights:
                writer.add_pack([1, 2], [0.5, 0], [0])
                writer.flush()
            yield _with_missing(left)
            writer.complete()
            yield _with_missing(left)
            leave_complete(writer.finalize)
            yield _with_missing(left)
            shutil.rmtree(folder / "x.building")


def _with_missing(paths: list[Path]) -> bytes:
    """Return an input of files, after a byte with a bit for each missing file."""
    missing = sum(1 << i for i, path in enumerate(paths) if not path.exists())
    return bytes([missing]) + join([path.read_bytes() if path.exists() else b"" for path in paths])


def raw_indexes() -> Iterator[bytes]:
    lines = [b'{"a": 1}', b"[2]\r", '"é"'.encode()]
    starts = [0, 9, 14]
    for protocol in (0, 2, 4):
        index = pickle.dumps([(start, len(line)) for start, line in zip(starts, lines, strict=True)], protocol)
        yield join([index, b"\n".join(lines)])
    yield join([pickle.dumps([(1, 3)]), b"\n{}\n\n[]\n"])


def inputs() -> Iterator[tuple[str, list[bytes]]]:
    """Yield the seeds of each target."""
    whole = list(shards())
    rows = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
    lines = b"\n\r\n".join(rows[:2] + ODD_JSON)
    array = b"[" + b", ".join(rows[:2] + ODD_JSON) + b"]\n"
    frame = zstandard.ZstdCompressor(level=19)
    yield "header", [files[".seq.idx"] for files in whole]
    yield "column", list(columns())
    yield "media", list(media_items())
    yield "building", list(building_notes())
    yield "shard", [join_shard(files) for files in whole]
    yield "json-lines", [lines, rows[2], b"\xef\xbb\xbf\n\n"]
    yield "json-array", [array, b" [] ", b'[1, [2, {"a": "]\\\\\\""}],\n3]']
    yield (
        "input-file",
        [b"\0" + lines, b"\1" + array, b"\2" + gzip.compress(lines, mtime=0), b"\3" + frame.compress(array) * 2],
    )
    yield "rows", rows
    yield "legacy-npy", list(legacy_files())
    pairs = [(0, 3), (255, 2**16), (2**31, 2**62), (-5, 2**63 - 1)]
    yield "pickled-pairs", [pickle.dumps(value, protocol) for value in (pairs, [], pairs[:1]) for protocol in range(5)]
    yield "pbin", list(pbins())
    yield "raw-index", list(raw_indexes())
    yield "jsonl-chunks", [b"".join(chunk_lines()), next(chunk_lines())]
    yield "memmap", list(memmap_folders())
    yield "stock", list(stock_datasets())
    yield "verify", [b"\0" + join_shard(files) for files in whole] + [b"\x08" + join_shard(whole[0])]
    damages = ((0, 255, 0), (0, 255, 8), (1, 255, 16), (0, 255, 24), (1, 2, 4))
    yield "rebuild", [bytes([eod, missing]) + join_shard(whole[i]) for i, eod, missing in damages]
    yield "recover", list(killed_builds())
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
