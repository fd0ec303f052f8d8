"""Writing ``.pbin``: the bytes equal a plain construction, memory stays small, and failures leave no files."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pbins import documents_of, flat, merged, pbin_of
from sample_packs import demo_samples, write_samples

from megatron_sft_idx import open_dataset
from megatron_sft_idx.cli.main import main
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import PackedSpec
from megatron_sft_idx.formats.pbin import Reader, Writer
from megatron_sft_idx.formats.pickles import write_pairs
from megatron_sft_idx.packs.run import PackRun
from megatron_sft_idx.shard import Shard, ShardWriter


def run_of(packs: Sequence[Sequence[Sequence[int]]], dtype: Any = np.uint16) -> PackRun:
    """Return packs of sequences of ids, without trained tokens."""
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


def spec_of(packs: Sequence[Sequence[Sequence[int]]], dtype: Any = np.uint16) -> PackedSpec:
    run = run_of(packs, dtype)
    counts = len(run), len(run.seq_starts), len(run.tokens), int(run.pack_lengths.max(initial=0))
    return PackedSpec(*counts, np.dtype(dtype), np.dtype(np.uint8), 64)


def unpickled(path: Path) -> tuple[bytes, list[tuple[int, int]]]:
    """Return header and data, and the unpickled index, which is the rest of the file."""
    raw = path.read_bytes()
    end = 12 + int.from_bytes(raw[:8], "little")
    return raw[:end], pickle.loads(raw[end:])


def documents_and_index(documents: Sequence[Sequence[int]], token_nbytes: int) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the same from the plain construction."""
    raw = pbin_of(documents, token_nbytes=token_nbytes)
    end = 12 + token_nbytes * sum(map(len, documents))
    return raw[:end], pickle.loads(raw[end:])


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_written_files_are_those_of_the_plain_construction(tmp_path: Path, dtype: Any) -> None:
    packs = [[[1, 2, 3], [4]], [[5, 6]], [[7], [8], [250, 9]]]
    path = tmp_path / "out.pbin"
    with Writer(path, spec_of(packs, dtype), lossy=True) as writer:
        writer.write(run_of(packs[:2], dtype))
        writer.write(run_of([], dtype))
        writer.write(run_of(packs[2:], dtype))
    assert unpickled(path) == documents_and_index(flat(packs), np.dtype(dtype).itemsize)
    assert documents_of(str(path)) == flat(packs)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.pbin"]


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 5001, 60000])
@pytest.mark.parametrize("scale", [1, 300, 70000, 2**33, 2**45])
def test_indexes_are_those_of_pickle(count: int, scale: int) -> None:
    pairs = np.stack([np.arange(count) * scale, np.arange(count) % 70000], axis=1)
    pieces: list[bytes] = []
    write_pairs(pieces.append, np.array_split(pairs, 7))
    found = pickle.loads(b"".join(pieces))
    assert found == [(int(start), int(length)) for start, length in pairs]
    assert {type(pair) for pair in found} <= {tuple}


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.pbin"
    with Writer(path, spec_of([]), lossy=True):
        pass
    assert unpickled(path) == documents_and_index([], 2)
    assert documents_of(str(path)) == []


