"""A column next to a valid shard: for any bytes, rows come from inside the file, or the column is rejected."""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
import xxhash
from fuzz.contract import refused, scratch
from sample_packs import demo_samples, write_samples

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.layout.column import COLUMN, COLUMN_MAGIC, num_rows_in
from megatron_sft_idx.shard import Shard

PACKS = demo_samples(3)
_LEAST_NBYTES = 192


@cache
def _shard() -> str:
    """Return the prefix of the shard."""
    prefix = str(scratch("column") / "x")
    write_samples(prefix, PACKS)
    return prefix


def repair_column(data: bytes, shard_id: bytes) -> bytes:
    """Return the data with valid magic, version, shard id and checksum, and otherwise unchanged."""
    raw = bytearray(data.ljust(_LEAST_NBYTES, b"\0"))
    size = COLUMN.stated_nbytes(COLUMN_MAGIC + raw[8:])
    if size % 64 or not _LEAST_NBYTES <= size <= len(raw):
        size = _LEAST_NBYTES
    raw[:8] = COLUMN_MAGIC
    raw[8:32] = struct.pack("<II", 1, size) + shard_id
    raw[size - 16 : size] = xxhash.xxh3_128_digest(bytes(raw[: size - 16]))
    return bytes(raw)


def run(data: bytes) -> None:
    prefix = _shard()
    path, good = f"{prefix}.a.col", Shard(prefix).header
    for raw in (data, repair_column(data, good.shard_id)):
        with open(path, "wb") as file:
            file.write(raw)
        opened = False
        with refused(path):
            mapped, copied = (Shard(prefix, columns=["a"], backend=backend) for backend in ("mmap", "pread"))
            column = mapped.columns["a"]
            assert len(column) == num_rows_in(good, column.spec.per)
            assert column.header.encode() + column.values[:].tobytes() == raw
            for pack, other in zip(mapped, copied, strict=True):
                assert np.asarray(pack["a"]).tobytes() == np.asarray(other["a"]).tobytes()  # type: ignore[typeddict-item]
            opened = True
        report = verify_shard(prefix, full=True)
        # A file that does not begin like a column is not checked.
        assert opened or not report.ok or raw[:8] != COLUMN_MAGIC
        if opened and xxhash.xxh3_128_digest(raw[column.spec.header_nbytes :]) == column.header.checksum:
            assert report.ok, report.findings
