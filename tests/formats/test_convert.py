"""``convert``: packs survive conversion between all formats; losses are an error or reported."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_trips import run_of, spec_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_packs import Sample, assert_holds, demo_samples, five_files, sample_of, samples, write_samples

from megatron_sft_idx import LegacyPickleWriter, open_dataset
from megatron_sft_idx.cli.main import main
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats import parquet, registry
from megatron_sft_idx.formats.base import PackedWriter
from megatron_sft_idx.formats.bridge import Padding
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.formats.registry import WRITABLE, create, open_reader
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.shard import Shard, ShardWriter

ROOT = Path(__file__).parents[2]

# Formats that keep everything, and the suffixes of their paths.
SUFFIXES = {
    "sft-idx": "",
    "npy": ".npy",
    "memmap": ".memmap",
    "parquet": ".parquet",
    "pbin": ".pbin",
    "jsonl-chunks": ".chunks",
    "save_to_disk": ".hf",
}
LOSSY = ["pbin"]
WEIGHTS = {"sft-idx", "npy"}
WHOLE = [name for name in WRITABLE if name not in LOSSY]
PAIRS = [(a, b) for a in WHOLE for b in WHOLE]

LAST = 2**16 - 1
CORNERS = {
    "nothing": [],
    "one-token sequences": [sample_of([1, 1, 1], lambda i: 0, lambda i: i), sample_of([1], lambda i: 0, lambda i: 7)],
    "the limits of uint16": [sample_of([3, 2], lambda i: 1, lambda i: [0, LAST, LAST - 1, 1, LAST][i])],
    "1,000 sequences": [sample_of([1 + i % 2 for i in range(1000)], lambda i: i % 2, lambda i: i), *demo_samples(2)],
}


def place(folder: Path, name: str, stem: str) -> str:
    return f"{folder / stem}{SUFFIXES[name]}"


def trip(folder: Path, packs: list[Sample], way: tuple[str, ...], **options: Any) -> Shard:
    """Convert a shard through these formats back to a shard, and return it."""
    source = str(folder / "begin")
    write_samples(source, packs, overwrite=True, **options)
    for number, name in enumerate((*way, "sft-idx")):
        target = place(folder, name, f"step-{number}")
        report = convert(source, target, name, ConvertOptions(overwrite=True))
        assert (report.verified, report.lost, report.content.num_packs) == (True, [], len(packs))
        source = target
    return Shard(source)


@pytest.mark.sample(40)
@pytest.mark.parametrize("way", PAIRS, ids="-".join)
@pytest.mark.parametrize("corner", CORNERS)
def test_every_format_to_every_other(tmp_path: Path, way: tuple[str, str], corner: str) -> None:
    shard = trip(tmp_path, CORNERS[corner], way, token_dtype=np.uint16)
    assert_holds(shard, CORNERS[corner])


@pytest.mark.parametrize("name", WHOLE)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_packs_survive_any_way(tmp_path: Path, name: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([np.uint16, np.int32]))
    packs = data.draw(samples(token_dtype=dtype))
    way = (name, *data.draw(st.lists(st.sampled_from(WHOLE), max_size=2)))
    assert_holds(trip(tmp_path, packs, way, token_dtype=dtype), packs)


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("name", LOSSY)
def test_what_a_format_has_no_place_for_is_let_go_only_on_request(tmp_path: Path, name: str, corner: str) -> None:
    packs = CORNERS[corner]
    write_samples(tmp_path / "x", packs, token_dtype=np.uint16)
    target = place(tmp_path, name, "y")
    with pytest.raises(FormatError, match="--lossy"):
        convert(str(tmp_path / "x"), target, name)
    report = convert(str(tmp_path / "x"), target, name, ConvertOptions(lossy=True))
    assert report.lost
    with pytest.raises(FormatError, match="--mask-rule all"):
        convert(target, str(tmp_path / "z"), "sft-idx")
    convert(target, str(tmp_path / "z"), "sft-idx", ConvertOptions(reader={"mask_rule": "all"}))
    sequences = [pack.tokens[a:b] for pack in packs for a, b in pairwise(pack.bounds)]
    assert_holds(Shard(tmp_path / "z"), [Sample(tokens, [1] * len(tokens), [0]) for tokens in sequences])


@pytest.mark.parametrize("name", sorted(WEIGHTS))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packs=samples(weights=True))
def test_weights_survive_where_a_format_has_them(tmp_path: Path, name: str, packs: list[Sample]) -> None:
    assert_holds(trip(tmp_path, packs, (name,), mask_dtype=np.float32), packs)


@pytest.mark.parametrize("name", [name for name in WHOLE if name not in WEIGHTS])
def test_weights_are_refused_where_a_format_has_none(tmp_path: Path, name: str) -> None:
    packs = [Sample([1, 2, 3], [0, 0.5, 1], [0])]
    write_samples(tmp_path / "x", packs, mask_dtype=np.float32)
    with pytest.raises(FormatError, match="--lossy"):
        convert(str(tmp_path / "x"), place(tmp_path, name, "y"), name)
    assert not Path(place(tmp_path, name, "y")).exists()
    report = convert(str(tmp_path / "x"), place(tmp_path, name, "y"), name, ConvertOptions(lossy=True))
    assert report.lost
    assert open_dataset(place(tmp_path, name, "y"))[0]["loss_mask"].tolist() == [1, 1, 0]


@pytest.mark.parametrize(("name", "wrong"), [("memmap", "loss masks"), ("pbin", "sequence lengths, packs")])
def test_what_is_kept_beside_a_loss_is_compared(
    tmp_path: Path, name: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison after writing takes into account masks that became 0 and 1, and packs that became documents."""
    write_samples(tmp_path / "x", [Sample([1, 2, 3], [0, 0.5, 1], [0, 2])], mask_dtype=np.float32)
    write_samples(tmp_path / "other", [Sample([1, 2, 3], [0, 0, 0], [0, 2] if name == "memmap" else [0])])
    source = open_reader(str(tmp_path / "other"), "sft-idx")
    monkeypatch.setattr(registry._module(name).Writer, "reread", lambda self: source)
    with pytest.raises(FormatError, match=f"its .*{wrong} differ"):
        convert(str(tmp_path / "x"), place(tmp_path, name, "y"), name, ConvertOptions(lossy=True))


