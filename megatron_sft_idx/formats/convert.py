"""Packed data of one format to another: written, read again, compared with the source, and only then published."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import PADDED, MaskAlignment, PackedSpec, PackedWriter
from megatron_sft_idx.formats.bridge import PaddedPacks, Padding, check_packs_summary, publish_with_summary
from megatron_sft_idx.formats.registry import (
    JoinedReader,
    Source,
    check_destination,
    create,
    find,
    places,
    reader_options,
)
from megatron_sft_idx.packs.run import PackRun
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.progress import Update
from megatron_sft_idx.storage.publish import Place, require_apart

__all__ = ["COLUMNS", "Content", "ConvertOptions", "ConvertReport", "convert", "summary_path"]


# What is compared, and what people call it.
COLUMNS = {"tokens": "token ids", "masks": "loss masks", "sequences": "sequence lengths", "packs": "packs"}


class Content:
    """A running hash of packs, array by array, so that it does not matter in which runs they come.

    Values are brought to one form first: ids int32, masks float32, lengths and counts int64, all little-endian;
    those of columns have their own.

    Attributes:
        num_packs: packs so far.
        num_sequences: sequences so far.
        num_tokens: tokens so far.
        num_trained_tokens: positions trained on so far.
    """

    def __init__(self) -> None:
        self._hashes = {column: StreamHash() for column in COLUMNS}
        self._columns: dict[str, StreamHash] = {}
        self.num_packs = self.num_sequences = self.num_tokens = self.num_trained_tokens = 0

    def add(self, run: PackRun) -> None:
        """The next packs."""
        self.num_packs += len(run.pack_lengths)
        self.num_sequences += len(run.seq_starts)
        self.num_tokens += len(run.tokens)
        self.num_trained_tokens += int(np.count_nonzero(run.loss_mask))
        self._update("tokens", run.tokens, "<i4")
        self._update("masks", run.loss_mask, "<f4")
        self._update("sequences", run.sequence_lengths(), "<i8")
        self._update("packs", run.pack_sequences, "<i8")
        for name, (spec, values) in run.columns.items():
            self._columns.setdefault(name, StreamHash()).update(np.ascontiguousarray(values, spec.dtype).reshape(-1))

    def _update(self, column: str, values: NDArray[Any], dtype: str) -> None:
        self._hashes[column].update(np.ascontiguousarray(values, dtype))

    def differs(self, other: Content, ignored: Collection[str] = ()) -> list[str]:
        """Names of the columns that are not the same, but for those ignored."""
        ours, theirs = dict(self._hashes), dict(other._hashes)
        if "columns" not in ignored:
            ours, theirs = ours | self._columns, theirs | other._columns
        return [
            COLUMNS.get(column, f"column {column}")
            for column in ours | theirs
            if column not in ignored
            and not (column in ours and column in theirs and ours[column].checksum() == theirs[column].checksum())
        ]


@dataclass(frozen=True)
class ConvertOptions:
    """How packs are read and written.

    Attributes:
        source_format: name of the source's format; None has it recognised by content.
        mask_alignment: of the source's loss masks, where its format does not say.
        capacity: most token positions a pack may hold, for sources that do not know it; None takes what they say.
        overwrite: replace what is at the destination.
        allow_loss: let go what the destination's format has no place for; without it that is an error.
        verify: read the result again and compare it with what was read from the source.
        padding: for ``parquet``: store sequences as Megatron-Bridge wants them under context parallelism, and write the
            summary of them that it reads beside the file (``summary_path``).
        reader: options of the source's format; ``columns`` of any: those that are carried, None for all.
        writer: options of the destination's format.
    """

    source_format: str | None = None
    mask_alignment: MaskAlignment = "label"
    capacity: int | None = None
    overwrite: bool = False
    allow_loss: bool = False
    verify: bool = True
    padding: Padding | None = None
    reader: Mapping[str, Any] = field(default_factory=dict)
    writer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        source_format: name of the source's format.
        paths: what was read, in order.
        content: of the source, with the padding that was asked for: counts and hashes.
        spec: as handed to the writer.
        notes: what was understood of the source, or set right, as sentences.
        lost: what the destination's format has no place for, as sentences.
        verified: the result was read again and is equal to the source in everything not lost.
    """

    source_format: str
    paths: tuple[str, ...]
    content: Content
    spec: PackedSpec
    notes: list[str]
    lost: list[str]
    verified: bool


