"""Find the input files from the user's patterns, detect their formats, and read them in pieces of whole rows.

Files are local or in object stores. The format is detected from the content; the suffix only distinguishes JSON lines
from an array if the content can be either. The division of files into pieces depends only on their content and on
``piece_nbytes``, never on the number of worker processes, which convert pieces to rows. The content of rows is not
checked here.
"""

from __future__ import annotations

import glob
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx._native import scan_json_array
from megatron_sft_idx.chat.separated import ColumnNames, SeparatedPiece, read_column_names
from megatron_sft_idx.chat.tables import table_pieces
from megatron_sft_idx.chat.types import InputRow, Piece
from megatron_sft_idx.chat.values import parse_json, read_values
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.storage import is_remote, open_regular
from megatron_sft_idx.storage.remote import ObjectInfo, open_store
from megatron_sft_idx.storage.remote.store import (
    ObjectFile,
    matching_objects,
    object_exists,
    objects_in_folder,
    read_ahead,
)

Kind = Literal["lines", "array", "csv", "tsv", "parquet", "arrow"]
Compression = Literal["", "gzip", "zstd"]
# Blocks of text, each with the number of bytes of the file on disk that have been read at its end.
Blocks = Iterator[tuple[bytes, int]]

# Longer than any chat. Without a limit, a file without line ends would fill the memory.
MAX_ROW_NBYTES = 1 << 30
UTF8_BOM = b"\xef\xbb\xbf"
_JSON_SPACE = b" \t\r\n"
_BLOCK_NBYTES = 1 << 20
# Number of compressed bytes to decompress at once. All of their output is held in memory, so this is small.
_FEED_NBYTES = 1 << 15
# Number of bytes of a file to fetch and decompress to detect its format.
_PEEK_NBYTES = 1 << 17
_HEAD_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file with rows.

    Attributes:
        path: path as given, or as found in the given folder or glob.
        kind: JSON lines, one JSON array of objects, comma- or tab-separated values, Parquet, or an Arrow IPC stream or
            file.
        compression: compression of text files.
        num_bytes: size on disk, or of the object.
        etag: etag of a remote file, which must stay the object that was found.
    """

    path: str
    kind: Kind
    compression: Compression
    num_bytes: int
    etag: str | None = None


def total_bytes(files: Iterable[InputFile]) -> int:
    """Return the total size of the files on disk (compressed); the total of a progress bar."""
    return sum(file.num_bytes for file in files)


# ---- from patterns to files ----


def expand_inputs(patterns: Sequence[str | os.PathLike[str]]) -> list[InputFile]:
    """Find the files for paths, globs (including ``**``) and ``save_to_disk`` folders.

    Files are in the order of the patterns. Files of a glob are sorted by name, and files of a folder are in its
    dataset's order. An existing name is never treated as a glob. A remote folder, whose name ends in ``/``, stands for
    the objects directly in it whose names do not begin with ``_`` or ``.``.

    Raises:
        FormatError: a pattern has no files, a file occurs twice, a folder is of another kind, or a file is unreadable
            or of unknown format.
    """
    if isinstance(patterns, (str, os.PathLike)):
        patterns = [patterns]
    if not patterns:
        raise FormatError("no input: pass at least one file, glob or save_to_disk folder")
    files: list[InputFile] = []
    found_by: dict[str, str] = {}
    for given in patterns:
        pattern = os.fspath(given)
        for path in _objects_of(pattern) if is_remote(pattern) else _paths_of(pattern):
            real = path if is_remote(path) else os.path.realpath(path)
            if other := found_by.get(real):
                raise FormatError(
                    f"{path}: matched twice, by {other!r} and {pattern!r}, so its rows would be used twice; remove"
                    " one of them"
                )
            found_by[real] = pattern
            files.append(_recognise(path))
    return files


def named_by(pattern: str) -> list[str]:
    """Return the local files and ``save_to_disk`` folders for a path or glob. See ``expand_inputs`` for errors."""
    if not pattern.strip():
        raise FormatError("an input is an empty string; pass a file, glob or save_to_disk folder")
    path = os.path.expanduser(pattern)
    if os.path.lexists(path):
        return [path]
    if not re.search(r"[*?\[]", path):
        raise FormatError(f"{pattern}: no such file or folder")
    matches = sorted(glob.glob(path, recursive=True))
    folders = {match for match in matches if any(os.path.isfile(os.path.join(match, name)) for name in _SAVED_NAMES)}
    # Plain folders, which ** also matches, are ignored; so are files in a folder that is read as a dataset.
    apart = [each for each in matches if not os.path.isdir(each) and os.path.dirname(each) not in folders]
    if not (apart or folders):
        raise FormatError(f"{pattern}: no file matches")
    return sorted([*apart, *folders])


def _paths_of(pattern: str) -> list[str]:
    names = named_by(pattern)
    return [path for name in names for path in (_files_of_folder(name) if os.path.isdir(name) else [name])]


def _objects_of(pattern: str) -> list[str]:
    if pattern.endswith("/"):
        by_name = {os.path.basename(path): path for path in objects_in_folder(pattern)}
        if saved := by_name.keys() & _SAVED_NAMES:
            raise FormatError(
                f"{pattern}: contains {min(saved)}, so it was written by save_to_disk; pass its data files:"
                f" {pattern}*.arrow"
            )
        found = [path for name, path in by_name.items() if not name.startswith(("_", "."))]
    elif not glob.has_magic(pattern) or object_exists(pattern):
        return [pattern]
    elif "**" in pattern:
        raise FormatError(f"{pattern}: ** is not supported for object storage; use * for each folder level")
    else:
        found = matching_objects(pattern)
    if not found:
        raise FormatError(f"{pattern}: no object matches")
    return sorted(found)


_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
# A folder with one of these files was made by save_to_disk, from a dataset or a dictionary of splits.
_SAVED_NAMES = {_STATE, _INFO, _SPLITS}


def _files_of_folder(folder: str) -> list[str]:
    """Return the Arrow files of a saved dataset, in the dataset's order. FormatError: another kind of folder."""
    path = Path(folder)
    if (path / _SPLITS).is_file():
        splits = _read_object(path / _SPLITS).get("splits")
        choices = ", ".join(os.path.join(folder, str(name)) for name in (splits if isinstance(splits, list) else []))
        raise FormatError(f"{folder}: this dataset has several splits; choose one: {choices}")
    if (state := path / _STATE).is_file():
        content = _read_object(state)
        if content.get("_indices_data_files"):
            raise FormatError(f"{state}: the dataset is a selection of rows; call flatten_indices() and save it again")
        try:
            names = [str(entry["filename"]) for entry in content["_data_files"]]
        except (KeyError, TypeError):
            raise FormatError(f"{state}: expected a list of file names under '_data_files'") from None
    elif (path / _INFO).is_file():
        names = sorted(file.name for file in path.glob("*.arrow"))
    else:
        raise FormatError(
            f"{folder}: this folder was not written by save_to_disk; pass a glob for its files, such as"
            f" {os.path.join(folder, '*.jsonl')!r}"
        )
    missing = [name for name in names if not (path / name).is_file()]
    if missing or not names:
        raise FormatError(
            f"{folder}: data files of this saved dataset are missing: {', '.join(missing) or 'no .arrow files'}"
        )
    return [os.path.join(folder, name) for name in names]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: expected a JSON object")
    return content


