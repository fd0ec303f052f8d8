"""Rows whose fields and roles have other names: ``--fields``, ``--turn-fields`` and ``--roles``.

A path names a field, also inside objects and lists: ``data.turns`` is the field ``turns`` of the object ``data``, and
``answers.0.text`` is the field ``text`` of the first answer. A field whose name holds dots is found under its whole
name. Text in the middle of a path is read as JSON, as tables hold objects and lists.

The mapped value moves: the row that is read has it under the target alone. Once a field of the content is mapped, the
other fields of the content that the row has are not read. So a row with several conversations or answers is read as
the paths say, whichever name would count first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeAlias

from megatron_sft_idx.chat.field_names import (
    ANSWERS,
    CHOSEN,
    INPUTS,
    OTHER_CONTENT,
    PROMPTS,
    REASONING,
    REJECTED,
    SYSTEMS,
    TEXT,
    TOOLS,
    TURNS,
)
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.chat.values import Undecoded, parse_json
from megatron_sft_idx.errors import FormatError, did_you_mean

Pairs: TypeAlias = tuple[tuple[str, str], ...]

# What says what a row is. Once one of these is mapped, the row's own fields of content are not read.
_CONTENT: Final = ("messages", "prompt", "completion", "chosen", "rejected", TEXT, "input_ids")
_OF_CONTENT: Final = frozenset(
    {*_CONTENT, *TURNS, *PROMPTS, *INPUTS, *ANSWERS, *CHOSEN, *REJECTED, REASONING, *OTHER_CONTENT}
)
ROW_TARGETS: Final = (*_CONTENT, REASONING, "system", "tools", "label", "loss_mask")
# Names of which a mapped one takes the place.
_REPLACED: Final = {"system": SYSTEMS, "tools": TOOLS}
TURN_TARGETS: Final = (
    *("role", "content", "reasoning_content", "tool_calls", "name", "tool_call_id", "weight", "train"),
)
# Names by which a turn has its role and its words; a mapped one takes the place of all.
_ALSO: Final = {"role": ("from",), "content": ("value",), "reasoning_content": ("reasoning", "thinking")}
# Where lists of turns are.
_LISTS_OF_TURNS: Final = (*TURNS, "prompt", "completion", *CHOSEN, *REJECTED, *INPUTS, *ANSWERS)
# Roles and speakers by the names that rows have for them, in lower case. The words of a function_call are JSON.
_ROLES: Final = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function_call")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool_call", "function-call"), "function_call"),
    **dict.fromkeys(("function", "function_response", "tool_response", "observation", "observations"), "tool"),
}
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function_call")
_MOST_LISTED: Final = 40
_DEEPEST_LISTED: Final = 4


@dataclass(frozen=True)
class RowMapping:
    """Where a row has its fields, where a turn has its own, and what its roles are called.

    Attributes:
        fields: pairs of target (one of ``ROW_TARGETS``) and path in the row, sorted.
        turn_fields: pairs of target (one of ``TURN_TARGETS``) and path in the turn, sorted.
        roles: pairs of a name that turns have, in any case, and a role (one of ``ROLES``), sorted.
    """

    fields: Pairs = ()
    turn_fields: Pairs = ()
    roles: Pairs = ()

    @classmethod
    def of(
        cls,
        fields: Mapping[str, str] | None = None,
        turn_fields: Mapping[str, str] | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> RowMapping:
        """The mapping that three dicts say.

        Raises:
            FormatError: a target or a role that there is not, an empty path, or a path that is mapped twice.
        """
        for option, mapping, targets in (
            ("--fields", fields or {}, ROW_TARGETS),
            ("--turn-fields", turn_fields or {}, TURN_TARGETS),
        ):
            for target, path in mapping.items():
                if target not in targets:
                    raise FormatError(
                        f"{option} {target}={path}: there is no target {target!r:.40}{did_you_mean(target, targets)};"
                        f" targets are {', '.join(targets)}"
                    )
                if not path or not all(path.split(".")):
                    raise FormatError(f"{option} {target}={path}: expected TARGET=PATH, such as messages=data.turns")
            if len(set(mapping.values())) < len(mapping):
                raise FormatError(f"{option}: two targets have the same path; map each path once")
        for name, role in (roles or {}).items():
            if role not in ROLES:
                raise FormatError(
                    f"--roles {name}={role}: there is no role {role!r:.40}{did_you_mean(role, ROLES)}; roles are"
                    f" {', '.join(ROLES)}"
                )
        return cls(*(tuple(sorted((mapping or {}).items())) for mapping in (fields, turn_fields, roles)))

    def __bool__(self) -> bool:
        """Whether anything is mapped."""
        return bool(self.fields or self.turn_fields or self.roles)

    @cached_property
    def has_content(self) -> bool:
        """Whether a field is mapped that says what a row is; then the row's other columns are metadata."""
        return any(target in _CONTENT for target, _ in self.fields)

    @cached_property
    def role_names(self) -> Mapping[str, str]:
        """The role of each name: as given, in lower case, and the usual ones."""
        return {**_ROLES, **{name.lower(): role for name, role in self.roles}, **dict(self.roles)}

    def apply(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with its fields, and those of its turns, under the names that all rows have.

        Raises:
            RowError: the row has none of the mapped fields of the content, or a path leads through a value that JSON
                does not have.
        """
        mapped = self._with_fields(row) if self.fields else dict(row)
        if self.turn_fields:
            for name in _LISTS_OF_TURNS:
                if name in mapped:
                    mapped[name] = self._with_turn_fields(mapped[name])
        return mapped

    def _with_fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        found = {target: value for target, path in self.fields if (value := value_at(row, path)) is not None}
        content = [(target, path) for target, path in self.fields if target in _CONTENT]
        if content and not any(target in found for target, _ in content):
            names = " and no ".join(path for _, path in content)
            raise RowError(f"the row has no {names}, which --fields maps; it has {shown_paths(paths_of(row))}")
        unread = {path for _, path in self.fields}.union(*(_REPLACED.get(target, ()) for target in found))
        if content:
            unread |= _OF_CONTENT
        return {name: value for name, value in row.items() if name not in unread} | found

    def _with_turn_fields(self, turns: Any) -> Any:
        if isinstance(turns, str) and turns.lstrip().startswith("["):
            try:
                turns = parse_json(turns.encode())
            except ValueError:
                return turns
        if isinstance(turns, Mapping):
            return self._turn(turns)
        if not isinstance(turns, list):
            return turns
        return [self._turn(turn) if isinstance(turn, Mapping) else turn for turn in turns]

    def _turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        found = {target: value for target, path in self.turn_fields if (value := value_at(turn, path)) is not None}
        gone = {path for _, path in self.turn_fields}
        # What is left of an object that a path leads into is not a message's.
        gone |= {path.partition(".")[0] for _, path in self.turn_fields}
        for target in found:
            gone |= {target, *_ALSO.get(target, ())}
        return {name: value for name, value in turn.items() if name not in gone} | found

    def paths_in(self, row: Any) -> set[tuple[str, str]]:
        """The mapped paths that a row has, each with the name of its option."""
        if not isinstance(row, Mapping):
            return set()
        found = {("--fields", path) for _, path in self.fields if value_at(row, path) is not None}
        if self.turn_fields:
            for turn in _turns_of(self._with_fields(row) if self.fields else row):
                found |= {("--turn-fields", path) for _, path in self.turn_fields if value_at(turn, path) is not None}
        return found

    def all_paths(self) -> list[tuple[str, str]]:
        """All mapped paths, each with the name of its option."""
        of_rows = [("--fields", path) for _, path in self.fields]
        return of_rows + [("--turn-fields", path) for _, path in self.turn_fields]


def _turns_of(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name in _LISTS_OF_TURNS:
        turns = _opened(row.get(name))
        for turn in turns if isinstance(turns, list) else [turns]:
            if isinstance(turn, Mapping):
                yield turn


def value_at(value: Any, path: str) -> Any:
    """The value at a path; None where there is none.

    Raises:
        RowError: the path leads through a value that JSON does not have.
    """
    value = _opened(value)
    if isinstance(value, Undecoded):
        raise value.error("an object or a list")
    if isinstance(value, Mapping):
        if path in value:
            return value[path]
        # The longest name first: names may hold dots.
        for at in reversed([i for i, letter in enumerate(path) if letter == "."]):
            if path[:at] in value:
                return value_at(value[path[:at]], path[at + 1 :])
        return None
    head, _, rest = path.partition(".")
    if isinstance(value, list) and head.isdecimal() and int(head) < len(value):
        return value_at(value[int(head)], rest) if rest else value[int(head)]
    return None


def _opened(value: Any) -> Any:
    """Text of JSON that holds an object or a list as that; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return parse_json(value.encode())
        except ValueError:
            return value
    return value


def paths_of(row: Mapping[str, Any]) -> list[str]:
    """The paths that a row has, down to a few levels; of a list that of the first item."""
    return list(_leaves_of(row, 1))


def shown_paths(paths: Iterable[str]) -> str:
    """Paths for an error message."""
    listed = list(paths)
    return ", ".join(listed[:_MOST_LISTED]) + (" ..." if len(listed) > _MOST_LISTED else "") or "no field"


def _leaves_of(value: Any, depth: int) -> Iterator[str]:
    value = _opened(value)
    if isinstance(value, list):
        items = [("0", value[0])] if value and isinstance(_opened(value[0]), (Mapping, list)) else []
    else:
        items = [(str(name)[:60], each) for name, each in value.items()] if isinstance(value, Mapping) else []
    for name, each in items:
        if each is None:
            continue
        inner = list(_leaves_of(each, depth + 1)) if depth < _DEEPEST_LISTED else []
        yield from [f"{name}.{path}" for path in inner] or [name]
