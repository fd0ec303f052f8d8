"""``megatron-sft-idx create-raw-index``: where the rows of a JSON-lines file are."""

from __future__ import annotations

import argparse
import os

from megatron_sft_idx.cli.options import HelpFormatter, Verbs, add_log_interval, local_path
from megatron_sft_idx.formats.modalities import create_raw_index
from megatron_sft_idx.storage.progress import Progress

__all__ = ["add_parser"]

_EXAMPLES = """\
examples:
  write chats.idx beside chats.jsonl, as `modalities data create_raw_index` does:
    megatron-sft-idx create-raw-index chats.jsonl

  elsewhere, and leave out lines that are no JSON:
    megatron-sft-idx create-raw-index chats.jsonl --output index/chats.idx --drop-faulty

  then, in Python, row 7 and eight parts of the file for eight readers:
    from megatron_sft_idx.formats.modalities import RawRows
    rows = RawRows("chats.jsonl")
    json.loads(rows[7]); rows.ranges(8)
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "create-raw-index",
        help="index the rows of a JSON-lines file for reading them in any order",
        description="Write where each row of a JSON-lines file begins and how long it is: the raw index of Modalities,"
        " readable by its tools and by ours. Every line is parsed once; blank lines are no rows.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("file", type=local_path, metavar="FILE.jsonl", help="plain JSON lines, not compressed")
    parser.add_argument("--output", metavar="FILE.idx", help="the index (default: FILE.idx beside the file)")
    parser.add_argument("--drop-faulty", action="store_true", help="leave out lines that are no JSON, and count them")
    parser.add_argument("--overwrite", action="store_true", help="replace a raw index that is there")
    add_log_interval(parser, "rows", 1_000_000)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    total = os.stat(arguments.file).st_size
    with Progress("indexing", total, unit="B", log_interval=arguments.log_interval, items="rows") as progress:
        report = create_raw_index(
            arguments.file,
            arguments.output,
            drop_faulty=arguments.drop_faulty,
            overwrite=arguments.overwrite,
            on_progress=progress.update,
        )
    line = f"wrote {report.index_path}: {report.num_rows:,} rows"
    if report.num_blank:
        line += f", blank lines left out: {report.num_blank:,}"
    if report.num_faulty:
        line += f", lines that are no JSON left out: {report.num_faulty:,}"
    print(line)
