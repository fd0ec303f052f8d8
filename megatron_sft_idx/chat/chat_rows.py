"""One raw row to a conversation, or to ids with a mask.

The keys of a row (a table's columns) tell its kind. A key whose value is null counts as absent, and unknown keys are
ignored. Where a row has the keys of several kinds, it is of the first of these:

1. ``tokenized``: ``input_ids`` next to ``loss_mask``, ``labels``, ``assistant_masks``, ``completion_mask``,
   ``loss_scale`` or ``loss_weights``. Where a row has several of these, a token is trained if each of them says so, and
   weights are multiplied.
2. ``messages``: ``messages``, ``conversations`` or ``conversation``, a list of turns, each with ``role`` and
   ``content`` (OpenAI) or ``from`` and ``value`` (ShareGPT, NeMo), whichever of the keys it stands under.
3. ``prompt-completion``: ``prompt`` and ``completion``, two strings or (as TRL has it) two lists of
   messages, of which only the completion's are trained on.
4. ``alpaca``: the prompt is the first of ``instruction``, ``prompt``, ``query``, ``question``, joined by a newline (as
   LLaMA-Factory does) to the first of ``input``, ``context`` that is not empty; the answer is the first of
   ``output``, ``response``, ``completion``, ``answer``. Earlier turns may stand in ``history`` as pairs. The prompt may
   also be one list of messages; then only the answer is trained on.

Rows of all kinds but the first may also have ``tools`` (or the old ``functions``), ``system`` or ``system_prompt``, and
``chat_template_kwargs``. Rows that say which of two answers is better, or whether one is good (a boolean ``label``),
are refused whatever else they hold, unless the options ask for them: ``preferences`` reads those. Fields that say what
is trained on are read in ``training_fields``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.packed_rows import SystemStarts, integers, numbers, read_layout, refuse_pack_fields
from megatron_sft_idx.chat.training_fields import (
    FLAGS,
    INVERTED,
    MESSAGE_VERDICTS,
    WEIGHTS,
    messages_of_json,
    read_speaker_mask,
    refuse_flagged_parts,
    refuse_row_fields,
    refuse_unread_words,
    refuse_verdict,
    training_names,
    weight_of,
    without_fields,
)
from megatron_sft_idx.chat.types import Conversation, RowError, TokenizedRow
from megatron_sft_idx.chat.values import Undecoded, clause_of, parse_json
from megatron_sft_idx.errors import check_options
from megatron_sft_idx.layout.files import rounds_to_zero

RowKind = Literal["auto", "messages", "alpaca", "prompt-completion", "tokenized", "preference", "kto"]
MaskAlignment = Literal["token", "label"]
_Kind = TypeVar("_Kind", str, list[Any], dict[str, Any])
_Message = dict[str, Any]
# Messages, and the loss weight of each.
Turns = tuple[list[_Message], list[float]]

TURNS = ("messages", "conversations", "conversation")
PROMPTS = ("instruction", "prompt", "query", "question")
INPUTS = ("input", "context")
_ASKING = (*PROMPTS, *INPUTS)
_ANSWERS = ("output", "response", "completion", "answer")
_SYSTEMS = ("system", "system_prompt")
_TOOLS = ("tools", "functions")
# What says which tokens are trained on.
_MASKS = ("loss_mask", "labels", "assistant_masks", "completion_mask", "loss_scale", "loss_weights")
_MEDIA = ("images", "image", "image_url", "audios", "audio", "input_audio", "videos", "video")
CHOSEN, REJECTED = ("chosen", "chosen_response"), ("rejected", "rejected_response", "rejected_messages")
VERDICTS = ("label", "kto_tag")
# Beside what makes a chat.
_REFUSED = frozenset({*_MEDIA, *CHOSEN, *REJECTED, *VERDICTS})
_MORE = frozenset({*_SYSTEMS, *_TOOLS, "chat_template_kwargs"})
# Set by whoever renders; a row that sets them would change what a conversation is.
_RESERVED_KWARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize")


@dataclass(frozen=True, slots=True)
class RowOptions:
    """How rows are read.

    Attributes:
        kind: the kind of every row; ``auto`` tells it from the keys of each. The caller must hand rows of
            ``preference`` and ``kto`` to ``preferences``.
        messages_key: the key under which every row has its turns; None tells it from the keys of each row.
        mask_alignment: of the masks and labels of tokenised rows: at the token that is trained on, or
            (label) at the position that predicts it.
        require_assistant: whether a conversation in which the assistant says nothing is refused. False where every
            token is trained on; then a message of another role that says "do not train" is refused instead.
        ignore_fields: names of fields without which rows, messages and parts are read; sorted.
        system_starts: what a system message after an answer is: the beginning of another conversation, a turn of the
            same one, or (error) nothing that may be guessed.

    Raises:
        FormatError: an option is none of its choices.
    """

    kind: RowKind = "auto"
    messages_key: str | None = None
    mask_alignment: MaskAlignment = "token"
    require_assistant: bool = True
    ignore_fields: tuple[str, ...] = ()
    system_starts: SystemStarts = "error"

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "ignore_fields", tuple(sorted({*self.ignore_fields})))


_DEFAULT = RowOptions()


def to_sequence_source(data: Any, options: RowOptions = _DEFAULT) -> Conversation | TokenizedRow:
    """Reads one row; ``data`` is not changed, but the result may share parts of it.

    Raises:
        RowError: with the reason alone, for every row that cannot be used.
    """
    if options.ignore_fields:
        row, notes = without_ignored(data, options)
        source = _read_row(row, options)
        return source._replace(notes=notes + Counter(source.notes))
    return _read_row(data, options)


def _read_row(data: Any, options: RowOptions) -> Conversation | TokenizedRow:
    keys = require_object(data).keys()
    if not keys.isdisjoint(_REFUSED):
        _refuse_keys(data, options)
    refuse_row_fields(data, read=() if data.get("input_ids") is None else _MASKS)
    kind = kind_by_keys(data, options) if options.kind == "auto" else options.kind
    if kind == "tokenized":
        return _read_tokenized(data, options.mask_alignment)
    refuse_pack_fields(data)
    if kind == "messages":
        messages, weights = _read_messages(data, options)
    elif kind == "prompt-completion":
        messages, weights = _read_prompt_completion(data, options)
    else:
        messages, weights = _read_alpaca(data, options)
    if options.require_assistant and not any(map(_says_something, reversed(messages))):
        raise RowError("the assistant says nothing in this row, so there is nothing to learn")
    return to_conversation(data, messages, weights)


def without_ignored(data: Any, options: RowOptions) -> tuple[dict[str, Any], Counter[str]]:
    """The row without the fields that ``options`` ignores, and how many these were, as notes for the summary."""
    counts: Counter[str] = Counter()
    return without_fields(require_object(data), options.ignore_fields, counts), counts


def to_conversation(data: dict[str, Any], messages: list[_Message], weights: list[float]) -> Conversation:
    """A conversation of these messages with the system prompt, tools and template variables that stand beside them."""
    if data.keys().isdisjoint(_MORE):
        return Conversation(messages, weights, None, {})
    _put_system_first(data, messages, weights)
    return Conversation(messages, weights, _tools_of(data), _kwargs_of(data))


def require_object(data: Any) -> dict[str, Any]:
    """The row, if it is an object; else RowError."""
    return _typed(data, dict, "the row")


def _refuse_keys(data: dict[str, Any], options: RowOptions) -> None:
    refuse_media(data)
    if names := preference_keys(data, options):
        raise RowError(
            f"a preference row ({', '.join(names)}), but supervised fine-tuning takes one answer: make pairs of such"
            " rows with --row-kind preference, or name the column with the one answer as messages with --messages-key"
        )
    for key in VERDICTS:
        verdict, judges = data.get(key), data.get("completion") is not None
        # A number may be the class of a row; beside a completion it is a verdict on that.
        is_number = isinstance(verdict, (int, np.integer))
        if isinstance(verdict, (bool, np.bool_)) or (is_number and judges and verdict in (0, 1)):
            raise RowError(
                f"{key} is {str(verdict).lower()}: a row of KTO, whose answer may be bad, but supervised fine-tuning"
                " trains on every one: keep the column with --row-kind kto, or the good rows without it"
            )


def refuse_media(data: dict[str, Any]) -> None:
    """RowError where something else than text stands beside the messages."""
    if (media := first_filled(data, _MEDIA)) is not None:
        raise RowError(f"the row has {media}; only text can be trained on here")


def preference_keys(data: dict[str, Any], options: RowOptions) -> list[str]:
    """The keys that make a row one of preference; none where the answer under one of them was asked for."""
    names = [name for name in (*CHOSEN, *REJECTED) if _is_filled(data.get(name)) and not isinstance(data[name], int)]
    return [] if options.messages_key in names else names


def kind_by_keys(data: dict[str, Any], options: RowOptions) -> RowKind:
    """The kind as which a row is read, told from those of its keys that hold anything.

    Raises:
        RowError: the keys make no chat.
    """
    has = {key for key, value in data.items() if value is not None}
    if "input_ids" in has and has.intersection(_MASKS):
        return "tokenized"
    if options.messages_key or not has.isdisjoint(TURNS):
        return "messages"
    if "prompt" in has and "completion" in has:
        return "prompt-completion"
    if not (has.isdisjoint(_ASKING) or has.isdisjoint(_ANSWERS)):
        return "alpaca"
    listed = ", ".join(sorted(map(str, has))[:12]) or "none"
    raise RowError(
        "no columns that make a chat: expected messages or conversations, a prompt with an answer, "
        f"or input_ids with a mask; found {listed}"
    )


def _read_messages(data: dict[str, Any], options: RowOptions) -> Turns:
    names = [options.messages_key] if options.messages_key else TURNS
    if (key := first_given(data, names)) is None:
        raise RowError(f"the row has no {' or '.join(names)}")
    messages, weights = read_list(data[key], key, options)
    if data.get("mask") is not None or data.get("type") is not None:
        turns = _parsed(data[key], key)
        speakers = [str(turn.get("role" if turn.get("from") is None else "from")) for turn in turns]
        read_speaker_mask(data, speakers, [message["role"] for message in messages], weights)
    return messages, weights


def read_list(turns: Any, key: str, options: RowOptions = _DEFAULT) -> Turns:
    """Messages as chat templates expect them, of a list of OpenAI's messages or ShareGPT's turns, or of its JSON.

    Raises:
        RowError: one of them cannot be used; it is named by ``key`` and its index.
    """
    turns = _typed(_parsed(turns, key), list, key, "a list of messages")
    if not turns:
        raise RowError(f"{key} is empty")
    first = turns[0]
    is_sharegpt = isinstance(first, dict) and first_given(first, ("role", "from")) == "from"
    messages, weights = [], []
    for i, turn in enumerate(turns):
        message, weight = _read_plain(turn, is_sharegpt), 1.0
        if message is None:
            what = f"{key}[{i}]"
            message, weight = _read_message(_message_of_turn(turn, what) if is_sharegpt else turn, what)
            if weight != 1 and message["role"] != "assistant" and not options.require_assistant:
                raise RowError(
                    f"{what} has the weight {weight:g}, but --train-on all trains every word but the assistant's with"
                    " weight 1: leave the weight out, or take another --train-on"
                )
        messages.append(message)
        weights.append(weight)
    return messages, weights


def _read_plain(turn: Any, is_sharegpt: bool) -> _Message | None:
    """Most turns: a speaker and a text, and nothing else, in half the time. None for any other turn."""
    speaker, text, roles = ("from", "value", _SPEAKERS) if is_sharegpt else ("role", "content", _ROLES)
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
    """The role that a row calls by this name, in whatever case: NeMo says ``User``."""
    if not isinstance(name, str):
        return None
    return roles.get(name) or roles.get(name.lower())


def _read_prompt_completion(data: dict[str, Any], options: RowOptions) -> Turns:
    prompt, completion = data.get("prompt"), data.get("completion")
    turns = messages_of_json(prompt), messages_of_json(completion)
    if all(isinstance(some, list) for some in turns):
        prompt, completion = turns
    if isinstance(prompt, str) and isinstance(completion, str):
        if not prompt:
            raise RowError("prompt is empty")
        return _exchange([(prompt, completion)])
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise RowError(
            f"prompt is {_kind_of(prompt)} and completion is {_kind_of(completion)}, "
            "expected two strings or two lists of messages"
        )
    before, _ = read_list(prompt, "prompt", options)
    after, weights = read_list(completion, "completion", options)
    if not any(map(_says_something, after)):
        raise RowError("the assistant says nothing in the completion, so there is nothing to learn")
    return before + after, [0.0] * len(before) + weights


def _read_alpaca(data: dict[str, Any], options: RowOptions) -> Turns:
    given = [key for key in _ASKING if key in data and _is_filled(data[key])]
    if len(given) == 1 and not _is_filled(data.get("history")):
        prompt = messages_of_json(data[given[0]]) if given[0] in INPUTS else data[given[0]]
        if isinstance(prompt, dict) and first_given(prompt, ("role", "from")):
            prompt = [prompt]
        if isinstance(prompt, list):
            return _read_answered(prompt, given[0], data, options)
    history, asked = read_prompt(data)
    if not asked:
        raise RowError("the prompt is empty")
    return _exchange([*history, (asked, _text_under(data, _ANSWERS))])


def _read_answered(prompt: list[Any], key: str, data: dict[str, Any], options: RowOptions) -> Turns:
    """A prompt of messages, with an answer that is a string, a message or a list of messages and alone is trained."""
    before, _ = read_list(prompt, key, options)
    answer_in = first_given(data, _ANSWERS) or _ANSWERS[0]
    answer = messages_of_json(data.get(answer_in))
    if isinstance(answer, (dict, list)):
        after, weights = read_list([answer] if isinstance(answer, dict) else answer, answer_in, options)
    else:
        after, weights = [{"role": "assistant", "content": _text_under(data, _ANSWERS)}], [1.0]
    if not any(map(_says_something, after)):
        raise RowError("the answer is empty, so there is nothing to learn")
    return before + after, [0.0] * len(before) + weights


def read_prompt(data: dict[str, Any]) -> tuple[list[Sequence[str]], str]:
    """The pairs of question and answer that an Alpaca row begins with, and what it asks; RowError if one is no text."""
    history = data.get("history") or []
    kinds = (list, tuple)
    if not isinstance(history, kinds) or not all(
        isinstance(pair, kinds) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history
    ):
        raise RowError("history is not a list of [prompt, answer] pairs of strings")
    asked = [_text_under(data, PROMPTS), _text_under(data, INPUTS)]
    return [*history], "\n".join(filter(None, asked))


def _text_under(data: dict[str, Any], names: Iterable[str]) -> str:
    """The text under the first of these keys whose value is not null; empty where there is none."""
    key = first_given(data, names)
    return "" if key is None else _typed(data[key], str, key)


def _exchange(pairs: Sequence[Sequence[str]]) -> Turns:
    if not pairs[-1][1]:
        raise RowError("the answer is empty, so there is nothing to learn")
    messages = turns_of_pairs(pairs)
    return messages, [1.0] * len(messages)


def turns_of_pairs(pairs: Iterable[Sequence[str]]) -> list[_Message]:
    """Messages of a user and of the assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _says_something(message: _Message) -> bool:
    return message["role"] == "assistant" and bool(
        message.get("content") or message.get("tool_calls") or message.get("reasoning_content")
    )


