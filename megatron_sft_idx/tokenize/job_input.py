"""The input of a job as local files: what a user names, rows that a program passes, a pipe, names of the hub.

Rows that a program passes, or that come through a pipe, are written to a file beside the output, which is removed when
the job ends: the pipeline reads its input more than once, in many processes.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, TypeAlias, runtime_checkable

from megatron_sft_idx.arguments import require_type
from megatron_sft_idx.chat.inputs import named_by
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.chat.values import MAX_DEPTH, refuse_deep
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.lines import unescaped
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.publish import Place, places_at
from megatron_sft_idx.tokenize.encoding import EncodingOptions

StrPath: TypeAlias = str | os.PathLike[str]


@runtime_checkable
class ArrowStream(Protocol):
    """A table of pyarrow, pandas, polars, DuckDB or others, by Arrow's PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The record batches."""


# Paths, rows, or a table: a Dataset of Hugging Face's, or what has Arrow's stream interface.
Rows: TypeAlias = StrPath | Iterable[StrPath] | Iterable[Mapping[str, Any]] | ArrowStream

# In the name of the folder of rows that a program passes, or that come through a pipe.
ROWS_FOLDER = ".rows-"
# The role of the files of the input, in messages.
INPUT = "the input"


def reads_of(inputs: Iterable[str], encoding: EncodingOptions) -> list[Place]:
    """The local files that a job reads; FormatError where one of its inputs is not there."""
    local = [pattern for pattern in inputs if pattern != "-" and not is_remote(pattern)]
    template = [Place(encoding.template_name, "the chat template")] if encoding.chat_template is not None else []
    return [
        *(place for pattern in local for path in named_by(pattern) for place in places_at(path, INPUT)),
        *places_at(encoding.tokenizer, "the tokenizer"),
        *template,
    ]


@contextlib.contextmanager
def inputs_of(rows: Rows, prefix: str) -> Iterator[tuple[list[str], Callable[[str], str]]]:
    """Paths of the input. Rows that are no paths are written beside ``prefix``, and removed when the context ends.

    The second value is a function that has a message name what was given, instead of a file that is gone when the
    message is read.

    Args:
        rows: of ``preprocess``; ``-`` alone stands for standard input.
        prefix: of the output, a local path; all nodes of a cluster see its folder.

    Raises:
        FormatError: ``rows`` are neither paths nor rows.
        SequenceError: a row cannot be written as JSON.
    """
    entries = _entries_of(rows)
    if (
        hasattr(rows, "save_to_disk") and isinstance(rows, Sized) and not len(rows)
    ):  # which datasets itself cannot always save
        raise FormatError("rows: a dataset without rows; name one that has some")
    head = list(itertools.islice(entries or (), 1))
    if entries is not None and all(isinstance(entry, (str, os.PathLike)) for entry in head):
        paths = []
        for entry in [*head, *entries]:
            if not isinstance(entry, (str, os.PathLike)):
                raise FormatError(
                    f"rows: a {type(entry).__name__} among paths; name the files alone, or pass rows alone"
                )
            require_type("inputs", entry, str | os.PathLike)
            paths.append(os.fspath(entry))
        if "-" not in paths:
            yield paths, str
            return
        if len(paths) > 1:
            raise FormatError("--input - takes everything from the pipe: name it alone")
        if sys.stdin is None:
            raise FormatError("standard input: closed; pipe the rows to the command, or name a file")
    folder = os.path.dirname(os.path.abspath(prefix))
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=os.path.basename(prefix) + ROWS_FOLDER, dir=folder) as temporary:
        name = "rows"
        if hasattr(rows, "save_to_disk"):
            rows.save_to_disk(path := os.path.join(temporary, "dataset"))
        elif isinstance(rows, ArrowStream):
            _write_table(path := os.path.join(temporary, "rows.arrow"), rows)
        elif isinstance(head[0], (str, os.PathLike)):  # the pipe, as other paths are through
            name = "standard input"
            with open(path := os.path.join(temporary, "stdin"), "xb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        else:
            _write_rows(path := os.path.join(temporary, "rows.jsonl"), itertools.chain(head, entries or ()))
        try:
            yield [path], lambda message: message.replace(path, name)
        except SequenceError as error:
            source, reason = (text.replace(path, name) for text in (error.source, error.reason))
            raise SequenceError(source, error.position, reason) from None


def _entries_of(rows: Rows) -> Iterator[Any] | None:
    """The paths or rows one by one; None for a table as a whole."""
    is_table = hasattr(rows, "save_to_disk") or isinstance(rows, ArrowStream)
    is_number = getattr(rows, "shape", None) == ()
    if isinstance(rows, Mapping) or is_number or not (is_table or isinstance(rows, (str, os.PathLike, Iterable))):
        raise FormatError(
            f"rows: a {type(rows).__name__}, expected paths, an iterable of rows, a table, or one split of a dataset;"
            " put a single row in a list"
        )
    if is_table:
        return None
    return iter([rows] if isinstance(rows, (str, os.PathLike)) else rows)  # type: ignore[arg-type]


def _write_table(path: str, rows: ArrowStream) -> None:
    try:
        import pyarrow as pa
    except ImportError:
        extra = "pip install 'megatron-sft-idx[parquet]'"
        raise SFTIndexError(f"rows: reading a {type(rows).__name__} needs pyarrow: {extra}") from None
    try:
        with pa.RecordBatchReader.from_stream(rows) as batches, pa.ipc.new_stream(path, batches.schema) as file:
            for batch in batches:
                file.write_batch(batch)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"rows: this {type(rows).__name__} cannot be read as an Arrow table: {reason}") from None


