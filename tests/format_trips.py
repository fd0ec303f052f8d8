"""Write and read packs in a format; used by the tests of all formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from sample_packs import Sample, assert_is, sample_of, samples

from megatron_sft_idx.formats.base import PackedReader, PackedSpec
from megatron_sft_idx.packs.run import PackRun


def run_of(packs: Sequence[Sample], token_dtype: Any = np.int32, mask_dtype: Any = np.uint8) -> PackRun:
    return PackRun(
        np.array([t for p in packs for t in p.tokens], token_dtype),
        np.array([v for p in packs for v in p.label_mask], mask_dtype),
        np.array([s for p in packs for s in p.starts], np.int64),
        np.array([len(p.tokens) for p in packs], np.int64),
        np.array([len(p.starts) for p in packs], np.int64),
    )


def spec_of(packs: Sequence[Sample], **values: Any) -> PackedSpec:
    longest = max((len(p.tokens) for p in packs), default=0)
    return PackedSpec(
        **{
            "num_packs": len(packs),
            "num_sequences": sum(len(p.starts) for p in packs),
            "num_tokens": sum(len(p.tokens) for p in packs),
            "longest_pack": longest,
            "token_dtype": np.dtype(np.int32),
            "mask_dtype": np.dtype(np.uint8),
            "capacity": max(longest, 1),
            **values,
        }
    )


def write_packs(writer: Any, path: Any, packs: Sequence[Sample], *, pieces: int = 1, **options: Any) -> PackedSpec:
    """Write packs in ``pieces`` runs. ``options`` are the writer's; its entry ``spec`` has fields of the spec."""
    spec = spec_of(packs, **options.pop("spec", {}))
    with writer(path, spec, **options) as out:
        for part in np.array_split(np.arange(len(packs)), pieces):
            out.write(run_of([packs[i] for i in part], spec.token_dtype, spec.mask_dtype))
    return spec


def assert_reads(reader: PackedReader, packs: Sequence[Sample]) -> None:
    """Check the packs one by one, in runs, and by counts."""
    assert len(reader) == len(packs)
    for i in reversed(range(len(packs))):
        assert_is(reader.read(i), packs[i])
    runs = list(reader.runs())
    expected = run_of(packs)
    for name in ("tokens", "loss_mask", "seq_starts", "pack_lengths", "pack_sequences"):
        found = [value for run in runs for value in getattr(run, name).tolist()]
        assert found == getattr(expected, name).tolist(), name
    spec = reader.spec
    assert (spec.num_packs, spec.num_sequences, spec.num_tokens, spec.longest_pack) == (
        len(packs),
        len(expected.seq_starts),
        len(expected.tokens),
        expected.pack_lengths.max(initial=0),
    )
    for run in runs:
        assert (run.tokens.dtype, run.loss_mask.dtype) == (spec.token_dtype, spec.mask_dtype)


@st.composite
def any_packs(draw: st.DrawFn) -> list[Sample]:
    """Draw packs with ids within uint16, sometimes a pack of a thousand sequences of one token."""
    packs = draw(samples())
    if draw(st.integers(0, 9)) == 0:
        packs.append(sample_of([1] * 1000, lambda p: p % 2, lambda p: p % 65536))
    return packs
