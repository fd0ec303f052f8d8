"""Packs in memory: runs, which move packs from readers to writers, and windows, which iterate over a shard.

``checked_run`` makes runs from files in other formats, and converts their loss masks to the one alignment of this
package. *Label*: value j says whether predicting token j + 1 of the same sequence counts; it is 0 at the end of every
sequence. *Token*: value j says whether token j itself is trained on. *Rolled right*: a token mask that its writer
shifted right by one over the whole pack, with 0 in front, intending to align it with labels. That is the wrong
direction, and crosses sequences; reading undoes it. The mask of each pack's last token was lost when the file was
written, so that token counts as untrained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import CorruptShardError, FormatError, SequenceError
from megatron_sft_idx.layout import FileDigest, Header, ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec, Per
from megatron_sft_idx.layout.files import MAX_CAPACITY, integer_array, mask_array, plain_array, token_array
from megatron_sft_idx.packs.run_media import RunMedia
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.local import StreamHash, digest_file
from megatron_sft_idx.storage.progress import Advance

if TYPE_CHECKING:
    from megatron_sft_idx.shard.columns import ShardColumn
    from megatron_sft_idx.shard.media_reader import ShardMedia
    from megatron_sft_idx.shard.opening import OpenFiles
    from megatron_sft_idx.shard.reader import Pack

MaskAlignment = Literal["label", "token", "rolled-right"]
MASK_ALIGNMENTS: tuple[MaskAlignment, ...] = get_args(MaskAlignment)
# Approximate number of tokens in a run: enough to make the cost per run negligible, but small enough for the CPU cache.
RUN_TOKENS = 1 << 20
# Number of tokens to read at a time if checksums are computed, too. Half as many is 8% slower; with more, memory grows.
COPIED_TOKENS = 1 << 19
# Maximum number of tokens in a window, unless its first pack is larger: about 50 MiB with derived arrays.
WINDOW_PACKS, WINDOW_SEQUENCES, WINDOW_TOKENS = 1 << 15, 1 << 18, 1 << 22


class Column(NamedTuple):
    """A column of several packs.

    Attributes:
        spec: dtype and width of a row, unit of a row (token, sequence or pack), and metadata.
        values: [rows], or [rows, width].
    """

    spec: ColumnSpec
    values: NDArray[Any]


# Columns by name: of several packs, and of an open shard.
Columns = Mapping[str, Column]
OpenColumns: TypeAlias = "Mapping[str, ShardColumn]"
_NONE: OpenColumns = {}


def sliced(columns: Mapping[str, Column | ShardColumn], **rows: slice) -> Columns:
    """Return column rows for the given slices of tokens, sequences and packs: views, or read now if unmapped."""
    return {name: Column(column.spec, column.values[rows[column.spec.per]]) for name, column in columns.items()}


@dataclass(frozen=True, eq=False)
class PackRun:
    """Consecutive packs: their arrays concatenated, in the form of ``ShardWriter.add_packs``.

    Attributes:
        tokens: ids [sum of pack lengths], integers.
        loss_mask: uint8 (0 or 1) or float32 (weights) [sum of pack lengths], label-aligned.
        seq_starts: start of each sequence in its pack, int64 [sum of sequence counts].
        pack_lengths: number of tokens in each pack, int64 [packs].
        pack_sequences: number of sequences in each pack, int64 [packs].
        unplaced: number of set values of a file's mask that have no position in a label-aligned mask; they were
            dropped.
        columns: columns of these packs, by name.
        media: images and audio of their sequences; None if they have none.

    Raises:
        ValueError: the number of rows of a column is not the number of tokens, sequences or packs.
    """

    tokens: NDArray[Any]
    loss_mask: NDArray[Any]
    seq_starts: NDArray[np.int64]
    pack_lengths: NDArray[np.int64]
    pack_sequences: NDArray[np.int64]
    unplaced: int = 0
    columns: Columns = field(default_factory=dict)
    media: RunMedia | None = None

    def __post_init__(self) -> None:
        for name, (spec, values) in self.columns.items():
            expected = {"token": len(self.tokens), "sequence": len(self.seq_starts), "pack": len(self)}[spec.per]
            if len(values) != expected:
                raise ValueError(f"column {name}: {len(values)} rows, expected {expected}: one per {spec.per}")

    def __len__(self) -> int:
        return len(self.pack_lengths)

    @cached_property
    def token_offsets(self) -> NDArray[np.int64]:
        """Start of each pack, and end of the last one: int64 [packs + 1]."""
        return np.append(0, np.cumsum(self.pack_lengths))

    @cached_property
    def sequence_offsets(self) -> NDArray[np.int64]:
        """CSR offsets of the sequences by pack: int64 [packs + 1]."""
        return np.append(0, np.cumsum(self.pack_sequences))

    @property
    def begins(self) -> NDArray[np.int64]:
        """The position of the first token of each sequence among all tokens: int64 [sequences]."""
        return self.seq_starts + np.repeat(self.token_offsets[:-1], self.pack_sequences)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays in bytes, including offsets and columns."""
        arrays = (self.tokens, self.loss_mask, self.seq_starts, self.pack_lengths, self.pack_sequences)
        beside = (column.values for column in self.columns.values())
        return sum(array.nbytes for array in (*arrays, *beside, self.token_offsets, self.sequence_offsets))

    @property
    def bounds(self) -> NDArray[np.int64]:
        """Return the start of each sequence among all tokens, and the end of the last: int64 [sequences + 1]."""
        return np.append(self.seq_starts + np.repeat(self.token_offsets[:-1], self.pack_sequences), len(self.tokens))

    def sequence_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens in each sequence of all packs, in order: int64 [sum of sequence counts]."""
        return np.diff(self.bounds)

    def sums_by_pack(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums of the values of each pack's sequences: int64 [packs]."""
        sums: NDArray[np.int64] = np.diff(np.append(0, np.cumsum(values))[self.sequence_offsets])
        return sums

    def padded_lengths(self, multiple: int) -> NDArray[np.int64]:
        """Return the size of each pack with its sequences rounded up to a multiple (rule P5): int64 [packs]."""
        return self.sums_by_pack(-(-self.sequence_lengths() // multiple) * multiple)

    def rows_by_pack(self, per: Per) -> NDArray[np.int64]:
        """Return the number of rows of each pack in a column: int64 [packs]."""
        ones = np.ones_like(self.pack_lengths)
        return {"token": self.pack_lengths, "sequence": self.pack_sequences, "pack": ones}[per]

    def pack(self, index: int) -> Pack:
        """Return pack ``index`` of the run, with its columns, images and audio.

        Ids and mask are read-only views; boundaries are a copy.
        """
        if len(self) == 1 and index == 0:  # a run of one pack: offsets need no sums
            start, stop, first, last = 0, len(self.tokens), 0, len(self.seq_starts)
        else:
            start, stop = self.token_offsets[index : index + 2].tolist()
            first, last = self.sequence_offsets[index : index + 2].tolist()
        boundaries = np.empty(last - first + 1, np.int32)
        boundaries[:-1] = self.seq_starts[first:last]
        boundaries[-1] = stop - start
        tokens, mask = self.tokens[start:stop], self.loss_mask[start:stop]
        tokens.flags.writeable = mask.flags.writeable = False
        pack: Pack = {"input_ids": tokens, "loss_mask": mask, "seq_boundaries": boundaries}
        rows: dict[str, slice | int] = {"token": slice(start, stop), "sequence": slice(first, last), "pack": index}
        for name, (spec, values) in self.columns.items():
            pack[name] = values[rows[spec.per]]  # type: ignore[literal-required]
        if self.media is not None:
            pack["media"] = self.media.in_pack(slice(first, last), self.seq_starts[first:last])
        return pack

    def subrun(self, first: int, last: int) -> PackRun:
        """Return packs ``[first, last)`` as views. Its ``unplaced`` is 0, because the whole run counts those values."""
        tokens = slice(*self.token_offsets[[first, last]].tolist())
        sequences, packs = slice(*self.sequence_offsets[[first, last]].tolist()), slice(first, last)
        return PackRun(
            self.tokens[tokens],
            self.loss_mask[tokens],
            self.seq_starts[sequences],
            self.pack_lengths[packs],
            self.pack_sequences[packs],
            columns=sliced(self.columns, token=tokens, sequence=sequences, pack=packs),
            media=self.media and self.media.subrun(sequences),
        )

    @classmethod
    def of_pack(
        cls, tokens: NDArray[Any], loss_mask: NDArray[Any], seq_starts: NDArray[Any], columns: Columns | None = None
    ) -> PackRun:
        """Return one pack as a run."""
        counts = np.array([len(tokens), len(seq_starts)])
        return cls(tokens, loss_mask, seq_starts, counts[:1], counts[1:], columns=columns or {})

    @classmethod
    def joined(cls, runs: Sequence[PackRun]) -> PackRun:
        """Copy the packs of one or more runs into a new run.

        ValueError: the runs have different columns, or only some of them have images and audio.
        """
        specs = {name: column.spec for name, column in runs[0].columns.items()}
        if any({name: column.spec for name, column in run.columns.items()} != specs for run in runs):
            raise ValueError("runs with different columns")
        columns = {
            name: Column(spec, np.concatenate([run.columns[name].values for run in runs]))
            for name, spec in specs.items()
        }
        names = ("tokens", "loss_mask", "seq_starts", "pack_lengths", "pack_sequences")
        arrays = {name: np.concatenate([getattr(run, name) for run in runs]) for name in names}
        media = [run.media for run in runs if run.media is not None]
        if len(media) not in (0, len(runs)):
            raise ValueError("runs with and without images and audio")
        unplaced = sum(run.unplaced for run in runs)
        return cls(**arrays, unplaced=unplaced, columns=columns, media=RunMedia.joined(media) if media else None)


# ---- packs from other formats ----


def checked_run(
    path: str,
    first_pack: int,
    run: PackRun,
    mask_alignment: MaskAlignment = "label",
    token_dtype: Any = None,
    mask_dtype: Any = None,
) -> PackRun:
    """Check a run of packs against every rule, and align its mask with labels.

    Args:
        path: path of the file, for errors.
        first_pack: number of the first of these packs in the file, for errors.
        run: its arrays may hold anything: integers of any kind, and booleans and floats in the mask. Nothing is cast
            before it is known to fit, no sum overflows, and nothing outside the arrays is read. Columns stay unchanged.
        mask_alignment: alignment of its loss mask.
        token_dtype: dtype of the resulting ids, uint16 or int32; None keeps uint16 and converts all others to int32.
        mask_dtype: dtype of the resulting mask, uint8 or float32; None converts floats to float32 and all others to
            uint8.

    Raises:
        SequenceError: a pack breaks a rule; the error has its number.
        FormatError: the arrays' lengths contradict each other, so that no single pack is wrong.
    """
    try:
        ids, mask = token_array(run.tokens), mask_array(run.loss_mask)
        starts, lengths, sequences = map(integer_array, (run.seq_starts, run.pack_lengths, run.pack_sequences))
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError(f"{path}: packs from {first_pack} on: one of the arrays {error}") from None
    token_dtype = np.dtype(token_dtype or (np.uint16 if ids.dtype == np.uint16 else np.int32))
    mask_dtype = np.dtype(mask_dtype or (np.float32 if mask.dtype.kind == "f" else np.uint8))
    if len(lengths) != len(sequences):
        raise FormatError(f"{path}: {len(lengths)} pack lengths, but {len(sequences)} sequence counts")
    try:
        breach = _native.first_breach(
            ids, mask, starts, lengths, sequences, mask_alignment != "label", MAX_CAPACITY, token_dtype, mask_dtype
        )
    except ValueError:
        expected = f"{lengths.sum()} ids, {lengths.sum()} loss mask values and {sequences.sum()} sequence starts"
        raise FormatError(
            f"{path}: packs {first_pack} to {first_pack + len(lengths) - 1} should have {expected};"
            f" found {len(ids)}, {len(mask)} and {len(starts)}"
        ) from None
    if breach is not None and breach[0][0] != "P6":  # P6, a mask set at the end of a sequence, is corrected below
        raise SequenceError(path, first_pack + breach[0][1], breach[1])
    ids, mask = ids.astype(token_dtype, copy=False), mask.astype(mask_dtype, copy=False)
    if mask_alignment == "rolled-right" and (pack := first_true(mask[np.cumsum(lengths) - lengths] != 0)) is not None:
        reason = "its loss mask begins with a value above 0, which cannot happen in a mask that was rolled right;"
        raise SequenceError(path, first_pack + pack, f"{reason} use mask alignment label or token")
    run = replace(run, tokens=ids, loss_mask=mask, seq_starts=starts, pack_lengths=lengths, pack_sequences=sequences)
    return run if breach is None and mask_alignment == "label" else label_aligned(run, mask_alignment)


def checked_pack(
    path: str, number: int, input_ids: ArrayLike, loss_mask: ArrayLike, starts: ArrayLike, **options: Any
) -> PackRun:
    """Call ``checked_run`` for one pack; its number is for errors. SequenceError: it breaks a rule."""
    try:
        ids, mask, starts = map(plain_array, (input_ids, loss_mask, starts))
    except ValueError as error:
        raise SequenceError(path, number, f"one of ids, mask and sequence starts {error}") from None
    if ids.ndim != 1 or mask.ndim != 1 or starts.ndim != 1:
        raise SequenceError(path, number, "ids, mask and sequence starts must have one dimension each")
    require_same_length(path, number, input_ids=len(ids), loss_mask=len(mask))
    return checked_run(path, number, PackRun.of_pack(ids, mask, starts), **options)


def require_same_length(path: str, pack: int, **lengths: int) -> None:
    """Raise SequenceError unless these arrays of a pack, whose lengths are given by name, are equally long."""
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{length} in {name}" for name, length in lengths.items())
        raise SequenceError(path, pack, f"{found}; each must have one value per token")


def label_aligned(run: PackRun, alignment: MaskAlignment) -> PackRun:
    """Align the mask of a valid run with labels. Values without a position are counted as ``unplaced``.

    The given mask is not modified.
    """
    starts, ends = run.bounds[:-1], run.bounds[1:] - 1
    mask = given = run.loss_mask
    if alignment == "rolled-right":
        given = np.append(mask[1:], mask[:1])
        given[run.token_offsets[1:] - 1] = 0
    mask = mask.copy() if alignment == "label" else np.append(given[1:], given[:1])
    mask[ends] = 0
    unplaced = int(np.count_nonzero(given[ends if alignment == "label" else starts]))
    return replace(run, loss_mask=mask, unplaced=unplaced)


def run_of_sequences(tokens: NDArray[Any], lengths: NDArray[np.int64]) -> PackRun:
    """Return contiguous sequences of these lengths as packs of one sequence each, with all tokens trained."""
    ones, mask = np.ones_like(lengths), np.ones(len(tokens), np.uint8)
    mask[np.cumsum(lengths) - 1] = 0  # nothing is predicted at the end of a sequence
    return PackRun(tokens, mask, ones - 1, lengths, ones)


def has_weights(mask: NDArray[Any]) -> bool:
    """Return whether a loss mask has values other than 0 and 1."""
    return mask.dtype.kind == "f" and not bool(((mask == 0) | (mask == 1)).all())


def first_true(values: NDArray[np.bool_]) -> int | None:
    """Return the index of the first true value, or None."""
    at = int(values.argmax()) if len(values) else 0
    return at if len(values) and values[at] else None


# ---- iterating over a shard in windows ----


def fewer_tokens(tokens: int, columns: Mapping[str, ColumnSpec]) -> int:
    """Return how many tokens with token columns use the memory of ``tokens`` tokens without columns; at least 1."""
    return max(1, 8 * tokens // (8 + sum(spec.row_nbytes for spec in columns.values() if spec.per == "token")))


def run_bounds(token_offsets: NDArray[Any], tokens: int = RUN_TOKENS) -> Iterator[tuple[int, int]]:
    """Divide packs into runs of at most ``tokens`` tokens, or one longer pack. Yields first pack and last + 1 of each.

    ``token_offsets`` [packs + 1] has the start of each pack, and the end of the last one.
    """
    first, packs = 0, len(token_offsets) - 1
    while first < packs:
        last = first + max(1, count_fitting(token_offsets[first:], tokens))
        yield first, last
        first = last


def count_fitting(offsets: NDArray[Any], max_size: int) -> int:
    """Return how many of the first packs have at most ``max_size`` tokens (or sequences) together.

    ``offsets`` [packs + 1] has the start of each pack in tokens (or sequences), and the end of the last one.
    """
    return min(int(np.searchsorted(offsets, offsets[0] + max_size, side="right")), len(offsets)) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Consecutive packs of a shard. Their offsets are in memory; ``content`` reads ids and masks.

    Attributes:
        files: open files of the shard.
        first_pack: number of the first pack in the shard; ``first_token`` and ``first_sequence`` likewise.
        pack_bounds: start of each pack and end of the last, in tokens of the window: int64 [packs + 1].
        sequence_offsets: the same in sequences of the window: int64 [packs + 1].
        bounds: start of each sequence and end of the last, in tokens of the window: int64 [sequences + 1].
        columns: columns of these packs, by name.
        media: images and audio of their sequences; None if they were not requested.
    """

    files: OpenFiles
    first_pack: int
    first_token: int
    first_sequence: int
    pack_bounds: NDArray[np.int64]
    sequence_offsets: NDArray[np.int64]
    bounds: NDArray[np.int64]
    columns: Columns = field(default_factory=dict)
    media: RunMedia | None = None

    def __len__(self) -> int:
        return len(self.pack_bounds) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in its packs."""
        return int(self.pack_bounds[-1])

    def content(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return ids and label-aligned mask, each [tokens]: views if the shard is mapped, else read now."""
        tokens = slice(self.first_token, self.first_token + self.num_tokens)
        return self.files.tokens[tokens], self.files.loss[tokens]

    def starts(self) -> NDArray[np.int64]:
        """Return the start of each sequence in its pack, int64 [sequences]."""
        return self.bounds[:-1] - np.repeat(self.pack_bounds[:-1], np.diff(self.sequence_offsets))

    def run(self) -> PackRun:
        """Read ids and masks, and return the packs as a run."""
        lengths, sequences = np.diff(self.pack_bounds), np.diff(self.sequence_offsets)
        return PackRun(*self.content(), self.starts(), lengths, sequences, columns=self.columns, media=self.media)

    def locate(self, sequence: int) -> tuple[int, int]:
        """Return the number in the shard of the pack that has a sequence of the window, and its number in that pack."""
        pack = int(np.searchsorted(self.sequence_offsets, sequence, "right")) - 1
        return self.first_pack + pack, sequence - int(self.sequence_offsets[pack])


def windows(
    files: OpenFiles,
    tokens: int | None = None,
    columns: OpenColumns = _NONE,
    first: int = 0,
    stop: int | None = None,
    media: ShardMedia | None = None,
) -> Iterator[Window]:
    """Yield packs of a shard, in order, in windows of bounded size.

    Args:
        files: open files of the shard, with any backend; with ``pread``, no page of it is mapped.
        tokens: maximum number of tokens in a window, reduced if there are columns of tokens (``fewer_tokens``); a
            longer pack is a separate window. None for ``WINDOW_TOKENS``.
        columns: columns to include in the windows.
        first: the first pack.
        stop: the end of the range of packs (exclusive); None, or a larger number than there are, for all packs from
            ``first`` on.
        media: images and audio of the shard, if the windows are to include them.

    Raises:
        FormatError: offsets or starts do not divide the tokens (rules O1, O2, P2 to P4).
    """
    files.check_ends()
    stop = files.num_packs if stop is None else min(stop, files.num_packs)
    tokens = fewer_tokens(tokens or WINDOW_TOKENS, {name: column.spec for name, column in columns.items()})
    # Twice the average number of packs that fit: reading more offsets per window takes longer than reading its tokens.
    step = 1 + 2 * tokens * files.num_packs // max(1, files.num_tokens)
    while first < stop:
        window = read_window(files, first, min(first + step, first + WINDOW_PACKS, stop), tokens, columns, media)
        yield window
        first += len(window)


def read_window(
    files: OpenFiles,
    first: int,
    stop: int,
    tokens: int | None = None,
    columns: OpenColumns = _NONE,
    media: ShardMedia | None = None,
) -> Window:
    """Read as many of the packs ``[first, stop)`` as fit in a window, at least one. See ``windows`` for errors."""
    stop = min(stop, files.num_packs)
    pack_bounds, sequence_offsets = files.token_offsets[first : stop + 1], files.sequence_offsets[first : stop + 1]
    max_tokens = WINDOW_TOKENS if tokens is None else tokens
    count = max(1, min(count_fitting(pack_bounds, max_tokens), count_fitting(sequence_offsets, WINDOW_SEQUENCES)))
    pack_bounds, sequence_offsets = pack_bounds[: count + 1], sequence_offsets[: count + 1]
    token, sequence, last = int(pack_bounds[0]), int(sequence_offsets[0]), int(sequence_offsets[-1])
    try:
        if not 0 <= sequence <= last <= files.num_sequences:
            raise ValueError("shard 0, pack 0: sequence offsets of this or a later pack are outside the file (rule O1)")
        if token < 0 or pack_bounds[-1] > files.num_tokens:
            raise ValueError("shard 0, pack 0: token offsets of this or a later pack are outside the file (rule O2)")
        pack_bounds, sequence_offsets = pack_bounds - token, sequence_offsets - sequence
        bounds = _native.absolute_offsets(sequence_offsets, pack_bounds, files.starts[sequence:last])
    except ValueError as error:
        raise files.pack_error(f"{error}", first_pack=first) from None
    values = sliced(
        columns,
        token=slice(token, token + int(pack_bounds[-1])),
        sequence=slice(sequence, last),
        pack=slice(first, first + count),
    )
    window = Window(files, first, token, sequence, pack_bounds, sequence_offsets, bounds, values)
    if media is not None:
        window = replace(window, media=media.of_sequences(first, sequence_offsets, window.starts()))
    return window


def nbytes_of_run(run: PackRun) -> int:
    """Return the number of bytes of a run's tokens, masks, starts and columns in the files of a shard."""
    columns = sum(column.values.nbytes for column in run.columns.values())
    return run.tokens.nbytes + run.loss_mask.nbytes + 4 * len(run.seq_starts) + columns


def checked_runs(
    files: OpenFiles, columns: OpenColumns, advance: Advance, media: ShardMedia | None = None
) -> Iterator[PackRun]:
    """Yield all packs of a shard, with columns, images and audio. Each file is checked against its checksum.

    Encoded images and audio are not read here. Each is checked against its hash when it is read (``ShardMedia.data``).

    The checksums of local indexes and starts are compared before the first run, all others after the last. ``advance``
    is called with the bytes that were read since the last call. CorruptShardError: a file does not match its checksum
    (F3, C7 for a column, M13 for ``.media.items``), or the offsets break O1 or O2.
    """
    files.check_ends()
    paths, header = files.paths, files.header
    tokens, loss, idx, starts = header.digests
    arrays = FileDigest(header.seq_idx_nbytes - header.nbytes, header.arrays_checksum)
    small = (paths.idx, 0, idx), (paths.seq_idx, header.nbytes, arrays), (paths.starts, 0, starts)
    for path, begin, digest in () if is_remote(paths.prefix) else small:
        _require_checksum(paths, path, "F3", digest_file(path, begin).checksum, digest.checksum)
    advance(idx.nbytes + arrays.nbytes)
    expected = {paths.tokens: ("F3", tokens.checksum), paths.loss: ("F3", loss.checksum)}
    expected |= {paths.column(name): ("C7", column.header.checksum) for name, column in columns.items()}
    hashes = {path: StreamHash() for path in expected}
    if media is not None:
        _require_checksum(paths, media.paths.media_items, "M13", media.items_checksum(), media.header.arrays_checksum)
    for window in windows(files, COPIED_TOKENS, columns, media=media):
        run = window.run()
        rows = run.tokens, run.loss_mask, *(column.values.reshape(-1) for column in run.columns.values())
        for stream, values in zip(hashes.values(), rows, strict=True):
            stream.update(values)
        advance(nbytes_of_run(run))
        yield run
        del run, rows, values  # before the next are read into the same memory
    for path, (rule, checksum) in expected.items():
        _require_checksum(paths, path, rule, hashes[path].checksum(), checksum)


def require_checksums(
    files: OpenFiles, columns: OpenColumns, advance: Advance, media: ShardMedia | None = None
) -> None:
    """Read all bytes of a shard, including columns and media items, and compare their checksums.

    See ``checked_runs`` for arguments and errors. This is for commands that read a shard in another order than it is
    stored in: a checksum covers a whole file, in its order.
    """
    for _ in checked_runs(files, columns, advance, media):
        pass


def nbytes_of(header: Header) -> int:
    """Return the size of a shard's five files in bytes, without the header of ``.seq.idx``."""
    return sum(digest.nbytes for digest in header.digests) + header.seq_idx_nbytes - header.nbytes


def nbytes_to_check(files: OpenFiles, columns: OpenColumns) -> int:
    """Return the number of bytes that ``checked_runs`` reads."""
    return nbytes_of(files.header) + sum(len(column) * column.spec.row_nbytes for column in columns.values())


def _require_checksum(paths: ShardPaths, path: str, rule: str, found: bytes, expected: bytes) -> None:
    if found != expected:
        raise CorruptShardError(
            path,
            None,
            rule,
            f"checksum of all bytes is {found.hex()}, but the header records {expected.hex()}; the file was changed,"
            " or belongs to another shard. Restore it from a copy, make the shard again with --overwrite, or accept its"
            f" current content: megatron-sft-idx rebuild {paths.prefix} --accept-contents. Nothing was published",
        )
