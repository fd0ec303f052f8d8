"""The cost of preprocessing by stage, and two processors compared with one: ``python tools/bench/scaling.py``.

Stages are run one after another in this process with the functions that the engines call, and counted in seconds of
processor time, which other work on the machine changes little. Then whole runs of both engines with one and two
workers, in turns, each in separate processes; medians of their wall times. All runs must give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measure import memory, processed, reset_peak
from report import Bench, cells, run_bench
from tokenising import make_input

from megatron_sft_idx.chat.inputs import expand_inputs
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import BuildOptions, ShardWriter
from megatron_sft_idx.tokenize import EncodingOptions, PackOptions, RowEncoder
from megatron_sft_idx.tokenize.cut import Cutting, cut_input, read_pieces
from megatron_sft_idx.tokenize.gather import ToPack, write_packs
from megatron_sft_idx.tokenize.parts import PartInfo, PartsReader, PartsTable, write_part
from megatron_sft_idx.tokenize.plan import plan_packs

CAPACITY = 4096
SHARDS = 4


class Stage(NamedTuple):
    """One stage over all of the input."""

    name: str  # what it does
    seconds: float  # of processor time
    nbytes: int  # that it reads or writes on disk, or sends
    where: str  # these bytes go


def encoder_of(folder: Path) -> RowEncoder:
    return RowEncoder(EncodingOptions(str(folder / "tokenizer")))


def tokenising_stages(folder: Path) -> tuple[list[Stage], list[str], list[Any]]:
    """Cut, read, tokenise and write parts; paths of the parts, and the lengths in them."""
    (file,) = expand_inputs([str(folder / "chats.jsonl")])
    encoder, cutting = encoder_of(folder), Cutting.of([file])
    stretches, cut = processed(lambda: list(cut_input([file], cutting)))
    read = encode = write = 0.0
    paths: list[str] = []
    lengths: list[Any] = []
    (folder / "parts").mkdir()
    for number, stretch in enumerate(stretches):
        pieces, seconds = processed(list, read_pieces(stretch, cutting))
        fingerprints, hashing = processed(list, (piece.fingerprint() for piece in pieces))
        read += seconds + hashing
        encoded, seconds = processed(list, map(encoder.encode, pieces))
        encode += seconds
        info = PartInfo("bench", fingerprints)
        paths.append(str(folder / "parts" / str(number)))
        _, seconds = processed(write_part, paths[-1], info, encoded)
        write += seconds
        lengths.append(np.concatenate([piece.lengths for piece in encoded]).astype(np.uint32))
    written = sum(os.path.getsize(path) for path in paths)
    return (
        [
            Stage("cut into byte ranges (driver)", cut, len(stretches) * cutting.pieces << 14, "read by the driver"),
            Stage("read and fingerprint", read, file.num_bytes, "read"),
            Stage("render and tokenise", encode, 0, ""),
            Stage("write parts", write, written, "written"),
        ],
        paths,
        lengths,
    )


def packing_stages(folder: Path, paths: list[str], lengths: list[Any]) -> list[Stage]:
    """Gather lengths, plan, share the plan out, gather tokens."""
    messages, sending = processed(lambda: [pickle.dumps(part, protocol=5) for part in lengths])
    gathered, receiving = processed(lambda: np.concatenate([pickle.loads(one) for one in messages]).astype(np.int64))
    _, planning = processed(plan_packs, gathered, PackOptions(CAPACITY), shards=SHARDS, name="bench")
    encoder, seconds, nbytes = encoder_of(folder), 0.0, 0
    bounds = np.cumsum([0, *map(len, lengths)], dtype=np.int64)
    reader = PartsReader(PartsTable(paths, bounds, "uint8"))
    build = BuildOptions(encoder.token_dtype, reader.mask_dtype, None, 1, None)
    sequences = ToPack(reader, gathered, "bench", build, {})
    outputs, _ = sequences.planned(
        str(folder / "gathered"), PackOptions(CAPACITY), shards=SHARDS, work="bench", overwrite=False
    )
    lean = [(output.run.offsets, output.run.sequences, output.run.lengths) for output in outputs]
    plans, sharing = processed(lambda: [pickle.dumps(run, protocol=5) for run in lean])
    for output in outputs:
        with ShardWriter.begin(output.prefix, output.build, work="bench", overwrite=False) as writer:
            seconds += processed(write_packs, PartsReader(reader.table), output.run, writer)[1]
            seconds += processed(writer.finalize)[1]
        nbytes += sum(os.path.getsize(output.prefix + suffix) for suffix in SUFFIXES)
    return [
        Stage("gather lengths (driver)", sending + receiving, sum(map(len, messages)), "to the driver"),
        Stage("plan all packs (driver)", planning, 0, ""),
        Stage("share the plan out (driver)", sharing, sum(map(len, plans)), "from the driver"),
        Stage("gather tokens and write shards", seconds, 2 * nbytes, "read and written"),
    ]


# ---- the driver, by the number of sequences ----


def driver_rows() -> Iterator[list[object]]:
    """Yield seconds and memory of the one step that is not parallel."""
    for count in (250_000, 1_000_000, 4_000_000):
        lengths = np.random.default_rng(1).lognormal(6.2, 0.9, count).astype(np.int64).clip(8, CAPACITY)
        reset_peak()
        before = memory("VmRSS")
        packing, seconds = processed(plan_packs, lengths, PackOptions(CAPACITY), shards=1, name="bench")
        most = memory("VmHWM") - before
        figures = cells(", .2f .1f .0f", count, seconds, seconds / count * 1e9 / 60, 8 + most / count)
        yield [*figures, packing.plan.method]


# ---- whole runs ----


class Outcome(NamedTuple):
    """One run: seconds by stage, of all, and of processors in user mode; what it wrote."""

    stages: dict[str, float]
    wall: float
    user: float
    digest: str


def run(folder: Path, engine: str, workers: int) -> Outcome:
    prefix, summary = folder / "out", folder / "summary.json"
    arguments = ["--input", folder / "chats.jsonl", "--tokenizer", folder / "tokenizer", "--seq-length", CAPACITY,
                 "--output-prefix", prefix, "--output-shards", SHARDS,
                 "--workers", workers, "--engine", engine, "--summary", summary, "--overwrite",
                 "--log-interval", 0]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.monotonic()
    command = [sys.executable, "-m", "megatron_sft_idx", "preprocess", *map(str, arguments)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall = time.monotonic() - begin
    user = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    digest = hashlib.sha256()
    for path in sorted(folder.glob("out-*")):
        digest.update(path.read_bytes())
    return Outcome(json.loads(summary.read_text())["seconds"], wall, user, digest.hexdigest())


Runs = dict[tuple[str, int], list[Outcome]]


def run_all(folder: Path, engines: Sequence[str], rounds: int) -> Runs:
    runs: Runs = {}
    for _ in range(rounds):
        for engine in engines:
            for workers in (1, 2):
                runs.setdefault((engine, workers), []).append(run(folder, engine, workers))
    if len({outcome.digest for outcomes in runs.values() for outcome in outcomes}) != 1:
        raise SystemExit("the runs differ in their bytes")
    return runs


def run_rows(runs: Runs) -> Iterator[list[object]]:
    def medians(outcomes: list[Outcome]) -> tuple[float, ...]:
        columns = zip(*((one.stages["tokenising"], one.wall, one.user) for one in outcomes), strict=True)
        return tuple(map(statistics.median, columns))

    for (engine, workers), outcomes in runs.items():
        tokenising, wall, user = medians(outcomes)
        first, whole, _ = medians(runs[engine, 1])
        figures = cells(".1f .2f .1f .2f", tokenising, first / tokenising, wall, whole / wall)
        yield [engine, workers, *figures, f"{user:.1f}" if engine == "local" else "not known"]


def report_stages(bench: Bench, folder: Path) -> None:
    stages, paths, lengths = tokenising_stages(folder)
    stages += packing_stages(folder, paths, lengths)
    tokens, sequences = sum(int(part.sum()) for part in lengths), sum(map(len, lengths))
    millions = tokens / 1e6
    size = os.path.getsize(folder / "chats.jsonl") / 1e6
    counts = f"{millions:,.1f} million tokens, {len(paths)} parts, {SHARDS} shards"
    bench.say(f"{sequences:,} generated chats, {size:,.0f} MB, {counts}.")
    bench.section("Stages, per million tokens")
    rows = []
    for one in stages:
        seconds, moved, each = one.seconds / millions, one.nbytes / 1e6 / millions, one.nbytes / sequences
        rows.append([one.name, *cells(".4f .3f", seconds, moved), one.where, f"{each:.1f}"])
    bench.table(["stage", "CPU seconds", "MB moved", "where to", "bytes a sequence"], rows)
    for_a_billion(bench, {one.name: one for one in stages}, millions, 1e9 / sequences)


def for_a_billion(bench: Bench, stages: dict[str, Stage], millions: float, times: float) -> None:
    """Report the cost of a million tokens, and extrapolate it to a billion chats on a thousand cores."""
    cores = 1000
    encode, gather = stages["render and tokenise"], stages["gather tokens and write shards"]
    read, write = stages["read and fingerprint"], stages["write parts"]
    bench.headline("tokenise", "tokenise a million tokens", [encode.seconds / millions], "CPU s")
    bench.headline("tokenise-hours", "tokenise a billion chats", [encode.seconds * times / 3600], "core hours")
    minutes = encode.seconds * times / cores / 60
    bench.headline("tokenise-minutes", f"the same on {cores:,} cores", [minutes], "minutes")
    bench.headline("read", "read input for a million tokens", [read.nbytes / 1e6 / millions], "MB")
    bench.headline("write", "write parts for a million tokens", [write.nbytes / 1e6 / millions], "MB")
    moved = (read.nbytes + write.nbytes) * times
    bench.headline("input", "input of a billion chats", [read.nbytes * times / 1e12], "TB")
    bench.headline("moved", "read and written for a billion chats", [moved / 1e12], "TB")
    bench.headline("rate", f"the same while {cores:,} cores tokenise", [moved / 1e9 / (minutes * 60)], "GB/s")
    bench.headline("gather", "gather a million tokens", [gather.seconds / millions], "CPU s")
    bench.headline("gather-bytes", "gather a million tokens: read and written", [gather.nbytes / 1e6 / millions], "MB")
    bench.headline("gather-hours", "gather a billion chats", [gather.seconds * times / 3600], "core hours")
    bench.headline("gather-all", "gather a billion chats: read and written", [gather.nbytes * times / 1e12], "TB")


def report_runs(bench: Bench, runs: Runs, engines: Sequence[str]) -> None:
    bench.say("User seconds are of the whole run with all its processes; Ray's are not children of the command.")
    header = ["engine", "workers", "tokenising s", "speed-up", "whole run s", "speed-up", "user CPU s"]
    bench.table(header, list(run_rows(runs)))
    for engine in engines:
        one, two = ([outcome.stages["tokenising"] for outcome in runs[engine, workers]] for workers in (1, 2))
        what, peer = f"`preprocess --engine {engine}`, tokenising with two workers", "one worker"
        bench.headline(f"two-{engine}", what, two, "s", peer=peer, theirs=one, short=engine == "local")


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    load = os.getloadavg()[0]
    make_input(folder, options.chats, seed=1)
    report_stages(bench, folder)
    bench.section("The plan, which one process makes for all")
    rows = list(driver_rows())
    bench.table(["sequences", "CPU seconds", "minutes for a billion", "bytes held a sequence", "method"], rows)
    bench.headline("plan", "plan a billion sequences in one process", [float(str(rows[-1][2]))], "minutes")
    # Bytes per sequence are GB per billion; the lengths take four more.
    bench.headline("plan-memory", "the same: memory", [float(str(rows[-1][3])) + 4], "GB")
    bench.section(f"Whole runs, medians of {options.rounds}")
    if load > 1:
        bench.say(
            f"Other work had the processors too (load {load:.1f}), so wall times and speed-ups are not to be taken at"
            " their word; user seconds are: what two workers spend beyond one is what sharing the work costs."
        )
    report_runs(bench, run_all(folder, options.engines, options.rounds), options.engines)


if __name__ == "__main__":
    title = "Preprocessing: what each stage costs, and two processors against one"
    sizes = {
        "chats": (24_000, 100_000, "how many"),
        "engines": (["local"], ["local"], "of whole runs; ray where it is installed"),
    }
    run_bench(title, ("tokenizers", "gigatoken", "ray"), report, sizes, rounds=(3, 3))
