"""What all formats of packed data share: what is known of it, its reader, its writer, and the rules that packs keep.

A format is a module with a function ``recognise`` and a class ``Reader``, mostly also ``Writer``: it opens a path and
makes a run of some of its packs, begins a file or folder, appends runs and ends it. Options of its own are keywords of
``_open`` and ``_begin``. All else is here, the same for every pair of formats.

Loss masks of other people's files are brought to the one alignment of this package. *Label*: value j says whether
predicting token j + 1 of the same sequence counts; 0 at every sequence's end. *Token*: value j says whether token j
itself is trained on. *Rolled right*: a token mask that its writer moved one place to the right over the whole pack,
with 0 in front, meaning to align it with labels. That is the wrong way round, and across sequences; files of such
writers are read by undoing it. What the roll pushed out at the end of a pack, whether its last token is trained on, is
not in the file any more: it counts as untrained.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, get_args

import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout.column import ColumnSpec, check_name, column_count
from megatron_sft_idx.layout.files import MAX_CAPACITY, integer_array, mask_array, token_array
from megatron_sft_idx.packs.run import Columns, PackRun, run_bounds
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.storage import read_beginning
from megatron_sft_idx.storage.publish import Kind, PendingOutput, new_file, new_folder, require_space

if TYPE_CHECKING:
    from typing_extensions import Self

MaskAlignment = Literal["label", "token", "rolled-right"]
MASK_ALIGNMENTS: tuple[MaskAlignment, ...] = get_args(MaskAlignment)
# What was done to all masks of a file, as a sentence for ``PackedReader.notes``.
ALIGNMENT_NOTES = {
    "token": "loss masks taken as token-aligned: shifted left by one inside every sequence",
    "rolled-right": "loss masks taken as rolled right by one over each pack: rolled back, then shifted left inside"
    " every sequence; the value of each pack's last token was lost when it was written and counts as 0",
}
# The key, in what a file says of itself, of padding that is stored in its packs.
BRIDGE_PADDING_KEY = "bridge_padding"
_MAX_JSON_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """What is known of packed data before its first pack is read.

    Attributes:
        num_packs: packs.
        num_sequences: sequences in all of them.
        num_tokens: tokens in all of them, without padding.
        longest_pack: tokens in the longest.
        token_dtype: uint16 or int32.
        mask_dtype: uint8 or float32.
        capacity: most token positions a pack may hold; at least ``longest_pack``.
        sequence_multiple: sequences rounded up to this still fit the capacity.
        pad_id: the tokenizer's padding id, None where unknown.
        metadata: what else the file says of itself, JSON-able.
        num_trained_tokens: positions whose loss mask is above zero; None where only reading them all would tell.
        columns: what comes with the packs, by name.
    """

    num_packs: int
    num_sequences: int
    num_tokens: int
    longest_pack: int
    token_dtype: np.dtype[Any]
    mask_dtype: np.dtype[Any]
    capacity: int
    sequence_multiple: int = 1
    pad_id: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    num_trained_tokens: int | None = None
    columns: Mapping[str, ColumnSpec] = field(default_factory=dict)

    def stated(self) -> dict[str, Any]:
        """What files of other formats say of their packs in a place of ours, JSON-able: see ``spec_fields``."""
        keys = "capacity", "num_tokens", "longest_pack", "sequence_multiple", "pad_id"
        said = {key: getattr(self, key) for key in keys} | {"metadata": dict(self.metadata)}
        columns = {name: spec.encode() for name, spec in self.columns.items()}
        return said | {"columns": columns} if columns else said

    def column_nbytes(self) -> int:
        """Bytes that the values of all columns take."""
        counts = self.num_tokens, self.num_sequences, self.num_packs
        return sum(column_count(spec.per, *counts) * spec.row_nbytes for spec in self.columns.values())


class PackedReader(ABC):
    """One file, folder or shard of packed data, open for reading. Not pickled: each process opens its own.

    A format has ``_open``, which sets ``identity`` and ``_dtypes``, ``spec``, ``__len__``, and ``_run`` with
    ``_token_offsets``, or ``read`` and ``_runs``.

    Args:
        path: what is opened.
        mask_alignment: of its loss masks, where the format does not say.
        options: of the format, as its own class has them.

    Attributes:
        label_only: for formats that leave no choice of a mask alignment: why, with a place for the one that was asked.
        path: what was opened.
        identity: differs where the content does, as far as can be told without reading it all: an id, or sizes and
            times of change.
        columns: that its packs come with, by name.
        notes: what the file does not say and was understood, or was set right on the way, as sentences for people.

    Raises:
        FormatError: no such alignment, or none that the format can have; or what is there breaks a rule of its format.
    """

    label_only: ClassVar[str] = ""
    identity: str
    # What ids and masks are handed out as.
    _dtypes: tuple[np.dtype[Any], np.dtype[Any]] = (np.dtype(np.int32), np.dtype(np.uint8))
    # Where each pack begins in the tokens of all, and the last one ends: [packs + 1].
    _token_offsets: NDArray[np.int64]

    def __init__(
        self, path: str | os.PathLike[str], *, mask_alignment: MaskAlignment = "label", **options: Any
    ) -> None:
        self.path = os.fspath(path)
        self.alignment = checked_alignment(self.path, mask_alignment)
        self.notes: list[str] = []
        self.columns: dict[str, ColumnSpec] = {}
        if self.label_only and self.alignment != "label":
            raise FormatError(f"{self.path}: {self.label_only.format(mask_alignment)}")
        self._open(**options)

    @abstractmethod
    def _open(self, *args: Any, **options: Any) -> None:
        """Open the path, and check what can be checked without reading it all."""

    def _take_alignment(self, stated: object = None) -> None:
        """Take the alignment that a file says itself, where it does, and note what is done to the masks.

        Raises:
            FormatError: the caller says otherwise than the file: its masks would be shifted twice.
        """
        if stated in MASK_ALIGNMENTS:
            if self.alignment not in ("label", stated):
                raise FormatError(
                    f"{self.path}: it says that its loss masks are {stated}-aligned, mask alignment"
                    f" {self.alignment!r} would shift them once more; leave the option out"
                )
            self.alignment = stated
        if self.alignment in ALIGNMENT_NOTES:
            self.notes.append(ALIGNMENT_NOTES[self.alignment])

    @property
    @abstractmethod
    def spec(self) -> PackedSpec:
        """Counts and dtypes; may cost one pass over the lengths the first time."""

    @abstractmethod
    def __len__(self) -> int:
        """Packs."""

    def read(self, index: int) -> Pack:
        """Pack ``index``, which is within 0 and ``len(self) - 1``; arrays are read-only where they are views.

        Raises:
            SequenceError: the pack breaks a rule.
            FormatError: the file cannot be read, or is not as it was.
        """
        return self._run(index, index + 1).pack(0)

    def runs(self) -> Iterator[PackRun]:
        """All packs in order, some ``RUN_TOKENS`` tokens at a time and at least one pack. Raises as ``read``."""
        unplaced = 0
        for run in self._runs():
            unplaced += run.unplaced
            yield run
        # After the whole pass, and once however many there are.
        if unplaced and (note := unplaced_note(unplaced, self.alignment)) not in self.notes:
            self.notes.append(note)

    def _runs(self) -> Iterator[PackRun]:
        return (self._run(first, last) for first, last in run_bounds(self._token_offsets))

    def _run(self, first: int, last: int) -> PackRun:
        """Packs ``first`` up to ``last``, which keep every rule. Raises as ``read``."""
        raise NotImplementedError

    def _checked(self, first_pack: int, *arrays: ArrayLike, columns: Columns | None = None) -> PackRun:
        """``checked_run`` of arrays of this file, in its order, with the file's alignment and dtypes."""
        token_dtype, mask_dtype = self._dtypes
        how = {"mask_alignment": self.alignment, "token_dtype": token_dtype, "mask_dtype": mask_dtype}
        return checked_run(self.path, first_pack, *arrays, columns=columns, **how)  # type: ignore[arg-type]

    def _make_spec(self, num_sequences: int, num_tokens: int, longest_pack: int, **more: Any) -> PackedSpec:
        """The spec of packs of which so much was counted; its capacity is the longest of them where none is said."""
        counts = len(self), num_sequences, num_tokens, longest_pack
        return PackedSpec(*counts, *self._dtypes, **{"capacity": longest_pack, "columns": self.columns, **more})


