"""The program ``megatron-sft-idx <command> ...``: find the command's module, run it, and convert errors to exit codes.

Exit codes: 0 success, 1 bad data or a failed disk, 2 wrong usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from importlib import import_module

from megatron_sft_idx import __version__
from megatron_sft_idx.cli.parsers import CommandParser, HelpFormatter, Parser
from megatron_sft_idx.cli.signals import ending_on_signals
from megatron_sft_idx.cli.streams import STDOUT, Output, message_of, print_error, program_name, standard_streams
from megatron_sft_idx.errors import SFTIndexError

# Commands by purpose, with the module of each. Only the module of the current command is imported, because importing
# all of them takes a tenth of a second.
_COMMANDS = {
    "prepare": {"preprocess": "preprocess", "pack": "preprocess", "produce": "produce"},
    "inspect": {"inspect": "inspect", "verify": "verify"},
    "repair": {"rebuild": "verify"},
    "convert and move": {
        "convert": "convert",
        "merge": "move",
        "split": "move",
        "copy": "move",
        "create-raw-index": "convert",
    },
}

_EXAMPLE = """\
example:
  make a packed shard, which Megatron can train on, from chats:
    megatron-sft-idx preprocess --input chats.jsonl --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --output-prefix data/train

megatron-sft-idx <command> --help explains each command, with examples.
Every command can also read its options from a YAML file: --config FILE.yaml. --print-config prints such a file.
"""


class _CommandListFormatter(HelpFormatter):
    """Lists the commands of each purpose under it."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        lines, shown = [], {each.dest: each for each in action._get_subactions()}
        for purpose, commands in _COMMANDS.items():
            lines.append(f"{'':{self._current_indent}}{purpose}:\n")
            self._indent()
            lines += [self._format_action(shown[command]) for command in commands if command in shown]
            self._dedent()
        return "".join(lines)


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """Return the program's parser, with the options of one command, or of all if ``command`` does not exist."""
    parser = Parser(
        prog=program_name(),
        description="Packed SFT data for Megatron: shards of five memory-mapped files, with exact loss masks.",
        epilog=_EXAMPLE,
        formatter_class=_CommandListFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="<command>", required=True, parser_class=CommandParser)
    modules = {name: module for group in _COMMANDS.values() for name, module in group.items()}
    for module in [modules[command]] if command in modules else dict.fromkeys(modules.values()):
        import_module(f"megatron_sft_idx.cli.{module}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Without ``argv``, the process is the program and ends after it."""
    with standard_streams() as output:
        try:
            return _run(argv, output)
        except SFTIndexError as error:
            return _fail(str(error))
        except OSError as error:
            if isinstance(error, BrokenPipeError) and error.filename == STDOUT:
                return 1  # the reader of the pipe has closed it, like head
            return _fail(message_of(error))
        except MemoryError as error:  # pyarrow's is one too
            return _fail(f"not enough memory{f' ({error})' if str(error) else ''}; --help lists options that need less")
        except RecursionError:
            return _fail("the input is nested too deeply; use fewer levels")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130


def _run(argv: Sequence[str] | None, output: Output) -> int:
    is_program = argv is None
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser(*argv[:1])
    if wrong := [word for word in argv if "\0" in word]:
        parser.error(f"{wrong[0][:60]!r}: contains a NUL byte, which is not allowed in paths and options; remove it")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exit_request:
        sys.stdout.flush()
        if not exit_request.code and output.error is not None:  # after --help, --version and --print-config
            raise output.error from None
        raise
    output.strict = arguments.product(arguments)
    if output.strict and output.error is not None:
        raise output.error
    with ending_on_signals(is_program=is_program):
        code: int = arguments.run(arguments, arguments.parser) or 0
    sys.stdout.flush()
    lost = output.error
    if lost is not None and output.strict:
        raise lost
    if lost is not None and lost.errno not in (errno.EBADF, errno.EPIPE):
        print(
            (f"{program_name()}: {message_of(lost)}; only this output was lost, the command itself succeeded"),
            file=sys.stderr,
        )
    return code


def _fail(message: str) -> int:
    print_error(message)
    return 1


if __name__ == "__main__":
    sys.exit(main())
