r"""Rows with preferences: which of two answers is better, or whether an answer is good.

They are read only if ``RowOptions.kind`` asks for them. As ordinary chats, they would train bad answers.

``preference``: ``chosen`` and ``rejected`` (or the same with ``_response`` or ``_messages``), each one of

- a string: an answer to the prompt, or a transcript of ``\n\nHuman:`` and ``\n\nAssistant:`` turns (Anthropic)
- one turn, ``{from, value}`` or ``{role, content}`` (LLaMA-Factory): an answer to the prompt
- a list of messages (TRL), also as JSON text, as in tables: the whole conversation if it begins with a system or user
  message or with the prompt, otherwise the continuation of the prompt

The prompt is under ``messages``, ``conversations`` or ``conversation``, under ``prompt`` as messages, or under the
keys of Alpaca rows. ``messages`` next to ``rejected_response`` or ``rejected_messages``, without a chosen answer
(ms-swift), are the whole chosen conversation; this is also possible next to ``chosen`` (UltraFeedback). A rejected
answer then replaces the last assistant message. Several rejected messages replace everything after the last user
message.

The common messages at the beginning of both conversations, as chat templates see them, are never trained on. The row's
prompt must be among them. The first message in which they differ must be an assistant or tool message. As in TRL,
everything from there on is the answer, and the template's mask selects the assistant's words in it. Images and audio of
the row belong to the common messages, so both conversations have them.

``kto``: any chat row with ``label`` or ``kto_tag``, true or false. Only the text after the last user message, or the
``completion``, is trained on.
"""

from __future__ import annotations

from typing import Any, Final

from megatron_sft_idx.chat.chat_rows import (
    kind_by_keys,
    preference_keys,
    prepared_row,
    read_prepared,
    read_prompt,
    refuse_media,
    to_conversation,
    verdict_of,
)
from megatron_sft_idx.chat.field_names import CHOSEN, HISTORY, INPUTS, PROMPTS, REASONING, REJECTED, TURNS, VERDICTS
from megatron_sft_idx.chat.fields import first_filled, first_given, is_filled
from megatron_sft_idx.chat.media_parts import place_media_of_pair
from megatron_sft_idx.chat.packed_rows import require_one
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.training_fields import messages_of_json, refuse_row_fields
from megatron_sft_idx.chat.turns import Turns, any_trained, read_list, turns_of_pairs
from megatron_sft_idx.chat.types import Conversation, RowError, TextRow, TokenizedRow
from megatron_sft_idx.chat.unread_columns import refuse_unread_of_pair

_BEGINNERS: Final = ("system", "developer", "user")
_ANSWERING: Final = ("assistant", "tool")
# Keys that ms-swift uses only for a rejected conversation.
_FOR_REJECTED: Final = tuple(f"rejected_{name}" for name in ("tools", "images", "audios", "videos", "objects"))
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


def read_judged(data: Any, options: RowOptions) -> tuple[list[Conversation | TokenizedRow], int | None]:
    """Read one row of the kind ``preference`` or ``kto``.

    Returns:
        For ``preference``, the chosen and the rejected conversation, and None; for ``kto``, its one conversation, and
        its label, 0 or 1.

    Raises:
        RowError: the row cannot be used; the text is only the reason.
    """
    row, notes = prepared_row(data, options)
    sources, label = _read_judged_row(row, options)
    return [sources[0]._replace(notes=notes), *sources[1:]] if notes else sources, label


def _read_judged_row(row: dict[str, Any], options: RowOptions) -> tuple[list[Conversation | TokenizedRow], int | None]:
    if options.kind == "kto":
        return _read_verdict(row, options)
    refuse_media(row, options)
    refuse_row_fields(row, read=())
    chosen, rejected, shared = _pair_of(row, options)
    if options.media:
        placed = place_media_of_pair(row, chosen[0], rejected[0], shared)
        chosen, rejected = (placed[0], chosen[1]), (placed[1], rejected[1])
    conversations: list[Conversation | TokenizedRow] = []
    for name, (messages, of_messages) in (("chosen", chosen), ("rejected", rejected)):
        weights = [0.0] * shared + of_messages[shared:]
        if not any_trained(messages, weights):
            raise RowError(f"{name}: no assistant message is trained on, so there is nothing to learn")
        conversation = to_conversation(row, messages, weights)
        require_one(conversation, options.system_starts, f"a pair needs exactly one {name} answer")
        conversations.append(conversation)
    return conversations, None


