"""Many shards to one: whether they go together, and what the header of the one says."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.packs.copying import CopyWriter, SourceShard, nbytes_of
from megatron_sft_idx.packs.joined_columns import CommonEntries, JoinedColumns
from megatron_sft_idx.packs.provenance import MAX_RUNS, ORIGIN, PER_SHARD, OriginRun, extend_runs, origin_runs, own_run
from megatron_sft_idx.shard import check_free, read_header
from megatron_sft_idx.shard.opening import columns_beside
from megatron_sft_idx.shard.publication import places_of
from megatron_sft_idx.storage.progress import Watch, unwatched
from megatron_sft_idx.storage.publish import require_apart

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


class Agreement:
    """Compares the headers of the shards that are merged, in order, and keeps some hundred bytes of each.

    Args:
        mixed: the names in ``_FIELDS`` of what may differ. Of different capacities the merged shard has the largest.
    """

    def __init__(self, mixed: Collection[str]) -> None:
        self._mixed = mixed
        self._first: Header | None = None
        self._capacity, self._rebuilt = 0, False
        # By the name in _FIELDS: the first shard that records it, and its value there; the first shard that does not,
        # and how many do not; and the names of those that differ, as was allowed.
        self._recorded: dict[str, tuple[str, Any]] = {}
        self._missing: dict[str, tuple[str, int]] = {}
        self._differing: set[str] = set()
        # Of the JSON block of the merged shard: the entries of _BLOCKS, and those that all shards agree on.
        self._compared: dict[str, Any] = {}
        self._blocks = CommonEntries()
        # The shards themselves, and the runs that they are made of.
        self._own: list[OriginRun] = []
        self._runs: list[OriginRun] = []

    def add(self, prefix: str, header: Header) -> None:
        """Take one more shard.

        Raises:
            FormatError: it does not go together with a shard before it; the error names both values and prefixes.
        """
        for name, value_of, remedy in _FIELDS:
            self._compare(name, value_of(header), remedy, prefix, header)
        aside = PER_SHARD | {*_BLOCKS.values()}
        self._blocks.add({key: value for key, value in header.metadata.items() if key not in aside})
        self._first = self._first or dataclasses.replace(header, metadata={})
        self._capacity = max(self._capacity, header.capacity)
        self._rebuilt |= header.rebuilt
        extend_runs(self._own, [own_run(header)])
        if len(self._runs) <= MAX_RUNS:  # more are not listed
            extend_runs(self._runs, origin_runs(header))

    def _compare(self, name: str, value: Any, remedy: str, prefix: str, header: Header) -> None:
        block = _BLOCKS.get(name)
        if value is None:
            first, count = self._missing.get(name, (prefix, 0))
            self._missing[name] = first, count + 1
        elif name not in self._recorded:
            self._recorded[name] = prefix, value
            if block:
                self._compared[block] = header.metadata[block]
        elif value != self._recorded[name][1]:
            if name not in self._mixed:
                first, expected = self._recorded[name]
                raise FormatError(f"{prefix}: {name} {value}, in {first} {expected}; a merged shard has one: {remedy}")
            self._differing.add(name)
            self._compared.pop(block or "", None)

    def header(self) -> Header:
        """The header of the merged shard; the caller must replace its counts and checksums, those of the first shard.

        Raises:
            FormatError: there are no shards, or too many for a header to name.
        """
        if self._first is None:
            raise FormatError("an empty list of shards; name at least one")
        runs = self._runs if len(self._runs) <= MAX_RUNS else self._own
        if len(runs) > MAX_RUNS:
            raise FormatError(
                f"{len(runs)} shards, a header has room for the names of {MAX_RUNS}; merge some first, then the results"
            )
        origin = {ORIGIN: list(map(dataclasses.asdict, runs))}
        return dataclasses.replace(
            self._first,
            capacity=self._capacity,
            pad_id=self._recorded.get("pad id", ("", None))[1],
            metadata=(self._blocks.entries or {}) | self._compared | origin,
            rebuilt=self._rebuilt,
        )

    def notes(self) -> list[str]:
        """What could not be compared, and what differs: a sentence each."""
        notes, names = [], [name for name, _, _ in _FIELDS]
        for name in names:
            if name in self._recorded and name in self._missing:
                first, count = self._missing[name]
                others = f" and {count - 1:,} more" if count > 1 else ""
                notes.append(f"{first}{others}: {name} not recorded, taken to be that of {self._recorded[name][0]}")
            if name in self._differing:
                notes.append(f"{name}: not the same in all shards, as was allowed")
        if nowhere := [name for name in names if name not in self._recorded]:
            notes.append(f"recorded in none of the shards, so not compared: {', '.join(nowhere)}")
        if dropped := sorted(self._blocks.differing):
            notes.append(f"not the same in all shards, so left out of the header: {', '.join(dropped)}")
        return notes


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
    allow_loss: bool = False,
    durable: bool = True,
    watch: Watch = unwatched,
) -> MergeReport:
    """Write the packs of many shards, in the order given, as one shard.

    Everything is compared before the first byte is written: token and mask dtype, capacity, sequence multiple, pad id,
    tokenizer and chat template. Every byte of the sources is read once and held to its checksum. The merged shard's
    JSON block keeps what the sources have in common and lists where its packs come from (``origin``). Memory
    is a few MiB for packs of any number and size, and some hundred bytes a source; one source is open at a time.

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
        allow_loss: leave out columns that some of the shards lack, have of another kind, or cannot be opened.
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
    check_free(paths, overwrite=overwrite)
    allowed = {"capacity": mixed_capacity, "chat template": mixed_templates}
    agreement = Agreement({name for name, mixed in allowed.items() if mixed})
    columns, beside = JoinedColumns(allow_loss=allow_loss), columns_beside(prefixes)
    ids, total = [], 0
    for source in prefixes:
        header = read_header(source)
        agreement.add(source, header)
        columns.add(source, header, beside[source])
        ids.append(header.shard_id)
        total += nbytes_of(header)
    specs, total = columns.specs(), total + columns.nbytes()
    new = CopyWriter(paths.prefix, agreement.header(), specs, overwrite=overwrite, durable=durable, nbytes=total)
    with new as writer, watch("merging", total) as advance:
        for source, shard_id in zip(prefixes, ids, strict=True):
            shard = SourceShard(source, shard_id, advance, specs)
            shard.verify_indexes()
            writer.append(shard, 0, shard.header.num_packs, renumber=columns.renumber(shard))
        columns.require_same()
        header = writer.finalize()
    notes = [*agreement.notes(), *columns.notes()]
    if again := len(prefixes) - len(set(prefixes)):
        notes.append(f"given more than once, so there more than once: {again:,} of the shards")
    return MergeReport(paths.prefix, header, len(prefixes), notes)
