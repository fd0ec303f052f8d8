"""Render generated chats with generated templates, and check that the right words are trained on.

Every word of a chat shows where it comes from, so a mask can be checked without knowing how it was computed.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, seed, settings
from hypothesis import strategies as st
from template_grammar import ROLES, SHAPES, SPECIAL, Design, controls_of, designs, header_of, source_of
from transformers.utils import chat_template_utils

from megatron_sft_idx.chat.chat_rows import to_sequence_source
from megatron_sft_idx.chat.template import ChatTemplate
from megatron_sft_idx.chat.types import Conversation, RowError
from megatron_sft_idx.errors import FormatError, SequenceError

WORD = re.compile(r"([a-z])q([0-9]+)x")
"""u user, s system, t tool result, d tool definition, a answer, r reasoning, n called function, k and v argument, h
template, z an answer that is left out."""


@dataclass(frozen=True)
class Chat:
    """An input row, and how often the assistant says each trained word."""

    row: dict[str, Any]
    said: dict[str, int]


STEPS = ("ask", "call", "think", "parallel", "answer", "user", "system", "empty", "left out", "no result", "tags")


class Talking:
    """Writes one conversation. All words occur once, except for the names of functions."""

    def __init__(
        self,
        null: str = "empty",
        arguments: str = "object",
        parts: bool = False,
        edges: str = "plain",
        hold: str = "words",
    ) -> None:
        self.null, self.arguments, self.parts, self.edges, self.hold = null, arguments, parts, edges, hold
        self.messages: list[dict[str, Any]] = []
        self.said: dict[str, int] = {}
        self.count = 100
        self.functions = [self.word("n"), self.word("n")]

    def word(self, kind: str) -> str:
        self.count += 1
        word = f"{kind}q{self.count}x"
        if kind in "arkv":
            self.said[word] = 1
        return word

    def text(self, kind: str) -> str:
        one, two = self.word(kind), self.word(kind)
        return {"plain": f"{one} {two}.", "blank": f" \n{one} {two}\n\n", "spelt": f"{one} </s><|im_end|>\n<|{two}"}[
            self.edges
        ]

    def add(self, role: str, content: str, **more: Any) -> None:
        held = [{"type": "text", "text": content}] if self.parts and role != "tool" else content
        self.messages.append({"role": role, "content": held, **more})

    def call(self, *functions: str, words: str = "") -> list[str]:
        calls, ids = [], []
        for name in functions:
            arguments: Any = {self.word("k"): self.word("v")} if self.hold == "words" else {}
            if self.hold != "nothing":
                arguments[self.word("k")] = 7
            if self.arguments == "text":
                arguments = json.dumps(arguments)
            ids.append(f"id{self.count:07d}")
            function = {"name": name, "arguments": arguments}
            calls.append({"id": ids[-1], "type": "function", "function": function})
            self.said[name] = self.said.get(name, 0) + 1
        message: dict[str, Any] = {"role": "assistant", "content": words, "tool_calls": calls}
        if not words and self.null == "absent":
            del message["content"]
        elif not words and self.null == "none":
            message["content"] = None
        self.messages.append(message)
        return ids

    def step(self, step: str) -> None:
        one, two = self.functions
        if step not in ("answer", "system"):
            self.add("user", self.text("u"))
        if step in ("ask", "answer"):
            self.add("assistant", self.text("a"))
        elif step == "system":
            self.add("system", self.text("s"))
        elif step == "empty":
            self.add("assistant", "")
        elif step == "left out":
            self.add("assistant", self.text("z"), weight=0)
        elif step == "think":
            self.add("assistant", self.text("a"), reasoning_content=self.text("r"))
        elif step == "tags":
            self.add("assistant", f"<think>\n{self.text('r')}\n</think>\n\n{self.text('a')}")
        elif step == "no result":
            self.call(one)
        elif step in ("call", "parallel"):
            ids = self.call(one) if step == "call" else self.call(two, one, words=self.text("a"))
            for number in ids:
                self.messages.append({"role": "tool", "content": self.text("t"), "tool_call_id": number})
            self.add("assistant", self.text("a"))

    def chat(self, tools: bool) -> Chat:
        row: dict[str, Any] = {"messages": self.messages}
        if tools:
            row["tools"] = [
                {"type": "function", "function": {"name": name, "description": self.word("d"), "parameters": {}}}
                for name in self.functions
            ]
        return Chat(row, self.said)


def chats(design: Design) -> st.SearchStrategy[Chat]:
    """Draw conversations. Features that the template cannot write are rarer than features that it writes."""
    lost = {"call", "parallel", "no result"} if design.calls == "none" else set()
    lost |= {"think", "tags"} if design.reasoning == "none" else set()
    kept = [step for step in STEPS if step not in lost]
    steps = st.lists(st.sampled_from([*kept, *kept, *sorted(lost)]), min_size=1, max_size=4)

    def talked(steps: list[str], null: str, arguments: str, parts: bool, edges: str, hold: str, tools: bool) -> Chat:
        talking = Talking(null, arguments, parts, edges, hold)
        for step in steps:
            talking.step(step)
        return talking.chat(tools)

    forms = (("empty", "none", "absent"), ("object", "text"), (False, False, False, True))
    edges = ("plain", "plain", "plain", "blank", "spelt")
    hold = ("words", "words", "numbers", "nothing")
    return st.builds(talked, steps, *map(st.sampled_from, (*forms, edges, hold)), st.booleans())


def complaints(design: Design, chat: Chat, text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """Return what is wrong with training on these ranges of the rendered text."""
    mask = bytearray(len(text))
    for start, stop in spans:
        mask[start:stop] = b"\1" * (stop - start)
    stops = tags_that_stop(design, text, mask)
    found = [*_about_words(chat, text, mask, stops), *_about_headers(design, text, mask, stops)]
    return found if design.markers != "none" else [*found, *_about_ends(design, text, mask)]


def tags_that_stop(design: Design, text: str, mask: bytearray) -> set[int]:
    """Return the starts of tags of another role's turn at which a model stops, because nothing else ends its turn."""
    headers = [header_of(design, role).strip() for role in ROLES if role != "assistant"]
    answer = header_of(design, "assistant")
    # An empty answer, as the template writes it.
    silent = (answer, f"{answer}<think></think>") if design.reasoning == "always" else (answer,)
    return {
        match.start()
        for header in headers
        if design.end == "absent" and header in controls_of(design)
        for match in re.finditer(re.escape(header), text)
        if match.start() and all(mask[match.start() : match.end()])
        if mask[match.start() - 1] or text[: match.start()].endswith(silent)
    }


