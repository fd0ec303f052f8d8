"""Write the shards of a job in the order of a plan, from the sequences of a reader, and publish them together.

A job makes one shard at its prefix, or several whose prefixes begin with it, each with consecutive packs of one plan.
``make_packs`` converts sequences to shards, for every command that packs.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import WEIGHTED_BY, ColumnSpec, weighted_by
from megatron_sft_idx.layout.files import MEDIA_ENTRY, listed_columns, listed_media
from megatron_sft_idx.packs.split import output_prefix
from megatron_sft_idx.shard import BuildOptions, ShardWriter, read_header
from megatron_sft_idx.shard.columns import open_column
from megatron_sft_idx.shard.publication import is_set_aside, places_of, publish_outputs
from megatron_sft_idx.shard.recovery import complete_header
from megatron_sft_idx.storage.building import Building
from megatron_sft_idx.storage.progress import Progress, Update
from megatron_sft_idx.storage.publish import Place, require_apart
from megatron_sft_idx.tokenize.encoding import RowEncoder
from megatron_sft_idx.tokenize.local import Local
from megatron_sft_idx.tokenize.parts import PartsReader, PartsSoFar, PartsTable
from megatron_sft_idx.tokenize.plan import PackOptions, PlannedRun, SequenceReader, chosen_where, plan_packs
from megatron_sft_idx.tokenize.ray import Cluster
from megatron_sft_idx.tokenize.selection import Selected

# Maximum time for which a shard may be locked by an earlier attempt.
_LOCK_SECONDS = 60.0


def output_prefixes(prefix: str, shards: int, *, valid: bool = False) -> list[str]:
    """Return the prefixes of the shards of a job: the prefix itself, or ``PREFIX-00000-of-00008`` and so on.

    ``valid`` adds ``PREFIX.valid``, the validation shard.
    """
    trained = [prefix] if shards == 1 else [output_prefix(prefix, number, shards) for number in range(shards)]
    return [*trained, f"{prefix}.valid"] if valid else trained


def require_outputs_apart(
    prefixes: Sequence[str], reads: Iterable[Place], columns: Iterable[str] = (), *, media: bool = False
) -> None:
    """Raise FormatError if shards at these prefixes, with these columns, would replace one of their input files."""
    paths = [ShardPaths.of(prefix).with_columns(columns).with_media(media) for prefix in prefixes]
    require_apart([place for each in paths for place in places_of(each, "the output", written=True)], reads)


# ---- one shard ----


class PlannedShard(NamedTuple):
    """One shard for a job to write; picklable, and small enough to send to another machine.

    Attributes:
        prefix: prefix of the shard.
        build: options for its writer.
        work: name of the command that makes it.
        overwrite: whether it may replace a shard at its prefix.
        run: its packs, about 12 bytes per sequence.
    """

    prefix: str
    build: BuildOptions
    work: str
    overwrite: bool
    run: PlannedRun

    @property
    def paths(self) -> ShardPaths:
        """Its files, including columns, images and audio."""
        return self.build.paths_of(ShardPaths.of(self.prefix))

    def existing_header(self) -> Header | None:
        """Return the header of this same shard if it is set aside, or published and not to be replaced; else None."""
        paths = ShardPaths.of(self.prefix)  # its columns may be others
        with contextlib.suppress(FormatError, ShardNotFoundError):
            if is_set_aside(self.prefix):
                header, paths = complete_header(paths), paths.unpublished
            elif self.overwrite or paths.missing():
                return None
            else:
                header = read_header(self.prefix)
            written: dict[str, Any] = {"format_writer": None, "columns": None, MEDIA_ENTRY: None}
            same = header.metadata | written == self.build.metadata | written
            same = same and (listed_media(header.metadata) is not None) == self.build.media
            if same and listed_columns(header.metadata).keys() == self.build.columns.keys():
                specs = {name: open_column(paths, name, header, "pread").spec for name in self.build.columns}
                return header if specs == self.build.columns else None
        return None


def write_packs(
    reader: SequenceReader, run: PlannedRun, writer: ShardWriter, progress: Update = lambda units, items: None
) -> None:
    """Write the packs, one window at a time, while another thread reads the next window."""
    # As many packs as certainly fit in the token limit of the window, and at least one.
    packs_per_window = max(1, reader.window_tokens // max(run.longest, 1))
    firsts = deque(range(0, len(run.offsets) - 1, packs_per_window))
    with ThreadPoolExecutor(1, "gather") as thread:
        reading: deque[Any] = deque()
        while firsts or reading:
            while firsts and len(reading) < 2:
                window = run.window(first := firsts.popleft(), first + packs_per_window)
                reading.append((window, thread.submit(reader.read, window)))
            window, future = reading.popleft()
            ids, mask, columns, media = future.result()
            lengths, counts = window.lengths.astype(np.int64), np.diff(window.offsets)
            ends = np.cumsum(lengths)
            pack_ends = ends[window.offsets[1:] - 1]
            pack_lengths = np.diff(pack_ends, prepend=0)
            starts = ends - lengths - np.repeat(pack_ends - pack_lengths, counts)
            alignment = reader.mask_alignment
            writer.add_packs(
                ids, mask, starts, pack_lengths, counts, mask_alignment=alignment, columns=columns, media=media
            )
            progress(len(lengths), len(lengths))


def write_shard(
    reader: SequenceReader,
    output: PlannedShard,
    progress: Update = lambda units, items: None,
    *,
    building: Building | None = None,
    wait: float = 0.0,
) -> Header:
    """Write one shard, and set it aside until all shards of the job are complete.

    The last two arguments are the writer's.
    """
    with ShardWriter.begin(
        output.prefix, output.build, work=output.work, overwrite=output.overwrite, building=building, wait=wait
    ) as writer:
        write_packs(reader, output.run, writer, progress)
        return writer.set_aside()


def gather_shard(table: PartsTable, output: PlannedShard) -> Header:
    """The task that writes one shard from parts, on any machine.

    A shard that an earlier attempt finished is not written again; an unfinished one is.
    """
    if (header := output.existing_header()) is not None:
        return header
    # An attempt on a node that was given up may continue for some seconds.
    return write_shard(PartsReader(table), output, wait=_LOCK_SECONDS)


# ---- all shards of a job ----


@dataclass(frozen=True, slots=True, eq=False)
class ToPack:
    """Sequences to pack, and the common properties of their shards.

    Attributes:
        reader: reader of the sequences.
        lengths: number of tokens of each, int64 [sequences].
        name: their name in errors.
        build: options of all their shards, except for capacity, multiple, and packing metadata.
        origin: packing metadata besides the options: ``source`` is the id of the source shard, or the fingerprint of
            the input.
        groups: numbers of pairs, int64 [sequences]; None if sequences are not pairs.
        selected: the sequences of selected rows; None for all.
        kept: the sequences for which all conditions of ``PackOptions.where`` hold, bool [sequences]; None without any.
    """

    reader: SequenceReader
    lengths: NDArray[np.int64]
    name: str
    build: BuildOptions
    origin: Mapping[str, Any]
    groups: NDArray[np.integer[Any]] | None = None
    selected: Selected | None = None
    kept: NDArray[np.bool_] | None = None

    @classmethod
    def of_parts(
        cls,
        parts: PartsSoFar,
        encoder: RowEncoder,
        name: str,
        sources: Mapping[str, Any],
        *,
        columns: Mapping[str, ColumnSpec] | None = None,
        **metadata: Any,
    ) -> ToPack:
        """All sequences of parts.

        Args:
            parts: the parts, whose ``lengths`` are cleared.
            encoder: the encoder that made them.
            name: name of the sequences in errors.
            sources: metadata of the input for headers: its ``fingerprint``, and more.
            columns: the columns of the shards, by name.
            metadata: further metadata for headers.
        """
        columns = columns or {}
        files = columns["source"].metadata["files"] if "source" in columns else []
        reader, lengths = (
            parts.reader(columns, [file["name"] for file in files], media=encoder.processor is not None),
            np.concatenate(parts.lengths).astype(np.int64),
        )
        parts.lengths.clear()  # gigabytes in a large job
        build = BuildOptions(
            encoder.token_dtype,
            reader.mask_dtype,
            capacity=None,
            sequence_multiple=1,
            pad_id=encoder.tokenizer.pad_id,
            metadata={**encoder.describe(), "sources": dict(sources), "notes": parts.notes, **metadata},
            columns=dict(columns),
            media=encoder.processor is not None,
        )
        groups = np.arange(len(lengths)) // 2 if "pair" in columns else None
        return cls(reader, lengths, name, build, {"source": sources["fingerprint"]}, groups)

    def weighted(self, column: str) -> ToPack:
        """Return the same with masks multiplied by a column. See ``SequenceReader.weigh_by`` for errors."""
        sequences = np.arange(len(self.lengths)) if self.kept is None else np.flatnonzero(self.kept)
        if self.selected is not None:
            chosen = np.unique(np.concatenate([self.selected.train, self.selected.valid]))
            sequences = np.intersect1d(sequences, chosen, assume_unique=True)
        self.reader.weigh_by(column, sequences, self.lengths[sequences])
        metadata = {**self.build.metadata, WEIGHTED_BY: [*weighted_by(self.build.metadata), column]}
        return replace(self, build=replace(self.build, mask_dtype=self.reader.mask_dtype, metadata=metadata))

    def planned(
        self,
        prefix: str,
        options: PackOptions,
        *,
        shards: int,
        work: str,
        overwrite: bool,
        chosen: NDArray[np.int64] | None = None,
    ) -> tuple[list[PlannedShard], list[tuple[str, int]]]:
        """Return the shards of one plan, for the ``chosen`` sequences or all, and ``Packing.overlong``.

        Their numbers of packs differ by at most one.

        See ``make_packs`` and ``plan_packs`` for arguments and errors.
        """
        left_out = {}
        if self.kept is not None:
            numbers = np.arange(len(self.lengths)) if chosen is None else chosen
            chosen = chosen_where(numbers, self.kept, options, self.name)
            left_out = {"left_out": len(numbers) - len(chosen)}
        packing = plan_packs(
            self.lengths,
            options,
            shards=shards,
            name=self.name,
            groups=self.groups,
            chosen=chosen,
            selected={} if self.selected is None else self.selected.counts,
            reader=self.reader,
        )
        planned, packs = [], packing.plan.num_packs
        for number, path in enumerate(output_prefixes(prefix, shards)):
            first, last = packs * number // shards, packs * (number + 1) // shards
            share = {"part": number, "parts": shards, "first_pack": first, "num_packs": last - first}
            described = {**packing.metadata, **left_out, **self.origin, **({"part": share} if shards > 1 else {})}
            build = replace(
                self.build,
                capacity=options.capacity,
                sequence_multiple=options.sequence_multiple,
                metadata={**self.build.metadata, "packing": described},
            )
            planned.append(PlannedShard(path, build, work, overwrite, packing.run.window(first, last)))
        return planned, packing.overlong


class MadePacks(NamedTuple):
    """The shards of a job.

    Attributes:
        headers: their headers.
        found: whether all of them already existed.
        overlong: ``Packing.overlong`` of the training shards.
        valid_overlong: the same for the validation shard.
    """

    headers: list[Header]
    found: bool
    overlong: Sequence[tuple[str, int]] = ()
    valid_overlong: Sequence[tuple[str, int]] = ()


def make_packs(
    sequences: ToPack,
    job: Building,
    options: PackOptions,
    *,
    work: str,
    shards: int = 1,
    overwrite: bool = False,
    engine: Local | Cluster | None = None,
    log_interval: int = 0,
) -> MadePacks:
    """Plan packs, write them into shards and publish these: the training shards and the validation shard.

    Args:
        sequences: sequences to pack.
        job: the building folder of the prefix, already begun. It is removed at the end.
        options: how to pack.
        work: name of the command.
        shards: number of training shards.
        overwrite: whether shards may be replaced.
        engine: writes several shards in parallel, and needs a ``PartsReader``; without an engine they are written in
            this process, one by one.
        log_interval: see ``pack_shard``.

    Raises:
        SequenceError, FormatError: see ``plan_packs`` and ``publish_outputs``.
    """
    assert (sequences.kept is not None) == bool(options.where)
    if options.loss_weight_column is not None:
        sequences = sequences.weighted(options.loss_weight_column)
    reader, selected, prefix = sequences.reader, sequences.selected, job.output
    chosen = None if selected is None else selected.train
    common: dict[str, Any] = {"work": work, "overwrite": overwrite}
    outputs, overlong = sequences.planned(prefix, options, shards=shards, chosen=chosen, **common)
    valid_overlong: list[tuple[str, int]] = []
    if selected is not None and len(selected.valid):
        valid = output_prefixes(prefix, 1, valid=True)[-1]
        validation, valid_overlong = sequences.planned(valid, options, shards=1, chosen=selected.valid, **common)
        outputs += validation
    total = sum(len(output.run.lengths) for output in outputs)
    written: list[int] = []
    with Progress("packing", total, unit="seq", log_interval=log_interval, items="sequences") as progress:

        def write(numbers: Sequence[int]) -> Iterable[Header]:
            written.extend(numbers)
            missing = [outputs[number] for number in numbers]
            # A shard in the job's own folder is written by this process, which holds the folder's lock. A single local
            # shard is also written here, because this process can show its progress.
            own = [output for output in missing if output.prefix == prefix]
            others = [output for output in missing if output.prefix != prefix]
            headers = {output.prefix: write_shard(reader, output, progress.update, building=job) for output in own}
            if engine is None or (isinstance(engine, Local) and (len(others) < 2 or not engine.workers)):
                headers |= {output.prefix: write_shard(reader, output, progress.update) for output in others}
            elif others:
                assert isinstance(reader, PartsReader)
                made = engine.map_in_order(
                    gather_shard,
                    reader.table,
                    others,
                    name_of=lambda output: output.prefix,
                    on_result=lambda header: progress.update(header.num_sequences, header.num_sequences),
                )
                headers |= {output.prefix: header for output, header in zip(others, made, strict=True)}
            return [headers[output.prefix] for output in missing]

        headers = publish_outputs(
            job,
            [output.paths for output in outputs],
            write,
            overwrite=overwrite,
            existing_header=lambda number: outputs[number].existing_header(),
        )
    return MadePacks(headers, not written, overlong, valid_overlong)
