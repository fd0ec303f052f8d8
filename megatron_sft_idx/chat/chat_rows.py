"""Convert one raw row to a conversation, to ids with a mask, or to plain text.

The keys of a row (a table's columns) determine its kind. A key with a null value counts as absent, and unknown keys are
ignored. If a row has the keys of several kinds, the first of these wins:

1. ``tokenized``: ``input_ids`` next to ``loss_mask``, ``labels``, ``assistant_masks``, ``completion_mask``,
   ``loss_scale`` or ``loss_weights``. If a row has several of these, a token is trained only if all of them say so, and
   weights are multiplied.
2. ``messages``: ``messages``, ``conversations`` or ``conversation``, a list of turns of any form that ``turns`` reads,
   independent of the key.
3. ``prompt-completion``: ``prompt`` and ``completion``: two strings, two lists of messages (like TRL), or a list and a
   string. In messages, only the completion is trained on.
4. ``alpaca``: the prompt is the first of ``instruction``, ``prompt``, ``query``, ``question``, joined with a newline
   (like LLaMA-Factory) to the first nonempty one of ``input``, ``context``. The answer is the first of ``output``,
   ``response``, ``completion``, ``answer``. Several prompts, inputs or answers must not differ. ``history`` can hold
   earlier turns as pairs. The prompt can also be one list of messages; then only the answer is trained on. Some
   data sets use names that no other data set has (``_SINGLE``).
5. ``text``: ``text``, with every token trained. It is read only if everything is trained on anyway.

Rows of kinds 2 to 4 can also have ``tools`` (or the old ``functions``), ``system`` or ``system_prompt``, and
``chat_template_kwargs``. The answer of kinds 3 and 4 can have its reasoning in ``reasoning_content``. Rows that say
which of two answers is better, or whether one is good (``label``, true or false), are rejected whatever else they have,
unless the options ask for them; ``preferences`` reads those. ``training_fields`` reads fields that control what is
trained on. Before anything is read, ``RowOptions.mapping`` renames other field and role names to these names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from megatron_sft_idx.chat.field_names import (
    ANSWERS,
    CHOSEN,
    HISTORY,
    INPUTS,
    MASKS,
    MEDIA,
    PROMPTS,
    REASONING,
    REJECTED,
    SYSTEMS,
    TEMPLATE_VARIABLES,
    TEXT,
    THINKING,
    TOOLS,
    TURNS,
    VERDICTS,
    VIDEOS,
)
from megatron_sft_idx.chat.fields import (
    first_filled,
    first_given,
    is_filled,
    json_of,
    kind_of,
    text_under,
    typed,
    without_nulls,
)
from megatron_sft_idx.chat.media_parts import NO_VIDEO, NOT_READ, place_media
from megatron_sft_idx.chat.packed_rows import refuse_pack_fields
from megatron_sft_idx.chat.row_mapping import paths_of, shown_paths
from megatron_sft_idx.chat.row_options import RowKind, RowOptions
from megatron_sft_idx.chat.tokenized_rows import read_tokenized
from megatron_sft_idx.chat.training_fields import (
    messages_of_json,
    read_speaker_mask,
    refuse_row_fields,
    without_fields,
)
from megatron_sft_idx.chat.turns import Message, Turns, read_list, read_named, says_something, turns_of_pairs
from megatron_sft_idx.chat.types import Conversation, RowError, TextRow, TokenizedRow
from megatron_sft_idx.chat.unread_columns import (
    refuse_bad_answer,
    refuse_unread_of_exchange,
    refuse_unread_of_messages,
)

_ASKING: Final = (*PROMPTS, *INPUTS)
# Other fields of a row, besides the chat.
_REFUSED: Final = frozenset({*MEDIA, *CHOSEN, *REJECTED, *VERDICTS})
_MORE: Final = frozenset({*SYSTEMS, *TOOLS, TEMPLATE_VARIABLES})
# Set by the renderer. A row that sets them would change the meaning of the conversation.
_RESERVED_KWARGS: Final = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize")
# Content other than plain text; segments are axolotl's, each with its own flag.
_NOT_WITH_TEXT: Final = (*SYSTEMS, *TOOLS, *PROMPTS, *INPUTS, *ANSWERS, "input_ids", "segments")
_VERDICT_TEXTS: Final = {"true": True, "false": False}


class _Single(NamedTuple):
    """The names that one data set has for a prompt and its answer.

    Attributes:
        prompt: name of the text of the question.
        answer: name of the text of the answer, or of tool calls.
        reasoning: name of a list of texts, or "".
        are_calls: whether the answer is a list of tool calls, or JSON text of one.
        nothing: the answer in a row without an answer.
    """

    prompt: str
    answer: str
    reasoning: str = ""
    are_calls: bool = False
    nothing: str = ""


_SINGLE: Final = (
    _Single("query", "answers", are_calls=True),  # xLAM
    _Single("question", "attempt", reasoning=THINKING),  # s1K
    _Single("problem", "generated_solution", nothing="n/a"),  # OpenMathReasoning
    _Single("question", "generated_solution"),  # OpenMathInstruct-1
    _Single("inputs", "targets"),  # FLAN, xP3, Aya
    _Single("input", "target"),  # Firefly
)
_DEFAULT = RowOptions()
_NO_NOTES: Final[Counter[str]] = Counter()


def to_sequence_source(data: Any, options: RowOptions = _DEFAULT) -> Conversation | TokenizedRow | TextRow:
    """Read one row. ``data`` is not changed, but the result may share parts of it.

    Raises:
        RowError: the row cannot be used; the text is only the reason.
    """
    row, notes = prepared_row(data, options)
    source = read_prepared(row, options)
    return source._replace(notes=notes + Counter(source.notes)) if notes else source


def prepared_row(data: Any, options: RowOptions) -> tuple[dict[str, Any], Counter[str]]:
    """Return the row with standard names and without ignored fields, and the counts of these as notes.

    Raises:
        RowError: the row is not an object, or has none of the mapped fields.
    """
    row = typed(data, dict, "the row")
    if options.mapping:
        row = options.mapping.apply(row)
    if not options.ignore_fields:
        return row, _NO_NOTES
    counts = Counter[str]()
    return without_fields(row, options.ignore_fields, counts), counts


def read_prepared(data: dict[str, Any], options: RowOptions) -> Conversation | TokenizedRow | TextRow:
    """Read a row from ``prepared_row`` (for KTO, without its verdict). See ``to_sequence_source`` for errors."""
    if not data.keys().isdisjoint(_REFUSED):
        _refuse_keys(data, options)
    refuse_row_fields(data, read=() if data.get("input_ids") is None else MASKS)
    kind = kind_by_keys(data, options) if options.kind in ("auto", "kto") else options.kind
    if options.kind != "kto":  # the verdict of KTO is the label
        refuse_bad_answer(data)
    if kind in ("tokenized", "text") and (media := first_filled(data, MEDIA)) is not None:
        what = "input_ids" if kind == "tokenized" else TEXT
        raise RowError(
            f"the row has {media}, but {what} cannot contain media: use messages, or pass --ignore-field {media} to"
            " ignore it"
        )
    if kind == "tokenized":
        return read_tokenized(data, options.mask_alignment)
    refuse_pack_fields(data)
    if kind == "text":
        return _read_text(data, options)
    if kind == "messages":
        messages, weights = _read_messages(data, options)
    elif kind == "prompt-completion":
        messages, weights = _read_prompt_completion(data, options)
    else:
        messages, weights = _read_alpaca(data, options)
    if not options.mapping.has_content:
        _refuse_unread(data, kind, messages, said=options.kind == kind)
    if options.media:
        messages = place_media(data, messages)
    if options.requires_answer and not any(map(says_something, reversed(messages))):
        has_answer = any(message["role"] == "assistant" for message in messages)
        what = "the assistant messages in this row are empty" if has_answer else "the row has no assistant message"
        raise RowError(f"{what}, so there is nothing to train on")
    return to_conversation(data, messages, weights)


def _refuse_unread(data: dict[str, Any], kind: RowKind, messages: list[Message], *, said: bool) -> None:
    """Raise RowError if an unread column has words of the conversation.

    If the options ``said`` that rows are of this kind, messages next to a prompt and its answer are ignored on purpose.
    """
    if kind == "messages":
        refuse_unread_of_messages(data, first_given(data, TURNS) or "", messages)
        return
    if kind == "prompt-completion":
        read: list[str | None] = ["prompt", "completion"]
    elif (single := _single_of(data)) is not None:
        read = [single.prompt, single.answer, single.reasoning]
    else:
        read = [first_given(data, names) for names in (PROMPTS, INPUTS, ANSWERS)] + [HISTORY]
    refuse_unread_of_exchange(data, {*filter(None, read), REASONING, *(TURNS if said else ())}, messages)


def to_conversation(data: dict[str, Any], messages: list[Message], weights: list[float]) -> Conversation:
    """Make a conversation of these messages, with the row's system prompt, tools and template variables."""
    if not messages[0].keys().isdisjoint(TOOLS):
        data, messages = _with_tools_of_message(data, messages)
    if data.keys().isdisjoint(_MORE):
        return Conversation(messages, weights, None, {})
    _put_system_first(data, messages, weights)
    return Conversation(messages, weights, _tools_of(data), _kwargs_of(data))


