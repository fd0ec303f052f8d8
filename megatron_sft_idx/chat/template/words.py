"""What messages say, the form in which a template takes them, and where their strings went in the rendered text.

Templates disagree about their input. Some write a dict of tool-call arguments as JSON, some paste text; some want
contents as lists of content parts; most want a missing content to be left out, some want ``""`` and a few want None.
``learn_style`` finds out which form a template takes by rendering made-up conversations, and ``prepared`` puts messages
into that form. ``utterances_of`` lists what an assistant message says, which must be found again in the rendered text.

Two questions are answered by rendering a conversation once more with its strings altered. ``locate`` tells which of the
text comes from which message, without tracing. ``ControlTokens`` tells which control tokens in the text were spelt by
the data. Both put marks into the strings, have the template render these, and take the marks out again. The answer
holds only if the text without marks is the plain text, character for character. Such a rendering costs as much as the
first one, so callers ask only about rows that need it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import orjson

from megatron_sft_idx.errors import SequenceError

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry reasoning; the first one that is set counts."""

_PLAIN_FIELDS = {"role", "content"}
ABSENT: Final = object()
NULL_FORMS: tuple[tuple[str, object], ...] = (
    ("content_left_out", ABSENT),
    ("content_empty", ""),
    ("content_none", None),
)
"""Values for a content that is missing, each with the note that counts its use; transformers uses the first."""

_CLOSED = re.compile(
    r"\s*(?:<(think|thinking|thought|reasoning)>|\[THINK\])?(.*?)(?:</(think|thinking|thought|reasoning)>|\[/THINK\])",
    re.DOTALL,
)
THINKING_TAG = re.compile(r"</?(?:think|thinking|thought|reasoning)>|\[/?THINK\]")
_WORD = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
_SENTINELS = tuple(chr(base) for base in range(0xF1000, 0xF1040, 2))
ASKED, SAID, _CALLED, _RESULT = "zqasked", "zqsaid", "zqcalled", "zqresult"
"""Words of made-up messages, which no template writes by itself: a question, an answer, a function, its result."""

_USER = {"role": "user", "content": ASKED}
_ASSISTANT = {"role": "assistant", "content": SAID}
_TOOL = {"role": "tool", "content": _RESULT, "name": _CALLED, "tool_call_id": "abcdefghi"}


class Utterance(NamedTuple):
    """One thing that an assistant message says.

    Attributes:
        kind: ``"reasoning"``, ``"content"`` or ``"call"`` (a called function's name).
        text: the words, stripped, never empty.
        field: the message's field that holds them; for calls ``"tool_calls"``.
        offset: the character of that field at which ``text`` starts; for calls the number of the call, from 0.
    """

    kind: str
    text: str
    field: str
    offset: int


def only_words(message: Mapping[str, Any]) -> str | None:
    """The words of a message that says one thing, its content, as most do; None where that has to be looked into."""
    content = message.get("content")
    if type(content) is not str or not message.keys() <= _PLAIN_FIELDS or "</" in content or "[/THINK]" in content:
        return None
    return content.strip() or None


def utterances_of(message: Mapping[str, Any]) -> list[Utterance]:
    """List what an assistant message says, in the order in which templates write it: reasoning, content, calls.

    Reasoning that stands in ``content`` (``<think>...</think>`` before the answer) is an utterance of its own, as it is
    to the templates of reasoning models.
    """
    utterances: list[Utterance] = []
    if not message.keys().isdisjoint(REASONING_FIELDS):
        for field in REASONING_FIELDS:
            if message.get(field) is not None:
                _add(utterances, "reasoning", message[field], field, 0)
                break
    content = message.get("content")
    if type(content) is list and len(content) == 1:  # as `in_text_parts` makes it
        content = content[0].get("text")
    if type(content) is str:
        inline = _CLOSED.match(content) if "</" in content or "[/THINK]" in content else None
        if inline is not None and (inline[3] is None or inline[1] in (None, inline[3])):
            _add(utterances, "reasoning", inline[2], "content", inline.start(2))
            _add(utterances, "content", content[inline.end() :], "content", inline.end())
        else:
            _add(utterances, "content", content, "content", 0)
    calls = message.get("tool_calls")
    for number, call in enumerate(calls) if calls else ():
        name = called(call).get("name")
        if isinstance(name, str) and name:
            utterances.append(Utterance("call", name, "tool_calls", number))
    return utterances


