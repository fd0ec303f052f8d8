"""The files of the input: found, and looked at before the work begins.

A file of packs is no input: packs are read by ``convert`` and ``pack``. Rows with system messages behind answers, as
in Megatron's ``--sft`` lines, need a decision for the whole input, which is asked for before anything is tokenised.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from megatron_sft_idx.chat.inputs import InputFile, expand_inputs, iter_pieces, open_object
from megatron_sft_idx.chat.packed_rows import DECIDE, UNDECIDED, UndecidedError
from megatron_sft_idx.chat.row_mapping import paths_of, shown_paths
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.tokenizer import COMPARED_ROWS, DifferentIdsError, comparing_all_texts
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.errors import FormatError, SequenceError, did_you_mean, nearest_names
from megatron_sft_idx.formats import jsonl_chunks, parquet
from megatron_sft_idx.packs.source_names import is_passed
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.tokenize.encoding import RowEncoder, read_row

# What is looked at before the work begins.
_FIRST_ROWS, _FIRST_NBYTES = COMPARED_ROWS, 2 << 20
_PIECE_NBYTES = 1 << 18
# Rows whose fields are listed where a path is in no row.
_LISTED_ROWS = 100


def row_files(patterns: Sequence[str | os.PathLike[str]]) -> list[InputFile]:
    """The files that paths, globs and ``save_to_disk`` folders stand for.

    Raises:
        FormatError: as of ``expand_inputs``; or a file holds packs that this package wrote.
    """
    files = expand_inputs(patterns)
    for file in files:
        if _holds_packs(file):
            path = shlex.quote(file.path)
            raise FormatError(
                f"{file.path}: packs that megatron-sft-idx wrote, expected rows; make a shard of them:"
                f" megatron-sft-idx convert {path} PREFIX --to sft-idx. To pack it for another capacity after that:"
                " megatron-sft-idx pack PREFIX --seq-length N --output-prefix OTHER"
            )
    return files


def _holds_packs(file: InputFile) -> bool:
    if file.kind == "lines":
        # Lines without a file that convert could read are read as rows, which they can be: their masks are of tokens.
        has_name = not (is_remote(file.path) or is_passed(file.path))
        return has_name and not file.compression and jsonl_chunks.recognise(file.path)
    return file.kind in ("parquet", "arrow") and parquet.KEY in _schema_metadata(file)


def _schema_metadata(file: InputFile) -> Mapping[bytes, bytes]:
    """The metadata of a table's schema; none of a file that is broken, which the run reports when it reads the rows."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return {}
    try:
        remote = open_object(file.path, file.etag) if is_remote(file.path) else None
        with pa.PythonFile(remote, "r") if remote else pa.OSFile(file.path) as source:
            if file.kind == "parquet":
                return pq.read_schema(source).metadata or {}
            magic = source.read(6)
            source.seek(0)
            opened = pa.ipc.open_file(source) if magic == b"ARROW1" else pa.ipc.open_stream(source)
            with opened:
                return opened.schema.metadata or {}
    except (pa.ArrowException, OSError):
        return {}


def look_at_rows(files: Sequence[InputFile], options: RowOptions, max_rows: int | None = None) -> None:
    """Look at rows before the work begins: whether mapped paths are there, and whether a decision is missing.

    Args:
        files: the input.
        options: how rows are read.
        max_rows: how many usable rows are taken; None for all.

    Raises:
        FormatError: no row has a path of ``--fields`` or ``--turn-fields``; the message lists the paths of the rows.
        SequenceError: one of the first 1,000 rows has a system message after an answer, and the options do not say what
            that means.
    """
    _require_mapped_paths(files, options, max_rows)
    _require_decided_rows(files, options, max_rows)


