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

from megatron_sft_idx.chat.rows.checks import RowError, is_filled, kind_of, parse_embedded, require_string
from megatron_sft_idx.chat.rows.messages import MEDIA_COLUMNS, read_message
from megatron_sft_idx.chat.rows.sharegpt import message_of_turn
from megatron_sft_idx.chat.rows.tokenized import MASK_COLUMNS, MaskAlignment, read_tokenized
from megatron_sft_idx.chat.types import Conversation, TokenizedRow

__all__ = ["RowError", "RowKind", "RowOptions", "to_sequence_source"]

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
