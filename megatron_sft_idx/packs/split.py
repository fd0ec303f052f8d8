"""Split one shard into many: distribute its packs, and copy each output.

An output of a split is a complete shard. Messages and the JSON block call it a part.
"""

from __future__ import annotations

import bisect
import dataclasses
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import ARRAY_ALIGNMENT, idx_nbytes
from megatron_sft_idx.packs.merge import begin_copy, open_source
from megatron_sft_idx.packs.provenance import ORIGIN, PER_SHARD, SPLIT, Origin
from megatron_sft_idx.packs.run import COPIED_TOKENS, OpenColumns, nbytes_to_check, require_checksums, windows
from megatron_sft_idx.shard import Shard, read_header
from megatron_sft_idx.shard.columns import open_column
from megatron_sft_idx.shard.publication import is_set_aside, job_folder, places_of, publish_outputs
from megatron_sft_idx.shard.recovery import complete_header
from megatron_sft_idx.storage import Array
from megatron_sft_idx.storage.progress import Watch, unwatched
from megatron_sft_idx.storage.publish import require_apart, require_space

# The names of outputs have five digits, and each output has five files.
_MAX_OUTPUTS = 99_999
# Size of the two indexes in bytes, without headers. Each pack adds its length, position and document to .idx, and two
# offsets to .seq.idx, which may have zeros between its arrays.
_PACK_NBYTES = idx_nbytes(1) - idx_nbytes(0) + 2 * 8
_EMPTY_NBYTES = idx_nbytes(0) + 2 * 8 + ARRAY_ALIGNMENT


@dataclass(frozen=True, slots=True)
class SplitSize:
    """The size of the outputs of a split. Exactly one of these is given.

    Attributes:
        packs: number of packs in each output except the last, which may have fewer.
        nbytes: maximum size of an output's files in bytes, without headers; a larger pack becomes a separate output.
        shards: number of outputs. Their numbers of packs differ by at most one; with fewer packs than outputs, some are
            empty.
    """

    packs: int | None = None
    nbytes: int | None = None
    shards: int | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in ("packs", "nbytes", "shards") if (value := getattr(self, name)) is not None}
        if len(given) != 1 or any(value < 1 for value in given.values()):
            raise FormatError(
                f"split by {given or 'nothing'}; set exactly one of packs, nbytes and shards, to 1 or more"
            )


class SplitReport(NamedTuple):
    """The result of splitting: prefixes of the outputs, in order, and how many of them already existed."""

    prefixes: list[str]
    num_kept: int


def output_prefix(prefix: str, number: int, outputs: int) -> str:
    """Return the prefix of one of several output shards: ``X-00000-of-00012``."""
    return f"{prefix}-{number:05d}-of-{outputs:05d}"