def convert(
    source: Source,
    destination: str,
    to: str,
    options: ConvertOptions | None = None,
    *,
    begun: Callable[[str, int], Update] | None = None,
) -> ConvertReport:
    """Convert packed data; several sources of one format become one result.

    Heap stays below 256 MiB, but for a format that can only be read whole (``npy``). The same source and options give
    the same bytes. The result is read again, and compared with what went in, before it replaces anything.

    Args:
        source: path, glob, folder, or a list of these, as ``open_dataset`` takes it.
        destination: file, folder or prefix to write.
        to: name of its format.
        options: how.
        begun: called as a pass over the data begins, with the pass's name and the number of tokens; what it returns
            is called as the pass goes on, with tokens and packs.

    Raises:
        FormatError: a source that is not what its format says, a destination that is taken or is a source, something
            the format has no place for, or a result that differs.
        SequenceError: a pack breaks a rule.
    """
    options = options or ConvertOptions()
    name, paths = find(source, options.source_format)
    reading = dict(options.reader)
    sources = [place for path in paths for place in places(path, name, "the source")]
    if reading.get("mask_path") is not None:
        sources += places(os.fspath(reading["mask_path"]), "megatron", "--mask-path")
    written = places(destination, to, "the destination", written=True)
    if options.padding is not None:
        if to != "parquet":
            raise FormatError(f"{destination}: padding is stored in parquet alone, for Megatron-Bridge; leave it out")
        written.append(Place(summary_path(destination), "the summary of packs"))
    require_apart(written, sources)
    check_destination(destination, to, overwrite=options.overwrite)
    if to == "parquet":
        check_packs_summary(summary_path(destination), overwrite=options.overwrite, padded=options.padding is not None)
    if name == "npy" and options.capacity is not None:
        reading["capacity"] = options.capacity  # its packers exceed what they were given, which its reader knows
    columns = reading.pop("columns", None)  # else all that there are
    if "columns" in reader_options(name):
        reading["columns"] = columns
    parts = JoinedReader(name, paths, mask_alignment=options.mask_alignment, max_open=1, options=reading)
    padding, content = options.padding, Content()
    apart = parts.columns_apart
    if apart and not options.allow_loss:
        raise FormatError(f"{next(iter(apart.values()))}; pass allow_loss (--allow-loss) to leave it out")
    spec, summary = _planned(parts, destination, options, begun)
    with create(
        destination, to, spec, overwrite=options.overwrite, allow_loss=options.allow_loss, **options.writer
    ) as writer:
        runs = parts.runs() if padding is None else map(padding.pad, parts.runs())
        runs = (_as_written(run, spec) for run in runs)
        for run in _counted(runs, begun and begun("converting", spec.num_tokens)):
            writer.write(run)
            content.add(run)
        writer.complete()
        if options.verify:
            _verify(destination, writer, content, spec, begun and begun("verifying", spec.num_tokens))
        if to == "parquet":
            publish_with_summary(writer, summary_path(destination), summary, overwrite=options.overwrite)
    lost = [*apart.values(), *writer.lost.values()]
    return ConvertReport(name, parts.paths, content, spec, parts.notes, lost, options.verify)


def summary_path(destination: str) -> str:
    """Where the summary of a padded file goes, for Bridge's ``packed_metadata_path``."""
    return f"{destination}.json"


def _planned(
    parts: JoinedReader, destination: str, options: ConvertOptions, begun: Callable[[str, int], Update] | None
) -> tuple[PackedSpec, bytes | None]:
    """What the writer is told, and with padding the summary of its packs."""
    spec = _spec_for_output(parts, options)
    if options.padding is None:
        return spec, None
    packs = PaddedPacks(parts.paths[0], options.padding, spec)
    packs.measure(_counted(parts.runs(), begun and begun("measuring", spec.num_tokens)))
    summary = packs.metadata()
    check_packs_summary(summary_path(destination), overwrite=options.overwrite, padded=True, summary=summary)
    return packs.padded_spec(), summary


def _spec_for_output(parts: JoinedReader, options: ConvertOptions) -> PackedSpec:
    """What the writer is told, once it is known that masks are not shifted twice and that packs fit."""
    spec = parts.spec
    for number, path in enumerate(parts.paths):
        if (padding := parts.reader(number).spec.metadata.get(PADDED)) is not None:
            multiple = padding.get("multiple") if isinstance(padding, dict) else padding
            raise FormatError(
                f"{path}: its sequences are filled up to multiples of {multiple} for Megatron-Bridge, and where their"
                " own tokens end is not said; convert what it was made from"
            )
    said = spec.metadata.get("mask_alignment")
    if said == "label" and options.mask_alignment != "label":
        raise FormatError(
            f"{parts.paths[0]}: its metadata say that its loss masks are label-aligned already; taking them as"
            f" {options.mask_alignment} would shift them twice: leave --mask-alignment out"
        )
    if options.capacity is None or parts.name == "npy":
        return spec
    if spec.longest_pack > options.capacity:
        raise SequenceError(
            parts.paths[0],
            None,
            f"the longest pack has {spec.longest_pack} tokens, --capacity is {options.capacity}; raise it, or pack"
            " the result again (the pack verb)",
        )
    return dataclasses.replace(spec, capacity=options.capacity)


def _as_written(run: PackRun, spec: PackedSpec) -> PackRun:
    """A run in the dtypes of the whole, which the files of several sources may be narrower than, and with its columns.

    Those are the ones that all sources have.
    """
    tokens = run.tokens.astype(spec.token_dtype, copy=False)
    mask = run.loss_mask.astype(spec.mask_dtype, copy=False)
    columns = {name: run.columns[name] for name in spec.columns}
    return dataclasses.replace(run, tokens=tokens, loss_mask=mask, columns=columns)


def _counted(runs: Iterable[PackRun], progress: Update | None) -> Iterable[PackRun]:
    for run in runs:
        yield run
        if progress is not None:
            progress(len(run.tokens), len(run.pack_lengths))


def _verify(path: str, writer: PackedWriter, expected: Content, spec: PackedSpec, progress: Update | None) -> None:
    """FormatError unless what was written is what went in, but for what its format has no place for."""
    found, reader = Content(), writer.reread()
    for run in _counted(reader.runs(), progress):
        found.add(run)
    different = expected.differs(found, writer.lost)
    if "columns" not in writer.lost and reader.columns != spec.columns:
        different.append("kinds of columns")
    if different:
        raise FormatError(
            f"{path}: read again, its {', '.join(different)} are not those of the source: {found.num_packs} packs with"
            f" {found.num_tokens} tokens, {found.num_trained_tokens} trained on; expected {expected.num_packs},"
            f" {expected.num_tokens}, {expected.num_trained_tokens}. What was written is removed again, and what was"
            " at this place before is still there. The disk may be failing: convert again to another one"
        )
