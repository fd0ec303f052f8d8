"""Merge many shards into one: check that they are compatible, and make the header of the merged shard."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import listed_media
from megatron_sft_idx.packs.joined_columns import JoinedColumns
from megatron_sft_idx.packs.provenance import (
    MAX_RUNS,
    ORIGIN,
    OriginRun,
    extend_runs,
    joined_metadata,
    origin_runs,
    own_run,
)
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

_COPY = "convert one of the shards with ShardWriter(..., {}=...).add_shard(Shard(...)), and merge the converted copy"
_TOKENIZERS = "they were made with different tokenizers; preprocess one of them again with the other's tokenizer"
_CAPACITY = (
    "pack one of them again (megatron-sft-idx pack SHARD --seq-length N), or use the largest capacity with"
    " mixed_capacity (--mixed-capacity), for example for tokenised corpora that will be packed later"
)
_MULTIPLE = "pack one of them again (megatron-sft-idx pack SHARD --seq-length N --sequence-multiple M)"
_TEMPLATES = "preprocess one of them again with the other's template, or pass mixed_templates (--mixed-templates)"
# Masks are label-aligned everywhere: a header with another alignment is rejected when it is read (rule H5).
# Properties that all shards must have in common: the name in messages; the function that returns it, or None if a shard
# does not record it; and how shards with different values can still be merged.
_FIELDS: tuple[tuple[str, Callable[[Header], Any], str], ...] = (
    ("token dtype", lambda header: header.token_dtype, _COPY.format("token_dtype")),
    ("mask dtype", lambda header: header.mask_dtype, _COPY.format("mask_dtype")),
    # An empty shard has capacity 0 if its capacity was to be the length of its longest pack.
    ("capacity", lambda header: header.capacity or None, _CAPACITY),
    ("sequence multiple", lambda header: header.sequence_multiple, _MULTIPLE),
    ("pad id", lambda header: header.pad_id, _TOKENIZERS),
    ("tokenizer", lambda header: header.tokenizer, _TOKENIZERS),
    ("chat template", lambda header: header.template, _TEMPLATES),
)
# The entries of the JSON block from which some of these are read.
_BLOCKS = {"tokenizer": "tokenizer", "chat template": "chat_template"}


def _agree(prefixes: Sequence[str], headers: Sequence[Header], mixed: Collection[str]) -> tuple[Header, list[str]]:
    """Return the header of the merged shard, without its origin and with the counts of the first shard; and notes.

    The notes say what could not be compared, and what differs. ``mixed`` are the names in ``_FIELDS`` that may differ.
    With different capacities, the merged shard has the largest. FormatError: two shards are incompatible; the message
    has both values and prefixes.
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
            require_alike(prefixes, values, name, f"all shards of a merge must agree: {remedy}")
        first = recorded[0]
        if missing := [prefix for prefix, value in zip(prefixes, values, strict=True) if value is None]:
            others = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
            notes.append(f"{missing[0]}{others}: {name} not recorded, assumed to be the same as in {prefixes[first]}")
        if any(values[number] != values[first] for number in recorded):
            notes.append(f"{name}: differs between the shards, as allowed by an option")
        elif name in _BLOCKS:
            blocks[_BLOCKS[name]] = headers[first].metadata[_BLOCKS[name]]
    if unrecorded:
        notes.append(f"not recorded in any shard, so not compared: {', '.join(unrecorded)}")
    aside = _BLOCKS.values()
    common, differing = joined_metadata(
        [{key: value for key, value in each.metadata.items() if key not in aside} for each in headers]
    )
    if differing:
        notes.append(f"values that differ between shards, left out of the header: {', '.join(sorted(differing))}")
    header = dataclasses.replace(
        headers[0],
        capacity=max(each.capacity for each in headers),
        pad_id=next((each.pad_id for each in headers if each.pad_id is not None), None),
        metadata=common | blocks,
        rebuilt=any(each.rebuilt for each in headers),
    )
    return header, notes