class PackedWriter(ABC):
    """Packed data being written; a context manager: a clean exit finalizes, an exception leaves nothing behind.

    A format has ``_begin``, which calls ``_make_output`` once it has checked its options, ``_append`` and ``_finish``.

    Args:
        path: what is written.
        spec: what is going to be written, held against what came in the end; None where nobody knows.
        overwrite: replace what is there, where it is of ``kind``.
        allow_loss: let go what the format has no place for, and say so in ``lost``.
        options: of the format, as its own class has them.

    Attributes:
        format: the format's name, as ``--to`` takes it.
        reader: reads what is written.
        kind: what may be replaced.
        folder: whether the format is a folder of files.
        binary_masks: whether the format's masks are 0 and 1 and nothing else.
        stores_columns: whether the format has a place for columns.
        reread_options: options of the reader that ``reread`` makes.
        lost: what of these packs was let go: a sentence for each of ``"masks"``, ``"packs"`` (which sequences share
            one) and ``"columns"`` that it is true of.

    Raises:
        FormatError: something is at ``path``, or the format has no place for an option or for what is announced.
        OSError: no space for all of it, among others.
    """

    format: ClassVar[str]
    reader: ClassVar[type[PackedReader]]
    kind: ClassVar[Kind]
    folder: ClassVar[bool] = False
    binary_masks: ClassVar[bool] = False
    stores_columns: bool = False
    reread_options: ClassVar[Mapping[str, Any]] = {}
    _output: PendingOutput

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: PackedSpec | None = None,
        *,
        overwrite: bool = False,
        allow_loss: bool = False,
        **options: Any,
    ) -> None:
        self._path, self._spec, self._overwrite, self._allow_loss = os.fspath(path), spec, overwrite, allow_loss
        self._counts, self._changed_weights = PackCounts(), 0
        self._complete = self._published = False
        self.lost: dict[str, str] = {}
        try:
            self._begin(**options)
            if spec is not None and spec.columns and not self.stores_columns:
                self._drop_columns(spec.columns)
        except BaseException:
            self.abandon()
            raise

    @abstractmethod
    def _begin(self, *args: Any, **options: Any) -> None:
        """Check the options, make the output, and write what comes before the first pack."""

    def _make_output(self, nbytes: int = 0, files: int = 1) -> PendingOutput:
        """The file or folder, hidden until it is published. OSError: there is no space for so much of it."""
        require_space(self._path, nbytes, files)
        make = new_folder if self.folder else new_file
        self._output = make(self._path, self.kind, overwrite=self._overwrite)
        return self._output

    def _drop_columns(self, columns: Iterable[str]) -> None:
        """Note that columns are not written. FormatError where loss is not allowed."""
        names = ", ".join(sorted(columns))
        if not self._allow_loss:
            raise FormatError(
                f"{self._path}: columns {names}: {self.format} has no place for them; leave them out (--no-columns),"
                " or pass allow_loss (--allow-loss)"
            )
        self.lost["columns"] = f"columns {names}: the format has no place for them"

    def write(self, run: PackRun) -> None:
        """Append packs.

        Raises:
            FormatError: columns, or loss weights other than 0 and 1, that the format has no place for, and loss is
                not allowed.
            SequenceError: a pack does not fit what was announced.
        """
        if run.columns and not self.stores_columns:
            self._drop_columns(run.columns)
            run = dataclasses.replace(run, columns={})
        announced = {} if self._spec is None else self._spec.columns
        if self.stores_columns and {name: spec for name, (spec, _) in run.columns.items()} != announced:
            raise FormatError(f"{self._path}: packs with other columns than were announced; announce them")
        if self.binary_masks and run.loss_mask.dtype != np.uint8:
            run = dataclasses.replace(run, loss_mask=self._binary_mask(run))
        self._append(run)
        self._counts.add(run)

    def _binary_mask(self, run: PackRun) -> NDArray[np.uint8]:
        """The mask as 0 and 1. FormatError where that changes a weight and loss is not allowed."""
        mask: NDArray[Any] = run.loss_mask
        if (weights := (mask != 0) & (mask != 1)).any():
            if not self._allow_loss:
                at = int(np.argmax(weights))
                pack = self._pack_of_token(run, at)
                raise FormatError(
                    f"{self._path}: pack {pack} has a loss weight of {mask[at]}, this format holds 0"
                    " and 1; pass allow_loss (--allow-loss) to make every weight above 0 a 1"
                )
            self._changed_weights += int(np.count_nonzero(weights))
            self.lost["masks"] = f"{self._changed_weights} loss weights other than 0 and 1 became 1"
        return (mask > 0).astype(np.uint8)

    def _pack_of_token(self, run: PackRun, token: int) -> int:
        """Number, among all packs, of the one that holds a token of the run being written."""
        return self._counts.num_packs + int(np.searchsorted(run.token_offsets[1:], token, side="right"))

    def complete(self) -> None:
        """Write what is missing behind the last pack, so that ``reread`` finds it whole; may be called twice.

        Raises:
            FormatError: other packs were written than announced: a file that begins with its counts would lie.
        """
        if self._complete:
            return
        found = [getattr(self._counts, f"num_{what}") for what in ("packs", "sequences", "tokens")]
        expected = [getattr(self._spec or self._counts, f"num_{what}") for what in ("packs", "sequences", "tokens")]
        if found != expected:
            raise FormatError(
                f"{self._path}: {found[0]} packs, {found[1]} sequences and {found[2]} tokens were written, expected"
                f" {expected[0]}, {expected[1]} and {expected[2]}; the source changed while it was read: start again"
            )
        self._finish()
        self._complete = True

    @abstractmethod
    def _append(self, run: PackRun) -> None:
        """Write packs, in the dtypes that the format has."""

    @abstractmethod
    def _finish(self) -> None:
        """Write the end."""

    def reread(self) -> PackedReader:
        """A reader of all that was written, which is complete and not in its place yet."""
        columns: dict[str, Any] = {"columns": None} if self.stores_columns else {}
        return self.reader(self._output.temporary, **self.reread_options, **columns)

    def publish(self) -> None:
        """Put what is complete in its place, on disk."""
        self._output.publish()

    def finalize(self) -> dict[str, Any]:
        """Complete it and put it in its place; where that fails, remove what was written. May be called twice.

        Returns:
            What was written, in the words of its format.

        Raises:
            FormatError: other packs were written than announced, or something has appeared at the place.
            OSError: the disk says no.
        """
        if not self._published:
            try:
                self.complete()
                self.publish()
            except BaseException:
                self.abandon()
                raise
            self._published = True
        return {"format": self.format, "num_packs": self._counts.num_packs}

    def abandon(self) -> None:
        """Remove what was written; nothing where it is finalized or abandoned already."""
        if hasattr(self, "_output"):  # else it was refused before anything was made
            self._output.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abandon()


