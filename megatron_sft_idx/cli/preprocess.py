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
    Verbs,
    add_output_options,
    add_verb,
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
Tokenise chats, mark the tokens to train on by the chat template, pack, and write a shard.

examples:
  make a packed shard of chats; the tokenizer's own chat template decides on masks:
    megatron-sft-idx preprocess --input chats.jsonl --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --output-prefix data/train

  take several files, cut long chats in pieces, and keep the tokenised corpus for other capacities:
    megatron-sft-idx preprocess --input 'raw/*.jsonl.zst' more.parquet --tokenizer ./tok \\
        --seq-length 8192 --overlong split --keep-corpus --output-prefix data/train

  make a shard to train on and one to validate with, without duplicates, with the rows of one file twice:
    megatron-sft-idx preprocess --input chats.jsonl more.parquet --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --output-prefix data/train --dedup exact --valid-fraction 0.05 \\
        --repeat more.parquet=2

  make eight shards on a Ray cluster, started on one of its nodes:
    megatron-sft-idx preprocess --input 'raw/*.jsonl.zst' --tokenizer ./tok --seq-length 8192 \\
        --output-prefix data/train --engine ray --ray-address auto --output-shards 8

  read from a bucket and write to it; the shard is built in ./megatron-sft-idx-staging, then uploaded:
    megatron-sft-idx preprocess --input 's3://bucket/raw/*.jsonl.zst' --tokenizer ./tok \\
        --seq-length 4096 --output-prefix s3://bucket/sft/train

  see what would be made, and write nothing:
    megatron-sft-idx preprocess --input chats.jsonl --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --dry-run

rows: OpenAI messages, ShareGPT and NeMo conversations, turns that are pairs or strings, instruction/input/output,
prompt/completion, tokenised input_ids with loss_mask or labels, and text (--train-on all). --fields, --turn-fields and
--roles read rows with other names. A field that other trainers read as "do not train this" is read so (train,
weight, loss, step_loss_mask, masked, ...) or refused by name; --ignore-field NAME reads rows without it.
Tokenised rows that are packed already (seq_lengths, cu_seqlens, position_ids that restart, ...) become their sequences.

files: .json, .jsonl, .csv, .tsv (each also .gz or .zst), .parquet, save_to_disk folders, and globs. At s3:// and
msc://: objects, globs, and PREFIX/ for all objects directly under it. Objects are read by ranges and never downloaded
whole.
"""
_PACK_HELP = """\
Pack the sequences of a shard again. No text is needed, and nothing is tokenised.

examples:
  pack a tokenised corpus (preprocess --keep-corpus) for another capacity, without tokenising again:
    megatron-sft-idx pack data/train.unpacked --seq-length 32768 --output-prefix data/train-32k

  the same for context parallel size 4:
    megatron-sft-idx pack data/train.unpacked --seq-length 32768 --sequence-multiple 8 --output-prefix data/train-cp4

  pack only the sequences of one input file:
    megatron-sft-idx pack data/train.unpacked --seq-length 4096 --where 'source == chats.jsonl' \\
        --output-prefix data/train-chats
"""
_WHICH_ROWS = (
    "These options are applied in this order, and the rows that each leaves out are counted. What is drawn depends"
    " on --seed and on what a row says: copies of a row are drawn alike, so they are never on both sides of"
    " --valid-fraction, and other rows change nothing."
)


# ---- options that are also arguments of ``preprocess`` ----


def add_packing_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for packing sequences."""
    declare(
        parser.add_argument_group("packing"),
        """
        --seq-length N  capacity: most token positions a pack may hold
        --packing  method of packing; auto tries several and takes that with the fewest packs, sequential keeps the
            order, none puts one sequence in a pack (default: %(default)s)
        --packing-effort  high takes some seconds more to fill packs of few sequences better (default: %(default)s)
        --overlong  what to do with sequences longer than --seq-length; lost tokens are counted (default: %(default)s)
        --sequence-multiple M  count each sequence as its length rounded up to M, so that padding for context
            parallelism (2 x its size, x tensor parallel size under sequence parallelism) fits (default: %(default)s)
        --max-sequences-per-pack N  most sequences in a pack (default: no limit)
        --drop-untrained  leave out sequences, and cuts of --overlong split, with no token to train on
        --seed N  seed of all shuffling and sampling (default: %(default)s)
        """,
        _as_argument,
    )


