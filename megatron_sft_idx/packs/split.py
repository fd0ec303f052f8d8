"""One shard to many: how its packs are shared out, and all outputs written together.

An output of a split is a shard of its own; messages and the JSON block call it a part.
"""

from __future__ import annotations

import bisect
import dataclasses
import glob
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import ARRAY_ALIGNMENT, idx_nbytes
from megatron_sft_idx.packs.copying import CopyWriter, SourceShard, copied_nbytes, nbytes_of
from megatron_sft_idx.packs.provenance import ORIGIN, PER_SHARD, SPLIT, Origin
from megatron_sft_idx.shard import Shard, check_free, read_header
from megatron_sft_idx.shard.columns import open_column
from megatron_sft_idx.shard.journal import locked_outputs, read_journal
from megatron_sft_idx.shard.opening import column_names, columns_beside
from megatron_sft_idx.shard.publication import is_column, is_set_aside, places_of, publish_all, remove_remains
from megatron_sft_idx.shard.recovery import complete_header
from megatron_sft_idx.storage.progress import Watch, unwatched
from megatron_sft_idx.storage.publish import Place, require_apart, require_space

# The names of outputs have five digits, and each output is five files.
_MAX_OUTPUTS = 99_999
# Bytes of the two indexes, headers not counted. Each pack adds its length, position and document to .idx, and two
# offsets to .seq.idx, which may have zeros between its arrays.
_PACK_NBYTES = idx_nbytes(1) - idx_nbytes(0) + 2 * 8
_EMPTY_NBYTES = idx_nbytes(0) + 2 * 8 + ARRAY_ALIGNMENT


@dataclass(frozen=True, slots=True)
class SplitSize:
    """How large the outputs of a split are; exactly one of these is given.

    Attributes:
        packs: the most packs an output has; all but the last have so many.
        nbytes: the most bytes the files of an output have, headers not counted; a larger pack is an output of its own.
        shards: how many outputs. Their packs differ in number by one at most; with fewer packs, some are empty.
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
        prefixes: of the outputs, in order.
        num_kept: how many of them were there already.
    """

    prefixes: list[str]
    num_kept: int


def output_prefix(prefix: str, number: int, outputs: int) -> str:
    """Prefix of one of several output shards: ``X-00000-of-00012``."""
    return f"{prefix}-{number:05d}-of-{outputs:05d}"


def split(
    source: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    size: SplitSize,
    *,
    overwrite: bool = False,
    resume: bool = False,
    durable: bool = True,
    watch: Watch = unwatched,
) -> SplitReport:
    """Write the packs of one shard, in their order, as shards ``PREFIX-00000-of-00012`` and so on.

    The source is read twice: once to hold every byte to its checksum before anything is published, once to copy it.
    Columns go along, attached ones too, and are written with the outputs; their metadata, such as the files that
    ``source`` names, stay as they are. All outputs are whole before the first is published: a split that is killed
    leaves the whole ones under temporary names, and ``resume`` goes on behind them. Memory is a few MiB for packs of
    any number and size.

    Args:
        source: prefix of the shard.
        prefix: what the prefixes of the outputs begin with.
        size: how many packs, or bytes, an output has, or how many outputs there are.
        overwrite: replace shards that are at the prefixes of the outputs.
        resume: keep outputs of this very split that are there; drop what a killed split left half done.
        durable: False skips fsync, for files that are thrown away anyway.
        watch: called as the reading begins, with the bytes there are to read.

    Raises:
        ShardNotFoundError: the source, or a column that it lists, is not there.
        FormatError: something is at the prefix of an output, or outputs of another split are there.
        CorruptShardError: the source breaks F2, F3, O1, O2 or a rule of columns; nothing is published.
        OSError: the disk says no. Of this and of any other error nothing is left that this split has written.
    """
    whole, prefix = ShardPaths.of(source), ShardPaths.of(prefix).prefix
    header = read_header(whole.prefix)
    columns = {name: open_column(whole, name, header, "pread").header for name in column_names(whole, header)}
    specs = {name: column.spec for name, column in columns.items()}
    nbytes = nbytes_of(header) + sum(column.nbytes for column in columns.values())
    counts = {"token": header.num_tokens, "sequence": header.num_sequences, "pack": header.num_packs}
    with watch("splitting", nbytes + copied_nbytes(header, specs.values(), **counts)) as advance:
        shard = SourceShard(whole.prefix, header.shard_id, advance, specs)
        outputs = _plan(shard, prefix, size)
        written = [place for output in outputs for place in places_of(output.paths.prefix, "the output", written=True)]
        require_apart([*written, Place(f"{prefix}-parts.journal", "the output")], places_of(whole, "the source"))
        refuse_other_splits(prefix, len(outputs))
        with locked_outputs(prefix):
            kept = {output for output in outputs if resume and output.is_there()}
            replaceable = {output for output in outputs if overwrite or (resume and output.may_overwrite())}
            _check_free(outputs, kept | replaceable)
            _require_room(prefix, shard, [output for output in outputs if output not in kept])
            shard.verify()
            origin = Origin(shard.header, shard.spans)
            set_aside: list[ShardPaths] = []
            try:
                for output in outputs:
                    if output in kept:
                        advance(shard.copied_nbytes(output.first, output.stop))
                    else:
                        drops = ("build",) if resume else ()
                        _copy(output, shard, origin, overwrite=output in replaceable, durable=durable, drops=drops)
                        set_aside.append(output.paths)
            except BaseException as error:
                # Some outputs of many are of no use, and a full disk gets its space back. What this split wrote goes,
                # unless it was interrupted: then all of it stays for resume. What earlier splits wrote stays always.
                for paths in set_aside if isinstance(error, Exception) else ():
                    remove_remains(paths)
                raise
            publish_all([output.paths for output in outputs if is_set_aside(output.paths)], durable=durable)
    return SplitReport([output.paths.prefix for output in outputs], len(kept))


