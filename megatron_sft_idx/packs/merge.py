"""Many shards to one: whether they go together, and what the header of the one says."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import WEIGHTED_BY, ColumnSpec, weighted_by
from megatron_sft_idx.layout.files import listed_media
from megatron_sft_idx.packs.joined_columns import JoinedColumns, common_entries
from megatron_sft_idx.packs.provenance import MAX_RUNS, ORIGIN, PER_SHARD, OriginRun, extend_runs, origin_runs, own_run
from megatron_sft_idx.packs.run import nbytes_of
from megatron_sft_idx.shard import BuildOptions, Shard, ShardWriter, check_free, read_header
from megatron_sft_idx.shard.opening import columns_beside, require_same
from megatron_sft_idx.shard.publication import finish_interrupted, places_of
from megatron_sft_idx.shard.shard_set import require_alike
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.storage.progress import Watch, unwatched
from megatron_sft_idx.storage.publish import require_apart

if TYPE_CHECKING:
    from megatron_sft_idx.check.rules import Finding

_COPY = "copy one with ShardWriter(..., {}=...).add_shard(Shard(...)), which converts, and merge the copy"
_TOKENIZERS = "they come from different tokenizers: preprocess one again with the tokenizer of the other"
_CAPACITY = (
    "pack one again (megatron-sft-idx pack SHARD --seq-length N), or take the largest with mixed_capacity"
    " (--mixed-capacity), as for tokenised corpora that are packed afterwards"
)
_MULTIPLE = "pack one again (megatron-sft-idx pack SHARD --seq-length N --sequence-multiple M)"
_TEMPLATES = "preprocess one again with the template of the other, or pass mixed_templates (--mixed-templates)"
# Masks are label-aligned everywhere: a header that claims anything else is refused when it is read (rule H5).
# What all shards must have in common: its name in messages; what gives it, None where a shard does not record it; and
# how shards that differ in it can become one all the same.
_FIELDS: tuple[tuple[str, Callable[[Header], Any], str], ...] = (
    ("token dtype", lambda header: header.token_dtype, _COPY.format("token_dtype")),
    ("mask dtype", lambda header: header.mask_dtype, _COPY.format("mask_dtype")),
    # An empty shard has the capacity 0 where it was to be that of its longest pack.
    ("capacity", lambda header: header.capacity or None, _CAPACITY),
    ("sequence multiple", lambda header: header.sequence_multiple, _MULTIPLE),
    ("pad id", lambda header: header.pad_id, _TOKENIZERS),
    ("tokenizer", lambda header: header.tokenizer, _TOKENIZERS),
    ("chat template", lambda header: header.template, _TEMPLATES),
)
# The entries of the JSON block that some of these are read from.
_BLOCKS = {"tokenizer": "tokenizer", "chat template": "chat_template"}


def _agree(prefixes: Sequence[str], headers: Sequence[Header], mixed: Collection[str]) -> tuple[Header, list[str]]:
    """The header of the merged shard, without its origin and with the counts of the first shard; and notes.

    The notes say what could not be compared, and what differs. ``mixed`` are the names in ``_FIELDS`` of what may
    differ. Of different capacities the merged shard has the largest. FormatError: two shards do not go together; the
    error names both values and prefixes.
    """
    notes: list[str] = []
    unrecorded: list[str] = []
    blocks: dict[str, Any] = {}
    for name, value_of, remedy in _FIELDS:
        values = list(map(value_of, headers))
        recorded = [number for number, value in enumerate(values) if value is not None]
        if not recorded:
            unrecorded.append(name)
            continue
        if name not in mixed:
            require_alike(prefixes, values, name, f"a merged shard has one: {remedy}")
        first = recorded[0]
        if missing := [prefix for prefix, value in zip(prefixes, values, strict=True) if value is None]:
            others = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
            notes.append(f"{missing[0]}{others}: {name} not recorded, taken to be that of {prefixes[first]}")
        if any(values[number] != values[first] for number in recorded):
            notes.append(f"{name}: not the same in all shards, as was allowed")
        elif name in _BLOCKS:
            blocks[_BLOCKS[name]] = headers[first].metadata[_BLOCKS[name]]
    if unrecorded:
        notes.append(f"recorded in none of the shards, so not compared: {', '.join(unrecorded)}")
    # A merged shard must not be weighted by a column that some of its masks have been multiplied by.
    if weights := sorted({name for each in headers for name in weighted_by(each.metadata)}):
        blocks[WEIGHTED_BY] = weights
    aside = PER_SHARD | {*_BLOCKS.values(), WEIGHTED_BY}
    compared = [{key: value for key, value in each.metadata.items() if key not in aside} for each in headers]
    common, differing = common_entries(compared)
    if differing:
        notes.append(f"not the same in all shards, so left out of the header: {', '.join(sorted(differing))}")
    header = dataclasses.replace(
        headers[0],
        capacity=max(each.capacity for each in headers),
        pad_id=next((each.pad_id for each in headers if each.pad_id is not None), None),
        metadata=common | blocks,
        rebuilt=any(each.rebuilt for each in headers),
    )
    return header, notes


def _read_headers(prefixes: Sequence[str]) -> tuple[list[Header], list[OriginRun]]:
    """The headers of shards, without ``origin``; and the runs of packs that the shards are made of.

    If the runs are too many for a header, they are the shards themselves.

    Raises:
        FormatError: there are no shards, or too many for a header to name.
        ShardNotFoundError, CorruptShardError: as of ``read_header``.
    """
    headers: list[Header] = []
    shards: list[OriginRun] = []
    runs: list[OriginRun] = []
    for prefix in prefixes:
        header = read_header(prefix)
        extend_runs(shards, [own_run(header)])
        if len(runs) <= MAX_RUNS:  # more are not listed
            extend_runs(runs, origin_runs(header))
        metadata = {key: value for key, value in header.metadata.items() if key != ORIGIN}
        headers.append(dataclasses.replace(header, metadata=metadata))
    if not headers:
        raise FormatError("an empty list of shards; name at least one")
    if len(runs) > MAX_RUNS:
        runs = shards
    if len(runs) > MAX_RUNS:
        raise FormatError(
            f"{len(runs)} shards, a header has room for the names of {MAX_RUNS}; merge some first, then the results"
        )
    return headers, runs


class MergeReport(NamedTuple):
    """What merging did: prefix and header of the merged shard, how many shards it was made from, and notes.

    The notes say what was not compared or differs between the shards, a sentence each. If the merged shard was there
    already, it was ``found``.
    """

    prefix: str
    header: Header
    num_sources: int
    notes: list[str]
    found: bool = False


def merge(
    sources: Sequence[str | os.PathLike[str]],
    prefix: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    mixed_capacity: bool = False,
    mixed_templates: bool = False,
    lossy: bool = False,
    durable: bool = True,
    watch: Watch = unwatched,
) -> MergeReport:
    """Write the packs of many shards, in the order given, as one shard.

    Everything is compared before the first byte is written: token and mask dtype, capacity, sequence multiple, pad id,
    tokenizer and chat template. Every byte of the sources is read once and held to its checksum; with ``lossy``,
    columns are read before that too. The merged shard's JSON block keeps what the sources have in common and lists
    where its packs come from (``origin``). Memory is a few MiB for any number of packs, and the headers of all sources;
    one source is open at a time.

    Columns go along, attached ones too, and are written with the merged shard: all sources must have them, of one kind.
    Of ``source``, the tables of files become one, in which a file is the same where its name and fingerprint are; of
    ``pair``, the numbers of each shard go on behind those of the shards before, but for parts of one split, which
    keep theirs. Of the metadata of other columns what is the same in all shards stays.

    Args:
        sources: prefixes, in order. One may be given twice; its packs are then there twice.
        prefix: of the merged shard.
        overwrite: replace what is at the prefix.
        mixed_capacity: let capacities differ; the largest is that of the merged shard.
        mixed_templates: let chat templates differ.
        lossy: leave out columns that some of the shards lack, have of another kind, or that break a rule.
        durable: False skips fsync, for files that are thrown away anyway.
        watch: called as the reading begins, with the bytes there are to read.

    Raises:
        ShardNotFoundError: a source, or a column that it lists, is not there.
        FormatError: sources do not go together, or something is at the prefix.
        CorruptShardError: a source breaks F2, F3, O1, O2 or a rule of columns; nothing is published.
        OSError: the disk says no; nothing is published, and what was written is removed.
    """
    paths = ShardPaths.of(prefix)
    prefixes = [ShardPaths.of(source).prefix for source in sources]
    read = [place for source in prefixes for place in places_of(source, "a source")]
    require_apart(places_of(paths.prefix, "the output", written=True), read)
    finish_interrupted(paths, overwrite=overwrite)
    # A shard that is here may be the one that is about to be made.
    check_free(paths, overwrite=overwrite or not paths.missing())
    allowed = {"capacity": mixed_capacity, "chat template": mixed_templates}
    headers, runs = _read_headers(prefixes)
    like, notes = _agree(prefixes, headers, {name for name, is_allowed in allowed.items() if is_allowed})
    like.metadata[ORIGIN] = list(map(dataclasses.asdict, runs))
    broken = _broken_columns(prefixes, headers, watch) if lossy else [{} for _ in prefixes]
    columns = JoinedColumns(prefixes, headers, broken, lossy=lossy)
    total = sum(map(nbytes_of, headers)) + columns.nbytes
    new = begin_copy(
        paths.prefix,
        like,
        columns.specs,
        media=any(listed_media(header.metadata) for header in headers),
        work="merge",
        overwrite=overwrite,
        durable=durable,
        nbytes=total,
    )
    with new as writer, watch("merging", total) as advance:
        for number, (source, header) in enumerate(zip(prefixes, headers, strict=True)):
            shard = open_source(source, header.shard_id)
            writer.add_shard(shard, columns=columns.specs, changed=columns.renumber(number, shard), advance=advance)
        merged = writer.finalize()
    notes += columns.notes
    if again := len(prefixes) - len(set(prefixes)):
        notes.append(f"given more than once, so there more than once: {again:,} of the shards")
    return MergeReport(paths.prefix, merged, len(prefixes), notes, writer.found)


def _broken_columns(prefixes: Sequence[str], headers: Sequence[Header], watch: Watch) -> list[dict[str, Finding]]:
    """What is wrong with the columns of each shard, by name; every value is read."""
    from megatron_sft_idx.check.verify import broken_columns  # imported late: most merges have nothing to check

    beside = columns_beside(prefixes)
    files = (ShardPaths.of(prefix).column(name) for prefix in prefixes for name in beside[prefix])
    with watch("checking columns", sum(map(os.path.getsize, files))) as advance:
        return [broken_columns(prefix, header, advance) for prefix, header in zip(prefixes, headers, strict=True)]


# ---- what splitting needs too ----


def open_source(prefix: str, shard_id: bytes) -> Shard:
    """Open a local shard that packs are copied from.

    Its files stay open, so it is the same shard still when another one is published over it.

    Raises:
        FormatError: its id is not ``shard_id``, or it lies in an object store.
        ShardNotFoundError, CorruptShardError: as of ``Shard``.
    """
    require_local(prefix, "merging or splitting")
    # Maps would be as fast, but the pages that are read would count as this process's memory.
    shard = Shard(prefix, backend="pread")
    require_same(prefix, shard.shard_id, shard_id)
    return shard


def begin_copy(
    prefix: str,
    like: Header,
    columns: Mapping[str, ColumnSpec],
    *,
    media: bool,
    work: str,
    overwrite: bool,
    durable: bool,
    nbytes: int = 0,
) -> ShardWriter:
    """A writer of a shard that is made of packs of other shards.

    Args:
        prefix: the path that the five files will share.
        like: a header with the dtypes, capacity, multiple, pad id, metadata and flags of the new shard.
        columns: the columns of the new shard, by name.
        media: whether it has images or audio.
        work: name of the verb; as of ``ShardWriter.begin``, and so are the others.
        overwrite: see there.
        durable: see there.
        nbytes: see there.
    """
    numbers = like.capacity or None, like.sequence_multiple, like.pad_id  # an empty shard may have no capacity
    options = BuildOptions(like.token_dtype, like.mask_dtype, *numbers, dict(like.metadata), dict(columns), media)
    writer = ShardWriter.begin(prefix, options, work=work, overwrite=overwrite, durable=durable, nbytes=nbytes)
    writer.rebuilt = like.rebuilt
    return writer
