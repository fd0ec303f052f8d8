"""``preprocess`` with images and audio: files, tables and programs give equal shards; and runs after changed files."""

from __future__ import annotations

import base64
import functools
import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import Outcome, command
from media_processors import PROCESSORS, png, wav
from PIL import Image

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.tokenize import preprocess

SIZES = [(28, 42), (64, 64), (100, 30), (17, 90)]
NAMES = [f"pictures/{width}.png" for width, _ in SIZES]


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processor")
    PROCESSORS["idefics3"](folder)
    return folder


def write_images(folder: Path) -> list[bytes]:
    """Write images with the names ``NAMES`` to a folder."""
    (folder / "pictures").mkdir(parents=True)
    files = [png(*size, seed) for seed, size in enumerate(SIZES)]
    for name, data in zip(NAMES, files, strict=True):
        (folder / name).write_bytes(data)
    return files


def chats(files: list[Any], count: int = 40) -> list[dict[str, Any]]:
    """Return rows with two images, one or none, taken from the files."""
    rows = []
    for number in range(count):
        shown = [files[(number + each) % len(files)] for each in range(number % 3)]
        question = "<image>" * len(shown) + f"what is {number}?"
        rows.append({"prompt": question, "completion": f"the cat {number}", "images": shown})
    return rows


PLAIN = [{"prompt": "what is here?", "completion": "the cat"}]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(rows: Any, prefix: Path, processor: Path, **options: Any) -> Shard:
    chosen = {"seq_length": 2048, "workers": 0, "source": False, **options}
    preprocess(rows, tokenizer=processor, processor=processor, output_prefix=prefix, **chosen)
    return Shard(str(prefix))


def files_at(prefix: Path) -> dict[str, bytes]:
    return {path.name.removeprefix(prefix.name): path.read_bytes() for path in prefix.parent.glob(f"{prefix.name}.*")}


def shown_by(shard: Shard) -> list[bytes]:
    return [bytes(item.data) for pack in shard for item in pack["media"]]


def test_paths_structs_tables_and_programs_make_the_same_packs(tmp_path: Path, processor: Path) -> None:
    """Everything is byte for byte equal, except for the input in the header and the column of sources."""
    files = write_images(tmp_path / "in")
    rows = [{**row, "images": [{"bytes": data, "path": "a.png"} for data in row["images"]]} for row in chats(files)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "in" / "rows.parquet")
    uris = [
        {**row, "images": ["data:image/png;base64," + base64.b64encode(each).decode() for each in row["images"]]}
        for row in chats(files)
    ]
    inputs = {
        "paths": write(tmp_path / "in" / "rows.jsonl", chats(NAMES)),
        "URIs": write(tmp_path / "in" / "uris.jsonl", uris),
        "parquet": tmp_path / "in" / "rows.parquet",
        "table": table,
        "rows with bytes": chats(files),
        "rows with structs": rows,
        "a generator": (row for row in rows),
    }
    made = {}
    for name, given in inputs.items():
        folder = tmp_path / name
        folder.mkdir()
        shard = run(given, folder / "out", processor)
        made[name] = {suffix: data for suffix, data in files_at(folder / "out").items() if suffix != ".seq.idx"}
        # The id of the shard, which depends only on data and is in both headers.
        made[name]["id"] = shard.header.shard_id
    assert set(shown_by(shard)) == set(files)
    assert made.pop("paths")["id"] == made["URIs"]["id"]
    expected = made.pop("URIs")
    for name, found in made.items():
        assert found == expected, name


def test_images_of_pillow_and_of_datasets_are_read(tmp_path: Path, processor: Path) -> None:
    datasets = pytest.importorskip("datasets")
    files = write_images(tmp_path / "in")
    pictures = [Image.open(io.BytesIO(data)) for data in files]
    shard = run(chats(pictures), tmp_path / "pillow", processor)
    expected = [Image.open(io.BytesIO(data)).tobytes() for data in shown_by(shard)]
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "completion": datasets.Value("string"),
            "images": datasets.Sequence(datasets.Image()),
        }
    )
    rows = [{**row, "images": [{"bytes": data, "path": None} for data in row["images"]]} for row in chats(files)]
    dataset = datasets.Dataset.from_list(rows, features=features)
    other = run(dataset, tmp_path / "datasets", processor)
    assert [Image.open(io.BytesIO(data)).tobytes() for data in shown_by(other)] == expected
    assert set(shown_by(other)) == set(files)  # these are exactly the files
    for name in (".bin", ".loss.bin", ".seq.bin"):
        assert files_at(tmp_path / "pillow")[name] == files_at(tmp_path / "datasets")[name]


