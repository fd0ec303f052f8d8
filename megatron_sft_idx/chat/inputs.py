"""What the user names as input, here or in object stores, made into files of a known kind, and read in blocks.

Files are recognised by their content; a suffix only says how a text that could be either is meant. What a row says is
not looked at here.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import orjson

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.storage import is_remote, open_regular
from megatron_sft_idx.storage.remote import ObjectInfo, open_store
from megatron_sft_idx.storage.remote.store import ObjectFile, exists, in_folder, matching, read_ahead

Kind = Literal["lines", "array", "parquet", "arrow"]

_MAGIC_NBYTES = 8
_HEAD_NBYTES = 1 << 16
_JSON_SPACE = b" \t\r\n"
_FOREIGN = {
    b"BZh": "bzip2 data",
    b"\xfd7zXZ": "xz data",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a numpy file",
}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file with rows.

    Attributes:
        path: as given, or as found under the folder or glob that was given.
        kind: JSON lines, one JSON array of objects, Parquet, or an Arrow IPC stream or file.
        compression: of JSON files.
        num_bytes: size on disk, or of the object.
        etag: of a remote file, which must stay the object that it was when it was found.
    """

    path: str
    kind: Kind
    compression: Compression
    num_bytes: int
    etag: str | None = None


def total_bytes(files: Iterable[InputFile]) -> int:
    """What the files take on disk, compressed as they are: the end of the progress bar."""
    return sum(file.num_bytes for file in files)


def expand_inputs(patterns: Sequence[str | os.PathLike[str]]) -> list[InputFile]:
    """Finds the files that paths, globs (``**`` too) and ``save_to_disk`` folders stand for.

    The order is the order given; what a glob finds is sorted by name, what a folder holds is in its own
    order. A name that exists is never taken for a glob. Of a remote folder, which ends in ``/``, all objects right
    in it are taken whose names do not begin with ``_`` or ``.``.

    Raises:
        FormatError: nothing there, the same file twice, a folder of another kind, a file that cannot be read
            or whose kind is not known.
    """
    if isinstance(patterns, (str, os.PathLike)):
        patterns = [patterns]
    if not patterns:
        raise FormatError("no input: name at least one file, glob or save_to_disk folder")
    files: list[InputFile] = []
    found_by: dict[str, str] = {}
    for given in patterns:
        pattern = os.fspath(given)
        for path in _paths_of(pattern):
            real = path if is_remote(path) else os.path.realpath(path)
            if other := found_by.get(real):
                raise FormatError(f"{path}: named twice, by {other!r} and {pattern!r}; its rows would be used twice")
            found_by[real] = pattern
            files.append(_recognise(path))
    return files


def _paths_of(pattern: str) -> list[str]:
    if not pattern.strip():
        raise FormatError("an input is an empty string; name a file, glob or save_to_disk folder")
    if is_remote(pattern):
        return _objects_of(pattern)
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        return files_of_folder(path)
    if os.path.lexists(path):
        return [path]
    if not re.search(r"[*?\[]", path):
        raise FormatError(f"{pattern}: no such file or folder")
    matches = sorted(glob.glob(path, recursive=True))
    folders = {match for match in matches if is_saved_dataset(match)}
    paths: list[str] = []
    for match in matches:
        if match in folders:
            paths += files_of_folder(match)
        # Plain folders are what ** runs into; what lies in a dataset's folder came with that.
        elif not os.path.isdir(match) and os.path.dirname(match) not in folders:
            paths.append(match)
    if not paths:
        raise FormatError(f"{pattern}: no file matches")
    return paths


def _objects_of(pattern: str) -> list[str]:
    if pattern.endswith("/"):
        found = in_folder(pattern)
        names = {os.path.basename(path) for path in found}
        if saved := names & SAVED_DATASET_NAMES:
            raise FormatError(
                f"{pattern}: holds {min(saved)}, so it was made by save_to_disk; name its data: {pattern}*.arrow"
            )
        found = [path for path in found if not os.path.basename(path).startswith(("_", "."))]
    elif not glob.has_magic(pattern) or exists(pattern):
        return [pattern]
    elif "**" in pattern:
        raise FormatError(f"{pattern}: ** does not reach into folders of an object store; name each with *")
    else:
        found = matching(pattern)
    if not found:
        raise FormatError(f"{pattern}: no object matches")
    return sorted(found)


