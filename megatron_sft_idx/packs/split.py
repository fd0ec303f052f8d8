"""One shard to many."""

from __future__ import annotations

import bisect
import dataclasses
import glob
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import ARRAY_ALIGNMENT, idx_nbytes
from megatron_sft_idx.packs.copying import CopyWriter, SourceShard, copied_nbytes, nbytes_of
from megatron_sft_idx.packs.merge import ORIGIN, PER_SHARD, SPLIT, runs_of, slice_runs
from megatron_sft_idx.shard import Shard, check_free, read_header
from megatron_sft_idx.shard.columns import column_names, open_column
from megatron_sft_idx.shard.publication import (
    is_set_aside,
    parts_held,
    places_of,
    publish_all,
    read_journal,
    remove_remains,
)
from megatron_sft_idx.shard.recovery import complete_header
from megatron_sft_idx.storage.progress import Watch, unwatched
from megatron_sft_idx.storage.publish import Place, require_apart, require_space

# Their names have five digits, and each is five files.
_MAX_PARTS = 99_999
# Of the two indexes behind the header: each pack adds its length, position and document in .idx, and two offsets in
# .seq.idx, where zeros between the arrays may be needed.
_PACK_NBYTES = idx_nbytes(1) - idx_nbytes(0) + 2 * 8
_EMPTY_NBYTES = idx_nbytes(0) + 2 * 8 + ARRAY_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Parts:
    """How a shard is split; exactly one of these is given.

    Attributes:
        packs: most packs in a part; the last has what is left.
        nbytes: most bytes of the files of a part, headers not counted; a larger pack is a part of its own.
        shards: how many parts; their packs differ by one at most, and some are empty where there are fewer packs.
    """

    packs: int | None = None
    nbytes: int | None = None
    shards: int | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in ("packs", "nbytes", "shards") if (value := getattr(self, name)) is not None}
        if len(given) != 1 or any(value < 1 for value in given.values()):
            raise FormatError(f"split by {given or 'nothing'}; give one of packs, nbytes and shards, 1 or more")


@dataclass(frozen=True, slots=True)
class SplitReport:
    """What splitting did.

    Attributes:
        prefixes: of the parts, in order.
        num_kept: parts that were there already.
    """

    prefixes: list[str]
    num_kept: int


def part_prefix(prefix: str, part: int, parts: int) -> str:
    """Prefix of one part: ``X-00000-of-00012``."""
    return f"{prefix}-{part:05d}-of-{parts:05d}"


def split(
    source: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    parts: Parts,
    *,
    overwrite: bool = False,
    resume: bool = False,
    durable: bool = True,
    watch: Watch = unwatched,
) -> SplitReport:
    """Write the packs of one shard, in their order, as shards ``PREFIX-00000-of-00012`` and so on.

    The source is read twice: once to hold every byte to its checksum before anything is published, once to copy it.
    Columns go along, attached ones too, and are written with the parts; their metadata, such as the files that
    ``source`` names, stay as they are. All parts are whole before the first is published: a split that was killed
    leaves those it was done with under temporary names, and ``resume`` goes on behind them. Memory is a few MiB for
    packs of any number and size.

    Args:
        source: prefix of the shard.
        prefix: what the prefixes of the parts begin with.
        parts: how it is split.
        overwrite: replace what is at the prefixes of the parts.
        resume: keep parts that are there and are those of this split; drop what a killed split left unfinished.
        durable: False skips fsync, for files that are thrown away anyway.
        watch: called as the reading begins, with the bytes there are to read.

    Raises:
        ShardNotFoundError: the source, or a column that it lists, is not there.
        FormatError: something is at the prefix of a part, or of a part of another split.
        CorruptShardError: the source breaks F2, F3, O1, O2 or a rule of columns; nothing is published.
        OSError: the disk says no. Of this and of any other error nothing is left that this split has written.
    """
    source, prefix = ShardPaths.of(source).prefix, ShardPaths.of(prefix).prefix
    header = read_header(source)
    whole = ShardPaths.of(source)
    columns = {name: open_column(whole, name, header, "pread").header for name in column_names(whole, header)}
    specs = {name: column.spec for name, column in columns.items()}
    nbytes = nbytes_of(header) + sum(column.nbytes for column in columns.values())
    counts = {"token": header.num_tokens, "sequence": header.num_sequences, "pack": header.num_packs}
    with watch("splitting", nbytes + copied_nbytes(header, specs.values(), **counts)) as advance:
        shard = SourceShard(source, header.shard_id, advance, specs)
        planned = _plan(shard, prefix, parts)
        outputs = [place for part in planned for place in places_of(part.paths.prefix, "the output", written=True)]
        require_apart([*outputs, Place(f"{prefix}-parts.journal", "the output")], places_of(source, "the source"))
        refuse_other_splits(prefix, len(planned))
        with parts_held(prefix):
            kept = {part for part in planned if resume and part.is_there()}
            leave = {part for part in planned if overwrite or (resume and part.may_overwrite())}
            for part in planned:
                check_free(part.paths, overwrite=part in kept or part in leave)
            require_space(prefix, 0 if kept else nbytes, (6 + len(columns)) * (len(planned) - len(kept)))
            shard.verify()
            made: list[ShardPaths] = []
            try:
                for part in planned:
                    if part in kept:
                        advance(shard.copied_nbytes(part.first, part.stop))
                    else:
                        drops = ("build",) if resume else ()
                        _copy(part, shard, overwrite=part in leave, durable=durable, drops=drops)
                        made.append(part.paths)
            except BaseException as error:
                # Some parts of many are half of a result, and a full disk gets its space back. What was published
                # before, and what an interrupted split had done, is left as it was; of one interrupted now, all.
                for paths in made if isinstance(error, Exception) else ():
                    remove_remains(paths)
                raise
            publish_all([part.paths for part in planned if is_set_aside(part.paths)], durable=durable)
    return SplitReport([part.paths.prefix for part in planned], len(kept))


