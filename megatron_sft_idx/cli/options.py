"""Declaration of commands and their options, and the options that several commands share.

A module declares its options in a text in the form of ``--help``, and ``declare`` converts it to argparse calls.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from megatron_sft_idx.cli.parsers import HelpFormatter
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.packs.destination import STAGING
from megatron_sft_idx.storage import Advice, BackendName, ReadOptions, require_local
from megatron_sft_idx.storage.publish import resolve

_UNITS = {"": 1} | {
    f"{letter}{binary}B": base ** (power + 1)
    for power, letter in enumerate("KMGT")
    for binary, base in (("", 1000), ("i", 1024))
}

Commands = Any  # argparse names the type of add_subparsers() only privately

# ---- declaring ----

# A declared option: its names, the placeholder of its value (none for a switch), and after two blanks its help.
_DECLARED = re.compile(r"(?P<names>[\w-]+(?:, [\w-]+)*)(?: (?P<metavar>\S+))?  +(?P<help>.*)")


def add_command(
    commands: Commands,
    name: str,
    line: str,
    text: str,
    run: Callable[[argparse.Namespace, argparse.ArgumentParser], int | None],
    *,
    product: Callable[[argparse.Namespace], bool] = lambda arguments: False,
) -> argparse.ArgumentParser:
    """Create the parser of a new command, without options.

    Args:
        commands: the result of ``add_subparsers``.
        name: the name of the command.
        line: what the command does, for the list of commands.
        text: its help: a paragraph about what it does, then examples.
        run: called with the parsed arguments and the parser of the command, whose ``error`` is for wrong usage. It
            returns the exit code; None means 0.
        product: returns whether, with these arguments, the printed output is the product of the command, so that losing
            it is an error.
    """
    description, _, examples = text.partition("\n\n")
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=line, description=description.replace("\n", " "), epilog=examples, formatter_class=HelpFormatter
    )
    parser.set_defaults(run=run, product=product, parser=parser)
    return parser


def declare(
    group: argparse._ActionsContainer, text: str, settings_of: Callable[[str], Any] = lambda name: {}, **settings: Any
) -> None:
    """Add options or arguments to a parser, or to a group of one.

    Args:
        group: the parser or group.
        text: one line for each, such as ``--seq-length N  capacity of a pack``; an indented line continues the previous
            line. Values N and M are integers of at least 1, all others are text. PATH... is one value or more. An
            option without a value is a switch.
        settings_of: returns further settings for the name of an option, such as ``seq_length``: its type; a tuple of
            choices, with the default first; its default; or arguments of ``add_argument``, a dict.
        **settings: the same by name, for options without a call of ``settings_of``.
    """
    for entry in re.split(r"\n(?! )", textwrap.dedent(text).strip()):
        entry_match = _DECLARED.fullmatch(re.sub(r"\n +", " ", entry))
        assert entry_match, entry
        names, metavar = entry_match["names"].split(", "), entry_match["metavar"]
        keywords: dict[str, Any] = {"help": entry_match["help"]}
        if metavar:
            keywords["metavar"] = metavar.removesuffix("...")
            keywords |= {"type": positive} if metavar in ("N", "M") else {}
            keywords |= {"nargs": "+"} if metavar.endswith("...") else {}
        name = names[0].lstrip("-").replace("-", "_")
        value = settings.pop(name) if name in settings else settings_of(name)
        if isinstance(value, dict):
            keywords |= value
        elif isinstance(value, tuple):
            keywords |= {"choices": value, "default": value[0]}
        else:
            keywords["type" if callable(value) else "default"] = value
        if not (metavar or {"choices", "action"} & keywords.keys()):
            keywords["action"] = "store_true"
        group.add_argument(*names, **keywords)
    assert not settings, settings


def preprocess_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the parsed options as arguments of ``tokenize.preprocess``; ``tokenizer_model`` becomes ``tokenizer``."""
    return {**vars(arguments), "tokenizer": arguments.tokenizer_model}


def in_color() -> bool:
    """Return whether to colour output: stdout is a colour terminal, and ``NO_COLOR`` is not set (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


# ---- values ----


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """Parse an integer of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least} to {2**31 - 1}")
    return value


