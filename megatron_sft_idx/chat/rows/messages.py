"""OpenAI-style messages, checked and brought into the one form that chat templates are handed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_sft_idx.chat.inputs.json_value import parse_json

__all__ = [
    "MEDIA_COLUMNS",
    "RowError",
    "is_filled",
    "kind_of",
    "make_tool_call",
    "name_of",
    "parse_embedded",
    "read_flag",
    "read_message",
    "read_weight",
    "require_string",
    "text_of",
]

MEDIA_COLUMNS = ("images", "image", "image_url", "audios", "audio", "input_audio", "videos", "video")

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
_TEXT_KEYS = ("text", "value", "content")
_REASONING_PARTS = ("reasoning", "thinking", "think")
_CALL_PARTS = ("tool_call", "function_call")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_WEIGHTS = ("weight", "loss_weight", "loss_scale")
_FLAGS = ("train", "loss", "trainable")
# These say which part of a message is trained on; a row that has one must not train as if it had none.
_UNREAD = ("train_detail", "loss_mask", "masked")
# Read here and not handed on; the rest of a message is kept for the template.
_CONSUMED = frozenset({"role", "content", "tool_calls", "function_call", *_WEIGHTS, *_FLAGS, *_UNREAD})
_CHECKED = frozenset({*MEDIA_COLUMNS, *_UNREAD})
_WEIGHING = frozenset({*_WEIGHTS, *_FLAGS})


def read_message(message: Any, what: str) -> tuple[dict[str, Any], float]:
    """Checks one message and returns it normalised, with its loss weight.

    Text parts become one string, parts that hold reasoning or a tool call the fields of that name; arguments of
    tool calls become objects (as templates expect them) and an old ``function_call`` one of the tool calls; the
    role ``function`` becomes ``tool``; reasoning is found under ``reasoning_content`` whatever the row calls it,
    and under its own name too. Null keys are left out, as transformers leaves them out.

    Args:
        message: the message as the row has it; not changed.
        what: how error messages call it, such as ``messages[3]``.
    """
    if not isinstance(message, dict):
        raise RowError(f"{what} is {kind_of(message)}, expected an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        raise RowError(f"{what} has the role {name_of(role)}; known are {', '.join(_ROLES)}")
    if not message.keys().isdisjoint(_CHECKED):
        _refuse_unread(message, what)
    out: dict[str, Any] = {"role": "tool" if role == "function" else role}
    content = message.get("content")
    if len(message) == 2 and type(content) is str:  # as most are
        out["content"] = content
        return out, 1.0
    if role == "assistant" and isinstance(content, list):
        message = _with_fields(message, what)
    calls = _tool_calls_of(message, what)
    if calls and role != "assistant":
        raise RowError(f"{what} has tool calls and the role {role!r}; only the assistant makes them")
    reasoning = _reasoning_of(message, what) if role == "assistant" else {}
    content = _content_of(message, what, may_be_null=bool(calls or reasoning.get("reasoning_content")))
    if content is not None:
        out["content"] = content
    for key, value in message.items():
        if key not in _CONSUMED and value is not None:
            out[key] = value
    out |= reasoning
    if calls:
        out["tool_calls"] = calls
    if "name" in out:
        require_string(out["name"], f"{what}.name")
    return out, 1.0 if message.keys().isdisjoint(_WEIGHING) else _weight_of(message, what)


def text_of(content: Any, what: str) -> str:
    """A string, or the texts of a list of parts end to end; other kinds of parts are refused by name.

    Templates differ in what they make of a list: many render nothing, and the words are lost.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"{what} is {kind_of(content)}, expected a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise RowError(f"{what}[{i}] is {kind_of(part)}, expected a text part")
        kind = part.get("type")
        if kind not in _TEXT_PARTS:
            raise RowError(f"{what}[{i}] is of type {name_of(kind)}; only text can be trained on here")
        key = next((key for key in _TEXT_KEYS if part.get(key) is not None), "text")
        texts.append(require_string(part.get(key), f"{what}[{i}].{key}"))
    return "".join(texts)


