"""Numbered chunks of JSON lines as live shards: ``chunk_00000.jsonl`` and on, written by anybody's producer.

Nobody renames a chunk when it is done. It is whole when a later chunk or the declared end is there; half a line at its
end is an error then. The newest chunk has neither. It is taken as whole when it has not changed for a while and ends
with a line, which is said, as a producer that paused for longer would be mistaken for one that is done. Its size is
then held against what it was until it has a successor, so such a mistake is an error and no loss.

Every line is one pack, whatever is wrong with it: a line that cannot be used is an error, or, where that is asked for,
a pack of one token whose loss is masked. So a chunk's packs are counted without reading them, and the order of
everything behind a bad line is the same on all ranks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.pieces import JsonPiece
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.formats.base import checked_run
from megatron_sft_idx.formats.jsonl_chunks import (
    COMPLETED,
    ChunkFile,
    chunk_name,
    chunk_numbers,
    ends_whole,
    parse,
    recognise,
    run_of,
)
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.live.acks import completed, read_acks
from megatron_sft_idx.live.catalog import END, Catalog, Limits
from megatron_sft_idx.live.catalog_watch import Waiter
from megatron_sft_idx.live.live_shards import Index, LiveShards, OpenPacks
from megatron_sft_idx.packs.run import PackRun
from megatron_sft_idx.storage import OutputFile, require_local
from megatron_sft_idx.tokenize import EncodingOptions, RowEncoder

__all__ = ["ChunkFolder", "ChunkRows", "LiveChunks", "OnBadRow", "declaring_end"]

OnBadRow = Literal["error", "skip"]

logger = logging.getLogger("megatron_sft_idx.live")


# ---- which chunks are whole ----


@dataclass(slots=True)
class _Look:
    """What a chunk without a successor was like, and since when, on this process's own clock."""

    nbytes: int
    mtime_ns: int
    since: float
    settled: bool = False


class ChunkFolder:
    """A folder of chunks, looked at by one process.

    Args:
        path: the folder.
        settle_seconds: the newest chunk is whole when it has not changed for so long.
        log: takes the line that says so.
    """

    def __init__(self, path: str, *, settle_seconds: float, log: Callable[[str], object] = logger.info) -> None:
        require_local(path, "a folder of chunks", "keep it where who writes them and trainers share a file system")
        self.path, self.settle_seconds, self._log = path, settle_seconds, log
        self._looks: dict[int, _Look] = {}

    def path_of(self, number: int) -> str:
        """The file of a chunk."""
        return os.path.join(self.path, chunk_name(number))

    def newest(self) -> int | None:
        """Number of the newest chunk; None where there is none."""
        try:
            return max(chunk_numbers(self.path), default=None)
        except FileNotFoundError:
            return None  # its producer makes it

    def is_whole(self, number: int, end: int | None) -> bool:
        """Whether a chunk is there and its producer is done with it.

        Args:
            number: of the chunk; below the end where that is known.
            end: how many chunks there are in all; None while that is not known.

        Raises:
            FormatError: the chunk is missing though later ones are there, or ends in the middle of a line.
        """
        path = self.path_of(number)
        # The successor first: whatever is seen of the chunk after that is final.
        followed = end is not None or self._is_followed(number)
        try:
            status = os.stat(path)
        except FileNotFoundError:
            if not followed:
                return False
            raise FormatError(
                f"{path}: missing, and later chunks are there or the end is declared; it was freed or removed: put it"
                " back, or start where it was consumed already, from the checkpoint that includes it"
            ) from None
        if not followed:
            return self._is_settled(number, status)
        if not ends_whole(path):
            raise FormatError(
                f"{path}: its last line ends in the middle though"
                f" {'the end is declared' if end is not None else 'a later chunk is there'}: torn, as when its producer"
                " died; write the chunk again, or remove the half line"
            )
        return True

    def require_unchanged(self) -> None:
        """FormatError where a chunk that was taken as whole has grown since."""
        for number, look in list(self._looks.items()):
            if not look.settled:
                continue
            followed = self._is_followed(number)
            try:
                now = os.stat(self.path_of(number)).st_size
            except FileNotFoundError:
                now, followed = look.nbytes, True  # consumed, and freed
            if now != look.nbytes:
                raise FormatError(
                    f"{self.path_of(number)}: it has {now:,} bytes and had {look.nbytes:,} when it was taken as whole,"
                    f" having not changed for {self.settle_seconds:g} s; its producer pauses longer: raise --settle,"
                    " and go on from a checkpoint that does not include it"
                )
            if followed:
                del self._looks[number]

    def describe(self, number: int) -> str:
        """Why a chunk is waited for, as a clause."""
        path, name = self.path_of(number), chunk_name(number)
        if (look := self._looks.get(number)) is not None:
            age = time.monotonic() - look.since
            if look.nbytes and not ends_whole(path):
                return f"{name} ends in the middle of a line, and has not changed for {age:.0f} s"
            return f"{name} is there, {look.nbytes:,} bytes, and has not changed for {age:.0f} s"
        newest = self.newest()
        there = "no chunk is there" if newest is None else f"the newest one is {chunk_name(newest)}"
        return f"{name} is not there, {there}"

    def _is_followed(self, number: int) -> bool:
        if os.path.exists(self.path_of(number + 1)):
            return True
        newest = self.newest()  # the next one may have been consumed by another rank, and freed
        return newest is not None and newest > number

    def _is_settled(self, number: int, status: os.stat_result) -> bool:
        """Whether the newest chunk has not changed for long enough, and ends with a line."""
        now, look = time.monotonic(), self._looks.get(number)
        if look is None or (look.nbytes, look.mtime_ns) != (status.st_size, status.st_mtime_ns):
            look = self._looks[number] = _Look(status.st_size, status.st_mtime_ns, now)
        # A producer that has written nothing yet has not ended a line either.
        if now - look.since < self.settle_seconds or not look.nbytes or not ends_whole(self.path_of(number)):
            return False
        if not look.settled:
            look.settled = True
            self._log(
                f"{chunk_name(number)} is taken as whole: it ends with a line and has not changed for"
                f" {self.settle_seconds:g} s"
            )
        return True


