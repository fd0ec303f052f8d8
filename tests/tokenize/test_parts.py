"""Parts on disk: they are read back exactly, damage is found; and their folder."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chats import preprocess
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sft_idx.chat.types import EncodedItem
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.media_layout import blob_hash
from megatron_sft_idx.packs.run_media import SpilledBlobs
from megatron_sft_idx.tokenize import parts
from megatron_sft_idx.tokenize.encoding import EncodedPiece
from megatron_sft_idx.tokenize.parts import Part, PartInfo, PartsReader, PartsTable, part_name, write_part
from megatron_sft_idx.tokenize.plan import PlannedRun


def piece(lengths, seed: int, weighted: bool = False) -> EncodedPiece:
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    mask = rng.integers(0, 2, count).astype(np.float32 if weighted else np.uint8)
    ids = rng.integers(0, 60_000, count).astype(np.uint16)
    columns = {
        "source": rng.integers(0, 9, (len(lengths), 2)).astype(np.uint32),
        "label": rng.integers(0, 2, len(lengths)).astype(np.uint8),
    }
    mask = mask / 2 if weighted else mask
    return EncodedPiece(ids, mask, np.array(lengths, np.int64), 0, 0, [], columns=columns)


def written(path: Path, pieces, mask_dtype: str = "uint8") -> str:
    info = PartInfo("options", ["a", "b"], bad_rows=[(3, "über \ud800")], mask_dtype=mask_dtype)
    write_part(str(path), info, pieces)
    return str(path)


def test_what_comes_back_is_what_went_in(tmp_path):
    pieces = [piece([3, 1], 1), piece([], 2), piece([5], 3, weighted=True)]
    part = Part(written(tmp_path / "p", pieces, "float32"), verify=True)
    assert (part.info.options, part.info.pieces) == ("options", ["a", "b"])
    assert part.info.bad_rows == [(3, "über \ud800")]
    assert (part.lengths.tolist(), part.starts.tolist()) == ([3, 1, 5], [0, 3, 4])
    assert part.ids.tolist() == [token for one in pieces for token in one.input_ids.tolist()]
    assert part.mask.tolist() == [value for one in pieces for value in one.loss_mask.tolist()]
    for name, values in part.columns.items():
        assert values.tolist() == [row for one in pieces for row in one.columns[name].tolist()]
    assert list(part.columns) == ["label", "source"]
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_a_part_takes_the_place_of_a_torn_one_and_leaves_no_other_file(tmp_path):
    path = Path(written(tmp_path / "p", [piece([3], 1)]))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    written(path, [piece([3], 1)])
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"p": whole}


def test_a_part_may_be_empty(tmp_path):
    part = Part(written(tmp_path / "p", [piece([], 1)]), verify=True)
    assert (len(part.lengths), len(part.ids)) == (0, 0)


@settings(deadline=None)  # it waits for the disk
@given(st.data())
def test_damage_is_found(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damage") / "p"
    whole = Path(written(path, [piece([3, 1], 1), piece([40], 2)])).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), whole[:at], whole + b"\0"):
        path.write_bytes(damaged)
        try:
            part = Part(str(path), verify=True)
        except FormatError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            # Zeros between the head and the lengths are unused.
            assert part.ids.tolist() == [*piece([3, 1], 1).input_ids, *piece([40], 2).input_ids]


def test_a_plan_reads_from_all_parts_in_its_own_order(tmp_path):
    groups = [[piece([4, 2, 6], 1)], [piece([], 2)], [piece([1, 9], 3, weighted=True)]]
    paths = [
        written(tmp_path / str(number), group, "float32" if number == 2 else "uint8")
        for number, group in enumerate(groups)
    ]
    sequences, begins, lengths = np.array([4, 0, 2, 3, 2]), np.array([2, 0, 3, 0, 0]), np.array([7, 4, 3, 1, 3])
    # The values to which numbers in a part are relative.
    places = np.array([[0, 0], [0, 10], [1, 0]], np.uint32)
    bases = {"source": places, "label": np.zeros(3, np.uint8)}
    reader = PartsReader(PartsTable(paths, np.array([0, 3, 3, 5]), "float32", [*bases], places))
    ids, mask, columns, _ = reader.read(PlannedRun(np.array([0, 5]), sequences, begins, lengths, 18))
    parts = [Part(path) for path in paths]
    at = [(part, start) for part in parts for start in part.starts.tolist()]
    spans = [
        (part, start + begin, start + begin + length)
        for (part, start), begin, length in zip([at[s] for s in sequences], begins, lengths, strict=True)
    ]
    assert ids.tolist() == [token for part, start, stop in spans for token in part.ids[start:stop].tolist()]
    assert mask.tolist() == [value for part, start, stop in spans for value in part.mask[start:stop].tolist()]
    for name, values in columns.items():
        whole = np.concatenate([part.columns[name] + base for part, base in zip(parts, bases[name], strict=True)])
        assert values.tolist() == whole[sequences].tolist()
        assert reader.column(name).tolist() == whole.tolist()
    assert columns.keys() == bases.keys()
    with pytest.raises(FormatError, match="changed since its lengths were read"):
        reader.read(PlannedRun(np.array([0, 1]), np.array([3]), None, np.array([2]), 2))
    reader = PartsReader(PartsTable(paths, np.array([0, 2, 2, 4]), "float32"))
    with pytest.raises(FormatError, match="changed since its lengths were read"):
        reader.read(PlannedRun(np.array([0, 1]), np.array([0]), None, np.array([2]), 2))


@pytest.mark.parametrize(
    "name", ["notes.txt", "chats.part", "parts/notes.txt", "parts/chats.part", "output/a/notes.txt"]
)
def test_a_folder_of_somebody_else_is_refused_and_stays(tmp_path, name):
    there = tmp_path / "x.building" / name
    there.parent.mkdir(parents=True)
    there.write_text("mine")
    for engine in ("local", "ray"):
        refused = preprocess(tmp_path / "x", "--engine", engine, "--workers", 1, "--overwrite")
        assert (refused.code, "which is not part of a build" in refused.err) == (1, True), refused
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [there]


def test_a_part_has_the_name_of_what_it_holds(tmp_path):
    info = PartInfo("options", ["piece"])
    names = {
        part_name(replace(info, **changed), weight)
        for changed in (
            {},
            {"options": "others"},
            {"pieces": ["other"]},
            {"pieces": ["piece", "piece"]},
            {"max_rows": 3},
        )
        for weight in (1.0, 0.5)
    }
    assert len(names) == 10
    assert part_name(replace(info, rows=9, notes={"a": 1}), 1.0) in names


def test_a_remote_prefix_is_refused_before_anything_is_asked_of_it(tmp_path):
    refused = preprocess(tmp_path / "x", "--engine", "ray", "--workers", 1, "--output-prefix", "s3://bucket/x")
    assert (refused.code, "a file system that all nodes share" in refused.err) == (2, True), refused


def test_without_ray_the_error_names_what_brings_it_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = preprocess(tmp_path / "x", "--engine", "ray", "--workers", 1)
    assert (refused.code, "pip install 'megatron-sft-idx[ray]'" in refused.err) == (1, True)
    assert not list(tmp_path.iterdir())


def test_files_of_many_parts_keep_none_of_them_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_MAX_OPEN_PARTS", 1)
    files = [bytes([number]) * (number + 1) for number in range(5)]
    paths = []
    for number, data in enumerate(files):
        blobs = SpilledBlobs()
        item = EncodedItem("image", 0, 2, blobs.add(blob_hash(data), data))
        encoded = replace(piece([3], number), media=[[item]])
        paths.append(str(tmp_path / f"{number}.part"))
        write_part(paths[-1], PartInfo("options", ["a"]), [encoded], blobs)
        blobs.close()
    reader = PartsReader(PartsTable(paths, np.arange(len(paths) + 1), "uint8", media=True))
    order = np.array([3, 1, 4, 0, 2, 3])
    media = reader.media_of(order)
    mapped = Path("/proc/self/maps").read_text()
    assert sum(path in mapped for path in paths) <= 1
    assert [media.blobs.data(blob) for blob in media.items.blobs.tolist()] == [files[number] for number in order]
    assert media.file_sizes().tolist() == [number + 1 for number in order]
    Path(paths[4]).write_bytes(Path(paths[4]).read_bytes()[:-1] + b"!")
    with pytest.raises(FormatError, match="changed since its lengths were read"):
        media.blobs.data(media.items.blobs.tolist()[2])
