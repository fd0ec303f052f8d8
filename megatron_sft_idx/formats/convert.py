"""Packed data of one format to another: written, read again, compared with the source, and only then published.

Behind it, what Megatron-Bridge wants beside a packed Parquet file: padding inside its packs, and a summary of them.
Under context parallelism, and for CUDA graphs, Bridge's packed data set takes ``pad_seq_to_mult`` and
``pad_cu_seqlens``. Neither pads anything as it reads: sequences have to be stored padded, with the tokenizer's
end-of-sequence id, and a JSON file has to say the longest sequence and the most sequences of a pack. All of it counts
positions of its batches, which cut the last token off every sequence: one of n tokens takes n - 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import PADDED, Counts, MaskAlignment, PackedSpec, PackedWriter
from megatron_sft_idx.formats.registry import (
    JoinedReader,
    Source,
    check_destination,
    create,
    find,
    places,
    reader_options,
)
from megatron_sft_idx.packs.run import Column, PackRun
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.progress import Update
from megatron_sft_idx.storage.publish import (
    Identity,
    Kind,
    Place,
    check_place,
    head_of,
    identity,
    new_file,
    remove_file,
    require_apart,
    resolve,
)


class Content(Counts):
    """A running hash of packs, array by array, so that it does not matter in which runs they come.

    Values are brought to one form first: ids int32, masks float32, lengths and counts int64, all little-endian;
    those of columns have their own.

    Attributes:
        num_trained_tokens: positions trained on so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_trained_tokens = 0
        # By what a writer calls it that lets it go, and what people call it.
        self._hashes: dict[tuple[str, str], StreamHash] = {}

    def add(self, run: PackRun) -> None:
        """The next packs."""
        super().add(run)
        self.num_trained_tokens += int(np.count_nonzero(run.loss_mask))
        for what, shown, values, dtype in (
            ("tokens", "token ids", run.tokens, "<i4"),
            ("masks", "loss masks", run.loss_mask, "<f4"),
            ("sequences", "sequence lengths", run.sequence_lengths(), "<i8"),
            ("packs", "packs", run.pack_sequences, "<i8"),
            *(("columns", f"column {name}", values, spec.dtype) for name, (spec, values) in run.columns.items()),
        ):
            held = self._hashes.setdefault((what, shown), StreamHash())
            held.update(np.ascontiguousarray(values, dtype).reshape(-1))

    def differs(self, other: Content, ignored: Collection[str] = ()) -> list[str]:
        """Names of the arrays that are not the same, but for those ignored."""
        ours, theirs = (
            {shown: held.checksum() for (what, shown), held in one._hashes.items() if what not in ignored}
            for one in (self, other)
        )
        return [shown for shown in ours | theirs if ours.get(shown) != theirs.get(shown)]


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
    padding, content = options.padding, Content()
    name, paths = find(source, options.source_format)
    reading = dict(options.reader)
    sources = [place for path in paths for place in places(path, name, "the source")]
    if reading.get("mask_path") is not None:
        sources += places(os.fspath(reading["mask_path"]), "megatron", "--mask-path")
    written = places(destination, to, "the destination", written=True)
    if padding is not None:
        if to != "parquet":
            raise FormatError(f"{destination}: padding is stored in parquet alone, for Megatron-Bridge; leave it out")
        written.append(Place(summary_path(destination), "the summary of packs"))
    require_apart(written, sources)
    check_destination(destination, to, overwrite=options.overwrite)
    if to == "parquet":
        # Whether an older summary is the one that will be written, as a killed run leaves it, is seen later.
        _check_summary(destination, overwrite=options.overwrite or padding is not None, padded=padding is not None)
    if name == "npy" and options.capacity is not None:
        reading["capacity"] = options.capacity  # its packers exceed what they were given, which its reader knows
    columns = reading.pop("columns", None)  # else all that there are
    if "columns" in reader_options(name):
        reading["columns"] = columns
    parts = JoinedReader(name, paths, mask_alignment=options.mask_alignment, max_open=1, options=reading)
    apart = parts.columns_apart
    if apart and not options.allow_loss:
        raise FormatError(f"{next(iter(apart.values()))}; pass allow_loss (--allow-loss) to leave it out")
    spec, summary = _spec_for_output(parts, options), None
    if padding is not None:
        spec, summary = _padded(parts, padding, spec, begun and begun("measuring", spec.num_tokens))
    with create(
        destination, to, spec, overwrite=options.overwrite, allow_loss=options.allow_loss, **options.writer
    ) as writer:
        runs = parts.runs() if padding is None else map(padding.pad, parts.runs())
        for read in _counted(runs, begun and begun("converting", spec.num_tokens)):
            run = _as_written(read, spec)
            writer.write(run)
            content.add(run)
        writer.complete()
        if options.verify:
            _verify(destination, writer, content, spec, begun and begun("verifying", spec.num_tokens))
        if to == "parquet":
            _publish_with_summary(writer, destination, summary, overwrite=options.overwrite)
    lost = [*apart.values(), *writer.lost.values()]
    return ConvertReport(name, parts.paths, content, spec, parts.notes, lost, options.verify)


