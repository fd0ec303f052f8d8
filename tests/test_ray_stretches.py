"""How input is cut for tasks: byte ranges give the pieces that reading from the beginning gives. Needs no Ray."""

from __future__ import annotations

import gzip

from hypothesis import given, settings
from hypothesis import strategies as st
from object_folders import serve_folder

from megatron_sft_idx.chat.inputs.files import InputFile, expand_inputs
from megatron_sft_idx.chat.inputs.pieces import iter_pieces
from megatron_sft_idx.preprocess.distributed import stretches
from megatron_sft_idx.preprocess.distributed.stretches import Cutting, cut_file, read_pieces

ROW = st.integers(0, 40).map(lambda count: b"x" * count)


@settings(deadline=None)  # it waits for the disk
@given(
    rows=st.lists(ROW, max_size=30),
    ending=st.sampled_from([b"", b"\n", b"\n\n"]),
    mark=st.booleans(),
    piece=st.integers(1, 60),
    pieces=st.integers(1, 3),
    tail=st.sampled_from([1, 7, 1 << 14]),
)
def test_ranges_give_the_pieces_of_the_whole_file(tmp_path_factory, rows, ending, mark, piece, pieces, tail):
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + b"\n".join(rows) + ending)
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
    assert [(p.payload, p.ends.tolist()) for group in found for p in group] == [
        (p.payload, p.ends.tolist()) for p in wanted
    ]


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
