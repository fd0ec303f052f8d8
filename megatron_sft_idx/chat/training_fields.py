"""Fields of rows and messages that control what is trained on.

In other trainers, a message, a part of a message or a row can be marked "do not train", each with its own field names.
Such a field is read exactly as its trainer reads it, or the row is rejected. None is ignored. docs/masks.md has the
table.

A field that no listed trainer reads, but whose name refers to training (``turn_loss_mask``, ``is_trainable``), is
rejected if its value can be a flag or a weight. Strings, nulls, and numbers under names such as ``train_id`` are
metadata. ``RowOptions.ignore_fields`` removes fields before anything is read.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from megatron_sft_idx.chat.fields import pair_keys
from megatron_sft_idx.chat.types import IGNORED_FIELD, RowError
from megatron_sft_idx.chat.values import Undecoded, parse_json

# Fields of a message, as trainers read them.
WEIGHTS: Final = ("weight", "loss_weight", "loss_scale")
FLAGS: Final = ("train", "training", "trainable", "loss", "step_loss_mask", "loss_mask")
# True means "do not train".
INVERTED: Final = ("masked",)
# For these, the trainer trains a message of any role that is marked; for the others, only assistant messages.
_OF_ANY_ROLE: Final = frozenset({"train", "training", "trainable", "loss_mask", "masked"})
# Fields that select characters or tokens of a message for training.
_OF_PARTS: Final = frozenset({"train_detail", "training_detail", "reasoning_training_detail", "mask"})
_READ: Final = frozenset({*WEIGHTS, *FLAGS, *INVERTED})
_ORDER: Final = {name: place for place, name in enumerate((*WEIGHTS, *FLAGS, *INVERTED))}
# Verdicts on an answer, in a message.
MESSAGE_VERDICTS: Final = ("label", "labels", "kto_tag")
# Names that do not refer to training.
_NOT_TRAINING: Final = frozenset({"attention_mask", "padding_mask", "special_tokens_mask", "cross_attention_mask"})

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SPEAKS_OF_TRAINING = re.compile(
    r"(?:un|no|non|not|is|to|do|dont)?"
    r"(?:mask(?:s|ed|ing)?|loss(?:es)?|train(?:ed|ing|able)?|weight(?:s|ed|ing)?|supervis(?:e|ed|ion)|backprop)"
    r"|[a-z]*(?:loss|train|weight|label)(?:mask|weight|scale|flag)s?"
    r"|[a-z]+mask(?:s|ed)?"
)
_SPEAKS_OF_WEIGHT = re.compile(r"[a-z]*(?:weight|scale|multiplier|coef)(?:s|ed|ing)?")
# A number under a name that ends in such a word is a position or a count.
_COUNTS = re.compile(
    r"ids?|idx|index|indices|uuid|hash|num(?:ber)?|counts?|n|total|tokens|rows|samples|steps?|epochs?|size|length"
    r"|version|split|set|file|source|name|date|time|seconds"
)
_FLAG_TEXTS: Final = frozenset({"true", "false", "0", "1", "0.0", "1.0"})
_MAX_WEIGHT = float(np.finfo(np.float32).max)  # masks are stored as float32
_LEAST_WEIGHT = float(np.finfo(np.float32).smallest_subnormal)  # smaller values may become 0


def words_of(name: str) -> list[str]:
    """Return the words of a field's name, in lower case: ``stepLoss_mask`` has three."""
    return [word.lower() for word in _WORD.findall(name)]


def is_training_name(name: object) -> bool:
    """Return whether a field of this name may control what is trained on."""
    if not isinstance(name, str) or name in _NOT_TRAINING:
        return False
    if name in _READ or name in _OF_PARTS:
        return True
    return any(map(_SPEAKS_OF_TRAINING.fullmatch, words_of(name)))


def training_names(fields: Iterable[str]) -> Sequence[str]:
    """Return the names that may control training: known ones first, in the order of their table."""
    return _training_names(tuple(fields))


@lru_cache(maxsize=4096)  # the rows of a file have few different sets of fields
def _training_names(fields: tuple[str, ...]) -> Sequence[str]:
    return tuple(sorted(filter(is_training_name, fields), key=lambda name: _ORDER.get(name, len(_ORDER))))


def _ignoring(name: str) -> str:
    return f"pass --ignore-field {name} to ignore it"


# ---- messages ----


