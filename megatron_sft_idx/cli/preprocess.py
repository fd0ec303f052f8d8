"""``megatron-sft-idx preprocess`` and ``pack``: convert chats, or a tokenised corpus, to a packed shard."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_sft_idx.chat.row_mapping import ROLES, ROW_TARGETS, TURN_TARGETS
from megatron_sft_idx.cli.options import (
    Commands,
    add_command,
    add_output_options,
    declare,
    file_weight,
    in_color,
    local_path,
    named_value,
    natural,
    positive,
    preprocess_arguments,
    role_of_name,
)
from megatron_sft_idx.cli.parsers import Collected, Mapped
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.inspect.text import mark_pack
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.lines import print_layout, print_lines
from megatron_sft_idx.packs.destination import Destination
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.publication import places_of
from megatron_sft_idx.tokenize import (
    FROM_ZERO,
    Summary,
    available_cpus,
    check_packing,
    check_summary,
    downloaded,
    inputs_of,
    output_prefixes,
    pack_shard,
    packing_options,
    preprocess,
    preprocess_options,
    preview,
    run_job,
)

_HELP = """\
Tokenise chats, use the chat template to mark the tokens to train on, pack the sequences, and write a shard.

examples:
  make a packed shard from chats, with masks from the tokenizer's own chat template:
    megatron-sft-idx preprocess --input chats.jsonl --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --output-prefix data/train

  read several files, cut long chats into pieces, and keep the tokenised corpus for other capacities:
    megatron-sft-idx preprocess --input 'raw/*.jsonl.zst' more.parquet --tokenizer ./tok \\
        --seq-length 8192 --overlong split --keep-corpus --output-prefix data/train

  make a training and a validation shard without duplicates, and train on each row of one file twice:
    megatron-sft-idx preprocess --input chats.jsonl more.parquet --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --output-prefix data/train --dedup exact --valid-fraction 0.05 \\
        --repeat more.parquet=2

  make eight shards on a Ray cluster; run this on one of its nodes:
    megatron-sft-idx preprocess --input 'raw/*.jsonl.zst' --tokenizer ./tok --seq-length 8192 \\
        --output-prefix data/train --engine ray --ray-address auto --output-shards 8

  read from a bucket and write to it; the shard is built in ./megatron-sft-idx-staging, then uploaded:
    megatron-sft-idx preprocess --input 's3://bucket/raw/*.jsonl.zst' --tokenizer ./tok \\
        --seq-length 4096 --output-prefix s3://bucket/sft/train

  show what would be made, without writing anything:
    megatron-sft-idx preprocess --input chats.jsonl --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --dry-run

rows: OpenAI messages, ShareGPT and NeMo conversations, turns that are pairs or strings, instruction/input/output,
prompt/completion, tokenised input_ids with loss_mask or labels, and text (--train-on all). For other field names, use
--fields, --turn-fields and --roles. If other trainers read a field as "do not train this" (train, weight, loss,
step_loss_mask, masked, ...), it has that meaning here, or the row is rejected and the message gives the field;
--ignore-field NAME reads rows without it. Tokenised rows that are already packed (seq_lengths, cu_seqlens, position_ids
that restart, ...) are split into their sequences.

files: .json, .jsonl, .csv, .tsv (each also .gz or .zst), .parquet, save_to_disk folders, and globs. At s3:// and
msc://: objects, globs, and PREFIX/ for all objects directly under it. Objects are read in ranges, and never downloaded
as a whole.
"""
_PACK_HELP = """\
Pack the sequences of a shard again. The text is not needed, and nothing is tokenised.

examples:
  pack a tokenised corpus (preprocess --keep-corpus) for another capacity, without tokenising again:
    megatron-sft-idx pack data/train.unpacked --seq-length 32768 --output-prefix data/train-32k

  pack a packed shard again; do the same for data/train.valid, if --valid-fraction made it:
    megatron-sft-idx pack data/train --seq-length 32768 --output-prefix data/train-32k

  pack for context parallel size 4:
    megatron-sft-idx pack data/train.unpacked --seq-length 32768 --sequence-multiple 8 --output-prefix data/train-cp4

  pack only the sequences of one input file:
    megatron-sft-idx pack data/train.unpacked --seq-length 4096 --where 'source == chats.jsonl' \\
        --output-prefix data/train-chats
