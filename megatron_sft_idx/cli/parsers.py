"""argparse for this program: exact names, short error messages for wrong usage, and options from a file.

``Parser`` is for every program. ``CommandParser`` adds ``--config`` and ``--print-config``, which work for every
option: a file is read as if its values were given as flags, and the printed output is such a file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_sft_idx.cli.config_file import (
    ConfigValue,
    YamlJson,
    YamlList,
    YamlMapping,
    YamlNumber,
    YamlText,
    YamlValue,
    config_text,
    read_config,
    to_json,
)
from megatron_sft_idx.cli.habits import command_advice, option_advice, value_advice
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.lines import on_one_line, print_layout, unescaped

# Options of the program itself, which cannot be set in a file.
_NOT_IN_FILES = ("help", "config", "print_config")
_CONFIG_HELP = """\
read options from this YAML file, one per line, such as seq-length: 4096; keys are the long option names without the
leading dashes. Use a list for several values, and true or false for switches. Options on the command line override the
file. Relative paths are relative to the current folder, as on the command line"""
_PRINT_HELP = "print all options of this run in the format of --config, and do nothing else"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps a description of one line. Examples, which have several lines, are not changed.

    Megatron's second name of ``--tokenizer`` is accepted, but not shown.
    """

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if "--tokenizer-model" in action.option_strings:
            action = copy(action)
            action.option_strings = action.option_strings[:1]
        return super()._format_action_invocation(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


class Collected(argparse.Action):
    """Collects the values of a repeatable option in a tuple."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Add a given value."""
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), values))


class Mapped(argparse.Action):
    """Collects the ``NAME=VALUE`` entries of a repeatable option in a dict."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Add the given entries. A duplicate name is an error."""
        given = dict(getattr(namespace, self.dest) or {})
        for name, value in values:
            if name in given:
                raise argparse.ArgumentError(self, f"{name} is given twice")
            given[name] = value
        setattr(namespace, self.dest, given)


# ---- wrong usage ----


class Parser(argparse.ArgumentParser):
    """A parser of exact names. For wrong usage it prints the required options and one line with the error.

    Help and usage keep their line breaks. Names are never completed, so that a wrong name is not accepted as another
    one.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, **keywords)

    def format_usage(self) -> str:
        """Return the required options in one line, and where to find the rest."""
        listed = "lists all options" if self._subparsers is None else "lists all commands"
        return f"usage: {self._call()}\n       {self.prog} --help {listed}\n"

    def error(self, message: str) -> NoReturn:
        """Print the short usage and the error, and end the program with exit code 2."""
        super().error(on_one_line(message))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, but report an unknown option first, with advice."""
        words = list(sys.argv[1:] if args is None else args)
        if unknown := self._unknown_option(words):
            self.error(unknown)
        parsed, rest = super().parse_known_args(words, namespace)
        if rest:
            is_input = "--input" in self._option_string_actions and not self._arguments()
            remedy = "pass input with --input" if is_input else "quote a value that contains spaces"
            self.error(f"unexpected argument {brief(rest[0])}; {remedy}")
        return parsed, rest

    def _call(self) -> str:
        """Return how the program is called, with all required options."""
        return " ".join([self.prog, *map(_placeholder, self._arguments()), *self._needed(), "[options]"])

    def _arguments(self) -> list[argparse.Action]:
        """Return the positional arguments."""
        return [action for action in self._actions if not action.option_strings]

    def _needed(self) -> Iterator[str]:
        """Yield the required options."""
        for action in self._actions:
            if action.option_strings and action.required:
                yield f"{action.option_strings[0]} {_placeholder(action)}"
        for group in self._mutually_exclusive_groups:
            if group.required:
                options = [f"{each.option_strings[0]} {_placeholder(each)}" for each in group._group_actions]
                yield f"({' | '.join(options)})"

    def _unknown_option(self, words: Sequence[str]) -> str:
        """Return the error about the first unknown option among the words, or ""."""
        before: argparse.Action | None = None
        for word in words:
            action = self._named(word)
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                break
            is_value = not word.startswith("-") or len(word) == 1 or " " in word
            if action is None and not is_value and not self._negative_number_matcher.match(word):
                name = word.partition("=")[0]
                complaint = f"unknown option {name[:60]}{self._advice(name)}"
                if before is not None and before.nargs != 0 and not word.startswith("--"):
                    complaint += (
                        f"; if {word[:60]} is the value of {before.option_strings[0]}, write"
                        f" {before.option_strings[0]}={word[:60]}"
                    )
                return complaint
            before = action
        return ""

    def _advice(self, name: str) -> str:
        known = [option.lstrip("-") for option in self._option_string_actions if option.startswith("--")]
        if self._subparsers is not None:
            return option_advice(name.lstrip("-"), known) or ": options must come after the command"
        arguments = self._arguments()
        call = " ".join([self.prog, *map(_placeholder, arguments)])
        return option_advice(name.lstrip("-"), known, [action.dest for action in arguments], call)

    def _named(self, word: str) -> argparse.Action | None:
        """Return the option for a word of a command line."""
        return self._option_string_actions.get(word) or self._option_string_actions.get(word.partition("=")[0])

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            commands = list(action.choices)
            advice = command_advice(value, commands) or f", choose one of {', '.join(commands)}"
            raise argparse.ArgumentError(None, f"unknown command {brief(value)}{advice}")
        option = action.dest.replace("_", "-")
        advice = value_advice(option, str(value), [str(choice) for choice in action.choices])
        raise argparse.ArgumentError(action, brief(value) + advice)

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(message, unescaped(file or sys.stderr))