@contextmanager
def declaring_end(folder: str, seconds: float, end_folders: Sequence[str]) -> Iterator[None]:
    """Inside, a thread declares the end where the producer writes none: by one process, for all ranks.

    That is when no chunk came and none has grown for a while. Half a line at the end of the newest chunk is no end:
    those who wait for that chunk say what is wrong with it.

    Args:
        folder: of the chunks.
        seconds: without a change, on this process's own clock.
        end_folders: the document that says how many chunks there are goes into the first one that takes it.
    """
    stopped = threading.Event()
    thread = threading.Thread(target=_declare_end, args=(folder, seconds, end_folders, stopped), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _declare_end(folder: str, seconds: float, end_folders: Sequence[str], stopped: threading.Event) -> None:
    last, since = None, time.monotonic()
    while not stopped.wait(min(1.0, seconds / 4)):
        try:
            newest = max(chunk_numbers(folder), default=None)
            path = os.path.join(folder, chunk_name(newest or 0))
            status = None if newest is None else os.stat(path)
            sight = status and (newest, status.st_size, status.st_mtime_ns)
            if newest is None or status is None or sight != last:
                last, since = sight, time.monotonic()
            elif time.monotonic() - since >= seconds and status.st_size and ends_whole(path):
                _write_end(end_folders, newest + 1)
                logger.info(
                    f"{folder}: no chunk came and none has grown for {seconds:g} s: the end is declared at"
                    f" {newest + 1} chunks"
                )
                return
        except FileNotFoundError:
            continue  # freed, or not there yet
        except (OSError, SFTIndexError) as error:
            # Whoever reads the folder meets what is wrong with it too, and stops.
            logger.error("%s: the end cannot be declared: %s", folder, error)
            return


def _write_end(folders: Sequence[str], chunks: int) -> None:
    for folder in folders:
        try:
            return Catalog(folder).write_end(chunks)
        except OSError as error:
            reason = error.strerror
    raise FormatError(f"{folders[-1]}: {reason}; give --ack-dir, a folder that this run may write to")


# ---- lines to packs, when a batch needs them ----


class ChunkRows:
    """Packs of the lines of chunks, within limits: pre-packed ones parsed, raw chats tokenised, one sequence each.

    One object a process, which counts what it had to leave out. Pickles small: what is heavy is made where lines are
    read.

    Args:
        limits: of the packs.
        encoding: how a raw chat becomes ids and a mask, its policy on bad rows aside; None for pre-packed lines.
        vocab_size: ids are below this; None for any.
        on_bad_row: ``error`` stops at the first line that cannot be used or does not fit; ``skip`` serves a pack of
            one padding token with its loss masked in place of each, and says so.

    Attributes:
        skipped: lines that this process could not use.
    """

    def __init__(
        self,
        limits: Limits,
        encoding: EncodingOptions | None = None,
        *,
        vocab_size: int | None = None,
        on_bad_row: OnBadRow = "error",
    ) -> None:
        self.limits, self.encoding, self.vocab_size, self.on_bad_row = limits, encoding, vocab_size, on_bad_row
        self.skipped = 0

    def __getstate__(self) -> dict[str, Any]:
        """Without the encoder, but with what the tokenizer's files have turned out to be."""
        state = dict(self.__dict__)
        if (made := state.pop("encoder", None)) is not None:
            state["encoding"] = made.options
        return state

    @cached_property
    def encoder(self) -> RowEncoder | None:
        """Made by the process that tokenises."""
        return None if self.encoding is None else RowEncoder(self.encoding)

    @property
    def pad_id(self) -> int | None:
        """The tokenizer's padding id, None where unknown."""
        return None if self.encoder is None else self.encoder.tokenizer.pad_id

    def check(self, path: str) -> None:
        """FormatError where raw chats are expected and a chunk is pre-packed: packs would be read as sequences."""
        if self.encoding is not None and (evidence := recognise(path)) is not None and os.path.getsize(path):
            raise FormatError(f"{path}: {evidence}: it is packed already; leave --tokenizer out")

    def packs(self, chunk: ChunkFile, indices: Sequence[int]) -> PackRun:
        """The packs of these lines, end to end.

        Raises:
            SequenceError: a line that cannot be used, with its file and line.
            FormatError: the chunk changed since it was opened.
        """
        runs = [self._pack(chunk, index) for index in indices]
        return runs[0] if len(runs) == 1 else PackRun.joined(runs)

    def _pack(self, chunk: ChunkFile, index: int) -> PackRun:
        try:
            if self.encoder is None:
                run = run_of(chunk.path, index, [parse(chunk.line(index))])
            else:
                run = self._encoded(self.encoder, chunk, index)
            self._require_fit(run)
        except FormatError:
            raise
        except (ValueError, RecursionError) as error:
            reason = error.reason if isinstance(error, SequenceError) else str(error)
            bad = SequenceError(chunk.path, chunk.line_number(index), reason)
            if self.on_bad_row == "error":
                remedy = f"{reason}; --on-bad-row skip trains on without it"
                raise SequenceError(bad.source, bad.position, remedy) from None
            self.skipped += 1
            logger.warning("skipped %s; %d left out by this process", bad, self.skipped)
            one = np.ones(1, np.int64)
            return PackRun(np.array([self.pad_id or 0], np.int32), np.zeros(1, np.uint8), 0 * one, one, one)
        return run

    def _encoded(self, encoder: RowEncoder, chunk: ChunkFile, index: int) -> PackRun:
        raw = chunk.line(index)
        piece = encoder.encode(JsonPiece(chunk.path, index, len(raw), raw, np.array([len(raw)]), False))
        if piece.bad_rows:
            raise piece.bad_rows[0]
        tokens, mask = piece.input_ids, piece.loss_mask
        return checked_run(chunk.path, index, tokens, mask, [0], [len(tokens)], [1], mask_alignment="token")

    def _require_fit(self, run: PackRun) -> None:
        """ValueError unless a run of one pack keeps to the limits."""
        capacity, multiple, most = (
            self.limits.capacity,
            self.limits.sequence_multiple,
            self.limits.max_sequences_per_pack,
        )
        positions = int((-(-run.sequence_lengths() // multiple) * multiple).sum())
        if positions > capacity:
            padded = f" with sequences padded to multiples of {multiple}" if multiple > 1 else ""
            raise ValueError(
                f"{positions:,} tokens{padded}, a pack holds {capacity:,}; raise --seq-length, or shorten it"
            )
        if (sequences := len(run.seq_starts)) > most:
            raise ValueError(f"{sequences:,} sequences, a pack holds {most:,}; raise --max-sequences-per-pack")
        if self.vocab_size is not None and (largest := int(run.tokens.max())) >= self.vocab_size:
            raise ValueError(f"id {largest}, the vocabulary has {self.vocab_size:,}; raise --vocab-size")


class _OpenChunk:
    """One chunk, read line by line as batches need them: memory holds its line bounds and one batch's packs."""

    num_tokens: int | None = None  # not known without reading all
    index: Index | None = None
    columns: Mapping[str, ColumnSpec] = {}

    def __init__(self, chunk: ChunkFile, rows: ChunkRows) -> None:
        self._chunk, self._rows = chunk, rows
        self._run: PackRun | None = None
        self.num_packs = len(chunk)

    def segments(self, packs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Read these packs, one or more; offsets of their sequences, and the first token and the tokens of each."""
        run = self._run = self._rows.packs(self._chunk, packs.tolist())
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(run.pack_sequences)])
        lengths = run.sequence_lengths()
        return offsets, np.cumsum(lengths) - lengths, lengths

    def arrays(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Tokens and label-aligned loss mask of the packs that were read last."""
        assert self._run is not None
        return self._run.tokens, self._run.loss_mask


# ---- the folder, as a consumer sees it ----


@dataclass
class LiveChunks(LiveShards):
    """Chunks as ``LiveShards``; give all ranks the same.

    Args:
        folder: of the chunks.
        rows: what makes packs of their lines.
        samples_per_chunk: lines that every chunk but the last has; None for any number.
        num_chunks: how many there will be, where that is known beforehand.
        end_folders: where a document may say, once the last one is whole, how many there are; as in a catalog.
        settle_seconds: the newest chunk is whole when it has not changed for so long.
        max_wait: most seconds to wait for a chunk.
        acks: folder of acknowledgements; chunks that are done are marked by it, for producers that delete by the
            marks. Every rank may, at any time: what comes out is the same. None marks nothing.
        consumers: training runs that read the chunks; nothing is marked before all of them have acknowledged.
    """

    folder: str
    rows: ChunkRows
    samples_per_chunk: int | None = None
    num_chunks: int | None = None
    end_folders: tuple[str, ...] = ()
    settle_seconds: float = 5.0
    max_wait: float = 480.0
    acks: str | None = None
    consumers: int = 1

    def __post_init__(self) -> None:
        self._chunks = ChunkFolder(self.folder, settle_seconds=self.settle_seconds)
        self._counts: dict[int, int] = {}
        # A chunk is mostly opened right after it was counted, which has found its lines.
        self._counted: tuple[int, ChunkFile] | None = None
        # Chunks that are right only if they are the last one.
        self._uneven: dict[int, int] = {}
        self._may_mark = self.acks is not None

    def __reduce__(self) -> tuple[Any, ...]:
        """As it was made."""
        return LiveChunks, tuple(getattr(self, field.name) for field in fields(self))

    def limits(self, waiter: Waiter) -> tuple[Limits, int | None]:
        """As it was made."""
        return self.rows.limits, self.rows.pad_id

    def end(self) -> int | None:
        """How many chunks there are in all, once somebody has said so.

        Raises:
            FormatError: there are more.
        """
        declared, promised = self._declared_end(), self.num_chunks
        end = min((count for count in (declared, promised) if count is not None), default=None)
        newest = None if end is None else self._chunks.newest()
        if newest is not None and end is not None and newest >= end:
            where = "--num-chunks" if end == promised else END
            raise FormatError(
                f"{self._chunks.path_of(newest)}: it is there though the end was declared at {end} chunks ({where}):"
                f" its producer was not through; resume with a longer --end-after, once {END} is removed"
            )
        return end

    def _declared_end(self) -> int | None:
        """How many chunks there are, where that was written down when the last one was whole."""
        ends = [Catalog(folder).end() for folder in self.end_folders]
        return min((end for end in ends if end is not None), default=None)

    def numbers(self) -> list[int]:
        """Chunks that are there, in order, the one that is being written included."""
        return chunk_numbers(self.folder) if os.path.isdir(self.folder) else []

    def wait(self, number: int, waiter: Waiter, uncommitted: Callable[[], int] = lambda: 0) -> bool:
        """Wait until a chunk is whole: True; or until it is known that it never will be: False.

        What is not committed makes no difference: nobody knows whether a producer of chunks waits for its consumers.

        Raises:
            FormatError: it is torn, or missing among others, or too many are there.
            SFTIndexError: it did not come in time.
            Stopped: the waiter stopped.
        """
        chunks = self._chunks
        for waited in waiter.looks(lambda: f"{self.name(number)}; {chunks.describe(number)}"):
            end = self.end()
            self._require_even()
            chunks.require_unchanged()
            if end is not None and number >= end:
                return False
            if chunks.is_whole(number, self._declared_end()):
                return True
            if waited >= self.max_wait:
                break
        raise SFTIndexError(
            f"{chunks.path_of(number)}: {waiter.who} waited {waited:.0f} s for it, as long as it may (--max-wait):"
            f" {chunks.describe(number)}; see whether its producer is alive, have the end declared (--end-after), or"
            " wait longer"
        )

    def count(self, number: int) -> int | None:
        """Lines of a chunk; None where it is not there, whole."""
        if number not in self._counts:
            path = self._chunks.path_of(number)
            if not os.path.exists(path) or not self._chunks.is_whole(number, self._declared_end()):
                return None
            chunk = self._opened(number)
            self._counted, self._counts[number] = (number, chunk), len(chunk)
        return self._counts[number]

    def open(self, number: int, columns: Sequence[str] = ()) -> OpenPacks:
        """Find the lines of a chunk that is whole, which reads all of it.

        Raises:
            FormatError: it is of another kind, or has another number of lines than every chunk should have.
        """
        self.rows.check(self._chunks.path_of(number))
        counted, self._counted = self._counted, None
        chunk = counted[1] if counted and counted[0] == number else self._opened(number)
        return _OpenChunk(chunk, self.rows)

    def name(self, number: int) -> str:
        """``chunk 8``."""
        return f"chunk {number} ({chunk_name(number)})"

    def committed(self) -> None:
        """Mark every chunk that is there and that every consumer is done with.

        Raises:
            FormatError: an acknowledgement is damaged.
        """
        if self.acks is None or not self._may_mark:
            return
        for number in completed(read_acks(self.acks), self.consumers, chunk_numbers(self.folder)):
            marker = self._chunks.path_of(number) + COMPLETED
            if os.path.exists(marker):
                continue
            try:
                OutputFile(marker, durable=False).close()
            except FileExistsError:
                continue  # another rank's
            except OSError as error:
                self._may_mark = False
                logger.warning(
                    "%s: completed chunks cannot be marked here (%s), so their producer will not delete them; let this"
                    " process write in the folder",
                    self.folder,
                    error.strerror,
                )
                return
            logger.info("%s is completed", chunk_name(number))

    def _opened(self, number: int) -> ChunkFile:
        chunk, expected = ChunkFile(self._chunks.path_of(number)), self.samples_per_chunk
        if expected is not None and len(chunk) != expected:
            self._uneven[number] = len(chunk)
            self._require_even()
        return chunk

    def _require_even(self) -> None:
        """FormatError where a chunk that is not the last one has another number of lines than it should have."""
        newest, expected = self._chunks.newest(), self.samples_per_chunk or 0
        for number, lines in self._uneven.items():
            # The last one may be freed already.
            if lines > expected or (newest is not None and newest > number):
                raise FormatError(
                    f"{self._chunks.path_of(number)}: it has {lines:,} lines, expected {expected:,}"
                    " (--samples-per-chunk) in every chunk but the last; counts are taken from the chunks themselves,"
                    " so the option may be left out"
                )