def called(call: Any) -> Mapping[str, Any]:
    """The dict that holds a call's name and arguments: its ``function`` or the call itself; {} for anything else."""
    function = call.get("function") if isinstance(call, Mapping) else None
    holder = function if isinstance(function, Mapping) else call
    return holder if isinstance(holder, Mapping) else {}


def words_called_with(message: Mapping[str, Any]) -> list[str]:
    """The words (letters and digits) in the arguments of a message's calls, in order, keys included.

    Templates write them as JSON, XML or plain text, so nothing else of the arguments can be looked for.
    """
    words: list[str] = []
    for call in message.get("tool_calls") or ():
        arguments = called(call).get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = [arguments]
        waiting = [arguments]  # last is next
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                words += re.findall(r"[A-Za-z0-9]{2,}", value)
            elif isinstance(value, (Mapping, list, tuple)):
                items = [item for pair in value.items() for item in pair] if isinstance(value, Mapping) else value
                waiting.extend(reversed(items))
    return words


def content_of(message: Mapping[str, Any]) -> str:
    """A message's content, stripped, be it a string or one content part; "" for anything else."""
    content = message.get("content")
    content = content[0].get("text") if type(content) is list and len(content) == 1 else content
    return content.strip() if type(content) is str else ""


def squeezed(text: str) -> str:
    """The text without any whitespace, for templates that reflow it."""
    return "".join(text.split())


def end_piece(text: str) -> str:
    """The last tag, word or other character of a text, such as ``<|im_end|>`` of ``Twelve.<|im_end|>``."""
    end = text[-1:]
    if end in (">", "]"):
        tag = text[text.rfind("<" if end == ">" else "[") :]
        return tag if len(tag.split(None, 1)) == 1 else end
    return end if not end.isalnum() else text[len(text.rstrip(_WORD)) :]


def short(words: str) -> str:
    """Words in quotation marks, for messages; of long ones the beginning."""
    return repr(words if len(words) <= 60 else words[:57] + "...")


def unusable(reason: str) -> SequenceError:
    """The error of a row that cannot be used. The caller must put in the row's file and line."""
    return SequenceError("conversation", None, reason)


def selected(messages: Sequence[Mapping[str, Any]], weights: Sequence[float], train_on: str) -> list[int]:
    """Positions of the assistant messages that are trained on; ``train_on`` is that of ``MaskOptions``."""
    users = (index + 1 for index, message in enumerate(messages) if message.get("role") == "user")
    first = max(users, default=0) if train_on == "last-turn" else 0
    return [
        index
        for index in range(first, len(messages))
        if messages[index].get("role") == "assistant" and weights[index] != 0
    ]


def _add(utterances: list[Utterance], kind: str, text: object, field: str, offset: int) -> None:
    if isinstance(text, str):
        words = text.strip()
        if words:
            utterances.append(Utterance(kind, words, field, offset if words is text else offset + text.index(words[0])))


@dataclass(frozen=True, slots=True)
class Style:
    """The form in which a template takes messages.

    Attributes:
        text_arguments: whether arguments of calls may be JSON text: it is pasted, and not written as a JSON string.
        parsed_arguments: whether arguments of calls may be dicts: they are written as JSON, not as ``{'a': 1}``.
        in_parts: whether contents must be lists of content parts, because the template loses strings.
        writes_arguments: whether the arguments of a made-up call are found in its rendering.
        null_forms: what may stand for the missing content of a call, as in ``NULL_FORMS``, in the order to try.
    """

    text_arguments: bool = True
    parsed_arguments: bool = True
    in_parts: bool = False
    writes_arguments: bool = True
    null_forms: tuple[tuple[str, object], ...] = NULL_FORMS