@dataclass(eq=False)
class PackCounts:
    """What runs hold in all."""

    num_packs: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    longest_pack: int = 0

    def add(self, run: PackRun) -> None:
        """Count a run in."""
        self.num_packs += len(run)
        self.num_sequences += len(run.seq_starts)
        self.num_tokens += len(run.tokens)
        self.longest_pack = max(self.longest_pack, int(run.pack_lengths.max(initial=0)))


def checked_run(
    path: str,
    first_pack: int,
    tokens: ArrayLike,
    loss_mask: ArrayLike,
    seq_starts: ArrayLike,
    pack_lengths: ArrayLike,
    pack_sequences: ArrayLike,
    *,
    mask_alignment: MaskAlignment = "label",
    token_dtype: Any = None,
    mask_dtype: Any = None,
    columns: Columns | None = None,
) -> PackRun:
    """A run of packs that keeps every rule, its mask label-aligned.

    Nothing is cast before it is known to fit, and whatever the arrays hold, no sum overflows and nothing outside them
    is touched.

    Args:
        path: of the file, for errors.
        first_pack: number of the first of these packs in the file, for errors.
        tokens: ids [sum of lengths], integers of any kind.
        loss_mask: [sum of lengths], booleans, integers or floats.
        seq_starts: where each sequence begins in its pack [sum of sequence counts], integers as the next two.
        pack_lengths: tokens in each pack [packs].
        pack_sequences: sequences in each pack [packs].
        mask_alignment: of ``loss_mask``.
        token_dtype: what the ids come back as, uint16 or int32; None keeps uint16 and makes all else int32.
        mask_dtype: what the mask comes back as, uint8 or float32; None makes floats float32 and all else uint8.
        columns: values of these tokens, sequences or packs.

    Raises:
        SequenceError: a rule is broken, with the number of the pack.
        FormatError: the arrays do not go together, so that it cannot be said which pack is wrong.
    """
    try:
        ids, mask = token_array(tokens), mask_array(loss_mask)
        starts, lengths, sequences = map(integer_array, (seq_starts, pack_lengths, pack_sequences))
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError(f"{path}: packs from {first_pack} on: a column {error}") from None
    ids_as = np.dtype(token_dtype or (np.uint16 if ids.dtype == np.uint16 else np.int32))
    mask_as = np.dtype(mask_dtype or (np.float32 if mask.dtype.kind == "f" else np.uint8))
    if len(lengths) != len(sequences):
        raise FormatError(f"{path}: {len(lengths)} pack lengths and {len(sequences)} sequence counts")
    try:
        broken = _native.first_breach(
            ids, mask, starts, lengths, sequences, mask_alignment != "label", MAX_CAPACITY, ids_as, mask_as
        )
    except ValueError:
        expected = f"{lengths.sum()} ids, {lengths.sum()} loss mask values and {sequences.sum()} sequence starts"
        raise FormatError(
            f"{path}: packs {first_pack} to {first_pack + len(lengths) - 1} should have {expected};"
            f" found {len(ids)}, {len(mask)} and {len(starts)}"
        ) from None
    if broken is not None and broken[0][0] != "P6":
        raise SequenceError(path, first_pack + broken[0][1], broken[1])
    ids, mask, unplaced = ids.astype(ids_as, copy=False), mask.astype(mask_as, copy=False), 0
    if mask_alignment == "rolled-right":
        firsts = np.cumsum(lengths) - lengths
        if (wrong := mask[firsts] != 0).any():
            raise SequenceError(
                path,
                first_pack + int(np.argmax(wrong)),
                "its loss mask begins with a value above 0, which a mask that was rolled right never does;"
                " say mask alignment label or token",
            )
    if broken is not None or mask_alignment != "label":
        mask, unplaced = label_aligned(mask, starts, lengths, sequences, mask_alignment)
    return PackRun(ids, mask, starts, lengths, sequences, unplaced, columns or {})