# ---- format detection ----

_KNOWN_FILES = (
    ".json, .jsonl, .csv, .tsv (each also .gz or .zst), .parquet, .arrow, or a folder made by datasets' save_to_disk"
)


def _recognise(path: str) -> InputFile:
    """Return an input file, with its format detected from the beginning of its content."""
    if is_remote(path):
        info = find_object(path)
        with io.BufferedReader(open_object(path, info.etag), _PEEK_NBYTES) as source:
            return InputFile(path, *_kind_of(path, source), info.nbytes, info.etag)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FormatError(f"{path}: not a regular file; pipes and devices cannot be read twice")
        with open_regular(path) as source:
            return InputFile(path, *_kind_of(path, source), os.fstat(source.fileno()).st_size)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None


def _kind_of(path: str, source: BinaryIO) -> tuple[Kind, Compression]:
    magic = source.read(8)
    if magic.startswith(b"PAR1"):
        return "parquet", ""
    if magic.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow", ""
    source.seek(0)
    compression = _compression_of(magic)
    head = b""
    blocks = _with_positions(iter(partial(source.read, _FEED_NBYTES), b""))
    for block, _ in _text_of(path, compression, blocks):
        head += block
        if len(head) >= _HEAD_NBYTES:
            break
    return _kind_of_text(path, head[:_HEAD_NBYTES]), compression


