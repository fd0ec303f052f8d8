"""Columns next to a prompt, an answer or messages that hold words of these, and that are not read.

Most columns of a row that are not read hold sources, scores and names. But a column called ``reasoning`` or ``options``
holds words that belong to the answer or to the prompt: without them, the model would be trained on something else than
the row means. A row with words under such a name is refused. ``--fields`` says which columns make the row, and then all
others count as metadata; ``--ignore-field`` leaves one out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from megatron_sft_idx.chat.field_names import ANSWERS, HISTORY, INPUTS, PROMPTS, REASONING
from megatron_sft_idx.chat.fields import first_filled, is_filled
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
_OF_ANSWERS: Final = re.compile(r"corrected|revision|(?:\w+_)?attempt|generated_solution")
# Next to "answer", which then is a short reference.
_SOLUTION: Final = "solution"
_VERDICTS: Final = ("is_correct", "correct", "is_right")
# Text that is a flag.
_NO_WORDS: Final = frozenset({"", "on", "off", "yes", "no", "true", "false", "none", "null", "n/a", "0", "1"})


@lru_cache(maxsize=4096)  # rows of a file have few sets of columns
def may_be_unread(names: tuple[Any, ...]) -> bool:
    """Whether any of these columns is one that this module looks at; nearly every row has none."""
    known = {*_VERDICTS, _SOLUTION, HISTORY}
    return bool(_suspects(names) or _alternatives(names) or known.intersection(names))


def refuse_bad_answer(row: Mapping[str, Any]) -> None:
    """RowError where a row says that its answer is wrong."""
    for name in _VERDICTS:
        if row.get(name) is False:
            raise RowError(
                f"{name} is false: the row says that its answer is wrong, and it would be trained on; leave such rows"
                f" out, or --ignore-field {name} reads rows without it"
            )


def refuse_unread_of_exchange(row: Mapping[str, Any], read: Iterable[str]) -> None:
    """RowError where a row of one prompt and one answer has words of these in a column that is not read.

    Args:
        row: with its keys as they are.
        read: the keys that are read.
    """
    for name, part in _suspects(tuple(row)):
        if name not in read and name != REASONING and _holds_words(row[name]):
            raise _unread(name, part)
    if _SOLUTION in row and "answer" in read and _holds_words(row[_SOLUTION]):
        raise _unread(_SOLUTION, "answer")


@lru_cache(maxsize=4096)
def _suspects(names: tuple[Any, ...]) -> Sequence[tuple[str, str]]:
    """Those of these columns that may hold words of the prompt or the answer, each with the part that it is of."""
    parts = (("reasoning", _OF_REASONING), ("prompt", _OF_PROMPTS), ("answer", _OF_ANSWERS))
    texts = [name for name in names if isinstance(name, str)]
    return [(name, part) for name in texts for part, pattern in parts if pattern.fullmatch(name.lower())]


def refuse_several(row: Mapping[str, Any]) -> None:
    """RowError where a row has two prompts, inputs or answers that differ, of which one alone would be read."""
    for names in _alternatives(tuple(row)):
        filled = [name for name in names if is_filled(row[name])]
        for name in filled[1:]:
            if not _is_copy(row[name], row[filled[0]]):
                raise RowError(
                    f"the row has {filled[0]} and {name}, which differ; --fields prompt=NAME completion=NAME says which"
                    f" columns make the row, --ignore-field {name} reads rows without it"
                )


@lru_cache(maxsize=4096)
def _alternatives(names: tuple[Any, ...]) -> Sequence[Sequence[str]]:
    """Columns of which one is read, where there are several, by what they hold."""
    groups = [[name for name in group if name in names] for group in (PROMPTS, INPUTS, ANSWERS)]
    return [group for group in groups if len(group) > 1]


def _is_copy(value: Any, of: Any) -> bool:
    """Whether a value is another one, or a text in which that one is written out, as a rendered prompt is."""
    return bool(value == of) or (isinstance(value, str) and isinstance(of, str) and of.strip() in value)


def refuse_unread_of_messages(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> None:
    """RowError where a row of messages has reasoning or earlier turns in a column."""
    for name, part in _suspects(tuple(row)):
        if part == "reasoning" and _holds_words(row[name]) and not _have_reasoning(messages):
            raise _unread(name, part)
    if HISTORY in row and _holds_words(row[HISTORY]):
        raise _unread(HISTORY, "prompt")


def refuse_unread_answer(row: Mapping[str, Any]) -> None:
    """RowError where a row, whose last message is the user's, has words in a column of answers."""
    answer = first_filled(row, ANSWERS)
    if answer is not None and _holds_words(row[answer]):
        raise RowError(
            f"the last message is the user's, and {answer} may be the answer to it; --fields prompt=NAME"
            f" completion={answer} reads the messages as the prompt, --ignore-field {answer} reads rows without it"
        )


def _have_reasoning(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a message has reasoning already, of which a column may be a copy."""
    answers = [message for message in messages if message["role"] == "assistant"]
    return any(message.get(REASONING) or "</think>" in (message.get("content") or "") for message in answers)


def _unread(name: str, part: str) -> RowError:
    mapped = "reasoning_content" if part == "reasoning" else "prompt" if part == "prompt" else "completion"
    return RowError(
        f"the row has {name}, which holds words of the {part} and is not read; --fields {mapped}={name} (with the other"
        f" columns of the row) reads it, --ignore-field {name} reads rows without it"
    )


def _holds_words(value: Any) -> bool:
    return any(text.strip().lower() not in _NO_WORDS for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)
