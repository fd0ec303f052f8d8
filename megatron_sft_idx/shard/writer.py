"""Writing one shard in a stream: bounded memory, every rule checked, published all at once or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import Header, ShardPaths, mask_dtype_of, token_dtype_of
from megatron_sft_idx.layout.column import ColumnSpec, check_name, listed_columns
from megatron_sft_idx.layout.header import MAX_CAPACITY, header_nbytes
from megatron_sft_idx.layout.journal import BuildOptions
from megatron_sft_idx.shard.build import STAGE_TOKENS, Build
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.shard.reader import Shard

__all__ = ["MaskAlignment", "ShardWriter", "integer_array", "mask_array", "token_array"]

MaskAlignment = Literal["label", "token"]


class ShardWriter:
    """Writes a shard pack by pack.

    A context manager: leaving it publishes the files together, leaving it by an exception publishes nothing and
    removes what was written. A killed writer leaves temporary files and a journal, never something that looks like
    a shard. Memory stays at a few MiB for any number of packs.

    Args:
        prefix: the path the five files will share; its folder is made where it is missing.
        token_dtype: int32, or uint16 for vocabularies below 65500.
        mask_dtype: uint8 for masks of 0 and 1, float32 for weights.
        capacity: most token positions a pack may hold; None sets it to the longest pack.
        sequence_multiple: count each sequence as its length rounded up to this against the capacity.
        pad_id: the tokenizer's padding id, kept for readers.
        overwrite: replace a shard, or the remains of an interrupted build, at this prefix.
        metadata: JSON object for the header: fingerprints, options, counts. Nothing that changes from run to run.
        columns: what is written beside the tokens, by name; ``add_pack`` takes the values. The JSON block lists them
            under ``columns``.
        durable: False skips fsync, for files that are thrown away anyway.

    Raises:
        FormatError: an argument the format does not allow, or something is at the prefix and ``overwrite`` is False.
        OSError: the disk says no.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        token_dtype: Any = np.int32,
        mask_dtype: Any = np.uint8,
        capacity: int | None = None,
        sequence_multiple: int = 1,
        pad_id: int | None = None,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        columns: Mapping[str, ColumnSpec] | None = None,
        durable: bool = True,
    ) -> None:
        self._paths = ShardPaths.of(prefix).with_columns(map(check_name, columns or ()))
        options = BuildOptions(
            token_dtype_of(token_dtype)[1],
            mask_dtype_of(mask_dtype)[1],
            _checked(capacity, "capacity", 1, MAX_CAPACITY) if capacity is not None else None,
            _checked(sequence_multiple, "sequence_multiple", 1, MAX_CAPACITY),
            _checked(pad_id, "pad_id", 0, MAX_CAPACITY) if pad_id is not None else None,
            dict(metadata or {}),
            dict(columns or {}),
        )
        header_nbytes(options.metadata)  # refuses what cannot be stored now, not after hours of writing
        self._publication = Publication(self._paths, options.encode(), overwrite=overwrite, durable=durable)
        with self._all_or_nothing():
            self._build = Build(self._publication, options)
        self._stage, self._columns = self._build.stage, self._build.columns
        self._header: Header | None = None
        self.metadata: dict[str, Any] = dict(options.metadata)

    @property
    def prefix(self) -> str:
        """The path the files will share."""
        return self._paths.prefix

    @property
    def paths(self) -> ShardPaths:
        """The files; ``paths.unpublished`` until they are published."""
        return self._paths

    @property
    def mask_dtype(self) -> np.dtype[Any]:
        """Dtype of the loss file: uint8 or float32."""
        return self._build.options.mask_dtype

    @property
    def num_packs(self) -> int:
        """Packs added so far."""
        return self._stage.num_packs

    @property
    def num_sequences(self) -> int:
        """Sequences added so far."""
        return self._stage.num_sequences

    @property
    def num_tokens(self) -> int:
        """Tokens added so far."""
        return self._stage.num_tokens

    @property
    def num_trained_tokens(self) -> int:
        """Positions trained on so far."""
        return self._stage.num_trained_tokens

    @property
    def dropped_first_tokens(self) -> int:
        """Token-aligned masks that were set on a sequence's first token, which nothing predicts."""
        return self._stage.dropped_first_tokens

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon()
        elif not self._publication.closed:
            self.finalize()

    def __del__(self) -> None:
        # Never finalized and never left through ``with``.
        if "_publication" in self.__dict__ and not self._publication.closed:
            self.abandon()

    def add_pack(
        self,
        tokens: ArrayLike,
        loss_mask: ArrayLike,
        seq_starts: ArrayLike,
        *,
        mask_alignment: MaskAlignment = "label",
        columns: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Add one pack.

        Args:
            tokens: ids [length].
            loss_mask: 0/1 or weights [length]. ``label``-aligned: position j says whether predicting token j + 1 of
                the same sequence counts, so it is 0 at every sequence's end. ``token``-aligned: position j says
                whether token j is trained on; it is shifted here, and a mask set on a sequence's first token, which
                nothing predicts, is dropped and counted in ``dropped_first_tokens``.
            seq_starts: start of each sequence in the pack [sequences], the first 0.
            mask_alignment: which of the two ``loss_mask`` is.
            columns: values of every column that the writer was opened with, by name: [rows] or [rows, width], one row
                a token or a sequence of the pack, or one for the pack.

        Raises:
            SequenceError: a rule of FORMAT.md is broken; nothing of the pack is kept.
        """
        self._require_ready(mask_alignment)
        if type(tokens) is type(loss_mask) is type(seq_starts) is np.ndarray and not (columns or self._columns.specs):
            # Arrays in a form that the stage takes go straight there. It keeps nothing of what it refuses, so what
            # is in another form, breaks a rule or has to wait for a flush goes the whole way below.
            try:
                added = self._stage.add_one(tokens, loss_mask, seq_starts, mask_alignment == "token")
            except (TypeError, ValueError):
                added = False
            if added:
                return
        starts = self._array(integer_array, seq_starts, "seq_starts")
        ids = self._array(token_array, tokens, "tokens")
        lengths, sequences = np.array([ids.size]), np.array([starts.size])
        self._add(ids, loss_mask, starts, lengths, sequences, mask_alignment, columns)

    def add_packs(
        self,
        tokens: ArrayLike,
        loss_mask: ArrayLike,
        seq_starts: ArrayLike,
        pack_lengths: ArrayLike,
        pack_sequences: ArrayLike,
        *,
        mask_alignment: MaskAlignment = "label",
        columns: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Add many packs at once: the arrays of ``add_pack`` end to end.

        Args:
            tokens: ids of all packs [sum of lengths].
            loss_mask: their masks [sum of lengths].
            seq_starts: positions inside each pack [sum of sequence counts].
            pack_lengths: tokens in each pack [packs].
            pack_sequences: sequences in each pack [packs].
            mask_alignment: as in ``add_pack``.
            columns: as in ``add_pack``, for all packs end to end.

        Raises:
            SequenceError: a rule of FORMAT.md is broken in one of the packs; none of them is kept.
        """
        self._require_ready(mask_alignment)
        starts = self._array(integer_array, seq_starts, "seq_starts")
        ids = self._array(token_array, tokens, "tokens")
        lengths = self._array(integer_array, pack_lengths, "pack_lengths")
        sequences = self._array(integer_array, pack_sequences, "pack_sequences")
        self._add(ids, loss_mask, starts, lengths, sequences, mask_alignment, columns)

    def add_shard(self, shard: Shard) -> None:
        """Add all packs of another shard, in bounded memory, with the columns that this writer was opened with.

        Raises:
            FormatError: the other shard lacks one of them, or was written with one that this writer does not take.
            SequenceError: a pack does not fit this writer's capacity or dtypes; the packs before it were added.
            CorruptShardError: the other shard's offsets do not cover its files (rules O1, O2).
        """
        files, tokens, sequences = shard.files, shard.token_offsets, shard.sequence_offsets
        shard.check_ends()
        theirs = {
            name: shard.columns.get(name) for name in {*self._columns.specs, *listed_columns(shard.header.metadata)}
        }
        for name, column in theirs.items():
            mine = self._columns.specs.get(name)
            if mine is None or column is None or column.spec.kind != mine.kind:
                raise FormatError(f"{shard.prefix}: column {name} is not as {self.prefix} was opened for it")
        first = 0
        while first < len(shard):
            last = int(np.searchsorted(tokens, tokens[first] + STAGE_TOKENS, side="right")) - 1
            last = min(max(last, first + 1), first + STAGE_TOKENS)
            rows = {
                "token": slice(tokens[first], tokens[last]),
                "sequence": slice(sequences[first], sequences[last]),
                "pack": slice(first, last),
            }
            self.add_packs(
                files.tokens[tokens[first] : tokens[last]],
                files.loss[tokens[first] : tokens[last]],
                files.starts[sequences[first] : sequences[last]],
                np.diff(tokens[first : last + 1]),
                np.diff(sequences[first : last + 1]),
                columns={name: column.values[rows[column.spec.per]] for name, column in theirs.items() if column},
            )
            first = last

    def _array(self, convert: Callable[[ArrayLike], NDArray[Any]], values: ArrayLike, name: str) -> NDArray[Any]:
        try:
            return convert(values)
        except (ValueError, TypeError, RuntimeError) as error:  # the latter two come from tensors without numpy form
            raise SequenceError(self.prefix, None, f"pack {self.num_packs}: {name} {error}") from None

    def _add(
        self,
        ids: NDArray[Any],
        loss_mask: ArrayLike,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        sequences: NDArray[np.int64],
        mask_alignment: MaskAlignment,
        columns: Mapping[str, ArrayLike] | None,
    ) -> None:
        mask = self._array(mask_array, loss_mask, "loss_mask")
        if mask.size != ids.size:
            reason = f"{mask.size} loss mask values for {ids.size} tokens; there is one a token"
            raise SequenceError(self.prefix, None, f"pack {self.num_packs}: {reason}")
        try:
            beside = self._columns.arrays(columns, token=ids.size, sequence=starts.size, pack=lengths.size)
        except (TypeError, ValueError) as error:
            raise SequenceError(self.prefix, None, f"pack {self.num_packs}: {error}") from None
        try:
            while not self._stage.add(ids, mask, starts, lengths, sequences, mask_alignment == "token"):
                self.flush()
        except ValueError as error:
            raise SequenceError(self.prefix, None, str(error)) from None
        self._columns.stage(beside)

    def flush(self) -> None:
        """Write what is staged, then record it in the journal."""
        if not len(self._stage.records):
            return
        self._publication.require_owner()
        with self._all_or_nothing():
            self._build.write_staged()

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Abandon the build where a write fails halfway: the files no longer go together."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def complete(self) -> Header:
        """Write the indexes: a ``Shard`` can be opened at ``paths.unpublished``. Nothing more can be added.

        Raises:
            FormatError: the metadata is not JSON.
        """
        if self._header is None:
            self._require_open()
            self._publication.require_owner()
            with self._all_or_nothing():
                self.flush()
                self._header = self._build.complete(self.metadata)
        return self._header

    def finalize(self) -> Header:
        """Write the indexes, unless they are, and publish the shard.

        Returns:
            The header of the published shard.

        Raises:
            FormatError: another shard appeared at the prefix in the meantime, or the metadata is not JSON.
        """
        self._require_open()
        self._publication.require_owner()
        header = self.complete()
        with self._all_or_nothing():
            self._publication.publish()
        return header

    def set_aside(self) -> Header:
        """As ``finalize``, but leave the publication to ``publish_all``."""
        self._require_open()
        self._publication.require_owner()
        header = self.complete()
        with self._all_or_nothing():
            self._publication.set_aside()
        return header

    def _require_ready(self, mask_alignment: str) -> None:
        self._require_open()
        if self._header is not None:
            raise FormatError(f"{self.prefix}: this shard is complete; open another writer to write more packs")
        if mask_alignment not in ("label", "token"):
            raise FormatError(f"{self.prefix}: mask_alignment {mask_alignment!r}, choose 'label' or 'token'")

    def _require_open(self) -> None:
        if self._publication.closed:
            raise FormatError(
                f"{self.prefix}: this writer is finished or was abandoned; open another one to write more packs"
            )

    def suspend(self) -> None:
        """Stop, and leave what is written for ``recover``; what is only staged is lost."""
        self._publication.close()

    def abandon(self) -> None:
        """Publish nothing and remove what was written; may be called twice."""
        self._publication.abandon()


def _checked(value: Any, name: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
        raise FormatError(f"{name} {value!r}: expected a whole number from {least} to {most}")
    return int(value)


_TOKENS = tuple(map(np.dtype, (np.uint16, np.int32, np.int64)))
_POSITIONS = (np.dtype(np.int64),)
_FLAGS = tuple(map(np.dtype, (np.bool_, np.uint8, np.int64)))
_WEIGHTS = tuple(map(np.dtype, (np.float32, np.float64)))


def token_array(values: ArrayLike) -> NDArray[Any]:
    """Ids as uint16, int32 or int64, one-dimensional and contiguous."""
    return _native_form(values, _TOKENS, "iu", "integers")


def integer_array(values: ArrayLike) -> NDArray[np.int64]:
    """Positions as int64."""
    return _native_form(values, _POSITIONS, "iu", "integers")


def mask_array(values: ArrayLike) -> NDArray[Any]:
    """A mask as bool, uint8, int64, float32 or float64."""
    array = np.asarray(values)
    if array.dtype.kind == "f":
        return _native_form(array, _WEIGHTS, "f", "numbers")
    return _native_form(array, _FLAGS, "iub", "numbers or booleans")


def _native_form(values: ArrayLike, dtypes: tuple[np.dtype[Any], ...], kinds: str, what: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype in dtypes and array.ndim == 1 and array.flags.c_contiguous and array.flags.aligned:
        # A dtype may spell its byte order out, "<" for "=": all the same to numpy, but not to the kernels.
        return array if array.dtype.byteorder in "=|" else array.view(array.dtype.newbyteorder("="))
    if array.ndim != 1:
        raise ValueError(f"has shape {array.shape}; expected one dimension")
    if array.size == 0:
        return np.empty(0, dtypes[-1])
    if array.dtype.kind not in kinds:
        raise ValueError(f"has dtype {array.dtype}; expected {what}")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"holds {array.max()}, far outside any id, position or mask")
    return np.require(array, dtypes[-1], ("C", "ALIGNED"))
