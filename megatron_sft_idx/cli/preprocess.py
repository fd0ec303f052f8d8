"""``megatron-sft-idx preprocess``: chats to a packed shard."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_sft_idx.chat.inputs import parse_json
from megatron_sft_idx.cli.options import (
    TOKENIZER_MODEL,
    HelpFormatter,
    Verbs,
    add_output_options,
    given,
    in_color,
    natural,
    positive,
)
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.inspect.text import mark_pack
from megatron_sft_idx.tokenize import (
    FROM_ZERO,
    Output,
    Preview,
    available_cpus,
    downloaded,
    inputs_of,
    preprocess,
    preprocess_options,
    preview,
    run_job,
)

__all__ = ["add_mask_options", "add_packing_options", "add_parser", "add_row_options", "add_workers_option"]

_EXAMPLES = """\
examples:
  chats to a packed shard, masks by the tokenizer's own chat template:
    megatron-sft-idx preprocess --input chats.jsonl --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --output-prefix data/train

  several files, long chats cut in pieces, the tokenised corpus kept for other capacities:
    megatron-sft-idx preprocess --input 'raw/*.jsonl.zst' more.parquet --tokenizer ./tok \\
        --seq-length 8192 --overlong split --keep-corpus --output-prefix data/train

  one shard to train on and one to validate with, no duplicates, the rows of one file twice:
    megatron-sft-idx preprocess --input chats.jsonl more.parquet --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --output-prefix data/train --dedup exact --valid-fraction 0.05 \\
        --input-weight more.parquet=2

  go on after a kill, a power failure or Ctrl-C, with all that was tokenised:
    megatron-sft-idx preprocess --input chats.jsonl --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --output-prefix data/train --resume

  on a Ray cluster, from one of its nodes, to eight shards:
    megatron-sft-idx preprocess --input 'raw/*.jsonl.zst' --tokenizer ./tok --seq-length 8192 \\
        --output-prefix data/train --engine ray --ray-address auto --output-shards 8

  from a bucket into a bucket: built in ./megatron-sft-idx-staging, then uploaded:
    megatron-sft-idx preprocess --input 's3://bucket/raw/*.jsonl.zst' --tokenizer ./tok \\
        --seq-length 4096 --output-prefix s3://bucket/sft/train

  look before you leap:
    megatron-sft-idx preprocess --input chats.jsonl --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --output-prefix data/train --dry-run

rows: OpenAI messages, ShareGPT conversations, instruction/input/output columns, prompt/completion, or already tokenised
input_ids with loss_mask or labels. files: .json, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, save_to_disk folders, globs;
in s3:// and msc:// objects, globs, and all that lies right in PREFIX/, read by ranges and never downloaded whole.
"""


# ---- options: of each its name, its metavar and its help; the rest is that of the argument of ``preprocess`` ----

_ROWS = """\
row_kind: how rows are read (default: by their columns); preference takes chosen and rejected, which stay in one pack
  and are dropped together where they are overlong, kto a label, true or false; of both, only what follows the prompt
  is trained on
messages_key NAME: column that holds the turns (default: by its usual names)
mask_alignment: of masks in tokenised rows: at the trained token itself, or at the one before it (default:
  %(default)s)
on_bad_row: stop at a row that cannot be used, or count and list it (default: %(default)s)
append_eod: end every sequence with the end-of-sequence token
"""
_MASKS = """\
chat_template FILE: Jinja file that replaces the tokenizer's own template
chat_template_kwargs JSON: variables for the template
template_date YYYY-MM-DD: the date for templates that ask for today's, which would change
train_on: what the assistant says, only its answer to the last user message, or everything (default: %(default)s)
turns: where the template drops the reasoning of earlier turns: stop; one sequence without it; or a sequence a turn,
  each as the model would see it (default: %(default)s)
no_train_on_thinking: leave reasoning out of the loss
no_train_on_tool_calls: leave tool calls out of the loss
allow_control_tokens: let text in the data that spells a control token, such as <|im_end|>, become that token
partial_markers: where {%% generation %%} markers leave out part of what the assistant says: stop, or take them as
  they stand (default: %(default)s)
