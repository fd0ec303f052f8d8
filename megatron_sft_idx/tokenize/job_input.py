"""The input of a job as local files: the user's paths, data passed by a program, a pipe, names of the hub.

Rows, data sets and tables passed by a program, and rows from a pipe, are written to files next to the output, which are
removed at the end of the job. The pipeline reads its input more than once, in many processes.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import io
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, runtime_checkable

from megatron_sft_idx.arguments import require_type
from megatron_sft_idx.chat.inputs import named_by
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.chat.values import MAX_DEPTH, refuse_deep
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError, brief
from megatron_sft_idx.lines import unescaped
from megatron_sft_idx.packs.source_names import PASSED_FOLDER
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.publish import Place, places_at
from megatron_sft_idx.tokenize.encoding import EncodingOptions

StrPath: TypeAlias = str | os.PathLike[str]


@runtime_checkable
class ArrowStream(Protocol):
    """A table of pyarrow, pandas, polars, DuckDB or others, by Arrow's PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The record batches."""


# A file or glob; rows; a table, which is a Dataset of Hugging Face or has Arrow's stream interface; tables by name; or
# a list that mixes these.
Rows: TypeAlias = StrPath | Iterable[Any] | ArrowStream

# Maximum length of a data set's name in bytes: file systems allow 255, and working names are longer.
_MAX_NAME_NBYTES = 200
# The role of the input files in messages.
INPUT = "the input"


def reads_of(inputs: Iterable[str], encoding: EncodingOptions) -> list[Place]:
    """Return the local files that a job reads. FormatError: one of its inputs does not exist."""
    local = [pattern for pattern in inputs if pattern != "-" and not is_remote(pattern)]
    template = [Place(encoding.template_name, "the chat template")] if encoding.chat_template is not None else []
    return [
        *(place for pattern in local for path in named_by(pattern) for place in places_at(path, INPUT)),
        *places_at(encoding.tokenizer, "the tokenizer"),
        *(places_at(encoding.processor, "the processor") if encoding.processor else ()),
        *template,
    ]


class _Passed(NamedTuple):
    """Rows or a table passed by a program, or the pipe.

    Attributes:
        file: the name of their file, as stored in the column ``source``.
        name: their name in messages.
        content: the rows or the table; None for the pipe.
    """

    file: str
    name: str
    content: Any


@contextlib.contextmanager
def inputs_of(rows: Rows, prefix: str, *, media: bool = False) -> Iterator[tuple[list[str], Callable[[str], str]]]:
    """Provide the paths of the input.

    Other inputs are written to files next to ``prefix``, which are removed at the end.

    The second value is a function that replaces the name of a temporary file in a message by the name of the given
    input.

    Args:
        rows: see ``preprocess``; a single ``-`` stands for standard input.
        prefix: prefix of the output, a local path; all nodes of a cluster can access its folder.
        media: whether rows may contain images and audio: bytes, and pillow images.

    Raises:
        FormatError: an entry is neither a path nor rows nor a table, or two have the same name.
        SequenceError: a row cannot be written as JSON.
    """
    entries = _entries_of(rows)
    passed = [entry for entry in entries if isinstance(entry, _Passed)]
    if not passed:
        yield [entry for entry in entries if isinstance(entry, str)], str
        return
    counts = Counter(entry.file for entry in passed)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise FormatError(f"inputs: two data sets have the name {twice[0]!r}; give each its own name")
    folder = os.path.dirname(os.path.abspath(prefix))
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=os.path.basename(prefix) + PASSED_FOLDER, dir=folder) as temporary:
        paths, names = [], dict[str, str]()
        for entry in entries:
            if isinstance(entry, str):
                paths.append(entry)
                continue
            path = os.path.join(temporary, entry.file)
            _write(path, entry, _to_json_with_media if media else _to_json)
            paths.append(path)
            names[path] = entry.name

        def as_given(message: str) -> str:
            for path, name in names.items():
                message = message.replace(path, name)
            return message

        try:
            yield paths, as_given
        except SequenceError as error:
            raise SequenceError(as_given(error.source), error.position, as_given(error.reason)) from None
        except FormatError as error:
            raise FormatError(as_given(str(error))) if type(error) is FormatError else error from None