def is_in_tag(at: int, tags: set[int]) -> bool:
    """Return whether a word at this position is the name in one of these tags."""
    return not tags.isdisjoint(range(at - 3, at))


def _about_words(chat: Chat, text: str, mask: bytearray, stops: set[int]) -> Iterator[str]:
    times = dict.fromkeys(chat.said, 0)
    for match in WORD.finditer(text):
        trained, word = mask[match.start() : match.end()], match[0]
        if match[1] in "ustdhz" and any(trained) and not is_in_tag(match.start(), stops):
            yield f"trains {word}"
        elif match[1] in "arkv" and not all(trained):
            yield f"does not train {word}"
        if word in times:
            times[word] += all(trained)
    for word, said in chat.said.items():
        if word not in text:
            yield f"loses {word}"
        elif times[word] != said:
            yield f"trains {word} {times[word]} times, said {said} times"


def _about_headers(design: Design, text: str, mask: bytearray, stops: set[int]) -> Iterator[str]:
    for header in filter(None, (header_of(design, role).strip() for role in ROLES)):
        for match in re.finditer(re.escape(header), text):
            if any(mask[match.start() : match.end()]) and match.start() not in stops:
                yield f"trains in the header {header!r}"


def _about_ends(design: Design, text: str, mask: bytearray) -> Iterator[str]:
    closes = (SHAPES[design.tags][2].strip(), "<|return|>")
    for run in re.finditer(b"\1+", bytes(mask)):
        said = text[run.start() : run.end()]
        if said != said.rstrip():
            yield f"trains the whitespace after {said!r}"
        ends = design.end in ("branch", "late", "last differs", "between") and design.results != "with call"
        if ends and not said.endswith(closes):
            yield f"does not train the end of the turn {said!r}"
        if "None" in said:
            yield f"trains the word None in {said!r}"