def _read_headers(prefixes: Sequence[str]) -> tuple[list[Header], list[OriginRun]]:
    """Return the headers of shards, without ``origin``; and the runs of packs from which the shards were made.

    If there are too many runs for a header, the shards themselves are used as the runs.

    Raises:
        FormatError: there are no shards, or too many for a header.
        ShardNotFoundError, CorruptShardError: see ``read_header``.
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
        raise FormatError("the list of shards is empty; pass at least one")
    if len(runs) > MAX_RUNS:
        runs = shards
    if len(runs) > MAX_RUNS:
        raise FormatError(
            f"{len(runs)} shards are too many: a header can list {MAX_RUNS}; merge groups of them first, then merge"
            " the results"
        )
    return headers, runs


class MergeReport(NamedTuple):
    """The result of merging: prefix and header of the merged shard, the number of sources, and notes.

    The notes say what was not compared or differs between the shards, one sentence each. If the merged shard already
    existed, it was ``found``.
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
    """Write the packs of many shards, in the given order, as one shard.

    Everything is compared before the first byte is written: token and mask dtype, capacity, sequence multiple, pad id,
    tokenizer and chat template. Every byte of the sources is read once and checked against its checksum; with
    ``lossy``, columns are also read before. The merged shard's JSON block keeps the entries that are equal in all
    sources, and lists the origin of its packs (``origin``). Memory is a few MiB for any number of packs, plus the
    headers of all sources; one source is open at a time.

    Columns are merged too, including attached ones, and become written columns of the merged shard. All sources must
    have them, with the same kind. For ``source``, the tables of files become one; files with equal name and fingerprint
    are one file. For ``pair``, the numbers of each shard continue after those of the previous shards, except for parts
    of one split, which keep theirs. For the metadata of other columns, entries that are equal in all shards are kept.

    Args:
        sources: prefixes, in order. A prefix may be given twice; its packs then occur twice.
        prefix: prefix of the merged shard.
        overwrite: replace an existing shard at the prefix.
        mixed_capacity: allow different capacities; the merged shard has the largest.
        mixed_templates: allow different chat templates.
        lossy: omit columns that are missing in some shards, differ in kind, or break a rule.
        durable: False skips fsync, for temporary files.
        watch: called when reading begins, with the number of bytes to read.

    Raises:
        ShardNotFoundError: a source, or a column that it lists, does not exist.
        FormatError: sources are incompatible, or something is at the prefix.
        CorruptShardError: a source breaks F2, F3, O1, O2 or a rule of columns; nothing is published.
        OSError: an error of the disk; nothing is published, and written files are removed.
    """
    paths = ShardPaths.of(prefix)
    prefixes = [ShardPaths.of(source).prefix for source in sources]
    read = [place for source in prefixes for place in places_of(source, "a source")]
    require_apart(places_of(paths.prefix, "the output", written=True), read)
    finish_interrupted(paths, overwrite=overwrite)
    # An existing shard may be identical to the one about to be made.
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
        notes.append(f"{again:,} of the shards were given more than once, so their packs are repeated")
    return MergeReport(paths.prefix, merged, len(prefixes), notes, writer.found)


def _broken_columns(prefixes: Sequence[str], headers: Sequence[Header], watch: Watch) -> list[dict[str, Finding]]:
    """Return the findings about each shard's columns, by name. Reads every value."""
    from megatron_sft_idx.check.verify import broken_columns  # imported late: most merges have nothing to check

    beside = columns_beside(prefixes)
    files = (ShardPaths.of(prefix).column(name) for prefix in prefixes for name in beside[prefix])
    with watch("checking columns", sum(map(os.path.getsize, files))) as advance:
        return [broken_columns(prefix, header, advance) for prefix, header in zip(prefixes, headers, strict=True)]


# ---- shared with splitting ----


def open_source(prefix: str, shard_id: bytes) -> Shard:
    """Open a local shard to copy packs from it.

    Its files stay open, so it remains the same shard even if another one is published at its prefix.

    Raises:
        FormatError: its id is not ``shard_id``, or it is in an object store.
        ShardNotFoundError, CorruptShardError: see ``Shard``.
    """
    require_local(prefix, "merging or splitting")
    # Maps would be as fast, but the pages that are read would count as memory of this process.
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
    """Begin a shard that consists of packs of other shards.

    Args:
        prefix: the path that the five files will share.
        like: a header with the dtypes, capacity, multiple, pad id, metadata and flags of the new shard.
        columns: the columns of the new shard, by name.
        media: whether it has images or audio.
        work: name of the command. See ``ShardWriter.begin`` for this and the other arguments.
        overwrite: see there.
        durable: see there.
        nbytes: see there.
    """
    numbers = like.capacity or None, like.sequence_multiple, like.pad_id  # an empty shard may have no capacity
    options = BuildOptions(like.token_dtype, like.mask_dtype, *numbers, dict(like.metadata), dict(columns), media)
    writer = ShardWriter.begin(prefix, options, work=work, overwrite=overwrite, durable=durable, nbytes=nbytes)
    writer.rebuilt = like.rebuilt
    return writer
