"""Requirements for every reader of packed data: valid packs, the same by number and in runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.formats.base import PackedReader
from megatron_sft_idx.packs.run import PackRun

Packs = list[tuple[list[int], list[Any], list[int]]]


def packs_of(reader: PackedReader) -> Packs:
    """Return ids, mask and boundaries of every pack, read in both ways.

    Raises:
        SFTIndexError: a pack was rejected, in both ways.
    """
    # Only the text of an error is kept, because its traceback would keep this frame and thereby the files open.
    packs, refusal = [], ""
    for index in range(len(reader)):
        try:
            packs.append(_by_number(reader, index))
        except SFTIndexError as error:
            refusal = str(error)
    try:
        runs = [pack for run in reader.runs() for pack in _of_run(run)]
    except SFTIndexError:
        assert refusal, "refused in runs and not by number"
        raise
    assert not refusal, f"refused by number and not in runs: {refusal}"
    assert runs == packs
    _check_spec(reader, packs)
    return packs


def _by_number(reader: PackedReader, index: int) -> tuple[list[int], list[Any], list[int]]:
    pack = reader.read(index)
    ids, mask, bounds = pack["input_ids"], pack["loss_mask"], pack["seq_boundaries"]
    assert ids.dtype in (np.uint16, np.int32)
    assert mask.dtype in (np.uint8, np.float32)
    assert bounds.dtype == np.int32
    assert all(array.dtype.isnative for array in (ids, mask, bounds))
    assert len(ids) == len(mask) == bounds[-1]
    assert bounds[0] == 0
    assert all(a < b for a, b in pairwise(bounds.tolist()))
    assert not mask[bounds[1:] - 1].any()
    assert (ids >= 0).all()
    assert (mask >= 0).all()
    assert np.isfinite(mask).all()
    assert mask.dtype == np.float32 or mask.max() <= 1
    return ids.tolist(), mask.tolist(), bounds.tolist()


def _of_run(run: PackRun) -> Packs:
    ids, mask, starts = run.tokens.tolist(), run.loss_mask.tolist(), run.seq_starts.tolist()
    packs = []
    for length, sequences in zip(run.pack_lengths.tolist(), run.pack_sequences.tolist(), strict=True):
        packs.append((ids[:length], mask[:length], [*starts[:sequences], length]))
        del ids[:length], mask[:length], starts[:sequences]
    assert not ids + mask + starts
    return packs


def _check_spec(reader: PackedReader, packs: Packs) -> None:
    spec, lengths = reader.spec, [len(ids) for ids, _, _ in packs]
    assert (spec.num_packs, spec.num_tokens, spec.longest_pack) == (len(packs), sum(lengths), max(lengths, default=0))
    assert spec.num_sequences == sum(len(bounds) - 1 for _, _, bounds in packs)
    assert spec.capacity >= spec.longest_pack
    if packs:
        first = reader.read(0)
        assert (first["input_ids"].dtype, first["loss_mask"].dtype) == (spec.token_dtype, spec.mask_dtype)