def _require_decided_rows(files: Iterable[InputFile], options: RowOptions, max_rows: int | None) -> None:
    """Look at the first 1,000 rows of the input, unless the options decide what a system message after an answer is.

    Args:
        files: the input.
        options: how rows are read.
        max_rows: how many usable rows are taken; None for all. Rows behind them are not looked at.

    Raises:
        SequenceError: such rows are among these: where the first one is, and how many there are.
    """
    if options.system_starts != "error" or options.kind == "tokenized":
        return
    first: tuple[str, int] | None = None
    count = undecided = usable = 0
    with closing(_rows(files)) as rows:
        for path, position, data in islice(rows, _FIRST_ROWS):
            if usable == max_rows:
                break
            count += 1
            try:
                if not isinstance(data, SequenceError):
                    read_row(data, options)
                    usable += 1
            except UndecidedError:
                first = first or (path, position)
                undecided += 1
                usable += 1
            except ValueError:
                pass  # a bad row, which the run reports
    if first is not None:
        raise SequenceError(*first, f"{UNDECIDED}, the first of {undecided:,} among the first {count:,} rows; {DECIDE}")


def _require_mapped_paths(files: Iterable[InputFile], options: RowOptions, max_rows: int | None) -> None:
    """Require that every path of ``--fields`` and ``--turn-fields`` is in a row of the input.

    The input is read until each was found: a few rows where no path is mistyped, all of them where one is.

    Args:
        files: the input.
        options: how rows are read.
        max_rows: no more rows than this are looked at; None for all.

    Raises:
        FormatError: no row has a path; the message lists the paths of the first rows.
    """
    missing = set(options.mapping.all_paths())
    if not missing:
        return
    found: dict[str, None] = {}
    count = 0
    with closing(_rows(files)) as rows:
        for _, _, data in islice(rows, max_rows):
            count += 1
            if isinstance(data, dict):
                with contextlib.suppress(RowError):
                    missing -= options.mapping.paths_in(data)
                if count <= _LISTED_ROWS:
                    found |= dict.fromkeys(paths_of(data))
            if not missing:
                return
    if count:
        option, path = min(missing)
        advice = "" if option == "--turn-fields" else did_you_mean(nearest_names(path, found))
        where = "a turn of one" if option == "--turn-fields" else "one"
        raise FormatError(
            f"{option}: {path} is mapped, but not {where} of {count:,} rows has it{advice}; the rows"
            f" have {shown_paths(found)}"
        )


def compare_libraries(encoder: RowEncoder, files: Iterable[InputFile], max_rows: int | None = None) -> None:
    """Have the first 1,000 usable rows of the input, but no more than 2 MiB of it, tokenised by both libraries.

    This is done once and before the workers begin, so the same rows are compared whatever their number. Nothing is
    done where gigatoken is not used.

    Args:
        encoder: what makes sequences of the rows.
        files: the input.
        max_rows: as of ``look_at_rows``.

    Raises:
        DifferentIdsError: gigatoken and tokenizers give different ids for a row.
    """
    if encoder.tokenizer.backend != "gigatoken":
        return
    missing, nbytes = _FIRST_ROWS if max_rows is None else min(max_rows, _FIRST_ROWS), 0
    with comparing_all_texts():
        for piece in iter_pieces(files, piece_nbytes=_PIECE_NBYTES):
            try:
                encoded = encoder.encode(piece, max_rows=missing)
            except DifferentIdsError:
                raise
            except FormatError:
                return  # the run raises it
            missing -= encoded.rows - len(encoded.bad_rows)
            nbytes += len(piece.payload)
            is_stopped = encoded.undecided or (encoded.bad_rows and encoder.options.on_bad_row == "error")
            if is_stopped or missing <= 0 or nbytes >= _FIRST_NBYTES:
                return


def _rows(files: Iterable[InputFile]) -> Generator[tuple[str, int, Any], None, None]:
    for piece in iter_pieces(files, piece_nbytes=_PIECE_NBYTES):
        for row in piece.rows():
            yield piece.path, row.position, row.data
