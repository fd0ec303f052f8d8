"""``megatron-sft-idx copy``: shards from place to place, object stores among them."""

from __future__ import annotations

import argparse

from megatron_sft_idx.cli.options import HelpFormatter, Verbs, add_log_interval
from megatron_sft_idx.packs.buckets import copy_shard
from megatron_sft_idx.packs.transfer import check_destinations, destinations, shard_nbytes
from megatron_sft_idx.shard.columns import columns_beside
from megatron_sft_idx.shard.shard_set import find_prefixes
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.progress import shown

__all__ = ["add_parser"]

_EXAMPLES = """\
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
    """Add the verb."""
    parser = verbs.add_parser(
        "copy",
        help="shards to and from object stores, or other folders",
        description="Copy shards between local folders and object stores, every byte checked.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("source", nargs="+", metavar="SRC", help="prefixes, folders of shards, globs; s3:// and msc://")
    parser.add_argument("destination", metavar="DST", help="prefix, or for several shards a folder, which ends in /")
    parser.add_argument("--overwrite", action="store_true", help="replace other shards that are at DST")
    add_log_interval(parser, "MiB", 1024)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    prefixes = find_prefixes(arguments.source)
    targets = destinations(prefixes, arguments.destination)
    beside = columns_beside(prefix for prefix in prefixes if not is_remote(prefix))
    check_destinations(prefixes, targets, beside, overwrite=arguments.overwrite)
    sent = found = aborted = 0
    notes: list[str] = []
    total = sum(shard_nbytes(prefix, beside.get(prefix)) for prefix in prefixes)
    with shown(arguments.log_interval)("copying", total) as advance:
        for source, target in zip(prefixes, targets, strict=True):
            copied = copy_shard(
                source, target, overwrite=arguments.overwrite, beside=beside.get(source), on_progress=advance
            )
            notes += copied.notes
            sent, found = sent + copied.nbytes_sent, found + copied.nbytes_found
            aborted += copied.uploads_aborted
    what = targets[0] if len(targets) == 1 else f"{len(targets):,} shards to {arguments.destination}"
    print(f"copied {what}: {sent:,} bytes sent, {found:,} bytes were there already")
    for note in notes:
        print(f"note: {note}")
    if aborted:
        print(f"unfinished uploads of earlier attempts removed: {aborted:,}")
