"""Advice for options and commands that do not exist: names from other trainers, then the nearest name.

Command lines and ``--config`` files use the same functions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_sft_idx.errors import did_you_mean, nearest_names

# ---- the table ----

# For each set of names: the option that a command must have for the line to apply ("" for every command), the names in
# Megatron-LM, Megatron-Bridge, NeMo, LLaMA-Factory, ms-swift and TRL, and what to write here. If several lines have the
# same name, the first one that applies counts.
_HABITS = (
    # Rows.
    (
        "--row-kind",
        "json-keys json-key messages-key messages columns chat-field conversation-column dataset-text-field"
        " text-column prompt-template-keys",
        "set the name of the field with the turns: --fields messages=NAME",
    ),
    (
        "--row-kind",
        "split-sentences keep-newlines lang",
        "leave it out; text is tokenised unchanged and never split into sentences",
    ),
    (
        "--row-kind",
        "sft finetuning-type stage task dataset-type data-format",
        "leave it out; the kind of a row is inferred from its fields",
    ),
    (
        "--input",
        "dataset datasets dataset-name dataset-dir dataset-path dataset-root data data-path data-paths data-files"
        " data-file train-file train-data-path train-files input-file input-files input-path jsonl i",
        "pass files, globs or folders with --input PATH...",
    ),
    ("--max-rows", "max-samples max-train-samples num-samples max-documents", "--max-rows N uses the first N rows"),
    (
        "--valid-fraction",
        "split val-size eval-ratio test-size split-dataset-ratio validation-split",
        "--valid-fraction SHARE puts a share of the rows into a shard at PREFIX.valid",
    ),
    ("--repeat", "input-weight mix-strategy interleave-probs", "repeat the rows of a file with --repeat FILE=W"),
    ("--loss-weight", "source-weight", "weight the loss of a file with --loss-weight FILE=W"),
    # Tokenizer and masks.
    (
        "--row-kind",
        "model model-name-or-path model-path model-id hf-model-path load tokenizer-path tokenizer-name"
        " tokenizer-name-or-path vocab-file merge-file merges-file",
        "pass the folder of the tokenizer, or its tokenizer.json, with --tokenizer PATH",
    ),
    (
        "--row-kind",
        "vocab-size vocab-extra-ids make-vocab-size-divisible-by tokenizer-metadata tiktoken-pattern"
        " tiktoken-num-special-tokens tiktoken-special-tokens legacy-tokenizer use-fast-tokenizer",
        "leave it out; everything about the tokenizer comes from --tokenizer PATH",
    ),
    ("--row-kind", "trust-remote-code", "leave it out; code in the folder of a tokenizer is never run"),
    (
        "--chat-template",
        "template prompt-template prompt-format sft-tokenizer-prompt-format chat-template-path jinja-template"
        " template-type",
        "the template comes with --tokenizer PATH; pass another one with --chat-template FILE",
    ),
    (
        "--chat-template-kwargs",
        "enable-thinking",
        "pass it to the template with --chat-template-kwargs '{\"enable_thinking\": false}'",
    ),
    (
        "--train-on",
        "train-on-prompt train-on-inputs mask-history mask-prompt loss-scale assistant-only-loss completion-only-loss"
        " answer-only-loss",
        "choose what is trained on with --train-on",
    ),
    ("--earlier-reasoning", "turns", "choose what happens to removed reasoning with --earlier-reasoning"),
    ("--append-eod", "append-eos add-eos add-eos-token", "--append-eod ends each sequence with that token"),
    ("--eod-id", "eos-id eos-token-id eod", "pass the id with --eod-id"),
    # Packs.
    (
        "--seq-length",
        "max-length max-len max-seq-length max-seq-len seq-len sequence-length cutoff-len block-size model-max-length"
        " max-model-len packed-sequence-size packing-length pack-size capacity",
        "set the number of token positions in a pack with --seq-length N",
    ),
    (
        "--packing",
        "keep-sequential-samples",
        "keep the order of rows with --packing sequential, or --packing none for one sequence in each pack",
    ),
    (
        "--packing",
        "packing-strategy packing-algorithm packing-method neat-packing padding-free group-by-length",
        "leave it out, or choose a method with --packing; attention never crosses sequences",
    ),
    (
        "--overlong",
        "truncation truncation-strategy truncation-mode truncate truncation-side",
        "choose what happens to long sequences with --overlong",
    ),
    (
        "--sequence-multiple",
        "pad-seq-to-mult pad-seq-length-to-mult pad-to-multiple-of context-parallel-size cp",
        "--sequence-multiple M leaves room for padding; for context parallelism, M is 2 x its size",
    ),
    # Output and running.
    ("--output-shards", "partitions num-shards shards", "write several shards with --output-shards N"),
    (
        "--tokens-per-shard",
        "partitions num-shards shards output-shards",
        "--tokens-per-shard N sets the size of a shard",
    ),
    (
        "--output-prefix",
        "output output-path output-dir output-file output-name out o save-path destination",
        "pass the path that the five files share with --output-prefix PREFIX",
    ),
    (
        "--catalog",
        "output output-path output-dir output-file output-prefix output-name out o save-path destination",
        "pass the folder for the shards with --catalog FOLDER",
    ),
    ("--overwrite", "overwrite-output-dir overwrite-cache force f", "--overwrite replaces what is there"),
    ("--workers", "num-workers num-proc dataset-num-proc preprocessing-num-workers jobs j", "set it with --workers N"),
    (
        "--workers",
        "find-optimal-num-workers workers-to-check max-documents performance-dir",
        "leave it out, or set the number of processes with --workers N",
    ),
    ("", "dataset-impl", "leave it out; there is one format, five files with the same prefix"),
    ("", "resume resume-from-checkpoint", "run the same command again; it continues the interrupted run"),
    ("--lossy", "allow-loss", "--lossy leaves out what the result has no place for"),
)
# Options that do not exist for commands with positional arguments, because an argument takes the value.
_INPUTS = "input input-prefix input-file input-path inputs prefix path shard shards source src data data-path idx bin i"
_OUTPUTS = "output output-prefix output-path output-file output-dir out dst dest destination target o"
# Advice for existing options that does not depend on the value.
_VALUE_HABITS = {"tokenizer-type": "leave it out; --tokenizer PATH and its chat template decide"}
_COMMANDS = {
    "preprocess": "preprocess-data preprocess-sft tokenize tokenise encode build create make",
    "pack": "repack",
    "produce": "stream watch live",
    "inspect": "show view look info stats print cat head dump find search diff compare",
    "verify": "check validate test fsck",
    "rebuild": "repair fix recover restore salvage mend rebuild-index",
    "convert": "export import transform",
    "merge": "join concat combine merge-datasets",
    "split": "divide shard",
    "copy": "cp upload download sync move mv",
    "create-raw-index": "index raw-index",
}
# Longer names are truncated before the comparison.
_MAX_LENGTH = 80


@dataclass(frozen=True)
class Habit:
    """A line of the table.

    Attributes:
        needs: the option that a command must have for the line to apply; "" for every command.
        names: options of other programs, without leading dashes.
        advice: what to write here.
    """

    needs: str
    names: tuple[str, ...]
    advice: str


HABITS = tuple(Habit(needs, tuple(names.split()), advice) for needs, names, advice in _HABITS)


# ---- advice ----


def option_advice(
    name: str, known: Collection[str], arguments: Collection[str] = (), call: str = "", dashes: str = "--"
) -> str:
    """Return what to write instead of an unknown option, as the end of a sentence; "" if no name is near.

    Args:
        name: the option, without leading dashes.
        known: the options of the command, without leading dashes.
        arguments: names of the command's positional arguments.
        call: how the command is called with its arguments, such as ``megatron-sft-idx rebuild PREFIX...``.
        dashes: the prefix of options in the place where this one was found.

    >>> option_advice("toknizer", ["tokenizer", "input"])
    '; did you mean --tokenizer?'
    >>> option_advice("output_prefix", ["output-prefix"], dashes="")
    '; did you mean output-prefix?'
    """
    spelled = name[:_MAX_LENGTH].lower().replace("_", "-")
    if spelled in known:
        return f"; did you mean {dashes}{spelled}?"
    if (arguments and spelled in _INPUTS.split()) or ("destination" in arguments and spelled in _OUTPUTS.split()):
        return f": pass it without a flag, as in {call}"
    for habit in HABITS:
        if spelled in habit.names and (not habit.needs or habit.needs.lstrip("-") in known):
            return f": {habit.advice}"
    return did_you_mean([dashes + each for each in nearest_names(spelled, known)])


def command_advice(name: str, known: Collection[str]) -> str:
    """Return what to write instead of an unknown command, as the end of a sentence; "" if no name is near.

    >>> command_advice("tokenize", ["preprocess", "pack"])
    '; did you mean preprocess?'
    """
    spelled = name[:_MAX_LENGTH].lower().replace("_", "-")
    meant = [command for command, names in _COMMANDS.items() if command in known and spelled in names.split()]
    return did_you_mean(meant or nearest_names(spelled, known))


def value_advice(option: str, value: str, choices: Collection[str]) -> str:
    """Return what to write instead of an invalid value of an option, as the end of a sentence.

    >>> value_advice("packing", "sequental", ["auto", "sequential"])
    ', choose one of auto, sequential; did you mean sequential?'
    """
    if option in _VALUE_HABITS:
        return f": {_VALUE_HABITS[option]}"
    return f", choose one of {', '.join(choices)}" + did_you_mean(nearest_names(value[:_MAX_LENGTH].lower(), choices))
