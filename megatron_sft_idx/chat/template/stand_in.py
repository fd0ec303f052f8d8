"""Stand-in conversations: a row's messages with every string replaced by a word that nothing else spells.

The data of a row may quote the template's own headers and ends of turn, repeat itself, or contain words that the
template writes. Then the rendered text does not show which part is data. A stand-in conversation has the same messages
with the same fields, but each string is a *placeholder*. Its rendering is unambiguous: a placeholder marks where the
template writes that string, and everything else is the template's own text. So the stand-in is judged instead of the
row, and the result is carried over to the row's own text if the two renderings are shown to agree (``align``).

A placeholder is *owned* if it represents one string of one message: a content, a reasoning, a leaf of the arguments of
a call. Names of functions and ids are *shared*: equal strings have equal placeholders everywhere, because templates use
them to look up calls.

A stand-in depends only on the structure of a row: the roles, the fields of each message, and which of them are empty.
All rows of one structure have the same stand-in, so a result for one of them holds for all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from megatron_sft_idx.chat.template.messages import REASONING_FIELDS, called, utterances_of

Kind: TypeAlias = Literal["reasoning", "content", "call"]

PLACEHOLDER = re.compile(
    r"zqw(?P<owned>[0-9]{5})wordswqz|zqs(?P<shared>[0-9]{5})s|731(?P<number>[0-9]{5})137(?:\.5)?", re.IGNORECASE
)
"""Matches placeholders: owned ones in words and in numbers, and shared ones."""

MAX_PLACEHOLDERS = 100_000
"""The most strings of either sort that one row may hold: placeholders have five digits."""

_PLAIN_KEY = re.compile(r"[\w.-]{1,64}")
_PLAIN_ID = re.compile(r"[\w.:-]+")
_KEPT_FIELDS = frozenset({"role", "type"})


class Hole(NamedTuple):
    """The string that an owned placeholder represents.

    Attributes:
        message: position of the message.
        kind: the part of the message; ``"content"`` for all roles except the assistant.
    """

    message: int
    kind: Kind


class Occurrence(NamedTuple):
    """A placeholder in a rendered text.

    Attributes:
        start: its first character.
        stop: the position after its last character.
        number: its number.
        shared: whether it is a shared one.
    """

    start: int
    stop: int
    number: int
    shared: bool


class StandIn(NamedTuple):
    """A conversation of placeholders, and the strings of a row that they represent.

    Attributes:
        messages: the messages.
        tools: the tools.
        holes: the string that each owned placeholder represents, by its number.
        owned: the row's own value for each owned placeholder: a string, or a number in the arguments of a call.
        shared: the row's own value for each shared placeholder.
        tested: as given to ``make_stand_in``.
        words: matches the row's own strings in a row that is its own stand-in; else None.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    holes: list[Hole]
    owned: list[Any]
    shared: list[str]
    tested: re.Pattern[str] | None
    words: re.Pattern[str] | None = None

    def placed_in(self, text: str) -> list[Occurrence]:
        """Return all placeholders in a text, in order."""
        if self.words is not None:
            numbers = {value.strip(): number for number, value in enumerate(self.owned) if isinstance(value, str)}
            return [Occurrence(*match.span(), numbers[match[0]], False) for match in self.words.finditer(text)]
        found = []
        for match in PLACEHOLDER.finditer(text):
            number = match["owned"] or match["number"]
            if number is None:
                found.append(Occurrence(match.start(), match.end(), int(match["shared"]), True))
            elif int(number) < len(self.owned):
                found.append(Occurrence(match.start(), match.end(), int(number), False))
        return found


def owned_word(number: int) -> str:
    """Return the placeholder of the owned string with this number; too long to occur in a template by chance."""
    return f"zqw{number:05d}wordswqz"


def shared_word(number: int) -> str:
    """Return the placeholder of the shared string with this number: nine letters and digits, for strict templates."""
    return f"zqs{number:05d}s"


_FIRST_WORDS = [owned_word(number) for number in range(1024)]


def make_stand_in(
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    spelt: frozenset[str],
    tested: re.Pattern[str] | None = None,
) -> StandIn:
    """Make the stand-in of a conversation.

    Args:
        messages: the conversation, in the form in which the template takes it.
        tools: schemas of the functions that can be called.
        spelt: strings in the template's source. Names and ids among them are not replaced.
        tested: matches strings that the template searches for in the data, such as ``</think>``. If given, the
            stand-in is *faithful*: these strings stay in place, and so do names and tools. A template then takes
            the same branches as for the row, but few rows have the same structure.

    Raises:
        ValueError: the conversation has more strings than there are placeholders.
    """
    known = {called(tool).get("name") for tool in tools or ()} if tested is not None else set()
    maker = Maker(spelt | {name for name in known if isinstance(name, str)}, tested)
    made = [maker.message(index, message) for index, message in enumerate(messages)]
    if max(len(maker.owned), len(maker.shared)) > MAX_PLACEHOLDERS:
        raise ValueError(f"more than {MAX_PLACEHOLDERS:,} strings")
    if tested is None and tools:
        tools = maker.made_up_tools(messages)
    return StandIn(made, tools, maker.holes, maker.owned, maker.shared, tested)


