"""Convert lists of turns, in the forms of public data sets, to messages as chat templates expect them.

=========  ==============================================================================================
OpenAI     objects with ``role`` and ``content``
ShareGPT   objects with ``from`` and ``value``
pairs      objects with a question and its answer: ``human`` or ``user`` with ``assistant``, ``gpt`` or ``bot``
           (Firefly, ms-swift); ``input`` with ``output`` (Capybara, XTuner)
texts      strings, the user's and the assistant's in turn (LIMA)
=========  ==============================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from megatron_sft_idx.chat.field_names import MEDIA, TURNS
from megatron_sft_idx.chat.fields import first_filled, first_given, is_filled, json_of, pair_keys, typed, without_nulls
from megatron_sft_idx.chat.media_parts import NOT_READ, kind_of_part, media_part
from megatron_sft_idx.chat.row_mapping import ROLES
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.training_fields import (
    FLAGS,
    INVERTED,
    MESSAGE_VERDICTS,
    WEIGHTS,
    refuse_flagged_parts,
    refuse_unread_words,
    refuse_verdict,
    training_names,
    weight_of,
)
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.lines import counted

Message = dict[str, Any]
# Messages, and the loss weight of each.
Turns = tuple[list[Message], list[float]]

_DEFAULT = RowOptions()
# A string that is a message of another form: JSON, or a speaker before the words.
_SPEAKER: Final = re.compile(
    r"\s*(?:\{\s*[\"'](?:role|from|content|value)|(?:system|user|human|assistant|gpt)\s*:)", re.I
)
_PAIR_SYSTEM: Final = "system"
# Roles of messages that may precede the first turn.
_BEFORE_TURNS: Final = ("system", "developer")
# XTuner's flag for an answer.
_OUTPUT_FLAG: Final = "output_with_loss"


def read_list(turns: Any, key: str, options: RowOptions = _DEFAULT) -> Turns:
    """Convert a list of turns of any form, or its JSON text, to messages as chat templates expect them.

    Raises:
        RowError: one of them cannot be used; the text has ``key`` and its index.
    """
    turns = typed(json_of(turns, key), list, key, "a list of messages")
    if not turns:
        raise RowError(f"{key} is empty")
    first = turns[0]
    if isinstance(first, str) and key in TURNS:
        named = _of_texts(turns, key)
    elif isinstance(first, dict) and pair_keys(first) is not None:
        named = [each for i, turn in enumerate(turns) for each in _of_pair(turn, f"{key}[{i}]", is_first=not i)]
    else:
        return _read_turns(turns, key, options)
    return read_named(named, options)


def read_named(named: Iterable[tuple[Message, str]], options: RowOptions) -> Turns:
    """Convert messages of OpenAI's form to messages as chat templates expect them; each has a name for errors."""
    read = [_read_message(message, what, options) for message, what in named]
    return [message for message, _ in read], [weight for _, weight in read]


def _read_turns(turns: list[Any], key: str, options: RowOptions) -> Turns:
    first, roles = turns[0], options.mapping.role_names
    is_sharegpt = isinstance(first, dict) and first_given(first, ("role", "from")) == "from"
    messages, weights = [], []
    for i, turn in enumerate(turns):
        message, weight = _read_plain(turn, is_sharegpt, roles), 1.0
        if message is None:
            what = f"{key}[{i}]"
            if is_sharegpt:
                message, weight = _read_message(_message_of_turn(turn, what), what, options, text_in="value")
            else:
                message, weight = _read_message(turn, what, options)
        messages.append(message)
        weights.append(weight)
    return messages, weights


def _read_plain(turn: Any, is_sharegpt: bool, roles: Mapping[str, str]) -> Message | None:
    """Read a turn with only a speaker and a text, in half the time. None for any other turn."""
    speaker, text = ("from", "value") if is_sharegpt else ("role", "content")
    if (
        type(turn) is not dict
        or len(turn) != 2
        or type(turn.get(text)) is not str
        or type(turn.get(speaker)) is not str
    ):
        return None
    role = roles.get(turn[speaker]) or roles.get(turn[speaker].lower())
    return None if role is None or role == "function_call" else {"role": role, "content": turn[text]}