@pytest.mark.parametrize("name", WHOLE)
def test_the_same_source_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    write_samples(tmp_path / "x", demo_samples(9), metadata={"tokenizer": {"fingerprint": "abc"}})
    contents = []
    for stem in ("a", "b"):
        target = place(tmp_path / stem, name, stem)
        convert(str(tmp_path / "x"), target, name)
        files = sorted(path for path in (tmp_path / stem).rglob("*") if path.is_file())
        contents.append([path.read_bytes() for path in files])
        assert files
    assert contents[0] == contents[1]


@pytest.mark.parametrize("name", WHOLE)
def test_several_sources_become_one_and_one_of_them_may_be_empty(tmp_path: Path, name: str) -> None:
    packs = demo_samples(12)
    write_samples(tmp_path / "a", packs[:5], token_dtype=np.uint16)
    write_samples(tmp_path / "b", [])
    write_samples(tmp_path / "c", packs[5:])
    parts = []
    for stem in "abc":
        parts.append(place(tmp_path / name, name, stem))
        convert(str(tmp_path / stem), parts[-1], name)
    report = convert(parts, str(tmp_path / "all"), "sft-idx")
    assert report.paths == tuple(parts)
    if name == "npy":
        longest = max(len(p.tokens) for p in packs)
        assert [f"the longest pack, {longest} tokens, is used" in note for note in report.notes] == [True]
    assert_holds(Shard(tmp_path / "all"), packs)
    assert_holds(open_dataset(parts), packs)


def test_what_a_shard_knows_survives_another_shard(tmp_path: Path) -> None:
    metadata = {"tokenizer": {"fingerprint": "abc"}, "packing": {"seed": 3}}
    options = {"capacity": 96, "sequence_multiple": 8, "pad_id": 5, "token_dtype": np.uint16, "metadata": metadata}
    write_samples(tmp_path / "x", demo_samples(5), **options)
    convert(str(tmp_path / "x"), str(tmp_path / "y"), "sft-idx")
    assert five_files(tmp_path / "x") == five_files(tmp_path / "y")