straddling: a token that begins before a trained span and ends in it is trained on, as in transformers, or not
  (default: %(default)s)
span_by_span: tokenise trained spans by themselves, so that no token straddles their edges (changes token ids)
"""
_SELECTION = """\
max_rows N: the first N usable rows of the input; reads no more than it must
dedup: exact leaves out rows that say what an earlier one says, whatever their other columns hold; 50 bytes of memory
  a row (default: %(default)s)
sample SHARE: take this share of the rows (default: all)
valid_fraction SHARE: keep this share of the conversations apart, whole, in a shard at PREFIX.valid (default: none)
input_weight FILE=W: train on each row of a file W times: 2 is twice, 0.5 every other row, 1.5 all once and half of
  them again; a file as it is in --input, its name alone, a glob or a folder (default: 1)
shuffle: shuffle the rows by --seed, for --packing sequential and none; the other methods do so by themselves
"""
_PACKING = """\
seq_length N: capacity: most token positions a pack may hold
packing: method; auto takes the fewest packs of several, sequential keeps the order, none puts one sequence in a pack
  (default: %(default)s)
packing_effort: high spends seconds more where packs of few sequences leave gaps (default: %(default)s)
overlong: what becomes of sequences longer than --seq-length; what is lost is counted (default: %(default)s)
sequence_multiple M: count each sequence as its length rounded up to M, so that padding for context parallelism (2 x
  its size, x tensor parallel size under sequence parallelism) fits (default: %(default)s)
max_sequences_per_pack N: at most N (default: no limit)
drop_untrained: leave out sequences, and cuts of --overlong split, with no token to train on
seed N: of every shuffle and lot (default: %(default)s)
"""
_RUNNING = f"""\
workers N: tokenising processes, 0 for none but this one; with --engine ray, tasks at once; changes no byte of the
  output (default: all processors, {available_cpus()} here, or those of the cluster)
engine: this machine, or a Ray cluster, whose nodes see input, tokenizer and output at the same paths; changes no byte
  of the output (default: %(default)s)
ray_address ADDRESS: of a running cluster, HOST:PORT or auto (default: start one on this machine, and stop it at the
  end)
keep_corpus: keep the tokenised corpus, an unpacked shard, at PREFIX.unpacked
source: write the column source: of every sequence, which row of which file it was made from (default: %(default)s)
source_weight FILE=W: multiply the loss of each row of a file by W, named as for --input-weight; masks that are not 0
  and 1 then are float32 (default: 1)
resume: go on with a run that was interrupted or killed, to the same bytes; refused where input or options changed,
  and says what
"""
_DOWNLOAD = """\
download: take what is not here for names on the Hugging Face hub, and fetch it into its cache: --tokenizer
  OWNER/NAME, --input OWNER/NAME/data/train-*.parquet; @REVISION may follow NAME; needs huggingface_hub
