"""``megatron-sft-idx <verb> ...``.

Exit codes: 0 done, 1 bad data or a disk that says no, 2 wrong usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_sft_idx import __version__
from megatron_sft_idx.cli import (
    bench_read,
    convert,
    copy,
    inspect,
    merge,
    pack,
    preprocess,
    produce,
    raw_index,
    rebuild,
    verify,
)
from megatron_sft_idx.cli.messages import message_of
from megatron_sft_idx.errors import SFTIndexError

__all__ = ["main"]

_VERBS = (preprocess, pack, produce, convert, inspect, verify, rebuild, merge, copy, bench_read, raw_index)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="megatron-sft-idx",
        description="Packed SFT data for Megatron: five memory-mapped files a shard, exact loss masks.",
        epilog="megatron-sft-idx <verb> --help explains each verb, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="<verb>", required=True)
    for verb in _VERBS:
        verb.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        with _cleaning_up_when_terminated():
            return arguments.run(arguments, parser) or 0
    except SFTIndexError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python must not complain about it when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(message_of(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


@contextmanager
def _cleaning_up_when_terminated() -> Iterator[None]:
    """Make SIGTERM, which schedulers send, leave through all the ``finally`` and ``with`` on the way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(message: str) -> int:
    print(f"megatron-sft-idx: error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
