"""Reading ``.pbin``: files of every generation, written byte by byte, damaged and hostile ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pbins import documents_of, flat, header_of, merged, pbin_of

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.pbin import Reader, possible_framings, recognise
from megatron_sft_idx.packs.run import RUN_TOKENS

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 255, 0]]
GENERATIONS = [1, 2, 3, 4]

Made = Callable[..., str]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Return a function that writes bytes to a file without a telling name."""

    def make(data: bytes, name: str = "data") -> str:
        path = tmp_path / name
        path.write_bytes(data)
        return str(path)

    return make


def test_every_byte_of_each_generation(made: Made) -> None:
    """Two documents, [258, 3] and [4], with all bytes written out."""
    index = b"\x80\x02]q\x00(K%cK\x08\x86q\x01K%cK\x04\x86q\x02e."
    small = b"\x80\x02]q\x00(K%cK\x04\x86q\x01K%cK\x02\x86q\x02e."
    files = {
        1: bytes.fromhex("00000000 0000000c 00000102 00000003 00000004") + index % (8, 16),
        2: bytes.fromhex("00000000 00000006 00000002 0102 0003 0004") + small % (12, 16),
        3: bytes.fromhex("06000000 00000000 02000000 0201 0300 0400") + small % (12, 16),
        4: bytes.fromhex("06000000 00000000 02000000 0201 0300 0400") + small % (0, 4),
    }
    for generation, data in files.items():
        path = made(data)
        assert documents_of(path) == [[258, 3], [4]]
        assert f"generation {generation} " in Reader(path, mask_rule="all").notes[0]


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("token_nbytes", [1, 2, 4])
@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_generations_token_sizes_and_protocols(made: Made, generation: int, token_nbytes: int, protocol: int) -> None:
    path = made(pbin_of(DOCUMENTS, generation=generation, token_nbytes=token_nbytes, protocol=protocol))
    assert documents_of(path) == DOCUMENTS
    reader = Reader(path, mask_rule="all")
    assert f"generation {generation} " in reader.notes[0]
    wide = token_nbytes == 4 or generation == 1
    assert reader.spec.token_dtype == (np.int32 if wide else np.uint16)
    assert recognise(path)


@settings(max_examples=60)
@given(
    documents=st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=9), max_size=12),
    generation=st.sampled_from(GENERATIONS),
    token_nbytes=st.sampled_from([2, 4]),
)
def test_any_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], generation: int, token_nbytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pbin"
    path.write_bytes(pbin_of(documents, generation=generation, token_nbytes=token_nbytes))
    if documents or generation > 2:
        assert documents_of(str(path)) == documents


def test_a_header_that_two_generations_could_have_written(made: Made) -> None:
    # The first token, 2, looks like a token size; and 4 bytes into the index is a possible start of a pickle.
    documents = [[2], *([[9, 9]] * 14)]
    data = bytearray(pbin_of(documents, generation=1, protocol=4))
    second_byte_of_frame_length = 8 + 4 * 29 + 4
    data[second_byte_of_frame_length] = 0x80
    path = made(bytes(data))
    assert len(possible_framings(path)) == 2
    assert documents_of(path) == documents


def test_no_mask_rule_is_a_refusal(made: Made) -> None:
    path = made(pbin_of(DOCUMENTS))
    with pytest.raises(FormatError, match="no loss masks; pass mask_rule"):
        Reader(path)
    with pytest.raises(FormatError, match="no rule 'assistant'"):
        Reader(path, mask_rule="assistant")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"no masks, so mask alignment token does not apply"):
        Reader(path, mask_rule="all", mask_alignment="token")
    assert any("the file has no loss masks: as requested" in note for note in Reader(path, mask_rule="all").notes)


def test_documents_without_tokens_are_left_out_and_said(made: Made) -> None:
    path = made(pbin_of([[], [1, 2], [], [3]]))
    assert documents_of(path) == [[1, 2], [3]]
    assert "2 documents without tokens were left out" in Reader(path, mask_rule="all").notes


