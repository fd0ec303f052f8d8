"""Writing ``.pbin``: the bytes of a plain construction, nothing kept that need not be, nothing left when it fails."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import PackedSpec, PackRun
from megatron_sft_idx.formats.modalities import Reader, Writer
from megatron_sft_idx.formats.modalities.pickled_pairs import write_pairs
from megatron_sft_idx.shard import Shard, ShardWriter
from tests.pbins import documents_of, flat, pbin_of


def run_of(packs: Sequence[Sequence[Sequence[int]]], dtype: Any = np.uint16) -> PackRun:
    """Packs of sequences of ids, nothing trained."""
    tokens = [token for pack in packs for sequence in pack for token in sequence]
    starts = [sum(map(len, pack[:i])) for pack in packs for i in range(len(pack))]
    lengths = [sum(map(len, pack)) for pack in packs]
    return PackRun(
        np.array(tokens, dtype),
        np.zeros(len(tokens), np.uint8),
        np.array(starts, np.int64),
        np.array(lengths, np.int64),
        np.array(list(map(len, packs)), np.int64),
    )


def spec_of(dtype: Any = np.uint16) -> PackedSpec:
    return PackedSpec(0, 0, 0, 0, np.dtype(dtype), np.dtype(np.uint8), 64)


@pytest.mark.parametrize(
    ("dtype", "token_nbytes"), [(np.uint16, None), (np.int32, None), (np.int32, 2), (np.uint16, 1)]
)
def test_written_files_are_those_of_the_plain_construction(
    tmp_path: Path, dtype: Any, token_nbytes: int | None
) -> None:
    packs = [[[1, 2, 3], [4]], [[5, 6]], [[7], [8], [250, 9]]]
    path = tmp_path / "out.pbin"
    with Writer(path, spec_of(dtype), allow_loss=True, token_nbytes=token_nbytes) as writer:
        writer.write(run_of(packs[:2], dtype))
        writer.write(run_of([], dtype))
        writer.write(run_of(packs[2:], dtype))
    expected = pbin_of(flat(packs), token_nbytes=token_nbytes or np.dtype(dtype).itemsize, protocol=4)
    assert path.read_bytes() == expected
    assert documents_of(str(path)) == flat(packs)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.pbin"]


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 5001, 60000])
@pytest.mark.parametrize("scale", [1, 300, 70000, 2**33, 2**45])
def test_indexes_are_those_of_pickle(count: int, scale: int) -> None:
    pairs = np.stack([np.arange(count) * scale, np.arange(count) % 70000], axis=1)
    pieces: list[bytes] = []
    write_pairs(pieces.append, count, np.array_split(pairs, 7))
    expected = pickle.dumps(list(zip(*pairs.T.tolist(), strict=True)) if count else [], 4)
    assert b"".join(pieces) == expected


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.pbin"
    with Writer(path, spec_of(), allow_loss=True):
        pass
    assert path.read_bytes() == pbin_of([], protocol=4)
    assert documents_of(str(path)) == []


def test_loss_is_refused_unless_allowed(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"neither loss masks nor packs.*--allow-loss"):
        Writer(tmp_path / "out.pbin", spec_of())
    with pytest.raises(FormatError, match="tokens of 3 bytes"):
        Writer(tmp_path / "out.pbin", spec_of(), allow_loss=True, token_nbytes=3)
    assert list(tmp_path.iterdir()) == []


def test_ids_that_do_not_fit_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    def write() -> None:
        with Writer(tmp_path / "out.pbin", spec_of(np.int32), allow_loss=True, token_nbytes=2) as writer:
            writer.write(run_of([[[1]]], np.int32))
            writer.write(run_of([[[1], [2]], [[3, 65536]]], np.int32))

    with pytest.raises(SequenceError, match=r":2: has id 65536, expected 0 to 65535 in 2 bytes"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "out.pbin"
    path.write_bytes(b"mine")
    with pytest.raises(FormatError, match="exists already"):
        Writer(path, spec_of(), allow_loss=True)
    assert path.read_bytes() == b"mine"
    with Writer(path, spec_of(), overwrite=True, allow_loss=True) as writer:
        writer.write(run_of([[[1]]]))
    assert documents_of(str(path)) == [[1]]


def test_writing_does_not_hold_the_index_as_objects(tmp_path: Path) -> None:
    sequences = 200_000
    run = PackRun(
        np.zeros(sequences, np.uint16),
        np.zeros(sequences, np.uint8),
        np.arange(sequences),
        np.array([sequences]),
        np.array([sequences]),
    )
    tracemalloc.start()
    with Writer(tmp_path / "out.pbin", spec_of(), allow_loss=True) as writer:
        writer.write(run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # As a list of tuples the index alone is three times as large.
    assert peak < 64 * sequences


def test_to_a_shard_and_back(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4], [5, 6, 7, 8, 255, 0]]
    path = tmp_path / "old.pbin"
    path.write_bytes(pbin_of(documents, generation=2))
    reader = Reader(path, mask_rule="all")
    prefix = tmp_path / "shard"
    with ShardWriter(prefix, token_dtype=reader.spec.token_dtype, capacity=reader.spec.capacity) as shard:
        for run in reader.runs():
            shard.add_packs(run.tokens, run.loss_mask, run.seq_starts, run.pack_lengths, run.pack_sequences)
    written = Shard(prefix)
    assert [written[i]["input_ids"].tolist() for i in range(len(written))] == documents
    assert written[2]["loss_mask"].tolist() == [1, 1, 1, 1, 1, 0]