def summary_path(destination: str) -> str:
    """Where the summary of a padded file goes, for Bridge's ``packed_metadata_path``."""
    return f"{destination}.json"


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


# ---- what Megatron-Bridge wants beside a file ----

# What a summary says, in the order of ``_padded``.
_FIELDS = [
    "dataset_max_seqlen",
    "max_samples_per_bin",
    "packing_factor",
    "packing_efficiency",
    "pack_size",
    "min_packed_seqlen",
]
_MOST_NBYTES = 4096  # of a summary: six numbers


def _encoded(entry: dict[str, Any]) -> bytes:
    return orjson.dumps([entry]) + b"\n"


def _is_summary(path: str) -> bool:
    """Whether a file is, byte by byte, as ``_encoded`` writes one: Bridge's own, of the same fields, is spaced."""
    content = head_of(path, _MOST_NBYTES)
    try:
        (entry,) = orjson.loads(content)
        numbers = all(type(value) in (int, float) for value in entry.values())
    except (AttributeError, ValueError, TypeError):
        return False
    return numbers and [*entry] == _FIELDS and content == _encoded(entry)


_KIND = Kind("a summary of packs as convert writes it for Megatron-Bridge", _is_summary)


def _check_summary(destination: str, *, overwrite: bool, padded: bool) -> Identity | None:
    """What stands where the summary of a Parquet file goes, if it may be replaced or removed; FormatError else.

    Without padding a stranger's file at its place is nobody's concern, and passed over.
    """
    path = summary_path(destination)
    if padded:
        return check_place(resolve(path), _KIND, overwrite=overwrite)
    return check_place(path, _KIND, overwrite=overwrite) if _is_summary(path) else None


def _publish_with_summary(writer: PackedWriter, destination: str, summary: bytes | None, *, overwrite: bool) -> None:
    """Put a Parquet file in its place, and its summary, so that it never stands beside the summary of another.

    A kill on the way leaves the file without a summary, or the summary without its file, and the same command finishes.

    Args:
        writer: of the file, complete and synced.
        destination: where the file goes.
        summary: what it says; None for a file without one.
        overwrite: an older file and its summary may be replaced. The summary goes first, and the new one comes last.

    Raises:
        FormatError: something else has appeared at one of the places.
        OSError: the disk says no.
    """
    path = summary_path(destination)
    if summary is None:
        if (found := _check_summary(destination, overwrite=overwrite, padded=False)) is not None:
            remove_file(resolve(path), found)
        writer.finalize()
        return
    path = resolve(path)
    left = head_of(path, _MOST_NBYTES) == summary  # by a run that was killed
    found = _check_summary(destination, overwrite=overwrite or left, padded=True)
    if left and not overwrite:
        writer.finalize()
        return
    with new_file(path, _KIND, overwrite=overwrite) as new:
        new.open().write(summary)
        new.sync()
        if overwrite:
            remove_file(path, found)
            writer.finalize()
            new.publish()
            return
        # First: nothing is beside it yet. Behind the file, a kill would leave one that the same command refuses.
        new.publish()
    made = identity(path)
    try:
        writer.finalize()
    except BaseException:
        with contextlib.suppress(FormatError, OSError):
            remove_file(path, made)
        raise