def _role_of(name: Any, roles: Mapping[str, str]) -> str | None:
    """Return the role for a name in a row, in any case: NeMo uses ``User``."""
    if isinstance(name, float) and name.is_integer():  # tables store integers as floats if some are null
        name = int(name)
    if isinstance(name, (bool, int)):
        name = str(name)
    if not isinstance(name, str):
        return None
    return roles.get(name) or roles.get(name.lower())


# ---- turns of other forms, as messages with names for errors ----


def _of_pair(turn: Any, what: str, *, is_first: bool) -> list[tuple[Message, str]]:
    """Return the messages of a pair. Training fields belong to the answer; any other field with a value is rejected."""
    turn = without_nulls(typed(turn, dict, what, "an object with a question and its answer"))
    if (keys := pair_keys(turn)) is None:
        raise RowError(f"{what} has no question and answer, unlike the turns before it; found {', '.join(turn)}")
    ask, answer = keys
    if not is_filled(turn[ask]):
        raise RowError(f"{what}.{ask} is empty, so its {answer} has no question")
    rest = {key: value for key, value in turn.items() if key not in (ask, answer)}
    messages: list[tuple[Message, str]] = []
    if is_filled(system := rest.pop(_PAIR_SYSTEM, None)):
        if not is_first:
            raise RowError(f"{what} has a different system prompt; split the conversation into several rows")
        messages.append(({"role": "system", "content": system}, f"{what}.{_PAIR_SYSTEM}"))
    if _OUTPUT_FLAG in rest:
        rest["train"] = rest.pop(_OUTPUT_FLAG)
    unread = [key for key in rest if key not in training_names(rest) and is_filled(rest[key])]
    if unread:
        raise RowError(
            f"{what} has {ask}, {answer} and also {', '.join(unread)}, which is not supported; pass --ignore-field"
            f" {unread[0]} to ignore it"
        )
    asked, answered = {"role": "user", "content": turn[ask]}, {"role": "assistant", "content": turn[answer], **rest}
    return [*messages, (asked, f"{what}.{ask}"), (answered, f"{what}.{answer}")]


def _of_texts(texts: list[Any], key: str) -> list[tuple[Message, str]]:
    """Return the messages of a list of strings, alternating between user and assistant."""
    for i, text in enumerate(texts):
        typed(text, str, f"{key}[{i}]", "a string like the turns before it")
        if _SPEAKER.match(text):
            raise RowError(
                f"{key}[{i}] is a string that begins with its speaker, {text[:20]!r}; use an object with role"
                " and content"
            )
    if len(texts) % 2:
        raise RowError(
            f"{key} has {counted(len(texts), 'string')}, expected an even number: user and assistant texts alternate"
        )
    roles = ("user", "assistant")
    return [({"role": roles[i % 2], "content": text}, f"{key}[{i}]") for i, text in enumerate(texts)]


# ---- single messages ----


_TEXT_PARTS = ("text", "input_text", "output_text")
_TEXT_KEYS = ("text", "value", "content")
# Chat templates write reasoning, then text, then tool calls.
_PARTS_BEFORE_TEXT = ("reasoning", "thinking", "think")
_PARTS_BEHIND_TEXT = ("tool_call", "function_call")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Keys of a message that the template does not get unchanged; it gets all others.
_RARE = frozenset({*MEDIA, *MESSAGE_VERDICTS})
_READ = frozenset({"role", "content", "tool_calls", "function_call", "name", "tool_call_id", *_REASONING_KEYS})
_CONSUMED = frozenset({"role", "content", "tool_calls", "function_call", *WEIGHTS, *FLAGS, *INVERTED})