def _compression_of(head: bytes) -> Compression:
    """Return the compression of a file that starts with these bytes, independent of its name."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    # A zstd file may start with a skippable frame, as written by pzstd.
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):
        return "zstd"
    return ""


def _kind_of_text(path: str, head: bytes) -> Kind:
    text = head.lstrip(_JSON_SPACE)
    means_lines = bool(re.search(r"\.(jsonl|ndjson)(\.(gz|zst))?$", path, re.IGNORECASE))
    # A line of JSON lines is an object, so text that begins like an array of objects is one array, whatever its suffix.
    if re.match(rb"\[\s*(\{|\]|$)", text) or (text.startswith(b"[") and not means_lines):
        return "array"
    if not text or means_lines:
        return "lines"
    if (separated := re.search(r"\.(csv|tsv)(\.(gz|zst))?$", path, re.IGNORECASE)) and not text.startswith(b"{"):
        return "csv" if separated[1].lower() == "csv" else "tsv"
    if not text.startswith(b"{"):
        raise FormatError(f"{path}: unknown file format, the file begins with {text[:20]!r}; expected {_KNOWN_FILES}")
    line = text.partition(b"\n")[0].rstrip()
    if len(line) < len(text.rstrip()) and line.endswith((b"{", b"[", b",")):
        raise FormatError(
            f"{path}: one JSON object over several lines; expected one object per line, or an array of objects. If the"
            " rows are under one of its keys: jq -c '.KEY[]' FILE > rows.jsonl"
        )
    return "lines"


# ---- from bytes to blocks of text ----


def find_object(path: str, etag: str | None = None) -> ObjectInfo:
    """Return information about the object at a path.

    Raises:
        FormatError: it does not exist, or does not have this ``etag``.
        StorageError: the store cannot be read.
    """
    store, key = open_store(path)
    info = store.head(key) if key else None
    if info is None:
        raise FormatError(f"{path}: no such object")
    if etag is not None and info.etag != etag:
        raise FormatError(f"{path}: was replaced during the run (etag {etag}, now {info.etag}); start again")
    return info


def open_object(path: str, etag: str | None = None) -> ObjectFile:
    """Open an object for reading at any position; each read is a request.

    With an ``etag``, it must be the object with that etag. FormatError: it was replaced by another one.
    """
    return ObjectFile(open_store(path)[0], find_object(path, etag))


def _read_blocks(file: InputFile) -> Blocks:
    """Yield blocks of a file's text. FormatError: it is unreadable, has changed, or its compressed data is damaged."""
    nbytes = _FEED_NBYTES if file.compression else _BLOCK_NBYTES
    if is_remote(file.path):
        with closing(read_ahead(open_store(file.path)[0], find_object(file.path, file.etag))) as fetched:
            raw = (bytes(chunk[at : at + nbytes]) for chunk in fetched for at in range(0, len(chunk), nbytes))
            yield from _text_of(file.path, file.compression, _with_positions(raw))
        return
    try:
        with open_regular(file.path) as source:
            blocks = _with_positions(iter(partial(source.read, nbytes), b""))
            yield from _text_of(file.path, file.compression, blocks)
    except OSError as error:
        raise FormatError(f"{file.path}: cannot be read: {error.strerror or error}") from None


def _with_positions(blocks: Iterable[bytes]) -> Blocks:
    position = 0
    for block in blocks:
        position += len(block)
        yield block, position


def _text_of(path: str, compression: Compression, raw: Blocks) -> Blocks:
    """Decompress the bytes of a file into nonempty blocks of text, without the byte order mark."""
    blocks = _unpacked(path, compression, raw) if compression else raw
    head = b""
    read_to = 0
    for block, read_to in blocks:  # noqa: B007
        head += block
        if len(head) >= len(UTF8_BOM):
            break
    head = head.removeprefix(UTF8_BOM)
    if head:
        yield head, read_to
    yield from blocks


def _unpacked(path: str, compression: Compression, raw: Blocks) -> Blocks:
    """Decompress any number of concatenated gzip members or zstd frames."""
    make: Callable[[], Any] = partial(zlib.decompressobj, 16 + zlib.MAX_WBITS)
    broken: type[Exception] = zlib.error
    if compression == "zstd":
        try:
            import zstandard
        except ImportError:
            raise SFTIndexError(f"{path}: reading .zst needs zstandard: pip install 'megatron-sft-idx[zstd]'") from None
        make, broken = zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
    frame = None
    reason = "ends inside a frame"
    try:
        for packed, position in raw:
            rest = packed
            while rest:
                if frame is None and compression == "gzip":
                    rest = rest.lstrip(b"\0")  # zeros may be between members
                    if not rest:
                        break
                frame = frame or make()
                block = frame.decompress(rest)
                if block:
                    yield block, position
                rest = frame.unused_data
                if frame.eof:
                    frame = None
        if frame is None:
            return
    except broken as error:
        reason = str(error)
    raise FormatError(f"{path}: broken {compression} data: {reason}; compress or download the file again")


# ---- from blocks to pieces ----


