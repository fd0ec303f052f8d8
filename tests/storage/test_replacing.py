"""Every writer may replace only outputs of the same kind, recognised by content, and never through a link."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import TOKENIZER, command
from format_trips import spec_of
from sample_packs import demo_samples, write_samples

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats import registry
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.formats.registry import WRITABLE
from megatron_sft_idx.live import Ack, Catalog, Deal, Limits, ProducerState, write_ack
from megatron_sft_idx.live.chunks import LiveChunks
from megatron_sft_idx.storage.publish import Kind
from megatron_sft_idx.training.plan_file import PlacedPlan, load_or_make, plan_path

FOREIGN = [name for name in WRITABLE if name != "sft-idx"]
FOLDERS = ("memmap", "jsonl-chunks", "save_to_disk")


def bytes_below(folder: Path) -> dict[str, bytes | str]:
    """Return everything in a folder: content of files, targets of links."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        else:
            found[str(path)] = path.read_bytes() if path.is_file() else "other"
    return found


def write_packs(path: Path, name: str, count: int = 5, **options: Any) -> None:
    """Write ``count`` packs in a format."""
    source = path.with_name(f"source-{count}")
    write_samples(source, demo_samples(count), overwrite=True)
    convert(str(source), str(path), name, ConvertOptions(lossy=True, **options))


# ---- foreign formats ----


