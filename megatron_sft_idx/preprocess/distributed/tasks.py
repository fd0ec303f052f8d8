"""What tasks do, on whatever node they run. Each may be done twice, and finds what was done before.

Errors of this package are given back, not raised: what cannot be used today cannot be used when tried again. Errors of
the file system are raised, and tried again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import ParamSpec, TypeVar

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs.pieces import JsonPiece, Piece
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.preprocess.corpus import MAX_LISTED
from megatron_sft_idx.preprocess.distributed.parts import Part, PartInfo, write_part
from megatron_sft_idx.preprocess.distributed.reader import PartsReader
from megatron_sft_idx.preprocess.distributed.stretches import Cutting, Stretch, read_pieces
from megatron_sft_idx.preprocess.encoding import EncodedPiece, EncodingOptions, RowEncoder
from megatron_sft_idx.preprocess.gather import PackedRun, write_packs
from megatron_sft_idx.preprocess.outputs import Output
from megatron_sft_idx.shard.prefix import lock_journal

__all__ = ["MadePart", "PartsTable", "TokenisingJob", "count_trained", "digest_of", "gather_shard", "make_parts"]

_LOCK_SECONDS = 60.0

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TokenisingJob:
    """What all tasks that tokenise have in common.

    Attributes:
        folder: of the parts.
        encoding: rows to sequences; paths in it are absolute.
        digest: of all that decides over tokens and masks, as the driver knows it.
        cutting: of the input.
    """

    folder: str
    encoding: EncodingOptions
    digest: str
    cutting: Cutting


@dataclass(frozen=True, slots=True)
class MadePart:
    """What the driver hears of a part.

    Attributes:
        path: of the part; empty where a bad row ended the work on it.
        info: what it is made from, and counts.
        lengths: tokens of each sequence, uint32 [sequences].
        reused: it was there already.
    """

    path: str
    info: PartInfo
    lengths: NDArray[np.uint32]
    reused: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PartsTable:
    """Where the sequences are.

    Attributes:
        paths: of the parts.
        bounds: number of the first sequence of each part, and that of all, int64 [parts + 1].
        mask_dtype: of the masks that are to come of it: float32 where any part has such.
    """

    paths: list[str]
    bounds: NDArray[np.int64]
    mask_dtype: str


def digest_of(encoder: RowEncoder) -> str:
    """Fingerprint of all that decides which tokens and masks a row becomes."""
    described = {**encoder.describe(), "token_dtype": encoder.token_dtype.name}
    return xxhash.xxh3_128_hexdigest(orjson.dumps(described, option=orjson.OPT_SORT_KEYS))


def _giving_back_errors(task: Callable[Arguments, Result]) -> Callable[Arguments, Result | SFTIndexError]:
    @functools.wraps(task)
    def done(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result | SFTIndexError:
        # One task is one thread of work; the libraries below would start one a processor.
        os.environ["RAYON_NUM_THREADS"] = "1"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            return task(*arguments, **named)
        except SFTIndexError as error:
            return error

    return done


_encoders: dict[str, RowEncoder] = {}


def _encoder(job: TokenisingJob) -> RowEncoder:
    """Made once a process; that of an earlier run is dropped."""
    if job.digest not in _encoders:
        encoder = RowEncoder(job.encoding)
        if digest_of(encoder) != job.digest:
            raise FormatError(
                f"{job.encoding.tokenizer}: the tokenizer on node {platform.node()} is not the driver's; put it where"
                " every node of the cluster sees it, at the same path"
            )
        _encoders.clear()
        _encoders[job.digest] = encoder
    return _encoders[job.digest]


@_giving_back_errors
def make_parts(job: TokenisingJob, stretch: Stretch) -> list[MadePart]:
    """Tokenise a stretch; one part, or as many as a whole file makes."""
    pieces = read_pieces(stretch, job.cutting)
    made: list[MadePart] = []
    while group := list(islice(pieces, job.cutting.pieces)):
        if made and stretch.nbytes is not None:
            raise FormatError(f"{stretch.name}: was changed while it was read: run again")
        path = os.path.join(job.folder, f"{stretch.number:06d}-{stretch.part + len(made):06d}.part")
        made.append(_make_part(job, path, group))
        if not made[-1].path:
            break
    return made


def _make_part(job: TokenisingJob, path: str, pieces: list[Piece]) -> MadePart:
    fingerprints = [piece.fingerprint() for piece in pieces]
    with contextlib.suppress(FileNotFoundError, FormatError):
        found = Part(path, verify=True)
        if found.info.is_of(job.digest, fingerprints):
            return MadePart(path, found.info, np.array(found.lengths), reused=True)
    info = PartInfo(job.digest, fingerprints)
    info.num_bytes = sum(piece.num_bytes for piece in pieces)
    notes: Counter[str] = Counter()
    encoded: list[EncodedPiece] = []
    encoder = _encoder(job)
    info.token_dtype = encoder.token_dtype.name
    for piece in pieces:
        done = encoder.encode(piece)
        _count(info, notes, piece, done)
        encoded.append(done)
        if done.bad_rows and job.encoding.on_bad_row == "error":
            return MadePart("", info, np.empty(0, np.uint32))
    info.notes = {name: count for name, count in notes.items() if count}
    write_part(path, info, encoded)
    return MadePart(path, info, np.concatenate([done.lengths for done in encoded]).astype(np.uint32))


def _count(info: PartInfo, notes: Counter[str], piece: Piece, done: EncodedPiece) -> None:
    info.lines += len(piece.ends) if isinstance(piece, JsonPiece) else done.rows
    info.rows += done.rows
    info.skipped += len(done.bad_rows)
    listed = done.bad_rows[: MAX_LISTED - len(info.bad_rows)]
    info.bad_rows += [(error.position or 0, error.reason) for error in listed]
    notes.update(done.notes)
    if done.loss_mask.dtype == np.float32:
        info.mask_dtype = "float32"
    first = np.cumsum(done.lengths) - done.lengths
    # As the writer of a corpus counts them: masks on tokens that nothing predicts.
    notes["first_token_masks_dropped"] += int(np.count_nonzero(done.loss_mask[first]))


@_giving_back_errors
def count_trained(path: str, sequences: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
    """How many of the tokens at these positions of these sequences of a part are trained on."""
    part = Part(path)
    return int(np.count_nonzero(part.mask[part.starts[sequences] + positions]))


@_giving_back_errors
def gather_shard(table: PartsTable, output: Output, run: PackedRun) -> Header:
    """Write one output shard; what an attempt that died left of it is dropped, and what it finished is found."""
    _wait_for_lock(ShardPaths.of(output.prefix))
    if (header := output.found()) is not None:
        return header
    with output.writer(overwrite=True) as writer:
        write_packs(PartsReader(table.paths, table.bounds, table.mask_dtype), run, writer)
        return writer.set_aside()


def _wait_for_lock(paths: ShardPaths) -> None:
    """An attempt on a node that was given up may live for some seconds longer; then this one takes its place."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            os.close(lock_journal(paths, create=False))
        except FileNotFoundError:
            return
        except FormatError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return
