"""Fixed-length blocks of a ``.pbin``: examples, and comparison with brute force."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pbins import header_of, merged, pbin_of

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.modalities import PackedMemMapDatasetContinuous, PackedMemMapDatasetMegatron

Made = Callable[[bytes], str]
View = PackedMemMapDatasetContinuous | PackedMemMapDatasetMegatron


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(data: bytes) -> str:
        path = tmp_path / "data.pbin"
        path.write_bytes(data)
        return str(path)

    return make


def blocks_of(view: View) -> list[list[int]]:
    return [view[i]["input_ids"].tolist() for i in range(len(view))]


def continuous_twin(stream: list[int], block_size: int, reuse_last_target: bool) -> list[list[int]]:
    """Cut blocks from the front as long as a whole block is left."""
    blocks = []
    while len(stream) >= block_size:
        blocks.append(stream[:block_size])
        stream = stream[block_size - reuse_last_target :]
    return blocks


def megatron_twin(documents: list[list[int]], block_size: int) -> list[list[int]]:
    """The published loop, with positions in tokens from the start of the data."""
    stream = [token for document in documents for token in document]
    blocks, begin, filled, position = [], 0, 0, 0
    for document in documents:
        if filled + len(document) < block_size:
            filled += len(document)
        elif filled + len(document) == block_size:
            blocks.append(stream[begin : begin + block_size])
            filled = 0
            begin += block_size
        else:
            blocks.append(stream[begin : begin + block_size])
            if len(document) > block_size:
                begin += block_size
                filled = 0
            else:
                begin = position
                filled = len(document)
        position += len(document)
    return blocks


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "reuse", "expected"),
    [
        (10, 4, True, [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]),
        (10, 4, False, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (11, 4, True, [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]),
        (12, 4, False, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (4, 4, True, [[0, 1, 2, 3]]),
        (3, 2, True, [[0, 1], [1, 2]]),
        (3, 2, False, [[0, 1]]),
    ],
)
def test_continuous_by_hand(
    made: Made, num_tokens: int, block_size: int, reuse: bool, expected: list[list[int]]
) -> None:
    path = made(pbin_of([list(range(num_tokens))]))
    assert blocks_of(PackedMemMapDatasetContinuous(path, block_size, reuse)) == expected
    if reuse:
        assert blocks_of(PackedMemMapDatasetContinuous(path, block_size)) == expected


def test_megatron_by_hand(made: Made) -> None:
    path = made(pbin_of([[1, 2], [3, 4], [5], [6, 7], [8, 9, 10, 11, 12, 13], [14]]))
    # [1 2 3 4]: exact. [5 6 7 8]: the next document is longer than a block and continues after it. Then 9 is skipped
    # without being counted: only 14 fills the block that begins there.
    assert blocks_of(PackedMemMapDatasetMegatron(path, 4)) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    # [1 2 3]: the second document does not fit and begins the next one.
    assert blocks_of(PackedMemMapDatasetMegatron(path, 3)) == [[1, 2, 3], [3, 4, 5], [6, 7, 8]]


DOCUMENTS = st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=9), min_size=1, max_size=15)


@settings(max_examples=100)
@given(DOCUMENTS, st.integers(1, 4), st.integers(2, 12), st.booleans())
def test_against_brute_force(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], generation: int, block_size: int, reuse: bool
) -> None:
    stream = [token for document in documents for token in document]
    path = tmp_path_factory.getbasetemp() / "blocks.pbin"
    path.write_bytes(pbin_of(documents, generation=generation))
    if len(stream) < block_size:
        with pytest.raises(FormatError, match=r"fewer than one block of|not a \.pbin"):
            PackedMemMapDatasetContinuous(path, block_size, reuse)
        return
    expected = continuous_twin(stream, block_size, reuse)
    assert blocks_of(PackedMemMapDatasetContinuous(path, block_size, reuse)) == expected
    assert blocks_of(PackedMemMapDatasetMegatron(path, block_size)) == megatron_twin(documents, block_size)


@pytest.mark.parametrize("view", [PackedMemMapDatasetContinuous, PackedMemMapDatasetMegatron])
def test_numbers_types_and_refusals(made: Made, view: type[View]) -> None:
    path = made(pbin_of([[1, 2, 3], [4, 5]], token_nbytes=4))
    blocks = view(path, 2)
    assert blocks[-1]["input_ids"].tolist() == blocks[len(blocks) - 1]["input_ids"].tolist()
    assert blocks[0]["input_ids"].dtype == np.int32
    assert not blocks[0]["input_ids"].flags.writeable
    for number in (len(blocks), -len(blocks) - 1):
        with pytest.raises(IndexError, match=f"there is no block {number}; the number of blocks is {len(blocks)}"):
            blocks[number]
    with pytest.raises(FormatError, match="block_size 1, expected at least 2"):
        view(path, 1)
    with pytest.raises(FormatError, match="5 tokens in total, fewer than one block of 6"):
        view(path, 6)
    made(pbin_of([[1, 2, 2**31]], token_nbytes=4))
    with pytest.raises(SequenceError, match="has id 2147483648"):
        view(path, 3)[0]


def _ids(view: View, number: int) -> list[int]:
    return view[number]["input_ids"].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("view", [PackedMemMapDatasetContinuous, PackedMemMapDatasetMegatron])
def test_views_travel_to_other_processes(made: Made, view: type[View]) -> None:
    path = made(pbin_of([list(range(10))] * 400))
    blocks = view(path, 10)
    assert len(pickle.dumps(blocks)) < 400 + len(path)
    with get_context("spawn").Pool(1) as pool:
        assert pool.starmap(_ids, [(blocks, 0), (blocks, -1)]) == [_ids(blocks, 0), _ids(blocks, -1)]
    frozen = pickle.dumps(blocks)
    made(pbin_of([list(range(10))] * 401))
    with pytest.raises(FormatError, match="has changed since the dataset was created"):
        len(pickle.loads(frozen))


def test_the_index_is_not_needed_for_continuous_blocks(made: Made) -> None:
    path = made(merged([pbin_of([[1, 2], [3]]), pbin_of([[4, 5]])]))
    assert blocks_of(PackedMemMapDatasetContinuous(path, 2, False)) == [[1, 2], [3, 4]]
    with pytest.raises(FormatError, match="damaged by merging"):
        PackedMemMapDatasetMegatron(path, 2)
    assert blocks_of(PackedMemMapDatasetMegatron(path, 2, repair_merge=True)) == [[1, 2], [3, 4]]
    path = made(header_of(4) + bytes(4) + b"]never parsed.")
    assert len(PackedMemMapDatasetContinuous(path, 2)) == 1
