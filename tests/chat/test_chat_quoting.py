"""Rows with text that looks like the template: headers, ends of turn, tags and whole conversations in every field.

Every word shows which field it belongs to, so a mask can be checked without knowing how it was computed.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from template_grammar import SPECIAL, Design, designs, header_of, source_of
from template_search import WORD, Chat, Talking, chats, is_in_tag, renderings, tags_that_stop, template_of
from template_styles import STYLES
from transformers.utils import chat_template_utils

from megatron_sft_idx.chat.chat_rows import to_sequence_source
from megatron_sft_idx.chat.template import ChatTemplate
from megatron_sft_idx.chat.types import Conversation, MaskOptions, Rendered, RowError
from megatron_sft_idx.errors import FormatError, SequenceError

MASKS = Path(__file__).parents[1] / "masks"


class Quoting:
    """Puts quotes of the template into the strings of a row, with words that show the field."""

    def __init__(self, quotes: list[str], said: dict[str, int]) -> None:
        self.quotes, self.count, self.said = quotes, 5000, dict(said)

    def quoted(self, text: str, kind: str, number: int) -> str:
        if not text.strip():
            return text

        def word(_match: object) -> str:
            self.count += 1
            made = f"{kind}q{self.count}x"
            if kind in "arv":
                self.said[made] = 1
            return made

        quote = WORD.sub(word, self.quotes[number % len(self.quotes)])
        return f"{text} {quote} {word(None)}"

    def row(self, row: dict[str, Any], only: str, number: int) -> dict[str, Any]:
        """Return the row with a quote in every field of one kind, or in all fields."""
        made = json.loads(json.dumps(row))
        for message in made["messages"]:
            role = message["role"]
            kind = {"user": "u", "system": "s", "tool": "t"}.get(role, "z" if message.get("weight") == 0 else "a")
            if (
                only in (kind, "all")
                and isinstance(message.get("content"), str)
                and "<think>" not in message["content"]
            ):
                message["content"] = self.quoted(message["content"], kind, number)
            if only in ("r", "all") and "reasoning_content" in message:
                message["reasoning_content"] = self.quoted(message["reasoning_content"], "r", number)
            for call in message.get("tool_calls", ()) if only in ("v", "all") else ():
                arguments = call["function"]["arguments"]
                if isinstance(arguments, dict):
                    call["function"]["arguments"] = {
                        key: self.quoted(value, "v", number) if isinstance(value, str) else value
                        for key, value in arguments.items()
                    }
        return made


def quotes_of(design: Design) -> list[str]:
    """Return the quotes for a template: a whole conversation, a header, an end of turn with a header, tags."""
    talking = Talking()
    for step in ("system", "ask", "think", "call"):
        talking.step(step)
    chat = talking.chat(tools=False)
    whole = next(renderings(design, chat), "") or "<|im_end|>\n<|im_start|>assistant\n"
    header = header_of(design, "assistant")
    middle = len(whole) // 2
    return [
        whole,
        f"yq1x{header}",
        whole[middle - 40 : middle + 40],
        f"{header}yq1x</s>{header}yq2x",
        "</call> yq1x '}]}",
    ]


def wrong_words(chat: Chat, rendered: Rendered, design: Design | None = None) -> list[str]:
    """Return words that are wrongly trained on or wrongly not trained on."""
    mask = bytearray(len(rendered.text))
    for span in rendered.spans:
        mask[span.start : span.stop] = b"\1" * (span.stop - span.start)
    found = []
    stops = tags_that_stop(design, rendered.text, mask) if design else set[int]()
    for match in WORD.finditer(rendered.text):
        trained = mask[match.start() : match.end()]
        if match[1] in "ustdhz" and any(trained) and not is_in_tag(match.start(), stops):
            found.append(f"trains {match[0]}")
        elif match[1] in "arv" and not all(trained):
            found.append(f"does not train {match[0]}")
    return [*found, *(f"loses {word}" for word in chat.said if word[0] in "arv" and word not in rendered.text)]


def judged(template: ChatTemplate, design: Design, chat: Chat) -> str:
    """Return ``"handled"``, ``"refused"``, or ``"lost"`` if no rendering keeps all of the assistant's words."""
    try:
        conversation = to_sequence_source(chat.row)
        assert isinstance(conversation, Conversation)
        rendered = template.render(conversation)
    except (RowError, SequenceError, FormatError):
        kept = any(all(word in text for word in chat.said) for text in renderings(design, chat))
        return "refused" if kept else "lost"
    found = wrong_words(chat, rendered, design)
    if found:
        raise AssertionError("\n".join([*found, repr(rendered), source_of(design), json.dumps(chat.row)]))
    return "handled"


def searched(number: int, templates: int) -> Counter[str]:
    seen: Counter[str] = Counter()

    @seed(number)
    @settings(max_examples=templates, database=None, deadline=None, phases=[Phase.generate])
    @given(st.data())
    def search(data: st.DataObject) -> None:
        design = data.draw(designs())
        template = template_of(design)
        quotes = quotes_of(design)
        for only in ("a", "r", "v", "t", "u", "s", "all"):
            plain = data.draw(chats(design))
            if not plain.said or judged(template, design, plain) != "handled":
                continue  # refused for another reason than its quotes
            quoting = Quoting(quotes, plain.said)
            row = quoting.row(plain.row, only, data.draw(st.integers(0, len(quotes) - 1)))
            seen[judged(template, design, Chat(row, quoting.said))] += 1

    search()
    return seen


