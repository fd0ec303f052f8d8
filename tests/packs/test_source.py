"""The column ``source``: every sequence has the file and the row that it was made from."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from chats import CHATS, TOKENIZER, command, files_of, preprocess, write_rows
from columned import unchecked
from sample_packs import demo_samples, write_samples

from megatron_sft_idx.chat.inputs import JsonPiece
from megatron_sft_idx.chat.template import MaskOptions
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard import Shard, write_column
from megatron_sft_idx.tokenize import cut
from megatron_sft_idx.tokenize.cut import Cutting
from megatron_sft_idx.tokenize.encoding import EncodingOptions, RowEncoder

CAPACITY = 256
ROW = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
BAD = {"messages": [{"role": "user", "content": "nobody answers"}]}


@pytest.fixture(autouse=True, scope="module")
def _small_parts():
    """Divide files of some kilobytes into many parts, like large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "PIECE_NBYTES", 3000)
        patch.setattr(Cutting, "of", classmethod(lambda cls, files: cls(3000, 2)))
        yield


@pytest.fixture(scope="module")
def encoder():
    return RowEncoder(EncodingOptions(str(TOKENIZER), masks=MaskOptions(earlier_reasoning="drop"), on_bad_row="skip"))


@pytest.mark.parametrize("given", [{"x": object()}, {1: 2}, {"x": "\ud800"}])
def test_variables_that_no_json_holds_are_refused(given):
    with pytest.raises(FormatError, match="chat_template_kwargs: cannot be written as JSON"):
        RowEncoder(EncodingOptions(str(TOKENIZER), template_kwargs=given))


