"""``convert``: convert packed data from one format to another, as a stream.

The output is read again and compared with the source, array by array (``ContentHash``), before it replaces anything.
The same source and options give the same bytes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_sft_idx.errors import FormatError, SequenceError, check_option
from megatron_sft_idx.formats.base import PackCounts, PackedReader, PackedSpec
from megatron_sft_idx.formats.bridge import (
    BRIDGE_PADDING_KEY,
    Padding,
    check_summary_place,
    measure_padded,
    summary_path,
)
from megatron_sft_idx.formats.parquet import Writer as ParquetWriter
from megatron_sft_idx.formats.registry import (
    JoinedReader,
    Source,
    check_destination,
    create,
    open_reader,
    options_of_reader,
    places,
    resolve_source,
)
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.packs.run import MaskAlignment, PackRun, first_true
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.progress import Update
from megatron_sft_idx.storage.publish import Place, require_apart


class ContentHash(PackCounts):
    """A running hash of each array of packs, independent of the division into runs.

    Before hashing, ids are converted to int32, masks to float32, and lengths and counts to int64, all little-endian.
    Columns have the dtype of their spec.

    Attributes:
        num_trained_tokens: number of positions so far with a mask other than 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_trained_tokens = 0
        self._hashes: dict[str, StreamHash] = {}  # by the display name of each array

    def add(self, run: PackRun) -> None:
        """Count and hash the next packs."""
        super().add(run)
        self.num_trained_tokens += int(np.count_nonzero(run.loss_mask))
        for name, values, dtype in (
            ("token ids", run.tokens, "<i4"),
            ("loss masks", run.loss_mask, "<f4"),
            ("sequence lengths", run.sequence_lengths(), "<i8"),
            ("packs", run.pack_sequences, "<i8"),
            *((f"column {name}", values, spec.dtype) for name, (spec, values) in run.columns.items()),
        ):
            array_hash = self._hashes.setdefault(name, StreamHash())
            array_hash.update(np.ascontiguousarray(values, dtype).reshape(-1))
        # Runs without media may be from a source that has none, which a joined result cannot show.
        if run.media is not None and len(run.media):
            items, blobs = run.media.items, run.media.blobs
            first = self.num_sequences - len(run.media.counts)
            sequences = np.repeat(first + np.arange(len(run.media.counts)), run.media.counts)
            places = np.stack([sequences, *items[:3]], axis=1).astype("<i8")
            hashes = np.frombuffer(b"".join(map(blobs.hash, items.blobs.tolist())), np.uint8)
            for name, values in (("places of images and audio", places.reshape(-1)), ("images and audio", hashes)):
                self._hashes.setdefault(name, StreamHash()).update(values)

    def differences(self, other: ContentHash) -> list[str]:
        """Return the display names of the arrays that differ."""
        ours, theirs = (
            {name: array_hash.checksum() for name, array_hash in one._hashes.items()} for one in (self, other)
        )
        return [name for name in ours | theirs if ours.get(name) != theirs.get(name)]


