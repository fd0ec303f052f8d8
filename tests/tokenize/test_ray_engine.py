"""``preprocess --engine ray`` gives the local engine's bytes, on a real cluster whose nodes may be killed."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import CHATS, MADE, ROOT, TOKENIZER, files_of, preprocess, remains, write_rows
from interrupted_runs import some_rows
from ray_clusters import cluster_of, killing, require_ray

from megatron_sft_idx.tokenize import cut

require_ray()

SHARDS = ("--output-shards", 3)
NAMES = [f"x-0000{number}-of-00003" for number in range(3)]


@pytest.fixture(scope="module")
def nodes():
    with cluster_of(2) as nodes:
        yield nodes


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    before, cut.PIECE_NBYTES = cut.PIECE_NBYTES, 1500
    yield
    cut.PIECE_NBYTES = before


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case")
    rows = write_rows(folder / "rows.jsonl", some_rows(300))
    options = ("--input", rows, CHATS, "--on-bad-row", "skip", "--append-eod", "--sequence-multiple", 4)
    return folder, options


def run_on(nodes, prefix: Path, *options):
    return preprocess(prefix, *options, "--engine", "ray", "--ray-address", nodes.address, "--workers", 2)


def counts(path: Path) -> dict:
    summary = json.loads(path.read_text())
    return {name: summary[name] for name in ("corpus", "packing")}


def test_same_bytes_and_counts_as_here_with_a_worker_and_a_node_killed(nodes, case, tmp_path):
    _, options = case
    assert preprocess(tmp_path / "local" / "x", *options, *SHARDS, "--summary", tmp_path / "l.json").code == 0
    there = tmp_path / "ray" / "x"

    def parts() -> int:
        folder = Path(f"{there}.building/parts")
        return len(list(folder.glob("*.part"))) if folder.exists() else 0

    with killing(lambda: parts() > 3 and nodes.kill_worker(), nodes.kill_node) as killed:
        done = run_on(nodes, there, *options, *SHARDS, "--summary", tmp_path / "r.json")
    assert done.code == 0, done
    nodes.mend()
    assert len(killed) == 1
    assert remains(there.parent) == sorted(f"{name}{suffix}" for name in NAMES for suffix in MADE)
    for name in NAMES:
        assert files_of(there.parent / name) == files_of(tmp_path / "local" / name)
    assert counts(tmp_path / "r.json") == counts(tmp_path / "l.json")


def test_a_sequence_a_turn_is_the_same_bytes_as_here(nodes, case, tmp_path):
    _, options = case
    options = (*options, "--earlier-reasoning", "split")
    assert preprocess(tmp_path / "local" / "x", *options, "--summary", tmp_path / "l.json").code == 0
    assert run_on(nodes, tmp_path / "ray" / "x", *options, "--summary", tmp_path / "r.json").code == 0
    assert files_of(tmp_path / "ray" / "x") == files_of(tmp_path / "local" / "x")
    assert counts(tmp_path / "r.json") == counts(tmp_path / "l.json")
    summary = counts(tmp_path / "l.json")
    assert summary["packing"]["sequences"] > summary["corpus"]["rows"]


@pytest.mark.parametrize("kind", ["preference", "kto"])
def test_judged_answers_and_their_columns_are_the_same_bytes_as_here(nodes, tmp_path, kind):
    asked = [{"prompt": f"Q {number}", "label": number % 3 > 0} for number in range(90)]
    answers = {"kto": ("completion",), "preference": ("chosen", "rejected")}[kind]
    rows = [
        {name: value for name, value in row.items() if kind == "kto" or name != "label"}
        | {name: f"{name} " * (1 + number % 7) for name in answers}
        for number, row in enumerate(asked)
    ]
    options = ("--input", write_rows(tmp_path / "rows.jsonl", rows), "--row-kind", kind, *SHARDS)
    assert preprocess(tmp_path / "local" / "x", *options, "--seq-length", 256).code == 0
    assert run_on(nodes, tmp_path / "ray" / "x", *options, "--seq-length", 256).code == 0
    for name in NAMES:
        made = files_of(tmp_path / "local" / name)
        assert {"preference": ".pair.col", "kto": ".label.col"}[kind] in made
        assert files_of(tmp_path / "ray" / name) == made


def test_rows_that_are_chosen_are_those_chosen_here(nodes, case, tmp_path):
    _, options = case
    chosen = ("--max-rows", 250, "--dedup", "exact", "--sample", 0.8, "--valid-fraction", 0.2, "--shuffle")
    options = (*options, *chosen, "--repeat", f"{CHATS}=1.5", "--drop-untrained", *SHARDS)
    assert preprocess(tmp_path / "local" / "x", *options).code == 0
    assert run_on(nodes, tmp_path / "ray" / "x", *options).code == 0
    for name in (*NAMES, "x.valid"):
        assert files_of(tmp_path / "ray" / name) == files_of(tmp_path / "local" / name)


@pytest.mark.slow
@pytest.mark.parametrize("overlong", ["error", "drop", "truncate", "split"])
def test_overlong_sequences(nodes, case, tmp_path, overlong):
    _, options = case
    options = (*options, "--overlong", overlong, "--seq-length", 128)
    here, there = preprocess(tmp_path / "local" / "x", *options), run_on(nodes, tmp_path / "ray" / "x", *options)
    assert (there.code, here.code) == ((1, 1) if overlong == "error" else (0, 0)), there
    if overlong == "error":
        assert "are longer than 128 tokens" in there.err
        return
    assert files_of(tmp_path / "ray" / "x") == files_of(tmp_path / "local" / "x")


@pytest.mark.slow
def test_a_corpus_that_is_kept_is_the_local_one(nodes, case, tmp_path):
    _, options = case
    for where in ("local", "ray"):
        engine = (lambda *more: run_on(nodes, *more)) if where == "ray" else preprocess
        assert engine(tmp_path / where / "x", *options, "--keep-corpus", *SHARDS).code == 0
    for name in ("x.unpacked", *NAMES):
        assert files_of(tmp_path / "ray" / name) == files_of(tmp_path / "local" / name)
    wanted = sorted(f"{name}{suffix}" for name in ("x.unpacked", *NAMES) for suffix in MADE)
    assert remains(tmp_path / "ray") == wanted


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True])
def test_files_of_every_kind(nodes, tmp_path, many):
    """Files that cannot be divided by bytes are distributed by the driver or, if there are many, one per task."""
    chats = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    plain = [
        {"messages": [{"role": turn["role"], "content": str(turn.get("content") or "-")} for turn in chat["messages"]]}
        for chat in chats
        if "messages" in chat
    ]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text(json.dumps(chats[:100]))
    pq.write_table(pa.Table.from_pylist(plain), tmp_path / "in" / "b.parquet")
    for number in range(4 if many else 1):
        with gzip.open(tmp_path / "in" / f"c{number}.jsonl.gz", "wb") as file:
            file.write(CHATS.read_bytes())
    options = ("--input", tmp_path / "in" / "*", "--on-bad-row", "skip", "--summary")
    here, there = tmp_path / "local" / "x", tmp_path / "ray" / "x"
    assert preprocess(here, *options, tmp_path / "l.json").code == 0
    done = run_on(nodes, there, *options, tmp_path / "r.json")
    assert done.code == 0, done
    assert files_of(there) == files_of(here)
    assert counts(tmp_path / "r.json") == counts(tmp_path / "l.json")


def used_again(done) -> int:
    """Return the number of parts minus the number of reused parts."""
    found = re.search(r"(\d+) of (\d+) parts reused", done.err)
    assert found, done
    return int(found[1]) - int(found[2])


@pytest.mark.slow
def test_a_run_goes_on_with_parts_that_are_there_and_never_mixes_two(nodes, case, tmp_path):
    _, options = case
    rows = write_rows(tmp_path / "rows.jsonl", some_rows(300))
    options = ("--input", rows, *options[2:])
    prefix = tmp_path / "ray" / "x"
    # The first run, with the other engine, ends before packing and leaves its parts.
    failed = preprocess(prefix, *options, "--seq-length", 128)
    assert (failed.code, f"kept in {prefix}.building" in failed.err) == (1, True), failed
    other = run_on(nodes, prefix, *options, "--train-on", "all")
    assert (other.code, "train on was 'assistant', is 'all'" in other.err) == (1, True), other
    # Other content of the same size.
    text = rows.read_text()
    rows.write_text(text[: len(text) // 2] + text[len(text) // 2 :].replace("e", "i", 1))
    first, *_ = sorted((tmp_path / "ray" / "x.building/parts").glob("*.part"))
    first.write_bytes(first.read_bytes()[:-1])
    # The torn part and the part of the changed input are made again; the others are reused.
    again = run_on(nodes, prefix, *options)
    assert (again.code, used_again(again)) == (0, -2), again
    assert preprocess(tmp_path / "local" / "x", *options).code == 0
    assert files_of(prefix) == files_of(tmp_path / "local" / "x")
    found = run_on(nodes, prefix, *options)
    assert found.out.startswith("found "), found
    refused = run_on(nodes, prefix, *options, "--seed", 5)
    assert (refused.code, "packing seed was 0, is 5" in refused.err) == (1, True)
    assert run_on(nodes, prefix, *options, "--seed", 5, "--overwrite").code == 0
    assert files_of(prefix) != files_of(tmp_path / "local" / "x")


@pytest.mark.slow
def test_a_terminated_run_keeps_its_parts_and_is_gone_on_with(nodes, case, tmp_path):
    chats = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    rows = write_rows(tmp_path / "rows.jsonl", chats * 60)
    there = tmp_path / "ray" / "x"
    arguments = ["preprocess", "--earlier-reasoning", "drop", "--input", rows, "--tokenizer-model", TOKENIZER,
                 "--seq-length", 1024, "--output-prefix", there, "--engine", "ray",
                 "--ray-address", nodes.address]  # fmt: skip
    script = "import sys; from megatron_sft_idx.tokenize import cut; cut.PIECE_NBYTES = 20_000\n"
    script += "from megatron_sft_idx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        while process.poll() is None and not list(tmp_path.glob("ray/x.building/parts/*.part")):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        said = process.stderr.read()
    assert (process.returncode, "run the same command again" in said, "Traceback" in said) == (143, True, False), said
    cut.PIECE_NBYTES, before = 20_000, cut.PIECE_NBYTES
    try:
        again = run_on(nodes, there, "--input", rows)
        assert (again.code, "parts reused" in again.err) == (0, True), again
        assert preprocess(tmp_path / "local" / "x", "--input", rows).code == 0
    finally:
        cut.PIECE_NBYTES = before
    assert files_of(there) == files_of(tmp_path / "local" / "x")


@pytest.mark.slow
def test_the_first_bad_row_of_the_input_is_the_error(nodes, case, tmp_path):
    _, options = case
    options = (*options[:2], *options[5:])
    here, there = preprocess(tmp_path / "local" / "x", *options), run_on(nodes, tmp_path / "ray" / "x", *options)
    assert (there.code, here.code) == (1, 1)
    assert here.err.splitlines()[-1] == there.err.splitlines()[-1]


@pytest.mark.slow
def test_what_it_starts_asks_for_a_token_and_ends_with_it(tmp_path):
    """Without an address, it starts its own cluster on this machine, which rejects clients without a token."""
    code = (
        "import subprocess, sys\n"
        "from megatron_sft_idx.tokenize.ray import ray_cluster\n"
        "import psutil\n"
        "with ray_cluster(None, 1, print):\n"
        "    import ray\n"
        "    address = ray.get_runtime_context().gcs_address\n"
        "    children = psutil.Process().children(recursive=True)\n"
        "    stranger = 'import ray; ray.init(address=%r)' % address\n"
        "    asked = subprocess.run([sys.executable, '-c', stranger], env={'RAY_AUTH_MODE': 'token', 'RAY_AUTH_TOKEN':"
        " 'x' * 64}, capture_output=True, text=True)\n"
        "gone, alive = psutil.wait_procs(children, timeout=60)\n"
        "print(address.split(':')[0], asked.returncode != 0, 'uthenticat' in asked.stderr, len(alive))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "127.0.0.2 True True 0", done


def test_what_cannot_be_is_refused_in_a_sentence(nodes, tmp_path):
    assert preprocess(tmp_path / "x", "--ray-address", "auto").code == 2
    assert preprocess(tmp_path / "x", "--engine", "ray", "--workers", 0).code == 2
    many = run_on(nodes, tmp_path / "x", "--output-shards", 4000)
    assert (many.code, "packs are too few for --output-shards 4000" in many.err) == (1, True), many
    missing = run_on(nodes, tmp_path / "x", "--input", tmp_path / "no.jsonl", "--tokenizer-model", TOKENIZER)
    assert (missing.code, "no such file" in missing.err) == (1, True), missing
