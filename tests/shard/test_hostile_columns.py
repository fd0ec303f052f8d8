"""Columns with false headers and corrected checksums: extreme numbers, endless JSON, overflowing products."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import pytest
import xxhash
from columned import SPECS, values_of, write_columned
from fuzz.fuzz_column import repair_column
from sample_packs import demo_samples, write_samples

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.layout.column import FIXED_NBYTES, ColumnSpec
from megatron_sft_idx.shard import Shard, write_column

PACKS = demo_samples()
EXTREMES = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**56, 2**60, 2**61, 2**63 - 1, 2**63, 2**64 - 1]
# Offsets and formats of the fields, from FORMAT.md.
NUMBERS = {"header_nbytes": (12, "I"), "per": (32, "B"), "dtype": (33, "B"), "alignment": (34, "B"), "zero": (35, "B"),
           "width": (36, "I"), "rows": (40, "Q"), "json_nbytes": (48, "I")}  # fmt: skip


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Return the prefix of a shard with an attached column ``a``."""
    prefix = str(tmp_path / "x")
    write_samples(prefix, PACKS)
    spec = ColumnSpec("token", "f4", 3, metadata={"teacher": "big"})
    values = values_of(spec, 0, Shard(prefix).header.num_tokens)
    write_column(prefix, "a", values, per="token", metadata=spec.metadata)
    return prefix


def is_refused(prefix: str, raw: bytes) -> bool:
    """Return whether opening the column is an error, quickly and with little memory. Verification must agree."""
    Path(f"{prefix}.a.col").write_bytes(raw)
    tracemalloc.start()
    begin = time.monotonic()
    try:
        shard = Shard(prefix, columns=["a"])
        assert b"".join(pack["a"].tobytes() for pack in shard) == raw[-shard.columns["a"].values.nbytes :]  # type: ignore[typeddict-item, union-attr]
        refused = False
    except SFTIndexError as error:
        assert str(error).startswith(f"{prefix}.a.col: ")  # noqa: PT017
        refused = True
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (4 << 20) + 4 * len(raw), f"{peak:,} bytes for a file of {len(raw):,}"
    assert time.monotonic() - begin < 20
    assert verify_shard(prefix).ok != refused
    return refused


def lying(raw: bytes, shard_id: bytes, **fields: int) -> bytes:
    """Return the file with other numbers and a corrected checksum."""
    lie = bytearray(raw)
    for name, value in fields.items():
        offset, kind = NUMBERS[name]
        struct.pack_into("<" + kind, lie, offset, value % 256 ** struct.calcsize("<" + kind))
    size = struct.unpack_from("<I", lie, 12)[0]
    if 192 <= size <= len(lie):
        lie[size - 16 : size] = xxhash.xxh3_128_digest(bytes(lie[: size - 16]))
    return bytes(lie)


def test_every_number_at_its_extremes(prefix: str) -> None:
    good, shard_id = Path(f"{prefix}.a.col").read_bytes(), Shard(prefix).shard_id
    assert not is_refused(prefix, good)
    for name in NUMBERS:
        for value in EXTREMES:
            raw = lying(good, shard_id, **{name: value})
            # The other alignment is valid too.
            assert is_refused(prefix, raw) or raw == good or name == "alignment", (name, value)


@pytest.mark.parametrize("rows", EXTREMES)
def test_rows_by_width_that_overflow(prefix: str, rows: int) -> None:
    """Test products that overflow 64 bits to the size of the file, or to 0."""
    good, shard_id = Path(f"{prefix}.a.col").read_bytes(), Shard(prefix).shard_id
    for width in (1, 2, 4, 2**14, 2**16, 2**30, 2**31, 2**32 - 1):
        for per in (1, 2, 3):
            raw = lying(good, shard_id, rows=rows, width=width, per=per, alignment=2 if per == 1 else 0)
            assert is_refused(prefix, raw)


@pytest.mark.parametrize("most", [1, 1 << 20])
def test_json_that_would_not_end(prefix: str, most: int) -> None:
    shard_id = Shard(prefix).shard_id
    good = Path(f"{prefix}.a.col").read_bytes()
    for block in (
        b"[" * most,
        b'{"a":' * most,
        b'{"a":' + b"[" * most + b"]" * most + b"}",
        b'{"a":"' + b"\\u0000" * most,
        b'{"a":1e' + b"9" * most + b"}",
        b"{" + b",".join(b'"a":1' for _ in range(min(most, 1000))) + b"}",
        b'{"a":' + b"9" * most + b"}",
        b"\xff" * most,
        b"\0" * most,
    ):
        size = -(-(FIXED_NBYTES + len(block) + 16) // 64) * 64
        raw = good[:FIXED_NBYTES] + block + bytes(size - FIXED_NBYTES - len(block)) + good[-3:]
        lie = lying(raw, shard_id, header_nbytes=size, json_nbytes=len(block))
        assert is_refused(prefix, lie), block[:20]


def test_cut_at_every_byte_and_every_bit_flipped(tmp_path: Path) -> None:
    """A column that the shard lists does not open with any change of its header or another size."""
    write_columned(tmp_path / "x", PACKS, {"source": SPECS["source"]})
    path = tmp_path / "x.source.col"
    good = path.read_bytes()
    for size in range(0, len(good), 7):
        path.write_bytes(good[:size])
        with pytest.raises(SFTIndexError):
            Shard(tmp_path / "x", columns=["source"])
    for bit in range(0, 8 * struct.unpack_from("<I", good, 12)[0], 3):
        raw = bytearray(good)
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        with pytest.raises(SFTIndexError):
            Shard(tmp_path / "x", columns=["source"])


def test_the_repair_of_a_good_column_changes_nothing(prefix: str) -> None:
    good = Path(f"{prefix}.a.col").read_bytes()
    assert repair_column(good, Shard(prefix).shard_id) == good
