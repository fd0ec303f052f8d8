"""Shuffled batches from an object store: Megatron's two stock ways beside ours.

    python tools/bench/remote.py [--packs 4000] [--seconds 4] [--latency 0 20]

Writes tools/bench/results/remote.md. The stores run on this machine: OpenStack Swift with s3api (see
tests/cloud/swift_server.py), and a server that knows nothing but ranges; what the network would add to a request is
added by a proxy, which also counts. Each way runs in a process of its own for some seconds. Training needs tokens and
masks: the stock ways read them as two IndexedDatasets, for which the bench writes an .idx beside the mask, or the
tokens alone, which a run that masks nothing could do.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from range_server import range_server
from report import machine, memory, table
from slow_link import Link, slow_link

RESULTS = Path(__file__).parent / "results" / "remote.md"
SERVER = Path(__file__).parents[2] / "tests" / "cloud" / "swift_server.py"
MIB = 1 << 20
LENGTH, BATCH = 4096, 8
BUCKET, KEY = "bench", "packs"
IMPORTED = (
    *("boto3", "multistorageclient", "obstore.auth.boto3", "megatron.core.datasets.indexed_dataset"),
    "megatron_sft_idx.training.loader",
)
Read = Callable[[Iterator[list[int]]], Iterator[Any]]


@dataclass(frozen=True)
class Way:
    """One way of reading.

    Attributes:
        name: of the way, for the table.
        kind: ``boto3``, ``msc`` or ``ours``.
        masks: whether masks are read too.
        chunk: bytes of boto3's chunk cache; 1 makes every range exact.
        ahead: batches that ours fetches ahead.
    """

    name: str
    kind: str
    masks: bool = True
    chunk: int = 1
    ahead: int = 16

    @property
    def used(self) -> int:
        """Bytes of a pack that a batch needs."""
        return LENGTH * (5 if self.masks else 4)


WAYS = (
    Way("boto3, chunks of 8 MiB, tokens and masks", "boto3", chunk=8 * MIB),
    Way("boto3, exact ranges, tokens and masks", "boto3"),
    Way("multi-storage-client, tokens and masks", "msc"),
    Way("boto3, exact ranges, tokens alone", "boto3", masks=False),
    Way("multi-storage-client, tokens alone", "msc", masks=False),
    Way("ours by s3://, tokens and masks", "ours"),
    Way("ours by msc://, tokens and masks", "ours-msc"),
)


def write_shard(folder: Path, packs: int) -> Path:
    """A shard in ``folder``, and the .idx by which stock code finds masks."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from megatron_sft_idx.shard import ShardWriter

    random, prefix = np.random.default_rng(0), folder / KEY
    mask = np.ones(LENGTH, np.uint8)
    mask[-1] = 0
    one = np.ones(1, np.int64)
    masks = IndexedDatasetBuilder(str(prefix) + ".mask.bin", dtype=np.uint8)
    with ShardWriter(prefix, capacity=LENGTH, durable=False) as writer:
        for _ in range(packs):
            tokens = random.integers(0, 150_000, LENGTH, dtype=np.int32)
            writer.add_packs(tokens, mask, 0 * one, LENGTH * one, one)
            masks.add_document(mask, [LENGTH])
    masks.finalize(str(prefix) + ".mask.idx")
    return prefix


def batches(packs: int, seconds: float) -> Iterator[list[int]]:
    """Micro-batches in a shuffled order; none more after some seconds, so that all that is asked for is counted."""
    random, begin = np.random.default_rng(1), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        yield random.integers(0, packs, BATCH).tolist()


def stock_reader(way: Way, cache: str) -> Read:
    """Megatron's IndexedDataset, pack by pack into arrays."""
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
    """Whole batches of five tensors, by the loader that training uses."""
    from megatron_sft_idx.shards import ShardSet
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
    """Read for some seconds; in a process of its own. Sends samples, seconds, requests, bytes and peak memory."""
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