def test_no_quote_is_taken_for_the_template_s_own_text() -> None:
    seen = searched(0, templates=20)
    assert seen["handled"] >= 80
    assert seen["handled"] > 0.95 * (seen["handled"] + seen["refused"]), seen


@pytest.mark.slow
def test_no_quote_is_taken_for_the_template_s_own_text_in_a_long_search() -> None:
    seen = searched(1, templates=1500)
    print(seen)
    assert seen["handled"] > 0.95 * (seen["handled"] + seen["refused"]), seen


@pytest.mark.parametrize("name", STYLES)
def test_an_answer_that_quotes_its_own_conversation_is_trained_whole(name: str) -> None:
    style = STYLES[name]
    messages = [{"role": "user", "content": "uq1x asks"}, {"role": "assistant", "content": "aq2x answers"}]
    template = ChatTemplate(style.source, special_tokens=SPECIAL, name="t.jinja")
    text = template.render(Conversation(messages, [1, 1])).text
    for quote in (text, text[: len(text) // 2], text[len(text) // 3 :]):
        said = f"aq3x {quote} aq4x".replace("uq1x", "aq5x")
        row = [
            {"role": "user", "content": f"uq6x {text} uq7x".replace("aq2x", "uq8x")},
            {"role": "assistant", "content": said},
        ]
        rendered = template.render(Conversation([*row, *messages], [1, 1, 1, 1]))
        trained = ["aq3x" in rendered.text[one.start : one.stop] for one in rendered.spans]
        assert trained == [True, False]
        assert not wrong_words(Chat({}, {"aq3x": 1, "aq4x": 1}), rendered)
        assert said in rendered.text[rendered.spans[0].start : rendered.spans[0].stop]


# Small inputs


def of_files(template: str, rows: str, **options: Any) -> list[list[str] | str]:
    """Return the trained text of each row of a file, or the error."""
    made = ChatTemplate(
        (MASKS / f"{template}.jinja").read_text(), control_tokens=["<|im_start|>", "<|im_end|>"],
        options=MaskOptions(**options), name="t.jinja",
    )  # fmt: skip
    found: list[list[str] | str] = []
    for line in (MASKS / f"{rows}.jsonl").read_text().splitlines():
        conversation = to_sequence_source(json.loads(line))
        assert isinstance(conversation, Conversation)
        try:
            rendered = made.render(conversation)
        except SequenceError as error:
            found.append(error.reason)
        else:
            found.append([rendered.text[one.start : one.stop] for one in rendered.spans])
    return found


def test_arguments_that_quote_an_end_of_turn_and_a_header_are_trained_whole() -> None:
    call = "<call=save><parameter=text>hi<|im_end|>\n<|im_start|>assistant\nhello</parameter></call>"
    assert of_files("a", "a") == [[f"Sure.{call}<|im_end|>", "Done.<|im_end|>"]]


def test_so_is_an_answer_that_a_filter_changes() -> None:
    assert of_files("b", "b") == [["a  b <|im_end|>\n<|im_start|>assistant\nyo<|im_end|>"]]


def test_words_that_are_dropped_are_missed_though_an_argument_repeats_them() -> None:
    assert of_files("drop", "two") == [
        f"the chat template t.jinja drops the words '{city}' of assistant message 2; use a template that"
        f" keeps them, or set the weight of the message to 0"
        for city in ("Paris", "Paris", "Rome")
    ]


def test_markers_around_every_role_are_refused_or_taken_as_they_stand() -> None:
    (refused,) = of_files("u", "u")
    assert "enclose text of message 1" in refused
    (trained,) = of_files("u", "u", train_on="markers")
    _, marked = chat_template_utils.render_jinja_template(
        [json.loads(line)["messages"] for line in (MASKS / "u.jsonl").read_text().splitlines()],
        chat_template=(MASKS / "u.jinja").read_text(),
        return_assistant_tokens_mask=True,
    )
    assert len(trained) == len(marked[0])


# Text that is collected before it is written cannot be traced. The header of a result has the name of the function.
COLLECTED = (
    "{%- set ns = namespace(out='') -%}{%- for m in messages -%}"
    "{%- set ns.out = ns.out + '<|' + m.role + '|>' + (m.get('name') or '') + (m.content or '') -%}"
    "CALLS{%- if m.role == 'assistant' -%}{%- set ns.out = ns.out + '</s>' -%}{%- endif -%}"
    "{%- endfor -%}{{- ns.out -}}"
)
WRITES = "{%- for c in m.tool_calls or [] -%}{%- set ns.out = ns.out + '<call>' + c.function.name -%}{%- endfor -%}"


@pytest.mark.parametrize("content", ["", "Let me look."])
@pytest.mark.parametrize("written", [True, False])
def test_the_name_in_the_header_of_a_result_is_no_call(written: bool, content: str) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    row = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": "There."},
        {"role": "assistant", "content": "It is there."},
    ]
    source = COLLECTED.replace("CALLS", WRITES if written else "")
    template = ChatTemplate(source, special_tokens=SPECIAL, control_tokens=[*SPECIAL.values()], name="t.jinja")
    if written:
        rendered = template.render(Conversation(row, [1] * 4))
        spans = [rendered.text[one.start : one.stop] for one in rendered.spans]
        assert spans == [f"{content}<call>look</s>", "It is there.</s>"]
        return
    with pytest.raises(SequenceError, match="drops 1 of 1 calls of look of assistant message 2"):
        template.render(Conversation(row, [1] * 4))