def template_of(design: Design) -> ChatTemplate:
    return ChatTemplate(source_of(design), special_tokens=SPECIAL, control_tokens=controls_of(design), name="t.jinja")


def forms_of(row: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the forms in which a row's messages may be passed to a template."""
    nulls: tuple[Any, ...] = (..., "", None) if any(not m.get("content") for m in row["messages"]) else (...,)
    for parts, null, text in itertools.product((False, True), nulls, (False, True)):
        messages = []
        for held in row["messages"]:
            message = {key: value for key, value in held.items() if key not in ("content", "weight")}
            content = held.get("content")
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
            if content is None:
                content = null
            if content is not ...:
                whole = parts and content is not None
                message["content"] = [{"type": "text", "text": content}] if whole else content
            if "tool_calls" in message:
                message["tool_calls"] = [_with_arguments(call, text) for call in message["tool_calls"]]
            messages.append(message)
        yield messages


def _with_arguments(call: dict[str, Any], text: bool) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if text and not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    elif not text and isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def renderings(design: Design, chat: Chat) -> Iterator[str]:
    """Yield the renderings of transformers for each form that the template accepts."""
    for messages in forms_of(chat.row):
        try:
            rendered, _ = chat_template_utils.render_jinja_template(
                [messages], tools=chat.row.get("tools"), chat_template=source_of(design), **SPECIAL
            )
        except Exception:
            continue  # the template cannot take this form
        yield rendered[0]


def outcome(template: ChatTemplate, design: Design, chat: Chat) -> str:
    """Return the outcome for a chat, and check its mask.

    ``"handled"``, ``"refused"``, or ``"lost"`` if every form of the row loses some of the assistant's words.

    Raises:
        AssertionError: something is trained on by mistake, or missing from the trained text.
    """
    try:
        conversation = to_sequence_source(chat.row)
        assert isinstance(conversation, Conversation)
        rendered = template.render(conversation)
    except (RowError, SequenceError, FormatError):
        kept = any(all(word in text for word in chat.said) for text in renderings(design, chat))
        return "refused" if kept and chat.said else "lost"
    assert rendered.text in renderings(design, chat), "the text is not what transformers renders"
    spans = [(span.start, span.stop) for span in rendered.spans]
    found = complaints(design, chat, rendered.text, spans)
    if found:
        marked = rendered.text
        for span in reversed(rendered.spans):
            marked = f"{marked[: span.start]}[[{marked[span.start : span.stop]}]]{marked[span.stop :]}"
        raise AssertionError("\n".join([*found, repr(marked), source_of(design), json.dumps(chat.row)]))
    return "handled"


def trained_by(template: ChatTemplate, chat: Chat) -> tuple[Any, ...]:
    """Return the text and its trained ranges, or the kind of error."""
    try:
        conversation = to_sequence_source(chat.row)
        assert isinstance(conversation, Conversation)
        rendered = template.render(conversation)
    except (RowError, SequenceError, FormatError) as error:
        return (type(error),)
    return rendered.text, rendered.spans, rendered.notes


def searched(number: int, templates: int, chats_each: int) -> Counter[str]:
    """Return the number of chats per outcome, for the search with this number."""
    seen: Counter[str] = Counter()

    @seed(number)
    @settings(max_examples=templates, database=None)
    @given(st.data())
    def search(data: st.DataObject) -> None:
        design = data.draw(designs())
        template = template_of(design)
        drawn = [data.draw(chats(design)) for _ in range(chats_each)]
        seen.update(outcome(template, design, chat) for chat in drawn)
        # Cached results from one chat must not change the result for the next one.
        other = template_of(design)
        for chat in reversed(drawn):
            once, again = trained_by(template, chat), trained_by(other, chat)
            assert once == again, (once, again, source_of(design), json.dumps(chat.row))

    search()
    return seen