def _message_of_turn(turn: Any, what: str) -> Message:
    """Return a ShareGPT turn with ``role`` and ``content`` for ``from`` and ``value``; other keys are kept."""
    turn = typed(turn, dict, what, "an object with from and value")
    speaker, value = turn.get("from"), turn.get("value")
    if value is None:
        value = turn.get("content")
    if value is None:
        raise RowError(f"{what} ({speaker}) has no value")
    rest = {key: other for key, other in turn.items() if key not in ("from", "value")}
    if is_filled(rest.get("content")) and rest["content"] != value:
        raise RowError(f"value and content of {what} differ; keep one")
    return {**rest, "role": speaker, "content": value}


def _calls_in_content(message: Message, what: str) -> Message:
    """Convert JSON content, one function with arguments or a list of them, to tool calls of the message.

    It becomes an assistant message. The next message stays a separate message.
    """
    content = json_of(message.get("content"), what)
    calls = content if isinstance(content, list) else [content]
    if not calls:
        raise RowError(f"{what} contains no call")
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    return {**rest, "role": "assistant", "content": None, "tool_calls": [_make_tool_call(call, what) for call in calls]}


def _with_role(message: Message, what: str, options: RowOptions) -> tuple[Message, str]:
    """Return a message with its role for chat templates; a function_call becomes an assistant message."""
    given = message.get("role")
    role = _role_of(given, options.mapping.role_names)
    if given is None:
        raise RowError(f"{what} has no role; if another field has it, map that field with --turn-fields role=PATH")
    if role is None:
        raise RowError(
            f"{what} has the role {given!r:.40}; known roles are {', '.join(ROLES)} and their usual names; map other"
            " names with --roles NAME=ROLE"
        )
    if role != "function_call":
        return message, role
    refuse_flagged_parts(message.get("content"), role, f"{what}.content")
    return _calls_in_content(message, f"{what} ({given})"), "assistant"


def _read_message(message: Any, what: str, options: RowOptions, *, text_in: str = "content") -> tuple[Message, float]:
    """Check one message. Return it in the form that chat templates expect, with its loss weight.

    - Content parts of text become one string; parts of reasoning or tool calls become the fields of that name.
    - Arguments of tool calls become objects, and an old ``function_call`` becomes one of the tool calls. So does the
      content of a message whose role is ``function_call``.
    - Reasoning is stored under ``reasoning_content``, and under its key in the row.
    - Keys with null values are dropped, as in transformers.

    ``what`` is the name of the message in errors, and ``text_in`` that of its text field.
    """
    message = typed(message, dict, what, "an object with role and content")
    given = message.get("role")
    message, role = _with_role(message, what, options)
    if not _RARE.isdisjoint(message):
        if (key := first_filled(message, MEDIA)) is not None:
            advice = "move it to the row, or make it a part of the content" if options.media else NOT_READ
            raise RowError(f"{what} has {key}; {advice}")
        refuse_verdict(message, what)
    weight = 1.0
    if names := training_names(message):
        weight = weight_of(message, names, role, what)
        if weight != 1 and role != "assistant" and not options.requires_answer:
            raise RowError(
                f"{what} has the weight {weight:g}, but --train-on all gives all other messages weight 1: remove the"
                " weight, or choose another --train-on"
            )
    if isinstance(message.get("content"), list):
        refuse_flagged_parts(message["content"], role, f"{what}.{text_in}")
        if role == "assistant":
            message = _with_fields(message, what)
    calls = _tool_calls_of(message, what)
    if calls and role != "assistant":
        raise RowError(f"{what} has tool calls and the role {given!r}; only assistant messages can have tool calls")
    reasoning = _reasoning_of(message, what) if role == "assistant" else {}
    out: dict[str, Any] = {"role": role}
    says_words = False
    if message.get("content") is not None:
        out["content"] = content = _content_of(message["content"], f"{what}.{text_in}", options)
        says_words = bool(content) and not (isinstance(content, str) and content.isspace())
    if weight and not says_words:
        says_more = bool(role != "assistant" or calls or reasoning.get("reasoning_content"))
        refuse_unread_words(message, what, _READ, says_more=says_more)
    if "content" not in out and not calls and not reasoning.get("reasoning_content"):
        lacks = "neither content nor reasoning nor tool calls" if role == "assistant" else "no content"
        raise RowError(f"{what} ({given}) has {lacks}")
    out |= {key: value for key, value in message.items() if key not in _CONSUMED and value is not None} | reasoning
    if calls:
        out["tool_calls"] = calls
    if "name" in out:
        typed(out["name"], str, f"{what}.name")
    return out, weight


