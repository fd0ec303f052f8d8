"""A ``.media.items`` next to a valid shard: for any bytes, items come from inside the files, or it is rejected."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

from fuzz.contract import put_files, refused, scratch
from media_samples import as_plain, media_field, media_samples, reseal_media, seven_files, write_media
from reseal import Files

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.layout.media_layout import MEDIA, MEDIA_MAGIC, MediaHeader
from megatron_sft_idx.shard import Shard, ShardWriter

SAMPLES = media_samples(5, 5)
_LEAST_NBYTES = 192
_ITEMS = ".media.items"


@cache
def _whole() -> Files:
    """Return the files of the shard."""
    prefix = scratch("media-whole") / "x"
    write_media(prefix, SAMPLES)
    return seven_files(prefix)


def repair_items(data: bytes) -> bytes:
    """Return the data with valid magic, version and header size, and otherwise unchanged."""
    raw = bytearray(data.ljust(_LEAST_NBYTES, b"\0"))
    size = MEDIA.stated_nbytes(MEDIA_MAGIC + struct.pack("<I", 1) + raw[12:])
    if size % 64 or not _LEAST_NBYTES <= size <= len(raw):
        size = _LEAST_NBYTES
    raw[:16] = MEDIA_MAGIC + struct.pack("<II", 1, size)
    return bytes(raw)


def run(data: bytes) -> None:
    whole, folder = _whole(), scratch("media")
    sealed = reseal_media({**whole, _ITEMS: repair_items(data)})
    # With correct checksums and shard id, and also with correct counts.
    counts = {name: media_field(whole[_ITEMS], name) for name in ("num_packs", "num_items", "num_blobs", "data_nbytes")}
    counted = reseal_media(sealed, media=counts)
    for files in ({**whole, _ITEMS: data}, sealed, counted):
        put_files(folder, {f"x{suffix}": content for suffix, content in files.items()})
        _hold(folder, files[_ITEMS])


def _hold(folder: Path, raw: bytes) -> None:
    prefix = str(folder / "x")
    opened = was_read = False
    with refused(prefix):
        header = MediaHeader.decode(raw, prefix + _ITEMS)
        assert header.encode() == raw[: header.header_nbytes]
        mapped, copied = (Shard(prefix, backend=backend) for backend in ("mmap", "pread"))
        assert mapped.media is not None
        assert header.nbytes == len(raw)
        opened = True
        for pack, other in zip(mapped, copied, strict=True):
            assert as_plain(pack["media"]) == as_plain(other["media"])
            ends = [each.start + each.length for each in pack["media"]]
            assert max(ends, default=0) <= len(pack["input_ids"])
        assert mapped.media.nbytes_before(len(mapped)) >= 0
        for number in range(len(mapped.media)):
            mapped.media.data(number)
        was_read = True
    verify_shard(prefix)
    report = verify_shard(prefix, full=True)
    assert was_read or not report.ok
    # Copying the packs gives a valid shard, or an error.
    was_copied = False
    with refused(str(folder)), ShardWriter(folder / "copy", media=True, durable=False) as writer:
        writer.add_shard(Shard(prefix))
        was_copied = True
    assert opened or not was_copied
    assert was_copied or not report.ok
    if was_copied:
        assert verify_shard(folder / "copy", full=True).ok
