"""``megatron-sft-idx verify``: shards against every rule of the format."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from megatron_sft_idx.check import Report, verify_shard
from megatron_sft_idx.cli.options import HelpFormatter, Verbs, positive
from megatron_sft_idx.cli.streams import message_of, print_error
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.packs.transfer import shard_nbytes
from megatron_sft_idx.shard.shard_set import find_prefixes
from megatron_sft_idx.storage.progress import shown

__all__ = ["add_parser"]

_EXAMPLES = """\
examples:
  after copying: are all files there, whole, and of one shard? (milliseconds, whatever their size)
    megatron-sft-idx verify data/train

  before a long run: every byte of every shard in a folder
    megatron-sft-idx verify --full data/

  for a program: one JSON document, in which each finding has path, offset, pack, rule, found, expected, remedy
    megatron-sft-idx verify --full --json 'data/train-*' > report.json

  in a bucket, each object read once where it lies
    megatron-sft-idx verify --full s3://bucket/data/

Without --full: the header and its checksum, the sizes of the five files, the ends of all arrays. With it: the checksums
of all files, .idx byte for byte as Megatron writes it, every pack and mask, every id against the vocabulary, the
header's counts. Rules are numbered as in FORMAT.md, which comes with the package. Nothing is ever changed.

exit code: 0 all shards are good, 1 something was found, 2 wrong usage.
"""
_LINE_MIB = 10_240


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "verify",
        help="whether shards are whole and keep every rule of the format",
        description="Check shards against every rule of the format, and say all that is wrong with them.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("shards", nargs="+", metavar="PREFIX", help="prefixes, folders of shards, globs")
    parser.add_argument("--full", action="store_true", help="read every byte, not only headers, sizes and ends")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="with --full, every id must be below N (default: what the shard says of its tokenizer)",
    )
    parser.set_defaults(run=_run, prints_result=True)


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if arguments.vocab_size and not arguments.full:
        parser.error("--vocab-size: ids are only read with --full")
    results: list[dict[str, Any]] = []
    for prefix in dict.fromkeys(find_prefixes(arguments.shards, incomplete=True)):
        try:
            report = _verify(prefix, arguments)
        except (SFTIndexError, OSError) as error:
            # One that cannot be read is no reason to leave the others unread.
            results.append({"prefix": prefix, "ok": False, "error": message_of(error)})
            print_error(message_of(error))
            continue
        results.append(report.as_json())
        if not arguments.json:
            print("\n".join(report.lines()), flush=True)
    bad = sum(not result["ok"] for result in results)
    if arguments.json:
        print(json.dumps({"ok": not bad, "shards": results}, indent=2))
    elif len(results) > 1:
        print(f"{len(results)} shards: " + (f"{bad} NOT ok, {len(results) - bad} ok" if bad else "all ok"))
    return 1 if bad else 0


def _verify(prefix: str, arguments: argparse.Namespace) -> Report:
    if not arguments.full:
        return verify_shard(prefix)
    what = f"verifying {os.path.basename(prefix)}"
    with shown(_LINE_MIB)(what, shard_nbytes(prefix)) as advance:
        return verify_shard(prefix, full=True, vocab_size=arguments.vocab_size, advance=advance)
