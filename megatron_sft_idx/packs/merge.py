"""Many shards to one: whether they go together, what the header of the one says, and where its packs come from."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import PAIR, ColumnHeader, ColumnSpec, is_source, listed_columns
from megatron_sft_idx.packs.copying import CopyWriter, Renumber, SourceColumn, SourceShard, nbytes_of
from megatron_sft_idx.shard import check_free, read_header
from megatron_sft_idx.shard.columns import column_names, columns_beside, open_column
from megatron_sft_idx.shard.publication import places_of
from megatron_sft_idx.storage.progress import Watch, unwatched
from megatron_sft_idx.storage.publish import require_apart

ORIGIN = "origin"
# Some 250 bytes each: a header holds 16 MiB.
MAX_RUNS = 50_000

_FILES = "files"
_MAX_NUMBER = int(np.iinfo(np.uint32).max)
_COUNTS = ("num_packs", "num_sequences", "num_tokens")
_Spans = Callable[[int, int], tuple[tuple[int, int], tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class OriginRun:
    """Packs of one shard that follow each other; as a dict, an entry of ``ORIGIN`` in the JSON block.

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


def own_run(header: Header) -> OriginRun:
    """All packs of a shard, as its own."""
    counts = header.num_packs, header.num_sequences, header.num_tokens
    return OriginRun(header.shard_id.hex(), header.source, 0, *counts)


def runs_of(header: Header) -> list[OriginRun]:
    """Runs that make up a shard: its origin where it has one that fits its counts, else itself."""
    try:
        runs = [OriginRun(**entry) for entry in header.metadata[ORIGIN]]
        counts = [[getattr(run, name) for name in _COUNTS] for run in runs]
        plain = all(type(value) is int and value >= 0 for row in counts for value in row)
        fits = plain and list(map(sum, zip(*counts, strict=True))) == [getattr(header, name) for name in _COUNTS]
    except (KeyError, TypeError):
        fits = False
    return runs if fits else [own_run(header)]


def slice_runs(runs: Sequence[OriginRun], first: int, stop: int, spans: _Spans) -> list[OriginRun]:
    """Of a shard's runs, those of its packs ``[first, stop)``; ``spans`` gives the tokens and sequences of packs."""
    found, begin = [], 0
    for run in runs:
        low, high = max(first, begin), min(stop, begin + run.num_packs)
        if low < high:
            (token, last_token), (sequence, last_sequence) = spans(low, high)
            counts = high - low, last_sequence - sequence, last_token - token
            found.append(OriginRun(run.shard_id, run.source, run.first_pack + low - begin, *counts))
        begin += run.num_packs
    return found


def _extend(runs: list[OriginRun], more: Iterable[OriginRun]) -> None:
    """Append runs; one that continues the last becomes part of it, an empty one is left out."""
    for run in more:
        last = runs[-1] if runs else None
        place = run.shard_id, run.source, run.first_pack
        if last and (last.shard_id, last.source, last.first_pack + last.num_packs) == place:
            sums = {name: getattr(last, name) + getattr(run, name) for name in _COUNTS}
            runs[-1] = dataclasses.replace(last, **sums)
        elif run.num_packs:
            runs.append(run)


# What a part of a split says of the whole.
SPLIT = "split"
# Keys of the JSON block that count or name what is in one shard: not true of a merged one, nor of a part.
PER_SHARD = frozenset({"columns", "notes", "packing", "sources", ORIGIN, SPLIT})