def prepared(
    messages: Sequence[dict[str, Any]], style: Style, notes: dict[str, int], missing: object = ABSENT
) -> list[dict[str, Any]]:
    """Put messages into the form that a template takes; the given messages are not changed.

    Reasoning is put under the two names that templates read, ``reasoning_content`` and ``thinking``. No two messages of
    the result are the same object, since tracing knows messages by their identity.

    Args:
        messages: a conversation.
        style: the form.
        notes: counts by name, to which the number of converted arguments is added.
        missing: what stands for a content that an assistant message lacks, one of ``NULL_FORMS``.
    """
    result: list[dict[str, Any]] = []
    one_form = style.text_arguments != style.parsed_arguments
    for original in messages:
        message = original
        bare = message.get("content") is None
        if bare and (
            message.get("content", missing) is None or (missing is not ABSENT and message.get("role") == "assistant")
        ):
            message = {key: value for key, value in message.items() if key != "content"}
            if missing is not ABSENT:
                message["content"] = missing
        if not message.keys().isdisjoint(REASONING_FIELDS):
            for field in REASONING_FIELDS:
                if message.get(field) is not None:
                    reasoning = message[field]
                    message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
                    break
        if one_form and message.get("tool_calls"):
            calls = [
                with_arguments(call, lambda given: _fitting(given, style.text_arguments))
                for call in message["tool_calls"]
            ]
            changed = sum(one is not other for one, other in zip(calls, message["tool_calls"], strict=True))
            if changed:
                notes["tool_arguments_converted"] = notes.get("tool_arguments_converted", 0) + changed
            message = {**message, "tool_calls": calls}
        if style.in_parts:
            message = in_text_parts(message)
        result.append(message)
    if len({id(message) for message in result}) < len(result):
        result = [dict(message) for message in result]
    return result


def in_text_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its string content as a list of one content part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def prints_parts(text: str) -> bool:
    """Whether a template wrote a list of parts out as Python writes it, instead of the text in it."""
    return "{'type': 'text'" in text


def with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a call with its arguments changed; the call itself where ``change`` gives None."""
    function = call.get("function") if isinstance(call, dict) else None
    holder = function if isinstance(function, dict) else call
    arguments = change(holder.get("arguments")) if isinstance(holder, dict) else None
    if arguments is None:
        return call
    holder = {**holder, "arguments": arguments}
    return {**call, "function": holder} if isinstance(function, dict) else holder


def _fitting(arguments: object, as_text: bool) -> object:
    """The arguments of a call, changed from a dict to JSON text (``as_text``) or back; None if there is no change."""
    if as_text and isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    if not as_text and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return None
        return parsed if isinstance(parsed, dict) else None
    return None


def _tool_call(arguments: object) -> dict[str, Any]:
    """A made-up assistant message that calls a function, without a content."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _CALLED, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def learn_style(render: Callable[[list[dict[str, Any]]], str | None]) -> Style:
    """Find out in which form a template takes contents and arguments, by rendering made-up conversations.

    Where no form is written better than the others, messages stay in the form that the data has.

    Args:
        render: renders messages; returns None where the template refuses them.
    """
    in_parts = False
    for history in ([_USER, _ASSISTANT], [_USER, _ASSISTANT, _USER]):
        if SAID in (render([dict(message) for message in history]) or ""):
            break
        text = render(prepared(history, Style(in_parts=True), {})) or ""
        in_parts = SAID in text and not prints_parts(text)
        if in_parts:
            break
    pasted, as_text = _rendered_call(render, '{"zqkey": "zqvalue"}', in_parts)
    parsed, as_object = _rendered_call(render, {"zqkey": "zqvalue"}, in_parts)
    text_fits = "zqvalue" in pasted and '\\"zqkey' not in pasted
    parsed_fits = "zqvalue" in parsed and "'zqkey'" not in parsed
    written = "zqvalue" in pasted or "zqvalue" in parsed
    if not (text_fits or parsed_fits):
        text_fits = parsed_fits = True
    # Some templates leave out the calls of a message without a content, without an error.
    number = min((number for text, number in ((pasted, as_text), (parsed, as_object)) if text), default=0)
    null_forms = NULL_FORMS
    if number == 2 or (number == 1 and SAID in (render([_USER, _tool_call({}), _TOOL, _ASSISTANT]) or "")):
        null_forms = (NULL_FORMS[number], NULL_FORMS[3 - number], NULL_FORMS[0])
    return Style(text_fits, parsed_fits, in_parts, written, null_forms)


