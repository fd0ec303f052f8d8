"""Numbered chunks of JSON lines as live shards: ``chunk_00000.jsonl`` and so on, written by any producer.

A producer does not rename a complete chunk. A chunk is complete when a later chunk or the declared end exists; an
incomplete line at its end is then an error. The newest chunk has no successor. It is treated as complete when it has
not changed for a while and ends with a complete line; a message reports this. Its producer may only have paused, so its
size is checked until it has a successor, and growth is an error.

Every line is one pack, even if it is invalid: an unusable line is an error or, on request, a pack of one token with
masked loss. So a chunk's packs are counted without reading them, and the order of everything after a bad line is the
same on all ranks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs import JsonPiece
from megatron_sft_idx.chat.tokenizer import COMPARED_ROWS, DifferentIdsError, comparing_all_texts
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.formats.jsonl_chunks import (
    COMPLETED,
    ChunkFile,
    chunk_name,
    chunk_numbers,
    ends_with_whole_line,
    parse_line,
    read_column_specs,
    recognise,
    run_of_lines,
)
from megatron_sft_idx.lines import get_logger, shown_by_fields
from megatron_sft_idx.live.acks import completed, read_acks
from megatron_sft_idx.live.catalog import END, Catalog, Limits
from megatron_sft_idx.live.live_shards import LiveShards, OpenPacks, PacksInMemory
from megatron_sft_idx.live.waiting import PASSING_ERRORS, Settling, Waiter, patiently, status_of
from megatron_sft_idx.packs.run import PackRun, checked_run
from megatron_sft_idx.packs.run_media import KeptBlobs, RunItems, RunMedia
from megatron_sft_idx.shard.judged import require_judged
from megatron_sft_idx.storage import OutputFile, require_local
from megatron_sft_idx.tokenize import EncodingOptions, RowEncoder, items_of
from megatron_sft_idx.training import CARRIED_BY, require_text

OnBadRow = Literal["error", "skip"]

logger = get_logger("megatron_sft_idx.live")

# ---- the folder from a consumer's view ----


def chunks_in(folder: str) -> list[int]:
    """Return the numbers of the chunks in a folder (which may not exist), ascending.

    See ``chunk_numbers`` for errors.
    """
    try:
        return patiently(folder, lambda: chunk_numbers(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _ends_with_whole_line(path: str) -> bool:
    return patiently(path, lambda: ends_with_whole_line(path))


@shown_by_fields
@dataclass
class LiveChunks(LiveShards):
    """Chunks as ``LiveShards``: pre-packed lines are parsed; raw chats are tokenised, each into a separate pack.

    All ranks must get the same arguments. Its pickle is small: each process makes its own tokenizer.

    Args:
        folder: folder of the chunks.
        promised: limits of packs.
        encoding: how a raw chat becomes ids and a mask (except for its policy on bad rows); None for pre-packed lines.
        vocab_size: upper bound of ids (exclusive); None for no bound.
        on_bad_row: ``error`` stops at the first line that is unusable or does not fit; ``skip`` replaces each by a pack
            of one padding token with masked loss, and reports it.
        samples_per_chunk: number of lines in every chunk except the last; None for any number.
        num_chunks: total number of chunks, if it is known in advance.
        end_folders: folders in which a document may give the total number after the last chunk is complete, as in a
            catalog.
        settle_seconds: the newest chunk counts as complete when it has not changed for this long.
        max_wait: maximum number of seconds to wait for a chunk.
        acks: folder of acknowledgements. Completed chunks are marked according to it, for producers that delete marked
            chunks. Every rank may do this at any time, with the same result. None marks nothing.
        consumers: number of training runs that read the chunks; nothing is marked before all of them have acknowledged.

    Attributes:
        skipped: number of lines that this process could not use.
    """

    folder: str
    promised: Limits
    encoding: EncodingOptions | None = None
    vocab_size: int | None = None
    on_bad_row: OnBadRow = "error"
    samples_per_chunk: int | None = None
    num_chunks: int | None = None
    end_folders: tuple[str, ...] = ()
    settle_seconds: float = 5.0
    max_wait: float = 480.0
    acks: str | None = None
    consumers: int = 1

    def __post_init__(self) -> None:
        where = "put it on a file system that the producer of the chunks and the trainers share"
        require_local(self.folder, "a folder of chunks", where)
        if self.encoding is not None and self.encoding.rows.kind in ("preference", "kto"):
            raise FormatError(
                f"{self.folder}: --row-kind {self.encoding.rows.kind} needs a column to mark bad answers, but chunks"
                " have no columns; make a shard of them with megatron-sft-idx preprocess"
            )
        self.skipped = 0
        # For each chunk without a successor: its observed state and, if it was treated as complete, its size then.
        self._looks: dict[int, Settling] = {}
        self._settled: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        # Numbers of lines in chunks that differ from the expected one; allowed only for the last chunk.
        self._uneven: dict[int, int] = {}
        self._may_mark = self.acks is not None

    def limits(self, waiter: Waiter) -> tuple[Limits, int | None]:
        """Return the limits passed to the constructor, and the tokenizer's padding id."""
        return self.promised, self.pad_id

    def path_of(self, number: int) -> str:
        """Return the path of a chunk."""
        return os.path.join(self.folder, chunk_name(number))

    def name(self, number: int) -> str:
        """Return ``chunk 8``."""
        return f"chunk {number} ({chunk_name(number)})"

    def numbers(self) -> list[int]:
        """Return the existing chunks in order, including the one being written."""
        return chunks_in(self.folder)

    def _newest(self) -> int:
        """Return the last existing chunk, or -1."""
        return max(self.numbers(), default=-1)

    def end(self) -> int | None:
        """Return the total number of chunks once it was declared. FormatError: there are more."""
        said = [end for end in (self._declared_end(), self.num_chunks) if end is not None]
        if not said:
            return None
        end = min(said)
        newest = self._newest()
        if newest >= end:
            where = "--num-chunks" if end == self.num_chunks else END
            raise FormatError(
                f"{self.path_of(newest)}: this chunk appeared after the end was declared at {end} chunks ({where}), so"
                f" its producer had not finished; remove {END}, and resume with a longer --end-after"
            )
        return end

    def _declared_end(self) -> int | None:
        """Return the number of chunks recorded when the last one was complete."""
        ends = [Catalog(folder).end() for folder in self.end_folders]
        return min((end for end in ends if end is not None), default=None)

    def wait(self, number: int, waiter: Waiter, unacknowledged: Callable[[], int] = lambda: 0) -> bool:
        """See ``LiveShards``. It is unknown whether a producer of chunks waits for its consumers."""
        for waited in waiter.looks(lambda: f"{self.name(number)}; {self.describe(number)}"):
            end = self.end()
            self._require_even()
            self.require_unchanged()
            if end is not None and number >= end:
                return False
            if self.is_whole(number, self._declared_end()):
                return True
            if waited >= self.max_wait:
                break
        raise SFTIndexError(
            f"{self.path_of(number)}: {waiter.who} waited {waited:.0f} s, the maximum (--max-wait):"
            f" {self.describe(number)}; check that the producer is running, pass --end-after to detect the end, or"
            " raise --max-wait"
        )

    # ---- complete chunks ----

    def is_whole(self, number: int, end: int | None) -> bool:
        """Return whether a chunk exists and its producer is done with it; ``end`` is the total number, None if unknown.

        Raises:
            FormatError: the chunk is missing although later ones exist, or it ends in the middle of a line.
        """
        path = self.path_of(number)
        # The successor first: any later observation of the chunk is then final.
        followed = end is not None or self._is_followed(number)
        try:
            status = patiently(path, lambda: os.stat(path))
        except FileNotFoundError:
            if not followed:
                return False
            raise FormatError(
                f"{path}: the chunk is missing, although later chunks exist or the end is declared; it was deleted:"
                " put it back, or resume from a checkpoint that already includes it"
            ) from None
        if followed and not _ends_with_whole_line(path):
            cause = "the end is declared" if end is not None else "a later chunk exists"
            raise FormatError(
                f"{path}: the last line is incomplete, although {cause}; its producer probably died: write the chunk"
                " again, or remove the incomplete line"
            )
        if followed:
            return True
        look = self._looks.setdefault(number, Settling(self.settle_seconds))
        # A producer that has written nothing yet has not completed a line either.
        if not look.is_whole(path, status) or not status.st_size or not _ends_with_whole_line(path):
            return False
        if self._settled.get(number) != status.st_size:
            self._settled[number] = status.st_size
            unchanged_for = f"has not changed for {self.settle_seconds:g} s"
            logger.info(
                f"{chunk_name(number)} is considered complete: it ends with a complete line and {unchanged_for}"
            )
        return True

    def _is_followed(self, number: int) -> bool:
        # The next one may have been consumed and removed by another rank.
        return status_of(self.path_of(number + 1)) is not None or self._newest() > number

    def require_unchanged(self) -> None:
        """Raise FormatError if a chunk that was treated as complete has grown."""
        for number, nbytes in list(self._settled.items()):
            followed = self._is_followed(number)
            if (status := status_of(self.path_of(number))) is not None:
                now = status.st_size
            else:
                now, followed = nbytes, True  # consumed and removed
            if now != nbytes:
                raise FormatError(
                    f"{self.path_of(number)}: it has {now:,} bytes, but had {nbytes:,} when it was considered complete"
                    f" after {self.settle_seconds:g} s without a change; its producer makes longer pauses: raise"
                    " --settle, and resume from a checkpoint that does not include this chunk"
                )
            if followed:
                del self._settled[number], self._looks[number]

    def describe(self, number: int) -> str:
        """Return why a chunk is being waited for, as a clause."""
        name = chunk_name(number)
        if (look := self._looks.get(number)) is not None:
            is_torn = look.nbytes and not _ends_with_whole_line(self.path_of(number))
            what = "ends with an incomplete line" if is_torn else f"exists, {look.nbytes:,} bytes"
            return f"{name} {what}, and has not changed for {look.seconds():.0f} s"
        newest = self._newest()
        there = "there are no chunks" if newest < 0 else f"the newest chunk is {chunk_name(newest)}"
        return f"{name} does not exist, {there}"

    # ---- existing chunks ----

    def count(self, number: int) -> int | None:
        """Return a chunk's number of lines; None if it is not complete. FormatError: a complete chunk has grown."""
        self.require_unchanged()
        if number not in self._counts:
            if status_of(self.path_of(number)) is None or not self.is_whole(number, self._declared_end()):
                return None
            self._counts[number] = len(self._opened(number))
        return self._counts[number]

    def open(self, number: int, columns: Sequence[str] = (), *, allow_media: bool = False) -> OpenPacks:
        """Find the lines of a complete chunk, which reads all of it.

        FormatError: it is of another kind, or a processor expands images and audio in its lines without
        ``allow_media``.
        """
        path = self.path_of(number)
        has_media = self.encoding is not None and self.encoding.processor is not None
        require_text(path, has_media, allow_media, CARRIED_BY)
        if self.encoding is not None and recognise(path):
            # Otherwise packs would be read as sequences.
            raise FormatError(
                f"{path}: its first line is a pack, so the chunk is already packed; leave --tokenizer out"
            )
        if self.encoding is None:
            instead = "make a shard of the chunks (megatron-sft-idx convert), and train on that"
            specs = read_column_specs(self.folder, None)
            require_judged(path, specs, specs.__getitem__, {}, columns, instead)
        chunk = self._opened(number)

        def load(packs: NDArray[np.int64]) -> tuple[PacksInMemory, NDArray[np.int64]]:
            """Read these packs line by line: memory holds the bounds of lines and the packs of one batch."""
            run = self.packs(chunk, packs.tolist())
            index = run.sequence_offsets, run.token_offsets, run.seq_starts.astype(np.uint32), len(run.tokens)
            items = None if run.media is None else RunItems(run.media, run.begins)
            return PacksInMemory(index, (run.tokens, run.loss_mask), items), np.arange(len(packs))

        # The number of tokens is unknown before all is read. Lines are checked when they are read.
        return OpenPacks(len(chunk), None, {}, None, load, lambda found: FormatError(f"{chunk.path}: {found}"))

    def committed(self) -> None:
        """Mark every chunk in the folder that all consumers have completed."""
        if self.acks is None or not self._may_mark:
            return
        for number in completed(read_acks(self.acks), self.consumers, self.numbers()):
            marker = self.path_of(number) + COMPLETED
            try:
                OutputFile(marker, durable=False).close()
            except FileExistsError:
                continue
            except OSError as error:
                if error.errno in PASSING_ERRORS:
                    return  # the next commit marks the rest
                self._may_mark = False
                logger.warning(
                    f"{self.folder}: completed chunks cannot be marked ({error.strerror}), so their producer will not"
                    " delete them; give this process write access to the folder"
                )
                return
            logger.info("%s is completed", chunk_name(number))

    def _opened(self, number: int) -> ChunkFile:
        path, expected = self.path_of(number), self.samples_per_chunk
        chunk = patiently(path, lambda: ChunkFile(path))
        if expected is not None and len(chunk) != expected:
            self._uneven[number] = len(chunk)
            self._require_even()
        return chunk

    def _require_even(self) -> None:
        """Raise FormatError if a chunk other than the last one has an unexpected number of lines."""
        expected = self.samples_per_chunk or 0
        for number, lines in self._uneven.items():
            if lines > expected or self._newest() > number:
                raise FormatError(
                    f"{self.path_of(number)}: it has {lines:,} lines, expected {expected:,} (--samples-per-chunk) in"
                    " every chunk except the last; the option is not needed, because lines are counted"
                )

    # ---- from lines to packs, when a batch needs them ----

    @cached_property
    def encoder(self) -> RowEncoder | None:
        """The encoder of raw chats, created on first use in a process; None for pre-packed lines."""
        return None if self.encoding is None else RowEncoder(self.encoding)

    @property
    def pad_id(self) -> int | None:
        """The tokenizer's padding id; None if it is unknown."""
        return None if self.encoder is None else self.encoder.tokenizer.pad_id

    def packs(self, chunk: ChunkFile, indices: Sequence[int]) -> PackRun:
        """Return the packs of these lines, concatenated.

        Raises:
            SequenceError: a line is unusable; with its file and line.
            FormatError: the chunk changed since it was opened.
        """
        runs = [self._pack(chunk, index) for index in indices]
        return runs[0] if len(runs) == 1 else PackRun.joined(runs)

    def _pack(self, chunk: ChunkFile, index: int) -> PackRun:
        try:
            if self.encoder is None:
                run = run_of_lines(chunk.path, index, [parse_line(chunk.line(index))])
            else:
                raw = chunk.line(index)
                line = JsonPiece(chunk.path, index, len(raw), raw, np.array([len(raw)]), False)
                blobs = KeptBlobs()
                with comparing_all_texts(index < COMPARED_ROWS and chunk.path == self.path_of(0)):
                    piece = self.encoder.encode(line, media=self.encoder.media_of(chunk.path, blobs))
                if piece.bad_rows:
                    raise piece.bad_rows[0]
                ids, mask, lengths = piece.input_ids, piece.loss_mask, piece.lengths  # of one sequence, or of each turn
                run = PackRun.of_pack(ids, mask, np.cumsum(lengths) - lengths)
                run = checked_run(chunk.path, index, run, "token")
                if self.encoder.processor is not None:
                    run = replace(run, media=RunMedia(*items_of(piece.media), blobs))
            self._require_fit(run)
        except DifferentIdsError as error:
            raise FormatError(f"{chunk.path}:{chunk.line_number(index)}: {error.difference}") from None
        except FormatError:
            raise
        except (ValueError, RecursionError) as error:
            reason = error.reason if isinstance(error, SequenceError) else str(error)
            if self.on_bad_row == "error":
                remedy = f"{reason}; pass --on-bad-row skip to train without this row"
                raise SequenceError(chunk.path, chunk.line_number(index), remedy) from None
            self.skipped += 1
            bad = SequenceError(chunk.path, chunk.line_number(index), reason)
            logger.warning("skipped %s; this process has skipped %d so far", bad, self.skipped)
            run = PackRun.of_pack(np.array([self.pad_id or 0], np.int32), np.zeros(1, np.uint8), np.zeros(1, np.int64))
            if self.encoder is not None and self.encoder.processor is not None:
                run = replace(run, media=RunMedia.none(1))
        return run

    def _require_fit(self, run: PackRun) -> None:
        """Raise ValueError unless a run of one pack is within the limits."""
        limits = self.promised
        multiple, most = limits.sequence_multiple, limits.max_sequences_per_pack
        sequences = len(run.seq_starts)
        largest = int(run.tokens.max())
        positions = int(run.padded_lengths(multiple)[0])
        if positions > limits.capacity:
            padded = f" with sequences padded to multiples of {multiple}" if multiple > 1 else ""
            raise ValueError(
                f"{positions:,} tokens{padded}, but a pack has room for {limits.capacity:,}; raise --seq-length,"
                " or shorten the row"
            )
        if sequences > most:
            raise ValueError(f"{sequences:,} sequences, but a pack can have {most:,}; raise --max-sequences-per-pack")
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise ValueError(f"id {largest}, but the vocabulary has {self.vocab_size:,} tokens; raise --vocab-size")