def split(
    source: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    size: SplitSize,
    *,
    overwrite: bool = False,
    durable: bool = True,
    watch: Watch = unwatched,
) -> SplitReport:
    """Write the packs of one shard, in order, as shards ``PREFIX-00000-of-00012`` and so on.

    The source is read twice: once to check every byte against its checksum before anything is published, once to copy
    it. Columns are copied too, including attached ones, and become written columns of the outputs. Their metadata, such
    as the files of ``source``, stays unchanged. All outputs are complete before the first is published. A killed split
    leaves the complete ones in their building folders, and repeating the split continues after them. Published outputs
    of the same split stay unchanged. Memory is a few MiB for any number of packs.

    Args:
        source: prefix of the shard.
        prefix: the beginning of the outputs' prefixes.
        size: number of packs or bytes of an output, or number of outputs.
        overwrite: replace existing shards at the prefixes of the outputs.
        durable: False skips fsync, for temporary files.
        watch: called when reading begins, with the number of bytes to read.

    Raises:
        ShardNotFoundError: the source, or a column that it lists, does not exist.
        FormatError: something is at the prefix of an output, or outputs of another split exist.
        CorruptShardError: the source breaks F2, F3, O1, O2 or a rule of columns; nothing is published.
        OSError: an error of the disk. After this or any other error, everything that this split wrote is removed.
    """
    whole = ShardPaths.of(source)
    prefix = ShardPaths.of(prefix).prefix
    shard = open_source(whole.prefix, read_header(whole.prefix).shard_id)
    columns = dict(shard.columns)
    outputs = _plan(shard, columns, prefix, size)
    origin = Origin(shard.header, lambda first, stop: _spans(shard, first, stop))
    nbytes = nbytes_to_check(shard.files, columns)
    with watch("splitting", nbytes + sum(output.nbytes for output in outputs)) as advance:
        written = [place for output in outputs for place in places_of(output.paths.prefix, "the output", written=True)]
        require_apart([*written, *places_of(prefix, "the output", written=True)[-1:]], places_of(whole, "the source"))
        refuse_other_splits(prefix, len(outputs))
        kept = {*range(len(outputs))}

        def write(missing: Sequence[int]) -> Iterator[Header]:
            kept.difference_update(missing)
            require_checksums(shard.files, columns, advance, shard.media)
            advance(sum(outputs[number].nbytes for number in kept))
            for number in missing:
                yield _copy(outputs[number], shard, columns, origin, overwrite=overwrite, durable=durable)
                advance(outputs[number].nbytes)

        _require_room(prefix, [output for output in outputs if output.existing_header(overwrite=overwrite) is None])
        with job_folder(prefix, {"work": "split"}, overwrite=overwrite, durable=durable) as job:
            publish_outputs(
                job,
                [output.paths for output in outputs],
                write,
                overwrite=overwrite,
                existing_header=lambda number: outputs[number].existing_header(overwrite=overwrite),
            )
    return SplitReport([output.paths.prefix for output in outputs], len(kept))


def _require_room(prefix: str, outputs: Sequence[_Output]) -> None:
    """Raise OSError (ENOSPC) if there is no space for outputs that do not exist yet."""
    # The remains of the same output from a killed split are removed.
    half_done = [path for output in outputs for path in output.paths.unpublished.present()]
    nbytes = sum(output.nbytes for output in outputs) - sum(map(os.path.getsize, half_done))
    require_space(prefix, nbytes, sum(len(output.paths.all) + 4 for output in outputs))


def _copy(
    output: _Output, shard: Shard, columns: OpenColumns, origin: Origin, *, overwrite: bool, durable: bool
) -> Header:
    """Copy the packs of one output, and set it aside."""
    runs = origin.of_packs(output.first, output.stop)
    common = {key: value for key, value in shard.header.metadata.items() if key not in PER_SHARD}
    own = {ORIGIN: list(map(dataclasses.asdict, runs)), SPLIT: output.entry()}
    like = dataclasses.replace(shard.header, metadata=common | own)
    specs = {name: column.spec for name, column in columns.items()}
    how: dict[str, Any] = {"work": "split", "overwrite": overwrite, "durable": durable}
    with begin_copy(output.paths.prefix, like, specs, media=shard.media is not None, **how) as writer:
        for window in windows(shard.files, COPIED_TOKENS, columns, output.first, output.stop, shard.media):
            writer.add_run(window.run())
        return writer.set_aside()


@dataclass(frozen=True, slots=True)
class _Output:
    """One output of a split: the packs ``[first, stop)`` of the shard, with a total size of ``nbytes`` in all files.

    ``columns`` has the names of the shard's columns and their checksums (hex). ``media`` says whether it has images or
    audio.
    """

    shard_id: bytes
    prefix: str
    number: int
    outputs: int
    first: int
    stop: int
    columns: tuple[tuple[str, str], ...]
    media: bool
    nbytes: int

    @property
    def paths(self) -> ShardPaths:
        paths = ShardPaths.of(output_prefix(self.prefix, self.number, self.outputs))
        return paths.with_columns(name for name, _ in self.columns).with_media(self.media)

    def entry(self) -> dict[str, Any]:
        """Return the entry ``split`` of the output's JSON block: the original shard and the packs taken from it."""
        return {
            "shard_id": self.shard_id.hex(),
            "part": self.number,
            "parts": self.outputs,
            "first_pack": self.first,
            "num_packs": self.stop - self.first,
            **({"columns": dict(self.columns)} if self.columns else {}),
        }

    def existing_header(self, *, overwrite: bool) -> Header | None:
        """Return the header of this same output if it already exists, published or set aside and complete.

        FormatError, ShardNotFoundError: the shard at its prefix lacks files or columns, or breaks a rule.
        """
        paths = ShardPaths.of(self.paths.prefix)  # its columns may be others
        if is_set_aside(paths.prefix):
            header = complete_header(paths)
            return header if header.metadata.get(SPLIT) == self.entry() else None
        if not os.path.exists(paths.seq_idx):
            return None
        if overwrite:
            return None
        header = Shard(paths.prefix).header
        if header.metadata.get(SPLIT) != self.entry():
            return None
        for name, _ in self.columns:
            open_column(paths, name, header, "pread")
        return header