def _with_tools_of_message(data: dict[str, Any], messages: list[Message]) -> tuple[dict[str, Any], list[Message]]:
    """Move the tools of the first message to the row. minimind and others put them in the system prompt's message."""
    first = messages[0]
    key = first_filled(first, TOOLS)
    if key is None or first["role"] not in ("system", "developer"):
        return data, messages
    of_row = first_filled(data, TOOLS)
    if of_row is not None and data[of_row] != first[key]:
        raise RowError(f"{of_row} of the row and {key} of its system message differ; keep one")
    rest = {name: value for name, value in first.items() if name not in TOOLS}
    return {**data, "tools": first[key]}, [rest, *messages[1:]]


def _refuse_keys(data: dict[str, Any], options: RowOptions) -> None:
    refuse_media(data, options)
    if names := preference_keys(data):
        raise RowError(
            f"the row has a preference pair ({', '.join(names)}), but supervised fine-tuning needs one answer: pass"
            f" --row-kind preference to make pairs, or {_fields_of_one(data, names[0])} to train on one column only"
        )
    for key in VERDICTS:
        verdict = verdict_of(data.get(key), is_judged=data.get("completion") is not None)
        if verdict is not None:
            raise RowError(
                f"{key} is {str(data[key]).lower()}: this is a KTO row, which can have a bad answer, but supervised"
                " fine-tuning trains on every answer: pass --row-kind kto to store the labels, or keep only the good"
                " rows and remove the column"
            )


