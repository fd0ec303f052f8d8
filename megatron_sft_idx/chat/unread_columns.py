"""Unread columns that contain words of the prompt, an answer or messages.

Most unread columns of a row hold sources, scores and names. But a column named ``reasoning`` or ``options``, or a
second prompt or answer, has words that belong to the training text. Without them, the model would be trained on
something else than the row means. A row with such words is rejected, unless the text that is read contains them too.
With ``--fields``, only the given columns make the row and all others count as metadata. ``--ignore-field`` drops a
column.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from megatron_sft_idx.chat.field_names import (
    ANSWERS,
    CHOSEN,
    HISTORY,
    INPUTS,
    OTHER_ANSWERS,
    OTHER_PROMPTS,
    PROMPTS,
    REASONING,
    REJECTED,
    TURNS,
)
from megatron_sft_idx.chat.types import RowError

# In lower case.
_OF_REASONING: Final = re.compile(
    r"reasoning(?:_content)?|thinking|thoughts?|think|(?:\w+_)?cot|chain_of_thoughts?|rationale"
    r"|(?:\w+_)?thinking_trajector(?:y|ies)|\w+_reasoning"
)
_OF_PROMPTS: Final = re.compile(
    r"options|choices|article|passage|documents?|contexts|paragraph|definition"
    r"|(?:chat|conversation|dialogue)?_?history|previous_turns"
)
_OF_ANSWERS: Final = re.compile(r"corrected|revision|(?:\w+_)?attempt")
# Next to "answer", which is then a short reference.
_SOLUTION: Final = "solution"
_VERDICTS: Final = ("is_correct", "correct", "is_right")
_WRONG: Final = ("false", "0", "no")
# Text that is a flag.
_NO_WORDS: Final = frozenset({"", "on", "off", "yes", "no", "true", "false", "none", "null", "n/a", "0", "1"})
# About a turn, but not its words.
_NO_TEXT: Final = frozenset({"role", "from", "type", "name", "id", "tool_call_id"})


def refuse_bad_answer(row: Mapping[str, Any]) -> None:
    """Raise RowError if a row marks its answer as wrong."""
    for name in _VERDICTS:
        if name in row and row[name] is not None and str(row[name]).strip().lower() in _WRONG:
            raise RowError(
                f"{name} is {str(row[name]).lower()}: the row marks its answer as wrong, but training would learn it;"
                f" leave such rows out, or pass --ignore-field {name} to train on them anyway"
            )


def refuse_unread_of_exchange(
    row: Mapping[str, Any], read: Collection[str], messages: Sequence[Mapping[str, Any]]
) -> None:
    """Raise RowError if a row of prompt and answer has words of these in an unread column.

    Args:
        row: the row with its original keys.
        read: the keys that are read.
        messages: the messages made from them.
    """
    for name, part in _suspects(tuple(row)):
        if name not in read and (part != _SOLUTION or "answer" in read):
            _refuse_words(row, name, part, messages, read)


def refuse_unread_of_messages(row: Mapping[str, Any], read: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise RowError if a row of messages has reasoning, other turns, or the answer to its last message in a column.

    Args:
        row: the row with its original keys.
        read: the key of the messages.
        messages: the messages made from them.
    """
    is_answered = messages[-1]["role"] != "user"
    for name, part in _suspects(tuple(row)):
        if name == read:
            continue
        if part == "reasoning" and not _have_reasoning(messages):
            _refuse_words(row, name, part, messages, ())
        elif part == "turns" or name == HISTORY:
            _refuse_words(row, name, "turns", messages, ())
        elif name in ANSWERS and not is_answered and _holds_words(row[name]):
            raise RowError(
                f"the last message is from the user, and {name} may be its answer; pass --fields prompt=NAME"
                f" completion={name} to use the messages as the prompt, or --ignore-field {name} to ignore it"
            )


def refuse_unread_of_pair(row: Mapping[str, Any], read: Collection[str], messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise RowError if a preference row has words of its prompt or its answers in an unread column.

    Args:
        row: the row with its original keys.
        read: the keys that are read.
        messages: the messages of both conversations.
    """
    for name, part in _suspects(tuple(row)):
        is_of_pair = part in ("reasoning", "prompt", "turns") or name in (*CHOSEN, *REJECTED)
        if name not in read and is_of_pair:
            _refuse_words(row, name, part, messages, read)


@lru_cache(maxsize=4096)  # the rows of a file have few different sets of columns
def _suspects(names: tuple[Any, ...]) -> Sequence[tuple[str, str]]:
    """Return the columns that may hold words of a conversation, each with the part that it belongs to."""
    of_names = {
        **dict.fromkeys((*PROMPTS, *INPUTS, *OTHER_PROMPTS), "prompt"),
        **dict.fromkeys((*ANSWERS, *OTHER_ANSWERS, *CHOSEN, *REJECTED), "answer"),
        **dict.fromkeys(TURNS, "turns"),
        _SOLUTION: _SOLUTION,
    }
    patterns = (("reasoning", _OF_REASONING), ("prompt", _OF_PROMPTS), ("answer", _OF_ANSWERS))
    found = []
    for name in names:
        if isinstance(name, str):
            parts = [part for part, pattern in patterns if pattern.fullmatch(name.lower())]
            parts = [of_names[name]] if name in of_names else parts
            found += [(name, part) for part in parts]
    return found


def _refuse_words(
    row: Mapping[str, Any], name: str, part: str, messages: Sequence[Mapping[str, Any]], read: Collection[str]
) -> None:
    """Raise RowError if a column has words that the text that is read does not have."""
    texts = [text for text in _texts(row[name]) if text.strip().lower() not in _NO_WORDS]
    if not texts:
        return
    written = "\n".join(text for message in messages for text in _texts(message))
    # A rendered prompt contains the prompt.
    asked = (
        [row[key].strip() for key in read if key in PROMPTS and isinstance(row.get(key), str)]
        if part == "prompt"
        else []
    )
    if all(text.strip() in written or any(each and each in text for each in asked) for text in texts):
        return
    mapped = {"reasoning": REASONING, "prompt": "prompt", "turns": "messages"}.get(part, "completion")
    raise RowError(
        f"the row has {name}, which looks like text of the {'answer' if part == _SOLUTION else part} but is not read;"
        f" map it with --fields {mapped}={name} (together with the other columns of the row), or pass --ignore-field"
        f" {name} to ignore it"
    )


def _have_reasoning(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a message already has reasoning; a column may then be a copy of it."""
    answers = [message for message in messages if message["role"] == "assistant"]
    return any(message.get(REASONING) or "</think>" in (message.get("content") or "") for message in answers)


def _holds_words(value: Any) -> bool:
    return any(text.strip().lower() not in _NO_WORDS for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _NO_TEXT:
                yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)
