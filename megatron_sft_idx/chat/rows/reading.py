"""One raw row to a conversation, or to ids with a mask.

What a row is shows in its columns; null columns count as absent and unknown ones are ignored. Where columns
of several kinds stand side by side, the first of these counts:

1. ``tokenized``: ``input_ids`` beside ``loss_mask``, ``labels``, ``assistant_masks`` or ``completion_mask``.
2. ``messages``: ``messages``, ``conversations`` or ``conversation``, a list of turns, each with ``role`` and
   ``content`` (OpenAI) or ``from`` and ``value`` (ShareGPT), whatever the column is called.
3. ``prompt-completion``: ``prompt`` and ``completion``, two strings or (as TRL has it) two lists of
   messages, of which only the completion's are trained on.
4. ``alpaca``: the first of ``instruction``, ``prompt``, ``query``, ``question``; joined by a newline (as
   LLaMA-Factory does) to the first of ``input``, ``context`` if that says something; answered by the first of
   ``output``, ``response``, ``completion``, ``answer``. Earlier turns may stand in ``history`` as pairs.

Beside any but the first: ``tools`` (or the old ``functions``), ``system`` or ``system_prompt``, and
``chat_template_kwargs``. Rows that say which of two answers is better, or whether one is good (a boolean ``label``),
are refused whatever else they hold: trained as if they did not say so, they would teach what they warn of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.rows.messages import (
    MEDIA_COLUMNS,
    RowError,
    is_filled,
    kind_of,
    make_tool_call,
    name_of,
    parse_embedded,
    read_message,
    require_string,
    text_of,
)
from megatron_sft_idx.chat.types import Conversation, TokenizedRow

__all__ = [
    "MASK_COLUMNS",
    "MaskAlignment",
    "RowKind",
    "RowOptions",
    "message_of_turn",
    "read_tokenized",
    "to_sequence_source",
]


RowKind = Literal["auto", "messages", "alpaca", "prompt-completion", "tokenized"]

_TURNS = ("messages", "conversations", "conversation")
_PROMPTS = ("instruction", "prompt", "query", "question")
_INPUTS = ("input", "context")
_ANSWERS = ("output", "response", "completion", "answer")
_SYSTEMS = ("system", "system_prompt")
_PAIRS = ("chosen", "rejected", "chosen_response", "rejected_response", "rejected_messages")
_VERDICTS = ("label", "kto_tag")
# Beside what makes a chat.
_REFUSED = frozenset({*MEDIA_COLUMNS, *_PAIRS, *_VERDICTS})
_MORE = frozenset({*_SYSTEMS, "tools", "functions", "chat_template_kwargs"})
# Set by whoever renders; a row that sets them would change what a conversation is.
_RESERVED_KWARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize")


@dataclass(frozen=True, slots=True)
class RowOptions:
    """How rows are read.

    Attributes:
        kind: reads every row as this kind instead of looking at its columns.
        messages_key: the column that holds the turns of every row; None looks at the row's columns.
        mask_alignment: of the masks and labels of tokenised rows: at the token that is trained on, or
            (label) at the position that predicts it.
        require_assistant: whether a conversation in which the assistant says nothing is refused.
    """

    kind: RowKind = "auto"
    messages_key: str | None = None
    mask_alignment: MaskAlignment = "token"
    require_assistant: bool = True


_DEFAULT = RowOptions()


def to_sequence_source(data: Any, options: RowOptions = _DEFAULT) -> Conversation | TokenizedRow:
    """Reads one row; ``data`` is not changed, but the result may share parts of it.

    Raises:
        RowError: with the reason alone, for every row that cannot be used.
    """
    if not isinstance(data, dict):
        raise RowError(f"the row is {kind_of(data)}, expected an object")
    columns = data.keys()
    if not columns.isdisjoint(_REFUSED):
        _refuse_columns(data, options)
    kind = _kind_by_columns(data, options) if options.kind == "auto" else options.kind
    if kind == "tokenized":
        return read_tokenized(data, options.mask_alignment)
    if kind == "messages":
        messages, weights = _read_turns(data, options)
    elif kind == "prompt-completion":
        messages, weights = _read_prompt_completion(data)
    else:
        messages, weights = _read_alpaca(data)
    alone = columns.isdisjoint(_MORE)
    if not alone:
        _put_system_first(data, messages, weights)
    if options.require_assistant and not any(map(_says_something, reversed(messages))):
        raise RowError("the assistant says nothing in this row, so there is nothing to learn")
    return Conversation(messages, weights, None if alone else _tools_of(data), {} if alone else _kwargs_of(data))


def _refuse_columns(data: dict[str, Any], options: RowOptions) -> None:
    for column in MEDIA_COLUMNS:
        if is_filled(data.get(column)):
            raise RowError(f"the row has {column}; only text can be trained on here")
    pair = [column for column in _PAIRS if is_filled(data.get(column)) and not isinstance(data[column], (bool, int))]
    if pair and options.messages_key not in pair:
        raise RowError(
            f"a preference row ({', '.join(pair)}), but supervised fine-tuning takes one answer; keep the chosen one"
            " alone, as messages, or name the column that holds it as messages with --messages-key"
        )
    for column in _VERDICTS:
        verdict = data.get(column)
        # A number beside other columns may be a class; beside a completion it is a verdict on it.
        if isinstance(verdict, bool) or (verdict in (0, 1) and "completion" in data and isinstance(verdict, int)):
            raise RowError(
                f"{column} is {str(verdict).lower()}: a row of KTO, which says whether its answer is good, but"
                " supervised fine-tuning trains on every answer; keep the good ones, without that column"
            )


def _kind_by_columns(data: dict[str, Any], options: RowOptions) -> RowKind:
    has = {column for column, value in data.items() if value is not None}
    if "input_ids" in has and has.intersection(MASK_COLUMNS):
        return "tokenized"
    if options.messages_key or not has.isdisjoint(_TURNS):
        return "messages"
    if "prompt" in has and "completion" in has:
        return "prompt-completion"
    if not (has.isdisjoint(_PROMPTS) or has.isdisjoint(_ANSWERS)):
        return "alpaca"
    if "input_ids" in has:
        return "tokenized"  # which says that its mask is missing
    columns = ", ".join(sorted(map(str, has))[:12]) or "none"
    raise RowError(
        "no columns that make a chat: expected messages or conversations, a prompt with an answer, "
        f"or input_ids with a mask; found {columns}"
    )


def _read_turns(data: dict[str, Any], options: RowOptions) -> tuple[list[dict[str, Any]], list[float]]:
    keys = [options.messages_key] if options.messages_key else list(_TURNS)
    column = next((key for key in keys if data.get(key) is not None), None)
    if column is None:
        raise RowError(f"the row has no {' or '.join(keys)}")
    return _read_list(data[column], column)


def _read_list(turns: Any, column: str) -> tuple[list[dict[str, Any]], list[float]]:
    if isinstance(turns, str):
        turns = parse_embedded(turns, column)
    if not isinstance(turns, list):
        raise RowError(f"{column} is {kind_of(turns)}, expected a list of messages")
    if not turns:
        raise RowError(f"{column} is empty")
    first = turns[0]
    is_sharegpt = isinstance(first, dict) and "from" in first and "role" not in first
    messages, weights = [], []
    for i, turn in enumerate(turns):
        what = f"{column}[{i}]"
        message, weight = read_message(message_of_turn(turn, what) if is_sharegpt else turn, what)
        messages.append(message)
        weights.append(weight)
    return messages, weights


def _read_prompt_completion(data: dict[str, Any]) -> tuple[list[dict[str, Any]], list[float]]:
    prompt, completion = data.get("prompt"), data.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        if not prompt:
            raise RowError("prompt is empty")
        return _exchange([(prompt, completion)])
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise RowError(
            f"prompt is {kind_of(prompt)} and completion is {kind_of(completion)}, "
            "expected two strings or two lists of messages"
        )
    before, _ = _read_list(prompt, "prompt")
    after, weights = _read_list(completion, "completion")
    if not any(map(_says_something, after)):
        raise RowError("the assistant says nothing in the completion, so there is nothing to learn")
    return before + after, [0.0] * len(before) + weights


def _read_alpaca(data: dict[str, Any]) -> tuple[list[dict[str, Any]], list[float]]:
    def text(columns: tuple[str, ...], what: str) -> str:
        for column in columns:
            if (value := data.get(column)) is not None:
                return require_string(value, column)
        raise RowError(f"the row has no {what}: none of {', '.join(columns)}")

    prompt, answer = text(_PROMPTS, "prompt"), text(_ANSWERS, "answer")
    more = "" if data.get("input") is None and data.get("context") is None else text(_INPUTS, "input")
    asked = f"{prompt}\n{more}" if prompt and more else prompt or more
    if not asked:
        raise RowError("the prompt is empty")
    pairs = []
    history = data.get("history") or []
    if not isinstance(history, (list, tuple)):
        raise RowError(f"history is {kind_of(history)}, expected a list of [prompt, answer] pairs")
    for i, pair in enumerate(history):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(s, str) for s in pair):
            raise RowError(f"history[{i}] is not a pair of strings, expected [prompt, answer]")
        pairs.append((pair[0], pair[1]))
    return _exchange([*pairs, (asked, answer)])


def _exchange(pairs: list[tuple[str, str]]) -> tuple[list[dict[str, Any]], list[float]]:
    messages = []
    for asked, answer in pairs:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    if not pairs[-1][1]:
        raise RowError("the answer is empty, so there is nothing to learn")
    return messages, [1.0] * len(messages)


def _says_something(message: dict[str, Any]) -> bool:
    if message["role"] != "assistant":
        return False
    return bool(message.get("content") or message.get("tool_calls") or message.get("reasoning_content"))


def _put_system_first(data: dict[str, Any], messages: list[dict[str, Any]], weights: list[float]) -> None:
    column = next((name for name in _SYSTEMS if is_filled(data.get(name))), None)
    if column is None:
        return
    system = require_string(data[column], column)
    if messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
        weights.insert(0, 1.0)
    elif messages[0]["content"] != system:
        raise RowError(f"{column} and the first message are two system prompts that differ; keep one")


def _tools_of(data: dict[str, Any]) -> list[dict[str, Any]] | None:
    column = next((name for name in ("tools", "functions") if is_filled(data.get(name))), None)
    if column is None:
        return None
    tools = data[column]
    if isinstance(tools, str):
        if not tools.strip():
            return None
        tools = parse_embedded(tools, column)
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise RowError(f"{column} is {kind_of(tools)}, expected a list of tool schemas")
    read = []
    for i, given in enumerate(tools):
        tool = parse_embedded(given, f"{column}[{i}]") if isinstance(given, str) else given
        if not isinstance(tool, dict):
            raise RowError(f"{column}[{i}] is {kind_of(tool)}, expected an object")
        read.append({"type": "function", "function": tool} if column == "functions" else tool)
    return read or None


def _kwargs_of(data: dict[str, Any]) -> dict[str, Any]:
    kwargs = data.get("chat_template_kwargs")
    if isinstance(kwargs, str) and kwargs:
        kwargs = parse_embedded(kwargs, "chat_template_kwargs")
    if not is_filled(kwargs):
        return {}
    if not isinstance(kwargs, dict):
        raise RowError(f"chat_template_kwargs is {kind_of(kwargs)}, expected an object")
    for name in _RESERVED_KWARGS:
        if name in kwargs:
            raise RowError(f"chat_template_kwargs sets {name}, which is not a row's to set")
    return dict(kwargs)


# What says which tokens are trained on; the first of these that is there counts.
MASK_COLUMNS = ("loss_mask", "labels", "assistant_masks", "completion_mask")

MaskAlignment = Literal["token", "label"]

_NOT_TRAINED = -100
_MOST_ID = (1 << 31) - 1


def read_tokenized(row: dict[str, Any], alignment: MaskAlignment) -> TokenizedRow:
    """Checks ids and mask against each other; a mask or labels one position early are shifted back.

    Labels follow transformers: the token's own id where it is trained on, -100 elsewhere, at the token's own
    position (``token``) or at the one before it (``label``).
    """
    ids = _integers(row.get("input_ids"), "input_ids")
    if not ids.size:
        raise RowError("input_ids is empty")
    if ids.min() < 0 or ids.max() > _MOST_ID:
        raise RowError(f"input_ids holds {name_of(int(ids[(ids < 0) | (ids > _MOST_ID)][0]))}, no token's id")
    if is_filled(row.get("attention_mask")) and not _numbers(row["attention_mask"], "attention_mask").all():
        raise RowError("attention_mask has zeros: the row is padded; hand in rows without padding")
    column = next((name for name in MASK_COLUMNS if row.get(name) is not None), None)
    if column is None:
        raise RowError(f"input_ids without any of {', '.join(MASK_COLUMNS)}: nothing says what is trained on")
    read = _mask_of_labels if column == "labels" else _mask_of_numbers
    return TokenizedRow(ids, read(row[column], ids, column, alignment))


def _mask_of_numbers(values: Any, ids: NDArray[np.int64], column: str, alignment: MaskAlignment) -> NDArray[np.float32]:
    mask = _numbers(values, column)
    _require_length(mask, ids, column)
    with np.errstate(over="ignore"):
        mask = mask.astype(np.float32)
    wrong = ~np.isfinite(mask) | (mask < 0)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise RowError(f"{column}[{at}] is {mask[at]}, expected a finite number >= 0")
    if alignment == "token":
        return mask
    if mask[-1]:
        raise RowError(f"{column} is set at the last position, where no next token is predicted; token-aligned?")
    return np.concatenate([np.zeros(1, np.float32), mask[:-1]])


def _mask_of_labels(values: Any, ids: NDArray[np.int64], column: str, alignment: MaskAlignment) -> NDArray[np.float32]:
    given = _integers(values, column)
    _require_length(given, ids, column)
    labels = given
    if alignment == "label":
        if given[-1] != _NOT_TRAINED:
            raise RowError(f"labels end with {given[-1]}, expected -100: no token follows; token-aligned?")
        labels = np.concatenate([np.full(1, _NOT_TRAINED, np.int64), given[:-1]])
    trained: NDArray[np.bool_] = labels != _NOT_TRAINED
    wrong = trained & (labels != ids)
    if not wrong.any():
        return trained.astype(np.float32)
    at = int(np.argmax(wrong))
    reason = f"labels: {labels[at]} stands for the token {ids[at]} at {at}; expected that id or -100"
    shifted = given[:-1] != _NOT_TRAINED
    if alignment == "token" and (given[:-1] == ids[1:])[shifted].all():
        reason += "; they look shifted by one: hand them in as label-aligned"
    raise RowError(reason)


def _numbers(values: Any, column: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise RowError(f"{column} is not a flat list of numbers") from None
    if array.ndim != 1:
        what = kind_of(values) if array.ndim == 0 else f"{array.ndim}-dimensional"
        raise RowError(f"{column} is {what}, expected a flat list of numbers")
    if array.size and array.dtype.kind not in "biuf":
        raise RowError(f"{column} is not a flat list of numbers")
    return array


def _integers(values: Any, column: str) -> NDArray[np.int64]:
    array = _numbers(values, column)
    if array.size and array.dtype.kind not in "iu":
        raise RowError(f"{column} is not a flat list of integers")
    if array.size and array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise RowError(f"{column} holds {array.max()}, no token's id")
    return array.astype(np.int64)


def _require_length(values: NDArray[Any], ids: NDArray[np.int64], column: str) -> None:
    if len(values) != len(ids):
        raise RowError(f"{column} has {len(values)} entries for {len(ids)} input_ids")


_ROLES = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "function_call",
    "tool_call": "function_call",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}


def message_of_turn(turn: Any, what: str) -> dict[str, Any]:
    """Translates one turn; keys other than ``from`` and ``value`` are kept.

    The value of a ``function_call`` is JSON: a function with its arguments, or a list of them. It becomes an
    assistant message of tool calls, and what follows stays a message of its own.
    """
    if not isinstance(turn, dict):
        raise RowError(f"{what} is {kind_of(turn)}, expected an object with from and value")
    speaker = turn.get("from")
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise RowError(f"{what} is from {name_of(speaker)}; known are {', '.join(_ROLES)}")
    if turn.get("value") is None:
        raise RowError(f"{what} ({speaker}) has no value")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")} if len(turn) > 2 else {}
    if role != "function_call":
        return {**rest, "role": role, "content": text_of(turn["value"], f"{what}.value")}
    calls = turn["value"]
    if isinstance(calls, str):
        calls = parse_embedded(calls, f"{what} ({speaker})")
    if not isinstance(calls, list):
        calls = [calls]
    if not calls:
        raise RowError(f"{what} ({speaker}) holds no call")
    made = [make_tool_call(call, f"{what} ({speaker})") for call in calls]
    return {**rest, "role": "assistant", "content": None, "tool_calls": made}