def measured(way: Way, packs: int, seconds: float, environment: dict[str, str], link: Link) -> tuple[float, list[str]]:
    """Samples a second, and the row of the table."""
    context = multiprocessing.get_context("fork")  # all is imported, and no client is made
    answers = context.Queue()
    process = context.Process(target=measure, args=(way, packs, seconds, environment, link.counts, answers))
    process.start()
    samples, spent, requests, nbytes, peak = answers.get(timeout=600)
    process.join()
    rate = samples / spent
    done = samples / BATCH
    row = [
        way.name,
        f"{rate:.1f}",
        f"{requests / done:.1f}",
        f"{nbytes / (samples * way.used):.2f}",
        f"{peak / MIB:.0f}",
    ]
    print(" | ".join(row), flush=True)
    return rate, row


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
    """Swift with the shard in it: its port, and the variables by which clients know themselves."""
    with subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline().removeprefix("export ").strip() for _ in range(6)]
            environment = dict(line.split("=", 1) for line in lines)
            # In a process of its own: forks of one with clients and threads are no place to measure.
            upload = multiprocessing.get_context("spawn").Process(target=put, args=(prefix, environment))
            upload.start()
            upload.join()
            yield int(environment["AWS_ENDPOINT_URL"].rpartition(":")[2]), environment
        finally:
            process.terminate()


@contextlib.contextmanager
def ranges(prefix: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The server that knows nothing but ranges, over the folder above the shard's."""
    keys = {"AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "anything", "AWS_DEFAULT_REGION": "us-east-1"}
    with range_server(str(prefix.parent.parent)) as port:
        yield port, {**keys, "AWS_EC2_METADATA_DISABLED": "true"}


def reached(port: int, environment: dict[str, str], config: Path) -> dict[str, str]:
    """The variables by which every way goes through a port."""
    endpoint = f"http://127.0.0.1:{port}"
    keys = {"access_key": environment["AWS_ACCESS_KEY_ID"], "secret_key": environment["AWS_SECRET_ACCESS_KEY"]}
    provider = {
        "type": "s3",
        "options": {"base_path": BUCKET, "region_name": "us-east-1", "endpoint_url": endpoint},
    }
    profile = {"storage_provider": provider, "credentials_provider": {"type": "S3Credentials", "options": keys}}
    config.write_text(json.dumps({"profiles": {"bench": profile}}))
    return {**environment, "AWS_ENDPOINT_URL": endpoint, "MSC_CONFIG": str(config)}


def report(arguments: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The lines of the result."""
    (folder / BUCKET).mkdir()
    prefix = write_shard(folder / BUCKET, arguments.packs)
    nbytes = arguments.packs * LENGTH * 5 / MIB
    yield "# Shuffled batches from an object store\n"
    yield (
        f"{machine()}; one shard of {arguments.packs:,} packs of {LENGTH:,} tokens, {nbytes:.0f} MiB of tokens and"
        f" masks; micro-batches of {BATCH}, {arguments.seconds:g} s each way. Server, proxy and reader share the cores."
        " Memory is the peak beyond what is resident once all is imported and open. The stock chunk of 256 MiB is more"
        " than this shard, which is small for a bench; where it is not, shuffled reading fetches a chunk a pack, as the"
        " smaller chunk shows here.\n"
    )
    for name, serve in (("OpenStack Swift", swift), ("a server of ranges alone", ranges)):
        with serve(prefix) as (port, environment):
            for milliseconds in arguments.latency:
                yield f"## {name}, {milliseconds:g} ms added to every request\n"
                with slow_link(port, milliseconds) as link:
                    reach = reached(link.port, environment, folder / "msc.json")
                    found = {way: measured(way, arguments.packs, arguments.seconds, reach, link) for way in WAYS}
                header = ("way", "samples a second", "requests a batch", "bytes fetched / used", "MiB")
                yield from table(header, [row for _, row in found.values()])
                for masks, what in ((True, "tokens and masks"), (False, "tokens alone")):
                    stock = max(
                        rate for way, (rate, _) in found.items() if way.masks == masks and "ours" not in way.kind
                    )
                    ours = max(rate for way, (rate, _) in found.items() if "ours" in way.kind)
                    yield f"Ours over the better stock way, {what} there: {ours / stock:.1f} times.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=int, default=4_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--latency", type=float, nargs="+", default=[0, 20], metavar="MS")
    arguments = parser.parse_args()
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        lines = list(report(arguments, Path(folder)))
    RESULTS.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