def _placeholder(action: argparse.Action) -> str:
    """Return the placeholder for the value of an option or argument in its usage."""
    if action.nargs == 0:
        return ""
    shown = f"{{{','.join(map(str, action.choices))}}}" if action.choices is not None else action.dest.upper()
    name = action.metavar if isinstance(action.metavar, str) else shown
    return f"{name}..." if action.nargs in ("+", "*") else name


# ---- options from a file ----


class CommandParser(Parser):
    """The parser of a command. It also takes options from a file, and prints all options as such a file."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.add_argument("--config", metavar="FILE.yaml", help=_CONFIG_HELP)
        self.add_argument("--print-config", action="store_true", help=_PRINT_HELP)
        # The texts given as values of an option, as a flag or in the file.
        self._texts: dict[argparse.Action, list[str]] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words, which override the options in the file of ``--config``."""
        words = list(sys.argv[1:] if args is None else args)
        namespace = argparse.Namespace() if namespace is None else namespace
        self._texts = {}
        given, path = self._given(words)
        taken: list[argparse.Action] = []
        if path is not None and not any(action.dest == "help" for action in given):
            try:
                taken = self._take(read_config(path), path, given, namespace)
            except FormatError as error:
                self.error(str(error))
        with self._not_required(taken):
            parsed, rest = super().parse_known_args(words, namespace)
        if parsed.print_config:
            unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
            print_layout(config_text(self._entries(parsed), ascii_only=not unicode))
            self.exit()
        return parsed, rest

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        before = self._texts.get(action, []) if _may_be_repeated(action) else []
        self._texts[action] = [*before, *arg_strings]
        if not action.option_strings or action.nargs == 0:
            return super()._get_values(action, arg_strings)
        # argparse would drop the value of --output-prefix=--, and store a list.
        values = [self._get_value(action, text) for text in arg_strings]
        for value in values:
            self._check_value(action, value)
        return values if action.nargs is not None else values[0]

    def _given(self, words: Sequence[str]) -> tuple[list[argparse.Action], str | None]:
        """Return the options on a command line, and the file of ``--config``."""
        given: list[argparse.Action] = []
        path = None
        for i, word in enumerate(words):
            if word == "--":
                break
            if (action := self._named(word)) is None:
                continue
            if action.dest == "config":
                if action in given:
                    self.error("--config is given twice; put all options into one file")
                _, equals, value = word.partition("=")
                following = words[i + 1] if i + 1 < len(words) else "-"
                # If no file follows, argparse reports that.
                path = value if equals else None if following.startswith("-") else following
            given.append(action)
        return given, path

    def _take(
        self, config: YamlMapping, path: str, given: Sequence[argparse.Action], namespace: argparse.Namespace
    ) -> list[argparse.Action]:
        """Set the options in a file, unless the command line overrides them. Return the options that were set.

        Raises:
            FormatError: a key is not an option of the command, or its value is invalid.
        """
        overruled = {each.dest for action in given for each in self._rivals(action)}
        keys: dict[argparse.Action, YamlText] = {}
        taken: list[_Taken] = []
        for key, value in config.entries:
            where = f"{path}:{key.line}: {key.text[:60]}"
            action = self._option_of(key, path)
            if action in keys:
                raise FormatError(
                    f"{where}: already set on line {keys[action].line}, as {keys[action].text}; remove one"
                )
            keys[action] = key
            one = _taken(action, key, value, path)
            if one is None:
                continue
            for other in taken:
                if other.action in self._rivals(action):
                    line = keys[other.action].line
                    raise FormatError(f"{where}: cannot be combined with {keys[other.action].text} on line {line}")
            taken.append(one)
            if action.dest not in overruled:
                self._set(one, namespace, where)
        return [one.action for one in taken if one.action.dest not in overruled]

    def _option_of(self, key: YamlText, path: str) -> argparse.Action:
        """Return the option for a key of a file."""
        name = key.text.replace("_", "-")
        action = self._option_string_actions.get(f"--{name}")
        if action is None:
            known = [option.lstrip("-") for option in self._option_string_actions if option.startswith("--")]
            known = [each for each in known if each.replace("-", "_") not in _NOT_IN_FILES]
            advice = option_advice(key.text, known, dashes="")
            if key.text.replace("-", "_") in [each.dest for each in self._arguments()]:
                advice = ": it is not an option, so pass it on the command line, without a flag"
            raise FormatError(f"{path}:{key.line}: unknown option {brief(key.text)}{advice}")
        if action.dest in _NOT_IN_FILES:
            raise FormatError(f"{path}:{key.line}: {key.text}: only allowed on the command line")
        return action

    def _rivals(self, action: argparse.Action) -> list[argparse.Action]:
        """Return an option, and the options that exclude it."""
        groups = [group._group_actions for group in self._mutually_exclusive_groups]
        return [action, *(each for group in groups if action in group for each in group)]

    def _set(self, taken: _Taken, namespace: argparse.Namespace, where: str) -> None:
        """Set the values of an option, like a parsed command line."""
        action, values = taken.action, []
        try:
            for text in taken.texts:
                values.append(self._get_value(action, text))
                self._check_value(action, values[-1])
        except argparse.ArgumentError as error:
            raise FormatError(f"{where}: {error.message}") from None
        self._texts[action] = taken.texts
        if not hasattr(namespace, action.dest):
            setattr(namespace, action.dest, action.default)
        if action.nargs is None:
            for value in values:
                action(self, namespace, value, taken.option)
        else:
            action(self, namespace, values, taken.option)

    @contextlib.contextmanager
    def _not_required(self, taken: Sequence[argparse.Action]) -> Iterator[None]:
        """Make the options set in the file optional on the command line."""
        set_by_file: list[Any] = [*taken]
        set_by_file += [each for each in self._mutually_exclusive_groups if set(each._group_actions) & {*taken}]
        required = [each for each in set_by_file if each.required]
        for each in required:
            each.required = False
        try:
            yield
        finally:
            for each in required:
                each.required = True

    def _entries(self, parsed: argparse.Namespace) -> Iterator[tuple[str, ConfigValue]]:
        """Yield key and value of every option with a value."""
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            if not action.option_strings or action.dest in _NOT_IN_FILES or value is None:
                continue
            key = next(option for option in action.option_strings if option.startswith("--"))[2:]
            if action.nargs == 0:
                yield key, bool(value) if isinstance(action, argparse.BooleanOptionalAction) else value == action.const
                continue
            texts = self._texts.get(action) or _texts_of_default(action.default)
            if action not in self._texts and not self._is_default(action, texts):
                continue  # a default that has no text form is also the default of the next run
            if action.metavar == "JSON":
                yield key, YamlJson(texts[0])
            elif action.nargs is not None or _may_be_repeated(action):
                yield key, texts
            else:
                yield key, texts[0] if action.type is None else YamlNumber(texts[0])

    def _is_default(self, action: argparse.Action, texts: Sequence[str]) -> bool:
        """Return whether these texts represent the default of an option."""
        try:
            values = [self._get_value(action, text) for text in texts]
        except argparse.ArgumentError:
            return False
        is_one = action.nargs is None and not _may_be_repeated(action)
        return bool(values) and (values[0] == action.default if is_one else values == list(action.default))


