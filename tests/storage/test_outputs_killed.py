"""Writers killed at every step leave only one folder, and the same command finishes the work."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from kills import killed_at, kills_at
from sample_packs import demo_samples, folder_of, write_samples

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.storage.publish import Kind, head_of

OURS = b"ours "
THING = Kind("a thing of tests", lambda path: head_of(path, len(OURS)) == OURS)
# Names that unfinished work had in earlier designs; here they belong to a user's files, also in our formats.
NOTES = (".out.tmp", ".out.parquet.tmp", "out.tmp", ".out.0123456789abcdef.tmp")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip waiting for the disk, because a kill does not lose written data. Syncs still count as steps."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def content(path: Path) -> object:
    """Return the content at a path: bytes of a file, or of each file in a folder; None if there is nothing."""
    if path.is_dir():
        return {entry.name: entry.read_bytes() for entry in path.iterdir()}
    return path.read_bytes() if path.exists() else None


# ---- conversions ----


@pytest.mark.sample(5)
@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
@pytest.mark.parametrize("to", ["npy", "pbin", "memmap", "jsonl-chunks", "save_to_disk"])
@kills_at
def test_a_conversion_killed_at_any_step_is_taken_over(tmp_path: Path, to: str, overwrite: bool, stride: int) -> None:
    for name, count in (("before", 3), ("packs", 5)):
        write_samples(tmp_path / name, demo_samples(count))
    options = ConvertOptions(lossy=True, overwrite=overwrite)

    def contents_of(source: str) -> object:
        convert(str(tmp_path / source), tmp_path / "whole" / source, to, options)
        return content(tmp_path / "whole" / source)

    old, new = contents_of("before") if overwrite else None, contents_of("packs")
    data = new if isinstance(new, bytes) else b""
    files = {"out", "out.json"} if to == "npy" else {"out"}  # with the summary for Megatron-Bridge
    step, found_whole = stride // 2, 0
    while True:
        folder = tmp_path / f"{step}"
        folder.mkdir()
        out = folder / "out"
        # Even data of this package, which could be mistaken for a leftover by name and content.
        for name in NOTES:
            (folder / name).write_bytes(data)
        if overwrite:
            convert(str(tmp_path / "before"), out, to, options)

        def work(out: Path = out) -> None:
            convert(str(tmp_path / "packs"), out, to, options)

        finished = not killed_at(step, work)
        left = set(folder_of(folder)) - set(NOTES)
        assert left <= (files if finished else files | {"out.building"})
        assert content(out) in (old, new)
        if not finished:
            if (folder / "out.building" / "done.json").exists():
                found_whole += 1
            if content(out) == new and not overwrite and not (folder / "out.building/done.json").exists():
                with contextlib.suppress(FormatError):  # the kill leaves no trace
                    work()
            else:
                work()
        assert content(out) == new
        assert set(folder_of(folder)) == {*files, *NOTES}
        assert {(folder / name).read_bytes() for name in NOTES} == {data}
        step += stride
        if finished:
            break
    assert step > 12
    assert found_whole > 2 // stride
