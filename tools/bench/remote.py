"""Shuffled batches from an object store: Megatron's two stock ways compared with ours.

    python tools/bench/remote.py [--full]

The stores run on this machine: OpenStack Swift with s3api (see tests/cloud/swift_server.py; where it cannot be started
nothing is measured), and a server that knows nothing but ranges; what the network would add to a request is added by a
proxy, which also counts. Each way runs in a separate process for some seconds, in turns. Training needs tokens and
masks: the stock ways read them as two IndexedDatasets, for which the bench writes an .idx next to the mask, or only
the tokens, which is enough for a run without masks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from measure import memory, write_equal_packs
from plot import Dot, dots
from report import MIB, Bench, cells, not_run, run_bench
from servers import Link, range_server, slow_link

SERVER = Path(__file__).parents[2] / "tests" / "cloud" / "swift_server.py"
LENGTH, BATCH = 4096, 8
BUCKET, KEY = "bench", "packs"
IMPORTED = (
    *("boto3", "multistorageclient", "obstore.auth.boto3", "megatron.core.datasets.indexed_dataset"),
    "megatron_sft_idx.training.loader",
)
Read = Callable[[Iterator[list[int]]], Iterator[Any]]


@dataclass(frozen=True)
class Way:
    """One way of reading."""

    name: str  # of the way, for the table
    kind: str  # ``boto3``, ``msc`` or ``ours``
    masks: bool = True  # whether masks are read too
    chunk: int = 1  # bytes of boto3's chunk cache; 1 makes every range exact
    ahead: int = 16  # batches that ours fetches ahead

    @property
    def used(self) -> int:
        """Bytes of a pack that a batch needs."""
        return LENGTH * (5 if self.masks else 4)


OURS = Way("ours by s3://, tokens and masks", "ours")
HEADER = ("way", "samples a second", "requests a batch", "bytes fetched / used", "MiB")
WAYS = (
    Way("boto3, chunks of 8 MiB, tokens and masks", "boto3", chunk=8 * MIB),
    Way("boto3, exact ranges, tokens and masks", "boto3"),
    Way("multi-storage-client, tokens and masks", "msc"),
    Way("boto3, exact ranges, tokens alone", "boto3", masks=False),
    Way("multi-storage-client, tokens alone", "msc", masks=False),
    OURS,
    Way("ours by msc://, tokens and masks", "ours-msc"),
)


def write_shard(folder: Path, packs: int) -> Path:
    """Write a shard to ``folder``, with the .idx that stock code needs for masks."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix, mask = folder / KEY, np.ones(LENGTH, np.uint8)
    mask[-1] = 0
    write_equal_packs(prefix, packs, LENGTH, capacity=LENGTH)
    masks = IndexedDatasetBuilder(str(prefix) + ".mask.bin", dtype=np.uint8)
    for _ in range(packs):
        masks.add_document(mask, [LENGTH])
    masks.finalize(str(prefix) + ".mask.idx")
    return prefix


def batches(packs: int, seconds: float) -> Iterator[list[int]]:
    """Yield micro-batches in shuffled order, and stop after some seconds, so that all requests are counted."""
    random, begin = np.random.default_rng(1), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        yield random.integers(0, packs, BATCH).tolist()


