"""``megatron-sft-idx verify`` and ``rebuild``: check shards, and restore a damaged shard.

``verify`` never writes, and ``rebuild`` never writes to a good file.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from megatron_sft_idx.check import GivenFacts, Rebuilt, Report, rebuild, verify_shard
from megatron_sft_idx.cli.options import Commands, add_command, add_log_interval, declare, local_path, natural
from megatron_sft_idx.cli.streams import message_of, print_error
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.layout.files import column_of
from megatron_sft_idx.lines import print_layout, print_lines
from megatron_sft_idx.packs.transfer import shard_nbytes
from megatron_sft_idx.shard.opening import columns_beside
from megatron_sft_idx.shard.shard_set import distinct, find_prefixes
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.progress import Advance, Progress, show_progress, unwatched

_VERIFY_HELP = """\
Check shards against the rules of the format, and print every problem.

examples:
  after copying: check that all files are present, complete, and of the same shard; takes milliseconds for any size:
    megatron-sft-idx verify data/train

  before a long training: check every byte of every shard in a folder:
    megatron-sft-idx verify --full data/

  for a program: always print one JSON document. Each shard has prefix, ok, findings, notes, and error (the reason why
  it could not be read, or null). Each finding has path, offset, pack (both can be null), rule, found, expected, remedy:
    megatron-sft-idx verify --full --json 'data/train-*' > report.json

  check shards in a bucket; each object is read once, and nothing is stored locally:
    megatron-sft-idx verify --full s3://bucket/data/

Without --full, the command checks headers and their checksums, the sizes of the five files and of columns, and the ends
of all arrays. With --full it also checks the checksums of all files, every byte of .idx against the bytes that Megatron
writes, every pack and mask, every id against the vocabulary, and the header's counts. Rule numbers are explained in
FORMAT.md, which is part of the package. The command never changes a file.

exit code: 0 if all shards are good, 1 if one has a problem, 2 for wrong usage.
"""
_REBUILD_HELP = """\
Rebuild lost or damaged indexes of a shard, or make a shard from the packs of a killed build.

examples:
  show the problems and what would be done, without writing anything:
    megatron-sft-idx rebuild data/train --dry-run

  rebuild a lost or damaged index: .idx byte for byte, .seq.idx from .idx and the data, and marked as rebuilt; pass the
  values that only the lost file contained:
    megatron-sft-idx rebuild data/train --seq-length 4096 --sequence-multiple 8 --pad-id 151643

  both indexes are lost: the ends of packs are found from zeros in the mask and from the token that ends every sequence,
  if only one solution is possible; pass the id only if every sequence was written with it at its end:
    megatron-sft-idx rebuild data/train --eod-id 151645

  a build was killed and cannot be run again: keep every complete pack in data/train.building:
    megatron-sft-idx rebuild data/train

  tokens or masks were damaged, and there is no copy: keep the shard with its current content:
    megatron-sft-idx rebuild data/train --accept-contents

  rebuild the indexes of every shard in a folder:
    megatron-sft-idx rebuild data/

Good files are never changed. A damaged file that is replaced is kept next to the new one, with .damaged added to its
name. Tokens, loss masks and columns cannot be derived from other files: restore them from a copy, make the shard again
with --overwrite, or accept them as they are.