def weight_of(message: Mapping[str, Any], names: Sequence[str], role: str, what: str) -> float:
    """Return the loss weight of a message: a finite number >= 0; 1 if no field sets it.

    Args:
        message: the message in the row.
        names: its ``training_names``.
        role: role of the message for chat templates.
        what: name of the message in errors.

    Raises:
        RowError: a field is not supported, has a wrong value, contradicts another one, or asks to train words of
            another role than the assistant.
    """
    weights: dict[str, float] = {}
    flags: dict[str, bool] = {}
    for name in names:
        value = message[name]
        if value is None:
            continue
        if name in WEIGHTS:
            if not isinstance(value, (int, float)) or not (value == 0 or _LEAST_WEIGHT <= value <= _MAX_WEIGHT):
                raise RowError(f"{what}.{name} is {value!r:.40}, expected a finite number >= 0; {_ignoring(name)}")
            weights[name] = float(value)
        elif name in _READ:
            if not isinstance(value, (int, float)) or value not in (0, 1):
                raise RowError(f"{what}.{name} is {value!r:.40}, expected true or false; {_ignoring(name)}")
            flags[name] = bool(value) != (name in INVERTED)
        elif name in _OF_PARTS or _may_be_flag(name, value):
            raise RowError(
                f"{what} has {name}, which is not supported; set weight or train for the whole message, or"
                f" {_ignoring(name)}"
            )
    for name, is_trained in flags.items():
        if is_trained and role != "assistant" and name in _OF_ANY_ROLE:
            raise RowError(
                f"{what}.{name} is {str(message[name]).lower()}, which asks to train a message with the role {role},"
                f" but only assistant messages are trained on: remove {name} there, or {_ignoring(name)}"
            )
    _require_agreement(weights, flags, what)
    weight = next(iter(weights.values()), 1.0)
    return weight if all(flags.values()) else 0.0


def _require_agreement(weights: Mapping[str, float], flags: Mapping[str, bool], what: str) -> None:
    """Raise RowError if two fields of a message contradict each other. ms-swift multiplies two of them."""
    says = {**weights, **{name: float(flag) for name, flag in flags.items()}}
    if len(says) < 2:
        return
    differ = []
    if len(set(weights.values())) > 1:
        differ = [*weights]
    elif len(set(flags.values())) > 1:
        differ = [*flags]
    else:
        pairs = [(one, other) for one in weights for other in flags if (one, other) != ("loss_scale", "loss")]
        differ = next(([one, other] for one, other in pairs if bool(weights[one]) != flags[other]), [])
    if differ:
        raise RowError(f"{what} has {' and '.join(differ)}, which contradict each other; keep one")


def refuse_verdict(message: Mapping[str, Any], what: str) -> None:
    """Raise RowError if a message is judged, true or false: it may be a bad answer."""
    for name in MESSAGE_VERDICTS:
        if isinstance(message.get(name), (bool, np.bool_)):
            raise RowError(
                f"{what}.{name} is {str(message[name]).lower()}, a rating of this message that is not supported; set"
                f" train for the message, or {_ignoring(name)}"
            )


def refuse_flagged_parts(content: Any, role: str, what: str) -> None:
    """Raise RowError if a content part is excluded from training, like ``train`` and ``weight`` of parts in axolotl.

    A message has one weight. A yes on assistant parts and a no on other parts change nothing.
    """
    if not isinstance(content, list):
        return
    for i, part in enumerate(content):
        if not isinstance(part, dict) or len(part) <= 2:
            continue
        for name in training_names(part):
            value = part[name]
            if value is None:
                continue
            if name in _READ and isinstance(value, (int, float)) and value in (0, 1):
                is_trained = bool(value) != (name in INVERTED)
                if is_trained == (role == "assistant"):
                    continue
            if name in _READ or name in _OF_PARTS or _may_be_flag(name, value):
                raise RowError(
                    f"{what}[{i}] has {name}, but training cannot be set for parts of a message; set {name} for the"
                    f" whole message, split the parts into several messages, or {_ignoring(name)}"
                )