@dataclass(frozen=True)
class _Taken:
    """An option set in a file.

    Attributes:
        action: the option.
        option: the corresponding flag on a command line.
        texts: the values of the flag, or of several flags.
    """

    action: argparse.Action
    option: str
    texts: list[str]


def _taken(action: argparse.Action, key: YamlText, value: YamlValue, path: str) -> _Taken | None:
    """Return what a key and its value set; None if the option would be absent on a command line.

    Raises:
        FormatError: the value is of the wrong kind.
    """
    where = f"{path}:{key.line}: {key.text[:60]}"
    option = action.option_strings[0]
    if action.nargs != 0:
        texts = _texts_of(action, value, where, path)
        if any("\0" in text for text in texts):
            raise FormatError(f"{where}: contains a NUL byte, which is not allowed in paths and options; remove it")
        return _Taken(action, option, texts) if texts else None
    text = value.text.lower() if isinstance(value, YamlText) else ""
    if text not in ("true", "false"):
        raise FormatError(f"{where}: expected true or false, found {_kind(value)}")
    if isinstance(action, argparse.BooleanOptionalAction):
        is_negative = (text == "false") != key.text.startswith(("no-", "no_"))
        option = next(each for each in action.option_strings if each.startswith("--no-") == is_negative)
        return _Taken(action, option, [])
    return _Taken(action, option, []) if text == "true" else None


