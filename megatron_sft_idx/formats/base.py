"""The common base of all formats of packed data: spec, reader, writer, and helpers for their files.

A format is a module with a function ``recognise``, a class ``Reader`` (a ``PackedReader``) and usually a class
``Writer`` (a ``PackedWriter``). It reads and writes runs of packs (``PackRun``). All other work of a reader or writer
is done here, except for the rules of packs (``packs.run.checked_run``). Options of a format are keywords of its
``_open`` and ``_begin``.

Two sections follow reader and writer: values in files of other formats (JSON, byte ranges); and the package metadata, a
JSON object in which this package stores, in files of other formats, everything that they have no field for.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError, StorageError
from megatron_sft_idx.layout.column import ColumnSpec, num_rows_in
from megatron_sft_idx.layout.files import MAX_CAPACITY, check_column_name, no_column, vocab_size_of
from megatron_sft_idx.lines import Shown
from megatron_sft_idx.packs.run import (
    MASK_ALIGNMENTS,
    MaskAlignment,
    PackRun,
    checked_run,
    first_true,
    run_bounds,
)
from megatron_sft_idx.packs.run_media import RunMedia
from megatron_sft_idx.shard.judged import require_judged
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.storage import read_beginning
from megatron_sft_idx.storage.outputs import PendingOutput, new_file, new_folder
from megatron_sft_idx.storage.publish import Kind, require_space

if TYPE_CHECKING:
    from typing_extensions import Self

# Names of the rule for files without loss masks: which tokens are trained on.
MaskRule = Literal["all"]
# For ``PackedReader.notes``: how all masks of a file were converted.
ALIGNMENT_NOTES = {
    "token": "loss masks are read as token-aligned: they are shifted left by one in every sequence",
    "rolled-right": "loss masks are read as rolled right by one over each pack: they are rolled back, then shifted left"
    " in every sequence; the value of each pack's last token was lost when the file was written, and counts as 0",
}
_MAX_JSON_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """Counts, dtypes and metadata of packed data, known before its first pack is read.

    Attributes:
        num_packs: number of packs.
        num_sequences: number of sequences in all packs.
        num_tokens: number of tokens in all packs, without padding.
        longest_pack: number of tokens in the longest pack.
        token_dtype: uint16 or int32.
        mask_dtype: uint8 or float32.
        capacity: maximum number of token positions in a pack; at least ``longest_pack``.
        sequence_multiple: sequences rounded up to this still fit in the capacity.
        pad_id: the tokenizer's padding id; None if it is unknown.
        metadata: further information of the file about its packs, as JSON values.
        num_trained_tokens: number of positions with a loss mask above zero; None if only reading all masks would show
            it.
        columns: specs of the columns that are read with the packs, by name.
        media: whether images or audio are read with the packs.
        capacity_stated: whether the file or the caller gave the capacity; otherwise it is ``longest_pack``.
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
    media: bool = False
    capacity_stated: bool = True

    def package_metadata(self) -> dict[str, Any]:
        """The package metadata for a file of these packs, as JSON values; ``PackedReader`` reads them."""
        keys = "capacity", "num_tokens", "longest_pack", "sequence_multiple", "pad_id"
        values = {key: getattr(self, key) for key in keys} | {"metadata": dict(self.metadata)}
        columns = {name: spec.encode() for name, spec in self.columns.items()}
        values |= {"media": True} if self.media else {}
        return values | {"columns": columns} if columns else values

    def column_nbytes(self) -> int:
        """Size of the values of all columns in bytes."""
        return sum(num_rows_in(self, spec.per) * spec.row_nbytes for spec in self.columns.values())


