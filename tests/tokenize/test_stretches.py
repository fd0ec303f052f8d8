"""Division of input into tasks: byte ranges give the same pieces as reading from the beginning. Needs no Ray."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from object_folders import serve_folder

from megatron_sft_idx.chat.inputs import InputFile, expand_inputs, iter_pieces
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.tokenize import cut
from megatron_sft_idx.tokenize.cut import Cutting, Stretch, cut_input, read_pieces

# A row can contain any byte except a line end: a carriage return, half a character, a zero, or a line end that exists
# only in Unicode.
ROW = st.one_of(
    st.integers(0, 40).map(lambda count: b"x" * count),
    st.lists(st.sampled_from([b"\r", b"\0", b" ", b"\xe2\x80\xa8", b"\xc2\x85", b"\xff", "日🙂é".encode(), b"{}"])).map(
        b"".join
    ),
)


@settings(deadline=None)  # it waits for the disk
@given(
    rows=st.lists(ROW, max_size=30),
    line=st.sampled_from([b"\n", b"\r\n"]),
    ending=st.sampled_from([b"", b"\n", b"\n\n", b"\r\n", b"\r"]),
    mark=st.booleans(),
    piece=st.integers(1, 60),
    pieces=st.integers(1, 3),
    tail=st.sampled_from([1, 7, 1 << 14]),
)
def test_ranges_give_the_pieces_of_the_whole_file(tmp_path_factory, rows, line, ending, mark, piece, pieces, tail):
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + line.join(rows) + ending)
    file = InputFile(str(path), "lines", "", path.stat().st_size)
    before, cut._TAIL_NBYTES = cut._TAIL_NBYTES, tail
    try:
        stretches = list(cut_input([file], Cutting(piece, pieces)))
    finally:
        cut._TAIL_NBYTES = before
    found = [list(read_pieces(stretch, Cutting(piece, pieces))) for stretch in stretches]
    assert all(len(group) <= pieces for group in found)
    assert [len(group) == pieces for group in found[:-1]] == [True] * (len(found) - 1)
    wanted = list(iter_pieces([file], piece_nbytes=piece))
    made = [p for group in found for p in group]
    assert [(p.payload, p.ends.tolist()) for p in made] == [(p.payload, p.ends.tolist()) for p in wanted]
    assert [p.fingerprint() for p in made] == [p.fingerprint() for p in wanted]
    # To report the number of a bad row, the driver adds up the rows of earlier parts, including blank ones.
    before = 0
    for group, first in zip(found, np.cumsum([0, *map(len, found)]).tolist(), strict=False):
        assert [before + p.first for p in group] == [p.first for p in wanted[first : first + len(group)]]
        before += sum(len(p.ends) for p in group)


def test_other_files_are_dealt_out_or_read_whole(tmp_path):
    """If there are many files, whole files are distributed; the parts are the same."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 50))
    (tmp_path / "b.json").write_bytes(b'[{"a": 1}, {"a": 2}]')
    files, cutting = expand_inputs([str(tmp_path / "*")]), Cutting(16, 2)
    wanted = [[p.payload for p in iter_pieces([file], piece_nbytes=16)] for file in files]
    for readers in (0, 3):
        dealt = [
            (stretch, list(read_pieces(stretch, cutting))) for stretch in cut_input(files, cutting, readers=readers)
        ]
        assert len(dealt) > 10
        for number, payloads in enumerate(wanted):
            groups = [(stretch.part, pieces) for stretch, pieces in dealt if stretch.number == number]
            assert [part for part, _ in groups] == list(range(len(groups)))
            assert all(len(pieces) == 2 for _, pieces in groups[:-1])
            assert [p.payload for _, pieces in groups for p in pieces] == payloads
    whole = list(cut_input(files, cutting, readers=2))
    assert [(stretch.nbytes, stretch.dealt) for stretch in whole] == [(None, ())] * 2
    assert [[p.payload for p in read_pieces(stretch, cutting)] for stretch in whole] == wanted


@settings(deadline=None, max_examples=30)
@given(
    rows=st.lists(st.integers(0, 90).map(lambda count: b"x" * count), min_size=1, max_size=120),
    piece=st.integers(1, 300),
    pieces=st.integers(1, 3),
    tail=st.sampled_from([1, 20, 100]),
)
def test_objects_are_cut_by_ranges_too(tmp_path_factory, rows, piece, pieces, tail):
    folder = tmp_path_factory.mktemp("store")
    (folder / "store").mkdir()
    (folder / "store/a.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "_TAIL_NBYTES", tail)
        url = serve_folder(folder / "store", folder / "msc.json", patch)
        (file,) = expand_inputs([f"{url}/a.jsonl"])
        there = list(cut_input([file], Cutting(piece, pieces)))
        here = list(cut_input(expand_inputs([str(folder / "store/a.jsonl")]), Cutting(piece, pieces)))
        assert [(s.offset, s.nbytes) for s in there] == [(s.offset, s.nbytes) for s in here]
        found = [p for stretch in there for p in read_pieces(stretch, Cutting(piece, pieces))]
        assert [p.payload for p in found] == [p.payload for p in iter_pieces([file], piece_nbytes=piece)]


def test_an_object_that_was_replaced_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    (tmp_path / "store/a.jsonl").write_bytes(b'{"a": 1}\n' * 50)
    url = serve_folder(tmp_path / "store", tmp_path / "msc.json", monkeypatch)
    (file,) = expand_inputs([f"{url}/a.jsonl"])
    stretch: Stretch = next(cut_input([file], Cutting(16, 2)))
    (tmp_path / "store/a.jsonl").write_bytes(b'{"a": 2}\n' * 50)
    for act in (lambda: list(cut_input([file], Cutting(16, 2))), lambda: list(read_pieces(stretch, Cutting(16, 2)))):
        with pytest.raises(FormatError, match="was replaced during the run"):
            act()


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="no file here that cannot be read")
@pytest.mark.parametrize(
    "step", [cut_input, lambda files, cutting: read_pieces(Stretch(*files, "x", 0, 0, 0, 9), cutting)]
)
def test_a_disk_that_gives_nothing_back_is_told_of_with_the_file(tmp_path, step):
    """Reading /proc/self/mem fails like a bad disk; the bytes before the ends of pieces are read too."""
    path = str(tmp_path / "rows.jsonl")
    os.symlink("/proc/self/mem", path)
    with pytest.raises(OSError, match="Input/output error") as error:
        list(step([InputFile(path, "lines", "", 1 << 20)], Cutting(16, 2)))
    assert error.value.filename == path
