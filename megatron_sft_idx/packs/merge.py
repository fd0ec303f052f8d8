"""Many shards to one: whether they go together, what the header of the one says, and where its packs come from."""

from __future__ import annotations

import dataclasses
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.packs.copying import CopyWriter, SourceShard, nbytes_of
from megatron_sft_idx.packs.joined_columns import JoinedColumns
from megatron_sft_idx.shard import check_free, read_header
from megatron_sft_idx.shard.columns import columns_beside
from megatron_sft_idx.shard.publication import places_of
from megatron_sft_idx.storage.progress import Watch, unwatched
from megatron_sft_idx.storage.publish import require_apart

__all__ = [
    "MAX_RUNS",
    "ORIGIN",
    "PER_SHARD",
    "SPLIT",
    "Agreement",
    "MergeReport",
    "Run",
    "extend_runs",
    "merge",
    "origin_entry",
    "own_run",
    "runs_of",
    "slice_runs",
]


ORIGIN = "origin"
# Some 250 bytes each: a header holds 16 MiB.
MAX_RUNS = 50_000

_COUNTS = ("num_packs", "num_sequences", "num_tokens")
_Spans = Callable[[int, int], tuple[tuple[int, int], tuple[int, int]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Packs of one shard that follow each other.

    Attributes:
        shard_id: of the shard, hex.
        source: fingerprint of the rows it was made from, where it says so.
        first_pack: number of the first pack in that shard.
        num_packs: how many.
        num_sequences: in these packs.
        num_tokens: in these packs.
    """

    shard_id: str
    source: str | None
    first_pack: int
    num_packs: int
    num_sequences: int
    num_tokens: int

    def continued_by(self, other: Run) -> bool:
        """Whether the other run begins where this one ends."""
        same = (self.shard_id, self.source) == (other.shard_id, other.source)
        return same and self.first_pack + self.num_packs == other.first_pack

    def __add__(self, other: Run) -> Run:
        return dataclasses.replace(
            self,
            num_packs=self.num_packs + other.num_packs,
            num_sequences=self.num_sequences + other.num_sequences,
            num_tokens=self.num_tokens + other.num_tokens,
        )


def own_run(header: Header) -> Run:
    """All packs of a shard, as its own."""
    counts = header.num_packs, header.num_sequences, header.num_tokens
    return Run(header.shard_id.hex(), header.source, 0, *counts)


def runs_of(header: Header) -> list[Run]:
    """Runs that make up a shard: its origin where it has one that fits its counts, else itself."""
    try:
        runs = [Run(**entry) for entry in header.metadata[ORIGIN]]
        counts = [[getattr(run, name) for name in _COUNTS] for run in runs]
        plain = all(type(value) is int and value >= 0 for row in counts for value in row)
        fits = plain and list(map(sum, zip(*counts, strict=True))) == [getattr(header, name) for name in _COUNTS]
    except (KeyError, TypeError):
        fits = False
    return runs if fits else [own_run(header)]


def slice_runs(runs: Sequence[Run], first: int, stop: int, spans: _Spans) -> list[Run]:
    """Of a shard's runs, those of its packs ``[first, stop)``; ``spans`` gives the tokens and sequences of packs."""
    begins = list(accumulate((run.num_packs for run in runs), initial=0))
    found = []
    number = bisect_right(begins, first) - 1
    while first < stop:
        run, begin = runs[number], begins[number]
        end = min(begin + run.num_packs, stop)
        tokens, sequences = spans(first, end)
        counts = end - first, sequences[1] - sequences[0], tokens[1] - tokens[0]
        found.append(Run(run.shard_id, run.source, run.first_pack + first - begin, *counts))
        first, number = end, number + 1
    return found


def extend_runs(runs: list[Run], more: Iterable[Run]) -> None:
    """Append runs to a list; one that continues the last becomes part of it, an empty one is left out."""
    for run in more:
        if runs and runs[-1].continued_by(run):
            runs[-1] += run
        elif run.num_packs:
            runs.append(run)


def origin_entry(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """What the JSON block has under ``ORIGIN``."""
    return [dataclasses.asdict(run) for run in runs]


# What a part of a split says of the whole.
SPLIT = "split"
# Keys of the JSON block that count or name what is in one shard: not true of a merged one, nor of a part.
PER_SHARD = frozenset({"columns", "notes", "packing", "sources", ORIGIN, SPLIT})


@dataclass(frozen=True, slots=True)
class _Field:
    """Something that all shards have in common.

    Attributes:
        name: as messages say it.
        value_of: gives it, None where a shard does not know.
        remedy: how shards that differ in it can become one all the same.
        block: entry of the JSON block it is read from, if it is.
    """

    name: str
    value_of: Callable[[Header], Any]
    remedy: str
    block: str = ""


_COPY = "copy one with ShardWriter(..., {}=...).add_shard(Shard(...)), which converts, and merge the copy"
_TOKENIZERS = "they come from different tokenizers: preprocess one again with the tokenizer of the other"
_CAPACITY = (
    "pack one again (megatron-sft-idx pack SHARD --seq-length N), or take the largest with mixed_capacity"
    " (--mixed-capacity), as for tokenised corpora that are packed afterwards"
)
_MULTIPLE = "pack one again (megatron-sft-idx pack SHARD --seq-length N --sequence-multiple M)"
_TEMPLATES = "preprocess one again with the template of the other, or pass mixed_templates (--mixed-templates)"
# Masks are label-aligned everywhere: a header that claims anything else is refused when it is read (rule H5).
_FIELDS = (
    _Field("token dtype", lambda header: header.token_dtype, _COPY.format("token_dtype")),
    _Field("mask dtype", lambda header: header.mask_dtype, _COPY.format("mask_dtype")),
    # An empty shard may have a capacity of 0: it was to be that of the longest pack.
    _Field("capacity", lambda header: header.capacity or None, _CAPACITY),
    _Field("sequence multiple", lambda header: header.sequence_multiple, _MULTIPLE),
    _Field("pad id", lambda header: header.pad_id, _TOKENIZERS),
    _Field("tokenizer", lambda header: header.tokenizer, _TOKENIZERS, "tokenizer"),
    _Field("chat template", lambda header: header.template, _TEMPLATES, "chat_template"),
)
_COMPARED = {field.block for field in _FIELDS if field.block}


@dataclass(slots=True)
class _Seen:
    """What the shards so far say of one field.

    Attributes:
        known: first shard that knows it, and its value there.
        unknown: first shard that does not know it.
        num_unknown: shards that do not know it.
        differs: whether two values were let pass.
    """

    known: tuple[str, Any] | None = None
    unknown: str = ""
    num_unknown: int = 0
    differs: bool = False


class Agreement:
    """Takes the headers of the shards that are to be one, in order, and keeps some hundred bytes of each.

    Args:
        mixed_capacity: let capacities differ; the largest is that of the merged shard.
        mixed_templates: let chat templates differ.
    """

    def __init__(self, *, mixed_capacity: bool = False, mixed_templates: bool = False) -> None:
        self._mixed = {"capacity": mixed_capacity, "chat template": mixed_templates}
        self._seen = {field.name: _Seen() for field in _FIELDS}
        self._first: Header | None = None
        self._capacity, self._rebuilt = 0, False
        self._compared: dict[str, Any] = {}  # entries of the JSON block that fields are read from
        self._blocks: dict[str, Any] = {}  # other entries that are the same everywhere
        self._dropped: set[str] = set()  # names of those that are not
        self._own: list[Run] = []
        self._runs: list[Run] = []

    def add(self, prefix: str, header: Header) -> None:
        """Take one more shard.

        Raises:
            FormatError: it does not go together with one before it; says both values and both prefixes.
        """
        for field in _FIELDS:
            self._compare(field, prefix, header)
        own = {key: value for key, value in header.metadata.items() if key not in PER_SHARD | _COMPARED}
        if self._first is None:
            self._first, self._blocks = dataclasses.replace(header, metadata={}), own
        differ = {key for key in own.keys() | self._blocks if own.get(key) != self._blocks.get(key)}
        self._dropped |= differ
        for key in differ:
            self._blocks.pop(key, None)
        self._capacity = max(self._capacity, header.capacity)
        self._rebuilt |= header.rebuilt
        extend_runs(self._own, [own_run(header)])
        if len(self._runs) <= MAX_RUNS:  # else it is not going to be listed
            extend_runs(self._runs, runs_of(header))

    def _compare(self, field: _Field, prefix: str, header: Header) -> None:
        value, seen = field.value_of(header), self._seen[field.name]
        if value is None:
            seen.unknown = seen.unknown or prefix
            seen.num_unknown += 1
        elif seen.known is None:
            seen.known = prefix, value
            if field.block:
                self._compared[field.block] = header.metadata[field.block]
        elif value != seen.known[1]:
            if not self._mixed.get(field.name):
                first, expected = seen.known
                raise FormatError(
                    f"{prefix}: {field.name} {value}, in {first} {expected}; a merged shard has one: {field.remedy}"
                )
            seen.differs = True
            self._compared.pop(field.block, None)

    def header(self) -> Header:
        """What the merged shard has in common with its sources; counts and checksums are those of the first.

        Raises:
            FormatError: there were no shards, or they are too many for their names to fit a header.
        """
        if self._first is None:
            raise FormatError("an empty list of shards; name at least one")
        runs = self._runs if len(self._runs) <= MAX_RUNS else self._own
        if len(runs) > MAX_RUNS:
            raise FormatError(
                f"{len(runs)} shards, a header has room for the names of {MAX_RUNS}; merge some first, then the results"
            )
        pad_id = self._seen["pad id"].known
        return dataclasses.replace(
            self._first,
            capacity=self._capacity,
            pad_id=pad_id[1] if pad_id else None,
            metadata=self._blocks | self._compared | {ORIGIN: origin_entry(runs)},
            rebuilt=self._rebuilt,
        )

    def notes(self) -> list[str]:
        """What was not compared, or differs: a sentence each."""
        notes = []
        for name, seen in self._seen.items():
            if seen.known and seen.num_unknown:
                others = f" and {seen.num_unknown - 1:,} more" if seen.num_unknown > 1 else ""
                notes.append(f"{seen.unknown}{others}: {name} not recorded, taken to be that of {seen.known[0]}")
            if seen.differs:
                notes.append(f"{name}: not the same in all shards, as was allowed")
        if nowhere := [name for name, seen in self._seen.items() if not seen.known]:
            notes.append(f"recorded in none of the shards, so not compared: {', '.join(nowhere)}")
        if self._dropped:
            notes.append(f"not the same in all shards, so left out of the header: {', '.join(sorted(self._dropped))}")
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
    agreement = Agreement(mixed_capacity=mixed_capacity, mixed_templates=mixed_templates)
    columns, beside = JoinedColumns(allow_loss=allow_loss), columns_beside(prefixes)
    ids, total, trained_tokens, masked_packs = [], 0, 0, 0
    for source in prefixes:
        header = read_header(source)
        agreement.add(source, header)
        columns.add(source, header, beside[source])
        ids.append(header.shard_id)
        total += nbytes_of(header)
        trained_tokens += header.num_trained_tokens
        masked_packs += header.num_masked_packs
    specs, total = columns.specs(), total + columns.nbytes()
    new = CopyWriter(paths.prefix, agreement.header(), specs, overwrite=overwrite, durable=durable, nbytes=total)
    with new as writer, watch("merging", total) as advance:
        for source, shard_id in zip(prefixes, ids, strict=True):
            shard = SourceShard(source, shard_id, advance, specs)
            shard.verify_indexes()
            writer.append(shard, 0, shard.header.num_packs, renumber=columns.renumber(shard))
        columns.require_same()
        header = writer.finalize(trained_tokens, masked_packs)
    notes = [*agreement.notes(), *columns.notes()]
    if again := len(prefixes) - len(set(prefixes)):
        notes.append(f"given more than once, so there more than once: {again:,} of the shards")
    return MergeReport(paths.prefix, header, len(prefixes), notes)