def as_it_is(
    messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None, own_text: str, loud: re.Pattern[str]
) -> StandIn | None:
    """Use a conversation as its own stand-in, if its strings can be distinguished from all other text.

    Some templates check the letters of a string, or count them, so that no placeholder can replace it.

    Args:
        messages: the conversation.
        tools: schemas of the functions that can be called.
        own_text: text that the template itself writes.
        loud: matches tags and control tokens, which no string may contain.

    Returns:
        The stand-in; None if a string contains another one, a tag or control token, or text that the template itself
        writes.
    """
    maker = _Keeper(frozenset(), None)
    made = [maker.message(index, message) for index, message in enumerate(messages)]
    words = sorted({value.strip() for value in maker.owned if isinstance(value, str)}, key=len, reverse=True)
    told = all(
        not loud.search(word) and word not in own_text and not any(word in longer for longer in words[:at])
        for at, word in enumerate(words)
    )
    if not told or len(words) < len(maker.owned):
        return None
    pattern = re.compile("|".join(map(re.escape, words)) or "(?!)")
    return StandIn(made, tools, maker.holes, maker.owned, [], None, pattern)


class Maker:
    """Replaces the strings of one conversation. See ``make_stand_in`` for the arguments.

    ``align`` uses other replacements: it overrides ``placeholder`` and ``share``.
    """

    def __init__(self, spelt: frozenset[str], tested: re.Pattern[str] | None) -> None:
        self.holes: list[Hole] = []
        self.owned: list[Any] = []
        self.shared: list[str] = []
        self._shared_words: dict[str, str] = {}
        self._spelt, self._tested = spelt, tested
        self._names: set[str] = set()

    def message(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        """The stand-in of one message."""
        if len(message) == 2 and self._tested is None:  # the most frequent case
            content = message.get("content")
            if type(content) is str and "</" not in content and "[/THINK]" not in content and "role" in message:
                return {"role": message["role"], "content": self._text(content, index, "content")}
        made: dict[str, Any] = {}
        reasoning: dict[str, str] = {}
        for key, value in message.items():
            if key in _KEPT_FIELDS or value is None:
                made[key] = value
            elif key == "content":
                made[key] = self._content(index, message, value)
            elif key in REASONING_FIELDS and isinstance(value, str):
                # Several fields may have the same reasoning.
                if value not in reasoning:
                    reasoning[value] = self._text(value, index, "reasoning")
                made[key] = reasoning[value]
            elif key == "tool_calls" and isinstance(value, list):
                made[key] = [self._call(index, call) for call in value]
            else:
                made[key] = self._other(value)
        return made

    def made_up_tools(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a tool for each function that is called, or one if none is."""
        names = [called(call).get("name") for message in messages for call in message.get("tool_calls") or ()]
        known = dict.fromkeys(self._other(name) for name in names if isinstance(name, str)) or {"zqtool": None}
        parameters = {"type": "object", "properties": {"zqkey": {"type": "string", "description": "zqdescription"}}}
        return [
            {"type": "function", "function": {"name": name, "description": "zqdescribed", "parameters": parameters}}
            for name in known
        ]

    def _content(self, index: int, message: dict[str, Any], content: Any) -> Any:
        if isinstance(content, list):
            return [
                {**part, "text": self._said(index, message, part["text"])}
                if isinstance(part, dict) and isinstance(part.get("text"), str)
                else part
                for part in content
            ]
        return self._said(index, message, content) if isinstance(content, str) else self._other(content)

    def _said(self, index: int, message: dict[str, Any], text: str) -> str:
        """Return the stand-in of a content; reasoning inside it keeps its tags."""
        if message.get("role") != "assistant" or not ("</" in text or "[/THINK]" in text):
            return self._text(text, index, "content")
        made, at = "", 0
        for kind, words, _, first in utterances_of({"content": text}):
            offset = 0 if text[:first].isspace() else first
            stop = text.index(words, offset) + len(words) if kind == "reasoning" else len(text)
            made += text[at:offset] + self._text(
                text[offset:stop], index, "reasoning" if kind == "reasoning" else "content"
            )
            at = stop
        return made + text[at:]

    def _text(self, text: str, index: int, kind: Kind) -> str:
        """Return a text as placeholders: one, or one for each part between strings that the template searches for."""
        if not text or text.isspace() or (self._tested is not None and text.strip() in self._spelt):
            return text
        found = [] if self._tested is None else [match.span() for match in self._tested.finditer(text)]
        if not found:
            return str(self._own(text, index, kind))
        edges = [0, *(edge for span in found for edge in span), len(text)]
        made = ""
        for number, (start, stop) in enumerate(pairwise(edges)):
            part = text[start:stop]
            words = part.strip()
            if number % 2 or not words:
                made += part
                continue
            at = part.index(words)
            made += part[:at] + self._own(words, index, kind) + part[at + len(words) :]
        return made

    def _own(self, value: str | int | float, index: int, kind: Kind) -> Any:
        self.holes.append(Hole(index, kind))
        self.owned.append(value)
        return self.placeholder(len(self.owned) - 1, value)

    def placeholder(self, number: int, value: Any) -> Any:
        """Return the replacement for an owned value: a word for a string, a number for a number."""
        if isinstance(value, str):
            return _FIRST_WORDS[number] if number < len(_FIRST_WORDS) else owned_word(number)
        made = int(f"731{number:05d}137")
        return made if isinstance(value, int) else made + 0.5

    def share(self, value: str) -> str:
        """Return the replacement for a string that may be looked up."""
        word = self._shared_words.get(value)
        if word is None:
            word = self._shared_words[value] = shared_word(len(self.shared))
            self.shared.append(value)
        return word

    def _call(self, index: int, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        holder = called(call)
        name = holder.get("name")
        if isinstance(name, str):
            self._names.add(name)
        made: dict[str, Any] = {}
        for key, value in holder.items():
            if key == "arguments":
                made[key] = self._argument(index, value)
            else:
                made[key] = value if key in _KEPT_FIELDS else self._other(value)
        if holder is call:
            return made
        return {
            key: made if key == "function" else value if key in _KEPT_FIELDS else self._other(value)
            for key, value in call.items()
        }

    def _argument(self, index: int, value: Any) -> Any:
        if type(value) is str:
            return self._text(value, index, "call")
        if isinstance(value, dict):
            return {self._key(key): self._argument(index, item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._argument(index, item) for item in value]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self._own(value, index, "call")
        return value

    def _key(self, key: Any) -> Any:
        if not isinstance(key, str) or (_PLAIN_KEY.fullmatch(key) and not PLACEHOLDER.fullmatch(key)):
            return key
        return self.share(key)

    def _other(self, value: Any) -> Any:
        """Return the stand-in for a string that may be looked up (a name or an id), or for other values of a message.

        A faithful stand-in keeps the strings in the tools, which templates use to look tools up.
        """
        if type(value) is str and value in self._shared_words:
            return self._shared_words[value]
        if isinstance(value, dict):
            return {key: item if key in _KEPT_FIELDS else self._other(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._other(item) for item in value]
        if not isinstance(value, str) or not value.strip() or value in self._spelt:
            return value
        if ("." in value or ":" in value) and _PLAIN_ID.fullmatch(value):
            # Kimi's ids contain the name of the function: functions.look:0
            for name in sorted(self._names, key=len, reverse=True):
                if name in value and name not in self._spelt:
                    return value.replace(name, self.share(name))
            return value
        return self.share(value)


class _Keeper(Maker):
    """Keeps all strings, and lists the owned ones."""

    def placeholder(self, number: int, value: Any) -> Any:
        return value

    def share(self, value: str) -> str:
        return value


def reduced(message: dict[str, Any]) -> dict[str, Any]:
    """Return a stand-in message with its calls reduced to the parts at their ends.

    If there are more than two calls, two remain. Each call keeps the first and the last leaf of its arguments, with the
    text around them.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    ends = calls if len(calls) < 2 else [calls[0], calls[-1]]
    return {**message, "tool_calls": [_reduced_call(call) for call in ends]}


def _reduced_call(call: Any) -> Any:
    holder = called(call)
    if "arguments" not in holder:
        return call
    made = {**holder, "arguments": _ends(holder["arguments"])}
    return made if holder is call else {**call, "function": made}


def _ends(value: Any) -> Any:
    if isinstance(value, dict):
        keys = [*value]
        return {key: _ends(value[key]) for key in (keys if len(keys) < 2 else [keys[0], keys[-1]])}
    if isinstance(value, list):
        return [_ends(item) for item in (value if len(value) < 2 else [value[0], value[-1]])]
    return value


def spellings(value: Any) -> Iterator[str]:
    """Yield the forms in which a template may write a value, likeliest first: plain, trimmed, JSON, Python."""
    if not isinstance(value, str):
        yield json.dumps(value)
        yield str(value)
        return
    yield value
    trimmed = value.strip()
    if trimmed != value:
        yield trimmed
        yield value.lstrip()
        yield value.rstrip()
    spelt = json.dumps(value, ensure_ascii=False)[1:-1]
    if spelt != value:
        yield spelt
        if trimmed != value:
            yield json.dumps(trimmed, ensure_ascii=False)[1:-1]
        yield repr(value)[1:-1]
