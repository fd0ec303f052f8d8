"""Find the input files, and check them before the work begins.

A file of packs is not an input: packs are read by ``convert`` and ``pack``. Rows with system messages after assistant
messages, as in Megatron's ``--sft`` lines, need a decision for the whole input. It is required before anything is
tokenised, unless they are skipped as bad rows.
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
from megatron_sft_idx.tokenize.encoding import EncodingOptions, RowEncoder, read_row

# Amount of input to check before the work begins.
_FIRST_ROWS, _FIRST_NBYTES = COMPARED_ROWS, 2 << 20
_PIECE_NBYTES = 1 << 18
# Number of rows whose fields are listed if no row has a path.
_LISTED_ROWS = 100


def row_files(patterns: Sequence[str | os.PathLike[str]]) -> list[InputFile]:
    """Return the files for paths, globs and ``save_to_disk`` folders.

    Raises:
        FormatError: see ``expand_inputs``; or a file has packs written by this package.
    """
    files = expand_inputs(patterns)
    for file in files:
        if _holds_packs(file):
            path = shlex.quote(file.path)
            raise FormatError(
                f"{file.path}: contains packs written by megatron-sft-idx, not rows. To make a shard of them:"
                f" megatron-sft-idx convert {path} PREFIX --to sft-idx. To pack that shard for another capacity:"
                " megatron-sft-idx pack PREFIX --seq-length N --output-prefix OTHER"
            )
    return files


def _holds_packs(file: InputFile) -> bool:
    if file.kind == "lines":
        # Single lines that convert could read are read as rows, which is possible: their masks are per token.
        has_name = not (is_remote(file.path) or is_passed(file.path))
        return has_name and not file.compression and jsonl_chunks.recognise(file.path)
    return file.kind in ("parquet", "arrow") and parquet.KEY in _schema_metadata(file)


def _schema_metadata(file: InputFile) -> Mapping[bytes, bytes]:
    """Return the schema metadata of a table; none for a broken file, which is reported when its rows are read."""
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


def look_at_rows(files: Sequence[InputFile], options: EncodingOptions, max_rows: int | None = None) -> None:
    """Check rows before the work begins: whether mapped paths exist, and whether a decision is missing.

    Args:
        files: the input.
        options: how rows are read, and whether bad rows are skipped.
        max_rows: maximum number of usable rows; None for all.

    Raises:
        FormatError: no row has a path of ``--fields`` or ``--turn-fields``; the message lists the paths of the rows.
        SequenceError: some of the first 1,000 rows have a system message after an assistant message, and the options do
            not define its meaning. If bad rows are skipped: most of these rows.
    """
    _require_mapped_paths(files, options.rows, max_rows)
    _require_decided_rows(files, options, max_rows)


def _require_decided_rows(files: Iterable[InputFile], options: EncodingOptions, max_rows: int | None) -> None:
    """Check the first 1,000 rows for system messages after assistant messages. See ``look_at_rows``.

    Single rows of this kind are bad rows. If most rows are of this kind, it is the format of the input: skipping them
    would lose most of it.
    """
    if options.rows.system_starts != "error" or options.rows.kind == "tokenized":
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
                    read_row(data, options.rows)
                    usable += 1
            except UndecidedError:
                first = first or (path, position)
                undecided += 1
            except ValueError:
                pass  # a bad row, which is reported during the run
    if first is None or (options.on_bad_row == "skip" and undecided <= usable):
        return
    found = f"the first of {undecided:,} such rows among the first {count:,}"
    skip = "" if options.on_bad_row == "skip" else "; to skip such rows, pass --on-bad-row skip"
    raise SequenceError(*first, f"{UNDECIDED} ({found}); {DECIDE}{skip}")


def _require_mapped_paths(files: Iterable[InputFile], options: RowOptions, max_rows: int | None) -> None:
    """Require that every path of ``--fields`` and ``--turn-fields`` is in a row of the input.

    The input is read until each was found: a few rows if no path is mistyped, all of them otherwise.

    Args:
        files: the input.
        options: how rows are read.
        max_rows: maximum number of rows to check; None for all.

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
        where = "any turn" if option == "--turn-fields" else "any"
        raise FormatError(
            f"{option}: {path} does not occur in {where} of {count:,} rows{advice}; the rows have {shown_paths(found)}"
        )


def compare_libraries(encoder: RowEncoder, files: Iterable[InputFile], max_rows: int | None = None) -> None:
    """Tokenise the first 1,000 usable rows of the input, but at most 2 MiB of it, with both libraries.

    This is done once before the workers begin, so the same rows are compared for any number of workers. Nothing is done
    if gigatoken is not used.

    Args:
        encoder: the encoder of the rows.
        files: the input.
        max_rows: see ``look_at_rows``.

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
                return  # the error is raised during the run
            missing -= encoded.rows - len(encoded.bad_rows)
            nbytes += len(piece.payload)
            is_stopped = bool(encoded.bad_rows) and encoder.options.on_bad_row == "error"
            if is_stopped or missing <= 0 or nbytes >= _FIRST_NBYTES:
                return


def _rows(files: Iterable[InputFile]) -> Generator[tuple[str, int, Any], None, None]:
    for piece in iter_pieces(files, piece_nbytes=_PIECE_NBYTES):
        for row in piece.rows():
            yield piece.path, row.position, row.data
