"""Find the ends of packs without any index, compared with a twin that tries every split."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_packs import Sample, assert_holds, five_files, sample_of, write_samples

from megatron_sft_idx.check import GivenFacts, lengths, rebuild
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard import Shard, ShardWriter

EOD = 5


def splits(starts: Sequence[Sequence[int]], num_tokens: int, ends: set[int]) -> Iterator[list[int]]:
    """Yield all possible ends of packs, the slow way. ``ends`` are the positions where a sequence may end."""

    def place(pack: int, begin: int) -> Iterator[list[int]]:
        if pack == len(starts):
            if begin == num_tokens:
                yield []
            return
        if any(begin + start not in ends for start in starts[pack][1:]):
            return
        for end in range(begin + starts[pack][-1] + 1, num_tokens + 1):
            if end in ends:
                for rest in place(pack + 1, end):
                    yield [end, *rest]

    return place(0, 0)


def possible_ends(packs: Sequence[Sample], eod_id: int | None) -> set[int]:
    tokens = [token for pack in packs for token in pack.tokens]
    mask = [value for pack in packs for value in pack.label_mask]
    return {i + 1 for i in range(len(tokens)) if mask[i] == 0 and eod_id in (None, tokens[i])}


def without_indexes(prefix: Path, packs: Sequence[Sample], **options: object) -> dict[str, bytes]:
    write_samples(prefix, packs, **options)
    before = five_files(prefix)
    os.unlink(f"{prefix}.idx")
    os.unlink(f"{prefix}.seq.idx")
    return before


@st.composite
def ended(draw: st.DrawFn) -> list[Sample]:
    """Draw packs whose sequences mostly end with EOD, which also occurs elsewhere. Masks are often 0."""
    packs = []
    strays = draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        size = sum(lengths)
        last = set(np.cumsum(lengths) - 1) if draw(st.integers(0, 9)) else set()
        ids = [EOD if i in last or draw(st.integers(0, 9)) < strays else 1 for i in range(size)]
        mask = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
        packs.append(sample_of(lengths, mask.__getitem__, ids.__getitem__))
    return packs


@settings(max_examples=80, deadline=None)
@given(packs=ended(), eod_id=st.sampled_from([EOD, EOD, None]), chunk=st.sampled_from([1, 2, 1 << 16]))
def test_a_split_is_found_where_every_possible_end_is_one(
    tmp_path_factory: pytest.TempPathFactory, packs: list[Sample], eod_id: int | None, chunk: int
) -> None:
    prefix = tmp_path_factory.mktemp("ends") / "x"
    before = without_indexes(prefix, packs)
    num_tokens = sum(len(pack.tokens) for pack in packs)
    ends = possible_ends(packs, eod_id)
    found = list(splits([pack.starts for pack in packs], num_tokens, ends))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths, "_CHUNK_TOKENS", chunk)
        if len(ends) == sum(len(pack.starts) for pack in packs) and found:
            rebuild(prefix, GivenFacts(eod_id=eod_id))
        else:
            with pytest.raises(FormatError, match=f"cannot be determined: {len(ends)} tokens"):
                rebuild(prefix, GivenFacts(eod_id=eod_id))
            return
    assert [[0, *split] for split in found] == [Shard(prefix).token_offsets.tolist()]
    # If every sequence ends as the user specified, the only split is the written one.
    if np.cumsum([len(pack.tokens) for pack in packs]).tolist() in found:
        assert five_files(prefix)[".idx"] == before[".idx"]
        assert_holds(Shard(prefix), packs)


def test_ids_that_stand_only_at_ends_leave_no_choice(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    packs = []
    for _ in range(200):
        lengths = rng.integers(1, 9, rng.integers(1, 6)).tolist()
        last = set(np.cumsum(lengths) - 1)
        packs.append(sample_of(lengths, lambda p: 0, lambda p, last=last: EOD if p in last else 6))
    before = without_indexes(tmp_path / "x", packs, token_dtype=np.uint16, capacity=99)
    rebuild(tmp_path / "x", GivenFacts(eod_id=EOD))
    assert five_files(tmp_path / "x")[".idx"] == before[".idx"]
    header = Shard(tmp_path / "x").header
    assert header.metadata["rebuilt"]["pack_lengths"] == f"masks and end-of-sequence id {EOD}"
    assert_holds(Shard(tmp_path / "x"), packs)


def test_masks_of_all_trained_sequences_tell_their_ends(tmp_path: Path) -> None:
    packs = [sample_of([1 + i % 3, 4], lambda p: 1, lambda p: p) for i in range(9)]
    without_indexes(tmp_path / "x", packs)
    rebuild(tmp_path / "x")
    assert_holds(Shard(tmp_path / "x"), packs)


def test_an_ambiguous_split_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    packs = [sample_of([4], lambda p: 0, lambda p: EOD if p in (1, 3) else 1) for _ in range(3)]
    without_indexes(tmp_path / "x", packs)
    here = os.listdir(tmp_path)
    with pytest.raises(
        FormatError, match=r"12 tokens could end a sequence .the mask is 0., but there are 3 sequences; .*--eod-id"
    ):
        rebuild(tmp_path / "x")
    with pytest.raises(FormatError, match=r"6 tokens could end a sequence .the mask is 0 and the id is 5., but"):
        rebuild(tmp_path / "x", GivenFacts(eod_id=EOD))
    with pytest.raises(FormatError, match=r": 0 tokens could end"):
        rebuild(tmp_path / "x", GivenFacts(eod_id=77))
    assert os.listdir(tmp_path) == here


def test_tokens_without_any_sequence_are_refused(tmp_path: Path) -> None:
    without_indexes(tmp_path / "x", [sample_of([3], lambda p: 0, lambda p: EOD)])
    os.truncate(tmp_path / "x.seq.bin", 0)
    with pytest.raises(FormatError, match=r"but there are 0 sequences"):
        rebuild(tmp_path / "x")


def test_starts_that_do_not_ascend_are_named(tmp_path: Path) -> None:
    without_indexes(tmp_path / "x", [sample_of([2, 2, 3], lambda p: 0, lambda p: EOD) for _ in range(2)])
    (tmp_path / "x.seq.bin").write_bytes(np.array([0, 2, 4, 0, 4, 2], "<u4").tobytes())
    with pytest.raises(FormatError, match=r"byte 20: start 2 follows start 4.*rule P3"):
        rebuild(tmp_path / "x", GivenFacts(eod_id=EOD))


def heap_of_rebuilding(prefix: Path, known: GivenFacts) -> int:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        assert rebuild(prefix, known).whole
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packs", [80_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_heap_grows_with_packs_and_not_with_tokens(tmp_path: Path, packs: int) -> None:
    with ShardWriter(tmp_path / "x", token_dtype=np.uint16, durable=False) as writer:
        tokens = np.tile(np.array([1, EOD, 2, 3, EOD], np.uint16), packs)
        writer.add_packs(tokens, tokens * 0, np.tile([0, 2], packs), np.full(packs, 5), np.full(packs, 2))
    del tokens
    before = (tmp_path / "x.idx").read_bytes()
    for lost in (".idx", ".seq.idx"):
        os.unlink(tmp_path / f"x{lost}")
        assert heap_of_rebuilding(tmp_path / "x", GivenFacts(eod_id=EOD)) < (4 << 20) + 100 * packs
        assert (tmp_path / "x.idx").read_bytes() == before
