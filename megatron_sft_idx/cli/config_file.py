r"""The YAML of ``--config`` and ``--print-config``: a mapping whose values are texts, lists and mappings.

The file is read event by event, not with one of YAML's loaders, for three reasons. A scalar stays the text that was
written, so that ``no``, ``1e3`` and dates have the same meaning as on a command line. Anchors, aliases and tags are
rejected, and with them files that expand when they are read. Every error has a line number. PyYAML's own parser is used
rather than libyaml, which rejects ``"\udcff"``, the spelling of a byte in a file name that is not UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.lines import on_one_line

MAX_NBYTES = 1 << 20
# Maximum nesting of lists and mappings. Variables of a chat template may be as deep as an input row, 128.
MAX_DEPTH = 160
# YAML searches no further for the end of a key. Longer JSON is printed as one text.
_MAX_FLOW = 1000

_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?", re.ASCII)
_OCTAL = re.compile(r"[-+]?0o[0-7]+", re.ASCII)  # a number for YAML 1.2, a text for YAML 1.1
_CONSTANTS = {"true": "true", "True": "true", "TRUE": "true", "false": "false", "False": "false", "FALSE": "false"}
_CONSTANTS |= dict.fromkeys(("", "~", "null", "Null", "NULL"), "null")
_PLAIN = re.compile(r"[\w./](?:[\w./=+,@%:-]*[\w./=+,@%-])?", re.ASCII)
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


# ---- contents of a file ----


@dataclass(frozen=True)
class YamlText:
    """A scalar.

    Attributes:
        text: its characters.
        line: line number, counted from 1.
        is_plain: whether it was written without quotes.
    """

    text: str
    line: int
    is_plain: bool


@dataclass(frozen=True)
class YamlList:
    """A list; ``line`` is its first line, counted from 1."""

    line: int
    items: list[YamlValue] = field(default_factory=list)


@dataclass(frozen=True)
class YamlMapping:
    """A mapping; ``line`` is its first line, counted from 1. Its keys are different."""

    line: int
    entries: list[tuple[YamlText, YamlValue]] = field(default_factory=list)


YamlValue = YamlText | YamlList | YamlMapping


# ---- reading ----


def read_config(path: str) -> YamlMapping:
    """Read a file of options.

    Raises:
        FormatError: the file is unreadable, or is not a YAML mapping that this module supports; with path and line.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_NBYTES:
        raise FormatError(
            f"{path}: larger than {MAX_NBYTES:,} bytes, the maximum for a file of options; pass a YAML file"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FormatError(
            f'{path}:{line}: byte {error.start + 1} is not UTF-8; for byte 0xff of a file name, write "\\udcff"'
        ) from None
    value = _parse(text, path)
    if not isinstance(value, YamlMapping):
        found = {YamlText: "a string", YamlList: "a list"}.get(type(value), "nothing")
        raise FormatError(f"{path}: expected a mapping of options, such as seq-length: 4096, found {found}")
    return value


def _parse(text: str, path: str) -> YamlValue | None:
    """Return the only document of a YAML text, or None."""
    import yaml  # imported late: most commands read no such file

    line = 1
    try:
        events = yaml.parse(text, Loader=yaml.BaseLoader)
        tree = _Tree(path)
        for event in events:
            line = event.start_mark.line + 1
            tree.add(event, line)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else line
        reason = error.problem or error.context or "not YAML"
        raise FormatError(f"{path}:{line}: not valid YAML: {on_one_line(reason)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = error.character
        remedy = "remove it" if not code else f'escape it in double quotes: "\\u{code:04x}"'
        raise FormatError(f"{path}:{line}: character {code:#x}, which YAML does not allow; {remedy}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # chr() of an escape that is not a character
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}:{line}: not valid YAML: {on_one_line(str(error))}") from None
    return tree.root


class _Tree:
    """Builds the value of a document from the events of YAML's parser."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.root: YamlValue | None = None
        self._open: list[tuple[int, list[YamlValue], bool]] = []  # not ended yet: line, content, is a mapping
        self._num_documents = 0

    def add(self, event: Any, line: int) -> None:
        """Process the next event.

        Raises:
            FormatError: it is not supported, or is valid YAML that no option can mean.
        """
        import yaml

        where = f"{self.path}:{line}"
        if isinstance(event, yaml.DocumentStartEvent):
            self._num_documents += 1
            if self._num_documents > 1:
                raise FormatError(f"{where}: a second document begins here (---); put all options into one document")
        elif isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise FormatError(
                f"{where}: anchors and aliases (& and *) are not supported; write the value out, or quote a string"
                " that begins with & or *"
            )
        elif getattr(event, "tag", None) is not None:
            raise FormatError(
                f"{where}: tags ({event.tag}) are not supported; remove the tag, or quote a string that begins with !"
            )
        elif isinstance(event, yaml.ScalarEvent):
            self._put(YamlText(event.value, line, is_plain=event.style is None))
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(self._open) == MAX_DEPTH:
                raise FormatError(f"{where}: nested more than {MAX_DEPTH} levels deep; use fewer levels")
            self._open.append((line, [], isinstance(event, yaml.MappingStartEvent)))
        elif isinstance(event, yaml.CollectionEndEvent):
            begin, content, is_mapping = self._open.pop()
            self._put(self._mapping(begin, content) if is_mapping else YamlList(begin, content))

    def _put(self, value: YamlValue) -> None:
        if self._open:
            self._open[-1][1].append(value)
        else:
            self.root = value

    def _mapping(self, line: int, content: list[YamlValue]) -> YamlMapping:
        mapping = YamlMapping(line)
        seen: dict[str, int] = {}
        for key, value in zip(content[::2], content[1::2], strict=True):
            if not isinstance(key, YamlText):
                raise FormatError(f"{self.path}:{key.line}: a key must be a string, not a list or mapping")
            if key.text in seen:
                raise FormatError(
                    f"{self.path}:{key.line}: {brief(key.text)} occurs twice, first on line {seen[key.text]}; remove"
                    " one"
                )
            seen[key.text] = key.line
            mapping.entries.append((key, value))
        return mapping


def to_json(value: YamlValue, path: str) -> str:
    """Convert a value to JSON, for an option that takes JSON.

    Here a scalar without quotes has a type: ``true``, ``false``, ``null`` and numbers as in JSON. Text that some
    versions of YAML read as another type is rejected, because a template would treat the text ``no`` as true.

    Raises:
        FormatError: a scalar is ambiguous; with path and line.
    """
    if isinstance(value, YamlList):
        return f"[{', '.join(to_json(item, path) for item in value.items)}]"
    if isinstance(value, YamlMapping):
        return f"{{{', '.join(f'{json.dumps(key.text)}: {to_json(one, path)}' for key, one in value.entries)}}}"
    if not value.is_plain:
        return json.dumps(value.text)
    if value.text in _CONSTANTS:
        return _CONSTANTS[value.text]
    if _JSON_NUMBER.fullmatch(value.text):
        return value.text
    if _has_type(value.text):
        raise FormatError(
            f"{path}:{value.line}: {brief(value.text)} is a string in some versions of YAML but not in others; quote"
            " it if it is a string, otherwise write true, false, null or a number as in JSON"
        )
    return json.dumps(value.text)


def _has_type(text: str, *, or_date: bool = False) -> bool:
    """Return whether some version of YAML reads this unquoted text as something other than text."""
    import yaml

    resolvers = yaml.SafeLoader.yaml_implicit_resolvers
    tags = {tag for tag, pattern in resolvers.get(text[:1], []) if pattern.match(text)}
    tags -= set() if or_date else {"tag:yaml.org,2002:timestamp"}
    return bool(tags or _OCTAL.fullmatch(text) or _JSON_NUMBER.fullmatch(text))


# ---- writing ----


@dataclass(frozen=True)
class YamlJson:
    """A JSON document to print as a YAML value that ``to_json`` reads back unchanged."""

    text: str


@dataclass(frozen=True)
class YamlNumber:
    """The text of a number, to print without quotes."""

    text: str


ConfigValue = bool | str | YamlNumber | YamlJson | list[str]


def config_text(entries: Iterable[tuple[str, ConfigValue]], *, ascii_only: bool) -> str:
    """Return options as a YAML mapping that ``read_config`` reads back as the same texts.

    Args:
        entries: key and value of each option.
        ascii_only: whether to escape non-ASCII characters, for an output that cannot represent them.

    >>> print(config_text([("input", ["a.jsonl", "no"]), ("seq-length", YamlNumber("8"))], ascii_only=False))
    input:
    - a.jsonl
    - "no"
    seq-length: 8
    """
    return "\n".join(_config_lines(entries, ascii_only))


def _config_lines(entries: Iterable[tuple[str, ConfigValue]], ascii_only: bool) -> Iterator[str]:
    for key, value in entries:
        if isinstance(value, list):
            yield f"{key}:" if value else f"{key}: []"
            yield from (f"- {_scalar(item, ascii_only)}" for item in value)
        elif isinstance(value, bool):
            yield f"{key}: {str(value).lower()}"
        elif isinstance(value, YamlNumber):
            yield f"{key}: {value.text if _JSON_NUMBER.fullmatch(value.text) else _scalar(value.text, ascii_only)}"
        elif isinstance(value, YamlJson):
            yield f"{key}: {_json_value(value.text, ascii_only)}"
        else:
            yield f"{key}: {_scalar(value, ascii_only)}"


def _scalar(text: str, ascii_only: bool) -> str:
    return text if _PLAIN.fullmatch(text) and not _has_type(text, or_date=True) else _quoted(text, ascii_only)


def _quoted(text: str, ascii_only: bool) -> str:
    """Return a text in double quotes, on one line. Unprintable characters are escaped."""

    def escaped(character: str) -> str:
        if character in _ESCAPES:
            return _ESCAPES[character]
        if character.isprintable() and not (ascii_only and not character.isascii()):
            return character
        code = ord(character)
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return f'"{"".join(map(escaped, text))}"'


def _json_value(text: str, ascii_only: bool) -> str:
    """Return JSON as a YAML value in one line, or as a quoted text if YAML could not read it."""

    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return f"{{{', '.join(f'{_quoted(key, ascii_only)}: {shown(one)}' for key, one in value.items())}}}"
        if isinstance(value, list):
            return f"[{', '.join(map(shown, value))}]"
        if isinstance(value, YamlNumber):
            return value.text
        return _quoted(value, ascii_only) if isinstance(value, str) else json.dumps(value)

    if len(text) > _MAX_FLOW or text.count("[") + text.count("{") > MAX_DEPTH:
        return _quoted(text, ascii_only)
    return shown(json.loads(text, parse_int=YamlNumber, parse_float=YamlNumber))
