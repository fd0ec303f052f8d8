"""An input file of JSON or separated values, compressed or not: it is recognised, decompressed, divided and parsed.

The first byte chooses the suffix; the rest is the file.
"""

from __future__ import annotations

from fuzz.contract import refused, scratch

from megatron_sft_idx.chat.inputs import JsonPiece, expand_inputs, iter_pieces
from megatron_sft_idx.chat.separated import SeparatedPiece
from megatron_sft_idx.errors import SequenceError

_NAMES = ("x.jsonl", "x.json", "x.jsonl.gz", "x.json.zst", "x", "x.csv", "x.tsv.gz")


def run(data: bytes) -> None:
    path = scratch("input") / _NAMES[data[0] % len(_NAMES) if data else 0]
    path.write_bytes(data[1:])
    with refused(f"{path}: "):
        files = expand_inputs([path])
        if files[0].kind in ("parquet", "arrow"):
            return  # read by pyarrow, whose parsers are not ours
        large, small = (list(iter_pieces(files, piece_nbytes=size)) for size in (1 << 16, 50))
        assert sum(piece.num_bytes for piece in small) <= files[0].num_bytes
        assert all(piece.num_bytes >= 0 for piece in small)
        rows = [repr(row) for piece in large for row in piece.rows()]
        assert rows == [repr(row) for piece in small for row in piece.rows()]
        for piece in large:
            assert isinstance(piece, JsonPiece | SeparatedPiece)
            for position, row, _ in piece.rows():
                assert not isinstance(row, SequenceError) or row.position == position