def _fields_of_one(data: dict[str, Any], name: str) -> str:
    """Return the options that select one answer of a pair: messages, or a string that answers the prompt."""
    if isinstance(messages_of_json(data[name]), str):
        return f"--fields prompt={first_filled(data, PROMPTS) or 'prompt'} completion={name}"
    return f"--fields messages={name}"


def verdict_of(value: Any, *, is_judged: bool) -> bool | None:
    """Return whether a value marks an answer as good or bad; None if it does neither.

    A number, or text of a number, may be the class of a row. If an answer ``is_judged``, it is a verdict on the answer.
    """
    if isinstance(value, str):
        text = value.strip().lower()
        value = _VERDICT_TEXTS.get(text, {"0": 0, "1": 1}.get(text))
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return bool(value) if is_judged and isinstance(value, (int, float, np.number)) and value in (0, 1) else None


def refuse_media(data: dict[str, Any], options: RowOptions) -> None:
    """Raise RowError if a row has video, or images or audio that are not read."""
    if (media := first_filled(data, VIDEOS if options.media else MEDIA)) is not None:
        raise RowError(f"the row has {media}; {NOT_READ if media not in VIDEOS else NO_VIDEO}")


def preference_keys(data: dict[str, Any]) -> list[str]:
    """Return the keys that make a row a preference row."""
    return [name for name in (*CHOSEN, *REJECTED) if is_filled(data.get(name)) and not isinstance(data[name], int)]


def kind_by_keys(data: dict[str, Any], options: RowOptions) -> RowKind:
    """Infer the kind of a row from its keys that are not null.

    Raises:
        RowError: the keys do not form a chat.
    """
    has = {key for key, value in data.items() if value is not None}
    if "input_ids" in has and has.intersection(MASKS):
        return "tokenized"
    if not has.isdisjoint(TURNS):
        return "messages"
    if "prompt" in has and "completion" in has and not is_filled(data.get(HISTORY)):
        return "prompt-completion"
    if not (has.isdisjoint(_ASKING) or has.isdisjoint(ANSWERS)) or _single_of(data) is not None:
        return "alpaca"
    if TEXT in has:
        return "text"
    # Rows of tables have all columns, and empty ones are null.
    missing = ANSWERS if has.isdisjoint(ANSWERS) else _ASKING
    empty = [name for name in missing if name in data]
    if empty and not has.isdisjoint((*_ASKING, *ANSWERS)):
        raise RowError(f"{' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} empty")
    if options.mapping.has_content:
        raise RowError(
            f"--fields maps only {', '.join(target for target, _ in options.mapping.fields)}, which is not enough for"
            " a chat: also map messages, or prompt and completion; unmapped columns are not read"
        )
    raise RowError(
        "no columns of a chat: expected messages or conversations, a prompt with an answer, or input_ids with a mask;"
        f" found {shown_paths(paths_of(data))}; if your columns have other names, map them with --fields TARGET=PATH"
    )