def test_audio_of_all_forms_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "processor"
    PROCESSORS["qwen2-audio"](folder)
    files = [wav(3000 + 999 * seed, seed=seed, form=form) for seed, form in enumerate(("WAV", "FLAC", "OGG", "MP3"))]
    (tmp_path / "sounds").mkdir()
    rows = []
    for number, data in enumerate(files):
        name = f"sounds/{number}.bin"
        (tmp_path / name).write_bytes(data)
        rows.append(
            {
                "messages": [{"role": "user", "content": "<audio>say"}, {"role": "assistant", "content": "hi"}],
                "audios": [name],
            }
        )
    shard = run(write(tmp_path / "rows.jsonl", rows), tmp_path / "out", folder)
    assert sorted(shown_by(shard)) == sorted(files)
    assert {item.kind for pack in shard for item in pack["media"]} == {"audio"}


# ---- where files are ----


def cli(tmp_path: Path, processor: Path, source: Path, *more: object) -> Outcome:
    return command(
        "preprocess", "--input", source, "--tokenizer", processor, "--processor", processor, "--seq-length", 2048,
        "--output-prefix", tmp_path / "out", "--workers", 0, *more,
    )  # fmt: skip


def test_paths_begin_at_the_input_or_at_the_root_and_do_not_leave_it(tmp_path: Path, processor: Path) -> None:
    write_images(tmp_path / "in")
    write_images(tmp_path / "elsewhere" / "deep")
    beside = write(tmp_path / "in" / "rows.jsonl", chats(NAMES))
    other = write(tmp_path / "rows.jsonl", chats([f"deep/{name}" for name in NAMES]))
    outside = write(tmp_path / "outside.jsonl", chats([f"../in/{name}" for name in NAMES]))
    whole = write(tmp_path / "whole.jsonl", chats([str(tmp_path / "in" / name) for name in NAMES]))
    root = ("--media-root", tmp_path / "elsewhere")
    for source, given, code, said in (
        (beside, (), 0, ""),
        (other, (), 1, "pass --media-root FOLDER, the folder of the files"),
        (other, root, 0, ""),
        (outside, root, 1, "is outside"),
        (whole, (), 0, ""),
        (whole, root, 1, "is outside"),
        (beside, ("--media-root", tmp_path / "missing"), 2, "folder not found"),
    ):
        outcome = cli(tmp_path, processor, source, *given, "--overwrite")
        assert outcome.code == code, outcome
        assert said in outcome.err


def test_a_link_out_of_the_root_is_refused(tmp_path: Path, processor: Path) -> None:
    write_images(tmp_path / "secret")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "pictures").symlink_to(tmp_path / "secret" / "pictures")
    outcome = cli(tmp_path, processor, write(tmp_path / "in" / "rows.jsonl", chats(NAMES)))
    assert outcome.code == 1
    assert "is outside" in outcome.err


def test_options_of_media_go_with_a_processor(tmp_path: Path, processor: Path) -> None:
    source = write(tmp_path / "rows.jsonl", PLAIN)
    outcome = command(
        "preprocess", "--input", source, "--tokenizer", processor, "--seq-length", 2048, "--output-prefix",
        tmp_path / "out", "--media-root", tmp_path,
    )  # fmt: skip
    assert outcome.code == 2
    assert "--media-root needs --processor" in outcome.err
    outcome = command(
        "preprocess", "--input", source, "--tokenizer", processor, "--seq-length", 2048, "--output-prefix",
        tmp_path / "out", "--processor", tmp_path,
    )  # fmt: skip
    assert outcome.code == 1
    assert "transformers cannot load a processor from it" in outcome.err


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "in"))
    handler.func.log_message = lambda *_: None  # type: ignore[attr-defined]
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_urls_are_read_with_download_alone(tmp_path: Path, processor: Path, server: str) -> None:
    files = write_images(tmp_path / "in")
    source = write(tmp_path / "rows.jsonl", chats([f"{server}/{name}" for name in NAMES]))
    outcome = cli(tmp_path, processor, source)
    assert outcome.code == 1
    assert "pass --download" in outcome.err
    outcome = cli(tmp_path, processor, source, "--download")
    assert outcome.code == 0, outcome
    assert set(shown_by(Shard(str(tmp_path / "out")))) == set(files)
    for path in (tmp_path / "in" / "pictures").iterdir():
        path.unlink()  # checking that the job is done downloads nothing
    assert cli(tmp_path, processor, source, "--download").code == 0
    missing = write(tmp_path / "rows.jsonl", chats([f"{server}/missing.png"]))
    outcome = cli(tmp_path, processor, missing, "--download", "--overwrite")
    assert outcome.code == 1
    assert "cannot be downloaded: HTTP Error 404" in outcome.err


# ---- again ----


