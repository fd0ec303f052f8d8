"""``preprocess``, as programs and the command call it: its options, its input, and where its shards go.

Rows that a program passes, or that come through a pipe, are written to a file beside the output, which is removed when
the job ends: the pipeline reads its input more than once, in many processes.
"""

from __future__ import annotations

import glob
import io
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_type_hints

from megatron_sft_idx.chat.chat_rows import MaskAlignment, RowKind, RowOptions
from megatron_sft_idx.chat.inputs import named_by
from megatron_sft_idx.chat.types import MaskOptions, PartialMarkers, ReasoningTurns, TrainOn
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError, check_option
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.packing import Effort
from megatron_sft_idx.packs.buckets import STAGING, StagedOutput
from megatron_sft_idx.packs.transfer import shard_nbytes
from megatron_sft_idx.shard.publication import places_of
from megatron_sft_idx.storage import is_remote, open_regular
from megatron_sft_idx.storage.progress import show_progress
from megatron_sft_idx.storage.publish import Place, check_lock, places_at, require_apart, require_space
from megatron_sft_idx.tokenize.begin import PreprocessOptions, corpus_prefix
from megatron_sft_idx.tokenize.encoding import EncodingOptions
from megatron_sft_idx.tokenize.gather import output_prefixes
from megatron_sft_idx.tokenize.local import available_cpus
from megatron_sft_idx.tokenize.pipeline import make_shards
from megatron_sft_idx.tokenize.plan import Overlong, PackingMethod, PackOptions
from megatron_sft_idx.tokenize.report import Summary, check_summary
from megatron_sft_idx.tokenize.selection import Selection

Options = TypeVar("Options")
StrPath: TypeAlias = str | os.PathLike[str]
# Paths, rows, or a Dataset of Hugging Face's, which is an iterable of rows with a way of its own to become files.
Rows: TypeAlias = StrPath | Iterable[StrPath] | Iterable[Mapping[str, Any]]

# Options that are whole numbers and may be 0; all others must be 1 or more.
FROM_ZERO = ("workers", "seed", "log_interval")
# By the hint of an option: the types that its value may have, and what they are called.
_EXPECTED: dict[Any, tuple[Any, str]] = {
    str: (str | os.PathLike, "a path"),
    str | None: (str | None, "a string"),
    StrPath: (str | os.PathLike, "a path; an object that was loaded is saved by its save_pretrained(FOLDER)"),
    StrPath | None: (str | os.PathLike | None, "a path"),
    Sequence[str]: (list | tuple, "a list of strings"),
    Mapping[str, Any] | None: (Mapping | None, "a dict"),
}
_INPUT = "the input"
# Input bytes for each byte of output, at most: of rows that consist almost entirely of fields that are not read.
_MAX_INPUT_PER_OUTPUT = 256


def preprocess(  # noqa: D417 (--help of the command says what each option is for)
    rows: Rows,
    *,
    tokenizer: StrPath,
    out: StrPath,
    seq_length: int,
    chat_template: StrPath | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    template_date: str | None = None,
    train_on: TrainOn = "assistant",
    turns: ReasoningTurns = "error",
    no_train_on_thinking: bool = False,
    no_train_on_tool_calls: bool = False,
    allow_control_tokens: bool = False,
    partial_markers: PartialMarkers = "error",
    straddling: Literal["include", "exclude"] = "include",
    span_by_span: bool = False,
    row_kind: RowKind = "auto",
    messages_key: str | None = None,
    mask_alignment: MaskAlignment = "token",
    on_bad_row: Literal["error", "skip"] = "error",
    append_eod: bool = False,
    packing: PackingMethod = "auto",
    packing_effort: Effort = "normal",
    overlong: Overlong = "error",
    sequence_multiple: int = 1,
    max_sequences_per_pack: int | None = None,
    drop_untrained: bool = False,
    seed: int = 0,
    max_rows: int | None = None,
    sample: float = 1.0,
    dedup: Literal["none", "exact"] = "none",
    valid_fraction: float = 0.0,
    input_weight: Sequence[str] = (),
    shuffle: bool = False,
    workers: int | None = None,
    engine: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    output_shards: int = 1,
    staging: str = STAGING,
    keep_corpus: bool = False,
    source: bool = True,
    source_weight: Sequence[str] = (),
    overwrite: bool = False,
    resume: bool = False,
    summary: StrPath | None = None,
    log_interval: int = 10_000,
    download: bool = False,
) -> Summary:
    """Tokenise chats, mark the tokens to train on by the chat template, pack, and write a shard.

    ``megatron-sft-idx preprocess`` writes the same bytes. All arguments but the first are its options, with ``_`` for
    ``-`` and ``out`` for ``--output-prefix``; its ``--help`` says what each is for.

    Args:
        rows: files, globs and ``save_to_disk`` folders; a ``datasets.Dataset``; or any iterable of rows.

    Returns:
        Counts of what was made; its ``str`` is what the command prints.

    Raises:
        SFTIndexError: an input, a row or an option that cannot be used, or files at ``out`` that may not be replaced.
        OSError: of the file system.
    """
    given = dict(locals())
    rows = given.pop("rows")
    rows = downloaded(given, rows) if download else rows
    return run_job(rows, preprocess_options(given), staging=staging, summary=summary)