@pytest.mark.parametrize("old", FOREIGN)
@pytest.mark.parametrize("new", FOREIGN)
def test_a_format_replaces_itself_and_no_other(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "x"
    write_packs(path, old)
    before = bytes_below(tmp_path)
    with pytest.raises(FormatError, match=f"^{path}: "):
        write_packs(path, new)
    if old == new:
        write_packs(path, new, 2, overwrite=True)
        rule: dict[str, Any] = {"mask_rule": "all"} if new == "pbin" else {}
        reader = registry.open_reader(str(path), new, **rule)
        assert len(reader) == (sum(len(pack.starts) for pack in demo_samples(2)) if new == "pbin" else 2)
        assert not list(tmp_path.glob(".*"))
        return
    with pytest.raises(FormatError, match=f"^{path}: "):
        write_packs(path, new, overwrite=True)
    assert bytes_below(tmp_path) == before


def arrays_of_objects(*rows: Any) -> Any:
    made = np.empty(len(rows), object)
    made[:] = rows
    return made


PACK = {"input_ids": [1, 2], "loss_mask": [1, 0], "seq_start_id": [0]}
ARRAYS = {
    "numbers": (np.arange(5), False),
    "an empty list": (np.array([]), False),
    "one object": (np.array({"a": 1}), False),
    "no objects": (np.empty(0, object), True),
    "dicts of another kind": (arrays_of_objects({"input_ids": [1], "text": "x"}), False),
    "the words alone": (arrays_of_objects("input_ids", "loss_mask", "seq_start_id"), False),
    "a pack that is not the first": (arrays_of_objects([1], PACK), False),
    "lists": (arrays_of_objects([1], [2, 3]), False),
    "packs": (arrays_of_objects(PACK, PACK), True),
    "packs of arrays": (arrays_of_objects({key: np.array(value) for key, value in PACK.items()}), True),
    "packs with more": (arrays_of_objects({**PACK, "source": "web"}), True),
}


@pytest.mark.parametrize("content", ARRAYS)
def test_only_a_npy_of_packs_is_one(tmp_path: Path, content: str) -> None:
    array, ours = ARRAYS[content]
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    before = (tmp_path / "x.npy").read_bytes()
    if ours:
        write_packs(tmp_path / "x.npy", "npy", overwrite=True)
        assert (tmp_path / "x.npy").read_bytes() != before
        return
    with pytest.raises(FormatError, match=r"x\.npy: expected a pickled \.npy of packs, found a file of"):
        write_packs(tmp_path / "x.npy", "npy", overwrite=True)
    assert (tmp_path / "x.npy").read_bytes() == before


@pytest.mark.parametrize("name", FOREIGN)
def test_no_recognizer_falls_over_what_a_stranger_wrote(tmp_path: Path, name: str) -> None:
    kind: Kind = registry._module(name).Writer.kind
    generator = np.random.default_rng(0)
    write_packs(tmp_path / "x", name)
    wholes = [path for path in [tmp_path / "x", *(tmp_path / "x").rglob("*")] if path.is_file()]
    assert all(kind.recognize(str(path)) for path in wholes)
    os.mkfifo(tmp_path / "pipe")
    assert not kind.recognize(str(tmp_path / "pipe"))
    assert not kind.recognize(str(tmp_path / "nothing"))
    for path in wholes:
        raw = path.read_bytes()
        for _ in range(60):
            damaged = bytearray(raw[: generator.integers(len(raw) + 1)])
            for at in generator.integers(max(len(damaged), 1), size=min(len(damaged), 4)):
                damaged[at] = generator.integers(256)
            path.write_bytes(damaged)
            kind.recognize(str(path))  # yes or no, and no error
        path.write_bytes(raw)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_conversion_does_not_leave_its_folder(
    tmp_path: Path, name: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home" / "sub").mkdir(parents=True)
    (tmp_path / "home" / "notes.txt").write_text("mine")
    os.mkfifo(tmp_path / "home" / "pipe")
    (tmp_path / "home" / "link").symlink_to(tmp_path / "home" / "notes.txt")
    write_samples(tmp_path / "x", demo_samples())
    monkeypatch.chdir(tmp_path / "home" / "sub")
    before = bytes_below(tmp_path)
    for target in ("", ".", "..", "../sub", "../", "../notes.txt", "../pipe", "../link", "../../x.bin", "/"):
        with pytest.raises(FormatError):
            convert(str(tmp_path / "x"), target, name, ConvertOptions(overwrite=overwrite, lossy=True))
        assert bytes_below(tmp_path) == before


def test_a_folder_of_folders_is_not_one_of_them(tmp_path: Path) -> None:
    for name in FOLDERS:
        write_packs(tmp_path / name / "a", name)
        write_packs(tmp_path / name / "b", name)
        for entry in (tmp_path / name).glob("source-*"):
            entry.unlink()
        before = bytes_below(tmp_path / name)
        with pytest.raises(
            FormatError,
            match=f"{name}: contains a, a folder, which does not belong to a (folder of|Hugging Face dataset)",
        ):
            write_packs(tmp_path / name, name, overwrite=True)
        assert bytes_below(tmp_path / name) == before


@pytest.mark.parametrize("name", FOREIGN)
def test_what_appears_meanwhile_stays_and_nothing_else_does(tmp_path: Path, name: str) -> None:
    (tmp_path / "d").mkdir()
    writer = registry.create(str(tmp_path / "d" / "x"), name, spec_of([]), lossy=True)
    write_packs(tmp_path / "other", name)
    os.rename(tmp_path / "other", tmp_path / "d" / "x")
    before = bytes_below(tmp_path / "d" / "x") or (tmp_path / "d" / "x").read_bytes()
    with pytest.raises(FormatError, match="x: "):
        writer.finalize()
    assert (bytes_below(tmp_path / "d" / "x") or (tmp_path / "d" / "x").read_bytes()) == before
    assert os.listdir(tmp_path / "d") == ["x"]


# ---- pages and summaries ----


def page(shard: Path, path: Path, *more: Any) -> Any:
    return command("inspect", shard, "--html", path, *more)


def summary(shard: Path, path: Path, *more: Any) -> Any:
    prefix = path.parent / "packed"
    for file in path.parent.glob("packed.*"):
        file.unlink()
    return command("pack", shard, "--output-prefix", prefix, "--seq-length", 64, "--summary", path, *more)


WRITERS: dict[str, Callable[..., Any]] = {"page": page, "summary": summary}


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["", "overwrite"])
@pytest.mark.parametrize("what", WRITERS)
def test_pages_and_summaries_replace_only_their_kind(tmp_path: Path, what: str, overwrite: tuple[str, ...]) -> None:
    shard, folder = tmp_path / "in" / "x", tmp_path / "out"
    write_samples(shard, demo_samples())
    folder.mkdir()
    write = WRITERS[what]
    (folder / ".new.tmp").write_text("mine")  # the name under which pages were first written
    for number in range(2):
        again = write(shard, folder / "new", *overwrite)
        # A summary of the same shard is replaced.
        is_refused = bool(number) and not overwrite and what == "page"
        assert (again.code, "--overwrite" in again.err) == (int(is_refused), is_refused)
    other = WRITERS[next(name for name in WRITERS if name != what)]
    assert other(shard, folder / "other").code == 0
    (folder / "notes").write_text("<!doctype html>\n{}")
    (folder / "link").symlink_to("new")
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    for suffix in (".bin", ".loss.bin", ".idx", ".seq.bin", ".seq.idx"):
        os.link(f"{shard}{suffix}", folder / f"hard{suffix}")
    before, input_before = bytes_below(folder), bytes_below(shard.parent)
    names = [
        entry for entry in os.listdir(folder) if entry not in ("new", "pipe", ".new.tmp") and "packed" not in entry
    ]
    for target in [*(folder / name for name in names), folder / "pipe", *shard.parent.iterdir()]:
        refused = write(shard, target, *overwrite)
        assert refused.code in (1, 2), target
        assert str(target) in refused.err
        kept = {path: raw for path, raw in bytes_below(folder).items() if "packed" not in path}
        assert kept == {path: raw for path, raw in before.items() if "packed" not in path}
        assert {path: raw for path, raw in bytes_below(shard.parent).items() if "packed" not in path} == input_before
    assert (folder / ".new.tmp").read_text() == "mine"


def test_a_summary_says_what_it_is(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    assert summary(tmp_path / "x", tmp_path / "s.json").code == 0
    said = json.loads((tmp_path / "s.json").read_text())
    assert next(iter(said.items())) == ("written_by", "megatron-sft-idx")
    assert said["packing"]["packs"]


def test_a_summary_is_replaced_by_the_run_that_goes_on(tmp_path: Path) -> None:
    chats, prefix, path = tmp_path / "chats.jsonl", tmp_path / "x", tmp_path / "s.json"
    turn = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It."}]
    chats.write_text(json.dumps({"messages": turn}) + "\n")
    arguments = ["--input", chats, "--tokenizer-model", TOKENIZER, "--seq-length", 64, "--workers", 0]
    run = ["preprocess", *arguments, "--output-prefix", prefix, "--summary"]
    for refused in (chats, TOKENIZER / "tokenizer.json"):
        before = refused.read_bytes()
        for more in ((), ("--overwrite",)):
            assert command(*run, refused, *more).code == 1
            assert (refused.read_bytes(), sorted(entry.name for entry in tmp_path.iterdir())) == (
                before,
                ["chats.jsonl"],
            )
    assert command(*run, path).code == 0
    first = path.read_bytes()
    assert command(*run, path).code == 0
    assert json.loads(path.read_bytes())["packing"] == json.loads(first)["packing"]
    path.write_text("mine")
    assert command(*run, path).code == 1
    assert path.read_text() == "mine"


# ---- documents, markers, plans ----

STATE = ProducerState(Limits(1024, 64), 7, "running", None, 12, 3, {}, {})
ACK = Ack("run", 0, Deal(1), 0, 2, 3)
DOCUMENTS: dict[str, Callable[[Path], None]] = {
    "_producer.json": lambda folder: Catalog(folder).write_producer(STATE),
    "_END.json": lambda folder: Catalog(folder).write_end(4),
    "run/rank-00000.json": lambda folder: write_ack(str(folder), ACK),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_replaces_only_its_kind(tmp_path: Path, name: str) -> None:
    path, write = tmp_path / name, DOCUMENTS[name]
    write(tmp_path)
    first = path.read_bytes()
    write(tmp_path)
    assert path.read_bytes() == first
    for stranger in (b"notes", b'{"version":1}', b'{"version":2,"shards":4}', b"[]", b'{"name": "site", "version": 1}'):
        path.write_bytes(stranger)
        with pytest.raises(
            FormatError, match=f"{path}: expected .*, found a file of {len(stranger)} bytes that begins with"
        ):
            write(tmp_path)
        assert path.read_bytes() == stranger
    path.unlink()
    (tmp_path / "mine").write_bytes(first)
    path.symlink_to(tmp_path / "mine")
    with pytest.raises(FormatError, match="found a symbolic link"):
        write(tmp_path)
    assert (path.is_symlink(), (tmp_path / "mine").read_bytes()) == (True, first)
    assert not [entry for entry in path.parent.iterdir() if ".tmp" in entry.name]


def test_a_mark_is_never_made_through_a_link(tmp_path: Path) -> None:
    write_packs(tmp_path / "chunks", "jsonl-chunks")
    write_ack(str(tmp_path / "acks"), ACK)
    (tmp_path / "chunks" / "chunk_00000.jsonl.completed").symlink_to(tmp_path / "elsewhere")
    LiveChunks(str(tmp_path / "chunks"), Limits(64, 8), acks=str(tmp_path / "acks")).committed()
    assert not (tmp_path / "elsewhere").exists()


def test_a_plan_is_put_over_nothing(tmp_path: Path) -> None:
    plan = PlacedPlan.of(0, 0, 0, False)
    path = Path(plan_path(str(tmp_path), "key"))

    def make() -> PlacedPlan:
        path.write_text("mine")  # meanwhile
        return plan

    with pytest.raises(FormatError, match="not a packing plan"):
        load_or_make(str(tmp_path), "key", make)
    assert path.read_text() == "mine"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert load_or_make(str(tmp_path), "key", lambda: plan) is plan
    assert not (tmp_path / "elsewhere").exists()
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, f"{path.name}.lock"}
