"""Rows with other names for fields and roles: ``--fields``, ``--turn-fields`` and ``--roles``.

A path names a field, also inside objects and lists: ``data.turns`` is the field ``turns`` of the object ``data``, and
``answers.0.text`` is the field ``text`` of the first answer. A field with dots in its name is found by its whole name.
Text in the middle of a path is parsed as JSON, because tables store objects and lists as text.

The mapped value moves: afterwards the row has it only under the target name. Once a content field is mapped, the other
content fields of the row are not read. So for a row with several conversations or answers, the mapping decides, not the
usual precedence of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

from megatron_sft_idx.chat.field_names import (
    ANSWERS,
    AUDIOS,
    CHOSEN,
    HISTORY,
    IMAGES,
    INPUTS,
    MEDIA,
    OTHER_ANSWERS,
    OTHER_PROMPTS,
    PROMPTS,
    REASONING,
    REJECTED,
    SYSTEMS,
    TEMPLATE_VARIABLES,
    TEXT,
    THINKING,
    TOOLS,
    TURNS,
    VERDICTS,
)
from megatron_sft_idx.chat.training_fields import FLAGS, INVERTED, training_names
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.chat.values import Undecoded, parse_json
from megatron_sft_idx.errors import FormatError, did_you_mean, nearest_names

Pairs: TypeAlias = tuple[tuple[str, str], ...]

# Fields that determine the kind of a row. Once one of these is mapped, the row's own content fields are not read.
_CONTENT: Final = ("messages", "prompt", "completion", "chosen", "rejected", TEXT, "input_ids")
_OF_CONTENT: Final = frozenset(
    {
        *_CONTENT,
        *TURNS,
        *PROMPTS,
        *INPUTS,
        *ANSWERS,
        *CHOSEN,
        *REJECTED,
        REASONING,
        HISTORY,
        THINKING,
        *OTHER_PROMPTS,
        *OTHER_ANSWERS,
    }
)
ROW_TARGETS: Final = (*_CONTENT, REASONING, "system", "tools", "images", "audios", "label", "loss_mask")
# Groups of names that a mapped name replaces.
_REPLACED: Final = {"system": SYSTEMS, "tools": TOOLS, "images": IMAGES, "audios": AUDIOS}
TURN_TARGETS: Final = (
    *("role", "content", "reasoning_content", "tool_calls", "name", "tool_call_id", "weight", "train"),
)
# Names for the role and the words of a turn; a mapped name replaces all of them.
_ALSO: Final = {"role": ("from",), "content": ("value",), "reasoning_content": ("reasoning", "thinking")}
# Fields with lists of turns.
_LISTS_OF_TURNS: Final = (*TURNS, "prompt", *INPUTS, *ANSWERS, *CHOSEN, *REJECTED)
# Roles and speakers by the names in rows, in lower case. The words of a function_call are JSON.
_ROLES: Final = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function_call")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool_call", "function-call"), "function_call"),
    **dict.fromkeys(("function", "function_response", "tool_response", "observation", "observations"), "tool"),
}
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function_call")
# Fields to move up from an object inside a path, in addition to the fields that control training.
_CARRIED_OF_ROWS: Final = frozenset({*SYSTEMS, *TOOLS, *VERDICTS, *MEDIA, TEMPLATE_VARIABLES, "mask", "is_correct"})
_CARRIED_OF_TURNS: Final = frozenset(
    {"role", "content", *_ALSO["reasoning_content"], "reasoning_content", "tool_calls", "function_call", "tool_call_id"}
    | {"name", *MEDIA}
)
_MOST_LISTED: Final = 40
_DEEPEST_LISTED: Final = 4


@dataclass(frozen=True)
class RowMapping:
    """The names of fields in rows and turns, and of roles.

    Attributes:
        fields: pairs of target (one of ``ROW_TARGETS``) and path in the row, sorted.
        turn_fields: pairs of target (one of ``TURN_TARGETS``) and path in the turn, sorted.
        roles: pairs of a name in turns, in any case, and a role (one of ``ROLES``), sorted.
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
        """Return the mapping for three dicts.

        Raises:
            FormatError: a target or a role does not exist, a path is empty, or a path is mapped twice.
        """
        for option, mapping, targets in (
            ("--fields", fields or {}, ROW_TARGETS),
            ("--turn-fields", turn_fields or {}, TURN_TARGETS),
        ):
            for target, path in mapping.items():
                if target not in targets:
                    raise FormatError(
                        f"{option} {target}={path}: there is no target {target!r:.40}{_nearest_of(target, targets)};"
                        f" targets are {', '.join(targets)}"
                    )
                if not path or not all(path.split(".")):
                    raise FormatError(f"{option} {target}={path}: expected TARGET=PATH, such as messages=data.turns")
                if option == "--turn-fields" and target in FLAGS and path.rpartition(".")[2] in INVERTED:
                    raise FormatError(f"{option} {target}={path}: {path} means the opposite of {target}; leave it out")
            if len(set(mapping.values())) < len(mapping):
                raise FormatError(f"{option}: two targets have the same path; map each path only once")
        by_name: dict[str, str] = {}
        for name, role in (roles or {}).items():
            if role not in ROLES:
                raise FormatError(
                    f"--roles {name}={role}: there is no role {role!r:.40}{_nearest_of(role, ROLES)}; roles are"
                    f" {', '.join(ROLES)}"
                )
            if by_name.setdefault(name.lower(), role) != role:
                raise FormatError(
                    f"--roles {name!r:.40}={role}: the same name with other capital letters is mapped to"
                    f" {by_name[name.lower()]}; map it once"
                )
        return cls(*(tuple(sorted((mapping or {}).items())) for mapping in (fields, turn_fields, roles)))

    def __bool__(self) -> bool:
        """Whether anything is mapped."""
        return bool(self.fields or self.turn_fields or self.roles)

    @cached_property
    def has_content(self) -> bool:
        """Whether a content field is mapped; the row's other columns are then metadata."""
        return any(target in _CONTENT for target, _ in self.fields)

    @cached_property
    def role_names(self) -> Mapping[str, str]:
        """The role of each name in lower case: the usual names and the given ones."""
        return _ROLES | {name.lower(): role for name, role in self.roles}

    def apply(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row with standard names for its fields and the fields of its turns.

        Raises:
            RowError: the row has none of the mapped content fields, or a path leads through a value that JSON does not
                have.
        """
        mapped = self._with_fields(row) if self.fields else dict(row)
        if self.turn_fields:
            for name in _LISTS_OF_TURNS:
                if name in mapped:
                    mapped[name] = self._with_turn_fields(mapped[name])
        return mapped

    def _with_fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        found = {target: each for target, path in self.fields if (each := locate(row, path)) is not None}
        content = {target: found[target] for target in _CONTENT if target in found}
        if self.has_content and not content:
            names = " and no ".join(path for target, path in self.fields if target in _CONTENT)
            raise RowError(f"the row has no {names}, which --fields maps; it has {shown_paths(paths_of(row))}")
        _require_one_kind(list(content))
        unread = {path for _, path in self.fields}.union(*(_REPLACED.get(target, ()) for target in found))
        if self.has_content:
            unread |= _OF_CONTENT
        mapped = {name: value for name, value in row.items() if name not in unread}
        mapped |= {target: each.value for target, each in found.items()}
        for each in content.values():
            _carry(each.siblings, _CARRIED_OF_ROWS, mapped, "the row")
        return mapped

    def _with_turn_fields(self, given: Any) -> Any:
        turns = _opened(given)
        if isinstance(turns, Mapping):
            return self._turn(turns) if isinstance(given, Mapping) else given
        if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            return given
        if isinstance(given, str) and not all(
            any(locate(turn, path) for _, path in self.turn_fields) for turn in turns
        ):
            return given  # a text that looks like JSON
        return [self._turn(turn) for turn in turns]

    def _turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        found = {target: each for target, path in self.turn_fields if (each := locate(turn, path)) is not None}
        gone = {each.head for each in found.values()}.union(found, *(_ALSO.get(target, ()) for target in found))
        mapped = {name: value for name, value in turn.items() if name not in gone}
        mapped |= {target: each.value for target, each in found.items()}
        for each in found.values():
            _carry(each.siblings, _CARRIED_OF_TURNS, mapped, "a turn")
        for target in ("role", "content"):  # only one of the two may be mapped
            (other,) = _ALSO[target]
            if mapped.get(target) is None and mapped.get(other) is not None:
                mapped[target] = mapped.pop(other)
        return mapped

    def paths_in(self, row: Any) -> set[tuple[str, str]]:
        """Return the mapped paths in a row, each with the name of its option."""
        if not isinstance(row, Mapping):
            return set()
        found = {("--fields", path) for _, path in self.fields if locate(row, path) is not None}
        if self.turn_fields:
            for turn in _turns_of(self._with_fields(row) if self.fields else row):
                found |= {("--turn-fields", path) for _, path in self.turn_fields if locate(turn, path) is not None}
        return found

    def all_paths(self) -> list[tuple[str, str]]:
        """Return all mapped paths, each with the name of its option."""
        of_rows = [("--fields", path) for _, path in self.fields]
        return of_rows + [("--turn-fields", path) for _, path in self.turn_fields]


def _nearest_of(name: str, choices: Sequence[str]) -> str:
    return did_you_mean(nearest_names(name.lower(), choices))


def _turns_of(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name in _LISTS_OF_TURNS:
        turns = _opened(row.get(name))
        for turn in turns if isinstance(turns, list) else [turns]:
            if isinstance(turn, Mapping):
                yield turn


class Located(NamedTuple):
    """The value at a path.

    Attributes:
        value: the value; never None.
        head: the field of the row or turn that contains it.
        siblings: other fields of the objects along the path.
    """

    value: Any
    head: str
    siblings: dict[str, Any]


def locate(value: Any, path: str) -> Located | None:
    """Return the value at a path in an object or list, or in JSON text of one; None if it does not exist or is null.

    Raises:
        RowError: the path leads through a value that JSON does not have.
    """
    value = _opened(value)
    if isinstance(value, Undecoded):
        raise value.error("an object or a list")
    if isinstance(value, Mapping):
        # The longest name first, because names may contain dots.
        names = [path, *(path[:at] for at in reversed(range(len(path))) if path[at] == ".")]
        inner = [(name, value.get(name)) for name in names]
    else:
        name = path.partition(".")[0]
        is_index = isinstance(value, list) and name.isdecimal() and len(name) < 10 and int(name) < len(value)
        inner = [(name, value[int(name)] if is_index else None)]
    for name, each in inner:
        if each is None:
            continue
        rest = path[len(name) + 1 :]
        if not rest:
            return Located(each, name, {})
        if (found := locate(each, rest)) is not None:
            opened = _opened(each)
            others = opened.items() if isinstance(opened, Mapping) else ()
            siblings = {key: other for key, other in others if key != found.head and other is not None}
            return Located(found.value, name, siblings | found.siblings)
    return None


def _require_one_kind(targets: Sequence[str]) -> None:
    """Raise RowError if several mapped content fields have values that cannot occur together."""
    allowed: list[set[str]] = [{"prompt", "completion"}, {"prompt", "chosen", "rejected"}]
    allowed += [{"messages", "chosen", "rejected"}]
    if len(targets) > 1 and not any(each.issuperset(targets) for each in allowed):
        raise RowError(
            f"--fields maps {' and '.join(targets)}, and the row has all of them; map only messages, or prompt and"
            " completion (the prompt can be a list of messages), or text"
        )


def _carry(siblings: Mapping[str, Any], names: frozenset[str], fields: dict[str, Any], what: str) -> None:
    """Add to ``fields`` the fields of an object along a path that control how its words are read.

    Raises:
        RowError: ``fields`` has such a field with another value.
    """
    for name in (*names.intersection(siblings), *training_names(key for key in siblings if isinstance(key, str))):
        if fields.get(name) is None:
            fields[name] = siblings[name]
        elif fields[name] != siblings[name]:
            raise RowError(f"{what} and an object in it have different values for {name}; keep one")


def _opened(value: Any) -> Any:
    """Parse JSON text of an object or list; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return parse_json(value.encode())
        except ValueError:
            return value
    return value


def paths_of(row: Mapping[str, Any]) -> list[str]:
    """Return the paths in a row, a few levels deep; for a list, the paths of its first item."""
    return list(_leaves_of(row, 1))


def shown_paths(paths: Iterable[str]) -> str:
    """Return paths as text for an error message."""
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