def _pair_of(data: dict[str, Any], options: RowOptions) -> tuple[Turns, Turns, int]:
    """Return chosen and rejected conversations and the number of common messages. RowError: they are not a pair."""
    turns = first_filled(data, TURNS)
    # An empty "chosen" is a bad answer. The row's messages end with the chosen answer only if the key is missing.
    chosen_in, rejected_in = first_filled(data, CHOSEN) or first_given(data, CHOSEN), first_filled(data, REJECTED)
    if rejected_in is None or (chosen_in or turns) is None:
        given = first_given(data, REJECTED) if rejected_in is None else None
        missing = f"{given} is empty" if given else f"{'rejected' if rejected_in is None else 'chosen'} is missing"
        raise RowError(f"not a preference row: {missing}")
    for key in VERDICTS:
        if verdict_of(data.get(key), is_judged=False) is not None:
            raise _two_verdicts([name for name in (chosen_in, rejected_in) if name], key, data)
    for key in _FOR_REJECTED:
        if first_filled(data, (key,)) and data[key] != data.get(name := key.removeprefix("rejected_")):
            raise RowError(f"{key} and {name} differ: chosen and rejected must answer the same prompt")
    prompt, prompt_in = _prompt_of(data, turns, options)
    rejected, rejected_is_whole = _answer(data[rejected_in], rejected_in, prompt, options)
    rejected_is_whole |= chosen_in is None and rejected_in == "rejected_messages"
    chosen, chosen_is_whole = _answer(data[chosen_in], chosen_in, prompt, options) if chosen_in else (prompt, True)
    if chosen_is_whole and chosen[0] == prompt[0] and chosen[0][-1]["role"] == "assistant":
        # The row's messages are the chosen conversation.
        answering = _ANSWERING[: len(rejected[0])]  # one rejected message keeps the tool results
        asked = max((i + 1 for i, each in enumerate(chosen[0]) if each["role"] not in answering), default=0)
        prompt = ([], []) if rejected_is_whole else (chosen[0][:asked], chosen[1][:asked])
    chosen = chosen if chosen_is_whole else _answered(prompt, chosen, prompt_in)
    rejected = rejected if rejected_is_whole else _answered(prompt, rejected, prompt_in)
    pairs = list(zip(chosen[0], rejected[0], strict=False))
    shared = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
    begins = range(shared - len(prompt[0]) + 1)  # of the prompt, which may follow a system message
    if not any(chosen[0][i : i + len(prompt[0])] == prompt[0] for i in begins):
        raise RowError(f"chosen and rejected do not begin with the row's {prompt_in}")
    if not shared:
        raise RowError("chosen and rejected have no common prompt: they differ from the first message on")
    if shared == len(pairs):
        raise RowError("chosen and rejected are equal, or one is a prefix of the other")
    if not options.mapping.has_content:
        keys = [turns, prompt_in, chosen_in, rejected_in, HISTORY]
        keys += [first_filled(data, names) for names in (PROMPTS, INPUTS)] if turns is None else []
        refuse_unread_of_pair(data, [*filter(None, keys)], [*chosen[0], *rejected[0]])
    elif is_filled(data.get(REASONING)):
        raise RowError(f"{REASONING} of a preference row belongs to neither answer; put it into the messages")
    if not {each["role"] for each in pairs[shared]} <= {*_ANSWERING}:
        raise RowError(
            "chosen and rejected have different prompts: the first message in which they differ must be an"
            " assistant message"
        )
    return chosen, rejected, shared


def _answer(value: Any, key: str, prompt: Turns, options: RowOptions) -> tuple[Turns, bool]:
    """Return the messages of an answer, and whether they are a whole conversation, including the prompt."""
    value = messages_of_json(value)
    if isinstance(value, str):
        return (_transcript(value), True) if value.startswith(_HUMAN) else (_said([("assistant", value)]), False)
    if isinstance(value, dict):
        return read_list([value], key, options), False
    if not (value and isinstance(value, list) and all(isinstance(turn, dict) for turn in value)):
        raise RowError(f"{key} is not a string, a message or a list of messages")
    messages, weights = read_list(value, key, options)
    begins_with_prompt = prompt[0] and messages[: len(prompt[0])] == prompt[0]
    return (messages, weights), bool(messages[0]["role"] in _BEGINNERS or begins_with_prompt)


