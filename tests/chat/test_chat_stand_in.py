"""Stand-in conversations: their placeholders, and the comparison with a row."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_styles import STYLES, said, talk, user

from megatron_sft_idx.chat.template import ChatTemplate
from megatron_sft_idx.chat.template.align import Outline, by_marks, by_spelling
from megatron_sft_idx.chat.template.contexts import Contexts
from megatron_sft_idx.chat.template.stand_in import MAX_PLACEHOLDERS, make_stand_in, reduced
from megatron_sft_idx.chat.types import Conversation
from megatron_sft_idx.errors import SequenceError

TESTED = re.compile(re.escape("</think>") + "|" + re.escape("/no_think"))
TEXTS = st.text("ab </think>/no_\n\"'\\{}é", max_size=12)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(-5, 5), st.booleans(), st.none(), st.floats(0, 1)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("ab <", max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


def messages() -> st.SearchStrategy[list[dict[str, Any]]]:
    function = st.fixed_dictionaries({"name": st.sampled_from(["look", "find"]), "arguments": st.one_of(VALUES, TEXTS)})
    one = st.fixed_dictionaries({"id": st.sampled_from(["call00001", "functions.look:0"]), "function": function})
    answer = st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.one_of(st.none(), TEXTS)},
        optional={"reasoning_content": TEXTS, "tool_calls": st.lists(one, max_size=3)},
    )
    other = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": TEXTS})
    return st.lists(st.one_of(answer, other), max_size=5)


@settings(max_examples=300, deadline=None)
@given(messages(), st.sampled_from([None, TESTED]))
def test_a_stand_in_depends_on_the_structure_alone(row: list[dict[str, Any]], tested: re.Pattern[str] | None) -> None:
    made = make_stand_in(row, None, frozenset({"find"}), tested)
    again = make_stand_in(made.messages, None, frozenset({"find"}), tested)
    assert again.messages == made.messages
    assert again.holes == made.holes
    assert len(made.holes) == len(made.owned)
    text = json.dumps(made.messages)
    placed = [one for one in made.placed_in(text) if not one.shared]
    assert {one.number for one in placed} == set(range(len(made.owned)))
    for hole in made.holes:
        assert hole.kind == "content" or row[hole.message]["role"] == "assistant"


def test_what_stands_for_a_value_is_what_a_template_may_write_of_it() -> None:
    row = [
        said(
            "<think>\nwhy </think>\n\n so ",
            tool_calls=[{"id": "a.look:1", "function": {"name": "look", "arguments": {"k": 7, "<": "v"}}}],
        )
    ]
    made = make_stand_in(row, None, frozenset())
    assert made.owned == ["why", "so ", 7, "v"]
    assert [hole.kind for hole in made.holes] == ["reasoning", "content", "call", "call"]
    (message,) = made.messages
    assert message["content"].startswith("<think>\nzqw00000wordswqz </think>\n\n")
    (made_call,) = message["tool_calls"]
    assert made_call["id"] == f"a.{made_call['function']['name']}:1"


def test_a_row_of_more_strings_than_placeholders_is_refused() -> None:
    row = talk(
        user("u"), said("a", tool_calls=[{"function": {"name": "f", "arguments": {"k": ["v"] * MAX_PLACEHOLDERS}}}])
    )
    with pytest.raises(SequenceError, match="more than 100,000 strings"):
        ChatTemplate(STYLES["tools"].source).render(row)


def test_arguments_are_cut_down_to_their_ends() -> None:
    arguments = {"a": {"b": [1, 2, 3]}, "c": "d", "e": [["f"], "g", {"h": None}]}
    calls = [
        {"function": {"name": "one", "arguments": arguments}},
        {"function": {"name": "two"}},
        {"function": {"name": "three", "arguments": {}}},
    ]
    (first, last) = reduced({"role": "assistant", "tool_calls": calls})["tool_calls"]
    assert first["function"]["arguments"] == {"a": {"b": [1, 3]}, "e": [["f"], {"h": None}]}
    assert last == calls[2]


# A row and its stand-in

WRITTEN = {
    "as it is": "{v}",
    "in quotes": '"{v}"',
    "twice": "{v}|{v}",
}


def joined(row: list[dict[str, Any]], form: str, change: Any = lambda text: text) -> str:
    return "<s>" + "".join(f"[{one['role']}]" + form.replace("{v}", change(one["content"])) + "</s>" for one in row)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab []</s>\n\"'\\", min_size=1, max_size=9).filter(str.strip), min_size=1, max_size=4),
    st.sampled_from([*WRITTEN]),
)
def test_counterparts_are_those_of_a_search_that_tries_everything(contents: list[str], form: str) -> None:
    row = [{"role": "user", "content": content} for content in contents]
    made = make_stand_in(row, None, frozenset())
    outline = Outline(stood := joined(made.messages, WRITTEN[form]), made.placed_in(stood))
    for change in (lambda text: text, str.strip, lambda text: json.dumps(text)[1:-1]):
        text = joined(row, WRITTEN[form], change)
        alignment = by_spelling(outline, made, text, 0)
        marked = by_marks(
            outline, made, row, text, 0, lambda altered, change=change: joined(altered, WRITTEN[form], change)
        )
        assert alignment is not None
        ends = [0, *itertools.accumulate(len(part) for part in text_parts(row, WRITTEN[form], change))]
        stands = [
            0,
            *itertools.accumulate(len(part) for part in text_parts(made.messages, WRITTEN[form], lambda one: one)),
        ]
        for here, there in itertools.pairwise(zip(stands, ends, strict=True)):
            expected = [(here[1], there[1])]
            assert alignment.ranges([(here[0], there[0])], trimmed=False) == expected
            if marked is not None and all(one.strip() == one and one.strip() for one in contents):
                assert marked.ranges([(here[0], there[0])], trimmed=False) == expected


def text_parts(row: list[dict[str, Any]], form: str, change: Any) -> list[str]:
    """Return a joined text, split at both ends of every value."""
    parts = [""]
    for one in row:
        parts[-1] += ("<s>" if len(parts) == 1 and not parts[0] else "") + f"[{one['role']}]"
        for piece in re.split(r"(\{v\})", form):
            if piece == "{v}":
                parts += [change(one["content"]), ""]
            else:
                parts[-1] += piece
        parts[-1] += "</s>"
    return parts


@pytest.mark.parametrize("change", [str.upper, lambda text: text.replace("b", "bb"), lambda text: text[::-1]])
def test_a_row_that_is_written_otherwise_does_not_agree(change: Any) -> None:
    row = [user("some words"), user("a b c")]
    made = make_stand_in(row, None, frozenset())
    outline = Outline(stood := joined(made.messages, "{v}"), made.placed_in(stood))
    assert by_spelling(outline, made, joined(row, "{v}", change), 0) is None
    assert by_spelling(outline, made, joined(row, "{v}!"), 0) is None
    assert by_spelling(outline, made, joined(row[:1], "{v}"), 0) is None


def test_marks_find_values_that_a_filter_changes() -> None:
    row = [user("a\tb"), user("<c>\t")]
    made = make_stand_in(row, None, frozenset())

    def render(altered: list[dict[str, Any]]) -> str:
        return joined(altered, "{v}", lambda text: text.replace("\t", "    "))

    outline = Outline(stood := render(made.messages), made.placed_in(stood))
    text = render(row)
    assert by_spelling(outline, made, text, 0) is None
    alignment = by_marks(outline, made, row, text, 0, render)
    assert alignment is not None
    start = stood.index("zqw00001")
    ((low, high),) = alignment.ranges([(start, start + len("zqw00001wordswqz"))], trimmed=False) or [(0, 0)]
    assert text[low:high].strip() == "<c>"


# Contexts


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["user", "assistant", "tool", "system"]), min_size=1, max_size=30))
def test_every_answer_has_contexts_that_hold_it_and_its_neighbours(roles: list[str]) -> None:
    contexts = Contexts(roles)
    for message, role in enumerate(roles):
        if role != "assistant":
            continue
        found = [*contexts.of(message)]
        sizes = [len(indices) for indices, _ in found]
        assert sizes == sorted(sizes)
        assert found[-1][0] == [*range(len(roles))]
        for indices, _ in found:
            assert indices == sorted(set(indices))
            assert message in indices
            # The messages directly before and after the answer determine where its turn begins and ends.
            assert not message or message - 1 in indices or roles[message - 1] not in ("user", "tool")


def test_a_context_does_not_grow_with_the_conversation() -> None:
    roles = ["system", "user", *["assistant", "tool"] * 200, "assistant", "user", "assistant"]
    for message in (2, 102, 202, 402):
        indices, cut_down = next(Contexts(roles).of(message))
        assert len(indices) <= 12
        assert cut_down
    assert next(Contexts(["user", "assistant"] * 200).of(201))[0] == [200, 201, 202]


# No row affects the result of another one


def test_masks_do_not_depend_on_the_rows_before() -> None:
    def row(number: int) -> Conversation:
        words = random.Random(number)
        content: Any = words.choice(["Paris", "<|im_end|>", "</think> so", "a" * number])
        if words.random() < 0.3:
            content = [{"type": "text", "text": content}]
        message = {"role": "assistant", "content": content}
        if words.random() < 0.5:
            message["tool_calls"] = [
                {"function": {"name": "look", "arguments": {"city": words.choice(["Paris", "x"])}}}
            ]
        return Conversation([user("q" * (number % 3)), message, user("</s>"), said("done")], [0, 1, 0, 1])

    drops = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    for source in (
        drops,
        STYLES["thinking"].source,
        STYLES["parts"].source,
        STYLES["marked"].source,
        STYLES["jumps"].source,
    ):
        rows = [row(number) for number in range(40)]

        def outcome(template: ChatTemplate, one: Conversation) -> object:
            try:
                return template.render(one)
            except SequenceError as error:
                return error.reason

        alone = [outcome(ChatTemplate(source), one) for one in rows]
        for order in (range(40), range(39, -1, -1), random.Random(0).sample(range(40), 40)):
            template = ChatTemplate(source)
            assert {number: outcome(template, rows[number]) for number in order} == dict(enumerate(alone))