def _content_of(content: Any, what: str, options: RowOptions) -> str | list[dict[str, Any]]:
    """Return the text of a content (see ``_text_of``); or its parts if media are read and it has several."""
    if not options.media or not isinstance(content, list):
        return _text_of(content, what)
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        kind = kind_of_part(part, f"{what}[{i}]") if isinstance(part, dict) else None
        if kind is not None:
            parts.append(media_part(part, kind, f"{what}[{i}]"))
        elif isinstance(part, dict) and (media := first_filled(part, MEDIA)) is not None:
            raise RowError(f"{what}[{i}] is of type {part.get('type')!r:.40} and has {media}; make it a separate part")
        elif text := _text_of_part(part, f"{what}[{i}]", "only text, images and audio are supported"):
            parts.append({"type": "text", "text": text})
    # Templates for images may write something between two texts, so these stay separate.
    return parts if len(parts) > 1 or any(part["type"] != "text" for part in parts) else _text_of(content, what)


def _text_of(content: Any, what: str) -> str:
    """Return a string unchanged, or join the texts of a list of content parts. Other kinds of parts are rejected.

    Templates never get a list, because many of them render it as nothing, and its words would be lost.
    """
    if isinstance(content, str):
        return content
    parts = typed(content, list, what, "a string or a list of text parts")
    return "".join(_text_of_part(part, f"{what}[{i}]", NOT_READ) for i, part in enumerate(parts))


def _text_of_part(part: Any, what: str, advice: str) -> str:
    """Return the text of a content part. RowError, which ends with ``advice``: it is of another kind."""
    if isinstance(part, str):
        return part
    kind = typed(part, dict, what, "a text part").get("type")
    if kind not in _TEXT_PARTS:
        raise RowError(f"{what} is of type {kind!r:.40}; {advice}")
    key = first_given(part, _TEXT_KEYS) or "text"
    text: str = typed(part.get(key), str, f"{what}.{key}")
    return text


def _with_fields(message: Message, what: str) -> Message:
    """Move the reasoning and tool call parts of an assistant message to separate fields."""
    parts = message["content"]
    kinds = [part.get("type") if isinstance(part, dict) else "text" for part in parts]
    order = [(kind in _PARTS_BEHIND_TEXT) - (kind in _PARTS_BEFORE_TEXT) for kind in kinds]
    if not any(order):
        return message
    if order != sorted(order):
        raise RowError(
            f"{what}.content has parts in the order {', '.join(map(str, kinds))}; chat templates write reasoning, then"
            " text, then tool calls: split it into several messages"
        )
    texts: list[Any] = []
    reasoning: list[str] = []
    calls: list[Any] = []
    for i, (part, sort) in enumerate(zip(parts, order, strict=True)):
        where = f"{what}.content[{i}]"
        key = first_given(part, (part["type"], *_TEXT_KEYS)) if sort else None
        if sort == 0:
            texts.append(part)
        elif sort < 0:
            reasoning.append(_text_of(None if key is None else part[key], where))
        else:
            call = {name: value for name, value in part.items() if name != "type"}
            parsed = call if key is None else json_of(part[key], where)
            calls += parsed if isinstance(parsed, list) else [parsed]
    moved = {"reasoning_content": "\n".join(reasoning), "tool_calls": calls}
    fields = {key: value for key, value in moved.items() if value}
    if (twice := first_filled(message, fields)) is not None:
        raise RowError(f"{what} has {twice} and parts of that kind; keep one")
    return message | fields | {"content": texts or None}