def any_trained(messages: Iterable[_Message], weights: Iterable[float]) -> bool:
    """Whether the assistant says something in a message whose weight is not 0."""
    return any(weight and _says_something(message) for message, weight in zip(messages, weights, strict=True))


def _put_system_first(data: dict[str, Any], messages: list[_Message], weights: list[float]) -> None:
    if (key := first_filled(data, _SYSTEMS)) is None:
        return
    system = _typed(data[key], str, key)
    if messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
        weights.insert(0, 1.0)
    elif messages[0]["content"] != system:
        raise RowError(f"{key} and the first message are two system prompts that differ; keep one")


def _tools_of(data: dict[str, Any]) -> list[dict[str, Any]] | None:
    key = first_filled(data, _TOOLS) or "tools"
    given = data.get(key)
    tools = _parsed(given, key) if not isinstance(given, str) or given.strip() else None
    read = []
    for i, each in enumerate(_typed([] if tools is None else tools, list, key, "a list of tool schemas")):
        what = f"{key}[{i}]"
        read.append(_wrapped(_typed(_parsed(each, what), dict, what)))
    return read or None


def _wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as ``{"type": "function", "function": {"name", ...}}``, of that or of the function alone.

    Tools of another type, and what has no name, stay as they are.
    """
    is_function = tool.get("function") is None and tool.get("type") in (None, "function")
    if not is_function or not isinstance(tool.get("name"), str):
        return tool
    function = {key: value for key, value in tool.items() if key not in ("type", "function")}
    return {"type": "function", "function": function}


def _kwargs_of(data: dict[str, Any]) -> dict[str, Any]:
    name = "chat_template_kwargs"
    kwargs = data.get(name)
    kwargs = _parsed(kwargs, name) if _is_filled(kwargs) else None
    if not _is_filled(kwargs):
        return {}
    kwargs = without_nulls(_typed(kwargs, dict, name))
    for key in _RESERVED_KWARGS:
        if key in kwargs:
            raise RowError(f"{name} sets {key}, which is not a row's to set")
    return kwargs


# ---- turns of ShareGPT's, and OpenAI's messages, the one form that chat templates are handed ----


# Roles and speakers by the names that rows have for them.
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {"function": "tool"}
_SPEAKERS = {
    **{"system": "system", "developer": "developer", "human": "user", "user": "user"},
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
    **dict.fromkeys(("observation", "tool", "function_response", "tool_response"), "tool"),
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_TEXT_KEYS = ("text", "value", "content")
# Chat templates write reasoning, then text, then tool calls.
_PARTS_BEFORE_TEXT = ("reasoning", "thinking", "think")
_PARTS_BEHIND_TEXT = ("tool_call", "function_call")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Keys of a message that the template does not see as they are; it sees all others.
_RARE = frozenset({*_MEDIA, *MESSAGE_VERDICTS})
_READ = frozenset({"role", "content", "tool_calls", "function_call", "name", "tool_call_id", *_REASONING_KEYS})
_CONSUMED = frozenset({"role", "content", "tool_calls", "function_call", *WEIGHTS, *FLAGS, *INVERTED})


def _message_of_turn(turn: Any, what: str) -> _Message:
    """Translates one turn of ShareGPT's; keys other than ``from`` and ``value`` are kept.

    The value of a ``function_call`` is JSON: a function with its arguments, or a list of them. It becomes an
    assistant message of tool calls, and what follows stays a message of its own.
    """
    turn = _typed(turn, dict, what, "an object with from and value")
    speaker, value = turn.get("from"), turn.get("value")
    role = _role_of(speaker, _SPEAKERS)
    if role is None:
        raise RowError(f"{what} is from {speaker!r:.40}; known are {', '.join(_SPEAKERS)}")
    if value is None:
        raise RowError(f"{what} ({speaker}) has no value")
    rest = {key: other for key, other in turn.items() if key not in ("from", "value")}
    if _is_filled(rest.get("content")) and rest["content"] != value:
        raise RowError(f"{what} has value and content that differ; keep one")
    refuse_flagged_parts(value, role, f"{what}.value")
    if role != "function_call":
        return {**rest, "role": role, "content": _text_of(value, f"{what}.value")}
    what = f"{what} ({speaker})"
    parsed = _parsed(value, what)
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls:
        raise RowError(f"{what} holds no call")
    return {**rest, "role": "assistant", "content": None, "tool_calls": [_make_tool_call(call, what) for call in calls]}


def _read_message(message: Any, what: str) -> tuple[dict[str, Any], float]:
    """Checks one message and returns it in the form that chat templates expect, with its loss weight.

    - Content parts of text become one string; those of reasoning or tool calls become the fields of that name.
    - Arguments of tool calls become objects, an old ``function_call`` becomes one of the tool calls, and the role
      ``function`` becomes ``tool``.
    - Reasoning stands under ``reasoning_content``, and under the key that the row has it under.
    - Keys whose value is null are left out, as transformers leaves them out.

    Errors call the message ``what``.
    """
    message = _typed(message, dict, what, "an object with role and content")
    given = message.get("role")
    role = _role_of(given, _ROLES)
    if role is None:
        raise RowError(f"{what} has the role {given!r:.40}; known are {', '.join(_ROLES)}")
    if not _RARE.isdisjoint(message):
        if (key := first_filled(message, _MEDIA)) is not None:
            raise RowError(f"{what} has {key}; only text can be trained on here")
        refuse_verdict(message, what)
    weight = 1.0
    if names := training_names(message):
        weight = weight_of(message, names, role, what)
    if isinstance(message.get("content"), list):
        refuse_flagged_parts(message["content"], role, f"{what}.content")
        if role == "assistant":
            message = _with_fields(message, what)
    calls = _tool_calls_of(message, what)
    if calls and role != "assistant":
        raise RowError(f"{what} has tool calls and the role {given!r}; only the assistant makes them")
    reasoning = _reasoning_of(message, what) if role == "assistant" else {}
    out: dict[str, Any] = {"role": role}
    if message.get("content") is not None:
        out["content"] = _text_of(message["content"], f"{what}.content")
    if weight and not (out.get("content") and not out["content"].isspace()):
        says_more = bool(role != "assistant" or calls or reasoning.get("reasoning_content"))
        refuse_unread_words(message, what, _READ, says_more=says_more)
    if "content" not in out and not calls and not reasoning.get("reasoning_content"):
        lacks = "neither content nor reasoning nor tool calls" if given == "assistant" else "no content"
        raise RowError(f"{what} ({given}) has {lacks}")
    out |= {key: value for key, value in message.items() if key not in _CONSUMED and value is not None} | reasoning
    if calls:
        out["tool_calls"] = calls
    if "name" in out:
        _typed(out["name"], str, f"{what}.name")
    return out, weight


def _text_of(content: Any, what: str) -> str:
    """A string as it is, or the texts of a list of content parts end to end; parts of other kinds are refused.

    Templates are never handed a list: many of them render it as nothing, and its words would be lost.
    """
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(_typed(content, list, what, "a string or a list of text parts")):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = _typed(part, dict, f"{what}[{i}]", "a text part").get("type")
        if kind not in _TEXT_PARTS:
            raise RowError(f"{what}[{i}] is of type {kind!r:.40}; only text can be trained on here")
        key = first_given(part, _TEXT_KEYS) or "text"
        texts.append(_typed(part.get(key), str, f"{what}[{i}].{key}"))
    return "".join(texts)


def _with_fields(message: _Message, what: str) -> _Message:
    """An assistant message whose content parts of reasoning and tool calls have moved to fields of their own."""
    parts = message["content"]
    kinds = [part.get("type") if isinstance(part, dict) else "text" for part in parts]
    order = [(kind in _PARTS_BEHIND_TEXT) - (kind in _PARTS_BEFORE_TEXT) for kind in kinds]
    if not any(order):
        return message
    if order != sorted(order):
        raise RowError(
            f"{what}.content has parts in the order {', '.join(map(str, kinds))}; chat templates write reasoning, then"
            " text, then tool calls: make it several messages"
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
            parsed = call if key is None else _parsed(part[key], where)
            calls += parsed if isinstance(parsed, list) else [parsed]
    moved = {"reasoning_content": "\n".join(reasoning), "tool_calls": calls}
    fields = {key: value for key, value in moved.items() if value}
    if (twice := first_filled(message, fields)) is not None:
        raise RowError(f"{what} has {twice} beside parts of that kind; keep one")
    return message | fields | {"content": texts or None}


def _make_tool_call(call: Any, what: str) -> dict[str, Any]:
    """One tool call as ``{"type": "function", "function": {"name", "arguments"}, ...}``.

    Accepts that, or the function alone. Arguments in a string of JSON are parsed; missing ones become an empty object.
    """
    call = _typed(call, dict, what, "an object with name and arguments")
    if (kind := call.get("type")) not in (None, "function"):
        raise RowError(f"{what} is of type {kind!r:.40}, expected 'function'")
    if call.get("function") is None:
        outer = {key: call[key] for key in ("id",) if call.get(key) is not None}
        function = {key: value for key, value in call.items() if key not in ("id", "type", "function")}
    else:
        outer = without_nulls(call)
        function = _typed(call["function"], dict, f"{what}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowError(f"{what} has no function name; expected name and arguments")
    # Llama's own calls say parameters; templates know arguments only.
    key = "parameters" if function.get("arguments") is None and "parameters" in function else "arguments"
    where, arguments = f"{what} ({name}).{key}", function.get(key)
    if isinstance(arguments, str):
        arguments = _parsed(arguments, where) if arguments.strip() else None
    parsed = {} if arguments is None else _typed(arguments, dict, where, "an object, or a JSON string of one")
    rest = {name: value for name, value in function.items() if name != key and value is not None}
    return outer | {"type": "function", "function": rest | {"arguments": parsed}}


def _tool_calls_of(message: dict[str, Any], what: str) -> list[dict[str, Any]]:
    calls, old = message.get("tool_calls"), message.get("function_call")
    if _is_filled(calls) and _is_filled(old):
        raise RowError(f"{what} has both tool_calls and function_call; keep one")
    if _is_filled(old):
        return [_make_tool_call(old, f"{what}.function_call")]
    if not _is_filled(calls):
        return []
    what = f"{what}.tool_calls"
    calls = _typed(_parsed(calls, what), list, what)
    return [_make_tool_call(call, f"{what}[{i}]") for i, call in enumerate(calls)]


def _reasoning_of(message: dict[str, Any], what: str) -> dict[str, str]:
    """The reasoning of an assistant message, under each key that the message has it under."""
    texts = {}
    for key in _REASONING_KEYS:
        if (given := message.get(key)) is not None:
            refuse_flagged_parts(given, "assistant", f"{what}.{key}")
            texts[key] = _text_of(given, f"{what}.{key}")
    if len(set(filter(None, texts.values()))) > 1:
        raise RowError(f"{what} has {' and '.join(texts)} that differ; keep one")
    return texts | {"reasoning_content": max(texts.values(), key=len)} if texts else {}


# ---- rows that come tokenised ----


_NOT_TRAINED = -100
_MAX_ID = (1 << 31) - 1


def _read_tokenized(row: dict[str, Any], alignment: MaskAlignment) -> TokenizedRow:
    """Checks ids and mask against each other; a mask or labels that are label-aligned become token-aligned.

    Labels are as in transformers: a token's own id where it is trained on, else -100. They stand at the token's own
    position (``token``) or at the position before it, which predicts it (``label``).
    """
    ids = integers(row.get("input_ids"), "input_ids")
    if not ids.size:
        raise RowError("input_ids is empty")
    if ids.min() < 0 or ids.max() > _MAX_ID:
        raise RowError(f"input_ids holds {ids[(ids < 0) | (ids > _MAX_ID)][0]}, no token's id")
    masks: dict[str, NDArray[Any]] = {}
    for key in _MASKS:
        if row.get(key) is not None:
            masks[key] = (integers if key == "labels" else numbers)(row[key], key)
            if len(masks[key]) != len(ids):
                raise RowError(f"{key} has {len(masks[key])} entries for {len(ids)} input_ids")
    if not masks:
        raise RowError(f"input_ids without any of {', '.join(_MASKS)}: nothing says what is trained on")
    if len(masks) > 1 and "labels" in masks and _NOT_TRAINED not in masks["labels"]:
        del masks["labels"]  # the ids again, with another mask that says which count
    nothing = {key: _NOT_TRAINED if key == "labels" else 0 for key in masks}
    trained = np.logical_and.reduce([values != nothing[key] for key, values in masks.items()])
    bounds, notes = read_layout(row, ids, trained, token_aligned=alignment == "token")
    mask = np.ones(len(ids), np.float32)
    for key, values in masks.items():
        if alignment == "label":
            _require_untrained_ends(values, key, nothing[key], bounds)
        mask *= _mask_of_labels(values, ids, alignment) if key == "labels" else _mask_of_numbers(values, key)
    if not mask[trained].all():
        raise RowError(
            f"{', '.join(masks)} give a token weights whose product float32 rounds to 0; write 0, or larger ones"
        )
    if alignment == "label":
        mask = np.roll(mask, 1)
    return TokenizedRow(ids[: bounds[-1]], mask[: bounds[-1]], notes, bounds)


def _require_untrained_ends(values: NDArray[Any], key: str, nothing: int, bounds: NDArray[np.int64]) -> None:
    """RowError where a label-aligned mask trains on what would follow the last token of a sequence."""
    ends = bounds[1:] - 1
    wrong = np.flatnonzero(values[ends] != nothing)
    if wrong.size:
        at = int(ends[wrong[0]])
        where = f"position {at}, the last of sequence {wrong[0] + 1}" if len(ends) > 1 else "the last position"
        raise RowError(
            f"{key} is {values[at]} at {where}, expected {nothing}: no token follows that it could be of;"
            " token-aligned?"
        )


def _mask_of_numbers(values: NDArray[Any], key: str) -> NDArray[np.float32]:
    if rounds_to_zero(values):
        raise RowError(f"{key} holds a weight that float32 rounds to 0; write 0, or 1e-40 or more")
    with np.errstate(over="ignore"):
        mask = values.astype(np.float32)
    wrong = ~np.isfinite(mask) | (mask < 0)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise RowError(f"{key}[{at}] is {mask[at]}, expected a finite number >= 0")
    return mask


def _mask_of_labels(labels: NDArray[np.int64], ids: NDArray[np.int64], alignment: MaskAlignment) -> NDArray[np.float32]:
    trained: NDArray[np.bool_] = labels != _NOT_TRAINED
    targets = np.roll(ids, -1) if alignment == "label" else ids
    wrong = trained & (labels != targets)
    if wrong.any():
        at = int(np.argmax(wrong))
        reason = f"labels[{at}] is {labels[at]} and stands for the token {targets[at]}; expected that id or -100"
        if trained[:-1].any() and (labels[:-1] == ids[1:])[trained[:-1]].all():
            reason += "; they look shifted by one: hand them in as label-aligned"
        raise RowError(reason)
    return trained.astype(np.float32)


# ---- single values ----


_JSON_NAMES: dict[type, str] = {
    **dict.fromkeys((int, float), "a number"),
    **{bool: "a boolean", str: "a string", list: "a list", dict: "an object", type(None): "null"},
}


def _kind_of(value: Any) -> str:
    """The type of a value in JSON's words, for error messages; RowError where it is undecoded."""
    if isinstance(value, Undecoded):
        raise value.error()
    return _JSON_NAMES.get(type(value), type(value).__name__)


def _is_filled(value: Any) -> bool:
    """Whether a value is neither null nor an empty string, list or object."""
    return value is not None and not (isinstance(value, (str, Sequence, Mapping)) and len(value) == 0)


def first_filled(data: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first of these keys whose value is neither null nor empty."""
    return next((name for name in names if _is_filled(data.get(name))), None)


def first_given(data: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first of these keys whose value is not null."""
    for name in names:  # a generator takes twice as long, and this is called several times a row
        if data.get(name) is not None:
            return name
    return None


def without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys whose value is not null: a table has a null for every key that only other rows have."""
    return {key: value for key, value in data.items() if value is not None}


def _typed(value: Any, kind: type[_Kind], what: str, expected: str = "") -> _Kind:
    """The value, if it is of a type (a string, a list or an object); else RowError."""
    if isinstance(value, Undecoded):
        raise value.error(expected or _JSON_NAMES[kind])
    if not isinstance(value, kind):
        raise RowError(f"{what} is {_kind_of(value)}, expected {expected or _JSON_NAMES[kind]}")
    return value


def _parsed(value: Any, what: str) -> Any:
    """A value as it is, but a string parsed as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode())
    except ValueError as error:
        raise RowError(f"{what} is a string that is {clause_of(error)}") from None
