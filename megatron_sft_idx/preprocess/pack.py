"""A corpus, or packs of another capacity, to packed shards: plan on the lengths, then gather."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.packs.split import refuse_other_splits
from megatron_sft_idx.preprocess.gather import CorpusReader, write_packs
from megatron_sft_idx.preprocess.outputs import Output, Packing, PackOptions, make_room, output_prefixes, plan_packs
from megatron_sft_idx.preprocess.overlong import Overlong
from megatron_sft_idx.preprocess.progress import Progress
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.fingerprints import source_of
from megatron_sft_idx.shard.prefix import drop_remains, is_set_aside, parts_held, publish_all
from megatron_sft_idx.storage import require_local

__all__ = ["Overlong", "PackOptions", "PackReport", "pack_report", "pack_shard"]


@dataclass(slots=True)
class PackReport:
    """What packing did.

    Attributes:
        sequences: sequences in the packs.
        packs: packs written.
        tokens: tokens in them.
        trained_tokens: positions trained on.
        masked_packs: packs with no trained position.
        fill: tokens over packs times capacity.
        lower_bound: no packing has fewer packs.
        longest: tokens in the longest pack.
        most_sequences: sequences in the pack that has most.
        method: the method whose plan was taken.
        overlong: sequences longer than the capacity.
        dropped_tokens: tokens of dropped sequences, or behind the cut of truncated ones.
        untrained_by_cut: positions that were trained on and whose label now lies behind a cut.
    """

    sequences: int
    packs: int
    tokens: int
    trained_tokens: int
    masked_packs: int
    fill: float
    lower_bound: int
    longest: int
    most_sequences: int
    method: str
    overlong: int
    dropped_tokens: int
    untrained_by_cut: int


def pack_shard(
    source: Shard,
    prefix: str,
    options: PackOptions,
    *,
    shards: int = 1,
    overwrite: bool = False,
    keep: bool = False,
    log_interval: int = 0,
) -> PackReport:
    """Pack the sequences of ``source`` into a new shard at ``prefix``, or several.

    Memory: some 40 bytes a sequence for the plan, and a few MiB for the tokens.

    Args:
        source: a tokenised corpus, or packs.
        prefix: of the packed shard, or what the prefixes of several begin with.
        options: how its sequences are packed.
        shards: how many shards; their packs differ by one at most.
        overwrite: replace what is at the prefixes.
        keep: leave shards that are there and are the very ones that would be made.
        log_interval: sequences between two lines of progress where there is no terminal; 0 for silence.

    Raises:
        SequenceError: sequences longer than the capacity, where they are not to be dropped, truncated or split.
        FormatError: an option that cannot be, nothing left to pack, or ``prefix`` is that of the source.
    """
    _require_apart(source, prefix, shards)
    reader, header = CorpusReader(source), source.header
    packing = plan_packs(reader.lengths, options, shards=shards, source=source.prefix)
    outputs = list(
        packing.outputs(
            prefix,
            header.metadata,
            _identity(header),
            reader.count_trained(packing.cuts.parted, packing.cuts.parted_at),
            token_dtype=header.token_dtype.name,
            mask_dtype=header.mask_dtype.name,
            pad_id=header.pad_id,
        )
    )
    total = len(packing.cuts.lengths)
    with Progress("packing", total, unit="seq", log_interval=log_interval, items="sequences") as progress:
        if shards == 1:
            with outputs[0].writer(overwrite=overwrite) as writer:
                write_packs(reader, packing.run(0), writer, progress.update)
                return pack_report([writer.finalize()])
        # What one shard replaces stays until that is whole; of several, until all are.
        with parts_held(prefix):
            kept = make_room(outputs, overwrite=overwrite, keep=keep)
            headers = _pack_all(reader, packing, outputs, kept, overwrite, progress)
            publish_all([paths for output in outputs if is_set_aside(paths := ShardPaths.of(output.prefix))])
    return pack_report(headers)


def _pack_all(
    reader: CorpusReader,
    packing: Packing,
    outputs: Sequence[Output],
    kept: Mapping[str, Header],
    overwrite: bool,
    progress: Progress,
) -> list[Header]:
    """Write the shards that are not kept, and set them aside."""
    headers: list[Header] = []
    made: list[ShardPaths] = []
    try:
        for number, output in enumerate(outputs):
            run = packing.run(number)
            if (found := kept.get(output.prefix)) is not None:
                progress.update(len(run.selection), len(run.selection))
                headers.append(found)
                continue
            with output.writer(overwrite=overwrite) as writer:
                write_packs(reader, run, writer, progress.update)
                headers.append(writer.set_aside())
            made.append(ShardPaths.of(output.prefix))
    except Exception:  # what is interrupted can be gone on with
        for paths in made:
            drop_remains(paths)
        raise
    return headers


def _require_apart(source: Shard, prefix: str, shards: int) -> None:
    """FormatError where the output would replace its source, or lie beside shards that it could be taken for."""
    for path in (source.prefix, prefix):
        require_local(path, "packing")
    where = os.path.realpath(ShardPaths.of(source.prefix).seq_idx)
    if where in (os.path.realpath(ShardPaths.of(path).seq_idx) for path in output_prefixes(prefix, shards)):
        raise FormatError(f"{prefix}: this is the shard to be packed, which would be replaced; choose another prefix")
    if shards > 1:
        refuse_other_splits(prefix, shards)


def _identity(source: Header) -> str:
    """What packed shards call the sequences: by their input where they were tokenised from it, else by their id."""
    tokenised = "packing" not in source.metadata
    return (source_of(source) if tokenised else None) or source.shard_id.hex()


def pack_report(headers: Sequence[Header]) -> PackReport:
    """What the headers of a run's shards say of how they were packed."""
    first = headers[0]
    packing: dict[str, Any] = first.metadata["packing"]
    packs, tokens = (sum(getattr(header, name) for header in headers) for name in ("num_packs", "num_tokens"))
    return PackReport(
        sequences=sum(header.num_sequences for header in headers),
        packs=packs,
        tokens=tokens,
        trained_tokens=sum(header.num_trained_tokens for header in headers),
        masked_packs=sum(header.num_masked_packs for header in headers),
        fill=tokens / (packs * first.capacity),
        lower_bound=packing["lower_bound"],
        longest=max(header.longest_pack for header in headers),
        most_sequences=max(header.most_sequences for header in headers),
        method=packing["chosen"],
        overlong=packing["overlong_sequences"],
        dropped_tokens=packing["dropped_tokens"],
        untrained_by_cut=packing["untrained_by_cut"],
    )