def test_the_same_job_is_found_and_a_changed_file_is_noticed(tmp_path: Path, processor: Path) -> None:
    write_images(tmp_path / "in")
    source = write(tmp_path / "in" / "rows.jsonl", chats(NAMES))
    assert cli(tmp_path, processor, source).code == 0
    before = files_at(tmp_path / "out")
    again = cli(tmp_path, processor, source)
    assert (again.code, files_at(tmp_path / "out")) == (0, before)
    # An image of the same size, so that no token changes.
    width, height = SIZES[0]
    (tmp_path / "in" / NAMES[0]).write_bytes(png(width, height, 99))
    changed = cli(tmp_path, processor, source)
    assert changed.code == 1
    assert "the content of the input was" in changed.err
    assert files_at(tmp_path / "out") == before
    assert cli(tmp_path, processor, source, "--overwrite").code == 0
    after = files_at(tmp_path / "out")
    assert after[".bin"] == before[".bin"]
    assert after[".media.data"] != before[".media.data"]


@pytest.mark.parametrize("max_rows", [None, 31])
def test_parts_of_an_interrupted_job_are_used_if_their_files_are_the_same(
    tmp_path: Path, processor: Path, monkeypatch: pytest.MonkeyPatch, max_rows: int | None
) -> None:
    """The job is stopped when all its parts exist."""
    from megatron_sft_idx.tokenize import pipeline

    write_images(tmp_path / "in")
    source = write(tmp_path / "in" / "rows.jsonl", chats(NAMES))
    whole = run(source, tmp_path / "whole", processor, max_rows=max_rows)
    for changes in (False, True):
        prefix = tmp_path / f"out{changes}"
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "_to_pack", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(source, prefix, processor, max_rows=max_rows)
        if changes:
            width, height = SIZES[1]
            (tmp_path / "in" / NAMES[1]).write_bytes(png(width, height, 99))
            whole = run(source, tmp_path / "whole", processor, max_rows=max_rows, overwrite=True)
        lines: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr("megatron_sft_idx.tokenize.job.log_line", lines.append)
            resumed = run(source, prefix, processor, max_rows=max_rows)
        assert any(re.search("parts? reused", line) for line in lines) is not changes
        assert resumed.header.shard_id == whole.header.shard_id
        found, expected = files_at(prefix), files_at(tmp_path / "whole")
        assert found == expected


def test_a_bad_file_is_a_bad_row_that_can_be_skipped(tmp_path: Path, processor: Path) -> None:
    write_images(tmp_path / "in")
    source = write(tmp_path / "in" / "rows.jsonl", chats(NAMES))
    (tmp_path / "in" / NAMES[0]).write_bytes(b"torn")
    assert cli(tmp_path, processor, source).code == 1
    outcome = cli(tmp_path, processor, source, "--on-bad-row", "skip")
    assert outcome.code == 0
    bad = sum(NAMES[0] in row["images"] for row in chats(NAMES))
    assert Shard(str(tmp_path / "out")).header.metadata["sources"]["skipped"] == bad > 0


def test_workers_make_the_same_bytes(tmp_path: Path, processor: Path) -> None:
    write_images(tmp_path / "in")
    source = write(tmp_path / "in" / "rows.jsonl", chats(NAMES, 400))
    made = {}
    for workers in (0, 2):
        prefix = tmp_path / f"out{workers}"
        chosen = {"seq_length": 2048, "workers": workers, "output_shards": 2}
        preprocess(source, tokenizer=processor, processor=processor, output_prefix=prefix, **chosen)
        made[workers] = [files_at(tmp_path / f"out{workers}-0000{number}-of-00002") for number in range(2)]
    assert made[0] == made[2]


def test_truncated_images_and_rows_of_several_kinds(tmp_path: Path, processor: Path) -> None:
    """Only sequences with an image at the cut are dropped and counted."""
    files = write_images(tmp_path / "in")
    source = write(tmp_path / "in" / "rows.jsonl", chats(NAMES))
    whole = run(source, tmp_path / "whole", processor, packing="none")
    lengths = [len(pack["input_ids"]) for pack in whole]
    limit = int(np.median(lengths))
    kept = [pack for pack in whole if all(not item.start < limit < item.start + item.length for item in pack["media"])]
    cut = run(source, tmp_path / "cut", processor, packing="none", seq_length=limit, overlong="truncate")
    assert [len(pack["input_ids"]) for pack in cut] == [min(len(pack["input_ids"]), limit) for pack in kept]
    assert len(kept) < len(whole)
    assert set(shown_by(cut)) <= set(files)


def test_a_processor_that_a_program_gives_wrongly_is_refused(tmp_path: Path, processor: Path) -> None:
    with pytest.raises(FormatError, match="expected a path"):
        run([], tmp_path / "out", processor=3)  # type: ignore[arg-type]
    with pytest.raises(SFTIndexError):
        run(PLAIN, tmp_path / "out", tmp_path)
