"""``megatron-sft-idx merge`` and ``split``: many shards to one, one to many."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from megatron_sft_idx.cli.options import (
    HelpFormatter,
    Verbs,
    add_log_interval,
    add_staging,
    local_path,
    nbytes,
    positive,
)
from megatron_sft_idx.formats.registry import places
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.split import Parts, split
from megatron_sft_idx.shard.shard_set import find_prefixes
from megatron_sft_idx.storage.progress import shown
from megatron_sft_idx.tokenize import Output

__all__ = ["add_parser"]

_MERGE_EXAMPLES = """\
examples:
  the shards of a folder, in the order of their numbers (part-9 before part-10):
    megatron-sft-idx merge data/parts --output-prefix data/train

  by name, in this order; quoted, so that part-9 comes before part-10, which a shell would turn round:
    megatron-sft-idx merge data/math data/code 'data/part-*' --output-prefix data/mix

  tokenised corpora, whose capacity is that of their longest sequence, to be packed as one:
    megatron-sft-idx merge 'corpus-*' --mixed-capacity --output-prefix corpus
    megatron-sft-idx pack corpus --seq-length 8192 --output-prefix data/train

Megatron's merge_datasets.py joins tokens only, and takes X.loss.bin for a dataset of its own.
"""
_SPLIT_EXAMPLES = """\
examples:
  eight shards, data/train-00000-of-00008 and so on:
    megatron-sft-idx split data/train --shards 8 --output-prefix data/train

  of at most 2 GiB each:
    megatron-sft-idx split data/train --nbytes 2GiB --output-prefix parts/train

  go on after an interruption:
    megatron-sft-idx split data/train --shards 8 --output-prefix data/train --resume
"""


def add_parser(verbs: Verbs) -> None:
    """Add both verbs."""
    parser = verbs.add_parser(
        "merge",
        help="many shards to one",
        description="Copy the packs of many shards into one, in the order given. They must have one token and mask"
        " dtype, capacity, sequence multiple, pad id, tokenizer, chat template and columns; what a shard does not"
        " record is taken to be as in the others, and said. Sources are held to their checksums: a corrupt one is"
        " refused.",
        epilog=_MERGE_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "sources", nargs="+", type=local_path, metavar="SOURCE", help="prefixes, folders of shards, globs; in order"
    )
    parser.add_argument(
        "--mixed-capacity", action="store_true", help="let capacities differ; the merged shard has the largest"
    )
    parser.add_argument("--mixed-templates", action="store_true", help="let chat templates differ")
    parser.add_argument(
        "--allow-loss", action="store_true", help="leave out columns that some shards lack or have of another kind"
    )
    _add_output_options(parser, "path that the five files share, also s3:// or msc://; --data-path takes it")
    add_staging(parser)
    parser.set_defaults(run=_merge)

    parser = verbs.add_parser(
        "split",
        help="one shard to many",
        description="Copy ranges of a shard's packs into shards of their own, in order. The source is held to its"
        " checksums before the first part is published; merging the parts gives the same shard again.",
        epilog=_SPLIT_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("source", type=local_path, metavar="SOURCE", help="prefix of the shard")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--packs", type=positive, metavar="N", help="most packs in a part")
    size.add_argument(
        "--nbytes",
        type=nbytes,
        metavar="SIZE",
        help="most bytes of a part's files, such as 2GiB, headers not counted; a larger pack is alone in its part",
    )
    size.add_argument("--shards", type=positive, metavar="N", help="number of parts, of equally many packs")
    _add_output_options(parser, "what the parts' prefixes begin with: PREFIX-00000-of-00012", local_path)
    parser.add_argument(
        "--resume", action="store_true", help="keep the parts that a split which was interrupted was done with"
    )
    parser.set_defaults(run=_split)


def _add_output_options(parser: argparse.ArgumentParser, prefix: str, accepted: Callable[[str], str] = str) -> None:
    parser.add_argument("--output-prefix", required=True, type=accepted, metavar="PREFIX", help=prefix)
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    add_log_interval(parser, "MiB")


def _once_a_shard(sources: Sequence[str]) -> list[str]:
    """The sources, of those that are files only the first of each shard: a shell's pattern names all five."""
    kept, seen = [], set()
    for source in sources:
        if source.endswith(SUFFIXES):
            prefix = ShardPaths.of(source).prefix
            if prefix in seen:
                continue
            seen.add(prefix)
        kept.append(source)
    return kept


def _merge(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    output = Output(arguments.output_prefix, staging=arguments.staging, overwrite=arguments.overwrite)
    prefixes = find_prefixes(_once_a_shard(arguments.sources))
    output.prepare(place for prefix in prefixes for place in places(prefix, "sft-idx", "a source"))
    report = merge(
        prefixes,
        output.local,
        overwrite=arguments.overwrite,
        mixed_capacity=arguments.mixed_capacity,
        mixed_templates=arguments.mixed_templates,
        allow_loss=arguments.allow_loss,
        watch=shown(arguments.log_interval),
    )
    output.publish()
    header = report.header
    lines = [
        f"wrote {output.prefix}",
        f"shards merged   {report.num_sources:,}",
        f"packs           {header.num_packs:,}",
        f"sequences       {header.num_sequences:,}",
        f"tokens          {header.num_tokens:,}",
        f"trained tokens  {header.num_trained_tokens:,}",
        *(f"note            {note}" for note in report.notes),
    ]
    print("\n".join(lines))


def _split(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    report = split(
        arguments.source,
        arguments.output_prefix,
        Parts(packs=arguments.packs, nbytes=arguments.nbytes, shards=arguments.shards),
        overwrite=arguments.overwrite,
        resume=arguments.resume,
        watch=shown(arguments.log_interval),
    )
    kept = f", {report.num_kept:,} of them kept" if report.num_kept else ""
    print(f"parts           {len(report.prefixes):,}{kept}")
    print(f"from            {report.prefixes[0]}")
    print(f"to              {report.prefixes[-1]}")
