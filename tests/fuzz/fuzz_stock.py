"""A stock Megatron dataset, with masks by a rule or from a second dataset: items are at the index's offsets.

The input is ``.idx`` and ``.bin`` of the tokens, then of the masks.
"""

from __future__ import annotations

from fuzz.contract import refused, scratch
from fuzz.packed import packs_of
from fuzz.pieces import split
from fuzz.repair import repair_idx

from megatron_sft_idx.formats.stock import Reader, recognise

SUFFIXES = (".idx", ".bin", "-mask.idx", "-mask.bin")


def run(data: bytes) -> None:
    prefix = str(scratch("stock") / "x")
    files = split(data, len(SUFFIXES))
    for whole in (files, [part for i in (0, 2) for part in repair_idx(*files[i : i + 2])]):
        for suffix, content in zip(SUFFIXES, whole, strict=True):
            with open(prefix + suffix, "wb") as file:
                file.write(content)
        recognise(prefix)
        with refused(prefix):
            packs = packs_of(Reader(prefix, mask_rule="all"))
            assert all(bounds == [0, len(ids)] and mask == [1] * (len(ids) - 1) + [0] for ids, mask, bounds in packs)
            with refused(prefix):
                masked = packs_of(Reader(prefix, mask_path=prefix + "-mask"))
                assert [ids for ids, _, _ in masked] == [ids for ids, _, _ in packs]
        for alignment in ("token", "rolled-right"):
            with refused(prefix):
                packs_of(Reader(prefix, mask_path=prefix + "-mask", mask_alignment=alignment))