def _with_fields(message: dict[str, Any], what: str) -> dict[str, Any]:
    """An assistant message whose reasoning and tool calls stand in fields, where templates look, and not in parts."""
    parts = message["content"]
    kinds = [part.get("type") if isinstance(part, dict) else "text" for part in parts]
    order = [0 if kind in _REASONING_PARTS else 2 if kind in _CALL_PARTS else 1 for kind in kinds]
    if all(rank == 1 for rank in order):
        return message
    if order != sorted(order):
        raise RowError(
            f"{what}.content has parts in the order {', '.join(map(str, kinds))}; chat templates write reasoning, then"
            " text, then tool calls: make it several messages"
        )
    found: dict[str, list[Any]] = {"reasoning_content": [], "content": [], "tool_calls": []}
    for i, (part, rank) in enumerate(zip(parts, order, strict=True)):
        if rank == 1:
            found["content"].append(part)
            continue
        where = f"{what}.content[{i}]"
        value = next((part[key] for key in (part["type"], *_TEXT_KEYS) if part.get(key) is not None), None)
        if rank == 0:
            found["reasoning_content"].append(text_of(value, where))
        elif value is None:
            found["tool_calls"].append({key: item for key, item in part.items() if key != "type"})
        else:
            calls = parse_embedded(value, where) if isinstance(value, str) else value
            found["tool_calls"] += calls if isinstance(calls, list) else [calls]
    fields = {"reasoning_content": "\n".join(found["reasoning_content"]), "tool_calls": found["tool_calls"]}
    for key, value in fields.items():
        if value and is_filled(message.get(key)):
            raise RowError(f"{what} has {key} beside parts of that kind; keep one")
    return message | {key: value for key, value in fields.items() if value} | {"content": found["content"] or None}


