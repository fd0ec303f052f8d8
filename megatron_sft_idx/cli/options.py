"""Options that several verbs share, and the values they take."""

from __future__ import annotations

import argparse
import os
import re
import sys
from copy import copy
from pathlib import Path
from typing import Any, get_args

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.packs.buckets import STAGING
from megatron_sft_idx.storage import Advice, BackendName, ReadOptions, is_remote
from megatron_sft_idx.storage.publish import resolve

__all__ = [
    "TOKENIZER_MODEL",
    "HelpFormatter",
    "Verbs",
    "add_log_interval",
    "add_output_options",
    "add_read_options",
    "add_staging",
    "given",
    "in_color",
    "local_path",
    "natural",
    "nbytes",
    "positive",
    "read_options",
    "writable",
]


_UNITS = {"": 1} | {
    f"{letter}{binary}B": base ** (power + 1)
    for power, letter in enumerate("KMGT")
    for binary, base in (("", 1000), ("i", 1024))
}

Verbs = Any  # argparse names the type of add_subparsers() only privately


# Megatron's name for --tokenizer, which helps those who know it, and would only puzzle others.
TOKENIZER_MODEL = "--tokenizer-model"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps a description that is one line; examples, which have lines of their own, stay as they are.

    Second names that options have in Megatron are taken and not shown.
    """

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if TOKENIZER_MODEL in action.option_strings:
            action = copy(action)
            action.option_strings = [name for name in action.option_strings if name != TOKENIZER_MODEL]
        return super()._format_action_invocation(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parsed options by the names of ``tokenize.preprocess``, which calls the tokenizer what it is."""
    return {**vars(arguments), "tokenizer": arguments.tokenizer_model}


def in_color() -> bool:
    """Whether what is printed may be coloured: by a terminal that can, and nobody who said no (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number of 0 or more."""
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
    """A number of bytes, such as 500MB (of 1000) or 2GiB (of 1024)."""
    found = re.fullmatch(r"(\d{1,15})\s*(\w*)", text)
    if not found or found[2] not in _UNITS or not int(found[1]):
        units = ", ".join(unit for unit in _UNITS if unit)
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of bytes, also with {units}")
    unit: int = _UNITS[found[2]]
    return int(found[1]) * unit


def writable(text: str) -> str:
    """A file that can be made; asked before hours of work, of which it is to tell."""
    try:
        path = Path(resolve(text))
    except FormatError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: a folder is there, expected the name of a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {Path(text).parent}")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: may not be written")
    return text


def local_path(text: str) -> str:
    """A path on a disk, for what cannot be done inside an object store."""
    try:
        remote = is_remote(text)
    except FormatError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if remote:
        raise argparse.ArgumentTypeError(
            f"{text}: this works on local files; bring the shard here and back with megatron-sft-idx copy SRC DST"
        )
    return text


def add_staging(parser: Any) -> None:
    """Where a shard for an object store is built."""
    parser.add_argument(
        "--staging",
        default=STAGING,
        metavar="DIR",
        help="for s3:// and msc:// prefixes: local folder to build in, with room for it (preprocess: twice);"
        " what an interrupted run or upload left there is gone on with (default: ./%(default)s)",
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Where the shard goes and what is said on the way."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="path that the five files share, also s3:// or msc://; --data-path takes it",
    )
    group.add_argument(
        "--output-shards",
        type=positive,
        default=1,
        metavar="N",
        help="cut the packs into N shards, PREFIX-00000-of-0000N and so on; a glob or the folder names them all"
        " (default: one shard, at PREFIX)",
    )
    add_staging(group)
    group.add_argument("--overwrite", action="store_true", help="replace the shard at the prefix, and the summary")
    group.add_argument("--summary", type=writable, metavar="FILE", help="write counts and seconds as JSON")
    add_log_interval(group, "rows")


def add_log_interval(parser: argparse._ActionsContainer, unit: str, default: int = 10_000) -> None:
    """How often progress is told without a terminal; ``unit`` is what it counts, in the plural."""
    parser.add_argument(
        "--log-interval",
        type=natural,
        default=default,
        metavar="N",
        help=f"without a terminal, a line of progress every N {unit}; 0 for none (default: %(default)s)",
    )


def add_read_options(group: argparse._ActionsContainer) -> None:
    """Add them; ``read_options`` takes them up."""
    group.add_argument(
        "--read-backend",
        metavar="{" + ",".join(get_args(BackendName)) + "}",
        help="mmap (os is the same): memory maps, the default; pread and reopen: a system call for each read, where"
        " mapping is slow or refused",
    )
    group.add_argument(
        "--no-mmap-bin-files",
        dest="mmap_bin_files",
        action="store_false",
        help="Megatron's way to say --read-backend pread",
    )
    group.add_argument(
        "--read-advice",
        choices=get_args(Advice),
        default="normal",
        help="what the kernel is told of the order of reads; random switches its read-ahead off",
    )
    group.add_argument("--read-huge-pages", action="store_true", help="ask the kernel for huge pages")


def read_options(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> ReadOptions:
    """The parsed options; a mistake ends the program with its usage."""
    backend: BackendName = arguments.read_backend or ("mmap" if arguments.mmap_bin_files else "pread")
    try:
        if backend in ("mmap", "os") and not arguments.mmap_bin_files:
            raise FormatError(f"--no-mmap-bin-files and --read-backend {backend}: leave one of them out")
        return ReadOptions.of(
            "--read-backend",
            backend,
            advice=arguments.read_advice,
            huge_pages=arguments.read_huge_pages,
        )
    except FormatError as error:
        parser.error(str(error))