def test_gaps_are_left_out_and_said(made: Made) -> None:
    data = header_of(10) + bytes(range(10)) + pickle.dumps([(0, 2), (4, 4)])
    path = made(data)
    assert documents_of(path) == [[256], [1284, 1798]]
    assert "2 tokens outside all documents were left out" in Reader(path, mask_rule="all").notes


def test_ids_past_int32(made: Made) -> None:
    path = made(pbin_of([[1], [2**31 - 1], [5, 2**31]], token_nbytes=4))
    reader = Reader(path, mask_rule="all")
    assert reader.read(1)["input_ids"].tolist() == [2**31 - 1]
    with pytest.raises(SequenceError, match=r":2: has id 2147483648"):
        reader.read(2)
    with pytest.raises(SequenceError, match="has id 2147483648"):
        list(reader.runs())


def test_runs_are_bounded(made: Made) -> None:
    length = RUN_TOKENS // 3
    data = np.arange(5 * length, dtype="<u2").tobytes()
    index = [(2 * length * i, 2 * length) for i in range(5)]
    path = made(header_of(len(data)) + data + pickle.dumps(index))
    reader = Reader(path, mask_rule="all")
    assert [len(run.pack_lengths) for run in reader.runs()] == [3, 2]
    assert np.concatenate([run.tokens for run in reader.runs()]).tobytes() == data


# ---- merge damage ----


@pytest.mark.parametrize("generation", [2, 3, 4])
@pytest.mark.parametrize("token_nbytes", [1, 2, 4])
def test_merge_damage_is_found_and_repaired(made: Made, generation: int, token_nbytes: int) -> None:
    parts = [[[1, 2, 3], [4] * 9], [[5] * 20, [6]], [[7, 8] * 10]]
    how = {"generation": generation, "token_nbytes": token_nbytes}
    path = made(merged([pbin_of(part, **how) for part in parts], **how))
    with pytest.raises(
        FormatError, match=r"document 2 .* 12 bytes before .* 3 documents .* 24 bytes.*repair_merge=True"
    ):
        Reader(path, mask_rule="all")
    assert documents_of(path, repair_merge=True) == flat(parts)
    assert "3 documents were located by their lengths, because merging had damaged the index" in (
        Reader(path, mask_rule="all", repair_merge=True).notes
    )


@given(st.data())
@settings(max_examples=40)
def test_merges_of_merges(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """For any tree of merges, with empty files too, every wrong offset is found and corrected."""

    def tree(depth: int) -> tuple[bytes, list[list[int]]]:
        if depth == 0 or data.draw(st.booleans()):
            documents = data.draw(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), max_size=4))
            return pbin_of(documents), documents
        branches = [tree(depth - 1) for _ in range(data.draw(st.integers(1, 3)))]
        return merged([file for file, _ in branches]), flat([documents for _, documents in branches])

    file, documents = tree(3)
    path = tmp_path_factory.getbasetemp() / "tree.pbin"
    path.write_bytes(file)
    assert documents_of(str(path), repair_merge=True) == documents
    refusal = ""
    try:
        assert documents_of(str(path)) == documents
    except FormatError as error:
        refusal = str(error)
    assert not refusal or "damaged by merging" in refusal


def test_repair_is_for_merge_damage_only(made: Made) -> None:
    whole = pbin_of(DOCUMENTS)
    assert documents_of(made(whole), repair_merge=True) == DOCUMENTS
    shifted = header_of(10) + bytes(10) + pickle.dumps([(0, 6), (4, 4)])
    with pytest.raises(FormatError, match="document 1 has 4 bytes at offset 4"):
        Reader(made(shifted), mask_rule="all", repair_merge=True)


# ---- damaged and hostile files ----


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("attacked"),)