def checked_pack(
    path: str, number: int, input_ids: ArrayLike, loss_mask: ArrayLike, starts: ArrayLike, **how: Any
) -> PackRun:
    """``checked_run`` of pack ``number``, handed in by itself. SequenceError where it breaks a rule."""
    ids, mask, starts = np.asarray(input_ids), np.asarray(loss_mask), np.asarray(starts)
    if ids.ndim != 1 or mask.ndim != 1 or starts.ndim != 1:
        raise SequenceError(path, number, "ids, mask and sequence starts have one dimension each")
    require_same_length(path, number, input_ids=len(ids), loss_mask=len(mask))
    return checked_run(path, number, ids, mask, starts, [len(ids)], [len(starts)], **how)


def require_same_length(path: str, pack: int, **columns: int) -> None:
    """SequenceError unless the columns of a pack, handed in by their names, are equally long."""
    if len(set(columns.values())) > 1:
        found = ", ".join(f"{count} in {name}" for name, count in columns.items())
        raise SequenceError(path, pack, f"{found}; they have one entry a token each")


def label_aligned(
    mask: NDArray[Any],
    seq_starts: NDArray[np.int64],
    pack_lengths: NDArray[np.int64],
    pack_sequences: NDArray[np.int64],
    alignment: MaskAlignment = "label",
) -> tuple[NDArray[Any], int]:
    """The label-aligned mask of good packs, as ``checked_run`` takes them, and how many values had no place in it.

    ``unplaced_note`` says which those are. The mask is not changed, and given back itself where nothing changes.
    """
    if not len(mask):
        return mask, 0
    pack_ends = np.cumsum(pack_lengths)
    starts = seq_starts + np.repeat(pack_ends - pack_lengths, pack_sequences)
    ends = np.append(starts[1:], len(mask)) - 1
    if alignment == "label":
        if unplaced := int(np.count_nonzero(mask[ends])):
            mask = mask.copy()
            mask[ends] = 0
        return mask, unplaced
    tokens = mask
    if alignment == "rolled-right":
        tokens = np.append(mask[1:], mask[:1])
        tokens[pack_ends - 1] = 0
    labels = np.append(tokens[1:], tokens[:1])
    labels[ends] = 0
    return labels, int(np.count_nonzero(tokens[starts]))


