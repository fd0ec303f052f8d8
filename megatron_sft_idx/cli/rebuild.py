"""``megatron-sft-idx rebuild``: what is left of a shard, to a shard again."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from megatron_sft_idx.check import Known, Rebuilt, rebuild
from megatron_sft_idx.cli.options import HelpFormatter, Verbs, add_log_interval, local_path, natural, positive
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.files import column_of
from megatron_sft_idx.storage.progress import Advance, Progress

__all__ = ["add_parser"]

_EXAMPLES = """\
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


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "rebuild",
        help="a damaged or incomplete shard to a whole one, as far as it can be derived",
        description="Bring back lost or damaged indexes of a shard, or the packs of a killed build.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("prefix", type=local_path, metavar="PREFIX", help="path that the five files share")
    parser.add_argument(
        "--copied",
        action="store_true",
        help="the .journal and .tmp files of a killed build were copied here from where it ran: take them for its own",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would happen, write nothing")
    add_log_interval(parser, "bytes or tokens", 1 << 30)
    group = parser.add_argument_group("what the files do not say any more")
    group.add_argument("--eod-id", type=natural, metavar="N", help="id of the token that every sequence ends with")
    group.add_argument("--capacity", type=positive, metavar="N", help="default: the longest pack, marked as unknown")
    group.add_argument("--sequence-multiple", type=positive, metavar="M", help="default: 1, marked as unknown")
    group.add_argument("--pad-id", type=natural, metavar="N", help="default: unknown")
    group.add_argument("--token-dtype", choices=("uint16", "int32"), help="default: by .idx, or the sizes of the files")
    group.add_argument("--mask-dtype", choices=("uint8", "float32"), help="default: by the sizes of the files")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    known = Known(
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

    report = rebuild(arguments.prefix, known, copied=arguments.copied, dry_run=arguments.dry_run, watch=watch)
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
