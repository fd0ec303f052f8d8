"""``megatron-sft-idx verify`` and ``rebuild``: whether shards are whole, and what is left of one to a whole one."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from megatron_sft_idx.check import GivenFacts, Rebuilt, rebuild, verify_shard
from megatron_sft_idx.cli.options import Verbs, add_log_interval, add_verb, declare, local_path, natural
from megatron_sft_idx.cli.streams import message_of, print_error
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.layout.files import column_of
from megatron_sft_idx.packs.transfer import shard_nbytes
from megatron_sft_idx.shard.shard_set import find_prefixes
from megatron_sft_idx.storage.progress import Advance, Progress, show_progress, unwatched

_VERIFY_HELP = """\
Check shards against every rule of the format, and say all that is wrong with them.

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
_REBUILD_HELP = """\
Bring back lost or damaged indexes of a shard, or the packs of a killed build.

examples:
  what is wrong, and what would be done; writes nothing:
    megatron-sft-idx rebuild data/train --dry-run

  .idx lost or damaged: comes back byte for byte. .seq.idx lost: comes back from .idx and the data, marked as rebuilt;
  what only it knew is given again:
    megatron-sft-idx rebuild data/train --capacity 4096 --sequence-multiple 8 --pad-id 151643

  both indexes lost: where packs end follows from the masks, and from the token that every sequence ends with; if it
  can be in one way only, the shard comes back, else the command says where it is ambiguous:
    megatron-sft-idx rebuild data/train --eod-id 151645
  the id is taken as a fact: give it only where every sequence was written with it at its end

  a build was killed: its journal is found by itself, and every pack it completed is kept:
    megatron-sft-idx rebuild data/train

Good files are never touched. A file that is replaced stays beside the new one with .damaged added to its name. Tokens,
loss masks and columns cannot be derived from anything: restore them from a copy.
"""
_LINE_MIB = 10_240


def add_parser(verbs: Verbs) -> None:
    """Add both verbs."""
    line = "whether shards are whole and keep every rule of the format"
    declare(
        add_verb(verbs, "verify", line, _VERIFY_HELP, _verify, product=lambda arguments: True),
        """
        shards PREFIX...  prefixes, folders of shards, globs
        --full  read every byte, not only headers, sizes and ends
        --json  print one JSON document instead of text
        --vocab-size N  with --full, every id must be below N (default: what the shard says of its tokenizer)
        """,
    )
    line = "a damaged or incomplete shard to a whole one, as far as it can be derived"
    parser = add_verb(
        verbs, "rebuild", line, _REBUILD_HELP, _rebuild, product=lambda arguments: bool(arguments.dry_run)
    )
    declare(
        parser,
        """
        prefix PREFIX  path that the five files share
        --copied  the .journal and .tmp files of a killed build were copied here from where it ran: take them for its
            own
        --dry-run  say what would happen, write nothing
        """,
        prefix=local_path,
    )
    add_log_interval(parser, "bytes or tokens", 1 << 30)
    declare(
        parser.add_argument_group("what the files do not say any more"),
        """
        --eod-id N  id of the token that every sequence ends with
        --capacity N  default: the longest pack, marked as unknown
        --sequence-multiple M  default: 1, marked as unknown
        --pad-id N  default: unknown
        --token-dtype  default: by .idx, or the sizes of the files
        --mask-dtype  default: by the sizes of the files
        """,
        eod_id=natural,
        pad_id=natural,
        token_dtype={"choices": ("uint16", "int32")},
        mask_dtype={"choices": ("uint8", "float32")},
    )


def _verify(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if arguments.vocab_size and not arguments.full:
        parser.error("--vocab-size: ids are only read with --full")
    results: list[dict[str, Any]] = []
    watch = show_progress(_LINE_MIB) if arguments.full else unwatched
    for prefix in dict.fromkeys(find_prefixes(arguments.shards, incomplete=True)):
        try:
            total = shard_nbytes(prefix) if arguments.full else 0
            with watch(f"verifying {os.path.basename(prefix)}", total) as advance:
                report = verify_shard(prefix, full=arguments.full, vocab_size=arguments.vocab_size, advance=advance)
        except (SFTIndexError, OSError) as error:
            # The other shards are verified all the same.
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


def _rebuild(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    facts = GivenFacts(
        token_dtype=np.dtype(arguments.token_dtype) if arguments.token_dtype else None,
        mask_dtype=np.dtype(arguments.mask_dtype) if arguments.mask_dtype else None,
        capacity=arguments.capacity,
        sequence_multiple=arguments.sequence_multiple,
        pad_id=arguments.pad_id,
        eod_id=arguments.eod_id,
    )

    @contextmanager
    def watch(what: str, total: int) -> Iterator[Advance]:
        interval = arguments.log_interval
        with Progress(what, total, unit="", log_interval=interval, items="done") as progress:
            yield lambda done: progress.update(done, done)

    report = rebuild(arguments.prefix, facts, copied=arguments.copied, dry_run=arguments.dry_run, watch=watch)
    _show(report)
    if not report.opens:
        raise FormatError(f"{report.prefix}: no whole shard can be made of what is left; see the lines above")
    if not report.whole:
        raise FormatError(
            f"{report.prefix}: columns are lost, the rest is whole; see the lines above, or write it without them:"
            f" megatron-sft-idx merge {report.prefix} --allow-loss --output-prefix NEW"
        )


def _show(report: Rebuilt) -> None:
    for file in report.files:
        if file.state == "good" and column_of(file.path):
            continue
        state = f"would be {file.state}" if report.dry_run and file.state == "rebuilt" else file.state
        print(": ".join(part for part in (file.path, state, file.fault, file.remedy) if part))
    for path in report.kept:
        print(f"{path}: the damaged file; remove it when it is no longer of use")
    if report.note:
        print(f"{report.prefix}: {report.note}")
    if report.dry_run:
        print("nothing was written")
    elif report.changed and report.whole:
        print(f"{report.prefix}: a whole shard, every checksum verified")