def _spans(shard: Shard, first: int, stop: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the tokens and the sequences of packs ``[first, stop)``, each as first and end."""

    def span(offsets: Array) -> tuple[int, int]:
        return int(offsets[first : first + 1][0]), int(offsets[stop : stop + 1][0])

    return span(shard.files.token_offsets), span(shard.files.sequence_offsets)


def _plan(shard: Shard, columns: OpenColumns, prefix: str, size: SplitSize) -> list[_Output]:
    """Return the outputs in order. FormatError: there are too many."""
    num_packs = shard.header.num_packs

    def before(pack: int) -> int:
        """Return the bytes of all packs before this one, in all files. Media count as if no two files were equal."""
        (_, tokens), (_, sequences) = _spans(shard, 0, pack)
        rows = {"token": tokens, "sequence": sequences, "pack": pack}
        beside = sum(rows[column.spec.per] * column.spec.row_nbytes for column in columns.values())
        token_nbytes = shard.header.token_dtype.itemsize + shard.header.mask_dtype.itemsize
        media = shard.media.nbytes_before(pack) if shard.media is not None else 0
        return tokens * token_nbytes + 4 * sequences + pack * _PACK_NBYTES + beside + media

    first_packs: Iterable[int]
    if size.packs is not None:
        first_packs = range(0, max(num_packs, 1), size.packs)
    elif size.shards is not None:
        shards = size.shards
        first_packs = (num_packs * number // shards for number in range(shards))
    else:
        first_packs = _first_packs_by_nbytes(num_packs, size.nbytes or 1, before)
    edges = [*islice(first_packs, _MAX_OUTPUTS + 1), num_packs]
    if len(edges) > _MAX_OUTPUTS + 1:
        raise FormatError(
            f"{shard.prefix}: the split would make more than {_MAX_OUTPUTS} parts of five files each; choose larger"
            " parts"
        )
    checksums = tuple((name, column.header.checksum.hex()) for name, column in columns.items())
    media = shard.media is not None
    return [
        _Output(
            shard.shard_id, prefix, number, len(edges) - 1, first, stop, checksums, media, before(stop) - before(first)
        )
        for number, (first, stop) in enumerate(pairwise(edges))
    ]


def _first_packs_by_nbytes(num_packs: int, nbytes: int, before: Callable[[int], int]) -> Iterator[int]:
    """Yield the first pack of each output of at most ``nbytes`` bytes; ``before`` returns the bytes before a pack."""
    first = 0
    while first < max(num_packs, 1):
        yield first
        limit = before(first) + nbytes - _EMPTY_NBYTES
        # As many packs as fit, but at least one.
        first += max(1, bisect.bisect_right(range(first + 1, num_packs + 1), limit, key=before))


def refuse_other_splits(prefix: str, count: int) -> None:
    """Raise FormatError if outputs of a split into another number of shards exist: a glob would match both."""
    for path in glob.iglob(f"{glob.escape(prefix)}-*-of-*.seq.idx"):
        name = re.fullmatch(r"-\d{5}-of-(\d{5})", path[len(prefix) : -len(".seq.idx")])
        if name and int(name[1]) != count:
            raise FormatError(
                f"{path}: belongs to a split into {int(name[1])} parts, but this split has {count}; remove the old"
                " parts first, or choose another prefix"
            )
