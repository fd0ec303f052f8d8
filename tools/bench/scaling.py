"""What preprocessing costs by stage, and how two processors compare with one: ``python tools/bench/scaling.py``.

Stages are run one after another in this process with the functions that the engines call, and counted in seconds of
processor time, which other work on the machine changes little. Then whole runs of both engines with one and two
workers, in turns, each in processes of its own; medians of their wall times. All runs must give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report import machine, memory, table
from tokenising import TEMPLATE, make_chats, train_tokenizer

from megatron_sft_idx.chat.inputs.files import expand_inputs
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.preprocess import EncodingOptions, PackOptions, RowEncoder
from megatron_sft_idx.preprocess.distributed.parts import PartInfo, write_part
from megatron_sft_idx.preprocess.distributed.reader import PartsReader
from megatron_sft_idx.preprocess.distributed.stretches import Cutting, cut_file, read_pieces
from megatron_sft_idx.preprocess.gather import write_packs
from megatron_sft_idx.preprocess.outputs import Packing, plan_packs
from megatron_sft_idx.preprocess.source import PIECE_NBYTES

RESULT = Path(__file__).parent / "results" / "scaling.md"
CAPACITY = 4096
SHARDS = 4


class Stage(NamedTuple):
    """One stage over all of the input.

    Attributes:
        name: what it does.
        seconds: of processor time.
        nbytes: that it reads or writes on disk, or sends.
        where: these bytes go.
    """

    name: str
    seconds: float
    nbytes: int
    where: str


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    begin = time.process_time()
    result = work(*arguments)
    return result, time.process_time() - begin


def encoder_of(folder: Path) -> RowEncoder:
    return RowEncoder(EncodingOptions(str(folder / "tokenizer"), chat_template=TEMPLATE))


def tokenising_stages(folder: Path) -> tuple[list[Stage], list[str], list[Any]]:
    """Cut, read, tokenise and write parts; paths of the parts, and the lengths in them."""
    (file,) = expand_inputs([str(folder / "chats.jsonl")])
    encoder, cutting = encoder_of(folder), Cutting.of(file.num_bytes, PIECE_NBYTES)
    stretches, cut = timed(lambda: list(cut_file(file, 0, cutting)))
    read = encode = write = 0.0
    paths: list[str] = []
    lengths: list[Any] = []
    (folder / "parts").mkdir()
    for number, stretch in enumerate(stretches):
        pieces, seconds = timed(list, read_pieces(stretch, cutting))
        fingerprints, hashing = timed(list, (piece.fingerprint() for piece in pieces))
        read += seconds + hashing
        encoded, seconds = timed(list, map(encoder.encode, pieces))
        encode += seconds
        info = PartInfo("bench", fingerprints, token_dtype=encoder.token_dtype.name)
        paths.append(str(folder / "parts" / str(number)))
        _, seconds = timed(write_part, paths[-1], info, encoded)
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
    messages, sending = timed(lambda: [pickle.dumps(part, protocol=5) for part in lengths])
    gathered, receiving = timed(lambda: np.concatenate([pickle.loads(one) for one in messages]).astype(np.int64))
    packing, planning = timed(lambda: plan_packs(gathered, PackOptions(CAPACITY), shards=SHARDS, source="bench"))
    plans, sharing = timed(lambda: [pickle.dumps(lean(packing, number), protocol=5) for number in range(SHARDS)])
    bounds = np.cumsum([0, *map(len, lengths)], dtype=np.int64)
    encoder, seconds, nbytes = encoder_of(folder), 0.0, 0
    for number, output in enumerate(
        packing.outputs(
            str(folder / "gathered"),
            {},
            "bench",
            0,
            token_dtype=encoder.token_dtype.name,
            mask_dtype="uint8",
            pad_id=None,
        )
    ):
        with output.writer(overwrite=False) as writer:
            run = packing.run(number)
            seconds += timed(write_packs, PartsReader(paths, bounds, "uint8"), run, writer)[1]
            seconds += timed(writer.finalize)[1]
        nbytes += sum(os.path.getsize(output.prefix + suffix) for suffix in SUFFIXES)
    return [
        Stage("gather lengths (driver)", sending + receiving, sum(map(len, messages)), "to the driver"),
        Stage("plan all packs (driver)", planning, 0, ""),
        Stage("share the plan out (driver)", sharing, sum(map(len, plans)), "from the driver"),
        Stage("gather tokens and write shards", seconds, 2 * nbytes, "read and written"),
    ]


def lean(packing: Packing, number: int) -> Any:
    run = packing.run(number)
    return run.offsets, run.selection.sequences, run.selection.lengths.astype(np.uint32)


# ---- the driver, by the number of sequences ----


def one_plan(lengths: Any) -> Packing:
    return plan_packs(lengths, PackOptions(CAPACITY), shards=1, source="bench")


def driver_rows() -> Iterator[list[object]]:
    """Seconds and memory of the one step that nobody shares."""
    for count in (250_000, 1_000_000, 4_000_000):
        lengths = np.random.default_rng(1).lognormal(6.2, 0.9, count).astype(np.int64).clip(8, CAPACITY)
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        packing, seconds = timed(one_plan, lengths)
        most = memory("VmHWM") - before
        yield [
            f"{count:,}",
            f"{seconds:.2f}",
            f"{seconds / count * 1e9 / 60:.1f}",
            f"{8 + most / count:.0f}",
            packing.plan.method,
        ]


# ---- whole runs ----


class Outcome(NamedTuple):
    """One run: seconds by stage, of all, and of processors in user mode; what it wrote."""

    stages: dict[str, float]
    wall: float
    user: float
    digest: str


def run(folder: Path, engine: str, workers: int) -> Outcome:
    prefix, summary = folder / "out", folder / "summary.json"
    arguments = ["--input", folder / "chats.jsonl", "--tokenizer-model", folder / "tokenizer", "--seq-length", CAPACITY,
                 "--chat-template", folder / "template.jinja", "--output-prefix", prefix, "--output-shards", SHARDS,
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


def speed_up(runs: Runs, engine: str, seconds: Callable[[Outcome], float]) -> float:
    one, two = (statistics.median(map(seconds, runs[engine, workers])) for workers in (1, 2))
    return one / two


def run_rows(runs: Runs) -> Iterator[list[object]]:
    for (engine, workers), outcomes in runs.items():
        tokenising, wall = (
            statistics.median(values)
            for values in ([one.stages["tokenising"] for one in outcomes], [one.wall for one in outcomes])
        )
        ones = runs[engine, 1]
        against = [
            statistics.median(one.stages["tokenising"] for one in ones),
            statistics.median(one.wall for one in ones),
        ]
        user = f"{statistics.median(one.user for one in outcomes):.1f}" if engine == "local" else "not known"
        yield [
            engine,
            workers,
            f"{tokenising:.1f}",
            f"{against[0] / tokenising:.2f}",
            f"{wall:.1f}",
            f"{against[1] / wall:.2f}",
            user,
        ]


def lines(folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    load = os.getloadavg()[0]
    chats = make_chats(arguments.chats, seed=1)
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats)
    (folder / "tokenizer").mkdir()
    train_tokenizer(folder / "tokenizer", chats[:2000])
    (folder / "template.jinja").write_text(TEMPLATE)
    stages, paths, lengths = tokenising_stages(folder)
    stages += packing_stages(folder, paths, lengths)
    tokens, sequences = sum(int(part.sum()) for part in lengths), sum(map(len, lengths))
    millions = tokens / 1e6
    yield "# Preprocessing: what each stage costs, and two processors against one"
    yield ""
    size = os.path.getsize(folder / "chats.jsonl") / 1e6
    yield f"`python tools/bench/scaling.py` on {machine()}, load {load:.1f} when it began:"
    counts = f"{millions:,.1f} million tokens, {len(paths)} parts, {SHARDS} shards"
    yield f"{sequences:,} generated chats, {size:,.0f} MB, {counts}."
    yield ""
    yield "## Stages, per million tokens"
    yield ""
    yield from table(
        ["stage", "CPU seconds", "MB moved", "where to", "bytes a sequence"],
        [
            [
                one.name,
                f"{one.seconds / millions:.4f}",
                f"{one.nbytes / 1e6 / millions:.3f}",
                one.where,
                f"{one.nbytes / sequences:.1f}",
            ]
            for one in stages
        ],
    )
    yield "## The plan, which one process makes for all"
    yield ""
    yield from table(
        ["sequences", "CPU seconds", "minutes for a billion", "bytes held a sequence", "method"], list(driver_rows())
    )
    yield f"## Whole runs, medians of {arguments.rounds}"
    yield ""
    if load > 1:
        yield "Other work had the processors too, so wall times and speed-ups are not to be taken at their word; user"
        yield "seconds are: what two workers spend beyond one is what sharing the work out costs."
        yield ""
    yield "User seconds are of the whole run with all its processes; Ray's are not children of the command."
    yield ""
    header = ["engine", "workers", "tokenising s", "speed-up", "whole run s", "speed-up", "user CPU s"]
    runs = run_all(folder, arguments.engines, arguments.rounds)
    yield from table(header, list(run_rows(runs)))
    for engine in arguments.engines:
        tokenising = speed_up(runs, engine, lambda one: one.stages["tokenising"])
        whole = speed_up(runs, engine, lambda one: one.wall)
        yield f"Engine {engine}, two workers against one: tokenising {tokenising:.2f} times, the whole run {whole:.2f}."
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=40_000, help="how many (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of whole runs (default: %(default)s)")
    engines = ["local", *(["ray"] if importlib.util.find_spec("ray") else [])]
    parser.add_argument("--engines", nargs="+", choices=engines, default=engines, help="(default: all that are there)")
    parser.add_argument("--folder", help="for some hundred MB of temporary files (default: the system's)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        text = "\n".join(lines(Path(folder), arguments))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