def stock_reader(way: Way, cache: str) -> Read:
    """Return a reader that uses Megatron's IndexedDataset, pack by pack into arrays."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.object_storage_utils import ObjectStorageConfig

    root = f"s3://{BUCKET}" if way.kind == "boto3" else "msc://bench"
    config = ObjectStorageConfig(path_to_idx_cache=cache, bin_chunk_nbytes=way.chunk)
    names = [KEY, KEY + ".mask"][: 1 + way.masks]
    parts = [IndexedDataset(f"{root}/{name}", mmap=False, object_storage_config=config) for name in names]

    def read(wanted: Iterator[list[int]]) -> Iterator[Any]:
        for batch in wanted:
            yield [np.stack([part[i] for i in batch]) for part in parts]

    return read


def our_reader(way: Way, cache: str) -> Read:
    """Return a reader of whole batches of five tensors, with the loader for training."""
    from megatron_sft_idx.shard.shard_set import ShardSet
    from megatron_sft_idx.training.batch import BatchAssembler
    from megatron_sft_idx.training.loader import BatchLoader
    from megatron_sft_idx.training.sources import StoredPacks

    root = "msc://bench" if way.kind == "ours-msc" else f"s3://{BUCKET}"
    shards = ShardSet([f"{root}/{KEY}"], index_cache=cache)
    assembler = BatchAssembler(StoredPacks(shards), LENGTH)
    assembler.plan([0])  # opens the shard

    def read(wanted: Iterator[list[int]]) -> Iterator[Any]:
        return iter(BatchLoader(assembler, wanted, ahead=way.ahead))

    return read


def measure(way: Way, packs: int, seconds: float, environment: dict[str, str], counts: Any, answers: Any) -> None:
    """Read for some seconds; in a separate process. Sends samples, seconds, requests, bytes and peak memory."""
    os.environ.update(environment)
    with tempfile.TemporaryDirectory() as cache:
        read = (our_reader if way.kind.startswith("ours") else stock_reader)(way, cache)
        before, link = memory("VmRSS"), Link(0, counts)
        link.take()
        begin = time.perf_counter()
        samples = BATCH * sum(1 for _ in read(batches(packs, seconds)))
        spent = time.perf_counter() - begin
        requests, nbytes = link.take()
        answers.put((samples, spent, requests, nbytes, memory("VmHWM") - before))


class Run(NamedTuple):
    """One way in one round: samples per second, requests per batch, bytes fetched over bytes used, peak memory."""

    rate: float
    requests: float
    overhead: float
    nbytes: int


def measured(way: Way, packs: int, seconds: float, environment: dict[str, str], link: Link) -> Run:
    context = multiprocessing.get_context("fork")  # all is imported, and no client is made
    answers = context.Queue()
    process = context.Process(target=measure, args=(way, packs, seconds, environment, link.counts, answers))
    process.start()
    samples, spent, requests, nbytes, peak = answers.get(timeout=600)
    process.join()
    return Run(samples / spent, requests * BATCH / samples, nbytes / (samples * way.used), peak)


def put(prefix: Path, environment: dict[str, str]) -> None:
    """Put the shard into a new bucket."""
    os.environ.update(environment)
    import boto3

    client = boto3.session.Session().client("s3")
    client.create_bucket(Bucket=BUCKET)
    for path in sorted(prefix.parent.glob(KEY + ".*")):
        client.upload_file(str(path), BUCKET, path.name)


@contextlib.contextmanager
def swift(prefix: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Serve the shard with Swift. Yield its port, and the variables with the clients' credentials."""
    log = prefix.parent / "swift.log"
    command = [sys.executable, str(SERVER)]
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as server:
        try:
            assert server.stdout is not None
            lines = [server.stdout.readline().removeprefix("export ").strip() for _ in range(6)]
            if not all(lines):
                last = (log.read_text(errors="replace").strip().splitlines() or ["it ended at once"])[-1]
                not_run(f"OpenStack Swift does not start: {last}")
            environment = dict(line.split("=", 1) for line in lines)
            # In a separate process: forks of a process with clients and threads distort measurements.
            upload = multiprocessing.get_context("spawn").Process(target=put, args=(prefix, environment))
            upload.start()
            upload.join()
            yield int(environment["AWS_ENDPOINT_URL"].rpartition(":")[2]), environment
        finally:
            server.terminate()


