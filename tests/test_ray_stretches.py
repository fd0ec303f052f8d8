"""How input is cut for tasks: byte ranges give the pieces that reading from the beginning gives. Needs no Ray."""

from __future__ import annotations

import gzip

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from object_folders import serve_folder

from megatron_sft_idx.chat.inputs.files import InputFile, expand_inputs
from megatron_sft_idx.chat.inputs.pieces import iter_pieces
from megatron_sft_idx.preprocess.distributed import stretches
from megatron_sft_idx.preprocess.distributed.stretches import Cutting, cut_file, read_pieces

# Any byte but the end of a line may stand in a row: a carriage return, half a character, a zero, what only Unicode
# calls the end of a line.
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
    before, stretches._TAIL_NBYTES = stretches._TAIL_NBYTES, tail
    try:
        cut = list(cut_file(file, 0, Cutting(piece, pieces)))
    finally:
        stretches._TAIL_NBYTES = before
    found = [list(read_pieces(stretch, Cutting(piece, pieces))) for stretch in cut]
    assert all(len(group) <= pieces for group in found)
    assert [len(group) == pieces for group in found[:-1]] == [True] * (len(found) - 1)
    wanted = list(iter_pieces([file], piece_nbytes=piece))
    made = [p for group in found for p in group]
    assert [(p.payload, p.ends.tolist()) for p in made] == [(p.payload, p.ends.tolist()) for p in wanted]
    assert [p.fingerprint() for p in made] == [p.fingerprint() for p in wanted]
    # The driver adds up the rows of the parts before, blank ones included, to tell the number of a bad one.
    before = 0
    for group, first in zip(found, np.cumsum([0, *map(len, found)]).tolist(), strict=False):
        assert [before + p.first for p in group] == [p.first for p in wanted[first : first + len(group)]]
        before += sum(len(p.ends) for p in group)


def test_other_files_are_one_stretch_each(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 50))
    (tmp_path / "b.json").write_bytes(b'[{"a": 1}, {"a": 2}]')
    files = expand_inputs([str(tmp_path / "*")])
    for file in files:
        (stretch,) = cut_file(file, 0, Cutting(16, 2))
        assert stretch.nbytes is None
        assert [p.payload for p in read_pieces(stretch, Cutting(16, 2))] == [
            p.payload for p in iter_pieces([file], piece_nbytes=16)
        ]


def test_objects_are_one_stretch_each(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    (tmp_path / "store/a.jsonl").write_bytes(b'{"a": 1}\n' * 50)
    url = serve_folder(tmp_path / "store", tmp_path / "msc.json", monkeypatch)
    (file,) = expand_inputs([f"{url}/a.jsonl"])
    (stretch,) = cut_file(file, 0, Cutting(16, 2))
    pieces = list(read_pieces(stretch, Cutting(16, 2)))
    assert len(pieces) > 2
    assert [p.payload for p in pieces] == [p.payload for p in iter_pieces([file], piece_nbytes=16)]