@dataclass(frozen=True)
class ConvertOptions:
    """Options for reading and writing packs.

    Attributes:
        source_format: name of the source's format; None to detect it from the content.
        mask_alignment: alignment of the source's loss masks, if its format does not define it.
        capacity: maximum number of token positions in a pack, for sources that do not have it; None uses theirs.
        overwrite: replace an existing output at the destination.
        lossy: drop what the destination's format cannot store; otherwise that is an error.
        verify: read the result again and compare it with the data read from the source.
        padding: only for ``parquet``: store sequences with padding for Megatron-Bridge under context parallelism, and
            write its summary to ``bridge.summary_path``.
        reader: options of the source's ``Reader``. All formats have ``columns``, the names of columns to convert; None
            for all.
        writer: options of the destination's ``Writer``.

    Raises:
        FormatError: the capacity is not an integer of at least 1.
    """

    source_format: str | None = None
    mask_alignment: MaskAlignment = "label"
    capacity: int | None = None
    overwrite: bool = False
    lossy: bool = False
    verify: bool = True
    padding: Padding | None = None
    reader: Mapping[str, Any] = field(default_factory=dict)
    writer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.capacity is not None:
            check_option("--seq-length", self.capacity, int)


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion.

    Attributes:
        source_format: name of the source's format.
        paths: paths of the files, folders or shards that were read, in order.
        content: counts and hashes of the output, including padding.
        spec: spec of the output.
        notes: sentences on missing or wrong information in the source (``PackedReader.notes``).
        lost: sentences on what was dropped (``PackedWriter.lost``).
        verified: the result was read again and is equal to the source, except for what was dropped.
        found: the result already existed.
    """

    source_format: str
    paths: tuple[str, ...]
    content: ContentHash
    spec: PackedSpec
    notes: list[str]
    lost: list[str]
    verified: bool
    found: bool = False


def convert(
    source: Source,
    destination: str | os.PathLike[str],
    to: str,
    options: ConvertOptions | None = None,
    *,
    on_pass: Callable[[str, int], Update] | None = None,
) -> ConvertReport:
    """Convert packed data. Several sources of one format become one result.

    Heap memory stays below 256 MiB, except for a format that can only be read as a whole (``npy``).

    Args:
        source: path, glob, folder, or a list of these, as in ``open_dataset``.
        destination: file, folder or prefix to write.
        to: name of the output format.
        options: options for reading and writing.
        on_pass: called at the beginning of each pass over the data, with the pass's name and the number of tokens. It
            returns a function that is called after each run with its tokens and packs.

    Raises:
        FormatError: a source does not match its format, the destination exists or is a source, the destination's format
            cannot store something, or the result differs from the source.
        SequenceError: a pack breaks a rule.
    """
    options, destination = options or ConvertOptions(), os.fspath(destination)
    padding, content = options.padding, ContentHash()
    name, paths = resolve_source(source, options.source_format)
    _check_places(name, paths, destination, to, options)
    reader_of_all = JoinedReader(
        name, paths, mask_alignment=options.mask_alignment, max_open=1, options=_reader_options(name, paths[0], options)
    )
    unjoinable = reader_of_all.unjoinable_columns
    if unjoinable and not options.lossy:
        raise FormatError(f"{next(iter(unjoinable.values()))}; pass lossy (--lossy) to leave it out")
    _require_judged(name, paths, options)
    spec, summary = _spec_for_output(reader_of_all, options), None
    if padding is not None and spec.media:
        raise FormatError(
            f"{paths[0]}: the packs have images or audio, which Megatron-Bridge does not read; leave the padding out"
        )

    def runs_of_pass(runs: Iterable[PackRun], pass_name: str) -> Iterator[PackRun]:
        progress = on_pass and on_pass(pass_name, spec.num_tokens)
        for run in runs:
            yield run
            if progress is not None:
                progress(len(run.tokens), len(run))

    notes, capacity = [], spec.capacity
    if not spec.capacity_stated:
        notes.append(
            f"the source does not store its capacity, so the longest pack, {capacity:,} tokens, is used; pass"
            " --seq-length N if the packs were made for a larger one"
        )
    if padding is not None:
        spec, summary = measure_padded(paths[0], runs_of_pass(reader_of_all.runs(), "measuring"), padding, spec)
        if spec.longest_pack > capacity:
            notes.append(
                f"packed_sequence_size of Megatron-Bridge stays {capacity:,}: it does not count the last token of each"
                f" sequence, so a stored pack can have more tokens, here up to {spec.longest_pack:,}"
            )
    with create(destination, to, spec, overwrite=options.overwrite, lossy=options.lossy, **options.writer) as writer:
        # Padded only in the output dtype: that of a single source might not be able to hold the padding id.
        runs = (_as_written(run, spec) for run in reader_of_all.runs())
        for run in runs_of_pass(runs if padding is None else map(padding.pad, runs), "converting"):
            _require_room(run, spec, paths[0], content.num_packs)
            content.add(writer.write(run))
        writer.complete()
        if options.verify:
            reread = writer.reread()
            _verify(reread, runs_of_pass(reread.runs(), "verifying"), destination, content, writer.columns)
        if isinstance(writer, ParquetWriter):
            writer.set_summary(summary)
    lost = [*unjoinable.values(), *writer.lost.values()]
    notes = [*reader_of_all.notes, *notes]
    return ConvertReport(name, reader_of_all.paths, content, spec, notes, lost, options.verify, writer.found)


def _check_places(name: str, paths: list[str], destination: str, to: str, options: ConvertOptions) -> None:
    """Raise FormatError if the destination exists or is one of the sources; nothing is written yet."""
    padded = options.padding is not None
    summarised = padded or to == "npy"
    read = [place for path in paths for place in places(path, name, "the source")]
    if (mask_path := options.reader.get("mask_path")) is not None:
        read += places(os.fspath(mask_path), "megatron", "--mask-path")
    written = places(destination, to, "the destination", written=True)
    if padded and to != "parquet":
        raise FormatError(f"{destination}: padding for Megatron-Bridge is only supported in parquet; leave it out")
    if summarised:
        written.append(Place(summary_path(destination), "the summary of packs"))
    require_apart(written, read)
    check_destination(destination, to, overwrite=options.overwrite)
    if to in ("parquet", "npy"):
        check_summary_place(destination, overwrite=options.overwrite, written=summarised)


def _require_judged(name: str, paths: Sequence[str], options: ConvertOptions) -> None:
    """Raise FormatError if dropped columns mark bad answers, unless loss is allowed."""
    kept = options.reader.get("columns")
    if kept is None or options.lossy:
        return
    for path in paths:
        reader_options = _reader_options(name, path, options)
        reader = open_reader(path, name, mask_alignment=options.mask_alignment, **reader_options)
        reader.require_judged(kept, "convert with this column, or pass lossy (--lossy)")


def _reader_options(name: str, path: str, options: ConvertOptions) -> dict[str, Any]:
    """Return the options for the source's ``Reader``; without a choice of columns, all of them.

    Raises:
        FormatError: columns are requested by name for a format that has none.
    """
    known, reader_options = options_of_reader(name), dict(options.reader)
    columns = reader_options.pop("columns", None)
    if "columns" in known:
        reader_options["columns"] = columns
    elif columns:
        raise FormatError(f"{path}: columns {', '.join(columns)}: {name} sources have no columns; leave the option out")
    if "capacity" in known and options.capacity is not None:
        # Packers of this format exceed their capacity by an amount that its reader knows.
        reader_options["capacity"] = options.capacity
    return reader_options


def _spec_for_output(source: JoinedReader, options: ConvertOptions) -> PackedSpec:
    """Return the spec for the writer.

    Raises:
        FormatError: the source is padded for Megatron-Bridge, or its masks would be shifted twice.
        SequenceError: a pack is longer than the requested capacity.
    """
    spec = source.spec
    for path, single in zip(source.paths, source.specs, strict=True):
        if (padding := single.metadata.get(BRIDGE_PADDING_KEY)) is not None:
            multiple = padding.get("multiple") if isinstance(padding, dict) else padding
            raise FormatError(
                f"{path}: its sequences are padded to multiples of {multiple} for Megatron-Bridge, and their lengths"
                " without padding are not stored; convert the original file instead"
            )
    if spec.metadata.get("mask_alignment") == "label" and options.mask_alignment != "label":
        raise FormatError(
            f"{source.paths[0]}: according to its metadata, its loss masks are already label-aligned; --mask-alignment"
            f" {options.mask_alignment} would shift them twice: leave it out"
        )
    if options.capacity is None or "capacity" in source.options:
        return spec
    if spec.longest_pack > options.capacity:
        raise SequenceError(
            source.paths[0],
            None,
            f"the longest pack has {spec.longest_pack} tokens, but --seq-length is {options.capacity}; raise it, or"
            " pack the result again (megatron-sft-idx pack)",
        )
    return dataclasses.replace(spec, capacity=options.capacity, capacity_stated=True)


def _as_written(run: PackRun, spec: PackedSpec) -> PackRun:
    """Return a run with the dtypes and columns of ``spec``.

    A single source may have narrower dtypes or more columns.
    """
    tokens = run.tokens.astype(spec.token_dtype, copy=False)
    mask = run.loss_mask.astype(spec.mask_dtype, copy=False)
    columns = {name: run.columns[name] for name in spec.columns}
    return dataclasses.replace(run, tokens=tokens, loss_mask=mask, columns=columns)


def _require_room(run: PackRun, spec: PackedSpec, path: str, first_pack: int) -> None:
    """Raise SequenceError unless packs with rounded-up sequences fit in the requested capacity."""
    if (multiple := spec.sequence_multiple) == 1:
        return
    positions = run.padded_lengths(multiple)
    if (pack := first_true(positions > spec.capacity)) is not None:
        raise SequenceError(
            path,
            first_pack + pack,
            f"{positions[pack]} positions with sequences rounded up to multiples of {multiple}, but the capacity is"
            f" {spec.capacity} (rule P5); raise --seq-length, or pack the result again (megatron-sft-idx pack)",
        )


def _verify(
    reread: PackedReader,
    runs: Iterable[PackRun],
    path: str,
    expected: ContentHash,
    columns: Mapping[str, ColumnSpec],
) -> None:
    """Raise FormatError unless the runs of ``reread``, which reads the output, and its columns are as expected."""
    found = ContentHash()
    for run in runs:
        found.add(run)
    different = expected.differences(found)
    if reread.columns != columns:
        different.append("kinds of columns")
    if different:
        raise FormatError(
            f"{path}: the output was read again, and its {', '.join(different)} differ from the source: it has"
            f" {found.num_packs} packs with {found.num_tokens} tokens, {found.num_trained_tokens} trained on; expected"
            f" {expected.num_packs}, {expected.num_tokens}, {expected.num_trained_tokens}. The output was removed, and"
            " the previous file, if any, is unchanged. The disk may be failing: convert again to another one"
        )
