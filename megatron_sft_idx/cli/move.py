"""``megatron-sft-idx merge``, ``split`` and ``copy``: join, divide and copy shards."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron_sft_idx.cli.options import (
    Commands,
    add_command,
    add_log_interval,
    add_staging,
    declare,
    local_path,
    nbytes,
)
from megatron_sft_idx.formats.registry import places
from megatron_sft_idx.lines import found_unread, print_lines
from megatron_sft_idx.packs.buckets import copy_shard
from megatron_sft_idx.packs.destination import Destination
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.split import SplitSize, split
from megatron_sft_idx.packs.transfer import check_destinations, destinations, shard_nbytes
from megatron_sft_idx.shard.opening import columns_beside
from megatron_sft_idx.shard.shard_set import find_prefixes
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.progress import show_progress

_MERGE_HELP = """\
Copy the packs of many shards into one, in the order of the sources. All sources must have the same token and mask
dtype, capacity, sequence multiple, pad id, tokenizer, chat template and columns. If a source does not record one of
these values, the value of the others is assumed, and a note is printed. If a source does not match its checksums,
nothing is written.

examples:
  merge the shards of a folder, in the order of their numbers (part-9 before part-10):
    megatron-sft-idx merge data/parts --output-prefix data/train

  merge shards in this order; the glob is quoted, because a shell would sort part-10 before part-9:
    megatron-sft-idx merge data/math data/code 'data/part-*' --output-prefix data/mix

  pack several tokenised corpora together; the capacity of each is the length of its longest sequence:
    megatron-sft-idx merge 'corpus-*' --mixed-capacity --output-prefix corpus
    megatron-sft-idx pack corpus --seq-length 8192 --output-prefix data/train

Do not merge shards with Megatron's merge_datasets.py: it only joins tokens, and treats X.loss.bin as another dataset.
"""
_SPLIT_HELP = """\
Divide a shard into several: each output contains the next packs, in order. The checksums of the source are verified
before the first output is published. Merging the outputs gives the same shard again.

examples:
  make eight shards, data/train-00000-of-00008 and so on:
    megatron-sft-idx split data/train --shards 8 --output-prefix data/train

  make shards of at most 2 GiB each:
    megatron-sft-idx split data/train --nbytes 2GiB --output-prefix parts/train

If it is interrupted, run the same command again: it keeps the complete outputs and makes the missing ones.
"""
_COPY_HELP = """\
Copy shards between local folders and object stores, and verify every byte.

examples:
  copy a shard to another folder:
    megatron-sft-idx copy data/train backup/train

  copy a shard into a bucket, and back:
    megatron-sft-idx copy data/train s3://bucket/sft/train
    megatron-sft-idx copy s3://bucket/sft/train data/train

  copy all shards of a folder, or all that match a glob, under the same names; a remote folder ends in /:
    megatron-sft-idx copy data/parts s3://bucket/sft/
    megatron-sft-idx copy 's3://bucket/sft/part-*' data/parts/

  copy to Google Cloud Storage or Azure, through a profile of multi-storage-client:
    megatron-sft-idx copy data/train msc://profile/sft/train

Every byte is verified with the checksums in the shard's header as it is copied. Columns are copied too, including
columns that were attached later. If another shard is replaced, its columns are removed with it. The .seq.idx is copied
last, and a prefix without it is not a shard: a copy that failed or was killed leaves nothing that looks like a shard.
Run the same command again to continue: it does not send complete files again, and removes the rest of a killed upload.

s3:// takes endpoint and credentials from the same places as the AWS tools (AWS_ENDPOINT_URL, AWS_PROFILE, ...). While
a remote prefix is being written, the object PREFIX.building records the shard, so that uploads of two shards to one
prefix cannot mix. On s3://, the store itself rejects a second writer, and overwriting; on msc://, this command checks
first.