def _recognise(path: str) -> InputFile:
    """A file by its content; reads no more than its beginning."""
    if is_remote(path):
        info = find_object(path)
        with io.BufferedReader(open_object(path, info.etag), _PEEK_NBYTES) as file:
            return _recognise_content(path, file, info.nbytes, info.etag)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FormatError(f"{path}: not a regular file; pipes and devices cannot be read twice")
        with open_regular(path) as file:
            return _recognise_content(path, file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None


def _recognise_content(path: str, file: BinaryIO, num_bytes: int, etag: str | None = None) -> InputFile:
    magic = file.read(_MAGIC_NBYTES)
    if magic.startswith(b"PAR1"):
        return InputFile(path, "parquet", "", num_bytes, etag)
    if magic.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return InputFile(path, "arrow", "", num_bytes, etag)
    compression = _compression_of(magic)
    file.seek(0)
    head = b""
    for block, _ in _without_mark(_blocks_of(path, file, compression)):
        head += block
        if len(head) >= _HEAD_NBYTES:
            break
    return InputFile(path, _kind_of_text(path, head[:_HEAD_NBYTES]), compression, num_bytes, etag)


def _kind_of_text(path: str, head: bytes) -> Kind:
    text = head.lstrip(_JSON_SPACE)
    means_lines = bool(re.search(r"\.(jsonl|ndjson)(\.|$)", path, re.IGNORECASE))
    # A line of JSON lines is an object, so an array of objects is one array whatever the file is called.
    if re.match(rb"\[\s*(\{|\]|$)", text) or (text.startswith(b"[") and not means_lines):
        return "array"
    for start, what in _FOREIGN.items():
        if text.startswith(start):
            raise FormatError(f"{path}: this is {what}; expected {KNOWN_FILES}")
    if not text or means_lines:
        return "lines"
    if not text.startswith(b"{"):
        raise FormatError(f"{path}: starts like no known file, {text[:20]!r}; expected {KNOWN_FILES}")
    line = text.partition(b"\n")[0].rstrip()
    if len(line) < len(text.rstrip()) and line.endswith((b"{", b"[", b",")):
        raise FormatError(
            f"{path}: one JSON object over several lines; expected an object a line, or an array of objects. "
            "If a key of it holds the rows: jq -c '.KEY[]' FILE > rows.jsonl"
        )
    return "lines"


# ---- folders that datasets made ----

KNOWN_FILES = ".json, .jsonl (each also .gz or .zst), .parquet, .arrow, or a folder made by datasets' save_to_disk"

_STATE = "state.json"
_INFO = "dataset_info.json"
_SPLITS = "dataset_dict.json"
# One of these in a folder tells that it is a saved dataset, or a folder of splits.
SAVED_DATASET_NAMES = {_STATE, _INFO, _SPLITS}


def is_saved_dataset(folder: str | os.PathLike[str]) -> bool:
    """Whether ``files_of_folder`` has something to say about this folder; a folder of splits included."""
    path = Path(folder)
    return any((path / name).is_file() for name in SAVED_DATASET_NAMES)


def files_of_folder(folder: str) -> list[str]:
    """The Arrow files of a saved dataset, in the dataset's own order.

    Raises:
        FormatError: another kind of folder, one with several splits, or a dataset that is not complete.
    """
    path = Path(folder)
    if (path / _SPLITS).is_file():
        splits = _read(path / _SPLITS).get("splits")
        names = splits if isinstance(splits, list) else []
        choices = ", ".join(os.path.join(folder, str(name)) for name in names)
        raise FormatError(f"{folder}: a dataset with several splits; name the one you mean: {choices}")
    if (state := path / _STATE).is_file():
        content = _read(state)
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
            f"{folder}: a folder, but not one made by save_to_disk; name the files in it by a glob, "
            f"such as {os.path.join(folder, '*.jsonl')!r}"
        )
    missing = [name for name in names if not (path / name).is_file()]
    if missing or not names:
        raise FormatError(f"{folder}: this saved dataset lacks its data: {', '.join(missing) or 'no .arrow files'}")
    return [os.path.join(folder, name) for name in names]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: expected a JSON object")
    return content


# ---- opened, and read in blocks ----

# For a look at the beginning.
_PEEK_NBYTES = 1 << 17


def find_object(path: str, etag: str | None = None) -> ObjectInfo:
    """The object at a path.

    Raises:
        FormatError: there is none, or it is not the one that ``etag`` names.
        StorageError: the store cannot be read.
    """
    store, key = open_store(path)
    info = store.head(key) if key else None
    if info is None:
        raise FormatError(f"{path}: no such object")
    if etag is not None and info.etag != etag:
        raise FormatError(f"{path}: was replaced since the run began (etag {etag}, now {info.etag}); start again")
    return info


def open_object(path: str, etag: str | None = None) -> ObjectFile:
    """An object to be read anywhere, each read a request; ``etag`` says which it must be, None whichever is there."""
    return ObjectFile(open_store(path)[0], find_object(path, etag))


class _BlockFile(io.RawIOBase):
    """Blocks of bytes as a file that is read once."""

    def __init__(self, blocks: Iterator[bytes | memoryview]) -> None:
        self._blocks, self._rest, self._position = blocks, memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._blocks, b""))
        view = memoryview(buffer).cast("B")
        taken = min(len(view), len(self._rest))
        view[:taken], self._rest = self._rest[:taken], self._rest[taken:]
        self._position += taken
        return taken


Compression = Literal["", "gzip", "zstd"]