def _add_column_options(group: argparse._ActionsContainer) -> None:
    """Add the options for selecting and weighting sequences by columns."""
    declare(
        group,
        """
        --where CONDITION  take only sequences for which this holds, such as 'score >= 0.5' or
            'source == b/train.jsonl': a column, one of == != < <= > >=, and a value; may be repeated, then all must
            hold; of a pair, both sequences must be taken
        --loss-weight-column NAME  multiply the loss of each sequence, or token, by its value in this column; loss masks
            become float32 if they hold other values than 0 and 1
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
        --tokenizer-backend  which library tokenises: gigatoken where its ids are known to be those of tokenizers, held
            to these on the first texts and on samples, or tokenizers alone (default: %(default)s)
        --tokenizer-type  of Megatron
        --row-kind  what a row is (default: by its fields); a preference has a chosen and a rejected answer, which stay
            in one pack and are dropped together if one is overlong; a kto row has a label, true or false; of both,
            only what follows the prompt is trained on
        --fields TARGET=PATH...  where rows of other names have their fields, such as messages=data.turns; a path with
            dots leads into objects and lists; targets: {", ".join(ROW_TARGETS)}; once one of the first seven is
            mapped, other fields of the content are not read
        --turn-fields TARGET=PATH...  the same for each turn, such as role=speaker content=text; targets:
            {", ".join(TURN_TARGETS)}
        --roles NAME=ROLE...  what roles of other names are, such as tutor=assistant; NAME in any case; ROLE is one of
            {", ".join(ROLES)}
        --ignore-field NAME  read rows as if they, their messages and content parts had no such field; for a field that
            means something else here than to the trainers that read it as "do not train this"; may be repeated
        --system-starts  what a system message after an answer is: the start of a conversation that becomes a sequence
            of its own, as in Megatron's --sft lines, or a turn of one conversation; with error, such a row among the
            first 1,000 stops the run before it begins, a later one when it is met (default: %(default)s)
        --mask-alignment  in tokenised rows, the mask marks the trained token itself, or the token before it
            (default: %(default)s)
        --on-bad-row  stop at a row that cannot be used, or count and list it (default: %(default)s)
        --append-eod  end every sequence with the end-of-sequence token, unless it ends with one; it is trained where
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
        "--max-bad-rows LIMIT  with --on-bad-row skip: stop with an error if more rows cannot be used than LIMIT, a"
        f" number such as 10 or a share of all rows such as 0.01 or 1%%; {judged}; a run with a larger limit goes on"
        " with what is tokenised (default: no limit)"
    )
    declare(group, declared)


def add_mask_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the chat template and for what is trained on."""
    declare(
        parser.add_argument_group("chat template and masks"),
        """
        --chat-template FILE  Jinja file that replaces the tokenizer's own template
        --chat-template-kwargs JSON  variables for the template, as a JSON object
        --processor FOLDER  read images and audio of rows, and expand their placeholders as this processor of
            transformers does; its chat template is the default (pip install 'megatron-sft-idx[media]')
        --media-root FOLDER  with --processor: where paths of images and audio begin, and what they may not leave
            (default: the folder of each input file)
        --template-date YYYY-MM-DD  date for templates that ask for today's date, which would change every day
        --train-on  what the assistant says, only its answer to the last user message, exactly what the template's
            generation markers enclose, or everything (default: %(default)s)
        --earlier-reasoning  if the template removes the reasoning of earlier turns: stop, make one sequence without it,
            or make a sequence for each turn, as the model would see it (default: %(default)s)
        --no-train-on-thinking  leave reasoning out of the loss
        --no-train-on-tool-calls  leave tool calls out of the loss
        --allow-control-tokens  let text in the data that spells a control token, such as <|im_end|>, become that token
        --partial-markers  if {%% generation %%} markers leave out part of what the assistant says: stop, or train on
            what they mark (default: %(default)s)
        --straddling  whether to train on a token that begins before a trained span and ends in it, as transformers
            does (default: %(default)s)
        --span-by-span  tokenise trained spans by themselves, so that no token straddles their edges (changes token ids)
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
    from megatron_sft_idx.chat.values import parse_json  # imported late: the import takes longer than some verbs run

    try:
        value = parse_json(text.encode())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:60]}: {str(error).replace(' of the row', '')}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text[:60]}: expected a JSON object, such as {{"enable_thinking": false}}')
    return value


# ---- the verbs ----


def add_parser(verbs: Verbs) -> None:
    """Add the verbs ``preprocess`` and ``pack``."""
    parser = add_verb(
        verbs, "preprocess", "chats to a packed shard", _HELP, _run, product=lambda arguments: bool(arguments.dry_run)
    )
    group = parser.add_argument_group("input")
    declared = "--input PATH...  files, globs, or save_to_disk folders, also at s3:// or msc://; - reads a pipe"
    declare(group, declared, input={"required": True})
    add_row_options(group)
    add_bad_row_limit(group, "a share is compared at the end of the input")
    declare(
        group,
        """
        --download  fetch what is not on this machine: from the Hugging Face hub into its cache --tokenizer OWNER/NAME,
            --processor OWNER/NAME, --input OWNER/NAME/data/train-*.parquet, where @REVISION may follow NAME (needs
            huggingface_hub); and with --processor the images and audio that rows have URLs of
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
        --workers N  number of tokenising processes, 0 tokenises in this one; with --engine ray, most tasks at a time;
            changes no byte of the output (default: all processors, {available_cpus()} here, or those of the cluster)
        --engine  where to tokenise: on this machine, or on a Ray cluster whose nodes see input, tokenizer and output
            at the same paths; changes no byte of the output (default: %(default)s)
        --ray-address ADDRESS  address of a running cluster, HOST:PORT or auto (default: start a cluster on this
            machine, and stop it at the end)
        --keep-field NAME[=DTYPE]  store this field of every row, a number or a boolean, as a column with one value for
            each sequence; a row without it, or with a value that DTYPE does not hold, is a bad row (default DTYPE:
            float64); may be repeated
        --keep-corpus  keep the tokenised corpus, an unpacked shard of all sequences, overlong ones too, at
            PREFIX.unpacked; not with options of which rows
        --source  write the column source, which says of every sequence which row of which file it was made from
            (default: %(default)s)
        --loss-weight FILE=W...  multiply the loss of each row of a file by W; FILE as for --repeat; loss masks
            become float32 if they hold other values than 0 and 1 (default: 1)
        """,
        _as_argument,
        keep_field={"dest": "keep_fields", "action": Collected, "default": ()},
    )
    _add_column_options(group)
    declare(
        group,
        """
        --dry-run  encode the first rows of every file, show what they become and what would stop a run, and write
            nothing; needs no --output-prefix
        --full  with --dry-run: encode all rows, and show every bad row, all lengths, and how they would be packed
        """,
    )

    parser = add_verb(
        verbs, "pack", "a tokenised corpus, or packs of another capacity, to a packed shard", _PACK_HELP, _pack
    )
    declare(parser, "source SOURCE  prefix of the shard to be packed", source=local_path)
    declare(
        parser,
        """
        --lossy  leave out columns that have one row for each pack
        """,
    )
    _add_column_options(parser)
    add_packing_options(parser)
    add_output_options(parser)


def _add_selection_options(parser: argparse.ArgumentParser) -> None:
    declare(
        parser.add_argument_group("which rows", _WHICH_ROWS),
        """
        --max-rows N  take the first N usable rows of the input, and read no more than needed
        --dedup  exact leaves out rows that say what an earlier row says, even if their other fields differ; takes 50
            bytes of memory a row (default: %(default)s)
        --sample SHARE  take this share of the rows (default: all)
        --valid-fraction SHARE  put this share of the conversations, each whole, into a shard of its own at
            PREFIX.valid (default: none)
        --repeat FILE=W...  train on each row of a file W times: 2 is twice, 0.5 every other row, 1.5 all once and
            half of them again; FILE is a path as in --input, a file name, a glob or a folder (default: 1)
        --shuffle  shuffle the rows by --seed, for --packing sequential and none; the other methods do so by themselves
        """,
        _as_argument,
    )


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if arguments.output_prefix is None and not arguments.dry_run:
        parser.error("the following arguments are required: --output-prefix (only --dry-run goes without)")
    values, rows = preprocess_arguments(arguments) | {"output_prefix": arguments.output_prefix or ""}, arguments.input
    try:
        rows = downloaded(values, rows) if arguments.download else rows
        options = preprocess_options(values)
    except FormatError as error:
        parser.error(str(error))
    if arguments.full and not arguments.dry_run:
        parser.error("--full goes with --dry-run: a run reads all rows anyway")
    if not arguments.dry_run:
        print_layout(str(run_job(rows, options, staging=arguments.staging, summary=arguments.summary)))
        return
    prefix = options.prefix and Destination(options.prefix, staging=arguments.staging).local
    # Rows from a pipe are not stored next to the output, whose folder may not exist.
    with inputs_of(
        rows, os.path.join(tempfile.gettempdir(), "dry-run"), media=options.encoding.processor is not None
    ) as (inputs, as_given):
        lines, first, decode = preview(replace(options, inputs=inputs, prefix=prefix), full=arguments.full)
    print_lines(map(as_given, lines))
    if first is not None:
        print_layout("the first sequence, trained tokens marked:\n")
        bounds = [0, len(first.ids)]
        print_layout(mark_pack(first.ids, first.loss_mask, bounds, decode, media=first.media, color=in_color()))
    print_layout("\nnothing was written")


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