def _texts_of(action: argparse.Action, value: YamlValue, where: str, path: str) -> list[str]:
    """Return the value of an option as command-line texts; none for an empty list of a repeatable option.

    Raises:
        FormatError: the value is of the wrong kind.
    """
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if isinstance(value, YamlText) and value.is_plain and not value.text:
        raise FormatError(f'{where}: no value; leave the option out, or write "" for an empty string')
    if metavar == "JSON" and not (isinstance(value, YamlText) and not value.is_plain):
        return [to_json(value, path)]
    if isinstance(value, YamlText):
        return [value.text]
    if action.nargs is None and not _may_be_repeated(action):
        raise FormatError(f"{where}: expected one value, found {_kind(value)}")
    if isinstance(value, YamlList):
        texts = [_text(item, where) for item in value.items]
    elif "=" in metavar:
        texts = [f"{name.text}={_text(one, where)}" for name, one in value.entries]
    else:
        raise FormatError(f"{where}: expected one value or a list, found a mapping")
    if not texts and not _may_be_repeated(action):
        raise FormatError(f"{where}: {_kind(value)} without values; leave the option out")
    return texts


def _may_be_repeated(action: argparse.Action) -> bool:
    """Return whether repeated uses of an option accumulate."""
    return isinstance(action, (Collected, Mapped, argparse._AppendAction))


def _kind(value: YamlValue) -> str:
    if isinstance(value, YamlText):
        return brief(value.text)
    return "a list" if isinstance(value, YamlList) else "a mapping"


def _text(value: YamlValue, where: str) -> str:
    if not isinstance(value, YamlText):
        raise FormatError(f"{where}: expected only strings inside, found {_kind(value)}")
    if value.is_plain and not value.text:
        raise FormatError(f'{where}: an entry without a value; remove it, or write "" for an empty string')
    return value.text


def _texts_of_default(default: Any) -> list[str]:
    """Return command-line texts for a default. The caller must check that they represent it."""
    if isinstance(default, (list, tuple)):
        return [str(each) for each in default]
    return [json.dumps(default) if isinstance(default, Mapping) else str(default)]