def nbytes(text: str) -> int:
    """Parse a number of bytes, such as 500MB (of 1000) or 2GiB (of 1024)."""
    match = re.fullmatch(r"(\d{1,15})\s*(\w*)", text)
    if not match or match[2] not in _UNITS or not int(match[1]):
        units = ", ".join(unit for unit in _UNITS if unit)
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a number of bytes, if necessary with one of the units {units}"
        )
    unit: int = _UNITS[match[2]]
    return int(match[1]) * unit


def named_value(text: str) -> tuple[str, str]:
    """Parse the name and the value of a ``NAME=VALUE`` entry."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


def role_of_name(text: str) -> tuple[str, str]:
    """Parse the name and the role of a ``NAME=ROLE`` entry; a name may contain ``=``."""
    name, equals, role = text.rpartition("=")
    if not equals or not role:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=ROLE")
    return name, role


def file_weight(text: str) -> tuple[str, float]:
    """Parse the file and the number of a ``FILE=WEIGHT`` entry."""
    file, _, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        file, weight = "", 0.0
    if not file:
        raise argparse.ArgumentTypeError(f"{text}: expected FILE=WEIGHT, such as chats.jsonl=0.5")
    return file, weight


def writable(text: str) -> str:
    """Check before the work that a result file can be written, and return its path."""
    try:
        path = Path(resolve(text))
    except FormatError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: expected the path of a file, found a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: the folder {Path(text).parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: no permission to write in this folder")
    return text


def local_path(text: str) -> str:
    """Check that a path is local, for commands that do not support object stores."""
    try:
        require_local(text, "this command")
    except FormatError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


# ---- shared ----


def add_output_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options for the output shard and for progress; ``required`` says whether the prefix is."""
    group = parser.add_argument_group("output")
    declare(
        group,
        """
        --output-prefix PREFIX  path that the five files share, also s3:// or msc://; pass it to --data-path
        --output-shards N  write N shards, PREFIX-00000-of-0000N and so on; pass a glob or the folder to use all of
            them (default: one shard, at PREFIX)
        """,
        output_prefix={"required": required},
        output_shards=1,
    )
    add_staging(group)
    declare(
        group,
        """
        --overwrite  replace an existing shard at the prefix, and an existing file of --summary
        --summary FILE  write counts, and the seconds of each stage, as JSON
        """,
        summary=writable,
    )
    add_log_interval(group, "rows")


def add_staging(group: argparse._ActionsContainer) -> None:
    """Add the option for the local build folder of a shard for an object store."""
    declare(
        group,
        """
        --staging DIR  for s3:// and msc:// prefixes: local folder to build the shard in, with enough space for it
            (preprocess: for twice its size); interrupted work stays there, and the same command continues it
            (default: ./%(default)s)
        """,
        staging=STAGING,
    )


def add_log_interval(group: argparse._ActionsContainer, unit: str, default: int = 10_000) -> None:
    """Add ``--log-interval``; ``unit`` is the unit of progress, in the plural."""
    declared = (
        f"--log-interval N  without a terminal, print progress every N {unit}; 0 prints none (default: %(default)s)"
    )
    declare(group, declared, log_interval={"type": natural, "default": default})


def add_read_options(group: argparse._ActionsContainer) -> None:
    """Add the options for ``read_options``."""
    declare(
        group,
        f"""
        --read-backend {{{",".join(get_args(BackendName))}}}  mmap (also named os), the default, maps files into
            memory; pread and reopen make one system call per read, for file systems where mapping is slow or not
            allowed
        --no-mmap-bin-files  Megatron's name for --read-backend pread
        --read-advice  access pattern for the kernel to expect; random disables its read-ahead (default: %(default)s)
        --read-huge-pages  ask the kernel for huge pages
        """,
        no_mmap_bin_files={"dest": "mmap_bin_files", "action": "store_false"},
        read_advice=get_args(Advice),
    )


def read_options(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> ReadOptions:
    """Return the parsed options of ``add_read_options``.

    A contradiction between them ends the program with its usage.
    """
    backend: BackendName = arguments.read_backend or ("mmap" if arguments.mmap_bin_files else "pread")
    try:
        if backend in ("mmap", "os") and not arguments.mmap_bin_files:
            raise FormatError(
                f"--no-mmap-bin-files and --read-backend {backend} contradict each other; leave one of them out"
            )
        return ReadOptions.of(
            "--read-backend", backend, advice=arguments.read_advice, huge_pages=arguments.read_huge_pages
        )
    except FormatError as error:
        parser.error(str(error))
