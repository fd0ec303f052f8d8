"""``megatron-sft-idx merge``, ``split`` and ``copy``: many shards to one, one to many, and from place to place."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from megatron_sft_idx.cli.options import Verbs, add_log_interval, add_staging, add_verb, declare, local_path, nbytes
from megatron_sft_idx.formats.registry import places
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.packs.buckets import copy_shard
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.split import SplitSize, split
from megatron_sft_idx.packs.transfer import check_destinations, destinations, shard_nbytes
from megatron_sft_idx.shard.opening import columns_beside
from megatron_sft_idx.shard.shard_set import find_prefixes
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.progress import show_progress

_MERGE_HELP = """\
Copy the packs of many shards into one, in the order given. They must have one token and mask dtype, capacity, sequence
multiple, pad id, tokenizer, chat template and columns; what a shard does not record is taken to be as in the others,
and said. Sources are held to their checksums: a corrupt one is refused.

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
_SPLIT_HELP = """\
Copy ranges of a shard's packs into shards of their own, in order. The source is held to its checksums before the first
part is published; merging the parts gives the same shard again.

examples:
  eight shards, data/train-00000-of-00008 and so on:
    megatron-sft-idx split data/train --shards 8 --output-prefix data/train

  of at most 2 GiB each:
    megatron-sft-idx split data/train --nbytes 2GiB --output-prefix parts/train

  go on after an interruption:
    megatron-sft-idx split data/train --shards 8 --output-prefix data/train --resume
"""
_COPY_HELP = """\
Copy shards between local folders and object stores, every byte checked.

examples:
  a shard to another folder:
    megatron-sft-idx copy data/train backup/train

  a shard into a bucket, and back:
    megatron-sft-idx copy data/train s3://bucket/sft/train
    megatron-sft-idx copy s3://bucket/sft/train data/train

  all shards of a folder, and those of one name, under their own names; a remote folder ends in /:
    megatron-sft-idx copy data/parts s3://bucket/sft/
    megatron-sft-idx copy 's3://bucket/sft/part-*' data/parts/

  to Google Cloud Storage or Azure, by a profile of multi-storage-client:
    megatron-sft-idx copy data/train msc://profile/sft/train

Every byte is held to the checksums of the shard's header on the way. Columns go along, attached ones too; those of
another shard that is replaced go with it. The .seq.idx, which makes a shard, comes last. A copy that failed or was
killed leaves nothing that looks like a shard; the same command goes on: what is there complete is not sent again, and
parts that a killed upload left are removed. s3:// finds endpoint and credentials where the AWS tools do
(AWS_ENDPOINT_URL, AWS_PROFILE, ...). While a remote prefix is being written, PREFIX.upload says which shard has it; two
uploads of different shards to one prefix cannot mix. Over msc:// that, and refusing to overwrite, is looked up before
writing instead of being asked of the store in one step.

exit code: 0 all shards are there, 1 something went wrong, 2 wrong usage.
"""


def add_parser(verbs: Verbs) -> None:
    """Add the three verbs."""
    parser = add_verb(verbs, "merge", "many shards to one", _MERGE_HELP, _merge)
    declare(
        parser,
        """
        sources SOURCE...  prefixes, folders of shards, globs; in order
        --mixed-capacity  let capacities differ; the merged shard has the largest
        --mixed-templates  let chat templates differ
        --allow-loss  leave out columns that some shards lack or have of another kind
        """,
        sources=local_path,
    )
    _add_output_options(parser, "path that the five files share, also s3:// or msc://; --data-path takes it")
    add_staging(parser)

    parser = add_verb(verbs, "split", "one shard to many", _SPLIT_HELP, _split)
    declare(parser, "source SOURCE  prefix of the shard", source=local_path)
    declare(
        parser.add_mutually_exclusive_group(required=True),
        """
        --packs N  most packs in a part
        --nbytes SIZE  most bytes of a part's files, such as 2GiB, headers not counted; a larger pack is alone in its
            part
        --shards N  number of parts, of equally many packs
        """,
        nbytes=nbytes,
    )
    _add_output_options(parser, "what the parts' prefixes begin with: PREFIX-00000-of-00012", local_path)
    declare(parser, "--resume  keep the parts that a split which was interrupted was done with")

    parser = add_verb(verbs, "copy", "shards to and from object stores, or other folders", _COPY_HELP, _copy)
    declare(
        parser,
        """
        source SRC...  prefixes, folders of shards, globs; s3:// and msc://
        destination DST  prefix, or for several shards a folder, which ends in /
        --overwrite  replace other shards that are at DST
        """,
    )
    add_log_interval(parser, "MiB", 1024)


