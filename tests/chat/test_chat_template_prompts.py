"""Masks if the generation prompt depends on the conversation: no row affects the mask of another one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_styles import said, talk, user

from megatron_sft_idx.chat.template import ChatTemplate
from megatron_sft_idx.chat.template.environment import TemplateEnvironment
from megatron_sft_idx.chat.template.scaffold import prompt_varies
from megatron_sft_idx.chat.types import Conversation
from megatron_sft_idx.errors import SequenceError

# Every answer begins with an empty thinking block. It is part of the prompt only if a condition holds.
BODY = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<assistant><think></think>{{ m.content }}</s>"
    "{% else %}<{{ m.role }}>{{ m.content }}</s>{% endif %}{% endfor %}"
)
PROMPT = "{%% if add_generation_prompt %%}<assistant>{%% if %s %%}<think></think>{%% endif %%}{%% endif %%}"
QUESTIONS = ("hello there", "hello /no_think", "/no_think hello", "a b c d e f", "HELLO", "12345", "x /think")

WORDS = (
    "messages[-1].content[-9:] == '/no_think'",
    "messages[-1].content.split()[-1] == '/no_think'",
    "messages[-1].content.endswith(('/no_think', '/quiet'))",
    "'/no_think' in messages[-1].content.split()",
    "messages[-1].content.split()[0] in ['/no_think', '/quiet']",
    "messages[-1].content is eq 'HELLO'",
    "messages[-1].content|length > 11",
    "messages[-1].content|upper == messages[-1].content",
    "messages[-1].content.isdigit()",
    "(messages|last)['content']|first == 'h'",
    "messages|map(attribute='content')|list|last == 'HELLO'",
    "messages|selectattr('content', 'equalto', 'HELLO')|list",
    "messages[-1].get('content') == 'HELLO'",
    "{'HELLO': true}[messages[-1].content]",
    "messages[-1].items()|list|length == messages[-1].content|wordcount",
)
AROUND = (  # text before a condition on a name, by the condition
    ("{% set last = messages[-1].content %}", "last[-9:] == '/no_think'"),
    ("{% set last = messages[-1] %}{% set words = last['content'].split() %}", "words|length > 2"),
    ("{% set ns = namespace(quiet=false) %}{% for m in messages %}"
     "{% if '/no_think' in m.content %}{% set ns.quiet = true %}"
     "{% elif '/think' in m.content %}{% set ns.quiet = false %}{% endif %}{% endfor %}", "ns.quiet"),
    ("{% macro quiet(text) %}{{ 'yes' if text[-9:] == '/no_think' }}{% endmacro %}",
     "quiet(messages[-1].content) == 'yes'"),
    ("{% if messages[-1].content[:1] == 'h' %}{% set quiet = true %}{% endif %}", "quiet is defined and quiet"),
    ("{% set quiet %}{{ messages[-1].content[-9:] }}{% endset %}", "quiet == '/no_think'"),
    ("{% set quiet = namespace(now=messages[-1].content[-1:] == 'k') %}", "quiet.now"),
)  # fmt: skip
LENGTHS = ("messages|length > 2", "messages|selectattr('role', 'eq', 'user')|list|length is odd")


def spans_of(template: ChatTemplate, conversation: Conversation) -> list[str]:
    try:
        rendered = template.render(conversation)
    except SequenceError as error:
        return [error.reason]
    return [rendered.text[span.start : span.stop] for span in rendered.spans]


def make(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"eos_token": "</s>"})


def asked(*questions: str) -> Conversation:
    return talk(*itertools.chain.from_iterable((user(one), said("a fine answer")) for one in questions))


def require_same_in_any_order(source: str, rows: Sequence[Conversation]) -> set[str]:
    """Return the trained words, after a check that they do not depend on earlier rows."""
    fresh = [spans_of(make(source), row) for row in rows]
    for order in (range(len(rows)), range(len(rows) - 1, -1, -1)):
        warm = make(source)
        assert {index: spans_of(warm, rows[index]) for index in order} == dict(enumerate(fresh))
    return set(itertools.chain.from_iterable(fresh))


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("before", "condition"), [*(("", one) for one in WORDS), *AROUND], ids=lambda some: str(some)[-40:]
)
def test_a_prompt_that_looks_at_words_decides_about_its_own_row_alone(before: str, condition: str) -> None:
    found = require_same_in_any_order(BODY + before + PROMPT % condition, [asked(one) for one in QUESTIONS])
    assert found == {"a fine answer</s>", "<think></think>a fine answer</s>"}  # the condition is true for some rows


@pytest.mark.parametrize("condition", LENGTHS)
def test_a_prompt_that_counts_messages_decides_about_its_own_turn_alone(condition: str) -> None:
    rows = [asked("one"), asked("one", "two"), asked("one", "two", "three"), asked("one", "two")]
    assert len(require_same_in_any_order(BODY + PROMPT % condition, rows)) == 2


def test_a_prompt_in_the_loop_that_looks_at_words_decides_about_its_own_row_alone() -> None:
    loop = BODY.replace(
        "{% endfor %}",
        "{% if loop.last and add_generation_prompt %}<assistant>{% if m.content[-9:] == '/no_think' %}<think></think>"
        "{% endif %}{% endif %}{% endfor %}",
    )
    assert len(require_same_in_any_order(loop, [asked(one) for one in QUESTIONS])) == 2
    left = "{% for m in messages[-1:] %}{% if m.content[-9:] == '/no_think' %}{% break %}{% endif %}" + (
        "{% if add_generation_prompt %}<assistant><think></think>{% endif %}{% endfor %}"
    )
    assert prompt_varies(TemplateEnvironment(None).parse(BODY + left))


def test_a_field_of_a_message_that_the_prompt_looks_at_decides_about_its_own_row_alone() -> None:
    rows = [talk({**user("hello"), "think": think}, said("a fine answer")) for think in (True, False, "no", 3)]
    source = BODY + PROMPT % "messages[-1].think == false"
    assert len(require_same_in_any_order(source, rows)) == 2


@given(st.lists(st.sampled_from(QUESTIONS), min_size=1, max_size=4), st.sampled_from(WORDS), st.sampled_from(WORDS))
@settings(max_examples=60, deadline=None)
def test_any_two_conditions_decide_about_their_own_turns_alone(questions: list[str], one: str, other: str) -> None:
    source = BODY + PROMPT % f"({one}) != ({other})"
    whole = asked(*questions)
    require_same_in_any_order(source, [asked(questions[0]), whole, asked(*reversed(questions)), whole])


@pytest.mark.parametrize("condition", [*WORDS, *LENGTHS, "messages[-1].role == 'tool'", "(messages|last).tool_calls"])
def test_a_prompt_that_reads_the_messages_may_vary(condition: str) -> None:
    assert prompt_varies(TemplateEnvironment(None).parse(BODY + PROMPT % condition))
    around = "{% if " + condition + " %}" + PROMPT % "true" + "{% endif %}"
    assert prompt_varies(TemplateEnvironment(None).parse(BODY + around))


@pytest.mark.parametrize("before", [before for before, _ in AROUND])
def test_a_prompt_that_reads_what_was_made_of_messages_may_vary(before: str) -> None:
    name = next(name for name in ("last", "words", "ns", "quiet") if f" {name}" in before)
    assert prompt_varies(TemplateEnvironment(None).parse(BODY + before + PROMPT % f"{name} is defined"))


def test_a_prompt_that_reads_what_every_row_is_given_cannot_vary() -> None:
    body = BODY.replace("{{ m.content }}</s>{% endif %}", "{{ m.content.split('/')[-1]|trim }}</s>{% endif %}")
    loop = "{% for m in messages %}{% if m.content == '' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
    default = "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    for condition in ("enable_thinking", "enable_thinking is defined and not enable_thinking", "bos_token"):
        assert not prompt_varies(TemplateEnvironment(None).parse(default + loop + body + PROMPT % condition))