@dataclass(frozen=True, slots=True, eq=False)
class JsonPiece(Piece):
    """JSON lines, or elements of a JSON array.

    Attributes:
        ends: end of each row in the payload, int64 [rows]; one separator byte follows each.
        is_array: whether these are elements of an array. A blank element is an error; a blank line is not.
    """

    ends: NDArray[np.int64]
    is_array: bool

    def rows(self) -> Iterator[InputRow]:
        """See ``Piece.rows``."""
        start = 0
        for position, end in enumerate(self.ends.tolist(), self.first):
            raw, start = self.payload[start:end].strip(_JSON_SPACE), end + 1
            if raw:
                notes: Mapping[str, int] = {}
                try:
                    data = parse_json(raw)
                    if b"null" in raw:  # most rows do not have one
                        data, notes = read_values(data)
                except ValueError as error:
                    data = SequenceError(self.path, position, str(error))
                yield InputRow(position, data, notes)
            elif self.is_array:
                reason = "an element is missing: the array has an extra comma"
                yield InputRow(position, SequenceError(self.path, position, reason))

    def fingerprint(self) -> str:
        """See ``Piece.fingerprint``."""
        return xxhash.xxh3_128_hexdigest(self.payload)


def iter_pieces(files: Iterable[InputFile], *, piece_nbytes: int = 8 << 20) -> Iterator[Piece]:
    """Split the files into pieces, in order.

    Memory is limited to the size of a piece or of the longest row.

    Args:
        files: files from ``expand_inputs``.
        piece_nbytes: approximate size of a piece in bytes of uncompressed data. A piece holds whole rows; a longer row
            is a separate piece.

    Raises:
        FormatError: a file is unreadable or damaged, or has a row longer than ``MAX_ROW_NBYTES``. All pieces before it
            have been yielded.
        SFTIndexError: an optional dependency for the file is not installed.
    """
    for file in files:
        if file.kind in ("parquet", "arrow"):
            source = open_object(file.path, file.etag) if is_remote(file.path) else None
            yield from table_pieces(file.path, file.kind, source, piece_nbytes)
        else:
            cut = _CUTTERS[file.kind]
            yield from cut(_read_blocks(file), path=file.path, piece_nbytes=piece_nbytes)


def stream_pieces(stream: io.BufferedReader, *, name: str, piece_nbytes: int) -> Iterator[Piece]:
    """Split JSON lines from a pipe into pieces. This is ``iter_pieces`` for streams.

    The ends of pieces depend only on the bytes, not on how the pipe delivers them.

    Raises:
        FormatError: the pipe is unreadable, has compressed data, or a row longer than ``MAX_ROW_NBYTES``.
    """
    try:
        if compression := _compression_of(stream.peek(1)):
            raise FormatError(f"{name}: {compression} data; decompress it in the pipe: {compression} -dc FILE | ...")
        arriving = _with_positions(iter(partial(stream.read1, _BLOCK_NBYTES), b""))
        yield from cut_lines(_text_of(name, "", arriving), path=name, piece_nbytes=piece_nbytes)
    except OSError as error:
        raise FormatError(f"{name}: cannot be read: {error.strerror or error}") from None


# A block, the positions of row ends in it (of the separator bytes), and the number of bytes of the file read so far.
_Marked = Iterator[tuple[bytes, NDArray[np.int64], int]]


def cut_lines(blocks: Blocks, *, path: str, piece_nbytes: int) -> Iterator[JsonPiece]:
    """Split text into pieces at newlines. Blank lines count as rows. The last line may lack its newline."""
    marked = ((block, np.flatnonzero(np.frombuffer(block, np.uint8) == 10), at) for block, at in blocks)
    return _cut(marked, path, piece_nbytes, is_array=False)


def cut_array(blocks: Blocks, *, path: str, piece_nbytes: int) -> Iterator[JsonPiece]:
    """Split text that is one JSON array into pieces, between its elements.

    Only brackets and strings are parsed here. Whether an element is valid JSON, or missing, is checked when the rows of
    the piece are read.

    Raises:
        FormatError: the text is not an array, the array is not closed, or something follows it.
    """
    pieces = _cut(_mark_elements(blocks, path), path, piece_nbytes, is_array=True)
    first = next(pieces)
    # An empty array looks like one blank element. A blank element before others is an extra comma.
    if len(first.ends) == 1 and not first.payload.strip(_JSON_SPACE):
        if (second := next(pieces, None)) is None:
            return
        yield first
        first = second
    yield first
    yield from pieces