def preprocess_options(given: Mapping[str, Any]) -> PreprocessOptions:
    """The options of a job, from arguments of ``preprocess`` by name; ``inputs`` is empty.

    Raises:
        FormatError: a value that is none of the choices, or options that do not go together.
    """
    for name, hint in get_type_hints(preprocess).items():
        if name in given:
            _require_choice(name, given[name], hint)
    prefix, engine = os.fspath(given["out"]), given["engine"]
    if given["resume"] and given["overwrite"]:
        raise FormatError("--resume goes on with what is there, --overwrite starts anew: choose one")
    if engine == "local" and given["ray_address"] is not None:
        raise FormatError("--ray-address goes with --engine ray")
    if engine == "ray" and given["workers"] == 0:
        raise FormatError("--engine ray needs at least one task at once: --workers 1")
    if engine == "ray" and is_remote(prefix):
        raise FormatError(
            "--engine ray writes to a file system that all nodes share; name a prefix there, and send the shards"
            " afterwards: megatron-sft-idx copy"
        )
    encoding, packing = encoding_options(given), packing_options(given)
    if (of_rows := packing.selection is not None and packing.selection.of_rows) and given["keep_corpus"]:
        raise FormatError(
            "--keep-corpus keeps all that is tokenised, for pack, which knows no rows: it does not go with --max-rows,"
            " --sample, --dedup, --valid-fraction, --input-weight or --shuffle"
        )
    return _options(
        PreprocessOptions,
        given,
        inputs=(),
        prefix=prefix,
        encoding=replace(encoding, content=of_rows),
        packing=packing,
        source_weights=tuple(given["source_weight"]),
        input_weights=tuple(given["input_weight"]),
    )


def _options(kind: Callable[..., Options], given: Mapping[str, Any], /, **values: Any) -> Options:
    """A dataclass of options, made of ``values`` and, for its other fields, of those that ``given`` has by name."""
    same = {each.name: given[each.name] for each in fields(kind) if each.name in given}  # type: ignore[arg-type]
    return kind(**same | values)


def _require_choice(name: str, value: Any, hint: Any) -> None:
    """FormatError unless an argument has the type, choice or range of its hint; for the command argparse checks it."""
    kinds, expected = _EXPECTED.get(hint, (object, ""))
    if not isinstance(value, kinds):
        shown = f"a {type(value).__name__}" if hint is StrPath else repr(value)
        raise FormatError(f"{name}: {shown}, expected {expected}")
    if hint == Sequence[str] and (wrong := [each for each in value if not isinstance(each, str)]):
        raise FormatError(f"{name}: {wrong[0]!r}, expected a string")
    check_option(name, value, hint, lowest=0 if name in FROM_ZERO else 1)