# ---- declaring the end ----


@contextlib.contextmanager
def declaring_end(folder: str, seconds: float, end_folders: Sequence[str]) -> Iterator[None]:
    """Run a thread that declares the end if the producer does not: in one process, for all ranks.

    This happens when no chunk was added or has grown for this many seconds. With an incomplete line at the end of the
    newest chunk there is no end; waiting ranks report the problem. The document is written to the first of
    ``end_folders`` that is writable.
    """
    stopped = threading.Event()

    def write_end(chunks: int) -> None:
        for place in end_folders:
            try:
                return Catalog(place).write_end(chunks)
            except OSError as error:
                reason = error.strerror
        raise FormatError(f"{place}: {reason}; pass --ack-dir with a folder that this run can write to")

    def watch() -> None:
        settling, last_whole = Settling(seconds), -1
        while not stopped.wait(min(1.0, seconds / 4)):
            try:
                present = patiently(folder, lambda: chunk_numbers(folder))
                newest = max([last_whole, *present])
                path = os.path.join(folder, chunk_name(newest)) if newest >= 0 else folder
                status, ends_with_line = None, newest >= 0  # a complete chunk may be removed by now
                if newest in present:
                    status = patiently(path, partial(os.stat, path))
                    ends_with_line = status.st_size > 0 and _ends_with_whole_line(path)
                last_whole = newest if ends_with_line else last_whole
                if settling.is_whole(path, status) and ends_with_line:
                    write_end(newest + 1)
                    said = "%s: no chunk was added or has grown for %g s, so the end is declared at %d chunks"
                    logger.info(said, folder, seconds, newest + 1)
                    return
            except FileNotFoundError:
                continue  # removed between two checks, or no folder yet
            except (OSError, SFTIndexError) as error:
                # Readers of the folder will find the same problem and stop.
                logger.error("%s: the end cannot be declared: %s", folder, error)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