def _mark_elements(blocks: Blocks, path: str) -> _Marked:
    depth, in_string, escaped = 0, False, False
    offset = 0
    for whole, at in blocks:
        block = whole
        if depth == 0:
            block = whole.lstrip(_JSON_SPACE)
            if block and not block.startswith(b"["):
                raise FormatError(f"{path}: expected a JSON array, but the file begins with {block[:20]!r}")
            depth, block = int(bool(block)), block[1:]
        if depth:
            ends, depth, in_string, escaped = scan_json_array(np.frombuffer(block, np.uint8), depth, in_string, escaped)
            if depth == 0:
                close = int(ends[-1])
                if block[close : close + 1] != b"]":
                    raise FormatError(f"{path}: the JSON array ends with '}}', expected ']'; a bracket is missing")
                rest = block[close + 1 :]
                while not (found := rest.strip(_JSON_SPACE)):
                    # Text after the array counts as read with its last piece.
                    rest, at = next(blocks, (b"", at))  # noqa: PLW2901
                    if not rest:
                        yield block[: close + 1], ends, at
                        return
                raise FormatError(
                    f"{path}: data after the end of the JSON array: {found[:20]!r}; keep one array per file, or write"
                    " one object per line (.jsonl)"
                )
            yield block, ends, at
        offset += len(whole)
    raise FormatError(
        f"{path}: the JSON array is not closed after {offset} bytes; the file was cut short, or a quote or "
        "bracket is missing"
    )


def _cut_separated(blocks: Blocks, *, path: str, piece_nbytes: int, delimiter: str) -> Iterator[SeparatedPiece]:
    """Split text of separated values into pieces at newlines outside quoted fields.

    The header is the first record, so the first row has the number 2.

    Raises:
        FormatError: the header is missing or invalid.
    """
    header: ColumnNames | None = None
    for piece in _cut(_mark_records(blocks), path, piece_nbytes, is_array=False):
        if header is None:
            header = read_column_names(piece.payload[: piece.ends[0]], delimiter, path)
        yield SeparatedPiece(path, piece.first, piece.num_bytes, piece.payload, piece.ends, header)


def _mark_records(blocks: Blocks) -> _Marked:
    """Mark newlines after an even number of quotes: a quote in a quoted field is written twice."""
    num_quotes = 0
    for block, at in blocks:
        letters = np.frombuffer(block, np.uint8)
        quotes_before = num_quotes + np.cumsum(letters == ord('"'))
        yield block, np.flatnonzero((letters == ord("\n")) & (quotes_before % 2 == 0)), at
        num_quotes = int(quotes_before[-1]) % 2 if len(block) else num_quotes


def _cut(marked: _Marked, path: str, piece_nbytes: int, *, is_array: bool) -> Iterator[JsonPiece]:
    """Collect blocks in a buffer, and split off pieces at its beginning as soon as they are full."""
    buffer = bytearray()
    start = 0  # position of the buffer in the text
    ends = np.empty(0, np.int64)  # positions in the text of the row ends in the buffer
    num_cut = position = consumed = 0

    def require_short(nbytes: int) -> None:
        if nbytes > MAX_ROW_NBYTES:
            raise FormatError(
                f"{path}: row {num_cut + 1} is longer than {MAX_ROW_NBYTES} bytes; expected one JSON object per line,"
                " or one array of objects"
            )

    def cut_one() -> JsonPiece:
        """Return as many rows as fit into a piece, or a single larger one."""
        nonlocal start, ends, num_cut, consumed
        num_rows = max(1, int(np.searchsorted(ends, start + piece_nbytes, side="right")))
        piece_ends, ends = ends[:num_rows] - start, ends[num_rows:]
        nbytes = int(piece_ends[-1])
        if nbytes > piece_nbytes:
            require_short(nbytes)
        with memoryview(buffer) as view:
            payload = bytes(view[:nbytes])
        del buffer[: nbytes + 1]
        start += nbytes + 1
        piece = JsonPiece(path, num_cut + 1, position - consumed, payload, piece_ends, is_array)
        num_cut, consumed = num_cut + num_rows, position
        return piece

    for block, marks, at in marked:
        position = at
        ends = np.concatenate([ends, marks + (start + len(buffer))])
        buffer += block
        while len(buffer) > piece_nbytes and ends.size:
            yield cut_one()
        if not ends.size:
            require_short(len(buffer))
    end = start + len(buffer)
    if buffer and (not ends.size or ends[-1] != end - 1):
        ends = np.append(ends, end)
    while ends.size:
        yield cut_one()


_CUTTERS: Mapping[str, Callable[..., Iterator[Piece]]] = {
    "lines": cut_lines,
    "array": cut_array,
    "csv": partial(_cut_separated, delimiter=","),
    "tsv": partial(_cut_separated, delimiter="\t"),
}
