"""Options that say how the bytes of shards are read."""

from __future__ import annotations

import argparse
from typing import get_args

from megatron_sft_idx.cli.options import nbytes
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import CACHE_NBYTES, Advice, BackendName, ReadOptions

__all__ = ["add_read_options", "read_options"]


def add_read_options(group: argparse._ActionsContainer) -> None:
    """Add them; ``read_options`` takes them up."""
    group.add_argument(
        "--read-backend",
        choices=get_args(BackendName),
        help="mmap (os is the same): memory maps, the default; process: blocks read ahead of use into memory of this"
        " process, where mapping is slow or refused; pread and reopen: a system call for each read",
    )
    group.add_argument(
        "--no-mmap-bin-files",
        dest="mmap_bin_files",
        action="store_false",
        help="Megatron's way to say --read-backend process",
    )
    group.add_argument(
        "--read-cache",
        type=nbytes,
        default=CACHE_NBYTES,
        metavar="SIZE",
        help="of --read-backend process: memory for blocks, in every process that reads, such as 64MiB;"
        f" default: {CACHE_NBYTES >> 20}MiB",
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
    backend: BackendName = arguments.read_backend or ("mmap" if arguments.mmap_bin_files else "process")
    try:
        if backend in ("mmap", "os") and not arguments.mmap_bin_files:
            raise FormatError(f"--no-mmap-bin-files and --read-backend {backend}: leave one of them out")
        return ReadOptions.of(
            "--read-backend",
            backend,
            cache_bytes=arguments.read_cache,
            advice=arguments.read_advice,
            huge_pages=arguments.read_huge_pages,
        )
    except FormatError as error:
        parser.error(str(error))