@dataclass(frozen=True)
class Padding:
    """How sequences are stored for Bridge.

    Attributes:
        multiple: each takes a multiple of so many positions of a batch, 2 x context parallel size, times the tensor
            parallel size under sequence parallelism; 1 stores them as they are.
        eos_id: the id they are filled up with, the tokenizer's end of sequence, by which Bridge finds where padding
            begins; None only where ``multiple`` is 1.
    """

    multiple: int
    eos_id: int | None = None

    def positions(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of a batch that sequences of so many tokens take, padding included: int64, as ``lengths``."""
        return -(-(lengths - 1) // self.multiple) * self.multiple

    def pad(self, run: PackRun) -> PackRun:
        """The same packs with every sequence filled up; padding is not trained on, and 0 in columns of the tokens."""
        lengths = run.sequence_lengths()
        stored = self.positions(lengths) + 1
        begins = np.cumsum(stored) - stored
        places = np.arange(len(run.tokens)) + np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
        tokens = np.full(int(stored.sum()), self.eos_id or 0, run.tokens.dtype)
        tokens[places] = run.tokens

        def spread(values: NDArray[Any]) -> NDArray[Any]:
            padded = np.zeros((len(tokens), *values.shape[1:]), values.dtype)
            padded[places] = values
            return padded

        columns = {
            name: Column(spec, spread(values) if spec.per == "token" else values)
            for name, (spec, values) in run.columns.items()
        }
        pack_lengths = _by_pack(stored, run)
        starts = begins - np.repeat(np.cumsum(pack_lengths) - pack_lengths, run.pack_sequences)
        return PackRun(tokens, spread(run.loss_mask), starts, pack_lengths, run.pack_sequences, run.unplaced, columns)


def _by_pack(values: NDArray[np.int64], run: PackRun) -> NDArray[np.int64]:
    """Sums of the values of each pack's sequences: int64 [packs]."""
    sums: NDArray[np.int64] = np.diff(np.append(0, np.cumsum(values))[run.sequence_offsets])
    return sums


def _padded(
    parts: JoinedReader, padding: Padding, spec: PackedSpec, progress: Update | None
) -> tuple[PackedSpec, bytes]:
    """What is known of packs as they will be stored with padding, and the JSON that Bridge reads with them.

    Stored packs may be longer than the capacity of a batch. Where nothing is padded their spec is that of the packs
    as they are.

    Raises:
        FormatError: there are no packs, or no id to pad with.
        SequenceError: a pack does not fit the capacity once its sequences are padded.
    """
    path, multiple, eos_id = parts.paths[0], padding.multiple, padding.eos_id
    if not spec.num_packs:
        raise FormatError(f"{path}: it has no packs, and Megatron-Bridge reads no file without any")
    if multiple > 1 and (eos_id is None or not 0 <= eos_id <= np.iinfo(spec.token_dtype).max):
        raise FormatError(
            f"{path}: padding needs the tokenizer's end-of-sequence id, found {eos_id}, expected one that"
            f" {spec.token_dtype} holds; pass --eos-id"
        )
    first = total = longest = longest_pack = most_sequences = 0
    shortest_pack = spec.capacity
    for run in _counted(parts.runs(), progress):
        positions = padding.positions(run.sequence_lengths())
        packs = _by_pack(positions, run)
        if (over := packs > spec.capacity).any():
            pack = int(np.argmax(over))
            raise SequenceError(
                path,
                first + pack,
                f"{packs[pack]} positions with sequences padded to multiples of {multiple}, the capacity is"
                f" {spec.capacity}; pack again with --sequence-multiple {multiple}",
            )
        longest = max(longest, int(positions.max(initial=0)))
        most_sequences = max(most_sequences, int(run.pack_sequences.max(initial=0)))
        shortest_pack = min(shortest_pack, int(packs.min(initial=spec.capacity)))
        longest_pack = max(longest_pack, int((packs + run.pack_sequences).max(initial=0)))
        total += int(positions.sum())
        first += len(packs)
    summary = {
        "dataset_max_seqlen": longest,
        "max_samples_per_bin": most_sequences,
        "packing_factor": round(spec.num_sequences / spec.num_packs, 2),
        "packing_efficiency": round(total / spec.num_packs / spec.capacity * 100, 2),
        "pack_size": spec.capacity,
        "min_packed_seqlen": shortest_pack,
    }
    if multiple > 1:
        spec = dataclasses.replace(
            spec,
            num_tokens=total + spec.num_sequences,
            longest_pack=longest_pack,
            capacity=max(spec.capacity, longest_pack),
            sequence_multiple=1,
            metadata={**spec.metadata, PADDED: dataclasses.asdict(padding)},
        )
    return spec, _encoded(summary)