# A row that is refused for its depth.
_TOO_DEEP_ROW = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1) + "\n"


def _write_rows(path: str, rows: Iterable[Any]) -> None:
    """Write rows as JSON lines. Arrays become lists; NaN is an error, since JSON could only have null for a weight."""
    with open(path, "x", encoding="utf-8", newline="\n") as file:
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise SequenceError("rows", number, f"is a {type(row).__name__}, expected a dict")
            try:
                refuse_deep(row)
            except RowError:
                file.write(_TOO_DEEP_ROW)  # json cannot write every depth; a bad row may be skipped
                continue
            try:
                line = _json_of(dict(row))
            except (TypeError, ValueError, RecursionError) as error:
                field = next((key for key, value in row.items() if not _is_json(value)), "a key")
                reason = f"{field} cannot be written as JSON: {error}; leave it out, or make it text"
                raise SequenceError("rows", number, reason) from None
            file.write(line + "\n")


def _json_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_to_json)


def _is_json(value: Any) -> bool:
    try:
        _json_of(value)
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


# ---- from the hub ----

# OWNER/NAME or OWNER/NAME@REVISION, for data followed by / and a glob of files.
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/(.+))?")
# Files of tokenizers and of their templates; none with a model's weights.
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "additional_chat_templates/*")


def downloaded(given: dict[str, Any], rows: Rows) -> Rows:
    """Download a tokenizer and inputs that have names of the Hugging Face hub, and no local path, into its cache.

    Args:
        given: arguments of ``preprocess`` by name; the tokenizer is replaced by its local path.
        rows: of ``preprocess``.

    Returns:
        The rows; names of the hub are replaced by local paths.

    Raises:
        SFTIndexError: huggingface_hub is not installed, or the download failed.
    """
    tokenizer = given["tokenizer"]
    if isinstance(tokenizer, str) and (name := _hub_name(tokenizer)) is not None and name[3] is None:
        given["tokenizer"] = _download(name, "model", _TOKENIZER_FILES)
    entries = [rows] if isinstance(rows, (str, os.PathLike)) else rows
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, (str, os.PathLike)) for entry in entries):
        return rows
    paths = []
    for path in map(os.fspath, entries):
        if (name := _hub_name(path)) is None:
            paths.append(path)
        elif name[3] is None:
            raise FormatError(
                f"{path}: say which of its files, for a split may not be trained on: {path}/data/train-*.parquet; they"
                f" are listed at https://huggingface.co/datasets/{name[1]}/tree/main"
            )
        else:
            paths.append(os.path.join(_download(name, "dataset", [name[3]]), name[3]))
    return paths


def _hub_name(text: str) -> re.Match[str] | None:
    """Repository, revision and files that a name of the hub consists of; None for paths and URLs."""
    is_path = is_remote(text) or os.path.lexists(text) or glob.glob(text, recursive=True) or text.startswith((".", "/"))
    return None if is_path else _HUB_NAME.fullmatch(text)


def _download(hub_name: re.Match[str], kind: str, files: Sequence[str]) -> str:
    """Path of the folder that has these files of a repository, once they are downloaded."""
    name, repository, revision, _ = hub_name.group(0, 1, 2, 3)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise SFTIndexError(f"--download {name}: needs huggingface_hub: pip install huggingface_hub") from None
    try:
        with contextlib.redirect_stderr(unescaped(sys.stderr)):  # its bars move the cursor
            return str(snapshot_download(repository, repo_type=kind, revision=revision, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SFTIndexError(f"--download {name}: {reason}") from None