class PackedReader(ABC):
    """One file, folder or shard of packed data, open for reading. It cannot be pickled: each process opens its own.

    A format implements ``_open``, which sets ``identity``, ``num_packs``, ``_dtypes``, and also ``spec`` if that needs
    no pass over packs; and either ``_run`` and ``_token_offsets``, or ``read`` and ``_runs``.

    Args:
        path: the path to open.
        mask_alignment: alignment of its loss masks, if the format does not define it.
        options: options of the format, keywords of its ``_open``. Several formats have ``columns``: names of the
            columns to read with packs; None for all.

    Attributes:
        label_only: for a format that only has label-aligned masks, the error text if the caller asks for another
            alignment, whose name replaces ``{}``; "" for all other formats.
        path: the path that was opened.
        identity: an id, or sizes and modification times. It differs if the content differs, as far as that is known
            without reading all of it.
        num_packs: number of packs.
        columns: specs of the columns that are read with packs, by name.
        has_media: whether images or audio are read with the packs.
        notes: sentences for people: missing information that was assumed, and corrections that were made.

    Raises:
        FormatError: the alignment does not exist or is impossible for the format; or the file breaks a rule of its
            format.
    """

    label_only: ClassVar[str] = ""
    identity: str
    num_packs: int
    has_media: bool = False
    # Dtypes of the ids and masks returned by ``read`` and ``runs``.
    _dtypes: tuple[np.dtype[Any], np.dtype[Any]] = (np.dtype(np.int32), np.dtype(np.uint8))
    # Start of each pack among the tokens of all packs, and end of the last one: [packs + 1].
    _token_offsets: NDArray[np.int64]
    # The package metadata of the file; untrusted, and empty in files of other writers.
    _package_metadata: Mapping[str, Any] = {}
    # Whether the file itself defines the alignment of its masks.
    _states_alignment = False

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
        if self._assumes_labels():
            with suppress(SequenceError):  # the caller gets the error when reading the packs
                if (run := next(iter(self._runs()), None)) is not None:
                    self._refuse_token_masks(run.unplaced, len(run.seq_starts))

    @abstractmethod
    def _open(self, *args: Any, **options: Any) -> None:
        """Open the path, and check what can be checked without reading all of it."""

    def _take_alignment(self, file_alignment: object = None) -> None:
        """Use the mask alignment stored in the file, if there is one, and note how masks are converted.

        Raises:
            FormatError: the caller asked for another alignment than that of the file: masks would be shifted twice.
        """
        if file_alignment in MASK_ALIGNMENTS:
            self._states_alignment = True
            if self.alignment not in ("label", file_alignment):
                raise FormatError(
                    f"{self.path}: its loss masks are stored as {file_alignment}-aligned, so mask alignment"
                    f" {self.alignment!r} would shift them twice; leave the option out"
                )
            self.alignment = file_alignment
        if self.alignment in ALIGNMENT_NOTES:
            self.notes.append(ALIGNMENT_NOTES[self.alignment])

    def _assumes_labels(self) -> bool:
        """Return whether masks are assumed to be label-aligned because neither the format nor the file defines it."""
        return self.alignment == "label" and not self.label_only and not self._states_alignment

    def _refuse_token_masks(self, num_set_ends: int, num_sequences: int) -> None:
        """Raise FormatError if masks are assumed to be label-aligned, but the first sequences all end in a set value.

        A label-aligned mask is not set there, because nothing is predicted after the end. A token-aligned mask is set
        there whenever an answer is trained to its end.
        """
        if self._assumes_labels() and 0 < num_sequences == num_set_ends:
            raise FormatError(
                f"{self.path}: all of the first {num_sequences:,} sequences end in a loss mask above 0, but a"
                " label-aligned mask is 0 there, because no token follows: these masks are token-aligned; pass"
                " mask_alignment='token' (--mask-alignment token)"
            )

    def require_judged(self, columns: Collection[str], remedy: str) -> None:
        """Raise FormatError if a column marks bad answers and is not among ``columns``. See ``shard.judged``."""
        every = column_specs_of(self._package_metadata, self.path, None)
        require_judged(self.path, every, every.__getitem__, self.stated[1], columns, remedy)

    @property
    def stated(self) -> tuple[int | None, Mapping[str, Any]]:
        """The padding id and the metadata of the spec from the package metadata, without a pass over the file."""
        metadata = self._package_metadata.get("metadata")
        return int_within(self._package_metadata, "pad_id", 0), metadata if isinstance(metadata, dict) else {}

    @cached_property
    def spec(self) -> PackedSpec:
        """The spec. The first access may need one pass over the lengths of packs."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.num_packs

    def read(self, index: int) -> Pack:
        """Return pack ``index``; views are read-only. The caller ensures 0 <= index < ``len(self)``.

        Raises:
            SequenceError: the pack breaks a rule.
            FormatError: the file is unreadable or has changed since it was opened.
        """
        return self._run(index, index + 1).pack(0)

    def runs(self) -> Iterator[PackRun]:
        """Yield all packs in order, in runs of about ``RUN_TOKENS`` tokens and at least one pack.

        Errors as in ``read``.
        """
        unplaced = 0
        for run in self._runs():
            unplaced += run.unplaced
            yield run
        # Counted over a whole pass, and noted once for any number of passes.
        if unplaced and (note := unplaced_note(unplaced, self.alignment)) not in self.notes:
            self.notes.append(note)

    def _runs(self) -> Iterator[PackRun]:
        return (self._run(first, last) for first, last in run_bounds(self._token_offsets))

    def _run(self, first: int, last: int) -> PackRun:
        """Return packs ``first`` up to ``last``, checked against every rule. Errors as in ``read``."""
        raise NotImplementedError

    def _checked(self, first_pack: int, run: PackRun) -> PackRun:
        """Call ``checked_run`` for packs of the file, with its alignment and dtypes."""
        return checked_run(self.path, first_pack, run, self.alignment, *self._dtypes)

    def _make_spec(
        self, num_sequences: int, num_tokens: int, longest_pack: int, capacity: int | None = None, **fields: Any
    ) -> PackedSpec:
        """Return the spec with these counts, valid values from the package metadata, and further fields.

        ``capacity`` is used if the package metadata have none. It is at least the longest pack, and 1.
        """
        values, (pad_id, metadata) = self._package_metadata, self.stated
        capacity = int_within(values, "capacity") or capacity
        said: dict[str, Any] = {
            "capacity": max(capacity or 1, longest_pack),
            "capacity_stated": capacity is not None,
            "sequence_multiple": int_within(values, "sequence_multiple") or 1,
            "pad_id": pad_id,
            "metadata": metadata,
        }
        counts = self.num_packs, num_sequences, num_tokens, longest_pack
        return PackedSpec(*counts, *self._dtypes, columns=self.columns, **(said | fields))


class PackedWriter(Shown, ABC):
    """Packed data being written. As a context manager, a clean exit finalizes, and an exception leaves nothing behind.

    A format implements ``_begin``, which gets the spec and calls ``_make_output`` after checking its options,
    ``_append`` and ``_finish``. Nothing exists at ``path`` before ``publish``.

    Args:
        path: the path to write.
        spec: the expected content, which ``complete`` compares with the written content; None if it is not known.
        overwrite: replace an existing output at ``path`` if it is of ``kind``.
        lossy: drop what the format cannot store, and note it in ``lost``; otherwise that is an error.
        options: options of the format, keywords of its ``_begin``.

    Attributes:
        format: name of the format, as used by ``--to``.
        reader: the class that reads the output.
        kind: the kind of output that may be replaced.
        is_folder: whether the format is a folder of files.
        binary_masks: whether the format's masks can only hold 0 and 1.
        stores_columns: whether the format can store columns.
        stores_media: whether the format can store images and audio.
        lost: what was dropped, one sentence for each of ``"masks"``, ``"packs"`` (which sequences share one) and
            ``"columns"`` that the format could not store.
        columns: specs of the columns that are written.
        found: whether an identical output already existed at ``path`` and was kept.

    Raises:
        FormatError: ``path`` exists, or the format does not have an option or cannot store what the spec announces.
        OSError: for example, not enough disk space.
    """

    format: ClassVar[str]
    reader: ClassVar[type[PackedReader]]
    kind: ClassVar[Kind]
    is_folder: ClassVar[bool] = False
    binary_masks: ClassVar[bool] = False
    stores_columns: bool = False
    _layout = ""  # for errors: the variant of the format, if it cannot store what the format can
    stores_media: ClassVar[bool] = False
    columns: Mapping[str, ColumnSpec] = {}
    found: bool = False
    _output: PendingOutput

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: PackedSpec | None = None,
        *,
        overwrite: bool = False,
        lossy: bool = False,
        **options: Any,
    ) -> None:
        self._path, self._spec, self._overwrite, self._allow_loss = os.fspath(path), spec, overwrite, lossy
        self._counts, self._changed_weights = PackCounts(), 0
        self._is_complete = self._is_published = False
        self.lost: dict[str, str] = {}
        self._vocab_size = None
        if spec is not None:
            self.columns, self._vocab_size = spec.columns, vocab_size_of(spec.metadata)
            if spec.media and not self.stores_media:
                raise self._no_place_for_media()
        try:
            self._begin(spec, **options)
            if self.columns and not self.stores_columns:
                self._drop_columns(self.columns)
                self.columns = {}
        except BaseException:
            self.abandon()
            raise

    def _no_place_for_media(self) -> FormatError:
        return FormatError(
            f"{self._path}: {self.format} cannot store images and audio, and their placeholder tokens are useless"
            " without them; convert to sft-idx or parquet"
        )

    def _shown(self) -> str:
        state = "published" if self._is_published else "complete" if self._is_complete else "open"
        return f"{self._path}: {self._counts.num_packs:,} packs, {self._counts.num_tokens:,} tokens; {state}"

    @abstractmethod
    def _begin(self, *spec: Any, **options: Any) -> None:
        """Check the options, create the output, and write everything before the first pack."""

    def _make_output(self, nbytes: int = 0, files: int = 1) -> PendingOutput:
        """Create the file or folder. OSError: not enough space for this many bytes and files."""
        require_space(self._path, nbytes, files)
        make = new_folder if self.is_folder else new_file
        self._output = make(self._path, self.kind, overwrite=self._overwrite)
        return self._output

    def _drop_columns(self, columns: Iterable[str]) -> None:
        """Note in ``lost`` that columns are not written. FormatError: loss is not allowed."""
        names = ", ".join(sorted(columns))
        if not self._allow_loss:
            raise FormatError(
                f"{self._path}: {self.format}{self._layout} cannot store columns: {names}; leave them out"
                " (--no-columns), or pass lossy (--lossy)"
            )
        self.lost["columns"] = f"columns {names}: the format cannot store them"

    def write(self, run: PackRun) -> PackRun:
        """Append packs. Return them as the format will return them: without what it cannot store.

        Raises:
            FormatError: the format cannot store columns, or loss weights other than 0 and 1, and loss is not allowed;
                or the columns differ from the announced ones; or the writer is finished.
            SequenceError: a pack does not match the announced spec, or has an id outside its vocabulary.
        """
        self._require_open()
        if self._vocab_size is not None:
            limit = f", but the vocabulary has {self._vocab_size} tokens (rule P9)"
            self._require_ids_within(run, self._vocab_size - 1, limit)
        if run.columns and not self.stores_columns:
            self._drop_columns(run.columns)
            run = dataclasses.replace(run, columns={})
        if self.stores_columns and {name: spec for name, (spec, _) in run.columns.items()} != self.columns:
            raise FormatError(
                f"{self._path}: the packs have other columns than the spec of this writer; pass the right columns"
                " when you open the writer"
            )
        if run.media is not None and not (self._spec is not None and self._spec.media):
            if len(run.media):
                if not self.stores_media:
                    raise self._no_place_for_media()
                raise FormatError(
                    f"{self._path}: the packs have images or audio, but the spec of this writer has no media; set"
                    " media when you open the writer"
                )
            run = dataclasses.replace(run, media=None)
        elif run.media is None and self._spec is not None and self._spec.media:
            run = dataclasses.replace(run, media=RunMedia.none(len(run.seq_starts)))
        if self.binary_masks and run.loss_mask.dtype != np.uint8:
            run = dataclasses.replace(run, loss_mask=self._binary_mask(run))
        self._append(run)
        self._counts.add(run)
        return run

    def _binary_mask(self, run: PackRun) -> NDArray[np.uint8]:
        """Return the mask as 0 and 1. FormatError: that would change a weight, and loss is not allowed."""
        mask: NDArray[Any] = run.loss_mask
        weights = (mask != 0) & (mask != 1)
        if (at := first_true(weights)) is not None:
            if not self._allow_loss:
                pack = self._pack_of_token(run, at)
                raise FormatError(
                    f"{self._path}: pack {pack} has a loss weight of {mask[at]}, but this format only stores 0 and 1;"
                    " pass lossy (--lossy) to change every weight above 0 to 1"
                )
            self._changed_weights += int(np.count_nonzero(weights))
            self.lost["masks"] = f"{self._changed_weights} loss weights other than 0 and 1 became 1"
        return (mask > 0).astype(np.uint8)

    def _pack_of_token(self, run: PackRun, token: int) -> int:
        """Return the number, among all packs, of the pack that holds token ``token`` of the current run."""
        return self._counts.num_packs + int(np.searchsorted(run.token_offsets[1:], token, side="right"))

    def _require_ids_fit(self, run: PackRun, dtype: np.dtype[Any]) -> None:
        """Raise SequenceError unless the ids of a run fit in the integer dtype in which they are written."""
        largest = int(np.iinfo(dtype).max)
        self._require_ids_within(run, largest, f", but {dtype} stores at most {largest}")

    def _require_ids_within(self, run: PackRun, largest: int, limit: str) -> None:
        """Raise SequenceError, with the largest id and ``limit``, unless no id of a run is above ``largest``."""
        if run.tokens.max(initial=0) > largest:
            at = int(np.argmax(run.tokens))
            raise SequenceError(self._path, self._pack_of_token(run, at), f"id {run.tokens[at]}{limit}")

    def _require_open(self) -> None:
        if self._is_complete:
            raise FormatError(f"{self._path}: this writer is finished; open another one")

    def complete(self) -> None:
        """Write everything after the last pack, so that ``reread`` can read all of it. Can be called twice.

        Raises:
            FormatError: the written packs differ from the announced spec, whose counts the file may begin with.
        """
        if not self._is_complete:
            self._require_all()
            self._finish()
            self._is_complete = True

    def _require_all(self) -> None:
        """Raise FormatError unless all announced packs were written."""
        written, expected = (
            (counts.num_packs, counts.num_sequences, counts.num_tokens)
            for counts in (self._counts, self._spec or self._counts)
        )
        if written != expected:
            raise FormatError(
                "{}: {} packs, {} sequences and {} tokens were written, expected {}, {} and {}; the source changed"
                " while it was read: start again".format(self._path, *written, *expected)
            )

    @abstractmethod
    def _append(self, run: PackRun) -> None:
        """Write the packs of a run, in the dtypes of the format."""

    @abstractmethod
    def _finish(self) -> None:
        """Write everything after the last pack."""

    def reread(self) -> PackedReader:
        """Return a reader of the output. Call it after ``complete`` and before ``publish``."""
        options: dict[str, Any] = {"columns": None} if self.stores_columns else {}
        return self.reader(self._output.temporary, **options)

    def publish(self) -> None:
        """Move the output to ``path``, synced to disk. Call it after ``complete``."""
        self._output.publish()

    def finalize(self) -> dict[str, Any]:
        """Complete and publish the output; after a failure, remove it. Can be called twice.

        Returns:
            A summary of the output; its keys depend on the format.

        Raises:
            FormatError: other packs were written than announced, or ``path`` now exists.
            OSError: an error of the system, such as a full disk.
        """
        if not self._is_published:
            try:
                self.complete()
                self.publish()
            except BaseException:
                self.abandon()
                raise
            self._is_published = True
        return {"format": self.format, "num_packs": self._counts.num_packs}

    def abandon(self) -> None:
        """Remove the output. Does nothing after ``finalize`` or another ``abandon``."""
        if hasattr(self, "_output"):  # otherwise _begin failed before creating anything
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
    """Total numbers of packs, sequences and tokens of several runs."""

    num_packs: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    longest_pack: int = 0

    def add(self, run: PackRun) -> None:
        """Add the counts of a run."""
        self.num_packs += len(run)
        self.num_sequences += len(run.seq_starts)
        self.num_tokens += len(run.tokens)
        self.longest_pack = max(self.longest_pack, int(run.pack_lengths.max(initial=0)))


# ---- values in files of other formats ----


def unplaced_note(count: int, alignment: MaskAlignment) -> str:
    """Return a sentence for ``PackedReader.notes`` about the ``count`` mask values that ``label_aligned`` dropped."""
    if alignment == "label":
        return f"{count} loss mask values at the end of a sequence were set to 0, because no token follows"
    return (
        f"{count} loss mask values on the first token of a sequence were dropped, because nothing predicts that token"
    )


def checked_alignment(path: str, alignment: str) -> MaskAlignment:
    """Return the mask alignment of this name. FormatError: it does not exist."""
    if alignment not in MASK_ALIGNMENTS:
        raise FormatError(f"{path}: unknown mask alignment {alignment!r}; choose one of {', '.join(MASK_ALIGNMENTS)}")
    return alignment


def recogniser(looks_right: Callable[[str], bool]) -> Callable[[str], bool]:
    """Make a function that detects a kind of path from one that may fail in any way for other kinds.

    StorageError: an object store did not answer, so it is unknown what is there.
    """

    @wraps(looks_right)
    def recognise(path: str) -> bool:
        try:
            return looks_right(path)
        except StorageError:
            raise
        except Exception:
            return False

    return recognise


def joined_ranges(values: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[Any]:
    """Concatenate ranges of an array; returns a view if they are adjacent."""
    if not len(starts):
        return values[:0]
    if len(starts) == 1 or (starts[1:] == stops[:-1]).all():
        return values[starts[0] : stops[-1]]
    return np.concatenate([values[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)])


def first_bad_range(starts: NDArray[np.int64], lengths: NDArray[np.int64], size: int, min_gap: int = 0) -> int | None:
    """Return the number of the first range outside a file or with an overlap; None if all are good. Never overflows.

    Args:
        starts: first byte of each range [ranges].
        lengths: size of each range in bytes [ranges].
        size: size of the file in bytes.
        min_gap: minimum number of bytes between the end of a range and the start of the next.
    """
    bad = (starts < 0) | (lengths < 0) | (starts > size) | (lengths > size)
    ends = np.where(bad, 0, starts) + np.where(bad, 0, lengths)
    bad |= ends > size
    bad[1:] |= starts[1:] < ends[:-1] + min_gap
    return first_true(bad)


def file_identity(*paths: str) -> str:
    """Return sizes and modification times of files; the result differs if one of them was rewritten."""
    return " ".join(f"{stat.st_size}-{stat.st_mtime_ns}" for stat in map(os.stat, paths))


def read_json_object(path: str) -> tuple[dict[str, Any], bytes]:
    """Return the JSON object in a file, and its bytes. FormatError: there is none. OSError: the file is unreadable."""
    raw = read_beginning(path, _MAX_JSON_NBYTES + 1)
    if len(raw) > _MAX_JSON_NBYTES:
        raise FormatError(f"{path}: more than {_MAX_JSON_NBYTES} bytes, expected one smaller JSON object")
    try:
        value = orjson.loads(raw)
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected a JSON object")
    return value, raw


# ---- the package metadata ----


def encode_json(path: str, value: Any) -> bytes:
    """Encode JSON with sorted keys. FormatError, with the path of the output: a value cannot be stored."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        reason = "integers of at most 64 bits, and lists and objects that are nested at most 250 deep"
        raise FormatError(f"{path}: the metadata cannot be stored as JSON: {error}; JSON supports {reason}") from None


def int_within(values: Mapping[str, Any], key: str, minimum: int = 1, maximum: int = MAX_CAPACITY) -> int | None:
    """Return the value at ``key`` if it is an integer within bounds, else None."""
    value = values.get(key)
    return value if type(value) is int and minimum <= value <= maximum else None


def column_specs_of(values: Mapping[str, Any], path: str, chosen: Sequence[str] | None) -> dict[str, ColumnSpec]:
    """Return the specs of columns in the package metadata of a file.

    Args:
        values: the package metadata.
        path: path of the file, for errors.
        chosen: names of the columns to return; None for all.

    Raises:
        FormatError: an entry is not a spec of a column, or a chosen column does not exist.
    """
    encoded = values.get("columns", {})
    try:
        specs = {check_column_name(name): ColumnSpec.decode(value) for name, value in encoded.items()}
    except (AttributeError, FormatError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: its description of columns is wrong: {error}; write the file again") from None
    if missing := [name for name in chosen or () if name not in specs]:
        raise FormatError(f"{path}: {no_column(missing[0], specs)}")
    return specs if chosen is None else {name: specs[name] for name in chosen}