"""
_WHICH_ROWS = (
    "These options are applied in this order, and the rows left out by each are counted. The selection depends on"
    " --seed and on the content of a row: duplicates of a row are always selected together, so they are never on both"
    " sides of --valid-fraction, and adding other rows changes nothing."
)


# ---- options that are also arguments of ``preprocess`` ----


def add_packing_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for packing sequences."""
    declare(
        parser.add_argument_group("packing"),
        """
        --seq-length N  capacity: maximum number of token positions in a pack
        --packing  packing method; auto tries several and uses the one with the fewest packs, sequential keeps the
            order, none puts one sequence into each pack (default: %(default)s)
        --packing-effort  high takes a few more seconds, to fill packs of few sequences better (default: %(default)s)
        --overlong  what to do with sequences longer than --seq-length; lost tokens are counted (default: %(default)s)
        --sequence-multiple M  round the length of each sequence up to a multiple of M, so that padding for context
            parallelism (2 x its size, x tensor parallel size with sequence parallelism) fits (default: %(default)s)
        --max-sequences-per-pack N  maximum number of sequences in a pack (default: no limit)
        --drop-untrained  leave out sequences, and pieces from --overlong split, that have no token to train on
        --seed N  seed for all shuffling and sampling (default: %(default)s)
        """,
        _as_argument,
    )


def _add_column_options(group: argparse._ActionsContainer) -> None:
    """Add the options for selecting and weighting sequences by columns."""
    declare(
        group,
        """
        --where CONDITION  pack only sequences that meet this condition, such as 'score >= 0.5' or
            'source == b/train.jsonl': a column, one of == != < <= > >=, and a value; if repeated, all conditions must
            hold; a pair is kept only if both of its sequences meet them
        --loss-weight-column NAME  multiply the loss of each sequence, or token, by its value in this column; loss masks
            become float32 if they contain values other than 0 and 1
        """,
        _as_argument,
        where={"action": Collected, "default": ()},
    )


def add_row_options(group: argparse._ActionsContainer, *, required: bool = True) -> None:
    """Add the options for the tokenizer (``required`` or not) and for reading rows."""
    declare(
        group,
        f"""
        --tokenizer, --tokenizer-model PATH  local folder of the tokenizer, or its tokenizer.json, tekken.json or
            SentencePiece model
        --tokenizer-backend  library that tokenises: gigatoken where it is known to give the same ids as tokenizers,
            which is checked on the first texts and on samples; or always tokenizers (default: %(default)s)
        --tokenizer-type  accepted because Megatron has it
        --row-kind  kind of all rows (default: inferred from the fields); a preference row has a chosen and a rejected
            answer, which stay in one pack and are dropped together if one is overlong; a kto row has a label, true or
            false; in both kinds, only the part after the prompt is trained on
        --fields TARGET=PATH...  paths of fields with other names, such as messages=data.turns; dots in a path lead into
            objects and lists; targets: {", ".join(ROW_TARGETS)}; if one of the first seven is mapped, other fields
            with content are not read
        --turn-fields TARGET=PATH...  the same for each turn, such as role=speaker content=text; targets:
            {", ".join(TURN_TARGETS)}
        --roles NAME=ROLE...  meaning of roles with other names, such as tutor=assistant; NAME in any case; ROLE is one
            of {", ".join(ROLES)}
        --ignore-field NAME  read rows, messages and content parts as if they did not have this field; for a field that
            other trainers read as "do not train this" but that has another meaning in this data; may be repeated
        --system-starts  how to read a system message after an assistant message: as the start of another conversation,
            which becomes a separate sequence, as in Megatron's --sft lines, or as a turn of the same conversation; with
            error, such a row is a bad row, and the run does not start if most of the first 1,000 rows are such rows
            (default: %(default)s)
        --mask-alignment  in tokenised rows, whether the mask marks the trained token itself, or the token before it
            (default: %(default)s)
        --on-bad-row  stop at a row that cannot be used, or skip it, with a count and a list (default: %(default)s)
        --append-eod  append the end-of-sequence token to every sequence that does not end with it; it is trained if
            the sequence ends in a trained answer
        """,
        _as_argument,
        tokenizer={"dest": "tokenizer_model", "required": required},
        roles={"action": Mapped, "type": role_of_name},
        ignore_field={"dest": "ignore_fields", "action": Collected, "default": ()},
        tokenizer_type={"choices": ("HuggingFaceTokenizer",), "help": argparse.SUPPRESS},
    )


