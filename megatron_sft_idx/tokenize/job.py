"""``preprocess`` for programs and the command: convert its arguments to options, and run a job."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_type_hints

from megatron_sft_idx.arguments import require_type
from megatron_sft_idx.chat.media_files import MediaLimits
from megatron_sft_idx.chat.packed_rows import SystemStarts
from megatron_sft_idx.chat.row_mapping import RowMapping
from megatron_sft_idx.chat.row_options import MaskAlignment, RowKind, RowOptions
from megatron_sft_idx.chat.tokenizer import Backend
from megatron_sft_idx.chat.tokenizer.loaded import LoadedTokenizer, folder_of_loaded
from megatron_sft_idx.chat.types import EarlierReasoning, MaskOptions, PartialMarkers, TrainOn
from megatron_sft_idx.errors import FormatError, brief, check_option
from megatron_sft_idx.lines import log_line
from megatron_sft_idx.packing import Effort
from megatron_sft_idx.packs.conditions import Condition, bind_all
from megatron_sft_idx.packs.destination import STAGING, Destination
from megatron_sft_idx.storage import is_remote, open_regular
from megatron_sft_idx.tokenize.bad_rows import BadRowLimit
from megatron_sft_idx.tokenize.begin import PreprocessOptions, corpus_prefix
from megatron_sft_idx.tokenize.column_weights import require_weight_column
from megatron_sft_idx.tokenize.encoding import EncodingOptions
from megatron_sft_idx.tokenize.gather import output_prefixes
from megatron_sft_idx.tokenize.job_input import INPUT, Rows, StrPath, downloaded, inputs_of, reads_of
from megatron_sft_idx.tokenize.kept_fields import read_keep_fields
from megatron_sft_idx.tokenize.local import available_cpus
from megatron_sft_idx.tokenize.pipeline import make_shards
from megatron_sft_idx.tokenize.plan import Overlong, PackingMethod, PackOptions
from megatron_sft_idx.tokenize.report import Summary, check_summary
from megatron_sft_idx.tokenize.selection import Selection

Options = TypeVar("Options")

# Integer options that may be 0; all others must be at least 1.
FROM_ZERO = ("workers", "seed", "log_interval")
# By the hint of an option: the allowed types of its value, and their name.
_EXPECTED: dict[Any, tuple[Any, str]] = {
    str: (str | os.PathLike, "a path"),
    str | None: (str | None, "a string"),
    StrPath: (str | os.PathLike, "a path"),
    StrPath | LoadedTokenizer: (str | os.PathLike, "a path, or a tokenizer that transformers has loaded"),
    StrPath | None: (str | os.PathLike | None, "a path"),
    Sequence[str]: (list | tuple, "a list of strings"),
    Mapping[str, Any] | None: (Mapping | None, "a dict"),
    Mapping[str, str] | None: (Mapping | None, "a dict of strings"),
    Mapping[str, float] | None: (Mapping | None, "a dict from file to weight"),
}
# Maximum ratio of input to output bytes: for rows that consist almost entirely of unread fields.
_MAX_INPUT_PER_OUTPUT = 256


def preprocess(  # noqa: D417 (--help of the command says what each option is for)
    inputs: Rows,
    *,
    tokenizer: StrPath | LoadedTokenizer,
    tokenizer_backend: Backend = "auto",
    output_prefix: StrPath,
    seq_length: int,
    chat_template: StrPath | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    processor: StrPath | None = None,
    media_root: StrPath | None = None,
    template_date: str | None = None,
    train_on: TrainOn = "assistant",
    earlier_reasoning: EarlierReasoning = "error",
    no_train_on_thinking: bool = False,
    no_train_on_tool_calls: bool = False,
    allow_control_tokens: bool = False,
    partial_markers: PartialMarkers = "error",
    straddling: Literal["include", "exclude"] = "include",
    span_by_span: bool = False,
    row_kind: RowKind = "auto",
    fields: Mapping[str, str] | None = None,
    turn_fields: Mapping[str, str] | None = None,
    roles: Mapping[str, str] | None = None,
    ignore_fields: Sequence[str] = (),
    keep_fields: Sequence[str] = (),
    system_starts: SystemStarts = "error",
    mask_alignment: MaskAlignment = "token",
    on_bad_row: Literal["error", "skip"] = "error",
    max_bad_rows: int | float | str | None = None,
    append_eod: bool = False,
    packing: PackingMethod = "auto",
    packing_effort: Effort = "normal",
    overlong: Overlong = "error",
    sequence_multiple: int = 1,
    max_sequences_per_pack: int | None = None,
    drop_untrained: bool = False,
    where: Sequence[str] = (),
    loss_weight_column: str | None = None,
    seed: int = 0,
    max_rows: int | None = None,
    sample: float = 1.0,
    dedup: Literal["none", "exact"] = "none",
    valid_fraction: float = 0.0,
    repeat: Mapping[str, float] | None = None,
    shuffle: bool = False,
    workers: int | None = None,
    engine: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    output_shards: int = 1,
    staging: str = STAGING,
    keep_corpus: bool = False,
    source: bool = True,
    loss_weight: Mapping[str, float] | None = None,
    overwrite: bool = False,
    summary: StrPath | None = None,
    log_interval: int = 10_000,
    download: bool = False,
) -> Summary:
    """Tokenize chats, mark the tokens to train on with the chat template, pack the chats, and write a shard.

    ``megatron-sft-idx preprocess`` writes the same bytes. The arguments are the options of this command, with ``_`` in
    place of ``-``; its ``--help`` describes them.

    Args:
        inputs: files, globs and ``save_to_disk`` folders; a ``datasets.Dataset``; a table of pyarrow, pandas or polars;
            any iterable of rows; or a list that mixes these. In the column ``source``, a data set or table is named
            ``dataset-0``, ``dataset-1``, ..., or by its key in a dict: ``{"math": dataset}``.
        tokenizer: its folder or file; or a tokenizer that transformers has loaded from a folder or the hub's cache, if
            it has not been changed since.

    Returns:
        Counts of the output; its ``str`` is what the command prints.

    Raises:
        SFTIndexError: an input, a row or an option is unusable, or files at ``output_prefix`` may not be replaced.
        OSError: an error of the file system.

    Example:
        >>> from megatron_sft_idx import Shard, show_pack
        >>> rows = [{"messages": [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Bonjour !"}]}]
        >>> model = "tools/demo/tokenizer"
        >>> summary = preprocess(rows, tokenizer=model, output_prefix="data/greetings", seq_length=1024, workers=0)
        >>> summary.packing.packs, summary.packing.tokens, summary.packing.trained_tokens
        (1, 17, 6)
        >>> show_pack(Shard("data/greetings")[0], model)
        ── sequence 0, positions 0 to 16, 6 of 17 tokens trained ──
        <|im_start|>user
        Hi!<|im_end|>
        <|im_start|>assistant
        [[Bonjour !<|im_end|>]]
    """
    given = dict(locals())
    inputs = given.pop("inputs")
    check_option("download", download, bool)
    if isinstance(tokenizer, LoadedTokenizer):
        given["tokenizer"] = folder_of_loaded(tokenizer)
    inputs = downloaded(given, inputs) if download else inputs
    return run_job(inputs, preprocess_options(given), staging=staging, summary=summary)


def preprocess_options(given: Mapping[str, Any]) -> PreprocessOptions:
    """Return the options of a job from arguments of ``preprocess`` by name; ``inputs`` is empty.

    Raises:
        FormatError: a value is invalid, or options contradict each other.
    """
    for name, hint in get_type_hints(preprocess).items():
        if name in given:
            _require_choice(name, given[name], hint)
    prefix, engine = os.fspath(given["output_prefix"]), given["engine"]
    if engine == "local" and given["ray_address"] is not None:
        raise FormatError("--ray-address needs --engine ray")
    if engine == "ray" and given["workers"] == 0:
        raise FormatError("--engine ray needs at least one task at a time; use --workers 1 or more")
    if engine == "ray" and is_remote(prefix):
        raise FormatError(
            "--engine ray writes to a file system that all nodes share; use an --output-prefix there, and upload the"
            " shards afterwards with: megatron-sft-idx copy"
        )
    encoding, packing = encoding_options(given), packing_options(given)
    if (of_rows := packing.selection is not None and packing.selection.of_rows) and given["keep_corpus"]:
        raise FormatError(
            "--keep-corpus stores the sequences of all rows, also of rows that are left out or used for validation, so"
            " it cannot be combined with --max-rows, --sample, --dedup, --valid-fraction, --repeat and --shuffle; leave"
            " out --keep-corpus: pack also accepts the packed shards PREFIX and PREFIX.valid"
        )
    columns = encoding.column_specs([])
    # The files are not known yet.
    unnamed = [condition for condition in map(Condition.parse, packing.where) if condition.column != "source"]
    bind_all(unnamed, columns, "--where")
    if packing.loss_weight_column is not None:
        require_weight_column(packing.loss_weight_column, columns, "preprocess")
    return _options(
        PreprocessOptions,
        given,
        inputs=(),
        prefix=prefix,
        encoding=replace(encoding, content=of_rows),
        packing=packing,
        loss_weights=dict(given["loss_weight"] or {}),
        max_bad_rows=BadRowLimit.of(given),
        repeats=dict(given["repeat"] or {}),
    )


def _options(kind: Callable[..., Options], given: Mapping[str, Any], /, **values: Any) -> Options:
    """Make a dataclass of options from ``values`` and, for its other fields, from ``given`` by name."""
    same = {each.name: given[each.name] for each in fields(kind) if each.name in given}  # type: ignore[arg-type]
    return kind(**same | values)


def _require_choice(name: str, value: Any, hint: Any) -> None:
    """Raise FormatError unless an argument has the type, choice or range of its hint (argparse checks the command)."""
    kinds, expected = _EXPECTED.get(hint, (object, ""))
    if not isinstance(value, kinds):
        found = f"a {type(value).__name__}" if name in ("tokenizer", "output_prefix") else brief(value)
        raise FormatError(f"{name}: {found}, expected {expected}")
    if isinstance(value, str | os.PathLike):
        require_type(name, value, hint)
    if hint == Sequence[str] and (wrong := [each for each in value if not isinstance(each, str)]):
        raise FormatError(f"{name}: {brief(wrong[0])}, expected a string")
    if hint == Mapping[str, str] | None:
        require_type(name, value, hint)
    check_option(name, value, hint, lowest=0 if name in FROM_ZERO else 1)


def encoding_options(given: Mapping[str, Any]) -> EncodingOptions:
    """Return how rows become sequences, from arguments of ``preprocess``. FormatError: the template is unreadable."""
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
        keep_fields=read_keep_fields(given.get("keep_fields", ())),
        processor=None if given.get("processor") is None else os.path.abspath(given["processor"]),
        media=media_limits(given),
        masks=_options(
            MaskOptions,
            given,
            train_on_thinking=not given["no_train_on_thinking"],
            train_on_tool_calls=not given["no_train_on_tool_calls"],
        ),
        rows=_options(
            RowOptions,
            given,
            kind=given["row_kind"],
            mapping=RowMapping.of(given["fields"], given["turn_fields"], given["roles"]),
            media=given.get("processor") is not None,
        ),
    )


def media_limits(given: Mapping[str, Any]) -> MediaLimits:
    """Return the limits for images and audio from arguments of ``preprocess``.

    FormatError: the root is not a folder.
    """
    download = bool(given.get("download"))
    if (root := given.get("media_root")) is None:
        return MediaLimits(download=download)
    if given.get("processor") is None:
        raise FormatError("--media-root needs --processor, which reads images and audio")
    if not os.path.isdir(root):
        raise FormatError(f"--media-root {os.fspath(root)}: folder not found")
    return MediaLimits(os.path.abspath(root), download)


def packing_options(given: Mapping[str, Any]) -> PackOptions:
    """Return how sequences become packs, from arguments of ``preprocess``. FormatError: a fraction is not 0 to 1."""
    selection = _options(Selection, given, weights=[1.0] * bool(given.get("repeat")))
    return _options(
        PackOptions,
        given,
        capacity=given["seq_length"],
        method=given["packing"],
        effort=given["packing_effort"],
        selection=None if selection == Selection() else selection,
        where=tuple(given.get("where", ())),
    )


def run_job(
    rows: Rows, options: PreprocessOptions, *, staging: str = STAGING, summary: StrPath | None = None
) -> Summary:
    """Make the shards, upload them if their prefix is remote, and write the summary.

    Args:
        rows: see ``preprocess``.
        options: options of the job; ``inputs`` is not used.
        staging: local folder for building shards for an object store.
        summary: path of a JSON file to write.

    Raises:
        SFTIndexError, OSError: see ``preprocess``.
    """
    path = None if summary is None else os.fspath(summary)
    if path is not None:
        check_summary(path, options.prefix, overwrite=options.overwrite)
    corpus = corpus_prefix("")
    output = Destination(
        options.prefix,
        suffixes=output_prefixes("", options.output_shards, valid=options.has_valid),
        beside=[corpus] if options.keep_corpus else [],
        staging=staging,
        overwrite=options.overwrite,
        summary=path,
    )
    with inputs_of(rows, output.local, media=options.encoding.processor is not None) as (inputs, as_given):
        reads = reads_of(inputs, options.encoding)
        sizes = [os.path.getsize(place.path) for place in reads if place.role == INPUT and os.path.isfile(place.path)]
        nbytes = sum(sizes) // _MAX_INPUT_PER_OUTPUT
        output.prepare(reads, beside=[corpus], columns=options.encoding.columns, nbytes=nbytes, may_be_found=True)
        report = make_shards(
            replace(options, inputs=inputs, prefix=output.local),
            log=lambda line: log_line(as_given(line)),
            published="" if output.local == options.prefix else options.prefix,
        )
    output.publish(found=report.found)
    if report.corpus is not None:
        report.corpus.bad_rows = list(map(as_given, report.corpus.bad_rows))
        report.corpus.first_rows = {note: as_given(row) for note, row in report.corpus.first_rows.items()}
    report.prefix, report.options = options.prefix, dict(_effective(replace(options, inputs=[*map(as_given, inputs)])))
    if path is not None:
        report.write(path, overwrite=options.overwrite)
    return report


def _effective(options: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of all options, including nested ones, without the template's text."""
    for name in (each.name for each in fields(options)):
        value = getattr(options, name)
        if isinstance(value, BadRowLimit):
            yield name, value.given
        elif is_dataclass(value):
            yield from _effective(value)
        elif name == "workers" and value is None:
            yield name, available_cpus()
        elif name != "chat_template":
            yield name, dict(value) if isinstance(value, Mapping) else value