def _answered(prompt: Turns, answer: Turns, prompt_in: str) -> Turns:
    """Append an answer to the prompt."""
    if prompt[0][-1:] == answer[0][:1]:
        raise RowError(
            f"the row's {prompt_in} already ends with the answer that is repeated in chosen or rejected; remove it"
            " from one of them"
        )
    return prompt[0] + answer[0], prompt[1] + answer[1]


def _prompt_of(data: dict[str, Any], turns: str | None, options: RowOptions) -> tuple[Turns, str]:
    """Return the prompt of a row, with its turns under the key ``turns`` or without turns, and its name for errors."""
    key = turns or "prompt"
    value = messages_of_json(data.get(key))
    if isinstance(value, list):
        return read_list(value, key, options) if value else ([], []), key
    if turns is not None:
        raise RowError(f"{turns} is not a list of messages")
    if isinstance(value, str) and value.startswith(_HUMAN):
        return _transcript(value), key
    history, asked = read_prompt(data)
    pairs = [(each["role"], each["content"]) for each in turns_of_pairs(history)] + [("user", asked)] * bool(asked)
    return _said(pairs), first_filled(data, (*PROMPTS, *INPUTS, HISTORY)) or key


def _transcript(text: str) -> Turns:
    """Return the turns of one of Anthropic's transcripts, without empty assistant turns."""
    turns = []
    for human in text.split(_HUMAN)[1:]:
        request, *answers = human.split(_ASSISTANT)
        turns.append(("user", request.strip()))
        turns += [("assistant", answer.strip()) for answer in answers if answer.strip()]
    return _said(turns)


def _said(turns: list[tuple[str, str]]) -> Turns:
    """Return messages for pairs of role and text."""
    return [{"role": role, "content": text} for role, text in turns], [1.0] * len(turns)


def _read_verdict(data: dict[str, Any], options: RowOptions) -> tuple[list[Conversation | TokenizedRow], int]:
    given = [name for name in VERDICTS if data.get(name) is not None]
    if not given:
        raise RowError(f"not a KTO row: it has no {' or '.join(VERDICTS)}")
    verdicts = {key: verdict_of(data[key], is_judged=True) for key in given}
    for key, verdict in verdicts.items():
        if verdict is None:
            raise RowError(f"{key} is {str(data[key])[:40]!r}, expected true or false")
        if verdict != verdicts[given[0]]:
            raise RowError(f"{' and '.join(given)} of the row differ; keep one")
    if names := preference_keys(data):
        raise _two_verdicts(names, given[0], data)
    rest = {name: value for name, value in data.items() if name not in VERDICTS}
    source = read_prepared(rest, options)
    if isinstance(source, TextRow):
        raise RowError(f"the row has only text, but {given[0]} is a label for an answer: provide messages")
    if isinstance(source, TokenizedRow):
        is_judged = bool(source.loss_mask[1:].any())  # nothing predicts the first token
    else:
        # A completion is what is judged, whatever its content. Its weights are already set.
        if kind_by_keys(rest, options) != "prompt-completion":
            answer_at = max((i + 1 for i, each in enumerate(source.messages) if each["role"] == "user"), default=0)
            source.weights[:answer_at] = [0.0] * answer_at
        is_judged = any_trained(source.messages, source.weights)
    if not is_judged:
        raise RowError(
            "the row has a label but no answer: it ends with a user message, or with an answer that is not trained on"
        )
    require_one(source, options.system_starts, f"{given[0]} is the label of one answer")
    return [source], int(bool(verdicts[given[0]]))


def _two_verdicts(names: list[str], verdict: str, data: dict[str, Any]) -> RowError:
    """Return the error about a row of both kinds."""
    return RowError(
        f"the row has a preference pair ({', '.join(names)}) and also {verdict} ({str(data[verdict]).lower()}), the"
        " label of a single answer: remove one of the two"
    )