def _check_free(outputs: Sequence[_Output], replaceable: Collection[_Output]) -> None:
    """Check that all outputs may be written, as ``check_free`` of each, but with one look at the folder."""
    beside = columns_beside(output.paths.prefix for output in outputs)
    for output in outputs:
        columns = (name for name in beside[output.paths.prefix] if is_column(output.paths.column(name)))
        files = output.paths.with_columns(columns)
        check_free(files, overwrite=output in replaceable, only=files.all)


def _require_room(prefix: str, shard: SourceShard, outputs: Sequence[_Output]) -> None:
    """OSError (ENOSPC) where there is no room for outputs that are not there yet."""
    nbytes = sum(shard.copied_nbytes(output.first, output.stop) for output in outputs)
    # What a killed split left half done is dropped for the same output.
    half_done = [path for output in outputs for path in output.paths.unpublished.present()]
    require_space(prefix, nbytes - sum(map(os.path.getsize, half_done)), (6 + len(shard.columns)) * len(outputs))


def _copy(
    output: _Output, shard: SourceShard, origin: Origin, *, overwrite: bool, durable: bool, drops: Collection[str]
) -> None:
    """Copy the packs of one output, and set it aside."""
    runs = origin.of_packs(output.first, output.stop)
    common = {key: value for key, value in shard.header.metadata.items() if key not in PER_SHARD}
    own = {ORIGIN: list(map(dataclasses.asdict, runs)), SPLIT: output.entry()}
    like = dataclasses.replace(shard.header, metadata=common | own)
    specs = {name: column.spec for name, column in shard.columns.items()}
    with CopyWriter(output.paths.prefix, like, specs, overwrite=overwrite, durable=durable, drops=drops) as writer:
        writer.append(shard, output.first, output.stop)
        writer.finalize(publish=False)


@dataclass(frozen=True, slots=True)
class _Output:
    """One output of a split: the packs ``[first, stop)`` of the shard.

    ``columns`` has the names of the shard's columns and their checksums, hex.
    """

    shard_id: bytes
    prefix: str
    number: int
    outputs: int
    first: int
    stop: int
    columns: tuple[tuple[str, str], ...]

    @property
    def paths(self) -> ShardPaths:
        return ShardPaths.of(output_prefix(self.prefix, self.number, self.outputs))

    def entry(self) -> dict[str, Any]:
        """What the JSON block of the output says under ``split``: which packs of which shard it has."""
        return {
            "shard_id": self.shard_id.hex(),
            "part": self.number,
            "parts": self.outputs,
            "first_pack": self.first,
            "num_packs": self.stop - self.first,
            **({"columns": dict(self.columns)} if self.columns else {}),
        }

    def is_there(self) -> bool:
        """Whether this very output is there, published or set aside. Either way it is whole.

        Raises:
            FormatError, ShardNotFoundError: the shard at its prefix lacks files or columns, or breaks a rule.
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
        """Whether an interrupted split left a journal here that says it was given leave to overwrite."""
        head = read_journal(self.paths)
        return head is not None and head.work == "build" and head.content.get("overwrite") is True


def _plan(shard: SourceShard, prefix: str, size: SplitSize) -> list[_Output]:
    """The outputs in order. FormatError where they are too many."""
    num_packs, bounds = shard.header.num_packs, _bounds_by_nbytes(shard, size.nbytes or 1)
    if size.packs is not None:
        bounds = chain(range(0, max(num_packs, 1), size.packs), [num_packs])
    elif size.shards is not None:
        shards = size.shards
        bounds = (num_packs * number // shards for number in range(shards + 1))
    edges = list(islice(bounds, _MAX_OUTPUTS + 2))
    if len(edges) > _MAX_OUTPUTS + 1:
        raise FormatError(f"{shard.prefix}: more than {_MAX_OUTPUTS} parts, five files each; ask for larger ones")
    columns = tuple((name, column.rows.checksum.hex()) for name, column in shard.columns.items())
    return [
        _Output(shard.header.shard_id, prefix, number, len(edges) - 1, first, stop, columns)
        for number, (first, stop) in enumerate(pairwise(edges))
    ]


def _bounds_by_nbytes(shard: SourceShard, nbytes: int) -> Iterator[int]:
    """The first pack of every output, and behind them the number of all packs."""

    def before(pack: int) -> int:
        """Bytes of all packs before this one."""
        return shard.copied_nbytes(0, pack) + pack * _PACK_NBYTES

    first = 0
    yield first
    while first < shard.header.num_packs:
        limit = before(first) + nbytes - _EMPTY_NBYTES
        candidates = range(first + 1, shard.header.num_packs + 1)
        first = candidates[max(bisect.bisect_right(candidates, limit, key=before) - 1, 0)]
        yield first
    if not shard.header.num_packs:
        yield 0


def refuse_other_splits(prefix: str, count: int) -> None:
    """FormatError where outputs of a split into another number of shards are: a glob would find both."""
    for path in glob.iglob(f"{glob.escape(prefix)}-*-of-*.seq.idx"):
        name = re.fullmatch(r"-\d{5}-of-(\d{5})", path[len(prefix) : -len(".seq.idx")])
        if name and int(name[1]) != count:
            raise FormatError(
                f"{path}: part of a split into {int(name[1])}, this one has {count} parts; remove the others first, or"
                " choose another prefix"
            )