def inputs(folder: Path) -> list[Path]:
    """Write the bundled chats to files of all kinds, with additional rows that give no sequence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    made = [folder / name for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.parquet", "e.jsonl", "last.jsonl")]
    made[0].write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(["", *lines[::2], json.dumps(BAD), lines[1], ""]).encode())
    made[1].write_bytes(gzip.compress("\n".join([lines[3], "", "  ", *lines[1::2]]).encode()))
    made[2].write_text(json.dumps([*rows[:9], BAD, *rows[9:20]]), encoding="utf-8")
    pq.write_table(pa.table({"messages": [json.dumps(row["messages"]) for row in rows[:30]]}), made[3])
    tokens = [{"input_ids": [5, 6, 7 + i], "loss_mask": [0, 1, 1]} for i in range(300)]
    made[4].write_text("\n\n".join(map(json.dumps, tokens)))
    made[5].write_text(lines[0])
    return made


def rows_of(path: Path) -> dict[int, bytes]:
    """Return the rows of a file by number; for JSON lines, the number of the line."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return {i: json.dumps({"messages": json.loads(row["messages"])}).encode()
                for i, row in enumerate(pq.read_table(path).to_pylist())}  # fmt: skip
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if path.suffix == ".json":
        return dict(enumerate(json.dumps(row).encode() for row in json.loads(raw)))
    return dict(enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n")))


def expected(paths, encoder: RowEncoder) -> Counter[tuple[int, int, bytes]]:
    """Return file, row and ids of all sequences. Each row is encoded by itself, and long ones are split."""
    found: Counter[tuple[int, int, bytes]] = Counter()
    for file, path in enumerate(paths):
        for number, raw in rows_of(path).items():
            done = encoder.encode(JsonPiece("a row", 1, 0, raw, np.array([len(raw)]), is_array=False))
            for start, stop in pairwise([0, *np.cumsum(done.lengths).tolist()]):
                ids = done.input_ids[start:stop]
                found.update((file, number, ids[at : at + CAPACITY].tobytes()) for at in range(0, len(ids), CAPACITY))
    return found


def sources(prefix: Path) -> Counter[tuple[int, int, bytes]]:
    """Return file, row and ids of the sequences in a shard."""
    shard = Shard(prefix, columns=["source"])
    return Counter(
        (*place, ids.tobytes())
        for number in range(len(shard))
        for place, (ids, _) in zip(shard[number]["source"].tolist(), shard.sequences(number), strict=True)
    )


def built(prefix: Path, paths, *options: object) -> Path:
    done = preprocess(
        prefix,
        *("--source", "--input", *paths, "--overlong", "split", "--on-bad-row", "skip", *options),
        capacity=CAPACITY,
    )
    assert done.code == 0, done.err
    return prefix


def test_every_sequence_names_its_row(tmp_path, encoder):
    paths = inputs(tmp_path)
    whole = expected(paths, encoder)
    assert sources(built(tmp_path / "one", paths, "--keep-corpus")) == whole
    corpus = Shard(tmp_path / "one.unpacked", columns=["source"])
    places = [corpus[i]["source"][0].tolist() for i in range(len(corpus))]
    assert places == sorted(places)  # the corpus is in the order of the input
    assert len({(file, row) for file, row, _ in whole}) == len({(file, row) for file, row in map(tuple, places)})
    column = corpus.columns["source"]
    assert [file["name"] for file in column.spec.metadata["files"]] == [path.name for path in paths]
    assert str(tmp_path).encode() not in b"".join(files_of(tmp_path / "one").values())

    # The same bytes for any workers and in every run.
    for number, options in enumerate((["--workers", 2, "--output-shards", 1], [])):
        assert files_of(built(tmp_path / f"again{number}", paths, *options)) == files_of(tmp_path / "one")
    shards = tmp_path / "three"
    built(shards, paths, "--output-shards", 3, "--workers", 2)
    assert sum((sources(Path(f"{shards}-{n:05d}-of-00003")) for n in range(3)), Counter()) == whole


def test_what_was_tokenised_before_an_interruption_keeps_its_rows(tmp_path, encoder):
    paths = inputs(tmp_path)
    built(tmp_path / "one", paths)
    late = paths[-1].read_bytes()
    paths[-1].write_text("{")  # the last row stops the run after all others became parts
    stopped = preprocess(tmp_path / "x", "--source", "--input", *paths, "--overlong", "split", "--on-bad-row", "error")
    assert stopped.code == 1
    paths[-1].write_bytes(late)
    assert not (tmp_path / "x.seq.idx").exists()
    assert files_of(built(tmp_path / "x", paths, "--overwrite")) == files_of(tmp_path / "one")


def test_a_shard_without(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [json.loads(line) for line in CHATS.open(encoding="utf-8")])
    plain = built(tmp_path / "plain", [rows], "--no-source")
    assert not list(Shard(plain).columns)
    assert not Path(f"{plain}.source.col").exists()
    named = built(tmp_path / "named", [rows])
    assert all(files_of(named)[end] == raw for end, raw in files_of(plain).items() if end != ".seq.idx")
    other = preprocess(plain, "--source", "--input", rows, "--overlong", "split", "--on-bad-row", "skip", capacity=256)
    assert other.code == 1
    assert "source was None, is True" in other.err


# ---- inspect ----


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    """Provide a shard of two files with rows repeated in one and in both, and long rows that are cut."""
    folder = tmp_path_factory.mktemp("inspect")
    rows = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    some = [write_rows(folder / "a.jsonl", [*rows[:40], *rows[:7]]), write_rows(folder / "b.jsonl", rows[35:90])]
    return built(folder / "x", some)


def test_counts_by_file(repeated):
    found = {file["name"]: file for file in json.loads(command("inspect", repeated, "--json").out)["sources"]}
    shard = Shard(repeated, columns=["source"])
    each = [
        (file, row, ids.tobytes(), len(ids), int(np.count_nonzero(mask)))
        for number in range(len(shard))
        for (file, row), (ids, mask) in zip(shard[number]["source"].tolist(), shard.sequences(number), strict=True)
    ]
    kinds = [{ids for file, _, ids, _, _ in each if file == which} for which in (0, 1)]
    for which, name in enumerate(("a.jsonl", "b.jsonl")):
        mine = [one for one in each if one[0] == which]
        tokens = sum(length for *_, length, _ in mine)
        assert found[name] == {
            "name": name,
            "rows": len({row for _, row, *_ in mine}),
            "sequences": len(mine),
            "tokens": tokens,
            "trained": sum(trained for *_, trained in mine) / tokens,
            "cut": sum(length == CAPACITY for *_, length, _ in mine),
            "copies": len(mine) - len(kinds[which]),
            "elsewhere": len(kinds[0] & kinds[1]),
        }
    assert found["a.jsonl"]["copies"] >= 7 <= found["a.jsonl"]["cut"]
    assert found["b.jsonl"]["elsewhere"] >= 5
    out = command("inspect", repeated).out
    assert "\n2 input files\n" in out
    (line,) = (line for line in out.splitlines() if line.endswith("  a.jsonl"))
    assert line.startswith(f"{47:>10}")
    assert ", 2 times, a.jsonl:" in out


def test_places_by_name(repeated):
    shard = Shard(repeated, columns=["source"])
    for number in range(0, len(shard), 7):
        rules = [line for line in command("inspect", repeated, "--pack", number).out.splitlines() if "── seq" in line]
        named = [f"{'ab'[file]}.jsonl:{row + 1}" for file, row in shard[number]["source"].tolist()]
        assert [line.split(")")[0] for line in rules] == [f"── sequence {i} ({name}" for i, name in enumerate(named)]
        shown = json.loads(command("inspect", repeated, "--pack", number, "--json").out)["sequences"]
        assert [one["source"] for one in shown] == named
        for place, name in enumerate(named):
            assert f"{name}: pack {number}, sequence {place}\n" in command("inspect", repeated, "--row", name).out
        if number % 3 == 0:
            text = command("inspect", repeated, "--pack", number, "--tokenizer", TOKENIZER).out.removesuffix("\n")
            for place, (name, shown_text) in enumerate(zip(named, text.split("── sequence ")[1:], strict=True)):
                row = ("inspect", repeated, "--row", name, "--tokenizer", TOKENIZER)
                said = command(*row).out
                assert f"\n{name}: pack {number}, sequence {place}\n── sequence {shown_text}" in f"\n{said}"
                assert said.count("── sequence ") == said.count(f"{name}: pack ")
                assert all(one["text"] for one in json.loads(command(*row, "--json").out)["sequences"])
    found = command("inspect", repeated, "--tokenizer", TOKENIZER, "--find", "user", "--limit", 1, "--json")
    (match,) = json.loads(found.out)["matches"]
    file, row = shard[match["pack"]]["source"][match["sequence"]].tolist()
    assert match["source"] == f"{'ab'[file]}.jsonl:{row + 1}"


@pytest.mark.parametrize(
    "place", ["c.jsonl:1", "a.jsonl", "a.jsonl:0", "a.jsonl:x", ":", "a.jsonl:-1", "a.jsonl:" + "9" * 5000]
)
def test_a_place_that_is_none(repeated, place):
    said = command("inspect", repeated, "--row", place)
    expected = (
        "a file and a line of it, such as a.jsonl:1",
        "no input file matches c.jsonl; the input files are a.jsonl, b.jsonl",
    )
    assert (said.code, expected[place == "c.jsonl:1"] in said.err) == (1, True), said


def test_a_row_that_became_nothing(repeated, tmp_path):
    said = command("inspect", repeated, "--row", "a.jsonl:900")
    assert (said.code, said.out) == (
        1, f"{repeated}: no sequence was made from a.jsonl:900; the last row of this file in this shard is 47\n"
    )  # fmt: skip
    rows = write_rows(tmp_path / "c.jsonl", [{"prompt": "Hi", "completion": "Ho"}, {"bad": 1}] * 2)
    assert preprocess(tmp_path / "c", "--input", rows, "--on-bad-row", "skip").code == 0
    said = command("inspect", tmp_path / "c", "--row", "c.jsonl:2")
    assert "c.jsonl:2; the row was skipped as a bad row, left out by an option, or is in another" in said.out
    found = json.loads(command("inspect", repeated, "--row", "a.jsonl:900", "--json").out)
    assert (found["sequences"], found["stopped_at_limit"]) == ([], False)


def test_a_row_of_more_sequences_than_the_limit_says_so(tmp_path):
    write_samples(tmp_path / "x", demo_samples(), capacity=4096)
    number = Shard(tmp_path / "x").header.num_sequences
    values, files = np.zeros((number, 2), np.uint32), {"files": [{"name": "a"}]}
    write_column(tmp_path / "x", "source", values, per="sequence", metadata=files)
    row = ("inspect", tmp_path / "x", "--row", "a:1", "--limit")
    assert command(*row, number - 1).out.endswith(
        f"\nstopped after {number - 1} sequences; raise --limit to see more\n"
    )
    assert "stopped" not in command(*row, number).out
    assert json.loads(command(*row, 1, "--json").out)["stopped_at_limit"]


def test_a_column_that_names_no_files_or_very_many(tmp_path):
    write_samples(tmp_path / "x", demo_samples(), capacity=4096)
    values = np.zeros((Shard(tmp_path / "x").header.num_sequences, 2), np.uint32)
    many = [{"name": f"{number}{'n' * 150}"} for number in range(10_000)]
    for files in ([], many):
        with unchecked():
            write_column(tmp_path / "x", "source", values, per="sequence", metadata={"files": files}, overwrite=True)
        shown = command("inspect", tmp_path / "x", "--html", tmp_path / "page.html", "--overwrite")
        assert (shown.code, shown.err) == (0, "")
        assert (" --row " in (tmp_path / "page.html").read_text(encoding="utf-8")) == bool(files)
        said = command("inspect", tmp_path / "x", "--row", "a.jsonl:1")
        assert (said.code, "names no input files" in said.err) == (1, not files)


def test_a_column_of_that_name_that_is_another(tmp_path):
    write_samples(tmp_path / "x", demo_samples(), capacity=4096)
    number = Shard(tmp_path / "x").header.num_sequences
    none = command("inspect", tmp_path / "x", "--row", "a.jsonl:1")
    assert "has no column source" in none.err
    for values, metadata in (
        (np.zeros((number, 2), np.uint32), {"files": [{"name": 5}, "a", {}, None]}),
        (np.full((number, 2), 2**32 - 1, np.uint32), {"files": "abc"}),
        (np.zeros(number, np.float32), {}),
    ):
        with unchecked():
            write_column(tmp_path / "x", "source", values, per="sequence", metadata=metadata, overwrite=True)
        for options in ([], ["--json"], ["--pack", 0], ["--html", tmp_path / "page.html", "--overwrite"]):
            assert command("inspect", tmp_path / "x", *options).code == 0, options


def test_the_page_names_places(repeated, tmp_path):
    assert command("inspect", repeated, "--html", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    first = Shard(repeated, columns=["source"])[0]["source"][0].tolist()
    place = f"{'ab'[first[0]]}.jsonl:{first[1] + 1}"
    assert f', from <span class="source">{place}</span></h3>' in page
    assert f" --row {place}</code>" in page


# ---- weights ----


def weighted(folder: Path, *options: object):
    rows = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    for name, some in (("a.jsonl", rows[:40]), ("b.jsonl", rows[40:70]), ("c.jsonl", rows[70:90])):
        write_rows(folder / name, some)
    paths = [folder / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    return preprocess(folder / "x", "--source", "--input", *paths, *options)


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_of_files(tmp_path, workers):
    (tmp_path / "plain").mkdir()
    assert weighted(tmp_path / "plain").code == 0
    options = ("--loss-weight", "a.jsonl=0.25", f"{tmp_path / 'c.jsonl'}=0", "--workers", workers)
    assert weighted(tmp_path, *options).code == 0
    assert weighted(tmp_path, *options).out.startswith("found ")
    plain, shard = Shard(tmp_path / "plain/x"), Shard(tmp_path / "x", columns=["source"])
    assert (plain.header.mask_dtype.name, shard.header.mask_dtype.name) == ("uint8", "float32")
    assert shard.header.metadata["options"]["loss_weights"] == [0.25, 1.0, 0.0]
    for number in range(len(shard)):
        for file, before, after in zip(
            shard[number]["source"][:, 0].tolist(), plain.sequences(number), shard.sequences(number), strict=True
        ):
            assert np.array_equal(before[0], after[0])
            assert np.array_equal(before[1] * np.float32([0.25, 1, 0][file]), after[1])
    other = weighted(tmp_path, "--loss-weight", "a.jsonl=0.5")
    assert (other.code, "loss weights was [0.25, 1.0, 0.0], is [0.5, 1.0, 1.0]" in other.err) == (1, True)


def test_weights_of_one_are_none(tmp_path):
    (tmp_path / "plain").mkdir()
    assert weighted(tmp_path / "plain").code == weighted(tmp_path, "--loss-weight", "b.jsonl=1.0").code == 0
    assert files_of(tmp_path / "x") == files_of(tmp_path / "plain/x")


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        (["d.jsonl=2"], 1, "no input file matches d.jsonl; the input files are a.jsonl, b.jsonl, c.jsonl"),
        (["a.jsonl=2", "./a.jsonl=2"], 1, "already has a weight"),
        (["a.jsonl=2", "a.jsonl=2"], 2, "a.jsonl is given twice"),
        (["a.jsonl"], 2, "expected FILE=WEIGHT"),
        (["a.jsonl=-1"], 1, "expected FILE=WEIGHT"),
        (["a.jsonl=nan"], 1, "expected FILE=WEIGHT"),
        (["a.jsonl=inf"], 1, "expected FILE=WEIGHT"),
        (["=2"], 2, "expected FILE=WEIGHT"),
    ],
)
def test_weights_that_are_none(tmp_path, given, code, message):
    said = weighted(tmp_path, "--loss-weight", *given)
    assert (said.code, message in said.err) == (code, True), said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_a_name_that_two_files_have_is_no_name(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "less").mkdir()
    some = [write_rows(tmp_path / folder / "a.jsonl", [ROW]) for folder in ("less", "more")]
    for option in ("--loss-weight", "--repeat"):
        said = preprocess(tmp_path / "x", "--input", *some, option, "a.jsonl=2")
        assert (said.code, "a.jsonl matches several files: less/a.jsonl, more/a.jsonl; use one" in said.err) == (
            1,
            True,
        ), said
    for number, name in enumerate((some[1], "more/a.jsonl", tmp_path / "more")):
        done = preprocess(tmp_path / f"x{number}", "--input", *some, "--loss-weight", f"{name}=2")
        assert done.code == 0, done
        assert Shard(tmp_path / f"x{number}").header.metadata["options"]["loss_weights"] == [1.0, 2.0]


# ---- sequences of some files ----


def test_some_sources_are_packed(tmp_path):
    assert weighted(tmp_path, "--keep-corpus").code == 0
    for source in ("x", "x.unpacked"):
        said = command(
            *("pack", tmp_path / source, "--where", "source != b.jsonl", "--seq-length", 2048, "--overlong", "split"),
            *("--output-prefix", tmp_path / "some", "--overwrite"),
        )
        assert said.code == 0, said
        assert "\nleft out        30 sequences left out by --where\n" in said.out
        wanted = Counter({place: count for place, count in sources(tmp_path / "x").items() if place[0] != 1})
        assert sources(tmp_path / "some") == wanted
        packing = Shard(tmp_path / "some").header.metadata["packing"]
        assert (packing["where"], packing["left_out"]) == (["source != b.jsonl"], 30)
    other = ("--where", "source==d.jsonl", "--seq-length", 2048, "--output-prefix", tmp_path / "none")
    refused = command("pack", tmp_path / "x", *other)
    assert (refused.code, "no input file matches d.jsonl; the input files are a.jsonl, b.jsonl" in refused.err) == (
        2,
        True,
    )
    refused = weighted(tmp_path, *other)
    assert (refused.code, "no input file matches d.jsonl" in refused.err) == (1, True), refused


@pytest.mark.parametrize("suffix", [".source.col", ".unpacked.source.col"])
def test_the_place_of_the_column_is_taken(tmp_path, suffix):
    for option in ("--summary", "--chat-template"):
        said = weighted(tmp_path, "--keep-corpus", option, tmp_path / f"x{suffix}")
        assert said.code in (1, 2), said
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert weighted(tmp_path, "--keep-corpus").code == 0
    said = command(
        *("pack", tmp_path / "x", "--seq-length", 2048, "--output-prefix", tmp_path / "y"),
        *("--summary", tmp_path / "y.source.col"),
    )
    assert (said.code, "used as both" in said.err) == (1, True), said
    assert not list(tmp_path.glob("y*"))
