"""The three kinds of input of a producer: complete files, a pipe, and a growing folder."""

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
    """Yield for each file of the input its pieces, from the file ``first`` on.

    Args:
        options: determine the kind of the input.
        files: the files if all of them exist, else none.
        taken: the files that an earlier job took; files that this job takes are added.
        first: number of a file, counted from 0.
        log: called with messages for the user.

    Raises:
        FormatError: the folder to watch does not exist or is the catalog's, or an earlier job took other files.
    """
    nbytes = options.sharding["piece_nbytes"]
    if options.from_stdin:
        return iter([standard_input(nbytes)][first:])
    if options.watch is None:
        return fixed_files(files, nbytes, taken, first)
    if os.path.realpath(options.watch) == os.path.realpath(options.catalog):
        raise FormatError(f"{options.catalog}: used for both input and shards; choose another folder for the catalog")
    settle, end_after = options.settle, options.end_after
    return GrowingFolder(options.watch, nbytes, taken, settle=settle, end_after=end_after, log=log).files(first)


def fixed_files(files: Sequence[InputFile], piece_nbytes: int, taken: TakenFiles, first: int) -> Files:
    """Yield the pieces of complete files, from the file ``first`` on.

    ``taken`` lists the files that an earlier job for the same catalog took; missing files are added to it.

    Raises:
        FormatError: the earlier job took other files.
    """
    present = [TakenFile(file.path, file.num_bytes) for file in files]
    for number, (before, now) in enumerate(zip_longest(taken.files, present), 1):
        # A shorter list was truncated during writing, because the number of files is one of the job's options.
        if before is not None and (now is None or before.num_bytes != now.num_bytes):
            shown = f"{now.name} of {now.num_bytes:,} bytes" if now else "none"
            raise FormatError(
                f"{taken.path}: this catalog was made from different input: file {number} was {before.name} of"
                f" {before.num_bytes:,} bytes, is {shown}; pass the same files, or choose another catalog"
            )
    if missing := present[len(taken.files) :]:
        taken.add(*missing)
    return (iter_pieces([file], piece_nbytes=piece_nbytes) for file in files[first:])


# Number of pieces to read ahead from a pipe.
_AHEAD = 2
# How long to wait for the next piece of a pipe before returning NOT_YET; a fast pipe never takes this long.
_PATIENCE_SECONDS = 0.05


def standard_input(piece_nbytes: int) -> Iterator[Piece | NotYet]:
    """Yield the pieces of JSON lines from standard input. A thread reads them, so requesting one never takes long."""
    ready: queue.Queue[Piece | BaseException | None] = queue.Queue(_AHEAD)
    stream = open(0, "rb", closefd=False)  # noqa: SIM115 - the thread may use it after this function has returned

    def read() -> None:
        try:
            for piece in stream_pieces(stream, name="standard input", piece_nbytes=piece_nbytes):
                ready.put(piece)
            ready.put(None)
        except BaseException as error:  # raised again by the reader of the queue
            ready.put(error)

    # A daemon thread, because the process must be able to end while the pipe stays open.
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
