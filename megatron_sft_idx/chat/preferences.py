r"""Rows that judge answers: which of two is better, or whether one is good.

They are read only where ``RowOptions.kind`` asks for them. Read as ordinary chats they would train what is bad.

``preference``: ``chosen`` and ``rejected`` (or ``chosen_response`` and ``rejected_response``), each one of

- a string, an answer to the prompt; or a transcript of ``\n\nHuman:`` and ``\n\nAssistant:`` turns (Anthropic's)
- one turn, ``{from, value}`` or ``{role, content}`` (LLaMA-Factory), an answer to the prompt
- a list of messages (TRL): the whole conversation where it begins with a system's or user's message, else what follows
  the prompt; also as JSON text, as tables hold them

The prompt stands under ``messages``, ``conversations`` or ``conversation``, under ``prompt`` as messages, or under the
keys of Alpaca rows. ``messages`` beside ``rejected_response`` or ``rejected_messages``, with nothing chosen (ms-swift),
end with the chosen answer. The messages that both conversations begin with are the prompt, which is never trained on;
as in TRL, all that follows is the answer, of which the template's mask takes what the assistant says.

``kto``: any row of chats beside ``label`` or ``kto_tag``, true or false, of which only what follows the last user's
message, or the ``completion``, is trained on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from megatron_sft_idx.chat.chat_rows import (
    CHOSEN,
    INPUTS,
    PROMPTS,
    REJECTED,
    TURNS,
    VERDICTS,
    RowError,
    RowOptions,
    first_filled,
    first_given,
    kind_by_keys,
    messages_of_json,
    read_prompt,
    require_object,
    to_sequence_source,
    turns_of_pairs,
    without_nulls,
)
from megatron_sft_idx.chat.types import Conversation, TokenizedRow

_BEGINNERS: Final = ("system", "developer", "user", "human")
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"

Turns = list[Any]


def read_judged(data: Any, options: RowOptions) -> tuple[list[Conversation | TokenizedRow], int | None]:
    """Reads one row of the kind ``preference`` or ``kto``.

    Returns:
        Of a row of ``preference`` its chosen and its rejected conversation, and None; of a row of ``kto`` its one
        conversation, and its label, 0 or 1.

    Raises:
        RowError: with the reason alone.
    """
    row = require_object(data)
    if options.kind == "kto":
        return _read_verdict(row, options)
    prompt, chosen, rejected = _pair_of(row, options)
    used = {*CHOSEN, *REJECTED, *TURNS, *PROMPTS, *INPUTS, "history", options.messages_key}
    # A number in the place of a verdict is a class; beside the completions below it would be taken for one on them.
    used |= {key for key in VERDICTS if not isinstance(row.get(key), bool)}
    rest = {key: value for key, value in row.items() if key not in used}
    alone = replace(options, kind="prompt-completion", messages_key=None)
    conversations: list[Conversation | TokenizedRow] = []
    for name, completion in (("chosen", chosen), ("rejected", rejected)):
        try:
            conversations.append(to_sequence_source({**rest, "prompt": prompt, "completion": completion}, alone))
        except RowError as error:
            raise RowError(f"{name}: {error}") from None
    return conversations, None


def _pair_of(data: dict[str, Any], options: RowOptions) -> tuple[Turns, Turns, Turns]:
    """The turns that both conversations begin with, and what follows in the chosen and in the rejected one."""
    turns = first_filled(data, (options.messages_key or TURNS[0], *TURNS))
    # An answer that is there and empty is not one that the messages end with.
    chosen_in, rejected_in = first_filled(data, CHOSEN) or first_given(data, CHOSEN), first_filled(data, REJECTED)
    if rejected_in is None or (chosen_in or turns) is None:
        raise RowError(f"no preference row: it has no {'rejected' if rejected_in is None else 'chosen'}")
    messages = _turns(data[turns]) if turns else None
    if messages is not None and not isinstance(messages, list):
        raise RowError(f"{turns} is no list of messages")
    rejected, rejected_is_whole = _answer(data[rejected_in], rejected_in)
    if chosen_in is None:  # the row's messages end with the chosen answer
        chosen, chosen_is_whole = messages or [], True
        prompt = chosen[:-1]
        rejected_is_whole |= rejected_in == "rejected_messages"
    else:
        chosen, chosen_is_whole = _answer(data[chosen_in], chosen_in)
        prompt = _prompt_of(data) if messages is None else messages
        if chosen_is_whole and rejected_is_whole:
            _require_shared(data, prompt, chosen, rejected)
    chosen = chosen if chosen_is_whole else prompt + chosen
    rejected = rejected if rejected_is_whole else prompt + rejected
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise RowError("chosen and rejected answer no common prompt: no message is before both")
    if shared == min(len(chosen), len(rejected)):
        raise RowError("chosen and rejected are the same, or one is the beginning of the other")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _answer(value: Any, key: str) -> tuple[Turns, bool]:
    """The turns of an answer, and whether they are a whole conversation rather than what follows the prompt."""
    value = _turns(value)
    if isinstance(value, str):
        return (_transcript(value), True) if value.startswith(_HUMAN) else ([_message("assistant", value)], False)
    if isinstance(value, dict):
        return [without_nulls(value)], False
    if not (value and isinstance(value, list) and all(isinstance(turn, dict) for turn in value)):
        raise RowError(f"{key} is neither a string, nor a turn, nor a list of messages")
    return value, value[0].get("role", value[0].get("from")) in _BEGINNERS


def _turns(value: Any) -> Any:
    """Messages without their nulls, so that those of two columns compare alike; any other value as it is."""
    turns = messages_of_json(value)
    is_list = isinstance(turns, list)
    return [without_nulls(turn) if isinstance(turn, dict) else turn for turn in turns] if is_list else turns


def _prompt_of(data: dict[str, Any]) -> Turns:
    prompt = _turns(data.get("prompt"))
    if isinstance(prompt, list):
        return prompt
    if isinstance(prompt, str) and prompt.startswith(_HUMAN):
        return _transcript(prompt)
    history, asked = read_prompt(data)
    turns = turns_of_pairs(history)
    return [*turns, _message("user", asked)] if asked else turns


def _require_shared(data: dict[str, Any], prompt: Turns, chosen: Turns, rejected: Turns) -> None:
    """RowError where whole conversations stand beside a prompt that they do not begin with."""
    if prompt and prompt == chosen[: len(prompt)]:
        return  # the row's messages are those of the chosen conversation, as UltraFeedback has it
    texts = [turn.get("content", turn.get("value")) for one, turn in zip(rejected, chosen, strict=False) if one == turn]
    for name in (first_filled(data, PROMPTS), first_filled(data, INPUTS)):
        if name is not None and data[name] not in texts:
            raise RowError(f"chosen and rejected are whole conversations, in which {name} is not a message of both")
    if first_filled(data, TURNS):
        raise RowError("chosen and rejected are whole conversations that do not begin with the row's messages")


def _transcript(text: str) -> Turns:
    """The turns of one of Anthropic's transcripts; assistant turns without text are left out."""
    turns = []
    for human in text.split(_HUMAN)[1:]:
        request, *answers = human.split(_ASSISTANT)
        turns.append(_message("user", request.strip()))
        turns += [_message("assistant", answer.strip()) for answer in answers if answer.strip()]
    return turns


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _read_verdict(data: dict[str, Any], options: RowOptions) -> tuple[list[Conversation | TokenizedRow], int]:
    key = next((name for name in VERDICTS if data.get(name) is not None), None)
    if key is None:
        raise RowError(f"no row of KTO: it has no {' or '.join(VERDICTS)}")
    if data[key] not in (0, 1) or not isinstance(data[key], int):
        raise RowError(f"{key} is {str(data[key])[:40]!r}, expected true or false")
    rest = {name: value for name, value in data.items() if name not in VERDICTS}
    options = replace(options, kind="auto")
    source = to_sequence_source(rest, options)
    # A completion is what is judged, whatever stands in it; it has weights of its own by now.
    if isinstance(source, Conversation) and kind_by_keys(rest, options) != "prompt-completion":
        answer_at = max((i + 1 for i, message in enumerate(source.messages) if message["role"] == "user"), default=0)
        if answer_at == len(source.messages):
            raise RowError("the row ends with a user's message, so there is no answer that its label could judge")
        source.weights[:answer_at] = [0.0] * answer_at
    return [source], int(data[key])