def make_tool_call(call: Any, what: str) -> dict[str, Any]:
    """One tool call as ``{"type": "function", "function": {"name", "arguments"}, ...}``.

    Accepts that, or the function alone. Arguments given as a JSON string are parsed; none are an empty
    object.
    """
    if _is_made(call):
        return call  # type: ignore[no-any-return]
    if not isinstance(call, dict):
        raise RowError(f"{what} is {kind_of(call)}, expected an object with name and arguments")
    if (kind := call.get("type")) not in (None, "function"):
        raise RowError(f"{what} is of type {name_of(kind)}, expected 'function'")
    if call.get("function") is None:
        outer = {key: call[key] for key in ("id",) if call.get(key) is not None}
        function = {key: value for key, value in call.items() if key not in ("id", "type", "function")}
    else:
        outer = {key: value for key, value in call.items() if value is not None}
        function = call["function"]
    if not isinstance(function, dict):
        raise RowError(f"{what}.function is {kind_of(function)}, expected an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowError(f"{what} has no function name; expected name and arguments")
    # Llama's own calls say parameters; templates know arguments only.
    key = "parameters" if function.get("arguments") is None and "parameters" in function else "arguments"
    arguments = _arguments_of(function.get(key), f"{what} ({name}).{key}")
    rest = {other: value for other, value in function.items() if other != key}
    return outer | {"type": "function", "function": rest | {"arguments": arguments}}


def _is_made(call: Any) -> bool:
    """Whether a call is in that form already."""
    if type(call) is not dict or [*call] != ["type", "function"] or call["type"] != "function":
        return False
    function = call["function"]
    if type(function) is not dict or [*function] != ["name", "arguments"] or type(function["name"]) is not str:
        return False
    return bool(function["name"]) and type(function["arguments"]) is dict


def _arguments_of(arguments: Any, what: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        arguments = parse_embedded(arguments, what) if arguments.strip() else None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise RowError(f"{what} is {kind_of(arguments)}, expected an object, or a JSON string of one")
    return arguments


def _tool_calls_of(message: dict[str, Any], what: str) -> list[dict[str, Any]]:
    calls, old = message.get("tool_calls"), message.get("function_call")
    if calls is None and old is None:
        return []
    if is_filled(calls) and is_filled(old):
        raise RowError(f"{what} has both tool_calls and function_call; keep one")
    if is_filled(old):
        return [make_tool_call(old, f"{what}.function_call")]
    if not is_filled(calls):
        return []
    if isinstance(calls, str):
        calls = parse_embedded(calls, f"{what}.tool_calls")
    if not isinstance(calls, list):
        raise RowError(f"{what}.tool_calls is {kind_of(calls)}, expected a list")
    return [make_tool_call(call, f"{what}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _content_of(message: dict[str, Any], what: str, *, may_be_null: bool) -> str | None:
    content = message.get("content")
    if content is not None:
        return text_of(content, f"{what}.content")
    if may_be_null:
        return None
    if message["role"] == "assistant":
        raise RowError(f"{what} (assistant) has neither content nor reasoning nor tool calls")
    raise RowError(f"{what} ({message['role']}) has no content")


def _reasoning_of(message: dict[str, Any], what: str) -> dict[str, str]:
    if message.keys().isdisjoint(_REASONING_KEYS):
        return {}
    found = {key: text_of(message[key], f"{what}.{key}") for key in _REASONING_KEYS if message.get(key) is not None}
    if len(set(filter(None, found.values()))) > 1:
        raise RowError(f"{what} has {' and '.join(found)} that differ; keep one")
    return found | {"reasoning_content": max(found.values(), key=len)} if found else {}


def _weight_of(message: dict[str, Any], what: str) -> float:
    given = {key: read_weight(message[key], f"{what}.{key}") for key in _WEIGHTS if message.get(key) is not None}
    if len(set(given.values())) > 1:
        raise RowError(f"{what} has {' and '.join(given)} that differ; keep one")
    weight = next(iter(given.values()), 1.0)
    for key in _FLAGS:
        if message.get(key) is not None and not read_flag(message[key], f"{what}.{key}"):
            weight = 0.0
    return weight


def _refuse_unread(message: dict[str, Any], what: str) -> None:
    for key in MEDIA_COLUMNS:
        if is_filled(message.get(key)):
            raise RowError(f"{what} has {key}; only text can be trained on here")
    for key in _UNREAD:
        if message.get(key) is not None:
            raise RowError(f"{what} has {key}, which is not read here; say weight or train for the whole message")


# ---- single values, as the readers of every kind of row check them ----


_MOST_WEIGHT = float(np.finfo(np.float32).max)  # masks are stored as float32
_JSON_NAMES = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "an object",
    type(None): "null",
}


class RowError(ValueError):
    """Why a row cannot be used; whoever knows the file and line makes a ``SequenceError`` of it."""


def kind_of(value: Any) -> str:
    """The value's type in JSON's words, for messages."""
    return _JSON_NAMES.get(type(value), type(value).__name__)


def name_of(value: Any) -> str:
    """A short quotation of a value for messages, however long it is."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def is_filled(value: Any) -> bool:
    """Whether a column says something: not null, and not an empty string, list or object."""
    return value is not None and not (isinstance(value, (str, Sequence, Mapping)) and len(value) == 0)


def require_string(value: Any, what: str) -> str:
    """The value, if it is a string."""
    if not isinstance(value, str):
        raise RowError(f"{what} is {kind_of(value)}, expected a string")
    return value


def parse_embedded(text: str, what: str) -> Any:
    """Parses JSON that a row holds as a string."""
    try:
        return parse_json(text.encode())
    except ValueError as error:
        raise RowError(f"{what} is a string that is {_as_clause(str(error))}") from None


def read_weight(value: Any, what: str) -> float:
    """A loss weight: a finite number >= 0; booleans count as 0 and 1."""
    if not isinstance(value, (int, float)) or not 0 <= value <= _MOST_WEIGHT:
        raise RowError(f"{what} is {name_of(value)}, expected a finite number >= 0")
    return float(value)


def read_flag(value: Any, what: str) -> bool:
    """A yes or no: true, false, 1 or 0."""
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise RowError(f"{what} is {name_of(value)}, expected true or false")
    return bool(value)


def _as_clause(reason: str) -> str:
    return reason if reason.startswith("not ") else f"not usable: {reason}"