@pytest.mark.parametrize(
    "index",
    [
        [(0, 2**63 - 1)],
        [(0, 2**62), (2**62, 2**62), (-(2**63), 2**62)],
        [(0, 4), (4, -4)],
        [(0, 4), (2**63 - 2, 4)],
        [(0, 4), (-(2**63), 4)],
        [(0, 4), (2, 4)],
        [(0, 4), (0, 4)],
        [(4, 4), (0, 4)],
        [(0, 4), (6, 4)],
        [(0, 10)],
        [(0, 3), (3, 5)],
        [(1, 4)],
        [(-12, 4)],
        [(-5, 4)],
        [(12, 8), (24, 4)],
        [(0, 2)] * 5,
    ],
)
def test_spans_that_are_no_documents(made: Made, index: list[tuple[int, int]]) -> None:
    path = made(header_of(8) + bytes(8) + pickle.dumps(index))
    for repair_merge in (False, True):
        with pytest.raises(FormatError, match=path):
            Reader(path, mask_rule="all", repair_merge=repair_merge)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (pickle.dumps([Attack()]), "none of it was executed"),
        (pickle.dumps([(0, Attack())], 2), "none of it was executed"),
        (b"\x80\x02cbuiltins\neval\n.", "none of it was executed"),
        (pickle.dumps([[0, 8]]), "not a pickled list of pairs"),
        (pickle.dumps([(0, 8.0)]), "not a pickled list of pairs"),
        (pickle.dumps([(0, 2**70)]), "64 bits"),
        (pickle.dumps([(0, 8)]) + b".", "bytes follow"),
        (
            pickle.dumps([(0, 4), (4, 12)]),
            "document 1 has 12 bytes and all documents together have 16 bytes, but .* has 8",
        ),
        (pickle.dumps([(0, 8), (8, 8), (16, 8)]), "data: all documents together have 24 bytes, but the data has 8"),
        (b"\x80\x04]r\xff\xff\xff\xff\x8b\xff\xff\xff\x7f.", "64 bits"),
        (b"", "not a .pbin of any generation"),
        (b"{}.", "not a .pbin of any generation"),
        (pickle.dumps([(0, 8)])[:-1], "not a .pbin of any generation"),
    ],
)
def test_indexes_that_are_none(
    made: Made, index: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match=why):
        Reader(made(header_of(8) + bytes(8) + index), mask_rule="all")
    assert not Path("attacked").exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes that begin with b''"),
        (b"12345678901", "11 bytes"),
        (header_of(0) + bytes(8) + pickle.dumps([(0, 8)]), "its writer was stopped"),
        (header_of(6, token_nbytes=3) + bytes(6) + pickle.dumps([(0, 6)]), "not a .pbin of any generation"),
        (header_of(2**63) + bytes(6) + pickle.dumps([(0, 6)]), "expected a header with the length of the data"),
        (header_of(7) + bytes(7) + pickle.dumps([(0, 7)]), "not a .pbin of any generation"),
        (b'{"a": "text"}\n' * 9, "is another kind of file"),
    ],
)
def test_files_that_are_none(made: Made, data: bytes, why: str) -> None:
    path = made(data)
    with pytest.raises(FormatError, match=why):
        Reader(path, mask_rule="all")
    assert not recognise(path)


def test_recognise_never_raises(made: Made, tmp_path: Path) -> None:
    assert not recognise(str(tmp_path))
    assert not recognise(str(tmp_path / "missing"))
    assert recognise(made(pbin_of([])))


@settings(max_examples=150)
@given(st.data())
def test_a_changed_file_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    raw = bytearray(pbin_of(DOCUMENTS, generation=data.draw(st.sampled_from(GENERATIONS))))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    path = tmp_path_factory.getbasetemp() / "changed.pbin"
    path.write_bytes(raw)
    found: list[list[int]] = []
    refusal = str(path)
    try:
        found = documents_of(str(path), repair_merge=data.draw(st.booleans()))
    except (FormatError, SequenceError) as error:
        refusal = str(error)
    assert refusal.startswith(str(path))
    assert sum(map(len, found)) <= len(raw)