def add_bad_row_limit(group: argparse._ActionsContainer, judged: str) -> None:
    """Add ``--max-bad-rows``; ``judged`` is a sentence about when a fraction is checked."""
    declared = (
        "--max-bad-rows LIMIT  with --on-bad-row skip: stop with an error if more than LIMIT rows cannot be used, a"
        f" number such as 10 or a share of all rows such as 0.01 or 1%%; {judged}; a run with a larger limit reuses"
        " what is tokenised (default: no limit)"
    )
    declare(group, declared)


def add_mask_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the chat template and for what is trained on."""
    declare(
        parser.add_argument_group("chat template and masks"),
        """
        --chat-template FILE  Jinja file that replaces the tokenizer's own template
        --chat-template-kwargs JSON  variables for the template, as a JSON object
        --processor FOLDER  read the images and audio of rows, and expand their placeholders like this processor of
            transformers; its chat template is the default (pip install 'megatron-sft-idx[media]')
        --media-root FOLDER  with --processor: folder that paths of images and audio are relative to, and must stay in
            (default: the folder of each input file)
        --template-date YYYY-MM-DD  date for templates that ask for today's date, which would change every day
        --train-on  train on all assistant text, only on the answer to the last user message, on exactly the text inside
            the template's generation markers, or on everything (default: %(default)s)
        --earlier-reasoning  if the template removes the reasoning of earlier turns: stop, make one sequence without it,
            or make a sequence for each turn, as the model would see it (default: %(default)s)
        --no-train-on-thinking  leave reasoning out of the loss
        --no-train-on-tool-calls  leave tool calls out of the loss
        --allow-control-tokens  let text in the data that spells a control token, such as <|im_end|>, become that token
        --partial-markers  if {%% generation %%} markers leave out part of the assistant's text: stop, or train on the
            marked part (default: %(default)s)
        --straddling  whether to train on a token that begins before a trained span and ends inside it, as transformers
            does (default: %(default)s)
        --span-by-span  tokenise each trained span separately, so that no token crosses its edges (changes token ids)
        """,
        _as_argument,
    )


@functools.cache
def _types_and_defaults() -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of every argument of ``preprocess``."""
    types, parameters = get_type_hints(preprocess), inspect.signature(preprocess).parameters
    return {name: (types[name], parameter.default) for name, parameter in parameters.items()}


def _as_argument(name: str) -> dict[str, Any]:
    """Return settings for ``declare``: type, choices and default of the argument ``name`` of ``preprocess``."""
    hint, default = _types_and_defaults()[name]
    keywords: dict[str, Any] = {"required": True} if default is inspect.Parameter.empty else {"default": default}
    if hint is bool:
        keywords["action"] = argparse.BooleanOptionalAction if default else "store_true"
    elif get_origin(hint) is Literal:
        keywords["choices"] = get_args(hint)
    elif hint in (int, int | None):
        keywords["type"] = natural if name in FROM_ZERO else positive
    elif hint is float:
        keywords["type"] = float
    elif hint == Mapping[str, Any] | None:
        keywords["type"] = _json_object
    elif hint == Mapping[str, float] | None:
        keywords |= {"action": Mapped, "type": file_weight}
    elif hint == Mapping[str, str] | None:
        keywords |= {"action": Mapped, "type": named_value}
    return keywords