def test_loss_is_refused_unless_allowed(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no loss masks and no packs.*--lossy"):
        Writer(tmp_path / "out.pbin", spec_of([]))
    assert list(tmp_path.iterdir()) == []


def test_ids_that_do_not_fit_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    def write() -> None:
        with Writer(tmp_path / "out.pbin", spec_of([]), lossy=True) as writer:
            writer.write(run_of([[[1]]], np.int32))
            writer.write(run_of([[[1], [2]], [[3, 65536]]], np.int32))

    with pytest.raises(SequenceError, match=r":2: id 65536, but uint16 stores at most 65535"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "out.pbin"
    path.write_bytes(b"mine")
    for overwrite in (False, True):
        with pytest.raises(
            FormatError, match=r"out\.pbin: expected .*, found a file of 4 bytes that begins with b'mine'"
        ):
            Writer(path, spec_of([]), overwrite=overwrite, lossy=True)
    assert path.read_bytes() == b"mine"
    path.unlink()
    with Writer(path, spec_of([[[2]]]), lossy=True) as writer:
        writer.write(run_of([[[2]]]))
    with pytest.raises(FormatError, match="already exists"):
        Writer(path, spec_of([]), lossy=True)
    assert documents_of(str(path)) == [[2]]
    with Writer(path, spec_of([[[1]]]), overwrite=True, lossy=True) as writer:
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
    spec = PackedSpec(1, sequences, sequences, sequences, np.dtype(np.uint16), np.dtype(np.uint8), sequences)
    tracemalloc.start()
    with Writer(tmp_path / "out.pbin", spec, lossy=True) as writer:
        writer.write(run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # As a list of tuples, the index by itself would be three times as large.
    assert peak < 64 * sequences


@pytest.mark.parametrize("generation", [1, 2, 3, 4])
def test_to_a_shard(tmp_path: Path, generation: int) -> None:
    documents = [[1, 2, 3], [4], [5, 6, 7, 8, 255, 0]]
    path = tmp_path / "old.pbin"
    path.write_bytes(pbin_of(documents, generation=generation))
    reader = Reader(path, mask_rule="all")
    prefix = tmp_path / "shard"
    with ShardWriter(prefix, token_dtype=reader.spec.token_dtype, capacity=reader.spec.capacity) as shard:
        for run in reader.runs():
            shard.add_packs(run.tokens, run.loss_mask, run.seq_starts, run.pack_lengths, run.pack_sequences)
    written = Shard(prefix)
    assert [written[i]["input_ids"].tolist() for i in range(len(written))] == documents
    assert written[2]["loss_mask"].tolist() == [1, 1, 1, 1, 1, 0]


# ---- through the registry, open_dataset and convert ----


def test_converted_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packs = demo_samples(9)
    write_samples(tmp_path / "shard", packs)
    pbin = str(tmp_path / "out.pbin")
    assert main(["convert", str(tmp_path / "shard"), pbin, "--to", "pbin"]) == 1
    assert "--lossy" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "shard"), pbin, "--to", "pbin", "--lossy"]) == 0
    said = capsys.readouterr().out
    assert "lost: loss masks" in said
    assert "lost: packs: every sequence" in said
    assert "read back and compared: equal except for what was lost" in said

    documents = [sample.tokens[a:b] for sample in packs for a, b in pairwise(sample.bounds)]
    assert documents_of(pbin) == documents
    assert main(["convert", pbin, str(tmp_path / "back"), "--to", "sft-idx"]) == 1
    assert "--mask-rule all" in capsys.readouterr().err
    assert main(["convert", pbin, str(tmp_path / "back"), "--to", "sft-idx", "--mask-rule", "all"]) == 0
    assert "note: the file has no loss masks" in capsys.readouterr().out
    back = Shard(tmp_path / "back")
    assert [back[i]["input_ids"].tolist() for i in range(len(back))] == documents
    assert all(back[i]["loss_mask"].tolist() == [1] * (len(ids) - 1) + [0] for i, ids in enumerate(documents))


def test_opened_by_content_and_pickled(tmp_path: Path) -> None:
    for generation in (1, 4):
        (tmp_path / f"part-{generation}").write_bytes(pbin_of([[1, 2], [3]], generation=generation))
    dataset = open_dataset(tmp_path, mask_rule="all")
    assert [pack["input_ids"].tolist() for pack in pickle.loads(pickle.dumps(dataset))] == [[1, 2], [3]] * 2
    assert dataset[-1]["seq_boundaries"].tolist() == [0, 1]


def test_merge_damage_is_repaired_by_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "merged.pbin"
    path.write_bytes(merged([pbin_of([[1, 2, 3]]), pbin_of([[4] * 9]), pbin_of([[5]])]))
    arguments = ["convert", str(path), str(tmp_path / "shard"), "--to", "sft-idx", "--mask-rule", "all"]
    assert main(arguments) == 1
    assert "damaged by merging" in capsys.readouterr().err
    assert main([*arguments, "--repair-merge"]) == 0
    assert "note: 2 documents were located by their lengths" in capsys.readouterr().out
    assert Shard(tmp_path / "shard")[1]["input_ids"].tolist() == [4] * 9