def test_the_demo_data_through_every_format(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    demo = ROOT / "tools/demo"
    source = str(tmp_path / "demo")
    arguments = [
        "--input",
        str(demo / "chats.jsonl"),
        "--tokenizer-model",
        str(demo / "tokenizer"),
        "--workers",
        "0",
        "--earlier-reasoning",
        "drop",
    ]
    assert main(["preprocess", *arguments, "--seq-length", "1024", "--output-prefix", source]) == 0
    before = Shard(source)
    assert len(before) > 5
    for number, name in enumerate([*WHOLE, "sft-idx"]):
        target = place(tmp_path, name, f"demo-{number}")
        # Columns are lost in .npy.
        assert main(["convert", source, target, "--to", name, *(["--no-columns"] if name == "npy" else [])]) == 0
        source = target
    after = Shard(source)
    for one, other in zip(before, after, strict=True):
        for key in ("input_ids", "loss_mask", "seq_boundaries"):
            np.testing.assert_array_equal(one[key], other[key])


# ---- masks ----


def numpy_file(path: Path, packs: list[Sample], masks: list[list[float]]) -> str:
    rows = [
        {"input_ids": p.tokens, "loss_mask": mask, "seq_start_id": p.starts}
        for p, mask in zip(packs, masks, strict=True)
    ]
    np.save(path, np.array([*rows, None], object)[:-1], allow_pickle=True)
    return str(path)


@pytest.mark.parametrize("name", WHOLE)
def test_masks_are_shifted_exactly_once(tmp_path: Path, name: str) -> None:
    packs = [Sample([1, 2, 3, 4, 5, 6], [1, 1, 0, 1, 0, 0], [0, 3]), *demo_samples(4)]
    token = numpy_file(tmp_path / "token.npy", packs, [p.mask for p in packs])
    first = place(tmp_path, name, "first")
    report = convert(token, first, name, ConvertOptions(mask_alignment="token"))
    assert any("token-aligned" in note for note in report.notes)
    assert any("loss mask values on the first token" in note for note in report.notes)
    assert_holds(open_dataset(first), packs)
    convert(first, str(tmp_path / "x"), "sft-idx")
    assert_holds(Shard(tmp_path / "x"), packs)
    if name != "npy":  # it does not record the alignment of its masks
        with pytest.raises(FormatError, match=r"shift|alignment"):
            convert(first, str(tmp_path / "y"), "sft-idx", ConvertOptions(mask_alignment="token"))
        assert not list(tmp_path.glob("y*"))


def test_a_mask_that_was_rolled_right_is_rolled_back(tmp_path: Path) -> None:
    packs = [Sample(p.tokens, [*p.mask[:-1], 0], p.starts) for p in demo_samples(6)]
    rolled = numpy_file(tmp_path / "rolled.npy", packs, [[0, *p.mask[:-1]] for p in packs])
    convert(rolled, str(tmp_path / "x"), "sft-idx", ConvertOptions(mask_alignment="rolled-right"))
    assert_holds(Shard(tmp_path / "x"), packs)


# ---- files of independent writers ----


def test_a_legacy_file_of_numpy_to_every_format(tmp_path: Path) -> None:
    packs = demo_samples(6)
    source = numpy_file(tmp_path / "x.npy", packs, [p.label_mask for p in packs])
    for name in WHOLE:
        convert(source, place(tmp_path, name, "out"), name)
        assert_holds(open_dataset(place(tmp_path, name, "out")), packs)


def test_what_the_legacy_writer_makes_is_what_numpy_reads(tmp_path: Path) -> None:
    packs = demo_samples(300)
    with LegacyPickleWriter(tmp_path / "x.npy") as writer:
        for number, pack in enumerate(packs):
            ids, mask = np.array(pack.tokens), np.array(pack.label_mask)
            writer.write_bin(number, ids, mask, np.array(pack.starts, np.uint32))
        assert writer.finalize() == {"format": "legacy_pickle", "num_bins": 300}
    loaded = np.load(tmp_path / "x.npy", allow_pickle=True)
    assert (loaded.shape, loaded.dtype) == ((300,), object)
    for row, pack in zip(loaded.tolist(), packs, strict=True):
        assert row == {"input_ids": pack.tokens, "loss_mask": pack.label_mask, "seq_start_id": pack.starts}
        assert {type(value) for column in row.values() for value in column} == {int}


@pytest.mark.parametrize("name", WHOLE)
def test_a_writer_that_is_finished_takes_no_more(tmp_path: Path, name: str) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow")
    packs = demo_samples(2)
    with create(place(tmp_path, name, "x"), name, spec_of(packs)) as writer:
        writer.write(run_of(packs))
        writer.complete()
        for _ in range(2):
            with pytest.raises(FormatError, match="this writer is finished; open another one"):
                writer.write(run_of(packs))
    assert_holds(open_dataset(place(tmp_path, name, "x")), packs)


def test_the_legacy_writer_refuses_what_breaks_a_rule(tmp_path: Path) -> None:
    writer = LegacyPickleWriter(tmp_path / "x.npy")
    writer.write_bin(0, [1, 2], [0, 0], [0])
    with pytest.raises(SequenceError, match="the next pack is number 1"):
        writer.write_bin(2, [1], [0], [0])
    with pytest.raises(SequenceError, match="2 in input_ids, 1 in loss_mask"):
        writer.write_bin(1, [1, 2], [0], [0])
    with pytest.raises(SequenceError, match=r"x\.npy:1: the first sequence starts at 1"), writer:
        writer.write_bin(1, [1, 2], [0, 0], [1])
    assert not list(tmp_path.iterdir())


# ---- refusals ----


def test_an_archive_in_the_clothes_of_an_array_is_not_unpacked(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", a=np.zeros(1 << 24))
    (tmp_path / "bomb.npz").rename(tmp_path / "x.npy")
    with pytest.raises(FormatError, match=r"x\.npy: no known packed data; found a file of .* begins with b'PK"):
        convert(str(tmp_path / "x.npy"), str(tmp_path / "y"), "sft-idx")
    with pytest.raises(FormatError, match=r"x\.npy: not a \.npy file of version 1 or 2"):
        convert(str(tmp_path / "x.npy"), str(tmp_path / "y"), "sft-idx", ConvertOptions(source_format="npy"))
    assert not list(tmp_path.glob("y*"))


def test_a_source_is_never_written_over(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    before = five_files(tmp_path / "x")
    (tmp_path / "link").symlink_to(tmp_path)
    options = ConvertOptions(overwrite=True)
    for target in ("x", "x.bin", "./x", "link/x"):
        with pytest.raises(FormatError, match=r"used as both the destination and the source"):
            convert(str(tmp_path / "x"), f"{tmp_path}/{target}", "sft-idx", options)
    # Another format has other file names, which can equal the names of the source's files.
    for suffix in (".bin", ".idx", ".loss.bin", ".seq.bin", ".seq.idx"):
        with pytest.raises(FormatError, match=r"used as both the destination and the source"):
            convert(str(tmp_path / "x"), f"{tmp_path}/link/x{suffix}", "npy", options)
        os.link(tmp_path / f"x{suffix}", tmp_path / "hard")
        with pytest.raises(FormatError, match=r"used as both the destination and the source"):
            convert(str(tmp_path / "x"), f"{tmp_path}/hard", "npy", options)
        (tmp_path / "hard").unlink()
    with pytest.raises(FormatError, match=r"this folder would be replaced, and contains the source"):
        convert(str(tmp_path / "x"), str(tmp_path), "memmap", options)
    source = numpy_file(tmp_path / "folder.npy", [], [])
    with pytest.raises(FormatError, match="already exists"):
        convert(str(tmp_path / "x"), source, "npy")
    assert five_files(tmp_path / "x") == before


def test_the_masks_of_a_stock_dataset_are_never_written_over(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    before = five_files(tmp_path / "x")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"stock{suffix}").write_bytes((tmp_path / f"x{suffix}").read_bytes())
    options = ConvertOptions(overwrite=True, reader={"mask_path": tmp_path / "x"})
    with pytest.raises(FormatError, match=r"used as both the destination and --mask-path"):
        convert(str(tmp_path / "stock"), str(tmp_path / "x"), "sft-idx", options)
    assert five_files(tmp_path / "x") == before


@pytest.mark.parametrize("name", WRITABLE)
def test_a_disk_that_says_no_is_named_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    write_samples(tmp_path / "x", demo_samples(50))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            convert(str(tmp_path / "x"), place(tmp_path / "out", name, "y"), name, ConvertOptions(lossy=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path / "out") in str(caught.value.filename)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix != ".journal"]


def test_a_broken_source_leaves_nothing_behind(tmp_path: Path) -> None:
    packs = demo_samples(5)
    write_samples(tmp_path / "x", packs)
    with open(tmp_path / "x.bin", "r+b") as file:
        file.write(b"\xff\xff\xff\xff")  # -1
    for name in WHOLE:
        with pytest.raises(SequenceError, match=r"x:0: position 0 has id -1"):
            convert(str(tmp_path / "x"), place(tmp_path / "out", name, "y"), name)
        assert not list((tmp_path / "out").rglob("*y*"))


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("to", WHOLE)
def test_a_result_that_is_not_what_went_in_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, replaces: bool
) -> None:
    write_samples(tmp_path / "x", demo_samples(5))
    write_samples(tmp_path / "other", [*demo_samples(4), Sample([1], [0], [0])])
    options, target = ConvertOptions(overwrite=replaces), place(tmp_path, to, "y")
    if replaces:
        convert(str(tmp_path / "other"), target, to)
    (tmp_path / "y.failed").write_text("mine")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    # As if the disk returned other data.
    writer = registry._module(to).Writer
    monkeypatch.setattr(writer, "reread", lambda self: open_reader(str(tmp_path / "other"), "sft-idx"))
    with pytest.raises(FormatError, match="read again, and its token ids, loss masks, sequence lengths differ"):
        convert(str(tmp_path / "x"), target, to, options)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
    assert convert(str(tmp_path / "x"), str(tmp_path / "z"), "sft-idx", ConvertOptions(verify=False)).verified is False


def test_the_capacity_is_what_is_asked_for_where_it_holds(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(5))
    convert(str(tmp_path / "x"), str(tmp_path / "y"), "sft-idx", ConvertOptions(capacity=99))
    assert Shard(tmp_path / "y").header.capacity == 99
    for capacity in (0, -5, True, 12.0, 2**31):
        with pytest.raises(FormatError, match=f"--seq-length: {capacity}, expected a whole number from 1 to"):
            ConvertOptions(capacity=capacity)  # type: ignore[arg-type]
    with pytest.raises(SequenceError, match="the longest pack has 12 tokens, but --seq-length is 11"):
        convert(str(tmp_path / "x"), str(tmp_path / "z"), "sft-idx", ConvertOptions(capacity=11))
    write_samples(tmp_path / "m", demo_samples(5), sequence_multiple=8)
    with pytest.raises(SequenceError, match=r"m:2: 24 positions .* multiples of 8, but the capacity is 16 .rule P5"):
        convert(str(tmp_path / "m"), str(tmp_path / "z"), "memmap", ConvertOptions(capacity=16))
    assert convert(str(tmp_path / "m"), str(tmp_path / "z"), "memmap", ConvertOptions(capacity=32)).spec.capacity == 32


# ---- the command ----


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packs = demo_samples(6)
    source = numpy_file(tmp_path / "x.npy", packs, [p.label_mask for p in packs])
    assert main(["convert", source, f"{tmp_path}/y", "--to", "sft-idx", "--log-interval", "1"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == f"read {source} as npy"
    assert lines[1].startswith("note: the source does not store its capacity")
    assert re.fullmatch(r"wrote .*y as sft-idx: 6 packs, \d+ sequences, \d+ tokens, .* capacity \d+", lines[-2])
    assert lines[-1] == "read back and compared: equal"
    assert re.search(r"converting: 6 packs, 100\.0%, .*/s, 00:00 left", shown.err)
    assert "verifying: 6 packs" in shown.err
    assert main(["convert", source, f"{tmp_path}/y", "--to", "sft-idx"]) == 0
    out = capsys.readouterr().out
    assert f"found {tmp_path}/y as sft-idx: " in out
    assert f"; contents not checked: megatron-sft-idx verify --full {tmp_path}/y\n" in out
    assert main(["convert", source, f"{tmp_path}/y", "--to", "sft-idx", "--overwrite", "--no-verify"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "not read back, because of --no-verify"
    with pytest.raises(SystemExit) as caught:
        main(["convert", source, f"{tmp_path}/z", "--to", "sft-idx", "--row-group-size", "5"])
    assert caught.value.code == 2
    assert main(["convert", source, f"{tmp_path}/z", "--to", "sft-idx", "--mask-rule", "all"]) == 1
    assert "a npy source has no option mask_rule" in capsys.readouterr().err


def test_the_script_in_tools_is_the_command(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(3))
    command = [sys.executable, str(ROOT / "tools/convert_sft.py"), str(tmp_path / "x"), str(tmp_path / "y.npy")]
    run = subprocess.run([*command, "--to", "npy"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert_holds(open_dataset(tmp_path / "y.npy"), demo_samples(3))


# ---- padding for Megatron-Bridge ----


def padded(pack: Sample, multiple: int, eod_id: int) -> Sample:
    """Return a pack with sequences padded to 1 more than a multiple."""
    tokens, mask, starts = [], [], []
    for a, b in pairwise(pack.bounds):
        more = -(b - a - 1) % multiple
        starts.append(len(tokens))
        tokens += [*pack.tokens[a:b], *[eod_id] * more]
        mask += [*pack.mask[a:b], *[0] * more]
    return Sample(tokens, mask, starts)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packs=samples(least=1), multiple=st.integers(1, 9), capacity=st.integers(0, 50))
def test_sequences_are_stored_padded(tmp_path: Path, packs: list[Sample], multiple: int, capacity: int) -> None:
    capacity = max(capacity, *(len(pack.tokens) for pack in packs))
    metadata = {"tokenizer": {"vocab_size": 1 << 16}}
    write_samples(tmp_path / "x", packs, capacity=capacity, overwrite=True, metadata=metadata)
    expected = [padded(pack, multiple, 7) for pack in packs]
    positions = [[b - a - 1 for a, b in pairwise(pack.bounds)] for pack in expected]
    target = tmp_path / "x.parquet"
    options = ConvertOptions(padding=Padding(multiple, 7), overwrite=True)
    if max(map(sum, positions)) > capacity:
        with pytest.raises(SequenceError, match=f"--sequence-multiple {multiple}"):
            convert(str(tmp_path / "x"), str(target), "parquet", options)
        return
    report = convert(str(tmp_path / "x"), target, "parquet", options)
    assert report.verified
    stored = open_dataset(target)
    assert stored.capacity == max(capacity, *(len(pack.tokens) for pack in expected))
    assert_holds(stored, expected)
    same_size = f"packed_sequence_size of Megatron-Bridge stays {capacity:,}: "
    assert any(same_size in note for note in report.notes) == (stored.capacity > capacity)
    (said,) = json.loads(Path(f"{target}.json").read_text())
    assert said == {
        "dataset_max_seqlen": max(map(max, positions)),
        "max_samples_per_bin": max(map(len, positions)),
        "min_packed_seqlen": min(map(sum, positions)),
        "packing_factor": round(sum(map(len, positions)) / len(packs), 2),
        "packing_efficiency": round(sum(map(sum, positions)) / len(packs) / capacity * 100, 2),
        "pack_size": capacity,
    }
    if multiple == 1:
        convert(str(target), str(tmp_path / "z"), "sft-idx", ConvertOptions(overwrite=True))
        return
    with pytest.raises(FormatError, match=f"multiples of {multiple} .* convert the original file"):
        convert(str(target), str(tmp_path / "z"), "sft-idx", ConvertOptions(overwrite=True))


def test_the_id_of_padding_need_not_fit_a_narrow_source(tmp_path: Path) -> None:
    """With one source in uint16 and one in int32, the result has int32."""
    for name, dtype in (("x", np.uint16), ("y", np.int32)):
        write_samples(tmp_path / name, demo_samples(3), capacity=64, token_dtype=dtype)
    options, target = ConvertOptions(padding=Padding(4, 70_000)), tmp_path / "z.parquet"
    convert([str(tmp_path / "x"), str(tmp_path / "y")], str(target), "parquet", options)
    assert_holds(open_dataset(target), 2 * [padded(pack, 4, 70_000) for pack in demo_samples(3)])


def test_padding_needs_an_id_and_packs(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(), token_dtype=np.uint16)
    write_samples(tmp_path / "none", [])
    target = str(tmp_path / "y.parquet")
    for source, padding, message in (
        ("x", Padding(4), "--eod-id"),
        ("x", Padding(4, 1 << 16), "expected one that fits into uint16, found 65536"),
        ("x", Padding(4, -1), "found -1"),
        ("none", Padding(4, 1), "no packs"),
    ):
        with pytest.raises(FormatError, match=message):
            convert(str(tmp_path / source), target, "parquet", ConvertOptions(padding=padding))
    with pytest.raises(FormatError, match="only supported in parquet"):
        convert(str(tmp_path / "x"), target, "memmap", ConvertOptions(padding=Padding(4, 1)))
    assert not list(tmp_path.glob("*y.parquet*"))
    for wrong in (["--to", "npy", "--pad-seq-to-mult", "4"], ["--to", "parquet", "--eod-id", "4"]):
        with pytest.raises(SystemExit):
            main(["convert", str(tmp_path / "x"), target, *wrong])


def test_a_summary_replaces_none_but_a_summary(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(), capacity=64)
    target, summary = tmp_path / "y.parquet", tmp_path / "y.parquet.json"
    options = ConvertOptions(padding=Padding(2, 1), overwrite=True)
    convert(str(tmp_path / "x"), str(target), "parquet", options)
    (entry,) = json.loads(summary.read_text())
    target.unlink()
    more, fewer = {**entry, "mine": 1}, {key: entry[key] for key in entry if key != "pack_size"}
    other, compact = {**entry, "pack_size": "64"}, {"separators": (",", ":")}
    strangers = ['[{"name": "of somebody"}]', "[]", "[{}]", "{}", "[[]]", "0", "null", '["pack_size"]']
    strangers += [json.dumps(what, **compact) + "\n" for what in (entry, [entry] * 2, [more], [fewer], [other])]
    strangers += [json.dumps([entry], indent=2), "[" * 4096]
    for content in strangers:
        summary.write_text(content)
        with pytest.raises(FormatError, match="summary of packs"):
            convert(str(tmp_path / "x"), str(target), "parquet", options)
        assert summary.read_text() == content
        assert not target.exists()
        # If none is written, an existing one does not matter.
        convert(str(tmp_path / "x"), str(target), "parquet", ConvertOptions(overwrite=True))
        assert summary.read_text() == content
        target.unlink()
    summary.unlink()
    convert(str(tmp_path / "x"), str(target), "parquet", options)
    first = summary.read_bytes()
    with pytest.raises(FormatError, match="--overwrite"):
        convert(str(tmp_path / "x"), str(target), "parquet", ConvertOptions(padding=Padding(1)))
    convert(str(tmp_path / "x"), str(target), "parquet", ConvertOptions(padding=Padding(1), overwrite=True))
    assert summary.read_bytes() != first
    assert_holds(open_dataset(target), demo_samples())


def test_a_file_without_padding_takes_the_summary_of_the_old_one_away(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(), capacity=64)
    target, summary = tmp_path / "y.parquet", tmp_path / "y.parquet.json"
    convert(str(tmp_path / "x"), str(target), "parquet", ConvertOptions(padding=Padding(2, 1)))
    old, said = target.read_bytes(), summary.read_bytes()
    with pytest.raises(FormatError, match="--overwrite"):
        convert(str(tmp_path / "x"), str(target), "parquet")
    assert (target.read_bytes(), summary.read_bytes()) == (old, said)
    convert(str(tmp_path / "x"), str(target), "parquet", ConvertOptions(overwrite=True))
    assert target.read_bytes() != old
    assert not summary.exists()
    # A new file also never appears next to the summary of a removed one.
    target.unlink()
    summary.write_bytes(said)
    with pytest.raises(FormatError, match=r"y\.parquet\.json: already exists"):
        convert(str(tmp_path / "x"), str(target), "parquet")
    with pytest.raises(FormatError, match=r"y\.parquet\.json: already exists"):
        convert(str(tmp_path / "x"), str(target), "parquet", ConvertOptions(padding=Padding(1)))
    assert not target.exists()
    assert summary.read_bytes() == said


def test_a_name_with_no_room_for_that_of_its_folder_is_refused(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    with pytest.raises(FormatError, match="longer than 255 bytes, the maximum for one name; choose a shorter one"):
        convert(str(tmp_path / "x"), str(tmp_path / ("y" * 247)), "parquet")
    convert(str(tmp_path / "x"), str(tmp_path / ("y" * 246)), "parquet")
    assert len(open_dataset(tmp_path / ("y" * 246))) == len(demo_samples())


def test_a_file_that_cannot_be_published_takes_its_summary_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(tmp_path / "x", demo_samples(), capacity=64)
    target = tmp_path / "y.parquet"

    def finish(writer: Any) -> None:
        target.write_text("of somebody who came meanwhile")
        PackedWriter.publish(writer)

    monkeypatch.setattr(parquet.Writer, "publish", finish)
    with pytest.raises(FormatError, match="something else was written here"):
        convert(str(tmp_path / "x"), str(target), "parquet", ConvertOptions(padding=Padding(2, 1)))
    assert target.read_text() == "of somebody who came meanwhile"
    assert [path.name for path in tmp_path.glob("*y.parquet*")] == ["y.parquet"]


_KILLED = """
import os, signal, sys
from megatron_sft_idx.storage import building
from megatron_sft_idx.cli.main import main

left = int(sys.argv[1])

def dying(step):
    def call(*arguments, **options):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return step(*arguments, **options)
    return call

for name in ("move_into_place", "sync_folder"):
    setattr(building, name, dying(getattr(building, name)))
os.unlink = dying(os.unlink)
sys.exit(main(sys.argv[2:]))
"""


def test_a_pickled_file_comes_with_the_summary_that_bridge_opens(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_samples(tmp_path / "x", demo_samples(), capacity=64)
    write_samples(tmp_path / "few", demo_samples(2), capacity=64)
    write_samples(tmp_path / "none", [], capacity=64)
    target, summary, overwrite = tmp_path / "y.npy", tmp_path / "y.npy.json", ConvertOptions(overwrite=True)

    def expected(source: str) -> list[dict[str, Any]]:
        target = str(tmp_path / f"{source}.parquet")
        convert(str(tmp_path / source), target, "parquet", ConvertOptions(padding=Padding(1), overwrite=True))
        found: list[dict[str, Any]] = json.loads(Path(f"{target}.json").read_text())
        return found

    convert(str(tmp_path / "x"), str(target), "npy")
    assert json.loads(summary.read_text()) == expected("x")
    with pytest.raises(FormatError, match="--overwrite"):
        convert(str(tmp_path / "few"), str(target), "npy")
    assert json.loads(summary.read_text()) == expected("x")
    convert(str(tmp_path / "few"), str(target), "npy", overwrite)
    assert json.loads(summary.read_text()) == expected("few") != expected("x")
    # Megatron-Bridge cannot open a file without packs; the summary of an older file is removed.
    convert(str(tmp_path / "none"), str(target), "npy", overwrite)
    assert not summary.exists()
    # A writer used directly without a capacity, and readers of the folder.
    with LegacyPickleWriter(target, overwrite=True) as writer:
        for number, pack in enumerate(demo_samples()):
            writer.write_bin(number, pack.tokens, pack.label_mask, pack.starts)
    (entry,), (other,) = json.loads(summary.read_text()), expected("x")
    counted = ("dataset_max_seqlen", "max_samples_per_bin", "packing_factor", "min_packed_seqlen")
    assert [entry[key] for key in counted] == [other[key] for key in counted]
    (tmp_path / "folder").mkdir()
    for path in (target, summary):
        path.rename(tmp_path / "folder" / path.name)
    assert_holds(open_dataset(tmp_path / "folder"), demo_samples())
    # Files of other programs are never replaced, with or without --overwrite.
    summary.write_text("[]")
    with pytest.raises(FormatError, match=r"y\.npy\.json: .*summary of packs"):
        convert(str(tmp_path / "x"), str(target), "npy", overwrite)
    assert summary.read_text() == "[]"
    assert not target.exists()


@pytest.mark.sample(2)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("to", "padding"), [("parquet", ["--pad-seq-to-mult", "4", "--eod-id", "1"]), ("parquet", []), ("npy", [])]
)
def test_a_kill_leaves_no_file_beside_the_summary_of_another(
    overwrite: bool, to: str, padding: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    write_samples(tmp_path / "x", demo_samples(), capacity=64)
    write_samples(tmp_path / "before", demo_samples(3), capacity=64)
    target, summary = tmp_path / f"y.{to}", tmp_path / f"y.{to}.json"
    assert main(["convert", str(tmp_path / "x"), f"{tmp_path}/new.{to}", "--to", to, *padding]) == 0
    old: tuple[bytes | None, bytes | None] = (None, None)
    if overwrite:
        padded = ConvertOptions(padding=Padding(2, 1) if to == "parquet" else None)
        convert(str(tmp_path / "before"), str(target), to, padded)
        old = target.read_bytes(), summary.read_bytes()

    def there(stem: str) -> tuple[bytes | None, bytes | None]:
        files = (tmp_path / f"{stem}.{to}", tmp_path / f"{stem}.{to}.json")
        one, other = (path.read_bytes() if path.exists() else None for path in files)
        return one, other

    new = there("new")
    command = ["convert", str(tmp_path / "x"), str(target), "--to", to, *padding, *["--overwrite"] * overwrite]
    kills, seen = 0, set()
    while True:
        run = subprocess.run([sys.executable, "-c", _KILLED, str(kills), *command], check=False, capture_output=True)
        if run.returncode == 0:
            break
        assert run.returncode == -9, run.stderr
        found = there("y")
        assert found in {old, new, (old[0], None), (new[0], None)}
        seen.add(found)
        # The next run finishes the remains of this one. Only at the very end, the kill leaves no trace.
        if found != new or overwrite or (tmp_path / f"y.{to}.building/done.json").exists():
            assert main(command) == 0
            assert not (tmp_path / f"y.{to}.building").exists()
        shutil.rmtree(tmp_path / f"y.{to}.building", ignore_errors=True)
        assert there("y") == new
        for path, content in zip((target, summary), old, strict=True):
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
        kills += 1
    assert there("y") == new
    assert kills >= 2
    assert len(seen) >= 2
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".tmp", ".building"))]


@pytest.mark.parametrize("source", ["shard", "parquet", "memmap"])
@pytest.mark.parametrize("to", ["npy", "save_to_disk", "parquet", "sft-idx"])
def test_columns_that_say_which_answers_are_bad_are_not_left_out(tmp_path: Path, source: str, to: str) -> None:
    """Without them, the rejected answers of pairs would be trained like others."""
    spec, path = ColumnSpec("sequence", np.uint32, 2), tmp_path / "pairs"
    with ShardWriter(path, capacity=8, durable=False, columns={"pair": spec}) as writer:
        writer.add_pack([1, 2, 3, 4], [1, 0, 1, 0], [0, 2], columns={"pair": np.array([[0, 0], [0, 1]])})
    if source != "shard":
        convert(path, tmp_path / "other", source)
        path = tmp_path / "other"
    plain = {"reader": {"columns": ()}}
    with pytest.raises(FormatError, match=r"preference pairs .*convert with this column, or pass lossy"):
        convert(path, tmp_path / "out", to, ConvertOptions(**plain))
    assert not (tmp_path / "out").exists()
    convert(path, tmp_path / "out", to, ConvertOptions(**plain, lossy=True))
