"""``megatron-sft-idx bench-read``: how fast a shard is read here, and by which settings."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack

from megatron_sft_idx.cli.options import HelpFormatter, Verbs, add_log_interval, local_path, positive
from megatron_sft_idx.cli.streams import print_error
from megatron_sft_idx.inspect.bench_read import Plan, bench_read
from megatron_sft_idx.inspect.place import memory_limit
from megatron_sft_idx.inspect.recommend import reading_dict, reading_lines, recommend
from megatron_sft_idx.storage.progress import Progress

__all__ = ["add_parser"]

_EXAMPLES = """\
examples:
  which settings to train with, from this disk, in this memory (about half a minute):
    megatron-sft-idx bench-read data/train

  a slow disk tells more in more time; for a program, as one JSON document:
    megatron-sft-idx bench-read data/train --seconds 120 --json > reading.json

  as if there were 4 GiB of memory for reading (where a control group may be made: root, most containers)
    megatron-sft-idx bench-read data/train --memory-limit 4096 --seconds 120

Each setting is read by a process of its own: first with the page cache dropped (checked, not assumed), then once more,
as in a second epoch. All are measured in turn, several rounds. Shown are packs a second, the time of a pack, bytes
read from the disk for each byte asked for, and page faults. Nothing is written. A program that reads the shard
meanwhile loses its cached pages too; what a server, or a host of this machine, keeps in its own memory stays there.

A memory limit is a control group's. ulimit has none that would do: the page cache belongs to no process.

exit code: 0 measured; 1 the shard is bad, or cannot be read in any way; 2 wrong usage, or no limit can be set here.
"""
_MIB = 1 << 20


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "bench-read",
        help="how fast a shard is read from this disk, by which settings",
        description="Measure ways of reading a shard on the disk it lies on, and recommend one.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("shard", type=local_path, metavar="PREFIX", help="prefix of the shard")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds", type=positive, default=15, metavar="N", help="time to read for, about (default: %(default)s)"
    )
    length.add_argument("--packs", type=positive, metavar="N", help="read N packs an epoch, however long that takes")
    parser.add_argument(
        "--order",
        choices=("shuffled", "sequential"),
        default="shuffled",
        help="in which packs are read; training shuffles (default: %(default)s)",
    )
    parser.add_argument("--memory-limit", type=positive, metavar="MIB", help="memory for reading, page cache included")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    add_log_interval(parser, "runs", default=10)
    parser.set_defaults(run=_run, prints_result=True)


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    with ExitStack() as stack:
        limit = None
        if arguments.memory_limit:
            try:
                limit = stack.enter_context(memory_limit(arguments.memory_limit * _MIB))
            except OSError as error:
                parser.error(f"--memory-limit: {error}")
        plan = Plan(
            order=arguments.order,
            packs=arguments.packs,
            seconds=arguments.seconds,
            limit=limit,
        )
        interval = arguments.log_interval
        with Progress("reading", 2 * plan.runs, unit=" epochs", log_interval=interval, items="runs") as progress:
            report = bench_read(arguments.shard, plan, tell=lambda runs: progress.update(2 * runs, runs))
    advice = recommend(report)
    if arguments.json:
        print(json.dumps(reading_dict(report, advice), indent=2))
    else:
        print("\n".join(reading_lines(report, advice)))
    if advice.setting is None:
        print_error(f"{arguments.shard}: no setting reads it here")
        return 1
    return 0