def _rendered_call(
    render: Callable[[list[dict[str, Any]]], str | None], arguments: object, in_parts: bool
) -> tuple[str, int]:
    """A made-up call, rendered with the first of ``NULL_FORMS`` for which the template writes its arguments.

    Returns:
        The text and the number of that form; ("", 0) where the template writes the arguments in no form.
    """
    for number, (_, missing) in enumerate(NULL_FORMS):
        for closing in ([_TOOL, _ASSISTANT], []):
            history = prepared([_USER, _tool_call(arguments), *closing], Style(in_parts=in_parts), {}, missing)
            text = render(history)
            if text is not None and "zqvalue" in text:
                return text, number
    return "", 0


# Where strings of the data went


class DataMark(NamedTuple):
    """A character of a rendered text at which one string of the data starts or stops.

    Attributes:
        at: position of that character.
        message: position of the message that holds the string; -1 for a description of a tool.
        utterance: for reasoning and content of the assistant, its number in ``utterances_of(message)``; else -1.
        string: number of the string among all that were marked.
        stops: whether the string stops here, rather than starts.
    """

    at: int
    message: int
    utterance: int
    string: int
    stops: bool


def locate(
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    text: str,
    render: Callable[..., str | None],
) -> list[DataMark] | None:
    """Find in ``text`` where the strings of every message lie: contents, reasoning, arguments of calls, tools.

    Whitespace at either end of a string does not belong to it.

    Args:
        messages: the conversation as the template saw it.
        tools: schemas of the functions that can be called, whose descriptions are looked for too.
        text: the plain rendering of messages and tools.
        render: renders altered ``messages`` and ``tools``; returns None where the template refuses them.

    Returns:
        Marks by ascending position, two for each time that the template writes a string. None where marks change what
        the template does, even where they are put only beside letters and digits.
    """
    sentinel = next((one for one in _SENTINELS if one not in text), None)
    if sentinel is None:
        return None
    close = chr(ord(sentinel) + 1)
    spelt = [f"(?:{one}|{re.escape(json.dumps(one)[1:-1])})" for one in (sentinel, close)]
    pattern = re.compile(f"{spelt[0]}([0-9]+){spelt[1]}")
    for gently in (False, True):
        marker = _DataMarker(sentinel, close, gently)
        altered = [marker.message(index, message) for index, message in enumerate(messages)]
        marked = render(messages=altered, tools=tools and [marker.tool(tool) for tool in tools])
        if marked is not None and pattern.sub("", marked) == text:
            break
    else:
        return None
    found: list[DataMark] = []
    removed = 0
    for match in pattern.finditer(marked):
        mark, margin = marker.marks[int(match[1])]
        at = match.start() - removed
        removed += len(match[0])
        if mark.stops and text.startswith(margin, at):
            at += len(margin)
        elif not mark.stops and text.endswith(margin, 0, at):
            at -= len(margin)
        found.append(mark._replace(at=at))
    return found