exit code: 0 if all shards are complete, or would be without --dry-run; 1 if something is lost or uncertain; 2 for wrong
usage.
"""
# The argument of both commands.
_SHARDS = "shards PREFIX...  prefixes, folders of shards, or globs"
_LINE_MIB = 10_240


def add_parser(commands: Commands) -> None:
    """Add the commands ``verify`` and ``rebuild``."""
    line = "check that shards are complete and follow all rules of the format"
    declare(
        add_command(commands, "verify", line, _VERIFY_HELP, _verify, product=lambda arguments: True),
        f"""
        {_SHARDS}
        --full  read every byte, not only headers, sizes and the ends of arrays
        --json  print one JSON document instead of text
        --vocab-size N  with --full: every id must be below N (default: the tokenizer's size as recorded in the shard)
        """,
    )
    line = "repair a damaged or incomplete shard, as far as its files allow"
    parser = add_command(
        commands, "rebuild", line, _REBUILD_HELP, _rebuild, product=lambda arguments: bool(arguments.dry_run)
    )
    declare(
        parser,
        f"""
        {_SHARDS}
        --overwrite  replace an existing shard at the prefix with the packs of a killed build
        --accept-contents  if contents do not match their checksums and there is no copy: write the shard again with
            its current content, and list the changed files in its header
        --dry-run  print what would be done, and write nothing
        """,
        shards=local_path,
    )
    add_log_interval(parser, "bytes or tokens", 1 << 30)
    declare(
        parser.add_argument_group("values that cannot be recovered from the remaining files"),
        """
        --eod-id N  id of the token that ends every sequence
        --seq-length N  maximum number of token positions in a pack (default: the length of the longest pack, marked as
            unknown)
        --sequence-multiple M  multiple that sequence lengths were rounded up to for packing (default: 1, marked as
            unknown)
        --pad-id N  the tokenizer's padding id (default: unknown)
        --token-dtype  dtype of token ids (default: from .idx, or from the sizes of the files)
        --mask-dtype  dtype of loss masks (default: from the sizes of the files)
        """,
        eod_id=natural,
        seq_length={"dest": "capacity"},
        pad_id=natural,
        token_dtype={"choices": ("uint16", "int32")},
        mask_dtype={"choices": ("uint8", "float32")},
    )


def _verify(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if arguments.vocab_size and not arguments.full:
        parser.error("--vocab-size needs --full, because ids are only read with --full")
    results: list[dict[str, Any]] = []
    watch = show_progress(_LINE_MIB) if arguments.full else unwatched
    prefixes = _named_prefixes(arguments.shards)

    @cache
    def columns_in(folder: str) -> dict[str, set[str]]:
        return columns_beside(each for each in prefixes if os.path.dirname(each) == folder)

    for prefix, unnamed in prefixes.items():
        try:
            if unnamed is not None:
                raise unnamed
            columns = columns_in(os.path.dirname(prefix))[prefix]
            total = shard_nbytes(prefix) if arguments.full else 0
            with watch(f"verifying {os.path.basename(prefix)}", total) as advance:
                report = verify_shard(
                    prefix, full=arguments.full, vocab_size=arguments.vocab_size, beside=columns, advance=advance
                )
        except (SFTIndexError, OSError) as error:
            # An unreadable shard does not prevent the verification of the others.
            nothing = Report(prefix, arguments.full, (), {}, (), {})
            results.append({**nothing.as_json(), "ok": False, "error": message_of(error)})
            print_error(message_of(error))
            continue
        results.append({**report.as_json(), "error": None})
        if not arguments.json:
            print_lines(report.lines())
    num_bad = sum(not result["ok"] for result in results)
    if arguments.json:
        print_layout(json.dumps({"ok": not num_bad, "shards": results}, indent=2))
    elif len(results) > 1:
        print(_totals(len(results), num_bad, "ok"))
    return 1 if num_bad else 0


def _named_prefixes(shards: Iterable[str]) -> dict[str, SFTIndexError | OSError | None]:
    """Return the prefixes for the arguments, each shard once; or an argument and why it has no shard."""
    prefixes: dict[str, SFTIndexError | OSError | None] = {}
    files: set[str] = set()
    for argument in distinct(shards):
        try:
            found = find_prefixes(argument, incomplete=True)
        except (SFTIndexError, OSError) as error:
            prefixes[argument] = error
            continue
        for prefix in found:
            folder, name = os.path.split(prefix)
            file = prefix if is_remote(prefix) else os.path.join(os.path.realpath(folder), name)
            if file not in files:
                files.add(file)
                prefixes[prefix] = None
    return prefixes


def _rebuild(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> int:
    facts = GivenFacts(
        token_dtype=np.dtype(arguments.token_dtype) if arguments.token_dtype else None,
        mask_dtype=np.dtype(arguments.mask_dtype) if arguments.mask_dtype else None,
        capacity=arguments.capacity,
        sequence_multiple=arguments.sequence_multiple,
        pad_id=arguments.pad_id,
        eod_id=arguments.eod_id,
    )

    @contextmanager
    def watch(stage: str, total: int) -> Iterator[Advance]:
        interval = arguments.log_interval
        with Progress(stage, total, unit="", log_interval=interval, items="done") as progress:
            yield lambda units: progress.update(units, units)

    prefixes, num_bad = _named_prefixes(arguments.shards), 0
    for prefix, unnamed in prefixes.items():
        try:
            if unnamed is not None:
                raise unnamed
            report = rebuild(
                prefix,
                facts,
                overwrite=arguments.overwrite,
                accept_contents=arguments.accept_contents,
                dry_run=arguments.dry_run,
                watch=watch,
            )
        except (SFTIndexError, OSError) as error:
            # A shard that cannot be restored does not prevent restoring the others.
            complaint = message_of(error)
        else:
            _print_report(report, is_one_of_many=len(prefixes) > 1)
            complaint = _complaint(report)
        if complaint:
            num_bad += 1
            print_error(complaint)
    if len(prefixes) > 1:
        print(_totals(len(prefixes), num_bad, "whole") + ("; nothing was written" if arguments.dry_run else ""))
    return 1 if num_bad else 0


def _totals(count: int, num_bad: int, good: str) -> str:
    return f"{count} shards: " + (f"{num_bad} NOT {good}, {count - num_bad} {good}" if num_bad else f"all {good}")


def _complaint(report: Rebuilt) -> str:
    """Return why the shard is not complete, or ""."""
    if not report.opens:
        return f"{report.prefix}: the remaining files are not enough for a complete shard; see the lines above"
    if report.uncertain:
        return f"{report.prefix}: data or columns have changed, and it is unknown which ones; see the lines above"
    if not report.whole:
        rest = "the rest is complete" if report.compared else "the rest follows all rules"
        return (
            f"{report.prefix}: columns are lost, {rest}; see the lines above, or write the shard without them:"
            f" megatron-sft-idx merge {report.prefix} --lossy --output-prefix NEW"
        )
    return ""


def _print_report(report: Rebuilt, *, is_one_of_many: bool) -> None:
    """Print what was found and done. A good shard out of many gets only one line."""
    for file in report.files:
        if file.state == "good" and (is_one_of_many or column_of(file.path)):
            continue
        state = f"would be {file.state}" if report.dry_run and file.state in ("rebuilt", "accepted") else file.state
        print(": ".join(part for part in (file.path, state, file.fault, file.remedy) if part))
    for path in report.kept:
        print(f"{path}: the damaged file; remove it when you no longer need it")
    if report.note:
        print(f"{report.prefix}: {report.note}")
    if report.dry_run:
        if not is_one_of_many:
            print("nothing was written")
    elif report.changed and report.whole and report.compared:
        print(f"{report.prefix}: a complete shard, every checksum verified")
    elif any(file.state == "accepted" for file in report.files):
        print(f"{report.prefix}: follows all rules, but its contents differ from what was written")
    elif report.changed and report.whole:
        print(
            f"{report.prefix}: follows all rules; no checksum was left to verify that its contents are what was written"
        )