def unplaced_note(count: int, alignment: MaskAlignment) -> str:
    """What ``label_aligned`` left out in all, as a sentence for ``PackedReader.notes``."""
    if alignment == "label":
        return f"{count} loss mask values at the end of a sequence, where there is nothing to predict, set to 0"
    return f"{count} loss mask values on the first token of a sequence, which nothing predicts, left out"


def checked_alignment(path: str, alignment: str) -> MaskAlignment:
    """``alignment`` where there is such a one, FormatError else."""
    if alignment not in MASK_ALIGNMENTS:
        raise FormatError(f"{path}: mask alignment {alignment!r}, choose one of {', '.join(MASK_ALIGNMENTS)}")
    return alignment


def all_trained_mask(lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Label-aligned mask of sequences of these lengths: 1 at every token that has a next one."""
    ends = lengths.cumsum()
    mask = np.ones(int(ends[-1]) if len(ends) else 0, np.uint8)
    mask[ends - 1] = 0
    return mask


def joined_ranges(values: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[Any]:
    """Some ranges of an array end to end; a view where they lie so."""
    if not len(starts):
        return values[:0]
    if len(starts) == 1 or (starts[1:] == stops[:-1]).all():
        return values[starts[0] : stops[-1]]
    return np.concatenate([values[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)])


def first_bad_range(starts: NDArray[np.int64], lengths: NDArray[np.int64], size: int, apart: int = 0) -> int | None:
    """The first range that leaves a file or overlaps the one before, None where all are in order; never overflows.

    Args:
        starts: first byte of each range [ranges].
        lengths: bytes of each [ranges].
        size: bytes of what they lie in.
        apart: bytes between one and the next, at least.
    """
    bad = (starts < 0) | (lengths < 0) | (starts > size) | (lengths > size)
    ends = np.where(bad, 0, starts) + np.where(bad, 0, lengths)
    bad |= ends > size
    bad[1:] |= starts[1:] < ends[:-1] + apart
    return int(np.argmax(bad)) if bad.any() else None


def file_identity(*paths: str) -> str:
    """Size and time of change of files, which differ where a file was written anew."""
    return " ".join(f"{stat.st_size}-{stat.st_mtime_ns}" for stat in map(os.stat, paths))


def read_json_object(path: str) -> tuple[dict[str, Any], bytes]:
    """The JSON object in a file, and its bytes. FormatError where it holds none; else OSError."""
    raw = read_beginning(path, _MAX_JSON_NBYTES + 1)
    try:
        stated = orjson.loads(raw)
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}") from None
    if not isinstance(stated, dict) or len(raw) > _MAX_JSON_NBYTES:
        raise FormatError(f"{path}: no object, or one of more than {_MAX_JSON_NBYTES} bytes")
    return stated, raw


def npy_header(file: BinaryIO, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether it is stored by columns, and dtype that a ``.npy`` says; reads up to the end of its header.

    Raises:
        FormatError: not such a file.
    """
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        return headers[np.lib.format.read_magic(file)](file)
    except Exception as error:
        # numpy evaluates the header as a literal and lets its tokenizer's and parser's errors through.
        raise FormatError(f"{name}: not a .npy file of version 1 or 2: {type(error).__name__}: {error}") from None


def npy_header_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The bytes before an array, as ``numpy.save`` writes them; as many for any first side.

    numpy leaves room for that to grow, and fills it with spaces.
    """
    out = BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, description)
    return out.getvalue()


def pickle_opcodes(value: Any) -> bytes:
    """The pickle of a value as it stands inside another of protocol 2: no first and last opcode, no memo entries."""
    file = BytesIO()
    pickler = pickle.Pickler(file, 2)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()[2:-1]


def int_within(stated: Mapping[str, Any], key: str, least: int = 1, most: int = MAX_CAPACITY) -> int | None:
    """A whole number within bounds that a file says of itself; None where it says none."""
    value = stated.get(key)
    return value if type(value) is int and least <= value <= most else None


def column_specs_of(stated: Mapping[str, Any], path: str, chosen: Sequence[str] | None) -> dict[str, ColumnSpec]:
    """The columns that a file says it has (``PackedSpec.stated``), as far as they are asked for.

    Args:
        stated: what it says.
        path: of the file, for errors.
        chosen: names; None for all.

    Raises:
        FormatError: what it says is no column's, or one that is asked for is not there.
    """
    found = stated.get("columns", {})
    try:
        columns = {check_name(name): ColumnSpec.decode(value) for name, value in found.items()}
    except (AttributeError, FormatError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: what it says of its columns is wrong: {error}; write it again") from None
    if missing := [name for name in chosen or () if name not in columns]:
        raise FormatError(f"{path}: it has no column {missing[0]}, but {', '.join(columns) or 'none'}")
    return columns if chosen is None else {name: columns[name] for name in chosen}


def spec_fields(stated: Mapping[str, Any], longest: int, capacity: int) -> dict[str, Any]:
    """What a file may say of its packs beside their counts, as keywords of ``PackedSpec``.

    Args:
        stated: what it says.
        longest: its longest pack, which the capacity is never below.
        capacity: where it says none.
    """
    metadata = stated.get("metadata")
    return {
        "capacity": max(int_within(stated, "capacity") or capacity, longest),
        "sequence_multiple": int_within(stated, "sequence_multiple") or 1,
        "pad_id": int_within(stated, "pad_id", 0),
        "metadata": metadata if isinstance(metadata, dict) else {},
    }
