"""A raw index and its JSON lines: rows are complete lines, and a new index finds every line.

The input is the index, then the lines.
"""

from __future__ import annotations

from pathlib import Path

from fuzz.contract import refused, scratch
from fuzz.pieces import split
from pickled_pairs_twin import twin

from megatron_sft_idx.chat.values import parse_json
from megatron_sft_idx.formats.modalities import RawRows, create_raw_index

_SPACE, _MARK = b" \t\r\n", b"\xef\xbb\xbf"


def run(data: bytes) -> None:
    index, lines = split(data, 2)
    path, index_path = scratch("raw-index") / "x.jsonl", scratch("raw-index") / "x.idx"
    path.write_bytes(lines)
    index_path.write_bytes(index)
    _hold_rows(path, index_path, index, lines)
    for drop_faulty in (False, True):
        _hold_made(path, index_path, lines, drop_faulty)


def _hold_rows(path: Path, index_path: Path, index: bytes, lines: bytes) -> None:
    with refused(str(index_path)[:-4]):
        rows = RawRows(path, index_path)
        assert len(rows) == len(pairs := twin(index))
        for parts in (1, 3):
            ranges = rows.ranges(parts)
            assert b"".join(lines[each.start : each.stop] for each in ranges) == lines
            assert [number for each in ranges for number in range(each.first_row, each.first_row + each.num_rows)] == [
                *range(len(rows))
            ]
        found = rows[:]
        assert found == RawRows(path, index_path, backend="pread")[:]
        assert found == [lines[start : start + length] for start, length in pairs]
        assert set(found) <= set(lines.split(b"\n"))


def _hold_made(path: Path, index_path: Path, lines: bytes, drop_faulty: bool) -> None:
    # A byte order mark may precede the first line.
    good = [line for i, line in enumerate(lines.split(b"\n")) if _is_json(line if i else line.removeprefix(_MARK))]
    with refused(str(index_path)[:-4]):
        report = create_raw_index(path, index_path, drop_faulty=drop_faulty, overwrite=True)
        rows = RawRows(path)[:]
        filled = [line for line in lines.split(b"\n") if line.strip(_SPACE)]
        assert report.num_rows == len(rows) == len(filled) - report.num_faulty
        assert rows == (good if report.num_faulty else filled)


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line.strip(_SPACE))
    except ValueError:
        return False
    return True