_BLOCK_NBYTES = 1 << 20
# Compressed bytes fed at once; what one feed expands to is held in memory, so it is kept small.
_ZSTD_FEED_NBYTES = 1 << 15
UTF8_BOM = b"\xef\xbb\xbf"


def _compression_of(head: bytes) -> Compression:
    """How a file that starts with these bytes is compressed; names lie, magic numbers do not."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    # A zstd file may start with a skippable frame, as pzstd writes them.
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):
        return "zstd"
    return ""


def read_blocks(file: InputFile) -> Iterator[tuple[bytes, int]]:
    """Yields non-empty blocks of a file's text and the bytes read so far of the file as it is on disk.

    A byte order mark at the beginning is left out.

    Raises:
        FormatError: the file cannot be read, is no longer the object that it was, or compressed data is broken or
            ends early.
    """
    with _open_stream(file.path, file.etag) as stream:
        yield from _without_mark(_blocks_of(file.path, stream, file.compression))


def stream_blocks(stream: BufferedReader, name: str) -> Iterator[tuple[bytes, int]]:
    """As ``read_blocks``, of what comes in a pipe, as it comes.

    Raises:
        FormatError: it is compressed, or cannot be read.
    """

    def arriving() -> Iterator[tuple[bytes, int]]:
        position = 0
        try:
            while block := stream.read1(_BLOCK_NBYTES):
                if not position and (compression := _compression_of(block)):
                    raise FormatError(f"{name}: {compression} data; unpack it on the way: {compression} -dc FILE | ...")
                position += len(block)
                yield block, position
        except OSError as error:
            raise FormatError(f"{name}: cannot be read: {error.strerror or error}") from None

    yield from _without_mark(arriving())


@contextmanager
def _open_stream(path: str, etag: str | None) -> Iterator[BinaryIO]:
    """A file to be read once, from front to back; ``tell`` is where reading has come to."""
    if not is_remote(path):
        try:
            with open_regular(path) as file:
                yield file
        except OSError as error:
            raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
        return
    blocks = read_ahead(open_store(path)[0], find_object(path, etag))
    try:
        yield cast(BinaryIO, _BlockFile(blocks))
    finally:
        blocks.close()


def _without_mark(blocks: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    head, position = b"", 0
    for block, at in blocks:
        position = at
        head += block
        if len(head) >= len(UTF8_BOM):
            break
    if head := head.removeprefix(UTF8_BOM):
        yield head, position
    yield from blocks


def _blocks_of(path: str, file: BinaryIO, compression: Compression) -> Iterator[tuple[bytes, int]]:
    try:
        if compression == "zstd":
            yield from _zstd_blocks(path, file)
            return
        source = gzip.GzipFile(fileobj=file) if compression == "gzip" else file
        while block := source.read(_BLOCK_NBYTES):
            yield block, file.tell()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(f"{path}: broken gzip data: {error}; make or download the file again") from None


def _zstd_blocks(path: str, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    try:
        import zstandard
    except ImportError:
        raise SFTIndexError(f"{path}: reading .zst needs zstandard: pip install 'megatron-sft-idx[zstd]'") from None
    # stream_reader() takes a file that ends inside a frame for a complete one; a decompressobj says.
    frame = None
    try:
        while data := file.read(_ZSTD_FEED_NBYTES):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                if block := frame.decompress(data):
                    yield block, file.tell()
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise FormatError(f"{path}: broken zstd data: {error}; make or download the file again") from None
    if frame is not None:
        raise FormatError(f"{path}: broken zstd data: ends inside a frame; make or download the file again")


# ---- JSON ----

_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
# The shortest integers outside 64 bits have 19 digits (below -2**63).
_LONG_NUMBER = b"0" * 19


def parse_json(raw: bytes) -> Any:
    """Parses one document; of repeated keys the last counts, as JSON libraries do.

    Integers are kept whatever their size (orjson alone would round those past 64 bits to floats). Floats
    become doubles: ``1.10`` is later written as ``1.1``.

    Raises:
        ValueError: with the reason, for anything RFC 8259 does not allow (NaN, lone surrogates, invalid
            UTF-8), numbers past a double's range and nesting deeper than the parser goes.
    """
    try:
        value = orjson.loads(raw)
        if _LONG_NUMBER in raw.translate(_DIGITS_TO_ZERO):
            value = json.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(_reason(raw, error)) from None
    except (RecursionError, ValueError) as error:
        # Only from json: nesting that orjson still takes, integers of thousands of digits.
        raise ValueError(f"cannot be parsed: {error}") from None
    return value


def _reason(raw: bytes, error: json.JSONDecodeError) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError as bad:
        return f"not valid UTF-8: {bad.reason} (byte {bad.start + 1} of the row); convert the file to UTF-8"
    reason = f"not valid JSON: {error.msg} (character {error.pos + 1} of the row)"
    if any(word in raw for word in (b"NaN", b"Infinity")):
        reason += "; NaN and Infinity are not JSON, write null"
    return reason