exit code: 0 if all shards are at DST, 1 if something went wrong, 2 for wrong usage.
"""


def add_parser(commands: Commands) -> None:
    """Add the commands ``merge``, ``split`` and ``copy``."""
    parser = add_command(commands, "merge", "merge many shards into one", _MERGE_HELP, _merge)
    declare(
        parser,
        """
        sources SOURCE...  prefixes, folders of shards, or globs, in the order of their packs
        --mixed-capacity  accept shards of different capacities; the merged shard has the largest
        --mixed-templates  accept shards of different chat templates
        --lossy  leave out columns that are missing in some shards, differ in kind, or are damaged
        """,
        sources=local_path,
    )
    _add_output_options(parser, "path that the five files share, also s3:// or msc://; pass it to --data-path")
    add_staging(parser)

    parser = add_command(commands, "split", "split one shard into several", _SPLIT_HELP, _split)
    declare(parser, "source SOURCE  prefix of the shard", source=local_path)
    declare(
        parser.add_mutually_exclusive_group(required=True),
        """
        --packs N  maximum number of packs per output
        --nbytes SIZE  maximum size of an output's files without headers, such as 2GiB; a larger pack gets an output for
            itself
        --shards N  number of outputs; their numbers of packs differ by at most one
        """,
        nbytes=nbytes,
    )
    _add_output_options(parser, "beginning of the outputs' prefixes: PREFIX-00000-of-00012", local_path)

    parser = add_command(
        commands, "copy", "copy shards to another folder, or to and from an object store", _COPY_HELP, _copy
    )
    declare(
        parser,
        """
        source SRC...  prefixes, folders of shards, or globs, also at s3:// or msc://
        destination DST  prefix; for several shards a folder, which ends in /
        --overwrite  replace other shards at DST
        """,
    )
    add_log_interval(parser, "MiB", 1024)


def _add_output_options(parser: argparse.ArgumentParser, prefix: str, accepted: Callable[[str], str] = str) -> None:
    declared = f"--output-prefix PREFIX  {prefix}\n--overwrite  replace existing shards"
    declare(parser, declared, output_prefix={"required": True, "type": accepted})
    add_log_interval(parser, "MiB")


def _merge(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    output = Destination(arguments.output_prefix, staging=arguments.staging, overwrite=arguments.overwrite)
    prefixes = find_prefixes(arguments.sources)
    output.prepare(place for prefix in prefixes for place in places(prefix, "sft-idx", "a source"))
    report = merge(
        prefixes,
        output.local,
        overwrite=arguments.overwrite,
        mixed_capacity=arguments.mixed_capacity,
        mixed_templates=arguments.mixed_templates,
        lossy=arguments.lossy,
        watch=show_progress(arguments.log_interval),
    )
    output.publish()
    header = report.header
    lines = [
        f"found {output.prefix}: {found_unread(output.prefix)}" if report.found else f"wrote {output.prefix}",
        f"shards merged   {report.num_sources:,}",
        f"packs           {header.num_packs:,}",
        f"sequences       {header.num_sequences:,}",
        f"tokens          {header.num_tokens:,}",
        f"trained tokens  {header.num_trained_tokens:,}",
        *(f"note            {note}" for note in report.notes),
    ]
    print_lines(lines)


def _split(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    report = split(
        arguments.source,
        arguments.output_prefix,
        SplitSize(packs=arguments.packs, nbytes=arguments.nbytes, shards=arguments.shards),
        overwrite=arguments.overwrite,
        watch=show_progress(arguments.log_interval),
    )
    kept = f", {report.num_kept:,} of them already existed" if report.num_kept else ""
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
    destination = targets[0] if len(targets) == 1 else f"{len(targets):,} shards to {arguments.destination}"
    print(f"copied {destination}: {sent:,} bytes sent, {present:,} bytes already there")
    for note in notes:
        print(f"note: {note}")
    if aborted:
        print(f"unfinished uploads of earlier attempts removed: {aborted:,}")