_COPY = "copy one with ShardWriter(..., {}=...).add_shard(Shard(...)), which converts, and merge the copy"
_TOKENIZERS = "they come from different tokenizers: preprocess one again with the tokenizer of the other"
_CAPACITY = (
    "pack one again (megatron-sft-idx pack SHARD --seq-length N), or take the largest with mixed_capacity"
    " (--mixed-capacity), as for tokenised corpora that are packed afterwards"
)
_MULTIPLE = "pack one again (megatron-sft-idx pack SHARD --seq-length N --sequence-multiple M)"
_TEMPLATES = "preprocess one again with the template of the other, or pass mixed_templates (--mixed-templates)"
# Masks are label-aligned everywhere: a header that claims anything else is refused when it is read (rule H5).
# What all shards have in common: as messages say it, what gives it (None where a shard does not know), and how shards
# that differ in it can become one all the same.
_FIELDS: tuple[tuple[str, Callable[[Header], Any], str], ...] = (
    ("token dtype", lambda header: header.token_dtype, _COPY.format("token_dtype")),
    ("mask dtype", lambda header: header.mask_dtype, _COPY.format("mask_dtype")),
    # An empty shard may have a capacity of 0: it was to be that of the longest pack.
    ("capacity", lambda header: header.capacity or None, _CAPACITY),
    ("sequence multiple", lambda header: header.sequence_multiple, _MULTIPLE),
    ("pad id", lambda header: header.pad_id, _TOKENIZERS),
    ("tokenizer", lambda header: header.tokenizer, _TOKENIZERS),
    ("chat template", lambda header: header.template, _TEMPLATES),
)
# Entries of the JSON block that fields are read from.
_BLOCKS = {"tokenizer": "tokenizer", "chat template": "chat_template"}