def _entries_of(rows: Rows) -> list[str | _Passed]:
    """Return the inputs one by one: paths, and data to write to files."""
    if isinstance(rows, (str, os.PathLike)) or _is_table(rows):
        return _entries_of([rows])
    if isinstance(rows, Mapping):
        return [_named(name, each) for name, each in rows.items()] if _is_named(rows) else [_refused(rows)]
    # The order of a set differs between two runs.
    if not isinstance(rows, Iterable) or isinstance(rows, set | frozenset) or getattr(rows, "shape", None) == ():
        return [_refused(rows)]
    entries = iter(rows)
    head = list(itertools.islice(entries, 1))
    if head and not _is_input(head[0]):
        return [_Passed("rows.jsonl", "rows", itertools.chain(head, entries))]
    found: list[str | _Passed] = []
    unnamed = itertools.count()
    for entry in itertools.chain(head, entries):
        if isinstance(entry, (str, os.PathLike)):
            require_type("inputs", entry, str | os.PathLike)
            found.append(os.fspath(entry))
        elif isinstance(entry, Mapping) and _is_named(entry):
            found += [_named(name, each) for name, each in entry.items()]
        elif _is_input(entry):
            name = f"dataset-{next(unnamed)}"
            found.append(_Passed(name, name, entry))
        else:
            raise FormatError(
                f"inputs: expected paths, data sets, tables or lists of rows, found {type(entry).__name__}"
            )
    if "-" not in found:
        return found
    if len(found) > 1:
        raise FormatError("--input - reads all input from the pipe; remove the other inputs")
    if sys.stdin is None:
        raise FormatError("standard input: closed; pipe the rows to the command, or pass a file with --input")
    return [_Passed("stdin", "standard input", None)]


def _is_table(value: Any) -> bool:
    """Return whether a value is a Dataset or has Arrow's stream interface. A DatasetDict of splits is not a table."""
    return not isinstance(value, Mapping) and (hasattr(value, "save_to_disk") or isinstance(value, ArrowStream))


def _is_input(value: Any) -> bool:
    """Return whether an entry of a list is an input, and not a row or anything else."""
    if isinstance(value, (str, os.PathLike)) or _is_table(value):
        return True
    if isinstance(value, Mapping):
        return _is_named(value)
    # A list may also be a conversation without the object around it. Its messages are rejected when they are read.
    return isinstance(value, Iterable) and not hasattr(value, "shape") and not isinstance(value, bytes)


def _is_named(value: Mapping[Any, Any]) -> bool:
    """Return whether a dict has data sets by name. A row's values are lists, texts and numbers."""

    def is_data(each: Any) -> bool:
        return _is_table(each) or (
            isinstance(each, Iterable) and not isinstance(each, (str, bytes, Sequence, Set, Mapping, os.PathLike))
        )

    return (
        bool(value)
        and not hasattr(value, "save_to_disk")
        and not any(hasattr(each, "shape") and not _is_table(each) for each in value.values())
        and all(map(is_data, value.values()))
    )


def _named(name: Any, content: Any) -> _Passed:
    is_name = isinstance(name, str) and name == os.path.basename(name) and name.isprintable() and name.strip(". ")
    if not is_name or len(os.fsencode(name)) > _MAX_NAME_NBYTES:
        raise FormatError(f"inputs: expected a name for a data set, a string without /, found {brief(name)}")
    return _Passed(name, name, content)


def _refused(rows: Any) -> NoReturn:
    raise FormatError(
        "inputs: expected paths, an iterable of rows, a table, one split of a dataset, or a list of these, found"
        f" {type(rows).__name__}; put a single row into a list"
    )


def _write(path: str, passed: _Passed, to_json: Callable[[Any], Any]) -> None:
    """Write rows or a table to a file, with limited memory.

    ``to_json`` converts a value that JSON cannot represent to one that it can.
    """
    content = passed.content
    if content is None:
        with open(path, "xb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
    elif hasattr(content, "save_to_disk"):
        if isinstance(content, Sized) and not len(content):  # datasets cannot always save an empty data set
            raise FormatError(f"{passed.name}: the dataset has no rows; leave it out, or pass another one")
        content.save_to_disk(folder := path + ".saved", num_shards=1)
        (data,) = glob.glob(os.path.join(glob.escape(folder), "*.arrow"))
        os.rename(data, path)
        shutil.rmtree(folder)
    elif isinstance(content, ArrowStream):
        _write_table(path, content, passed.name)
    else:
        _write_rows(path, content, passed.name, to_json)


def _write_table(path: str, rows: ArrowStream, name: str) -> None:
    try:
        import pyarrow as pa
    except ImportError:
        extra = "pip install 'megatron-sft-idx[parquet]'"
        raise SFTIndexError(f"{name}: reading a {type(rows).__name__} needs pyarrow: {extra}") from None
    try:
        with pa.RecordBatchReader.from_stream(rows) as batches, pa.ipc.new_stream(path, batches.schema) as file:
            for batch in batches:
                file.write_batch(batch)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"{name}: this {type(rows).__name__} cannot be read as an Arrow table: {reason}") from None