def encoding_options(given: Mapping[str, Any]) -> EncodingOptions:
    """How rows become sequences, from arguments of ``preprocess``; FormatError where the template cannot be read."""
    path, template = given["chat_template"], None
    if path is not None:
        try:
            with open_regular(os.fspath(path)) as file:
                template = io.TextIOWrapper(file, encoding="utf-8").read()
        except (OSError, UnicodeDecodeError, FormatError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise FormatError(f"--chat-template {path}: {why}") from None
    return _options(
        EncodingOptions,
        given,
        tokenizer=os.fspath(given["tokenizer"]),
        chat_template=template,
        template_name=os.fspath(path or "chat template"),
        template_kwargs=given["chat_template_kwargs"] or {},
        masks=_options(
            MaskOptions,
            given,
            train_on_thinking=not given["no_train_on_thinking"],
            train_on_tool_calls=not given["no_train_on_tool_calls"],
        ),
        rows=_options(RowOptions, given, kind=given["row_kind"], require_assistant=given["train_on"] != "all"),
    )


def packing_options(given: Mapping[str, Any]) -> PackOptions:
    """How sequences become packs, from arguments of ``preprocess``; FormatError for a share that is not 0 to 1."""
    selection = _options(Selection, given, weights=[1.0] * bool(given.get("input_weight")))
    return _options(
        PackOptions,
        given,
        capacity=given["seq_length"],
        method=given["packing"],
        effort=given["packing_effort"],
        selection=None if selection == Selection() else selection,
    )


def run_job(
    rows: Rows, options: PreprocessOptions, *, staging: str = STAGING, summary: StrPath | None = None
) -> Summary:
    """Make the shards, upload them where their prefix is remote, and write the summary.

    Args:
        rows: of ``preprocess``.
        options: of the job; ``inputs`` is not read.
        staging: local folder in which shards for an object store are built.
        summary: path of a JSON file to be written.

    Raises:
        SFTIndexError, OSError: as of ``preprocess``.
    """
    resume, replaces = options.resume, options.overwrite or options.resume
    path = None if summary is None else os.fspath(summary)
    if path is not None:
        check_summary(path, overwrite=replaces)
    corpus = corpus_prefix("")
    output = Destination(
        options.prefix,
        shards=options.output_shards,
        valid=options.has_valid,
        beside=[corpus] if options.keep_corpus else [],
        staging=staging,
        overwrite=options.overwrite,
        summary=path,
    )
    with inputs_of(rows, output.local) as (inputs, as_given):
        reads = reads_of(inputs, options.encoding)
        sizes = [os.path.getsize(place.path) for place in reads if place.role == _INPUT and os.path.isfile(place.path)]
        nbytes = sum(sizes) // _MAX_INPUT_PER_OUTPUT
        output.prepare(reads, beside=[corpus], columns=options.encoding.columns, resume=resume, nbytes=nbytes)
        report = make_shards(
            replace(options, inputs=inputs, prefix=output.local),
            log=lambda line: print(as_given(line), file=sys.stderr, flush=True),
        )
    output.publish()
    if report.corpus is not None:
        report.corpus.bad_rows = list(map(as_given, report.corpus.bad_rows))
    report.prefix, report.options = options.prefix, dict(_effective(replace(options, inputs=inputs)))
    if path is not None:
        report.write(path, overwrite=replaces)
    return report


def _effective(options: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of all options, also nested ones; without the template's text."""
    for name in (each.name for each in fields(options)):
        value = getattr(options, name)
        if is_dataclass(value):
            yield from _effective(value)
        elif name == "workers" and value is None:
            yield name, available_cpus()
        elif name != "chat_template":
            yield name, dict(value) if isinstance(value, Mapping) else value


# ---- where shards go ----


class Destination:
    """The prefix that a verb writes to. Shards for a remote prefix are built in a local folder and uploaded.

    Args:
        prefix: as the user gave it.
        shards: how many shards are written.
        valid: whether there is one to validate with too.
        beside: other shards that are uploaded to a remote prefix too, by what is added to it.
        staging: the local folder for a remote prefix.
        overwrite: replace shards that are there.
        summary: path of a JSON file that is written too.

    Attributes:
        local: the local prefix to build shards at.
    """

    def __init__(
        self,
        prefix: str,
        *,
        shards: int = 1,
        valid: bool = False,
        beside: Sequence[str] = (),
        staging: str = STAGING,
        overwrite: bool = False,
        summary: str | None = None,
    ) -> None:
        self.prefix, self._summary, self._beside = prefix, summary, beside
        self._suffixes = output_prefixes("", shards, valid=valid)
        self._staged = StagedOutput(prefix, staging, overwrite=overwrite) if is_remote(prefix) else None
        self.local = self._staged.local if self._staged else prefix
        # A corpus that is there, where shards are built, is used again: only its remote prefix must be free.
        remote = [self._staged.prefix + end for end in beside] if self._staged else []
        self._staged_beside = [StagedOutput(each, staging, overwrite=overwrite) for each in remote]

    def prepare(
        self,
        reads: Iterable[Place],
        *,
        beside: Sequence[str] = (),
        columns: Iterable[str] = (),
        resume: bool = False,
        nbytes: int = 0,
    ) -> None:
        """Check, before hours of work, that shards can be written and published; SFTIndexError where they cannot.

        Args:
            reads: the files that the verb reads.
            beside: other shards that are written, by the suffix of their prefix.
            columns: names of the shards' columns.
            resume: the verb may go on with shards that an earlier command left.
            nbytes: how many bytes will be written at least; not checked with ``resume``.
        """
        if len(self._suffixes) > 1:
            check_lock(f"{ShardPaths.of(self.local).prefix}-parts.journal", ())
        shards = [ShardPaths.of(self.local + end).with_columns(columns) for end in (*self._suffixes, *beside)]
        writes = [place for each in shards for place in places_of(each, "the output", written=True)]
        if self._summary is not None:
            writes.append(Place(self._summary, "--summary"))
        require_apart(writes, reads)
        if not resume:
            require_space(self.local, nbytes, (len(SUFFIXES) + 1) * len(shards))
        if self._staged:
            self._staged.prepare(self._suffixes, resume=resume)
            for each in self._staged_beside:
                each.prepare(resume=resume)
            print(f"building at {self.local}, to be uploaded to {self.prefix}", file=sys.stderr, flush=True)

    def publish(self) -> None:
        """Upload shards built for a remote prefix, and those beside it; say where they are if that fails."""
        pending = [*self._suffixes, *self._beside] if self._staged else []
        try:
            while self._staged and pending:
                with show_progress(1024)("uploading", shard_nbytes(self.local + pending[0])) as advance:
                    self._staged.publish(pending[0], advance)
                del pending[0]
        except (SFTIndexError, KeyboardInterrupt, SystemExit):
            for suffix in pending:
                print(
                    f"the shard is built, and kept at {self.local + suffix}; send it when the store is up again:"
                    f" megatron-sft-idx copy {self.local + suffix} {self.prefix + suffix}",
                    file=sys.stderr,
                )
            raise


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
        return str(snapshot_download(repository, repo_type=kind, revision=revision, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SFTIndexError(f"--download {name}: {reason}") from None


def reads_of(inputs: Iterable[str], encoding: EncodingOptions) -> list[Place]:
    """The local files that a job reads; FormatError where one of its inputs is not there."""
    local = [pattern for pattern in inputs if pattern != "-" and not is_remote(pattern)]
    template = [Place(encoding.template_name, "the chat template")] if encoding.chat_template is not None else []
    return [
        *(place for pattern in local for path in named_by(pattern) for place in places_at(path, _INPUT)),
        *places_at(encoding.tokenizer, "the tokenizer"),
        *template,
    ]


@contextmanager
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
    if isinstance(rows, Mapping) or not isinstance(rows, (str, os.PathLike, Iterable)):
        raise FormatError(
            f"rows: a {type(rows).__name__}, expected paths, an iterable of rows, or one split of a dataset; put a"
            " single row in a list"
        )
    entries: Iterator[Any] = iter([rows] if isinstance(rows, (str, os.PathLike)) else rows)
    head = list(itertools.islice(entries, 1))
    if all(isinstance(entry, (str, os.PathLike)) for entry in head):
        paths = []
        for entry in [*head, *entries]:
            if not isinstance(entry, (str, os.PathLike)):
                raise FormatError(
                    f"rows: a {type(entry).__name__} among paths; name the files alone, or pass rows alone"
                )
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
    with tempfile.TemporaryDirectory(prefix=os.path.basename(prefix) + ".rows-", dir=folder) as temporary:
        name = "rows"
        if hasattr(rows, "save_to_disk"):
            rows.save_to_disk(path := os.path.join(temporary, "dataset"))
        elif isinstance(head[0], (str, os.PathLike)):  # the pipe, as other paths are through
            name = "standard input"
            with open(path := os.path.join(temporary, "stdin"), "xb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        else:
            _write_rows(path := os.path.join(temporary, "rows.jsonl"), itertools.chain(head, entries))
        try:
            yield [path], lambda message: message.replace(path, name)
        except SequenceError as error:
            raise SequenceError(error.source.replace(path, name), error.position, error.reason) from None


def _write_rows(path: str, rows: Iterable[Any]) -> None:
    """Write rows as JSON lines. Arrays become lists; NaN is an error, since JSON could only have null for a weight."""
    with open(path, "x", encoding="utf-8", newline="\n") as file:
        for number, row in enumerate(rows, 1):
            try:
                if not isinstance(row, Mapping):
                    raise TypeError(f"a {type(row).__name__}, expected a dict")
                file.write(json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_to_json) + "\n")
            except (TypeError, ValueError, RecursionError) as error:
                raise SequenceError("rows", number, f"cannot be written as JSON: {error}") from None


def _to_json(value: Any) -> Any:
    """A list, number or dict for a numpy array or number, a tensor, or a mapping."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__}")