@contextlib.contextmanager
def ranges(prefix: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Serve the folder above the shard's with the server that supports only ranges."""
    keys = {"AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "anything", "AWS_DEFAULT_REGION": "us-east-1"}
    with range_server(str(prefix.parent.parent)) as port:
        yield port, {**keys, "AWS_EC2_METADATA_DISABLED": "true"}


def reached(port: int, environment: dict[str, str], config: Path) -> dict[str, str]:
    """Return the variables with which every way uses a port."""
    endpoint = f"http://127.0.0.1:{port}"
    keys = {"access_key": environment["AWS_ACCESS_KEY_ID"], "secret_key": environment["AWS_SECRET_ACCESS_KEY"]}
    provider = {"type": "s3", "options": {"base_path": BUCKET, "region_name": "us-east-1", "endpoint_url": endpoint}}
    profile = {"storage_provider": provider, "credentials_provider": {"type": "S3Credentials", "options": keys}}
    config.write_text(json.dumps({"profiles": {"bench": profile}}))
    return {**environment, "AWS_ENDPOINT_URL": endpoint, "MSC_CONFIG": str(config)}


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            not_run(f"{error}; pip install '.[cloud]' brings what object stores need")
    (folder / BUCKET).mkdir()
    prefix = write_shard(folder / BUCKET, options.packs)
    nbytes = options.packs * LENGTH * 5 / MIB
    bench.say(
        f"One shard of {options.packs:,} packs of {LENGTH:,} tokens, {nbytes:.0f} MiB of tokens and masks; batches of"
        f" {BATCH}, {options.rounds} rounds of {options.seconds:g} s each way. Server, proxy and reader share the"
        " cores. Memory is the peak beyond what is resident once all is imported and open. The stock chunk of 256 MiB"
        " is more than this shard, which is small for a bench; where it is not, shuffled reading fetches a chunk a"
        " pack, as the smaller chunk shows here."
    )
    for key, name, serve in (("swift", "OpenStack Swift", swift), ("ranges", "a server of ranges alone", ranges)):
        with serve(prefix) as (port, environment):
            for milliseconds in options.latency:
                bench.section(f"{name}, {milliseconds:g} ms added to every request")
                found: dict[Way, list[Run]] = {way: [] for way in WAYS}
                with slow_link(port, milliseconds) as link:
                    reach = reached(link.port, environment, folder / "msc.json")
                    for _ in range(options.rounds):
                        for way, runs in found.items():
                            runs.append(measured(way, options.packs, options.seconds, reach, link))
                bench.table(HEADER, [(way.name, *row(runs)) for way, runs in found.items()])
                headlines(bench, found, f"{key}{milliseconds:g}", f"{name}, {milliseconds:g} ms away")


def row(runs: list[Run]) -> list[str]:
    rate, requests, overhead, nbytes = map(median, zip(*runs, strict=True))
    return cells(".1f .1f .2f .0f", rate, requests, overhead, nbytes / MIB)


def headlines(bench: Bench, found: dict[Way, list[Run]], key: str, where: str) -> None:
    """Report our way by s3:// compared with the faster stock way, with and without masks."""
    rates = {way: [run.rate for run in runs] for way, runs in found.items()}
    for masks, read in ((True, "tokens and masks"), (False, "tokens alone")):
        stock = [way for way in WAYS if way.masks == masks and not way.kind.startswith("ours")]
        theirs = max((rates[way] for way in stock), key=median)
        what, peer = f"shuffled batches, tokens and masks, from {where}", f"Megatron's better way, {read}"
        name, short = (key, key == "swift20") if masks else (f"{key}-tokens", False)
        bench.headline(name, what, rates[OURS], "samples/s", peer=peer, theirs=theirs, more=True, short=short)
    marks = [Dot(way.name, every, way.kind.startswith("ours")) for way, every in rates.items()]
    bench.plot(f"remote_{key}", dots(f"Shuffled batches from {where}", "samples a second", marks, more=True))


if __name__ == "__main__":
    versions = ("boto3", "multi-storage-client", "obstore", "megatron-core")
    sizes = {
        "packs": (2_000, 4_000, "in the shard"),
        "seconds": (1.2, 4.0, "each way in a round"),
        "latency": ([0.0, 20.0], [0.0, 5.0, 20.0], "milliseconds added to every request"),
    }
    run_bench("Shuffled batches from an object store", versions, report, sizes, rounds=(3, 3))
