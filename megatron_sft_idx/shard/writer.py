"""Write a shard: check packs, append them to the data files, and publish the shard completely or not at all.

Data files and columns are hashed and counted while they grow. The indexes are written last, from the log of packs, so
that memory stays bounded for any number of packs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.arguments import checked
from megatron_sft_idx.errors import FormatError, SequenceError, brief
from megatron_sft_idx.layout import FileDigest, Header, ShardPaths, token_dtype_of
from megatron_sft_idx.layout.column import ColumnHeader, ColumnSpec, NamedRows, num_rows_in
from megatron_sft_idx.layout.files import (
    CHECKSUM_NBYTES,
    MAX_CAPACITY,
    MEDIA_ENTRY,
    integer_array,
    listed_columns,
    listed_media,
    mask_array,
    pack_idx_header,
    token_array,
    vocab_size_of,
)
from megatron_sft_idx.layout.media_layout import MediaItem
from megatron_sft_idx.lines import Shown
from megatron_sft_idx.packs.run import PackRun, checked_runs, run_bounds
from megatron_sft_idx.packs.run_media import RunMedia
from megatron_sft_idx.shard.build_options import BuildOptions, GrowingFile
from megatron_sft_idx.shard.media_writer import MediaWriter, PlacedMedia, placed_media
from megatron_sft_idx.shard.opening import read_header
from megatron_sft_idx.shard.pack_log import CHUNK_PACKS, LoggedPacks, PackChunk, append_packs
from megatron_sft_idx.shard.publication import Publication, finish_interrupted
from megatron_sft_idx.shard.reader import Shard
from megatron_sft_idx.storage import OutputFile
from megatron_sft_idx.storage.building import PROGRAM, Building
from megatron_sft_idx.storage.building_files import PACKS
from megatron_sft_idx.storage.local import HashedFile
from megatron_sft_idx.storage.progress import Advance

MaskAlignment = Literal["label", "token"]

# The version of this writer, stored in the JSON block. It must be raised if the same input would give other bytes.
FORMAT_WRITER = 1
# Number of tokens to stage before writing. They stay in the CPU caches between check, write and checksum. With a
# quarter of this, the calls of each flush make writing 20% slower.
STAGE_TOKENS = 1 << 18
# A run with at least this many tokens is written from its own arrays. Staging it would cost more than it saves.
_LONG_RUN = STAGE_TOKENS // 4


class ShardWriter(Shown):
    """Writes a shard pack by pack.

    Use it as a context manager. At the end of the block, the files are published together. If an exception ends the
    block, nothing is published and the written files are removed. A killed writer leaves the folder
    ``PREFIX.building``, never something that looks like a shard. Memory stays at a few MiB for any number of packs.

    Args:
        prefix: the path that the five files will share; its folder is created if necessary.
        token_dtype: int32, or uint16 for vocabularies below 65500.
        mask_dtype: uint8 for masks of 0 and 1, float32 for weights.
        capacity: maximum number of token positions in a pack; None sets it to the longest pack.
        sequence_multiple: count each sequence as its length rounded up to this against the capacity.
        pad_id: the tokenizer's padding id, stored for readers.
        overwrite: replace a shard, or the remains of an interrupted build, at this prefix.
        metadata: JSON object for the header: fingerprints, options, counts. It must not hold anything that differs
            between two runs with the same input and options.
        columns: the columns to write with the tokens, by name; ``add_pack`` takes their values. The JSON block lists
            them under ``columns``.
        media: whether packs may have images and audio, which ``add_pack`` takes. If so, the JSON block gets a key
            ``media``.
        durable: False skips fsync, for temporary files.

    Attributes:
        metadata: JSON object for the header. It can be changed until the shard is complete.
        rebuilt: whether the header will mark the shard as rebuilt.
        found: whether ``finalize`` found an identical shard at the prefix and kept it.

    Raises:
        FormatError: the format does not allow an argument, or the prefix has something that may not be replaced.
        OSError: an error of the disk.

    Example:
        >>> from megatron_sft_idx import Shard
        >>> with ShardWriter("data/by-hand", token_dtype=np.uint16, capacity=8) as writer:
        ...     # Two sequences of four and three tokens. 1: this token is trained on.
        ...     writer.add_pack([5, 6, 7, 8, 5, 9, 8], [0, 0, 1, 1, 0, 1, 1], [0, 4], mask_alignment="token")
        >>> Shard("data/by-hand")
        <Shard data/by-hand: 1 packs of up to 8 tokens, 2 sequences, 7 tokens, 57.1% trained; backend mmap>
    """

    @checked
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
        media: bool = False,
        durable: bool = True,
    ) -> None:
        numbers = capacity, sequence_multiple, pad_id
        options = BuildOptions(token_dtype, mask_dtype, *numbers, dict(metadata or {}), dict(columns or {}), media)
        paths = options.paths_of(ShardPaths.of(prefix))
        content = {"work": PROGRAM, "shard": options.encode()}
        self._begin(Publication(paths, content, overwrite=overwrite, durable=durable), options)

    def _shown(self) -> str:
        stage, state = self._stage, "finalized" if self._header is not None else "open"
        return f"{self.prefix}: {stage.num_packs:,} packs, {stage.num_tokens:,} tokens; {state}"

    @classmethod
    def begin(
        cls,
        prefix: str | os.PathLike[str],
        options: BuildOptions,
        *,
        work: str,
        overwrite: bool,
        durable: bool = True,
        nbytes: int = 0,
        building: Building | None = None,
        wait: float = 0.0,
    ) -> ShardWriter:
        """Begin a new shard with these options, for the command named ``work``.

        After an interruption, repeating the command makes the shard again, so the next writer replaces the remains. A
        shard at the prefix that was made with the same options may turn out to be identical (``found``). See
        ``Publication`` for the other arguments and the class for errors.
        """
        paths = options.paths_of(ShardPaths.of(prefix))
        content = {"work": work, "shard": options.encode()}
        present = None if overwrite or building is not None else _header_like(paths, options)
        publication = Publication(
            paths,
            content,
            overwrite=overwrite,
            durable=durable,
            nbytes=nbytes,
            building=building,
            wait=wait,
            may_be_found=present is not None,
        )
        writer = cls.of(publication, options)
        writer._present = present
        return writer

    @classmethod
    def of(cls, publication: Publication, options: BuildOptions) -> ShardWriter:
        """Write to the files of a publication. If it ``is_resumed``, the caller must call ``replay`` first."""
        writer = cls.__new__(cls)
        writer._begin(publication, options)
        return writer

    def _begin(self, publication: Publication, options: BuildOptions) -> None:
        self._publication, self._options = publication, options
        self._header: Header | None = None
        self._present: Header | None = None
        self.rebuilt, self.found, self._logs_packs = publication.is_resumed, False, True
        self.metadata: dict[str, Any] = dict(options.metadata)
        growing = options.growing_files(publication.paths)
        token_nbytes = sum(each.row_nbytes for each in growing if each.per == "token")
        self._stage_tokens = max(1, STAGE_TOKENS * 8 // max(8, token_nbytes))  # fewer if there are columns of tokens
        self._stage = _native.PackStage(
            options.token_dtype,
            options.mask_dtype,
            options.capacity or MAX_CAPACITY,
            options.sequence_multiple,
            self._stage_tokens,
            vocab_size_of(options.metadata) or 0,
        )
        self._staged_columns: dict[str, list[NDArray[Any]]] = {name: [] for name in options.columns}
        self._named_rows = {name: NamedRows(name, spec) for name, spec in options.columns.items()}
        # The files that grow while packs are added, by path. Their hashes cover the rows that are counted.
        self._files: dict[str, tuple[GrowingFile, HashedFile]] = {}
        with self._all_or_nothing():
            for each in growing:
                file = publication.open(each.path, keep=publication.is_resumed)
                if file.nbytes < each.begin:
                    file.write(bytes(each.begin - file.nbytes))
                self._files[each.path] = each, HashedFile(file)
            self._media = MediaWriter(publication) if options.media else None
            self._packs = publication.open_log(PACKS)

    @property
    def prefix(self) -> str:
        """The path that the files will share."""
        return self.paths.prefix

    @property
    def paths(self) -> ShardPaths:
        """The final paths of the files. Before publication, the files are at ``paths.unpublished``."""
        return self._publication.paths

    @property
    def num_packs(self) -> int:
        """Number of packs added so far."""
        return self._stage.num_packs

    @property
    def dropped_first_tokens(self) -> int:
        """Number of sequences whose token-aligned mask was set on the first token, which nothing predicts."""
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
        # The caller neither finalized the writer nor used it as a context manager.
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
        media: Sequence[MediaItem] = (),
    ) -> None:
        """Add one pack.

        Args:
            tokens: ids [length].
            loss_mask: 0/1 or weights [length]. ``label``-aligned: position j says whether predicting token j + 1 of the
                same sequence counts, so it is 0 at the end of every sequence. ``token``-aligned: position j says
                whether token j is trained on. Such a mask is shifted. Its value for the first token of a sequence,
                which nothing predicts, is dropped; ``dropped_first_tokens`` counts the ones that were set.
            seq_starts: start of each sequence in the pack [sequences]; the first is 0.
            mask_alignment: alignment of ``loss_mask``.
            columns: values of every column that the writer was opened with, by name: [rows] or [rows, width], with one
                row for each token or sequence of the pack, or one row for the pack.
            media: images and audio of the pack, in order. The mask must be 0 where the label is a placeholder.

        Raises:
            SequenceError: a rule of FORMAT.md is broken; nothing of the pack is added.

        Example:
            >>> from megatron_sft_idx import Shard
            >>> with ShardWriter("data/twice") as writer:
            ...     # Of the sequence 5, 6, 7, train 6 and 7.
            ...     writer.add_pack([5, 6, 7], [1, 1, 0], [0])
            ...     writer.add_pack([5, 6, 7], [0, 1, 1], [0], mask_alignment="token")
            >>> [pack["loss_mask"].tolist() for pack in Shard("data/twice")]
            [[1, 1, 0], [1, 1, 0]]
        """
        if (
            type(tokens) is type(loss_mask) is type(seq_starts) is np.ndarray
            and columns is None
            and not self._staged_columns
            and isinstance(media, tuple | list)
            and not media
        ):
            # The fast path, for arrays of the dtypes that the stage accepts. If the stage rejects a pack because of its
            # dtypes, a broken rule or lack of room, it keeps nothing of it, and add_packs handles the pack.
            self._require_ready(mask_alignment)
            try:
                added = self._stage.add_one(tokens, loss_mask, seq_starts, mask_alignment == "token")
            except (TypeError, ValueError):
                added = False
            if added:
                return
        self.add_packs(
            tokens, loss_mask, seq_starts, None, None, mask_alignment=mask_alignment, columns=columns, media=media
        )

    def add_packs(
        self,
        tokens: ArrayLike,
        loss_mask: ArrayLike,
        seq_starts: ArrayLike,
        pack_lengths: ArrayLike | None,
        pack_sequences: ArrayLike | None,
        *,
        mask_alignment: MaskAlignment = "label",
        columns: Mapping[str, ArrayLike] | None = None,
        media: RunMedia | Sequence[MediaItem] | None = None,
    ) -> None:
        """Add many packs at once: the arrays of ``add_pack``, concatenated.

        Args:
            tokens: ids of all packs [sum of lengths].
            loss_mask: masks of all packs [sum of lengths].
            seq_starts: start of each sequence in its pack [sum of sequence counts].
            pack_lengths: number of tokens in each pack [packs]; None for a single pack.
            pack_sequences: number of sequences in each pack [packs]; None for a single pack.
            mask_alignment: see ``add_pack``.
            columns: see ``add_pack``; values of all packs, concatenated.
            media: images and audio of the packs. For a single pack, a list as in ``add_pack``.

        Raises:
            SequenceError: a rule of FORMAT.md is broken in one of the packs; none of them is added.

        Example:
            >>> from megatron_sft_idx import Shard
            >>> with ShardWriter("data/two") as writer:
            ...     # A pack of 3 tokens with one sequence, and a pack of 4 tokens with two.
            ...     writer.add_packs([5, 6, 7, 5, 8, 5, 9], [1, 1, 0, 1, 0, 1, 0], [0, 0, 2], [3, 4], [1, 2])
            >>> [pack["seq_boundaries"].tolist() for pack in Shard("data/two")]
            [[0, 3], [0, 2, 4]]
        """
        self._require_ready(mask_alignment)

        def array(convert: Callable[[ArrayLike], NDArray[Any]], values: ArrayLike, name: str) -> NDArray[Any]:
            try:
                return convert(values)
            except (ValueError, TypeError, RuntimeError) as error:  # TypeError, RuntimeError: unsupported tensors
                raise SequenceError(self.prefix, None, f"pack {self.num_packs}: {name} {error}") from None

        starts = array(integer_array, seq_starts, "seq_starts")
        ids = array(token_array, tokens, "tokens")
        lengths = array(integer_array, [ids.size] if pack_lengths is None else pack_lengths, "pack_lengths")
        sequences = array(integer_array, [starts.size] if pack_sequences is None else pack_sequences, "pack_sequences")
        mask = array(mask_array, loss_mask, "loss_mask")
        try:
            if mask.size != ids.size:
                raise ValueError(f"{mask.size} loss mask values for {ids.size} tokens, expected one per token")
        except ValueError as error:
            raise SequenceError(self.prefix, None, f"pack {self.num_packs}: {error}") from None
        arrays = self._column_arrays({} if columns is None else columns, ids.size, starts.size, lengths.size)
        if isinstance(media, Sequence | RunMedia) and not len(media):
            media = None
        if media is not None:
            run = PackRun(ids, mask, starts, lengths, sequences)
            placed = self._checked_media(run, media, mask_alignment)
        try:
            while not self._stage.add(ids, mask, starts, lengths, sequences, mask_alignment == "token"):
                self.flush()
        except ValueError as error:
            raise SequenceError(self.prefix, None, str(error)) from None
        for name, values in arrays.items():
            self._named_rows[name].accept(values)
            self._staged_columns[name].append(values.copy())  # the caller may change its array before the flush
        if media is not None:
            self._add_media(placed)

    def _checked_media(
        self, run: PackRun, media: RunMedia | Sequence[MediaItem], mask_alignment: MaskAlignment = "label"
    ) -> PlacedMedia | None:
        """Return images and audio of a run of packs; None if the packs break a rule and the stage will reject them.

        SequenceError: this writer accepts no media, or they break a rule.
        """
        try:
            if self._media is None:
                raise ValueError(
                    f"pack {self.num_packs}: has images or audio, but this writer was opened without media=True"
                )
            return placed_media(run, media, self.num_packs, mask_alignment)
        except ValueError as error:
            raise SequenceError(self.prefix, None, str(error)) from None

    def _add_media(self, placed: PlacedMedia | None) -> None:
        """Add the images and audio of the packs that were just added."""
        assert self._media is not None
        assert placed is not None
        with self._all_or_nothing():
            self._media.add(placed, self.num_packs)

    def _column_arrays(
        self, columns: Mapping[str, ArrayLike], tokens: int, sequences: int, packs: int
    ) -> dict[str, NDArray[Any]]:
        """Return all columns in their dtypes. SequenceError: a column is missing or unknown, or a row is wrong."""
        rows, specs = {"token": tokens, "sequence": sequences, "pack": packs}, self._options.columns
        try:
            if not isinstance(columns, Mapping):
                raise ValueError(f"columns {brief(columns)}, expected a dict of arrays by name")
            if columns.keys() != specs.keys():
                names, expected = (", ".join(sorted(each)) or "none" for each in (map(str, columns), specs))
                raise ValueError(f"columns {names}, but this writer was opened for {expected}")
            arrays = {name: spec.array(name, columns[name], rows[spec.per]) for name, spec in specs.items()}
            for name, values in arrays.items():
                self._named_rows[name].require(values)
            return arrays
        except (TypeError, ValueError, RuntimeError) as error:
            raise SequenceError(self.prefix, None, f"pack {self.num_packs}: {error}") from None

    def add_shard(
        self,
        shard: Shard,
        *,
        columns: Collection[str] | None = None,
        changed: Callable[[PackRun], PackRun] = lambda run: run,
        advance: Advance = lambda nbytes: None,
    ) -> None:
        """Add all packs of another shard in bounded memory, and verify its checksums while reading.

        The packs are logged only after the last one is added, so that recovery after a kill takes nothing from a
        corrupt shard.

        Args:
            shard: a shard, opened with any backend.
            columns: names of the columns to copy; None for all, which must then be the columns of this writer.
            changed: function that converts each run of its packs before it is added.
            advance: called with the number of bytes read since the last call.

        Raises:
            FormatError: the other shard lacks a column of this writer or has an additional one; nothing was added.
            CorruptShardError: its checksums do not match (F3, or C7 for a column), or see ``windows``. The build is
                abandoned.
            SequenceError: a pack does not fit this writer's capacity or dtypes. The runs before it were added.

        Example:
            >>> from megatron_sft_idx import Shard
            >>> with ShardWriter("data/both") as writer:
            ...     writer.add_shard(Shard("data/chats"))
            ...     writer.add_pack([5, 6, 7], [1, 1, 0], [0])
            >>> len(Shard("data/both"))
            8
        """
        if columns is None:
            columns = {*self._options.columns, *listed_columns(shard.header.metadata)}
            for name in columns:
                spec, column = self._options.columns.get(name), shard.columns.get(name)
                if spec is None or column is None or column.spec.kind != spec.kind:
                    raise FormatError(
                        f"{shard.prefix}: column {name} differs from the column that {self.prefix} was opened with"
                    )
        self._require_ready("label")
        self.flush()
        begin, refused = self.num_packs, None
        with self._all_or_nothing():
            self._logs_packs = False
            opened = {name: shard.columns.open(name) for name in columns}
            for run in checked_runs(shard.files, opened, advance, shard.media):
                try:
                    if refused is None:  # if the shard is damaged, that is the error to report
                        self.add_run(changed(run))
                except SequenceError as error:
                    refused = error
                del run
            self.flush()
            self._logs_packs = True
            for first in range(0, self.num_packs - begin, CHUNK_PACKS):
                last = min(first + CHUNK_PACKS, self.num_packs - begin)
                offsets = shard.files.token_offsets[first : last + 1], shard.files.sequence_offsets[first : last + 1]
                append_packs(self._packs, np.diff(offsets).T)
        if refused:
            raise refused

    def add_run(self, run: PackRun) -> None:
        """Add the packs of a run, with its columns. See ``add_packs`` for errors."""
        arrays = run.tokens, run.loss_mask, run.seq_starts, run.pack_lengths, run.pack_sequences
        columns = {name: column.values for name, column in run.columns.items()}
        media = run.media if run.media is not None and len(run.media) else None
        dtypes = self._options.token_dtype, self._options.mask_dtype
        if len(run.tokens) < _LONG_RUN or (run.tokens.dtype, run.loss_mask.dtype) != dtypes:
            self.add_packs(*arrays, columns=columns, media=media)
            return
        self._require_ready("label")
        values = self._column_arrays(columns, len(run.tokens), len(run.seq_starts), len(run))
        if media is not None:
            placed = self._checked_media(run, media)
        self.flush()
        try:
            self._stage.count(*arrays)
        except ValueError as error:
            raise SequenceError(self.prefix, None, str(error)) from None
        for name in values:
            self._named_rows[name].accept(values[name])
            self._staged_columns[name].append(values[name])
        if media is not None:
            self._add_media(placed)
        self._write_staged(run.tokens, run.loss_mask)

    def replay(self, num_packs: int, progress: Advance = lambda num_tokens: None) -> int:
        """Check, count and hash the first packs of an interrupted build, as if they had just been added.

        Replays at most ``num_packs``, and stops at the first pack that breaks a rule, because its bytes did not reach
        the disk. Returns the number of replayed packs. ``progress`` is called with the tokens replayed since the last
        call.
        """
        if self._media is not None:
            num_packs = self._media.whole_packs(num_packs)
        self._replay_packs(num_packs, progress)
        if self._media is not None:
            self._media.resume(self.num_packs)
        return self.num_packs

    def _replay_packs(self, num_packs: int, progress: Advance) -> None:
        for lengths, sequences in LoggedPacks(self._log_path, num_packs):
            ends = np.append(0, np.cumsum(lengths))
            for first, last in run_bounds(ends, self._stage_tokens):
                if not self._replay_run(lengths[first:last], sequences[first:last]):
                    return
                progress(int(ends[last] - ends[first]))

    def _replay_run(self, lengths: NDArray[np.int64], sequences: NDArray[np.int64]) -> bool:
        """Replay a run of packs up to the first one that breaks a rule. Return whether all were replayed."""
        rows = {"token": int(lengths.sum()), "sequence": int(sequences.sum()), "pack": len(lengths)}
        raw = [
            hashed.file.read_at(growing.begin + hashed.nbytes, rows[growing.per] * growing.row_nbytes)
            for growing, hashed in self._files.values()
        ]
        tokens = np.frombuffer(raw[0], self._options.token_dtype)
        mask = np.frombuffer(raw[1], self._options.mask_dtype)
        starts = np.frombuffer(raw[2], "<u4").astype(np.int64)
        try:
            self._stage.count(tokens, mask, starts, lengths, sequences)
        except ValueError:
            each = zip(np.split(lengths, len(lengths)), np.split(sequences, len(lengths)), strict=True)
            return len(lengths) > 1 and all(self._replay_run(*one) for one in each)
        for (_, hashed), data in zip(self._files.values(), raw, strict=True):
            hashed.update(data)
        self._stage.clear()
        return True

    def flush(self) -> None:
        """Write the staged packs to the files, then log them."""
        if len(self._stage.records):
            self._write_staged(self._stage.tokens, self._stage.mask)

    def _write_staged(self, tokens: memoryview | NDArray[Any], mask: memoryview | NDArray[Any]) -> None:
        """Do the work of ``flush`` for packs with these tokens and masks."""
        stage = self._stage
        self._publication.building.require_owner()
        with self._all_or_nothing():
            paths = self.paths
            for path, data in ((paths.tokens, tokens), (paths.loss, mask), (paths.starts, stage.starts)):
                self._files[path][1].write(data)
            for name, arrays in self._staged_columns.items():
                for values in arrays:
                    self._files[paths.column(name)][1].write(values.reshape(-1))
                arrays.clear()
            if self._media is not None:
                self._media.flush(stage.num_packs)
            if self._logs_packs:
                append_packs(self._packs, np.frombuffer(stage.records, np.uint32).reshape(-1, 2))
            stage.clear()

    @property
    def _log_path(self) -> str:
        return self._publication.building.path(PACKS)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Abandon the build if the block fails, because the files may then be inconsistent."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def complete(self) -> Header:
        """Write the indexes.

        After this no packs can be added, and a ``Shard`` can be opened at ``paths.unpublished``.

        Raises:
            FormatError: the metadata is not JSON, or its vocabulary differs from that at the start of the writer.
            SequenceError: the last pair of a column ``pair`` is incomplete.
        """
        self._require_open()
        self._publication.building.require_owner()
        if self._header is None:
            with self._all_or_nothing():
                self.flush()
                self._header = self._write_indexes()
        return self._header

    def _write_indexes(self) -> Header:
        """Write the indexes from the log of packs, and the headers of the columns."""
        options, stage, paths, publication = self._options, self._stage, self.paths, self._publication
        if (vocab_size := vocab_size_of(self.metadata)) != vocab_size_of(options.metadata):
            raise FormatError(
                f"{self.prefix}: tokenizer.vocab_size is now {vocab_size}, but ids were checked against"
                f" {vocab_size_of(options.metadata)}; pass it in the metadata when you open the writer"
            )
        for rows in self._named_rows.values():
            try:
                rows.finish()
            except ValueError as error:
                raise SequenceError(self.prefix, None, str(error)) from None
        packs = LoggedPacks(self._log_path, stage.num_packs)
        idx = write_idx(publication.open(paths.idx), packs, options.token_dtype, stage.num_packs)
        tokens, loss, starts = (self._files[path][1].digest() for path in (paths.tokens, paths.loss, paths.starts))
        metadata = {key: value for key, value in self.metadata.items() if key not in ("columns", MEDIA_ENTRY)}
        digests = tokens, loss, idx, starts
        header = header_of(stage, dataclasses.replace(options, metadata=metadata), digests, rebuilt=self.rebuilt)
        header.metadata["format_writer"] = FORMAT_WRITER
        if self._media is not None:
            items = publication.open(paths.media_items)
            media = self._media.write_items(items, stage.num_packs)
            header.metadata[MEDIA_ENTRY] = media.checksums.encode()
            items.write_at(dataclasses.replace(media, shard_id=header.shard_id).encode(), 0)
        listed: dict[str, str] = {}
        for name, spec in options.columns.items():
            hashed = self._files[paths.column(name)][1]
            column = ColumnHeader(spec, header.shard_id, num_rows_in(header, spec.per), hashed.checksum())
            assert hashed.nbytes + spec.header_nbytes == column.nbytes, name
            raw = column.encode()
            hashed.file.write_at(raw, 0)
            listed[name] = raw[-CHECKSUM_NBYTES:].hex()
        if listed:
            header.metadata["columns"] = listed
        header = write_seq_idx(publication.open(paths.seq_idx), packs, header)
        # Bytes after the last pack are an incomplete write of a killed writer.
        for growing, hashed in self._files.values():
            hashed.file.truncate(growing.begin + hashed.nbytes)
        return header

    def finalize(self) -> Header:
        """Write the indexes, unless ``complete`` did, and publish the shard. Return its header.

        FormatError: another shard appeared at the prefix in the meantime, or the metadata is not JSON.
        """
        header = self.complete()
        if self._present is not None:
            self.abandon()
            if header != self._present:
                raise FormatError(
                    f"{self.prefix}: there is a shard with the same options but other content; choose another prefix,"
                    " or pass overwrite (--overwrite)"
                )
            self.found = True
            return header
        with self._all_or_nothing():
            self._publication.complete()
        self._publication.finish()
        return header

    def set_aside(self) -> Header:
        """Do the same as ``finalize``, but leave the publication to ``publish_outputs``."""
        header = self.complete()
        with self._all_or_nothing():
            self._publication.set_aside()
        return header

    def _require_ready(self, mask_alignment: str) -> None:
        self._require_open()
        if self._header is not None:
            raise FormatError(f"{self.prefix}: this shard is complete; open another writer to write more packs")
        if not isinstance(mask_alignment, str) or mask_alignment not in ("label", "token"):
            raise FormatError(f"{self.prefix}: mask_alignment {brief(mask_alignment)}, choose 'label' or 'token'")

    def _require_open(self) -> None:
        if self._publication.closed:
            raise FormatError(
                f"{self.prefix}: this writer is finished or was abandoned; open another one to write more packs"
            )

    def suspend(self) -> None:
        """Stop writing. ``recover`` can publish the packs that are on disk; staged packs are lost."""
        self._publication.close()

    def abandon(self) -> None:
        """Remove what was written, unless an interrupted writer began it, and publish nothing. Can be called twice."""
        if self._publication.is_resumed:
            self._publication.close()
        else:
            self._publication.abandon()


def _header_like(paths: ShardPaths, options: BuildOptions) -> Header | None:
    """Return the header of the shard at a prefix if it was made with these options, else None.

    A complete shard that an interrupted writer left is published first.
    """
    finish_interrupted(paths)
    if not os.path.isfile(paths.seq_idx) or paths.missing():
        return None
    header, written = read_header(paths), {"format_writer": None, "columns": None, MEDIA_ENTRY: None}
    same = header.metadata | written == options.metadata | written
    same = same and (listed_media(header.metadata) is not None) == options.media
    return header if same and listed_columns(header.metadata).keys() == options.columns.keys() else None


# ---- the indexes ----


def header_of(
    counts: _native.PackStage | _native.PackWalk,
    options: BuildOptions,
    digests: tuple[FileDigest, FileDigest, FileDigest, FileDigest],
    *,
    rebuilt: bool,
) -> Header:
    """Return the header of a shard. The checksum of its arrays is filled in when they are written.

    Args:
        counts: counts of all its packs.
        options: its dtypes, numbers and metadata.
        digests: digests of the data files and ``.idx``, as the header holds them. Their sizes are used as counts, too.
        rebuilt: whether the shard was rebuilt.
    """
    tokens, _, _, starts = digests
    return Header(
        num_packs=counts.num_packs,
        num_sequences=starts.nbytes // 4,
        num_tokens=tokens.nbytes // options.token_dtype.itemsize,
        num_trained_tokens=counts.num_trained_tokens,
        num_masked_packs=counts.num_masked_packs,
        token_dtype=options.token_dtype,
        mask_dtype=options.mask_dtype,
        sequence_multiple=options.sequence_multiple,
        capacity=options.capacity or counts.longest_padded_pack,
        longest_pack=counts.longest_pack,
        most_sequences=counts.most_sequences,
        pad_id=options.pad_id,
        digests=digests,
        arrays_checksum=bytes(16),
        metadata=options.metadata,
        rebuilt=rebuilt,
    )


def _offsets(counts: Iterable[NDArray[np.int64]], scale: int = 1) -> Iterator[NDArray[np.int64]]:
    """Yield for each chunk of counts the sums before its items, times ``scale``; finally an array with the total."""
    total = 0
    for chunk in counts:
        offsets = _native.offsets_from_lengths(chunk, scale, total)
        total = int(offsets[-1])
        yield offsets[:-1]
    yield np.array([total])


def write_idx(file: OutputFile, packs: Iterable[PackChunk], token_dtype: np.dtype[Any], num_packs: int) -> FileDigest:
    """Write Megatron's ``.idx``. ``packs`` is iterated twice."""
    out = HashedFile(file)
    out.write(pack_idx_header(token_dtype_of(token_dtype)[0], num_packs))
    for chunk in packs:
        out.write(chunk.lengths.astype("<i4"))
    remaining = num_packs
    for pointers in _offsets((chunk.lengths for chunk in packs), token_dtype.itemsize):
        out.write(pointers[:remaining])  # the final total is not the pointer of a pack
        remaining -= len(pointers[:remaining])
    for start in range(0, num_packs + 1, CHUNK_PACKS):
        out.write(np.arange(start, min(start + CHUNK_PACKS, num_packs + 1), dtype="<i8"))
    return out.digest()


def write_seq_idx(file: OutputFile, packs: Iterable[PackChunk], header: Header) -> Header:
    """Write ``.seq.idx``, and return the header with the checksum of the arrays. ``packs`` is iterated twice."""
    file.write(bytes(header.nbytes))
    out = HashedFile(file)
    for offsets in _offsets(chunk.sequences for chunk in packs):
        out.write(offsets)
    out.write(bytes(header.token_offsets_offset - file.nbytes))
    for offsets in _offsets(chunk.lengths for chunk in packs):
        out.write(offsets)
    header = dataclasses.replace(header, arrays_checksum=out.checksum())
    file.write_at(header.encode(), 0)
    assert file.nbytes == header.seq_idx_nbytes
    return header