def _make_tool_call(call: Any, what: str) -> dict[str, Any]:
    """Return a tool call as ``{"type": "function", "function": {"name", "arguments"}, ...}``.

    Accepts that, or only the function. Arguments in a string of JSON are parsed; missing ones become an empty object.
    """
    call = typed(call, dict, what, "an object with name and arguments")
    if (kind := call.get("type")) not in (None, "function"):
        raise RowError(f"{what} is of type {kind!r:.40}, expected 'function'")
    if call.get("function") is None:
        outer = {key: call[key] for key in ("id",) if call.get(key) is not None}
        function = {key: value for key, value in call.items() if key not in ("id", "type", "function")}
    else:
        outer = without_nulls(call)
        function = typed(call["function"], dict, f"{what}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowError(f"{what} has no function name; expected name and arguments")
    # Llama's own calls use the name parameters; templates only know arguments.
    key = "parameters" if function.get("arguments") is None and "parameters" in function else "arguments"
    where, arguments = f"{what} ({name}).{key}", function.get(key)
    if isinstance(arguments, str):
        arguments = json_of(arguments, where) if arguments.strip() else None
    parsed = {} if arguments is None else typed(arguments, dict, where, "an object, or a JSON string of one")
    rest = {name: value for name, value in function.items() if name != key and value is not None}
    return outer | {"type": "function", "function": rest | {"arguments": parsed}}


def _tool_calls_of(message: dict[str, Any], what: str) -> list[dict[str, Any]]:
    calls, old = message.get("tool_calls"), message.get("function_call")
    if is_filled(calls) and is_filled(old):
        raise RowError(f"{what} has both tool_calls and function_call; keep one")
    if is_filled(old):
        return [_make_tool_call(old, f"{what}.function_call")]
    if not is_filled(calls):
        return []
    what = f"{what}.tool_calls"
    calls = typed(json_of(calls, what), list, what)
    return [_make_tool_call(call, f"{what}[{i}]") for i, call in enumerate(calls)]


def _reasoning_of(message: dict[str, Any], what: str) -> dict[str, str]:
    """Return the reasoning of an assistant message, under each of its keys in the message."""
    texts = {}
    for key in _REASONING_KEYS:
        if (given := message.get(key)) is not None:
            refuse_flagged_parts(given, "assistant", f"{what}.{key}")
            texts[key] = _text_of(given, f"{what}.{key}")
    if len(set(filter(None, texts.values()))) > 1:
        raise RowError(f"{' and '.join(texts)} of {what} differ; keep one")
    return texts | {"reasoning_content": max(texts.values(), key=len)} if texts else {}


# ---- several messages ----


def turns_of_pairs(pairs: Iterable[Sequence[str]]) -> list[Message]:
    """Return messages that alternate between user and assistant."""
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def order_notes(messages: Sequence[Message]) -> list[str]:
    """Return names of notes about the order of the roles: an assistant at the beginning, a user at the end."""
    roles = [message["role"] for message in messages if message["role"] not in _BEFORE_TURNS]
    notes = []
    if roles and roles[0] == "assistant":
        notes.append("begins_with_assistant")
    if roles and roles[-1] == "user":
        notes.append("ends_with_user")
    return notes


def says_something(message: Message) -> bool:
    """Return whether a message is an assistant message with words, reasoning or tool calls."""
    return message["role"] == "assistant" and bool(
        message.get("content") or message.get("tool_calls") or message.get("reasoning_content")
    )


def any_trained(messages: Iterable[Message], weights: Iterable[float]) -> bool:
    """Return whether an assistant message with words has a weight other than 0."""
    return any(weight and says_something(message) for message, weight in zip(messages, weights, strict=True))