class _Common:
    """Entries that are the same in all of several objects, and names of those that are not."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] | None = None
        self.differ: set[str] = set()

    def add(self, entries: Mapping[str, Any]) -> None:
        """Take one more object."""
        before = dict(entries) if self.entries is None else self.entries
        self.differ |= {key for key in entries.keys() | before if entries.get(key) != before.get(key)}
        self.entries = {key: value for key, value in before.items() if key not in self.differ}


class Agreement:
    """Takes the headers of the shards that are to be one, in order, and keeps some hundred bytes of each.

    Args:
        mixed: names of the fields that may differ: of capacities, the largest is that of the merged shard.
    """

    def __init__(self, mixed: Collection[str]) -> None:
        self._mixed = mixed
        self._first: Header | None = None
        self._capacity, self._rebuilt = 0, False
        self._known: dict[str, tuple[str, Any]] = {}  # of a field, the first shard that knows it, and its value there
        self._unknown: dict[str, tuple[str, int]] = {}  # the first that does not, and how many
        self._differ: set[str] = set()  # fields of which two values were let pass
        self._compared: dict[str, Any] = {}  # entries of the JSON block that fields are read from
        self._blocks = _Common()  # the others
        self._own: list[OriginRun] = []
        self._runs: list[OriginRun] = []

    def add(self, prefix: str, header: Header) -> None:
        """Take one more shard.

        Raises:
            FormatError: it does not go together with one before it; says both values and both prefixes.
        """
        for name, value_of, remedy in _FIELDS:
            self._compare(name, value_of(header), remedy, prefix, header)
        aside = PER_SHARD | {*_BLOCKS.values()}
        self._blocks.add({key: value for key, value in header.metadata.items() if key not in aside})
        self._first = self._first or dataclasses.replace(header, metadata={})
        self._capacity = max(self._capacity, header.capacity)
        self._rebuilt |= header.rebuilt
        _extend(self._own, [own_run(header)])
        if len(self._runs) <= MAX_RUNS:  # else it is not going to be listed
            _extend(self._runs, runs_of(header))

    def _compare(self, name: str, value: Any, remedy: str, prefix: str, header: Header) -> None:
        block = _BLOCKS.get(name)
        if value is None:
            first, count = self._unknown.get(name, (prefix, 0))
            self._unknown[name] = first, count + 1
        elif name not in self._known:
            self._known[name] = prefix, value
            if block:
                self._compared[block] = header.metadata[block]
        elif value != self._known[name][1]:
            if name not in self._mixed:
                first, expected = self._known[name]
                raise FormatError(f"{prefix}: {name} {value}, in {first} {expected}; a merged shard has one: {remedy}")
            self._differ.add(name)
            self._compared.pop(block or "", None)

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
        origin = {ORIGIN: list(map(dataclasses.asdict, runs))}
        return dataclasses.replace(
            self._first,
            capacity=self._capacity,
            pad_id=self._known.get("pad id", ("", None))[1],
            metadata=(self._blocks.entries or {}) | self._compared | origin,
            rebuilt=self._rebuilt,
        )

    def notes(self) -> list[str]:
        """What was not compared, or differs: a sentence each."""
        notes, names = [], [name for name, _, _ in _FIELDS]
        for name in names:
            if name in self._known and name in self._unknown:
                first, count = self._unknown[name]
                others = f" and {count - 1:,} more" if count > 1 else ""
                notes.append(f"{first}{others}: {name} not recorded, taken to be that of {self._known[name][0]}")
            if name in self._differ:
                notes.append(f"{name}: not the same in all shards, as was allowed")
        if nowhere := [name for name in names if name not in self._known]:
            notes.append(f"recorded in none of the shards, so not compared: {', '.join(nowhere)}")
        if dropped := sorted(self._blocks.differ):
            notes.append(f"not the same in all shards, so left out of the header: {', '.join(dropped)}")
        return notes


# ---- columns: alike in all of them, and their numbers told apart ----


class _Files:
    """Tables of files, of which one is made: a row each, as the JSON of ``source`` has them."""

    def __init__(self) -> None:
        self.table: list[dict[str, Any]] = []
        self._places: dict[tuple[str, str], int] = {}

    def add(self, table: list[dict[str, Any]]) -> NDArray[np.uint32]:
        """Take one more table; returns the numbers that its files have now, uint32 [files].

        A file without a fingerprint is the same as another only where the tables are the same.
        """
        if table == self.table or not self.table:
            for number, file in enumerate(table):
                self._places.setdefault((file["name"], str(file.get("fingerprint"))), number)
            self.table = list(table)
            return np.arange(len(table), dtype=np.uint32)
        numbers = []
        for file in table:
            key = file["name"], str(file.get("fingerprint"))
            number = len(self.table) if file.get("fingerprint") is None else self._places.get(key, len(self.table))
            if number == len(self.table):
                self.table.append(file)
                self._places[key] = number
            numbers.append(number)
        return np.array(numbers, np.uint32)


@dataclass(slots=True)
class _Joined:
    """A column that all shards so far have: where it was found first, what it is there, and what is in common."""

    where: str
    spec: ColumnSpec
    metadata: _Common = field(default_factory=_Common)
    nbytes: int = 0


class _JoinedColumns:
    """Takes the columns of the shards that are to be one, in order: first what they are, then their numbers.

    Args:
        allow_loss: leave out what does not go together.
    """

    def __init__(self, *, allow_loss: bool) -> None:
        self._allow_loss = allow_loss
        self._first: str | None = None
        self._found: dict[str, _Joined] = {}
        self._lost: dict[str, str] = {}  # why a column is left out
        self._files, self._files_again = _Files(), _Files()
        self._first_pair = 0  # what is added to the numbers of pairs of this shard
        self._next_pair = 0  # above all that were given
        self._split: Mapping[str, Any] = {}  # what the shard before says that it is a part of

    def add(self, prefix: str, header: Header, beside: Collection[str]) -> None:
        """Take one more shard; ``beside`` are names of the columns that lie there.

        Raises:
            FormatError: it lacks a column that another has, or has one of another kind.
            ShardNotFoundError, CorruptShardError: of a column that it has.
        """
        first = self._first = self._first or prefix
        paths, columns = ShardPaths.of(prefix), {}
        for name in column_names(paths, header, beside):
            try:
                columns[name] = open_column(paths, name, header, "pread").header
            except SFTIndexError as error:
                if not self._allow_loss:
                    raise
                self._lose(name, f"{error}")
        for name in sorted((self._found.keys() | columns.keys()) - self._lost.keys()):
            if name not in columns:
                self._lose(name, f"{prefix}: no column {name}, which {self._found[name].where} has")
            elif name not in self._found and prefix != first:
                self._lose(name, f"{first}: no column {name}, which {prefix} has")
            else:
                self._take(prefix, name, columns[name])

    def _take(self, prefix: str, name: str, column: ColumnHeader) -> None:
        """A column that all shards so far have."""
        spec, own = column.spec, dict(column.spec.metadata)
        joined = self._found.setdefault(name, _Joined(prefix, spec))
        where, like = joined.where, joined.spec
        if spec.kind != like.kind:
            self._lose(name, f"{prefix}: column {name} is {_said(spec)}, in {where} {_said(like)}")
            return
        if name == "source" and is_source(spec) != is_source(like):
            self._lose(name, f"{prefix}: column {name} does not name its files as that of {where} does, or the other")
            return
        if name == "source" and is_source(spec):
            self._files.add(own.pop(_FILES))
        joined.metadata.add(own)
        joined.nbytes += column.rows * spec.row_nbytes

    def _lose(self, name: str, why: str) -> None:
        if not self._allow_loss:
            raise FormatError(
                f"{why}; a merged shard has the columns that all have: attach it there (write_column), or pass"
                " allow_loss (--allow-loss) to leave it out"
            )
        self._lost.setdefault(name, why)
        self._found.pop(name, None)

    def specs(self) -> dict[str, ColumnSpec]:
        """The columns of the one shard. FormatError where a table of all files fits no header."""
        specs = {}
        for name, joined in self._found.items():
            metadata = dict(joined.metadata.entries or {})
            if name == "source" and is_source(joined.spec):
                metadata[_FILES] = self._files.table
            specs[name] = ColumnSpec(*joined.spec.kind, metadata)
        return specs

    def nbytes(self) -> int:
        """Bytes of all their values."""
        return sum(joined.nbytes for joined in self._found.values())

    def renumber(self, source: SourceShard) -> Renumber:
        """What becomes of the numbers of one shard; asked for in the order in which they were added."""
        changes: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {}
        column = source.columns.get("source")
        if column is not None and is_source(column.spec):
            numbers = self._files_again.add(column.spec.metadata[_FILES])
            changes["source"] = functools.partial(_renumber_files, column, numbers)
        column = source.columns.get("pair")
        if column is not None and column.spec.kind == PAIR.kind:
            metadata = source.header.metadata
            split = metadata.get(SPLIT) if "pair" in listed_columns(metadata) else None
            before, self._split = self._split, split if isinstance(split, dict) else {}
            same = before and all(before.get(key) == self._split.get(key) for key in ("shard_id", "parts"))
            # A part of a split that goes on where the one before it ends has its numbers from the same shard.
            if not (same and self._split.get("part") == before.get("part", -1) + 1):
                self._first_pair = self._next_pair
            changes["pair"] = functools.partial(self._renumber_pairs, column)
        return changes

    def _renumber_pairs(self, column: SourceColumn, rows: NDArray[Any]) -> NDArray[Any]:
        """The numbers of a shard begin above those of the shards before."""
        if not len(rows):
            return rows
        most = int(rows[:, 0].max()) + self._first_pair
        if most > _MAX_NUMBER:
            raise FormatError(f"{column.rows.path}: pair {most:,} of all shards, there is room for {_MAX_NUMBER:,}")
        self._next_pair = max(self._next_pair, most + 1)
        return rows + np.array([self._first_pair, 0], np.uint32)

    def require_same(self) -> None:
        """FormatError where the tables of files were other ones when the numbers were made."""
        if "source" in self._found and self._files_again.table != self._files.table:
            raise FormatError(f"{self._first}: a column source was replaced while the shards were merged; start again")

    def notes(self) -> list[str]:
        """What was left out: a sentence each."""
        notes = [f"column {name} left out, as was allowed: {why}" for name, why in sorted(self._lost.items())]
        for name, joined in sorted(self._found.items()):
            if keys := ", ".join(sorted(joined.metadata.differ)):
                notes.append(f"column {name}: not the same in all shards, so left out of its metadata: {keys}")
        return notes


def _said(spec: ColumnSpec) -> str:
    aligned = f", aligned with {spec.alignment}s" if spec.per == "token" else ""
    return f"{spec.dtype} x {spec.width} a {spec.per}{aligned}"


def _renumber_files(column: SourceColumn, numbers: NDArray[np.uint32], rows: NDArray[Any]) -> NDArray[Any]:
    if len(rows) and (most := int(rows[:, 0].max())) >= len(numbers):
        detail = f"file {most}, expected less than {len(numbers)}; restore the file"
        raise CorruptShardError(column.rows.path, column.spec.header_nbytes, "C9", detail)
    return np.stack([numbers[rows[:, 0]], rows[:, 1]], axis=1)


# ---- merging ----


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
    columns, beside = _JoinedColumns(allow_loss=allow_loss), columns_beside(prefixes)
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
