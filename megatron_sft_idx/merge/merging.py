"""Many shards to one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.merge.agreement import Agreement
from megatron_sft_idx.merge.source import SourceShard, nbytes_of
from megatron_sft_idx.merge.target import CopyWriter
from megatron_sft_idx.shard import check_free, read_header
from megatron_sft_idx.shard.prefix import places_of
from megatron_sft_idx.storage.publish import require_apart

__all__ = ["MergeReport", "ProgressCallback", "counting", "merge"]

# Bytes read so far, and in all.
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What merging did.

    Attributes:
        prefix: of the merged shard.
        header: of the merged shard.
        num_sources: shards it was made from.
        notes: what was not compared or differs between them, a sentence each.
    """

    prefix: str
    header: Header
    num_sources: int
    notes: list[str]


def merge(
    sources: Sequence[str | os.PathLike[str]],
    prefix: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    mixed_capacity: bool = False,
    mixed_templates: bool = False,
    durable: bool = True,
    progress: ProgressCallback | None = None,
) -> MergeReport:
    """Write the packs of many shards, in the order given, as one shard.

    Everything is compared before the first byte is written: token and mask dtype, capacity, sequence multiple, pad id,
    tokenizer and chat template. Every byte of the sources is read once and held to its checksum. The merged shard's
    JSON block keeps what the sources have in common and lists where its packs come from (``merge.origin``). Memory
    is a few MiB for packs of any number and size, and some hundred bytes a source; one source is open at a time.

    Args:
        sources: prefixes, in order. One may be given twice; its packs are then there twice.
        prefix: of the merged shard.
        overwrite: replace what is at the prefix.
        mixed_capacity: let capacities differ; the largest is that of the merged shard.
        mixed_templates: let chat templates differ.
        durable: False skips fsync, for files that are thrown away anyway.
        progress: called with bytes read so far and in all.

    Raises:
        ShardNotFoundError: a source is not there.
        FormatError: sources do not go together, or something is at the prefix.
        CorruptShardError: a source breaks F2, F3, O1 or O2; nothing is published.
        OSError: the disk says no; nothing is published, and what was written is removed.
    """
    paths = ShardPaths.of(prefix)
    prefixes = [ShardPaths.of(source).prefix for source in sources]
    read = [place for source in prefixes for place in places_of(source, "a source")]
    require_apart(places_of(paths.prefix, "the output", written=True), read)
    check_free(paths, overwrite=overwrite)
    agreement = Agreement(mixed_capacity=mixed_capacity, mixed_templates=mixed_templates)
    ids, total, trained_tokens, masked_packs = [], 0, 0, 0
    for source in prefixes:
        header = read_header(source)
        agreement.add(source, header)
        ids.append(header.shard_id)
        total += nbytes_of(header)
        trained_tokens += header.num_trained_tokens
        masked_packs += header.num_masked_packs
    tick = counting(progress, total)
    with CopyWriter(paths.prefix, agreement.header(), overwrite=overwrite, durable=durable, nbytes=total) as writer:
        for source, shard_id in zip(prefixes, ids, strict=True):
            shard = SourceShard(source, shard_id, tick)
            shard.verify_indexes()
            writer.append(shard, 0, shard.header.num_packs)
        header = writer.finalize(trained_tokens, masked_packs)
    notes = agreement.notes()
    if again := len(prefixes) - len(set(prefixes)):
        notes.append(f"given more than once, so there more than once: {again:,} of the shards")
    return MergeReport(paths.prefix, header, len(prefixes), notes)


def counting(progress: ProgressCallback | None, total: int) -> Callable[[int], None]:
    """A function that adds up bytes and tells ``progress`` of their sum."""
    done = 0

    def tick(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return tick