def _add_output_options(parser: argparse.ArgumentParser, prefix: str, accepted: Callable[[str], str] = str) -> None:
    declared = f"--output-prefix PREFIX  {prefix}\n--overwrite  replace what is there"
    declare(parser, declared, output_prefix={"required": True, "type": accepted})
    add_log_interval(parser, "MiB")


def _one_source_a_shard(sources: Sequence[str]) -> list[str]:
    """The sources without further files of a shard of which one is named: a shell's pattern names all five."""
    distinct, seen = [], set()
    for source in sources:
        if source.endswith(SUFFIXES):
            prefix = ShardPaths.of(source).prefix
            if prefix in seen:
                continue
            seen.add(prefix)
        distinct.append(source)
    return distinct


def _merge(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    from megatron_sft_idx.tokenize import (
        Destination,  # imported late: it brings tokenizers and templates, which copy does not need
    )

    output = Destination(arguments.output_prefix, staging=arguments.staging, overwrite=arguments.overwrite)
    prefixes = find_prefixes(_one_source_a_shard(arguments.sources))
    output.prepare(place for prefix in prefixes for place in places(prefix, "sft-idx", "a source"))
    report = merge(
        prefixes,
        output.local,
        overwrite=arguments.overwrite,
        mixed_capacity=arguments.mixed_capacity,
        mixed_templates=arguments.mixed_templates,
        allow_loss=arguments.allow_loss,
        watch=show_progress(arguments.log_interval),
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
        SplitSize(packs=arguments.packs, nbytes=arguments.nbytes, shards=arguments.shards),
        overwrite=arguments.overwrite,
        resume=arguments.resume,
        watch=show_progress(arguments.log_interval),
    )
    kept = f", {report.num_kept:,} of them kept" if report.num_kept else ""
    print(f"parts           {len(report.prefixes):,}{kept}")
    print(f"from            {report.prefixes[0]}")
    print(f"to              {report.prefixes[-1]}")


def _copy(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    prefixes = find_prefixes(arguments.source)
    targets = destinations(prefixes, arguments.destination)
    beside = columns_beside(prefix for prefix in prefixes if not is_remote(prefix))
    check_destinations(prefixes, targets, beside, overwrite=arguments.overwrite)
    sent = present = aborted = 0
    notes: list[str] = []
    total = sum(shard_nbytes(prefix, beside.get(prefix)) for prefix in prefixes)
    with show_progress(arguments.log_interval)("copying", total) as advance:
        for source, target in zip(prefixes, targets, strict=True):
            copied = copy_shard(
                source, target, overwrite=arguments.overwrite, beside=beside.get(source), on_progress=advance
            )
            notes += copied.notes
            sent, present = sent + copied.nbytes_sent, present + copied.nbytes_found
            aborted += copied.uploads_aborted
    what = targets[0] if len(targets) == 1 else f"{len(targets):,} shards to {arguments.destination}"
    print(f"copied {what}: {sent:,} bytes sent, {present:,} bytes were there already")
    for note in notes:
        print(f"note: {note}")
    if aborted:
        print(f"unfinished uploads of earlier attempts removed: {aborted:,}")