def _json_object(text: str) -> dict[str, Any]:
    from megatron_sft_idx.chat.values import parse_json  # imported late: the import takes longer than some commands run

    try:
        value = parse_json(text.encode())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:60]}: {str(error).replace(' of the row', '')}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text[:60]}: expected a JSON object, such as {{"enable_thinking": false}}')
    return value


# ---- the commands ----


def add_parser(commands: Commands) -> None:
    """Add the commands ``preprocess`` and ``pack``."""
    parser = add_command(
        commands,
        "preprocess",
        "make a packed shard from chats",
        _HELP,
        _run,
        product=lambda arguments: bool(arguments.dry_run),
    )
    group = parser.add_argument_group("input")
    declared = "--input PATH...  files, globs, or save_to_disk folders, also at s3:// or msc://; - reads a pipe"
    declare(group, declared, input={"required": True})
    add_row_options(group)
    add_bad_row_limit(group, "a share is checked at the end of the input")
    declare(
        group,
        """
        --download  download what is not on this machine. From the Hugging Face hub, into its cache: --tokenizer
            OWNER/NAME, --processor OWNER/NAME, --input OWNER/NAME/data/train-*.parquet, with an optional @REVISION
            after NAME (needs huggingface_hub). With --processor, also images and audio from URLs in rows
        """,
    )
    add_mask_options(parser)
    _add_selection_options(parser)
    add_packing_options(parser)
    add_output_options(parser, required=False)
    group = parser.add_argument_group("running")
    declare(
        group,
        f"""
        --workers N  number of tokenising processes; 0 tokenises in the main process; with --engine ray, maximum number
            of parallel tasks; the output does not depend on it (default: the number of processors,
            {available_cpus()} here, or the CPUs of the cluster)
        --engine  where to tokenise: on this machine, or on a Ray cluster whose nodes have input, tokenizer and output
            at the same paths; the output does not depend on it (default: %(default)s)
        --ray-address ADDRESS  address of a running cluster, HOST:PORT or auto (default: start a cluster on this
            machine, and stop it at the end)
        --keep-field NAME[=DTYPE]  store this field of every row, a number or a boolean, as a column with one value per
            sequence; a row without the field, or with a value that does not fit into DTYPE, is a bad row (default
            DTYPE: float64); may be repeated
        --keep-corpus  keep the tokenised corpus, an unpacked shard of all sequences including overlong ones, at
            PREFIX.unpacked; cannot be combined with options that select rows, because it has all of them
        --source  write the column source, which stores the input file and row of every sequence (default: %(default)s)
        --loss-weight FILE=W...  multiply the loss of each row of a file by W; FILE as for --repeat; loss masks
            become float32 if they contain values other than 0 and 1 (default: 1)
        """,
        _as_argument,
        keep_field={"dest": "keep_fields", "action": Collected, "default": ()},
    )
    _add_column_options(group)
    declare(
        group,
        """
        --dry-run  tokenise the first rows of every file, show the result and every error that would stop a run, and
            write nothing; works without --output-prefix; the exit code is 1 if a run would stop
        --full  with --dry-run: tokenise all rows, and show every bad row, all lengths, and the resulting packs
        """,
    )

    parser = add_command(
        commands, "pack", "pack a tokenised corpus, or pack a shard again for another capacity", _PACK_HELP, _pack
    )
    declare(parser, "source SOURCE  prefix of the shard to pack", source=local_path)
    declare(
        parser,
        """
        --lossy  leave out columns that have one row per pack
        """,
    )
    _add_column_options(parser)
    add_packing_options(parser)
    add_output_options(parser)