def _single_of(data: dict[str, Any]) -> _Single | None:
    """Return the data set whose names a row has, if it has no answer under a usual name."""
    if first_given(data, ANSWERS) is not None:
        return None
    for single in _SINGLE:
        if all(data.get(name) is not None for name in (single.prompt, single.answer, single.reasoning) if name):
            return single
    return None


def _read_text(data: dict[str, Any], options: RowOptions) -> TextRow:
    text = typed(data.get(TEXT), str, TEXT)
    if not text:
        raise RowError(f"{TEXT} is empty")
    if options.train_on != "all":
        raise RowError(
            f"the row has only {TEXT}, without roles: pass --train-on all to train on every token, or provide the"
            " messages if this is a rendered chat"
        )
    others = (*SYSTEMS, *TOOLS) if options.mapping.has_content or options.kind == TEXT else _NOT_WITH_TEXT
    if (key := first_filled(data, others)) is not None:
        raise RowError(
            f"the row has {TEXT} and also {key}, which cannot be combined; pass --ignore-field {key} to ignore it"
        )
    return TextRow(text)


def _read_messages(data: dict[str, Any], options: RowOptions) -> Turns:
    if (key := first_given(data, TURNS)) is None:
        raise RowError(f"the row has no {' or '.join(TURNS)}")
    if REASONING in dict(options.mapping.fields):
        _refuse_reasoning(data)
    messages, weights = read_list(data[key], key, options)
    if data.get("mask") is not None or data.get("type") is not None:
        roles = [message["role"] for message in messages]
        turns = json_of(data[key], key)
        spelt = [first_given(turn, ("from", "role")) for turn in turns if isinstance(turn, dict)]
        has_speakers = len(spelt) == len(messages) and None not in spelt
        speakers = [str(turn[at]) for turn, at in zip(turns, spelt, strict=True)] if has_speakers else roles
        read_speaker_mask(data, speakers, roles, weights)
    return messages, weights


def _refuse_reasoning(data: dict[str, Any]) -> None:
    """Raise RowError if a row has the reasoning of a single answer next to messages."""
    if is_filled(data.get(REASONING)):
        raise RowError(
            f"{REASONING} is for rows with one prompt and one answer, but this row has messages; put it into the"
            f" message, or map the reasoning of each message with --turn-fields {REASONING}=PATH"
        )


def _read_prompt_completion(data: dict[str, Any], options: RowOptions) -> Turns:
    prompt, completion = data.get("prompt"), data.get("completion")
    turns = messages_of_json(prompt)
    if isinstance(turns, list):
        return _read_answered(turns, "prompt", data, options)
    if isinstance(prompt, str) and isinstance(completion, str):
        if not prompt:
            raise RowError("prompt is empty")
        return _exchange([(prompt, completion)], data)
    raise RowError(
        f"prompt is {kind_of(prompt)} and completion is {kind_of(completion)}, "
        "expected two strings, two lists of messages, or a list and a string"
    )


def _read_alpaca(data: dict[str, Any], options: RowOptions) -> Turns:
    if (single := _single_of(data)) is not None:
        return _read_single(data, single, options)
    given = [key for key in _ASKING if key in data and is_filled(data[key])]
    if len(given) == 1 and not is_filled(data.get(HISTORY)):
        prompt = messages_of_json(data[given[0]]) if given[0] in ("prompt", *INPUTS) else data[given[0]]
        if isinstance(prompt, dict) and first_given(prompt, ("role", "from")):
            prompt = [prompt]
        if isinstance(prompt, list):
            return _read_answered(prompt, given[0], data, options)
    history, asked = read_prompt(data)
    if not asked:
        raise RowError("the prompt is empty")
    return _exchange([*history, (asked, text_under(data, ANSWERS))], data)


def _read_single(data: dict[str, Any], single: _Single, options: RowOptions) -> Turns:
    """Return the prompt and the answer of a row with the names of a single data set."""
    asked, given = typed(data[single.prompt], str, single.prompt), data[single.answer]
    if single.are_calls:
        given = typed(json_of(given, single.answer), list, single.answer, "a list of tool calls")
    else:
        given = typed(given, str, single.answer)
    if not asked:
        raise RowError(f"{single.prompt} is empty")
    if not is_filled(given) or given == single.nothing:
        raise RowError(f"{single.answer} is {given!r:.20}, so there is nothing to train on")
    answer: Message = {"role": "assistant", "tool_calls" if single.are_calls else "content": given}
    answer |= _reasoning_of_row(data)
    if single.reasoning:
        texts = typed(json_of(data[single.reasoning], single.reasoning), list, single.reasoning, "a list of strings")
        answer[REASONING] = "\n".join(typed(each, str, single.reasoning) for each in texts)
    named = [({"role": "user", "content": asked}, single.prompt), (answer, single.answer)]
    return read_named(named, options)