def _may_be_flag(name: str, value: Any) -> bool:
    """Return whether a message field with a training name has a value that can be a flag, a weight or a mask."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if value is None:
        return False
    if isinstance(value, str):
        return value.strip().lower() in _FLAG_TEXTS
    if isinstance(value, (bool, np.bool_)):
        return True
    if isinstance(value, (list, tuple, dict)):
        return len(value) > 0
    return not _COUNTS.fullmatch(words_of(name)[-1])


# Fields in which exports of chats store words.
_WORD_FIELDS: Final = frozenset(
    {
        *("value", "text", "parts", "body", "message", "content_text", "content_parts", "transcript", "utterance"),
        *("response", "answer", "output", "completion", "reply", "generation", "generated_text", "refusal"),
    }
)
# Words about a message, not content; they do not decide the meaning of a name of several words.
_METADATA = re.compile(
    r"name|id|ids|model|time|timestamp|date|at|on|created|updated|status|source|reason|type|role|url"
)


def refuse_unread_words(message: Mapping[str, Any], what: str, read: Iterable[str], *, says_more: bool) -> None:
    """Raise RowError if a message without content has words in an unread field.

    Args:
        message: the message in the row, without words in ``content``.
        what: its name in errors.
        read: names of the fields that are read.
        says_more: whether it is normal to have no other words: it has reasoning or tool calls, or is not an assistant
            message. Then only fields that are known to hold content count.
    """
    read = frozenset(read)
    for name in message:
        if name in read or not isinstance(name, str) or not _holds_words(message[name]):
            continue
        is_known = name in _WORD_FIELDS
        is_text = isinstance(message[name], str) and len(message[name].split()) > 1
        if is_known or (is_text and not says_more and not any(map(_METADATA.fullmatch, words_of(name)))):
            raise RowError(
                f"{what} has no text in content, but has text in {name}, which is not read: move it to content, or"
                f" {_ignoring(name)}"
            )


def _holds_words(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, dict):
        return any(map(_holds_words, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_words, value))


# ---- rows ----


def refuse_row_fields(data: Mapping[str, Any], read: Iterable[str]) -> None:
    """Raise RowError if a row has a field that may control training and is not in ``read``."""
    for name in training_names(data):
        if name not in read and _may_be_row_flag(name, data[name]):
            remedy = "set weight or train in the messages"
            if data.get("input_ids") is not None:
                remedy = "rename it to loss_mask if it is a mask of the tokens"
            raise RowError(
                f"the row has {name} ({data[name]!r:.40}), which may control what is trained on, but is not supported;"
                f" {remedy}, or {_ignoring(name)}"
            )


def _may_be_row_flag(name: str, value: Any) -> bool:
    """Like ``_may_be_flag``, for a row: a plain number is a flag only if it is 0 or 1 or named as a weight."""
    if isinstance(value, Undecoded):
        return not value.is_time
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        leaves = [*_leaves(value)]
        is_numbers = bool(leaves) and all(isinstance(leaf, (int, float, np.generic)) for leaf in leaves)
        return is_numbers and (not _COUNTS.fullmatch(words_of(name)[-1]) or isinstance(leaves[0], bool))
    if isinstance(value, (bool, np.bool_)):
        return True
    is_weight = any(map(_SPEAKS_OF_WEIGHT.fullmatch, words_of(name)))
    if isinstance(value, str):
        return value.strip().lower() in _FLAG_TEXTS or (is_weight and _is_number(value))
    if not isinstance(value, (int, float, np.number)) or _COUNTS.fullmatch(words_of(name)[-1]):
        return False
    return is_weight or value in (0, 1)


def _leaves(value: Sequence[Any]) -> Iterable[Any]:
    for each in value:
        if isinstance(each, (list, tuple)):
            yield from _leaves(each)
        elif each is not None:
            yield each


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


# ---- NeMo's chats ----


def read_speaker_mask(
    data: Mapping[str, Any], speakers: Sequence[str], roles: Sequence[str], weights: list[float]
) -> None:
    """Apply ``mask`` and ``type`` of NeMo's chat rows to the weights of the messages, in place.

    ``mask`` has the names of the speakers that are not trained on, joined by commas. NeMo trains all others, except for
    the first turn. With ``type`` ``VALUE_TO_TEXT``, the attributes in ``label`` come before a turn. They are never
    trained on, and are left to the chat template. ``TEXT_TO_VALUE`` trains only the labels.

    Args:
        data: the row.
        speakers: the speaker of each message, as spelled in the row.
        roles: the role of each message.
        weights: the loss weight of each message.
        weights: the loss weight of each message.

    Raises:
        RowError: the mask cannot be trained on here.
    """
    kind, mask = data.get("type"), data.get("mask")
    if isinstance(kind, str) and kind == "TEXT_TO_VALUE":
        raise RowError(
            "type is TEXT_TO_VALUE: such rows train on the labels of turns instead of the assistant's text, which is"
            f" not supported; to train on the assistant's text, {_ignoring('type')}"
        )
    if isinstance(mask, Undecoded):
        raise mask.error("the speakers that are not trained on, joined by commas")
    if not isinstance(mask, str):
        return
    names = mask.split(",")
    for name in names:
        if name not in speakers:
            raise RowError(
                f"mask is {mask!r:.40}, but the conversation has no speaker {name!r:.40}; expected the speakers that"
                f" are not trained on, joined by commas; {_ignoring('mask')}"
            )
    for i, (speaker, role) in enumerate(zip(speakers, roles, strict=True)):
        is_masked = speaker in names
        if is_masked != (speaker in mask):  # NeMo searches for the name anywhere in the mask
            raise RowError(
                f"mask is {mask!r:.40}, in which {speaker!r:.40} is part of another name; {_ignoring('mask')}"
            )
        if role == "assistant" and is_masked:
            weights[i] = 0.0
        elif role == "assistant" and not i and weights[i]:
            raise RowError(
                f"the row has a mask, and its first turn is {speaker!r:.40}'s: NeMo never trains on the first turn;"
                f" set train: false in it, or {_ignoring('mask')}"
            )
        elif role != "assistant" and i and not is_masked:
            raise RowError(
                f"mask is {mask!r:.40}, which asks to train on {speaker!r:.40}, but only assistant messages are"
                f" trained on: add {speaker!r:.40} to it, or {_ignoring('mask')}"
            )
    if not any(weight for weight, role in zip(weights, roles, strict=True) if role == "assistant"):
        raise RowError(f"mask is {mask!r:.40}, so nothing in this row is trained on; {_ignoring('mask')}")


# ---- ignored fields ----

_PRINTED: Final = re.compile(r"\s*\[\{'(?:role|content|from|value)': ")

# Objects in these fields are not messages.
_NO_MESSAGES: Final = frozenset({"tools", "functions", "chat_template_kwargs", "tool_calls", "function_call"})


def without_fields(data: Mapping[str, Any], names: Iterable[str], counts: Counter[str]) -> dict[str, Any]:
    """Return a row without these fields, also in its messages and their parts.

    ``counts`` gets the number of dropped fields with a value, by the name of the note for the summary.
    """
    ignored = frozenset(names)
    row = _without(data, ignored, counts)
    for name, value in row.items():
        if name in _NO_MESSAGES:
            continue
        messages = messages_of_json(value)
        if isinstance(messages, list):
            left = [_message_without(each, ignored, counts) for each in messages]
            if isinstance(value, list):
                row[name] = left
            elif left != messages:
                row[name] = json.dumps(left)
        else:
            row[name] = _message_without(messages, ignored, counts)
    return row


def _message_without(message: Any, names: frozenset[str], counts: Counter[str]) -> Any:
    """Return a message and its parts without these fields; any other value unchanged."""
    if not isinstance(message, dict) or not _is_turn(message):
        return message
    left = _without(message, names, counts)
    for name, inner in left.items():
        if isinstance(inner, list) and name not in _NO_MESSAGES:
            left[name] = [_without(part, names, counts) if isinstance(part, dict) else part for part in inner]
    return left


def messages_of_json(value: Any) -> Any:
    """Parse messages that are stored as JSON text, as in tables; return any other value unchanged.

    Raises:
        RowError: the text is Python's output for messages, as pandas writes lists into .csv files.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        if _PRINTED.match(value):
            raise RowError(
                f"{value[:30]!r}... is a list of messages in Python's format, not JSON; write the field with"
                " json.dumps, or the file as .jsonl or .parquet"
            )
        with contextlib.suppress(ValueError):
            turns = parse_json(value.encode())
            if turns and all(isinstance(turn, dict) and _is_turn(turn) for turn in turns):
                return turns
    return value


def _is_turn(fields: Mapping[str, Any]) -> bool:
    return "role" in fields or "from" in fields or pair_keys(fields) is not None


def _without(fields: Mapping[str, Any], names: frozenset[str], counts: Counter[str]) -> dict[str, Any]:
    for name in names.intersection(fields):
        if fields[name] is not None:
            counts[note_of_ignored(name)] += 1
    return {name: value for name, value in fields.items() if name not in names}


def note_of_ignored(name: str) -> str:
    """Return the name of the summary note for an ignored field."""
    return IGNORED_FIELD + name
