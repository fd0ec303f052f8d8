"""ShareGPT turns (``from``, ``value``) to OpenAI-style messages."""

from __future__ import annotations

from typing import Any

from megatron_sft_idx.chat.rows.checks import RowError, kind_of, name_of, parse_embedded
from megatron_sft_idx.chat.rows.messages import make_tool_call, text_of

__all__ = ["message_of_turn"]

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