def _add_selection_options(parser: argparse.ArgumentParser) -> None:
    declare(
        parser.add_argument_group("which rows", _WHICH_ROWS),
        """
        --max-rows N  use only the first N usable rows of the input, and read no more than necessary
        --dedup  exact leaves out rows with the same content as an earlier row, even if other fields differ; takes 50
            bytes of memory per row (default: %(default)s)
        --sample SHARE  use this share of the rows (default: all)
        --valid-fraction SHARE  put this share of the conversations, never parts of one, into a separate shard at
            PREFIX.valid (default: none)
        --repeat FILE=W...  train on each row of a file W times: 2 is twice, 0.5 half of the rows, 1.5 all rows once
            and half of them twice; FILE is a path as in --input, a file name, a glob or a folder (default: 1)
        --shuffle  shuffle the rows with --seed, for --packing sequential and none; the other methods always shuffle
        """,
        _as_argument,
    )


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if arguments.output_prefix is None and not arguments.dry_run:
        parser.error("the following arguments are required: --output-prefix (only --dry-run works without it)")
    values, rows = preprocess_arguments(arguments) | {"output_prefix": arguments.output_prefix or ""}, arguments.input
    try:
        rows = downloaded(values, rows) if arguments.download else rows
        options = preprocess_options(values)
    except FormatError as error:
        parser.error(str(error))
    if arguments.full and not arguments.dry_run:
        parser.error("--full needs --dry-run, because a run without it reads all rows anyway")
    if arguments.summary is not None and arguments.dry_run:
        parser.error("--summary cannot be combined with --dry-run, which writes nothing: leave out one of the two")
    if not arguments.dry_run:
        print_layout(str(run_job(rows, options, staging=arguments.staging, summary=arguments.summary)))
        return 0
    prefix = options.prefix and Destination(options.prefix, staging=arguments.staging).local
    # Rows from a pipe are not stored next to the output, whose folder may not exist.
    with inputs_of(
        rows, os.path.join(tempfile.gettempdir(), "dry-run"), media=options.encoding.processor is not None
    ) as (inputs, as_given):
        found = preview(replace(options, inputs=inputs, prefix=prefix), full=arguments.full)
    print_lines(map(as_given, found.lines))
    if (first := found.first) is not None:
        print_layout("the first sequence, with trained tokens marked:\n")
        bounds = [0, len(first.ids)]
        print_layout(mark_pack(first.ids, first.loss_mask, bounds, found.decode, media=first.media, color=in_color()))
    print_layout("\nnothing was written")
    return 1 if found.would_stop else 0


def _pack(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    try:
        options = packing_options(vars(arguments))
    except FormatError as error:
        parser.error(str(error))
    if arguments.summary is not None:
        check_summary(arguments.summary, arguments.output_prefix, overwrite=arguments.overwrite)
    output = Destination(
        arguments.output_prefix,
        suffixes=output_prefixes("", arguments.output_shards),
        staging=arguments.staging,
        overwrite=arguments.overwrite,
        summary=arguments.summary,
    )
    source = Shard(arguments.source)
    try:
        check_packing(source, options)
    except FormatError as error:
        parser.error(str(error))
    # The amount of truncated or dropped data is unknown before the plan.
    keeps_all = options.overlong not in ("drop", "truncate") and not options.where
    nbytes = source.header.num_tokens * (source.header.token_dtype.itemsize + source.header.mask_dtype.itemsize)
    columns = list(source.columns)
    reads = places_of(ShardPaths.of(arguments.source).with_columns(columns), "the source")
    output.prepare(reads, columns=columns, nbytes=nbytes if keeps_all else 0)
    begin = time.monotonic()
    report = pack_shard(
        source,
        output.local,
        options,
        shards=arguments.output_shards,
        overwrite=arguments.overwrite,
        log_interval=arguments.log_interval,
        lossy=arguments.lossy,
    )
    seconds = {"packing": time.monotonic() - begin}
    counts = (options.capacity, None, report, seconds)
    summary = Summary(
        arguments.output_prefix,
        *counts,
        found=report.found,
        shards=arguments.output_shards,
        options=asdict(options),
    )
    output.publish()
    print_layout(str(summary))
    if arguments.summary is not None:
        summary.write(arguments.summary, overwrite=arguments.overwrite)
