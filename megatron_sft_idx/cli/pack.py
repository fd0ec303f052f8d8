"""``megatron-sft-idx pack``: an unpacked shard, or packs of another capacity, to a packed shard."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

from megatron_sft_idx.cli.options import HelpFormatter, Verbs, add_output_options, local_path
from megatron_sft_idx.cli.preprocess import add_packing_options
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.publication import places_of
from megatron_sft_idx.tokenize import Output, Summary, check_summary, pack_shard, packing_options

__all__ = ["add_parser"]

_EXAMPLES = """\
examples:
  pack a tokenised corpus (preprocess --keep-corpus) for another capacity, without tokenising again:
    megatron-sft-idx pack data/train.unpacked --seq-length 32768 --output-prefix data/train-32k

  the same for context parallel size 4:
    megatron-sft-idx pack data/train.unpacked --seq-length 32768 --sequence-multiple 8 --output-prefix data/train-cp4
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "pack",
        help="a tokenised corpus, or packs of another capacity, to a packed shard",
        description="Pack the sequences of a shard anew. No text is needed and nothing is tokenised.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("source", type=local_path, metavar="SOURCE", help="prefix of the shard to be packed")
    parser.add_argument(
        "--source",
        dest="sources",
        action="append",
        default=[],
        metavar="NAME",
        help="take the sequences of this input file only, by the name in the column source; may be given again",
    )
    parser.add_argument("--allow-loss", action="store_true", help="leave out columns that have a row a pack")
    add_packing_options(parser)
    add_output_options(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    options = packing_options(vars(arguments))
    if arguments.summary is not None:
        check_summary(arguments.summary, overwrite=arguments.overwrite)
    output = Output(
        arguments.output_prefix,
        shards=arguments.output_shards,
        staging=arguments.staging,
        overwrite=arguments.overwrite,
        summary=arguments.summary,
    )
    source = Shard(arguments.source)
    # What is cut off, or of other sources, is not known before the plan.
    whole = options.overlong not in ("drop", "truncate") and not arguments.sources
    nbytes = source.header.num_tokens * (source.header.token_dtype.itemsize + source.header.mask_dtype.itemsize)
    columns = list(source.columns)
    reads = places_of(ShardPaths.of(arguments.source).with_columns(columns), "the source")
    output.prepare(reads, columns=columns, nbytes=nbytes if whole else 0)
    begin = time.monotonic()
    report = pack_shard(
        source,
        output.local,
        options,
        shards=arguments.output_shards,
        overwrite=arguments.overwrite,
        log_interval=arguments.log_interval,
        sources=arguments.sources,
        allow_loss=arguments.allow_loss,
    )
    seconds = {"packing": time.monotonic() - begin}
    counts = (options.capacity, None, report, seconds)
    summary = Summary(arguments.output_prefix, *counts, shards=arguments.output_shards, options=asdict(options))
    output.publish()
    print(summary)
    if arguments.summary is not None:
        summary.write(arguments.summary, overwrite=arguments.overwrite)
