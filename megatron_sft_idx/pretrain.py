"""``python -m megatron_sft_idx.pretrain SCRIPT ...``: a script of Megatron-LM, unchanged, on packed SFT data.

The script runs as ``python SCRIPT ...`` would run it. When it calls Megatron's ``pretrain()``, the data sets that it
wanted to hand over are replaced: ``training.provider`` builds others. Megatron is not imported before the script's
folder is on the search path, so that the Megatron next to the script is the one that runs.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_sft_idx.cli.parsers import HelpFormatter, Parser
from megatron_sft_idx.errors import SFTIndexError

PROGRAM = "python -m megatron_sft_idx.pretrain"
# The parameter of Megatron's pretrain(), in all releases.
_PROVIDER = "train_valid_test_dataset_provider"

_DESCRIPTION = """\
Run a pretraining script of Megatron-LM, such as pretrain_gpt.py or pretrain_hybrid.py, on packed SFT data. The script
is not edited. Options of this program come before or after SCRIPT. All other options are passed to the script, such as
--data-path, --split and --seq-length.
"""
_EXAMPLE = """\
examples:
  one process:
    python -m megatron_sft_idx.pretrain Megatron-LM/pretrain_gpt.py --data-path data/train --split 99,1,0 \\
        --sft --no-create-attention-mask-in-dataloader --calculate-per-token-loss --seq-length 4096 ...

  eight GPUs:
    torchrun --nproc-per-node 8 -m megatron_sft_idx.pretrain Megatron-LM/pretrain_gpt.py ...

  pack the sequences when training starts, for a shard of any --seq-length:
    python -m megatron_sft_idx.pretrain --index-only-packing Megatron-LM/pretrain_gpt.py ...

The flags --sft, --no-create-attention-mask-in-dataloader and --calculate-per-token-loss are needed. Arguments that
would hang, or would not train on exactly what the shards contain, are rejected with a remedy.
"""


def build_parser() -> Parser:
    """The parser of this program's own options and of the script; each option is one of the provider's."""
    parser = Parser(prog=PROGRAM, description=_DESCRIPTION, epilog=_EXAMPLE, formatter_class=HelpFormatter)
    parser.add_argument(
        "script", metavar="SCRIPT", help="Megatron-LM's pretrain_gpt.py, or another that calls pretrain()"
    )
    _add_options(parser)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = functools.partial(parser.add_argument, default=argparse.SUPPRESS)
    add(
        "--index-only-packing",
        action="store_true",
        help="pack the sequences of the shards for --seq-length when training starts; no file is rewritten",
    )
    add(
        "--packing-method",
        metavar="METHOD",
        help="method of --index-only-packing, see megatron-sft-idx pack; default: auto",
    )
    add("--max-sequences-per-pack", type=int, metavar="N", help="limit for --index-only-packing; default: no limit")
    add(
        "--plan-cache",
        metavar="FOLDER",
        help="folder for the plans of --index-only-packing; default: the folder of --data-cache-path",
    )
    add("--pad-id", type=int, metavar="ID", help="id for padding rows; default: the pad id of the shards")
    add(
        "--ignore-media",
        action="store_true",
        help="train on shards with images and audio as if their placeholder tokens were text; without this option"
        " they are rejected",
    )
    add(
        "--columns",
        type=lambda names: tuple(names.split(",")),
        metavar="NAME,...",
        help="columns to return with rows; the script's get_batch must use them, otherwise Megatron drops them",
    )
    add(
        "--padding-mask",
        action="store_true",
        help="add padding_mask to rows, for a script whose forward_step passes it to the model",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code: 0, 1 for data that cannot be trained on, 2 for wrong usage."""
    parser = build_parser()
    script, options, rest = divide(parser, list(sys.argv[1:] if argv is None else argv))
    if wrong := _script_complaint(script):
        parser.error(wrong)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    sys.argv = [script, *rest]
    try:
        with _pretrain_replaced(options) as was_called:
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as ending:
                if was_called() or ending.code or {"-h", "--help"}.intersection(rest):
                    raise
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        parser.error(
            f"{error}; use the script in a Megatron-LM checkout, add the checkout to PYTHONPATH, or install"
            " megatron-core 0.19 or later, which includes megatron.training"
        )
    except SFTIndexError as error:
        print(*(f"{PROGRAM}: error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return 1
    if not was_called():
        parser.error(
            f"{script}: the script ended without calling Megatron's pretrain(), so nothing was trained; {_REMEDY}"
        )
    return 0


_REMEDY = "use a script that calls it, such as Megatron-LM's pretrain_gpt.py"


def divide(parser: Parser, words: list[str]) -> tuple[str, dict[str, Any], list[str]]:
    """The script, this program's options for the provider, and the arguments of the script in their order."""
    begin = 0
    while begin < len(words) and words[begin].startswith("-"):
        action = parser._option_string_actions.get(words[begin])
        begin += 1 if action is None or action.nargs == 0 else 2
    parsed = parser.parse_args(words[: begin + 1])
    behind = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    _add_options(behind)
    parsed, rest = behind.parse_known_args(words[begin + 1 :], parsed)
    options = vars(parsed)
    return options.pop("script"), options, rest


def _script_complaint(script: str) -> str:
    """Why a path is no script that could call ``pretrain()``; empty if it may be one."""
    try:
        with open(script, encoding="utf-8") as file:
            source = file.read()
    except FileNotFoundError:
        return f"{script}: no such script; pass the path of Megatron-LM's pretrain_gpt.py or pretrain_hybrid.py"
    except OSError as error:
        return f"{script}: {error.strerror}; pass the path of a script, such as Megatron-LM/pretrain_gpt.py"
    except UnicodeDecodeError:
        return f"{script}: not a Python script; {_REMEDY}"
    return "" if "pretrain" in source else f"{script}: the script never calls Megatron's pretrain(); {_REMEDY}"


@contextmanager
def _pretrain_replaced(options: dict[str, Any]) -> Iterator[Callable[[], bool]]:
    """While entered, Megatron's ``pretrain()`` takes our provider. Yields a function that says if it was called."""
    import megatron.training
    from megatron.training import training

    stock, called = training.pretrain, []
    parameters = inspect.signature(stock)

    @functools.wraps(stock)
    def pretrain(*args: Any, **named: Any) -> Any:
        from megatron_sft_idx.training.provider import train_valid_test_datasets_provider

        provider = functools.partial(train_valid_test_datasets_provider, **options)
        provider.is_distributed = True  # type: ignore[attr-defined]
        bound = parameters.bind(*args, **named)
        bound.arguments[_PROVIDER] = provider
        called.append(True)
        return stock(*bound.args, **bound.kwargs)

    places = (megatron.training, training)
    for place in places:
        place.pretrain = pretrain
    try:
        yield lambda: bool(called)
    finally:
        for place in places:
            place.pretrain = stock


if __name__ == "__main__":
    sys.exit(main())