class _DataMarker:
    """Puts marks around the strings of messages.

    Args:
        sentinel: the character that opens a mark.
        close: the character that closes it.
        gently: put marks only beside letters and digits. Templates test whether a string begins or ends with a
            character such as a bracket, but hardly with a letter.

    Attributes:
        marks: the marks that were put, each with its *margin*: the end of the string outside it, ``[`` of ``[1]``.
    """

    def __init__(self, sentinel: str, close: str, gently: bool) -> None:
        self.marks: list[tuple[DataMark, str]] = []
        self._sentinel, self._close, self._gently = sentinel, close, gently

    def message(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        """A copy of message number ``index`` with its strings marked."""
        copy = dict(message)
        if message.get("role") == "assistant":
            numbered = [(number, one) for number, one in enumerate(utterances_of(message)) if one.kind != "call"]
            for number, (_, text, source, start) in reversed(numbered):  # from the back, so that offsets stay true
                value = copy[source]
                words = value[0]["text"] if isinstance(value, list) else value
                words = words[:start] + self._marked(text, index, number) + words[start + len(text) :]
                value = [{**value[0], "text": words}] if isinstance(value, list) else words
                for field in REASONING_FIELDS if source in REASONING_FIELDS else (source,):
                    if copy.get(field) is not None:
                        copy[field] = value
            if copy.get("tool_calls"):
                copy["tool_calls"] = [
                    with_arguments(call, lambda arguments: self._arguments(arguments, index))
                    for call in copy["tool_calls"]
                ]
        elif copy.get("content"):
            content = copy["content"]
            if isinstance(content, list):
                copy["content"] = [{**part, "text": self._marked(part["text"], index)} for part in content]
            else:
                copy["content"] = self._marked(content, index)
        return copy

    def tool(self, value: Any, key: str = "") -> Any:
        """A copy of a tool's schema, or of the value of ``key`` in it, with every ``description`` marked."""
        if isinstance(value, dict):
            return {name: self.tool(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self.tool(item) for item in value]
        return self._marked(value, -1) if key == "description" and isinstance(value, str) else value

    def _arguments(self, arguments: Any, index: int) -> Any:
        """The arguments of a call with their strings marked, in the form that they have; None where there are none."""
        if not isinstance(arguments, str):
            return self._strings(arguments, index) if arguments else None
        try:
            return json.dumps(self._strings(json.loads(arguments), index), ensure_ascii=False) if arguments else None
        except ValueError:
            return self._marked(arguments, index)

    def _strings(self, value: Any, index: int) -> Any:
        """A JSON-like value with its strings marked."""
        if isinstance(value, dict):
            return {key: self._strings(item, index) for key, item in value.items()}
        if isinstance(value, list):
            return [self._strings(item, index) for item in value]
        return self._marked(value, index) if isinstance(value, str) else value

    def _marked(self, text: str, index: int, utterance: int = -1) -> str:
        """A string of message ``index`` between two marks; as it is where nothing in it may be marked."""
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        start, stop = first, last
        if self._gently:
            words = [match.span() for match in re.finditer(r"\w+", text)]
            start, stop = (words[0][0], words[-1][1]) if words else (0, 0)
        if start >= stop:
            return text
        number = len(self.marks)
        self.marks.append((DataMark(0, index, utterance, number, False), text[first:start]))
        self.marks.append((DataMark(0, index, utterance, number, True), text[stop:last]))
        marks = [f"{self._sentinel}{number + end}{self._close}" for end in (0, 1)]
        return f"{text[:start]}{marks[0]}{text[start:stop]}{marks[1]}{text[stop:]}"


class ControlTokens:
    """Finds the tokenizer's control tokens where the data, and not the template, spells them.

    In assistant messages the tags around reasoning do not count: there they are meant as control tokens.

    Args:
        texts: the texts of the control tokens; empty ones are ignored.

    Attributes:
        texts: the same without repetitions, longest first.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
        self.texts = tuple(longest_first)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        untagged = [text for text in longest_first if not THINKING_TAG.fullmatch(text)]
        self._assistant = re.compile("|".join(map(re.escape, untagged)) or "(?!)")
        self._firsts = tuple(sorted({text[0] for text in longest_first}))
        self._firsts_utf8 = tuple(first.encode("utf-8", "surrogatepass") for first in self._firsts)
        # Whether JSON writes all of these tokens without an escape, so that they can be looked for in JSON text.
        self._plain_in_json = not any(re.search(r'["\\\x00-\x1f\ud800-\udfff]', text) for text in longest_first)

    def among(self, value: Any) -> set[str]:
        """The control tokens spelt anywhere in a JSON-like value, keys included."""
        found: set[str] = set()
        try:
            text = orjson.dumps(value) if self._plain_in_json else None
        except (TypeError, ValueError):
            text = None
        # For nearly every row the JSON text shows quickly that it spells none.
        if text is None or (
            any(first in text for first in self._firsts_utf8) and self._pattern.search(text.decode()) is not None
        ):
            self._collect(value, found, self._pattern)
        return found

    def _collect(self, value: Any, found: set[str], pattern: re.Pattern[str]) -> None:
        kind = type(value)
        if kind is str:
            for first in self._firsts:
                if first in value:
                    found.update(pattern.findall(value))
                    return
        elif kind is dict:
            pattern = self._assistant if value.get("role") == "assistant" else pattern
            for key, item in value.items():
                self._collect(key, found, pattern)
                self._collect(item, found, pattern)
        elif kind is list or kind is tuple:
            for item in value:
                self._collect(item, found, pattern)

    def spelt(
        self, data: Mapping[str, Any], text: str, render: Callable[[Mapping[str, Any]], str | None]
    ) -> tuple[list[tuple[int, int]], set[str]]:
        """Find where in ``text`` the control tokens stand that the data spells.

        Args:
            data: the template variables that hold strings of the data.
            text: their plain rendering.
            render: renders altered ``data``; returns None where the template refuses it.

        Returns:
            The ascending ``(start, stop)`` ranges of these tokens; and the control tokens that the template itself
            looks for in the data, such as a ``</think>`` at which it splits an answer. The latter have no ranges: they
            are the template's to interpret, and stay control tokens.
        """
        tokens = self.among(data)
        ranges = self._ranges(data, tokens, text, render) if tokens else []
        if ranges is not None:
            return ranges, set()
        unread = {token for token in tokens if self._ranges(data, {token}, text, render) is not None}
        ranges = self._ranges(data, unread, text, render) if unread else []
        return (ranges, tokens - unread) if ranges is not None else ([], tokens)

    def _ranges(
        self,
        data: Mapping[str, Any],
        tokens: set[str],
        text: str,
        render: Callable[[Mapping[str, Any]], str | None],
    ) -> list[tuple[int, int]] | None:
        """The ranges of these tokens; None where the template writes other text if they are renamed in the data."""
        nonce = "Zq"
        while nonce in text or nonce in repr(data):
            nonce += "Zq"
        order = sorted(tokens, key=lambda token: (-len(token), token))
        # Letters and digits pass through tojson, escaping and trimming alike.
        names = {token: f"{nonce}{number}x" for number, token in enumerate(order)}
        altered = render(_renamed(data, names, order))
        if altered is None:
            return None
        split = re.split(f"{nonce}([0-9]+)x", altered)  # text and numbers of tokens in turn
        split[1::2] = [order[int(number)] for number in split[1::2]]
        ends = [*accumulate(map(len, split))]
        return list(zip(ends[:-1:2], ends[1::2], strict=True)) if "".join(split) == text else None


def _renamed(value: Any, names: Mapping[str, str], order: Sequence[str]) -> Any:
    """A copy of a JSON-like value with control tokens replaced by their ``names``, in this ``order``."""
    if isinstance(value, str):
        for token in order:
            value = value.replace(token, names[token])
        return value
    if isinstance(value, dict):
        if value.get("role") == "assistant":
            order = [token for token in order if not THINKING_TAG.fullmatch(token)]
        return {_renamed(key, names, order): _renamed(item, names, order) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(item, names, order) for item in value]
    return value