"""


def _add(group: argparse._ActionsContainer, options: str) -> None:
    hints, parameters = get_type_hints(preprocess), inspect.signature(preprocess).parameters
    for line in options.replace("\n  ", " ").splitlines():
        head, _, text = line.partition(": ")
        name, _, metavar = head.partition(" ")
        hint, default = hints[name], parameters[name].default
        more: dict[str, Any] = {"metavar": metavar} if metavar else {}
        if hint is bool:
            more["action"] = argparse.BooleanOptionalAction if default else "store_true"
        elif get_origin(hint) is Literal:
            more["choices"] = get_args(hint)
        elif hint in (int, int | None):
            more["type"] = natural if name in FROM_ZERO else positive
        elif hint is float:
            more["type"] = float
        elif hint == Mapping[str, Any] | None:
            more["type"] = _json_object
        elif hint == Sequence[str]:
            more["nargs"] = "+"
        more |= {"required": True} if default is inspect.Parameter.empty else {"default": default}
        group.add_argument("--" + name.replace("_", "-"), help=text, **more)


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "preprocess",
        help="chats to a packed shard",
        description="Tokenise chats, mark the tokens to train on by the chat template, pack, and write a shard.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, globs, save_to_disk folders; also s3://, msc://; - for what comes in a pipe",
    )
    add_row_options(group)
    _add(group, _DOWNLOAD)
    add_mask_options(parser)
    group = parser.add_argument_group(
        "which rows",
        "Done in this order, and counted. Lots are drawn from what a row says and --seed, so that rows that say the"
        " same share one: copies of a row are never on both sides of a split, and other rows change nothing.",
    )
    _add(group, _SELECTION)
    add_packing_options(parser)
    add_output_options(parser)
    group = parser.add_argument_group("running")
    _add(group, _RUNNING)
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="encode the first rows of every file, show what they become and what would stop a run, write nothing",
    )
    group.add_argument(
        "--full",
        action="store_true",
        help="with --dry-run: encode all rows, for every bad one, all lengths, and the packs there would be",
    )
    parser.set_defaults(run=_run)


def add_workers_option(group: argparse._ActionsContainer) -> None:
    """How many processes tokenise."""
    group.add_argument(
        "--workers",
        type=natural,
        default=available_cpus(),
        metavar="N",
        help="tokenising processes, 0 for none but this one; changes no byte of the output (default: %(default)s)",
    )


def add_row_options(group: argparse._ActionsContainer, *, required: bool = True) -> None:
    """The tokenizer, which may not be needed, and how rows are read."""
    group.add_argument(
        "--tokenizer",
        TOKENIZER_MODEL,
        dest="tokenizer_model",
        required=required,
        metavar="PATH",
        help="local folder of the tokenizer, or its tokenizer.json, tekken.json or SentencePiece model",
    )
    group.add_argument("--tokenizer-type", choices=("HuggingFaceTokenizer",), help=argparse.SUPPRESS)
    _add(group, _ROWS)


def add_mask_options(parser: argparse.ArgumentParser) -> None:
    """The chat template, and what is trained on."""
    _add(parser.add_argument_group("chat template and masks"), _MASKS)


def add_packing_options(parser: argparse.ArgumentParser) -> None:
    """How sequences become packs."""
    _add(parser.add_argument_group("packing"), _PACKING)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text.encode())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:60]}: {str(error).replace(' of the row', '')}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text[:60]}: expected a JSON object, such as {{"enable_thinking": false}}')
    return value


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    known, rows = {**given(arguments), "out": arguments.output_prefix}, arguments.input
    try:
        rows = downloaded(known, rows) if arguments.download else rows
        options = preprocess_options(known)
    except FormatError as error:
        parser.error(str(error))
    if arguments.full and not arguments.dry_run:
        parser.error("--full goes with --dry-run: a run reads all rows anyway")
    if not arguments.dry_run:
        print(run_job(rows, options, staging=arguments.staging, summary=arguments.summary))
        return
    output = Output(options.prefix, staging=arguments.staging)
    with inputs_of(rows, output.local) as inputs:
        _show(preview(replace(options, inputs=inputs, prefix=output.local), full=arguments.full))


def _show(seen: Preview) -> None:
    which = "all rows" if seen.full else "first rows"
    for file, looked in zip(seen.files, seen.looked, strict=True):
        print(f"input           {file.path}: {file.kind}, {file.num_bytes:,} bytes")
        lengths = looked.lengths
        bad = f" ({looked.bad:,} cannot be used)" if looked.bad else ""
        print(
            f"  {which:<14}{looked.rows:,}{bad}: {len(lengths):,} sequences, {lengths.sum():,} tokens,"
            f" {looked.trained_tokens:,} trained"
        )
        if len(lengths):
            print(f"  lengths       {lengths.min():,} to {lengths.max():,}")
    for error in [error for looked in seen.looked for error in looked.bad_rows][:20]:
        print(f"bad row         {error}")
    if seen.packs:
        print(f"packs           {seen.packs}")
    for reason in seen.stops:
        print(f"would stop      {reason}")
    if first := next((looked.first for looked in seen.looked if looked.first), None):
        ids, mask = first
        print("the first sequence, trained tokens marked:\n")
        print(mark_pack(ids, mask, [0, len(ids)], seen.decode, color=in_color()))
    print("\nnothing was written")
