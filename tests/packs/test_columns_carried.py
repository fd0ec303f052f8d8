"""``merge``, ``split`` and ``copy`` keep all columns, or fail."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import columned
import numpy as np
import pytest
import sample_packs as samples
from chats import command
from columned import SOURCE, SPECS, values_of
from disks import filled, mounted
from kills import killed_at, kills_at
from numpy.typing import NDArray
from object_folders import serve_folder
from sample_packs import assert_holds, demo_samples

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError, ShardNotFoundError, StorageError
from megatron_sft_idx.layout.column import PAIR, ColumnSpec
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.packs import run as run_module
from megatron_sft_idx.packs import split as split_module
from megatron_sft_idx.packs import transfer
from megatron_sft_idx.packs.buckets import copy_shard
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.split import SplitSize, split
from megatron_sft_idx.packs.transfer import CopySource
from megatron_sft_idx.shard import Shard, find_remains, recover, write_column
from megatron_sft_idx.shard import publication as publication_module
from megatron_sft_idx.shard import writer as writer_module
from megatron_sft_idx.shard.opening import missing_files
from megatron_sft_idx.storage.remote.store import RemoteStore

PACKS = demo_samples(40)
PAIRED = [pack for pack in demo_samples(60) if len(pack.starts) % 2 == 0]
FEW = {"source": SOURCE, "grade": ColumnSpec("pack", "f4"), "topk": ColumnSpec("token", "i4", 2, metadata={"k": 2})}


def write_columned(prefix: Path, packs: Sequence[Any], specs: Mapping[str, ColumnSpec], **options: Any) -> None:
    columned.write_columned(prefix, packs, specs, capacity=64, **options)


def write_samples(prefix: Path, packs: Sequence[Any]) -> None:
    samples.write_samples(prefix, packs, capacity=64)


def attach(prefix: Path, name: str, per: Any, **options: Any) -> NDArray[np.float32]:
    """Attach a column with consecutive values."""
    header = Shard(prefix).header
    rows = {"token": header.num_tokens, "sequence": header.num_sequences, "pack": header.num_packs}[per]
    values = np.arange(rows, dtype=np.float32)
    write_column(prefix, name, values, per=per, **options)
    return values


def files_of(folder: Path, name: str = "x") -> dict[str, bytes]:
    return {path.name.removeprefix(name): path.read_bytes() for path in folder.glob(f"{name}.*") if path.is_file()}


def lines_of(prefix: Path | str) -> list[tuple[str, int]]:
    """Return file and line of every sequence, from ``source``."""
    column = Shard(prefix).columns["source"]
    files = [file["name"] for file in column.spec.metadata["files"]]
    return [(files[file], line) for file, line in column.values.tolist()]


def pairs_of(prefix: Path | str) -> list[tuple[int, int]]:
    return [tuple(row) for row in Shard(prefix).columns["pair"].values.tolist()]


# ---- split, and merged again ----


@pytest.mark.parametrize(
    "parts", [SplitSize(shards=3), SplitSize(packs=9), SplitSize(shards=50), SplitSize(nbytes=4000)]
)
def test_a_shard_split_and_merged_has_the_columns_byte_for_byte(
    tmp_path: Path, parts: SplitSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (run_module, split_module):
        monkeypatch.setattr(module, "COPIED_TOKENS", 20)
    monkeypatch.setattr(writer_module, "_LONG_RUN", 15)
    # Complete pairs in every pack, so that every split has complete pairs (C10).
    whole = [pack for pack in PACKS if len(pack.starts) % 2 == 0]
    write_columned(tmp_path / "x", whole, {**SPECS, "pair": PAIR})
    late = {per: attach(tmp_path / "x", f"late_{per}", per) for per in ("token", "sequence", "pack")}
    report = split(tmp_path / "x", tmp_path / "y", parts)
    before = {"token": 0, "sequence": 0, "pack": 0}
    for prefix in report.prefixes:
        shard = Shard(prefix)
        assert (
            sorted(shard.columns) == sorted(shard.header.metadata["columns"]) == sorted(Shard(tmp_path / "x").columns)
        )
        counts = {"token": len(shard.files.tokens), "sequence": len(shard.files.starts), "pack": len(shard)}
        for per, values in late.items():
            mine = shard.columns[f"late_{per}"].values[:]
            np.testing.assert_array_equal(mine, values[before[per] : before[per] + counts[per]], strict=True)
        before = {per: before[per] + count for per, count in counts.items()}
        assert verify_shard(prefix, full=True).ok
        sizes = sum(os.path.getsize(path) for path in tmp_path.glob(f"{Path(prefix).name}.*"))
        headers = shard.header.nbytes + sum(c.spec.header_nbytes for c in shard.columns.values())
        assert parts.nbytes is None or len(shard) == 1 or sizes - headers <= parts.nbytes
    merge(report.prefixes, tmp_path / "z", durable=False)
    after, old = files_of(tmp_path, "z"), files_of(tmp_path)
    assert after.keys() == old.keys()
    assert [name for name in old if name != ".seq.idx" and old[name] != after[name]] == []
    assert verify_shard(tmp_path / "z", full=True).ok


def test_a_split_goes_on_with_parts_of_the_same_columns_only(tmp_path: Path) -> None:
    write_columned(tmp_path / "x", PACKS, FEW)
    attach(tmp_path / "x", "late", "pack")
    parts = SplitSize(shards=2)
    split(tmp_path / "x", tmp_path / "y", parts)
    assert split(tmp_path / "x", tmp_path / "y", parts).num_kept == 2
    os.rename(tmp_path / "y-00000-of-00002.late.col", tmp_path / "aside")
    with pytest.raises(ShardNotFoundError, match=r"late \(rule C8\)"):
        split(tmp_path / "x", tmp_path / "y", parts)
    os.rename(tmp_path / "aside", tmp_path / "y-00000-of-00002.late.col")
    write_column(tmp_path / "x", "late", np.ones(40), per="pack", overwrite=True)
    with pytest.raises(FormatError, match="--overwrite"):
        split(tmp_path / "x", tmp_path / "y", parts)
    split(tmp_path / "x", tmp_path / "y", parts, overwrite=True)
    assert Shard(tmp_path / "y-00001-of-00002").columns["late"].values[:].tolist() == [1] * 20


# ---- merged ----


def tables(*names: str) -> ColumnSpec:
    files = [{"name": f"{name[0]}.jsonl", "fingerprint": name * 8} for name in names]
    return ColumnSpec("sequence", np.uint32, 2, metadata={"files": files})


def test_the_files_of_all_sources_are_one_table_and_every_sequence_keeps_its_line(tmp_path: Path) -> None:
    # Both "b" are the same file, "b2" is another one of the same name; the last table equals the first.
    given = [tables("a", "b"), tables("b", "b2", "c"), tables("c", "a"), tables("a", "b")]
    for i, spec in enumerate(given):
        write_columned(tmp_path / f"s{i}", PACKS[10 * i : 10 * i + 10], {"source": spec}, first=100 * i)
    sources = [tmp_path / f"s{i}" for i in range(4)]
    merge(sources, tmp_path / "x", durable=False)
    column = Shard(tmp_path / "x").columns["source"]
    fingerprints = [file["fingerprint"][:2] for file in column.spec.metadata["files"]]
    assert fingerprints == ["aa", "bb", "b2", "cc"]
    assert lines_of(tmp_path / "x") == [line for source in sources for line in lines_of(source)]
    assert verify_shard(tmp_path / "x", full=True).ok
    # Merging in two steps gives the same result as in one.
    merge(sources[:3], tmp_path / "y", durable=False)
    merge([tmp_path / "y", sources[3]], tmp_path / "z", durable=False)
    assert files_of(tmp_path, "x") == files_of(tmp_path, "z")


def test_files_without_fingerprints_are_not_taken_for_one_another(tmp_path: Path) -> None:
    spec = ColumnSpec("sequence", np.uint32, 2, metadata={"files": [{"name": "a"}, {"name": "b"}]})
    other = ColumnSpec("sequence", np.uint32, 2, metadata={"files": [{"name": "a"}]})
    for name, table in (("r", spec), ("s", other), ("t", spec)):
        write_columned(tmp_path / name, PACKS[:3], {"source": table})
    merge([tmp_path / name for name in "rst"], tmp_path / "x", durable=False)
    assert [file["name"] for file in Shard(tmp_path / "x").columns["source"].spec.metadata["files"]] == list("aba")
    assert lines_of(tmp_path / "x") == [line for name in "rst" for line in lines_of(tmp_path / name)]
    merge([tmp_path / "r", tmp_path / "t"], tmp_path / "y", durable=False)
    assert [file["name"] for file in Shard(tmp_path / "y").columns["source"].spec.metadata["files"]] == list("ab")


def write_pairs(prefix: Path, packs: Sequence[Any], numbers: Sequence[int]) -> None:
    """Write packs whose sequences are alternately chosen and rejected."""
    write_samples(prefix, packs)
    count = Shard(prefix).header.num_sequences
    values = [[numbers[i // 2 % len(numbers)] + i // 2 // len(numbers) * 1000, i % 2] for i in range(count)]
    write_column(prefix, "pair", np.array(values, np.uint32), per="sequence")


def test_pairs_of_different_shards_stay_apart(tmp_path: Path) -> None:
    write_pairs(tmp_path / "s", PAIRED[:10], [3, 0, 1])
    write_pairs(tmp_path / "t", PAIRED[10:20], [0, 2])
    first, second = pairs_of(tmp_path / "s"), pairs_of(tmp_path / "t")
    shift = max(first)[0] + 1
    merge([tmp_path / "s", tmp_path / "t", tmp_path / "s"], tmp_path / "x", durable=False)
    third = shift + max(second)[0] + 1
    expected = [*first, *((n + shift, i) for n, i in second), *((n + third, i) for n, i in first)]
    assert pairs_of(tmp_path / "x") == expected
    # Outputs of one split keep the numbers of one shard if they are merged in order, but not in reverse order.
    parts = split(tmp_path / "x", tmp_path / "y", SplitSize(shards=4)).prefixes
    merge(parts, tmp_path / "z", durable=False)
    assert pairs_of(tmp_path / "z") == expected
    assert all(verify_shard(prefix, full=True).ok for prefix in [tmp_path / "x", *parts, tmp_path / "z"])
    merge(parts[::-1], tmp_path / "r", durable=False)
    counts = [len({n for n, _ in pairs_of(prefix)}) for prefix in parts]
    assert len({n for n, _ in pairs_of(tmp_path / "r")}) == sum(counts)


@pytest.mark.parametrize("part", ["1", 1.0, None, [1], True])
def test_a_split_that_somebody_else_wrote_is_not_believed(tmp_path: Path, part: Any) -> None:
    for name, number in (("s", part), ("t", 0)):
        entry = {"shard_id": "x", "part": number, "parts": 2}
        write_columned(tmp_path / name, PAIRED[:2], {"pair": PAIR}, metadata={"split": entry})
    merge([tmp_path / "s", tmp_path / "t"], tmp_path / "x", durable=False)
    assert len({number for number, _ in pairs_of(tmp_path / "x")}) == 2 * len({n for n, _ in pairs_of(tmp_path / "s")})


def test_more_pairs_than_numbers_are_refused(tmp_path: Path) -> None:
    write_pairs(tmp_path / "s", PAIRED[:1], [2**32 - 1])
    with pytest.raises(FormatError, match=r"s\.pair\.col: pair number 8,589,934,591, counted over all shards"):
        merge([tmp_path / "s", tmp_path / "s"], tmp_path / "x", durable=False)
    assert not list(tmp_path.glob("x.*"))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (None, r"t: has no column note; it has .*; .*s has column note; a merged shard can only have columns that"),
        (
            ColumnSpec("pack", "f4"),
            r"t: column note is float32 x 1 .*, but in .*s it is uint16 x 2 .*, aligned with lab",
        ),
        (ColumnSpec("token", "u2", 1, "label"), r"t: column note is uint16 x 1 .*, but in .*s it is uint16 x 2"),
        (ColumnSpec("token", "i2", 2, "label"), r"t: column note is int16 x 2"),
        (ColumnSpec("token", "u2", 2), r"t: column note is uint16 x 2 .*, aligned with tokens, but in"),
    ],
)
def test_columns_that_do_not_go_together_are_refused_and_left_out_with_leave(
    tmp_path: Path, spec: ColumnSpec | None, match: str
) -> None:
    note = ColumnSpec("token", "u2", 2, "label")
    write_columned(tmp_path / "s", PACKS[:20], {"source": SOURCE, "note": note})
    write_columned(tmp_path / "t", PACKS[20:], {"source": SOURCE, **({"note": spec} if spec else {})})
    sources = [tmp_path / "s", tmp_path / "t"]
    with pytest.raises(FormatError, match=match):
        merge(sources, tmp_path / "x", durable=False)
    with pytest.raises(FormatError, match="column note"):
        merge(sources[::-1], tmp_path / "x", durable=False)
    assert not list(tmp_path.glob("x.*"))
    report = merge(sources, tmp_path / "x", lossy=True, durable=False)
    assert [said for said in report.notes if said.startswith("column note left out (--lossy): ")]
    assert list(Shard(tmp_path / "x").columns) == ["source"]
    done = command("merge", *map(str, sources), "--output-prefix", str(tmp_path / "y"), "--lossy")
    assert "note            column note left out (--lossy): " in done.out


def test_metadata_that_all_have_stay_and_others_are_said(tmp_path: Path) -> None:
    for name, teacher in (("s", "big"), ("t", "small")):
        metadata = {"teacher": teacher, "temperature": 1}
        write_columned(tmp_path / name, PACKS[:5], {"topk": ColumnSpec("token", "i4", 4, metadata=metadata)})
    report = merge([tmp_path / "s", tmp_path / "t"], tmp_path / "x", durable=False)
    assert Shard(tmp_path / "x").columns["topk"].spec.metadata == {"temperature": 1}
    assert "column topk: values that differ between shards, left out of the column's metadata: teacher" in report.notes
    assert not [note for note in report.notes if "columns" in note]


def test_damaged_columns_are_never_carried(tmp_path: Path) -> None:
    write_columned(tmp_path / "s", PACKS[:20], FEW)
    attach(tmp_path / "s", "late", "pack")
    works = [
        lambda: merge([tmp_path / "s", tmp_path / "s"], tmp_path / "out/x", durable=False),
        lambda: split(tmp_path / "s", tmp_path / "out/x", SplitSize(shards=2), durable=False),
    ]
    for name, rule in (("topk", "C7"), ("late", "C7"), ("source", "C3|C4")):
        path = tmp_path / f"s.{name}.col"
        good = path.read_bytes()
        place = len(good) - 1 if rule == "C7" else 130
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        for work in works:
            with pytest.raises(CorruptShardError, match=rf"s\.{name}\.col: .*\(rule ({rule})\)"):
                work()
        path.write_bytes(good)
    os.rename(tmp_path / "s.topk.col", tmp_path / "aside")
    for work in works:
        with pytest.raises(ShardNotFoundError, match="C8"):
            work()
    assert not list(tmp_path.glob("out/*"))
    # Lost columns do not affect the rest of a shard.
    late = tmp_path / "s.late.col"
    late.write_bytes(late.read_bytes()[:60])
    report = merge([tmp_path / "s"], tmp_path / "x", lossy=True, durable=False)
    assert sorted(Shard(tmp_path / "x").columns) == ["grade", "source"]
    assert len([note for note in report.notes if re.match("column (topk|late) left out", note)]) == 2


@pytest.mark.parametrize("stray", ["text", "empty", "of another shard"])
@pytest.mark.parametrize("at", ["s", "x", "x-00001-of-00002"])
def test_a_file_with_the_name_of_a_column_is_never_passed_over(tmp_path: Path, stray: str, at: str) -> None:
    """An unrelated file looks like a column with a damaged header: next to source or output, it is an error."""
    write_columned(tmp_path / "s", PACKS[:20], FEW)
    path = tmp_path / f"{at}.notes.col"
    if stray == "of another shard":
        write_samples(tmp_path / "other", PACKS[:7])
        attach(tmp_path / "other", "notes", "pack")
        os.rename(tmp_path / "other.notes.col", path)
    else:
        path.write_text({"text": "mine", "empty": ""}[stray])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    if at == "s":
        assert {finding.path for finding in verify_shard(tmp_path / "s").findings} == {str(path)}
    for refused, verb in (
        (at != "x-00001-of-00002", lambda: merge([tmp_path / "s"] * 2, tmp_path / "x", durable=False)),
        (at != "x", lambda: split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2), durable=False)),
    ):
        if refused:
            with pytest.raises(FormatError, match=r"\.notes\.col"):
                verb()
            assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_folder_is_looked_at_as_often_for_many_shards_as_for_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(12):
        write_columned(tmp_path / f"s{i}", PACKS[i : i + 1], {"source": SOURCE}, first=i)
        attach(tmp_path / f"s{i}", "late", "pack")
    looks: list[Any] = []
    look = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder=".": looks.append(folder) or look(folder))
    counts = []
    for few in (2, 12):
        looks.clear()
        merge([tmp_path / f"s{i}" for i in range(few)], tmp_path / f"out{few}/x", durable=False)
        counts.append(len(looks))
    assert counts[0] == counts[1] < 12
    assert sorted(Shard(tmp_path / "out12/x").columns) == ["late", "source"]


# ---- killed ----


@kills_at
def test_a_merge_that_is_killed_leaves_the_shard_with_all_it_lists_or_none(tmp_path: Path, stride: int) -> None:
    for i in range(3):
        write_columned(tmp_path / f"s{i}", PACKS[5 * i : 5 * i + 5], FEW, first=50 * i)
    sources = [tmp_path / f"s{i}" for i in range(3)]
    merge(sources, tmp_path / "whole/x")
    whole = files_of(tmp_path / "whole")
    step, recovered = stride // 2, 0
    while True:
        folder = tmp_path / f"k{step}"
        folder.mkdir()
        write_columned(folder / "x", PACKS[:3], {"source": SOURCE, "other": ColumnSpec("pack", "u1")})
        old = files_of(folder)
        killed = killed_at(step, lambda folder=folder: merge(sources, folder / "x", overwrite=True))  # type: ignore[misc]
        if not killed:
            break
        if (folder / "x.seq.idx").exists():
            found = {name: raw for name, raw in files_of(folder).items() if not name.endswith(".building")}
            assert found in (old, whole)
        else:
            left = find_remains(folder / "x")
            if left is not None and left.is_complete:
                recover(folder / "x", overwrite=True)
                recovered += 1
                assert files_of(folder) == whole
        merge(sources, folder / "x", overwrite=True)
        assert files_of(folder) == whole
        step += stride
    assert files_of(folder) == whole
    assert step > 20
    assert recovered > 3 // stride


@kills_at
def test_packs_of_a_killed_merge_are_recovered_with_their_columns(tmp_path: Path, stride: int) -> None:
    for i in range(3):
        write_columned(tmp_path / f"s{i}", PACKS[5 * i : 5 * i + 5], FEW)
    sources = [str(tmp_path / f"s{i}") for i in range(3)]
    step, kept = stride // 2, set()
    while killed_at(step, lambda prefix=tmp_path / f"x{step}": merge(sources, prefix)):  # type: ignore[misc]
        prefix, step = tmp_path / f"x{step}", step + stride
        if (prefix.parent / f"{prefix.name}.building").exists() and not Path(f"{prefix}.seq.idx").exists():
            left = find_remains(prefix)
            if left is None or not (left.num_packs or left.is_complete):
                continue
            recover(prefix, overwrite=True)
            shard = Shard(prefix)
            kept.add(len(shard))
            assert verify_shard(prefix, full=True).ok
            assert_holds(shard, PACKS[: len(shard)])
            for name, spec in FEW.items():
                parts = [values_of(spec, 0, len(Shard(source).columns[name])) for source in sources]
                values = shard.columns[name].values[:]
                np.testing.assert_array_equal(values, np.concatenate(parts)[: len(values)])
    assert 15 in kept


@kills_at
def test_a_split_that_is_killed_leaves_whole_parts_or_none(tmp_path: Path, stride: int) -> None:
    write_columned(tmp_path / "s", PACKS[:12], FEW)
    attach(tmp_path / "s", "late", "sequence")
    step = stride // 2
    while True:
        folder = tmp_path / str(step)
        folder.mkdir()
        killed = killed_at(step, lambda folder=folder: split(tmp_path / "s", folder / "x", SplitSize(shards=2)))  # type: ignore[misc]
        for path in folder.glob("*.seq.idx"):
            prefix = str(path).removesuffix(".seq.idx")
            assert verify_shard(prefix, full=True).ok
            assert sorted(Shard(prefix).columns) == ["grade", "late", "source", "topk"]
        if not killed:
            break
        split(tmp_path / "s", folder / "x", SplitSize(shards=2))
        merge([folder / f"x-0000{i}-of-00002" for i in range(2)], folder / "y", durable=False)
        for name in [*FEW, "late"]:
            assert (folder / f"y.{name}.col").read_bytes() == (tmp_path / f"s.{name}.col").read_bytes()
        step += stride
    assert len(list(folder.iterdir())) == 2 * (len(SUFFIXES) + 4)
    assert step > 30


# ---- copied ----


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "store").mkdir()
    return serve_folder(tmp_path / "store", tmp_path / "msc.json", monkeypatch)


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("remote", [False, True])
def test_copies_bring_all_columns_and_send_nothing_twice(store: str, tmp_path: Path, remote: bool) -> None:
    write_columned(tmp_path / "x", PACKS, SPECS)
    attach(tmp_path / "x", "late", "token")
    there = tmp_path / ("store" if remote else "there")
    target = f"{store}/x" if remote else str(there / "x")
    told: list[int] = []
    first = copy_shard(str(tmp_path / "x"), target, on_progress=told.append)
    assert files_of(there) == files_of(tmp_path)
    assert (first.nbytes_sent, first.nbytes_found) == (sum(told), 0) == (sum(map(len, files_of(tmp_path).values())), 0)
    assert copy_shard(str(tmp_path / "x"), target).nbytes_sent == 0
    copy_shard(target, str(tmp_path / "back/x"))
    assert files_of(tmp_path / "back") == files_of(tmp_path)
    for name, spec in SPECS.items():
        column = Shard(target, columns=[name]).columns[name]
        np.testing.assert_array_equal(column.values[:], values_of(spec, 0, len(column)), strict=True)
    pack = Shard(target, columns=["source", "late"])[3]
    assert pack["source"].shape == (len(PACKS[3].starts), 2)
    np.testing.assert_array_equal(pack["late"], Shard(tmp_path / "x", columns=["late"])[3]["late"])
    # Only newly attached columns are sent; the shard stays open to readers.
    attach(tmp_path / "x", "later", "pack")
    index = os.stat(there / "x.seq.idx")
    again = copy_shard(str(tmp_path / "x"), target)
    assert again.nbytes_sent == os.path.getsize(tmp_path / "x.later.col")
    assert os.stat(there / "x.seq.idx").st_ino == index.st_ino
    assert files_of(there) == files_of(tmp_path)
    # A listed column that was lost or damaged at the target is copied again.
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(b"\x89SFTCOL\n" + bytes(300))):
        damage(there / "x.source.col")
        if not remote:
            with pytest.raises(SFTIndexError, match=r"x\.source\.col"):
                Shard(target, columns=["source"])
        assert missing_files(target) == ([] if (there / "x.source.col").exists() else [f"{target}.source.col"])
        copy_shard(str(tmp_path / "x"), target, overwrite=not remote)
        assert files_of(there) == files_of(tmp_path)


@pytest.mark.parametrize("remote", [False, True])
def test_columns_of_another_shard_go_with_it_and_those_of_this_one_stay(
    store: str, tmp_path: Path, remote: bool
) -> None:
    there = tmp_path / ("store" if remote else "there")
    target = f"{store}/x" if remote else str(there / "x")
    write_columned(tmp_path / "old", PACKS[:9], {"source": SOURCE, "other": ColumnSpec("pack", "u1")})
    attach(tmp_path / "old", "old_late", "pack")
    write_columned(tmp_path / "new", PACKS, {"source": SOURCE})
    copy_shard(str(tmp_path / "old"), target)
    (there / "x.mine.col").write_text("a list of mine")
    with pytest.raises(FormatError, match="--overwrite"):
        copy_shard(str(tmp_path / "new"), target)
    copy_shard(str(tmp_path / "new"), target, overwrite=True)
    assert {**files_of(tmp_path, "new"), ".mine.col": b"a list of mine"} == files_of(there)
    # A column attached to the copy itself survives a repair.
    attach(tmp_path / "new", "late", "pack")
    os.rename(tmp_path / "new.late.col", there / "x.late.col")
    if remote:
        (there / "x.bin").unlink()
    else:
        (there / "x.bin").write_bytes(bytes((there / "x.bin").stat().st_size))
    copy_shard(str(tmp_path / "new"), target, overwrite=not remote)
    assert files_of(there).keys() == {*files_of(tmp_path, "new"), ".mine.col", ".late.col"}
    assert (there / "x.bin").read_bytes() == (tmp_path / "new.bin").read_bytes()
    # A file of another program with the name of a column is never replaced.
    attach(tmp_path / "new", "mine", "pack")
    for overwrite in (False, True):
        with pytest.raises(FormatError, match=r"mine\.col"):
            copy_shard(str(tmp_path / "new"), target, overwrite=overwrite)
    assert (there / "x.mine.col").read_text() == "a list of mine"


def test_a_column_that_lies_alone_is_replaced_with_leave_only(tmp_path: Path) -> None:
    write_columned(tmp_path / "old", PACKS[:9], {"other": ColumnSpec("pack", "u1")})
    write_columned(tmp_path / "new", PACKS, {"source": SOURCE})
    (tmp_path / "there").mkdir()
    os.rename(tmp_path / "old.other.col", tmp_path / "there/x.other.col")
    done = command("copy", str(tmp_path / "new"), str(tmp_path / "there/x"))
    assert (done.code, "x.other.col" in done.err) == (1, True)
    assert names_of(tmp_path / "there") == ["x.other.col"]
    assert command("copy", str(tmp_path / "new"), str(tmp_path / "there/x"), "--overwrite").code == 0
    assert files_of(tmp_path / "there") == files_of(tmp_path, "new")


@pytest.mark.parametrize("remote", [False, True])
def test_a_damaged_column_is_not_copied(store: str, tmp_path: Path, remote: bool) -> None:
    write_columned(tmp_path / "x", PACKS, FEW)
    target = f"{store}/x" if remote else str(tmp_path / "there/x")
    path = tmp_path / "x.topk.col"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"\x7f")
    with pytest.raises(CorruptShardError, match=r"x\.topk\.col: .*rule C7"):
        copy_shard(str(tmp_path / "x"), target)
    path.unlink()
    with pytest.raises(ShardNotFoundError, match="C8"):
        copy_shard(str(tmp_path / "x"), target)
    assert not Path(target + ".seq.idx").exists()
    path.write_bytes(good)
    copy_shard(str(tmp_path / "x"), target)


def test_attached_columns_that_may_not_be_listed_are_said_to_be_left(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_columned(tmp_path / "x", PACKS[:5], FEW)
    attach(tmp_path / "x", "late", "pack")
    copy_shard(str(tmp_path / "x"), f"{store}/x")

    def denied(*_: Any) -> Any:
        raise StorageError("the store", "access denied")

    monkeypatch.setattr(RemoteStore, "list", denied)
    copied = copy_shard(f"{store}/x", str(tmp_path / "back/x"))
    (note,) = copied.notes
    assert note.endswith("could not look for attached columns: the store: access denied")
    assert files_of(tmp_path / "back").keys() == files_of(tmp_path).keys() - {".late.col"}


@kills_at
def test_a_copy_that_is_killed_is_no_shard_or_a_whole_one_and_goes_on(tmp_path: Path, stride: int) -> None:
    write_columned(tmp_path / "old", PACKS[:4], {"source": SOURCE, "other": ColumnSpec("pack", "u1")})
    write_columned(tmp_path / "new", PACKS, FEW)
    attach(tmp_path / "new", "late", "token")
    old, new = files_of(tmp_path, "old"), files_of(tmp_path, "new")
    step, killed = stride // 2, True
    while killed:
        target = tmp_path / str(step) / "x"
        copy_shard(str(tmp_path / "old"), str(target))
        killed = killed_at(step, lambda target=target: copy_shard(str(tmp_path / "new"), str(target), overwrite=True))  # type: ignore[misc]
        found = files_of(target.parent)
        if ".seq.idx" in found:
            assert {name: found[name] for name in found if not name.endswith(".building")} in (old, new)
        copy_shard(str(tmp_path / "new"), str(target), overwrite=True)
        assert files_of(target.parent) == new
        step += stride
    assert step > 30


def test_a_copy_goes_on_with_what_has_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_CHUNK_NBYTES", 64)
    write_columned(tmp_path / "x", PACKS, FEW)
    size = (tmp_path / "x.topk.col").stat().st_size
    begins: list[tuple[str, int]] = []
    chunks = CopySource.chunks

    def seen(self: CopySource, suffix: str, offset: int = 0) -> Any:
        begins.append((suffix, offset))
        yield from chunks(self, suffix, offset)

    def killed_inside_the_column() -> None:
        def advance(nbytes: int) -> None:
            arriving = tmp_path / "there/x.building/.topk.col"
            if arriving.exists() and arriving.stat().st_size > size // 2:
                os.kill(os.getpid(), signal.SIGKILL)

        copy_shard(str(tmp_path / "x"), str(tmp_path / "there/x"), on_progress=advance)

    child = os.fork()
    if child == 0:
        killed_inside_the_column()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    monkeypatch.setattr(CopySource, "chunks", seen)
    copy_shard(str(tmp_path / "x"), str(tmp_path / "there/x"))
    assert files_of(tmp_path / "there") == files_of(tmp_path)
    arrived = {suffix: offset for suffix, offset in begins if suffix not in (".seq.idx", ".grade.col")}
    assert arrived[".bin"] == (tmp_path / "x.bin").stat().st_size
    assert size // 2 < arrived[".topk.col"] < size


# ---- no room ----


@pytest.mark.parametrize("verb", ["merge", "split", "copy"])
def test_a_disk_that_fills_up_inside_a_column_leaves_no_shard_and_room_again(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"wide": ColumnSpec("token", "f4", 512), "source": SOURCE}
    write_columned(tmp_path / "s", PACKS, wide)
    need = sum(map(len, files_of(tmp_path, "s").values()))

    def work(prefix: Path) -> None:
        if verb == "copy":
            copy_shard(str(tmp_path / "s"), str(prefix))
        elif verb == "merge":
            merge([tmp_path / "s"], prefix)
        else:
            split(tmp_path / "s", prefix, SplitSize(shards=2))

    with mounted("size=8m") as disk:
        with filled(disk, need // 2), pytest.raises(OSError, match="No space left"):
            work(disk / "x")
        assert names_of(disk) == []  # detected before the work
        # Other programs fill the disk after the check for space.
        for module in (publication_module, split_module):
            monkeypatch.setattr(module, "require_space", lambda *_: None)
        for room in range(40_000, need - 40_000, need if verb == "copy" else need // 5):
            with filled(disk, room), pytest.raises(OSError, match="No space left"):
                work(disk / "x")
            assert not list(disk.glob("*.seq.idx"))
            assert verb == "copy" or names_of(disk) == []  # the copied files stay for the next attempt
        work(disk / "x")
        for path in disk.glob("*.seq.idx"):
            assert verify_shard(str(path).removesuffix(".seq.idx"), full=True).ok
        assert len(names_of(disk)) == (14 if verb == "split" else 7)
