"""A shard whose five files come from one input: it is opened, read in every way, and repacked.

The input is four uint16 sizes, then ``.seq.idx``, ``.seq.bin``, ``.bin``, ``.loss.bin`` and, as the rest, ``.idx``.
"""

from __future__ import annotations

import numpy as np
from damage import read_everything
from fuzz import pieces
from fuzz.contract import refused, scratch
from fuzz.repair import repair_shard

from megatron_sft_idx.packs.run import windows
from megatron_sft_idx.shard import Shard, ShardWriter

ORDER = (".seq.idx", ".seq.bin", ".bin", ".loss.bin", ".idx")


def join(files: dict[str, bytes]) -> bytes:
    """Return an input of five files."""
    return pieces.join([files[suffix] for suffix in ORDER])


def split(data: bytes) -> dict[str, bytes]:
    """Return any input as five files."""
    return dict(zip(ORDER, pieces.split(data, len(ORDER)), strict=True))


def run(data: bytes) -> None:
    files = split(data)
    for whole in (files, repair_shard(files)):
        prefix = str(scratch("shard") / "x")
        for suffix, content in whole.items():
            with open(prefix + suffix, "wb") as file:
                file.write(content)
        with refused(prefix):
            mapped, copied = Shard(prefix), Shard(prefix, backend="pread")
            assert read_everything(mapped) == read_everything(copied)
        _write_again(prefix)


def _write_again(prefix: str) -> None:
    """Packs of a damaged shard that a writer accepts keep every rule, so they are read back unchanged."""
    with refused():
        source = Shard(prefix)
        dtypes = {"token_dtype": source.header.token_dtype, "mask_dtype": source.header.mask_dtype}
        with ShardWriter(prefix + "-again", **dtypes, durable=False, overwrite=True) as writer:
            for window in windows(source.files):
                writer.add_run(window.run())
        again = Shard(prefix + "-again")
        assert len(again) == len(source)
        for ours, theirs in zip(again, source, strict=True):
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)  # type: ignore[literal-required]