def _copy(part: _Part, shard: SourceShard, *, overwrite: bool, durable: bool, drops: Collection[str]) -> None:
    """Copy a part, and set it aside."""
    runs = slice_runs(runs_of(shard.header), part.first, part.stop, shard.spans)
    # What the JSON block says of one shard is as it is for the part.
    common = {key: value for key, value in shard.header.metadata.items() if key not in PER_SHARD}
    own = {ORIGIN: list(map(dataclasses.asdict, runs)), SPLIT: part.entry()}
    like = dataclasses.replace(shard.header, metadata=common | own)
    specs = {name: column.spec for name, column in shard.columns.items()}
    with CopyWriter(part.paths.prefix, like, specs, overwrite=overwrite, durable=durable, drops=drops) as writer:
        writer.append(shard, part.first, part.stop)
        writer.finalize(publish=False)


@dataclass(frozen=True, slots=True)
class _Part:
    """The packs ``[first, stop)``, where they go, and by name the checksums of the columns that are split."""

    shard_id: bytes
    prefix: str
    number: int
    of: int
    first: int
    stop: int
    columns: tuple[tuple[str, str], ...]

    @property
    def paths(self) -> ShardPaths:
        return ShardPaths.of(part_prefix(self.prefix, self.number, self.of))

    def entry(self) -> dict[str, Any]:
        """What the part's JSON block says of the whole."""
        return {
            "shard_id": self.shard_id.hex(),
            "part": self.number,
            "parts": self.of,
            "first_pack": self.first,
            "num_packs": self.stop - self.first,
            **({"columns": dict(self.columns)} if self.columns else {}),
        }

    def is_there(self) -> bool:
        """Whether this very part was published, or set aside: a shard appears whole or not at all.

        Raises:
            FormatError, ShardNotFoundError: the shard that is there lacks files or columns, or breaks a rule.
        """
        if is_set_aside(self.paths):
            return complete_header(self.paths).metadata.get(SPLIT) == self.entry()
        if not os.path.exists(self.paths.seq_idx):
            return False
        header = Shard(self.paths.prefix).header
        same = bool(header.metadata.get(SPLIT) == self.entry())
        for name, _ in self.columns if same else ():
            open_column(self.paths, name, header, "pread")
        return same

    def may_overwrite(self) -> bool:
        """Whether a split that was interrupted here had leave to replace what is here."""
        head = read_journal(self.paths)
        return head is not None and head.work == "build" and head.content.get("overwrite") is True


def _plan(shard: SourceShard, prefix: str, parts: Parts) -> list[_Part]:
    """The parts in order. FormatError where they are too many."""
    num_packs, bounds = shard.header.num_packs, _bounds_by_nbytes(shard, parts.nbytes or 1)
    if parts.packs is not None:
        bounds = chain(range(0, max(num_packs, 1), parts.packs), [num_packs])
    elif parts.shards is not None:
        shards = parts.shards
        bounds = (num_packs * part // shards for part in range(shards + 1))
    edges = list(islice(bounds, _MAX_PARTS + 2))
    if len(edges) > _MAX_PARTS + 1:
        raise FormatError(f"{shard.prefix}: more than {_MAX_PARTS} parts, five files each; ask for larger ones")
    columns = tuple((name, column.rows.checksum.hex()) for name, column in shard.columns.items())
    return [
        _Part(shard.header.shard_id, prefix, number, len(edges) - 1, first, stop, columns)
        for number, (first, stop) in enumerate(pairwise(edges))
    ]


def _bounds_by_nbytes(shard: SourceShard, nbytes: int) -> Iterator[int]:
    """First pack of every part, and the number of all packs."""

    def before(pack: int) -> int:
        """Bytes of all packs before one."""
        return shard.copied_nbytes(0, pack) + pack * _PACK_NBYTES

    first = 0
    yield first
    while first < shard.header.num_packs:
        # A part has a fixed few bytes beside its packs: what an empty one has.
        most = before(first) + nbytes - _EMPTY_NBYTES
        candidates = range(first + 1, shard.header.num_packs + 1)
        first = candidates[max(bisect.bisect_right(candidates, most, key=before) - 1, 0)]
        yield first
    if not shard.header.num_packs:
        yield 0


def refuse_other_splits(prefix: str, count: int) -> None:
    """FormatError where parts of a split into another number of parts are: a glob would read both."""
    for path in glob.iglob(f"{glob.escape(prefix)}-*-of-*.seq.idx"):
        name = re.fullmatch(r"-\d{5}-of-(\d{5})", path[len(prefix) : -len(".seq.idx")])
        if name and int(name[1]) != count:
            raise FormatError(
                f"{path}: part of a split into {int(name[1])}, this one has {count} parts; remove the others first, or"
                " choose another prefix"
            )