# A row that is rejected because of its depth.
_TOO_DEEP_ROW = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1) + "\n"


def _write_rows(path: str, rows: Iterable[Any], name: str, to_json: Callable[[Any], Any]) -> None:
    """Write rows as JSON lines. Arrays become lists. NaN is an error, because JSON would turn a weight into null."""
    with open(path, "x", encoding="utf-8", newline="\n") as file:
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise SequenceError(name, number, f"expected a dict, found {type(row).__name__}")
            try:
                refuse_deep(row)
            except RowError:
                file.write(_TOO_DEEP_ROW)  # json cannot write every depth; a bad row may be skipped
                continue
            try:
                line = _json_of(dict(row), to_json)
            except (TypeError, ValueError, RecursionError) as error:
                field = next((key for key, value in row.items() if not _is_json(value, to_json)), "a key")
                reason = f"{field} cannot be written as JSON: {error}; leave it out, or convert it to a string"
                raise SequenceError(name, number, reason) from None
            file.write(line + "\n")


def _json_of(value: Any, to_json: Callable[[Any], Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=to_json)


def _is_json(value: Any, to_json: Callable[[Any], Any]) -> bool:
    try:
        _json_of(value, to_json)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _to_json(value: Any) -> Any:
    """A list, number or dict for a numpy array or number, a tensor, or a mapping."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def _to_json_with_media(value: Any) -> Any:
    """Do the same as ``_to_json``; also convert bytes, or a pillow image, to an object for its file.

    Pillow does not keep the file from which an image was opened, so images become PNG files.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": "data:;base64," + base64.b64encode(value).decode()}
    if type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "save"):
        stream = io.BytesIO()
        value.save(stream, "PNG")
        return _to_json_with_media(stream.getvalue())
    return _to_json(value)


# ---- from the hub ----

# OWNER/NAME or OWNER/NAME@REVISION, for data followed by / and a glob of files.
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/(.+))?")
# Files of tokenizers and of their templates, without model weights.
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "additional_chat_templates/*")


def downloaded(given: dict[str, Any], rows: Rows) -> Rows:
    """Download names of the Hugging Face hub that are not local paths into its cache: model files, and inputs.

    Args:
        given: arguments of ``preprocess`` by name; tokenizer and processor are replaced by their local paths.
        rows: see ``preprocess``.

    Returns:
        The rows; names of the hub are replaced by local paths.

    Raises:
        SFTIndexError: huggingface_hub is not installed, or the download failed.
    """
    for option in ("tokenizer", "processor"):
        value = given.get(option)
        if isinstance(value, str) and (name := _hub_name(value)) is not None and name[3] is None:
            given[option] = _download(name, "model", _TOKENIZER_FILES)
    entries = [rows] if isinstance(rows, (str, os.PathLike)) else rows
    if not isinstance(entries, (list, tuple)):
        return rows
    paths: list[Any] = []
    for entry in entries:
        path = os.fspath(entry) if isinstance(entry, (str, os.PathLike)) else ""
        if not path:
            paths.append(entry)
        elif (name := _hub_name(path)) is None:
            paths.append(path)
        elif name[3] is None:
            raise FormatError(
                f"{path}: choose files of this dataset, because some splits may not be meant for training:"
                f" {path}/data/train-*.parquet; the files are listed at"
                f" https://huggingface.co/datasets/{name[1]}/tree/main"
            )
        else:
            paths.append(os.path.join(_download(name, "dataset", [name[3]]), name[3]))
    return paths


def _hub_name(text: str) -> re.Match[str] | None:
    """Return repository, revision and files in a name of the hub; None for paths and URLs."""
    is_path = is_remote(text) or os.path.lexists(text) or glob.glob(text, recursive=True) or text.startswith((".", "/"))
    return None if is_path else _HUB_NAME.fullmatch(text)


def _download(hub_name: re.Match[str], kind: str, files: Sequence[str]) -> str:
    """Download these files of a repository, and return the path of their folder."""
    name, repository, revision, _ = hub_name.group(0, 1, 2, 3)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise SFTIndexError(
            f"--download {name}: needs huggingface_hub; install it with: pip install huggingface_hub"
        ) from None
    try:
        with contextlib.redirect_stderr(unescaped(sys.stderr)):  # its bars move the cursor
            return str(snapshot_download(repository, repo_type=kind, revision=revision, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SFTIndexError(f"--download {name}: {reason}") from None
