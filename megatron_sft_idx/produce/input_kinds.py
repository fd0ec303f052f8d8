"""The three kinds of input that a producer takes: files that are all there, a pipe, and a folder that grows."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from megatron_sft_idx.chat.inputs import InputFile, iter_pieces, stream_pieces
from megatron_sft_idx.chat.types import Piece
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.produce.feed import Files
from megatron_sft_idx.produce.growing_folder import GrowingFolder
from megatron_sft_idx.produce.produce_options import ProduceOptions
from megatron_sft_idx.produce.taken_files import TakenFile, TakenFiles
from megatron_sft_idx.tokenize import NOT_YET, NotYet


def open_input(
    options: ProduceOptions, files: Sequence[InputFile], taken: TakenFiles, first: int, log: Callable[[str], None]
) -> Files:
    """For each file of the input its pieces, from the file ``first`` on.

    Args:
        options: say of which kind the input is.
        files: the files where all are there, else none.
        taken: the files that an earlier job took; those that this one takes are added.
        first: number of a file, counted from 0.
        log: called with messages for the user.

    Raises:
        FormatError: the folder to watch is not there or is the catalog's, or an earlier job took other files.
    """
    nbytes = options.sharding["piece_nbytes"]
    if options.from_stdin:
        return iter([standard_input(nbytes)][first:])
    if options.watch is None:
        return fixed_files(files, nbytes, taken, first)
    if os.path.realpath(options.watch) == os.path.realpath(options.catalog):
        raise FormatError(f"{options.catalog}: input and shards in one folder; name another one for the catalog")
    settle, end_after = options.settle, options.end_after
    return GrowingFolder(options.watch, nbytes, taken, settle=settle, end_after=end_after, log=log).files(first)


def fixed_files(files: Sequence[InputFile], piece_nbytes: int, taken: TakenFiles, first: int) -> Files:
    """The pieces of files that are all there, from the file ``first`` on.

    ``taken`` lists the files that an earlier job for the same catalog took; files that it lacks are added to it.

    Raises:
        FormatError: the earlier job took other files.
    """
    present = [TakenFile(file.path, file.num_bytes) for file in files]
    for number, (before, now) in enumerate(zip_longest(taken.files, present), 1):
        # A list that is shorter was cut short as it was written: the number of files is one of the job's options.
        if before is not None and (now is None or before.num_bytes != now.num_bytes):
            shown = f"{now.name} of {now.num_bytes:,} bytes" if now else "none"
            raise FormatError(
                f"{taken.path}: this catalog is made from other input: file {number} was {before.name} of"
                f" {before.num_bytes:,} bytes, is {shown}; name the same files, or another catalog"
            )
    if missing := present[len(taken.files) :]:
        taken.add(*missing)
    return (iter_pieces([file], piece_nbytes=piece_nbytes) for file in files[first:])


# How many pieces are read ahead from a pipe.
_AHEAD = 2
# How long to wait for the next piece of a pipe before answering NOT_YET; a pipe that is fast never takes so long.
_PATIENCE_SECONDS = 0.05


def standard_input(piece_nbytes: int) -> Iterator[Piece | NotYet]:
    """The pieces of JSON lines from standard input, which a thread reads, so that asking for one never takes long."""
    ready: queue.Queue[Piece | BaseException | None] = queue.Queue(_AHEAD)
    stream = open(0, "rb", closefd=False)  # noqa: SIM115 - the thread may read from it for longer than this function runs

    def read() -> None:
        try:
            for piece in stream_pieces(stream, name="standard input", piece_nbytes=piece_nbytes):
                ready.put(piece)
            ready.put(None)
        except BaseException as error:  # raised where the queue is emptied
            ready.put(error)

    # A daemon thread, since the process must end although the pipe may stay open.
    threading.Thread(target=read, name="standard input", daemon=True).start()
    while True:
        try:
            piece = ready.get(timeout=_PATIENCE_SECONDS)
        except queue.Empty:
            yield NOT_YET
            continue
        if piece is None:
            return
        if isinstance(piece, BaseException):
            raise piece
        yield piece