def _exchange(pairs: Sequence[Sequence[str]], data: dict[str, Any]) -> Turns:
    """Return messages for question and answer strings; the last answer gets the row's reasoning."""
    if not pairs[-1][1]:
        raise RowError("the answer is empty, so there is nothing to train on")
    messages = turns_of_pairs(pairs)
    messages[-1] |= _reasoning_of_row(data)
    return messages, [1.0] * len(messages)


def _reasoning_of_row(data: dict[str, Any]) -> Message:
    """Return the reasoning in a separate column of a row, as a field of its answer; empty if there is none."""
    return {REASONING: typed(data[REASONING], str, REASONING)} if is_filled(data.get(REASONING)) else {}


def _read_answered(prompt: list[Any], key: str, data: dict[str, Any], options: RowOptions) -> Turns:
    """Combine a prompt of messages with an answer, which is a string, a message or a list of messages.

    Only it is trained.

    JSON text of messages counts as messages under ``completion``, and also if the prompt is such text, as in a table.
    """
    before, _ = read_list(prompt, key, options)
    answer_in = "completion" if key == "prompt" and data.get("completion") is not None else None
    answer_in = answer_in or first_given(data, ANSWERS) or ANSWERS[0]
    answer = data.get(answer_in)
    if answer_in == "completion" or isinstance(data[key], str) or not isinstance(answer, str):
        answer = messages_of_json(answer)
    if isinstance(answer, (dict, list)):
        _refuse_reasoning(data)
        after, weights = read_list([answer] if isinstance(answer, dict) else answer, answer_in, options)
    else:
        text = "" if answer is None else typed(answer, str, answer_in)
        said: Message = {"role": "assistant", "content": text} | _reasoning_of_row(data)
        after, weights = [said], [1.0]
    if not any(map(says_something, after)):
        raise RowError(f"the answer is empty ({answer_in}), so there is nothing to train on")
    return before + after, [0.0] * len(before) + weights


def read_prompt(data: dict[str, Any]) -> tuple[list[Sequence[str]], str]:
    """Return the earlier question and answer pairs of an Alpaca row, and its question. RowError: one is not text."""
    history = data.get(HISTORY) or []
    if isinstance(history, str) and history.lstrip().startswith("["):
        history = json_of(history, HISTORY)
    kinds = (list, tuple)
    if not isinstance(history, kinds) or not all(
        isinstance(pair, kinds) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history
    ):
        raise RowError("history is not a list of [prompt, answer] pairs of strings")
    asked = [text_under(data, PROMPTS), text_under(data, INPUTS)]
    return [*history], "\n".join(filter(None, asked))


def _put_system_first(data: dict[str, Any], messages: list[Message], weights: list[float]) -> None:
    if (key := first_filled(data, SYSTEMS)) is None:
        return
    system = typed(data[key], str, key)
    if messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
        weights.insert(0, 1.0)
    elif messages[0]["content"] != system:
        raise RowError(f"{key} and the first message are different system prompts; keep one")


def _tools_of(data: dict[str, Any]) -> list[dict[str, Any]] | None:
    key = first_filled(data, TOOLS) or "tools"
    given = data.get(key)
    tools = json_of(given, key) if not isinstance(given, str) or given.strip() else None
    read = []
    for i, each in enumerate(typed([] if tools is None else tools, list, key, "a list of tool schemas")):
        what = f"{key}[{i}]"
        read.append(_wrapped(typed(json_of(each, what), dict, what)))
    return read or None


def _wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as ``{"type": "function", "function": {"name", ...}}``; accepts that, or only the function.

    Tools of another type or without a name stay unchanged.
    """
    is_function = tool.get("function") is None and tool.get("type") in (None, "function")
    if not is_function or not isinstance(tool.get("name"), str):
        return tool
    function = {key: value for key, value in tool.items() if key not in ("type", "function")}
    return {"type": "function", "function": function}


def _kwargs_of(data: dict[str, Any]) -> dict[str, Any]:
    name = TEMPLATE_VARIABLES
    kwargs = data.get(name)
    kwargs = json_of(kwargs, name) if is_filled(kwargs) else None
    if not is_filled(kwargs):
        return {}
    kwargs = without_nulls(typed(kwargs, dict, name))
    for key in _RESERVED_KWARGS:
        if key in kwargs:
            raise RowError(f"{name} sets {key}, which a row cannot set; remove it")
    return kwargs
