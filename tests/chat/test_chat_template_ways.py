"""Constructs of public templates that can cause silently wrong masks, or errors for valid rows."""

# ruff: noqa: E501 - templates and conversations, one per line

from __future__ import annotations

import json
from typing import Any

import pytest
from template_styles import CHATML, SPECIAL, STYLES, TOOLS, call, learnt, make, said, talk, trained, turns, user
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_sft_idx.chat.chat_rows import to_sequence_source
from megatron_sft_idx.chat.template import ChatTemplate
from megatron_sft_idx.chat.types import Conversation, MaskOptions
from megatron_sft_idx.errors import SequenceError


def read(*messages: dict[str, Any], **columns: Any) -> Conversation:
    """Return the conversation of a row, as read from a file."""
    conversation = to_sequence_source({"messages": list(messages), **columns})
    assert isinstance(conversation, Conversation)
    return conversation


def asked(function: str, **content: Any) -> dict[str, Any]:
    return {"role": "assistant", **content, "tool_calls": [call(function, {"key": "value"}) | {"id": "call00001"}]}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "call00001"}


# A missing content

WRITES_IT = """
{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}
{%- for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
JOINS_IT = WRITES_IT.replace("{{ m.content }}", "{{ m.content + '' }}")
ASKS_FOR_NONE = WRITES_IT.replace("{{ m.content }}", "{% if m['content'] is not none %}{{ m.content + '' }}{% endif %}")
LOOKS_INTO_IT = WRITES_IT.replace(
    "{{ m.content }}", "{% if '</think>' in m.content %}?{% else %}{{ m.content }}{% endif %}"
)


@pytest.mark.parametrize("content", [{}, {"content": None}])
@pytest.mark.parametrize(
    ("source", "note"),
    [
        (WRITES_IT, "content_left_out"),
        (JOINS_IT, "content_empty"),
        (ASKS_FOR_NONE, "content_empty"),
        (LOOKS_INTO_IT, "content_left_out"),
    ],
)
def test_a_content_that_is_not_there_is_no_word(source: str, note: str, content: dict[str, Any]) -> None:
    rendered = make(source).render(read(user("u"), asked("look", **content), result("r"), said("a")))
    assert trained(rendered) == ['<call>look {"key": "value"}</call><|im_end|>', "a<|im_end|>"]
    assert rendered.notes == {note: 1}


def test_a_function_call_of_sharegpt_is_no_word_either() -> None:
    called = {"from": "function_call", "value": json.dumps({"name": "look", "arguments": {"key": "value"}})}
    turns = [
        {"from": "human", "value": "u"},
        called,
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "a"},
    ]
    conversation = to_sequence_source({"conversations": turns})
    assert isinstance(conversation, Conversation)
    assert learnt(WRITES_IT, conversation) == ['<call>look {"key": "value"}</call><|im_end|>', "a<|im_end|>"]


def test_a_content_that_no_form_of_serves_is_named() -> None:
    source = CHATML.replace("m.content", "(m.content if m.role != 'assistant' else m.content.words.more)")
    with pytest.raises(SequenceError) as caught:
        make(source).render(read(user("u"), asked("look"), result("r"), said("a")))
    assert "messages[1].content is missing or null" in caught.value.reason


# Templates that look at other messages while writing one

LOOKS_UP = """
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>tool ' }}
{%- for e in messages %}{% if e.role == 'assistant' and e.tool_calls %}{% for c in e.tool_calls %}
{%- if c.id == m.tool_call_id %}{{ c.function.name + '\n' }}{% endif %}
{%- endfor %}{% endif %}{% endfor %}
{{- m.content + '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' + c.function.arguments | tojson + '</call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_a_message_that_is_looked_at_is_not_what_is_written() -> None:
    conversation = talk(user("u"), asked("look", content=""), result("r"), said("a"), tools=TOOLS)
    rendered = make(LOOKS_UP).render(conversation)
    assert "<|im_start|>tool look\nr<|im_end|>" in rendered.text
    assert trained(rendered) == ['<call>look {"key": "value"}</call><|im_end|>', "a<|im_end|>"]


# Text before the first turn, and before the prompt

DEFAULT_SYSTEM = CHATML.replace(
    "{{- '<|im_start|>' + m.role",
    "{%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nBe good<|im_end|>\n' }}{% endif %}{{- '<|im_start|>' + m.role",
)


@pytest.mark.parametrize("source", [DEFAULT_SYSTEM, DEFAULT_SYSTEM.replace("add_generation_prompt", "false")])
def test_a_default_system_prompt_before_the_assistant_is_not_learnt(source: str) -> None:
    conversation = talk(said("a"), user("u"), said("b"))
    assert "system\nBe good" in make(source).render(conversation).text
    assert learnt(source, conversation) == ["a<|im_end|>", "b<|im_end|>"]


PROMPT_WITH_SYSTEM = CHATML.replace(
    "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>system\nCall a tool<|im_end|>\n<|im_start|>assistant\n' }}"
)


def test_a_prompt_that_begins_with_a_system_text_hides_no_header() -> None:
    conversation = talk(user("u"), said("a"), user("v"), said("b"), said("c"))
    assert learnt(PROMPT_WITH_SYSTEM, conversation) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]


WORDS_WITH_SYSTEM = """
{%- for m in messages %}{{ m.role + ': ' + m.content + '</s>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'system: Call a tool\nassistant: ' }}{% endif %}"""


def test_such_a_prompt_of_words_alone_takes_no_white_space_of_an_answer() -> None:
    assert learnt(WORDS_WITH_SYSTEM, talk(user("u"), said("\n a"))) == ["\n a</s>"]


# Ends of turns

ENDS_WITH_THE_TEXT = """
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""


def test_what_two_markers_begin_with_ends_no_turn() -> None:
    template = ChatTemplate(ENDS_WITH_THE_TEXT, special_tokens=SPECIAL)
    conversation = talk(user("u"), said("a"), user("v"), said("b"), said("c"))
    assert trained(template.render(conversation)) == ["a", "b", "c</s>"]  # without the < that <|user|> and </s> share


NO_PROMPT_ARGUMENT = """
{%- for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content + '<|eot|>' }}{% endfor %}
{{- '<|head|>assistant<|/head|>\n\n' }}"""
WORDS_BEHIND = """
{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ 'assistant: ' }}"""


@pytest.mark.parametrize(("source", "end"), [(NO_PROMPT_ARGUMENT, "<|eot|>"), (WORDS_BEHIND, "")])
def test_a_prompt_that_is_always_there_ends_no_turn(source: str, end: str) -> None:
    conversation = talk(user("u"), said("one"), said("two"), said("three"), user("v"), said("four"), said("five"))
    assert learnt(source, conversation) == [text + end for text in ("one", "two", "three", "four", "five")]


ALWAYS_OPENS = """{{ bos_token }}
{%- for m in messages %}
{{- '<' + m.role + '>' + m.content }}{% if m.role == 'user' %}</u>{% elif not loop.last %}</a>{% endif %}
{%- endfor %}<assistant>"""
TELLS_A_SYSTEM = ALWAYS_OPENS.replace(
    "{{- '<' +", "{{- '<system>Be good</u>' if loop.first and m.role != 'system' }}{{ '<' +"
)


@pytest.mark.parametrize("source", [ALWAYS_OPENS, TELLS_A_SYSTEM])
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([said("aa bb.")], ["aa bb."]),
        ([said("aa bb."), said("cc dd.")], ["aa bb.</a>", "cc dd."]),
        ([said(""), said("aa bb.")], ["</a>", "aa bb."]),
        ([user("u"), said("aa bb.")], ["aa bb."]),
        ([{"role": "system", "content": "s"}, said("aa bb.")], ["aa bb."]),
        ([said("aa bb."), user("u"), said("cc dd.")], ["aa bb.</a>", "cc dd."]),
    ],
)
def test_a_prompt_that_is_always_there_ends_no_answer_without_a_question(
    source: str, messages: list[dict[str, Any]], expected: list[str]
) -> None:
    controls = ["<user>", "<assistant>", "<system>", "</u>", "</a>"]
    rendered = ChatTemplate(source, special_tokens=SPECIAL, control_tokens=controls).render(talk(*messages))
    assert rendered.text.endswith(".<assistant>")
    assert trained(rendered) == expected
    assert rendered.notes["no_end_of_turn"] == 1


ENDS_BEFORE_HEADERS = """<|head|>
{%- set ns = namespace(count=0) %}
{%- for m in messages %}
{%- if ns.count %}{{ '<|end|>' }}{% endif %}{{ '<|start|>' + m.role + ' ' + m.content }}{% set ns.count = ns.count + 1 %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|end|><|start|>assistant' }}{% else %}{{ '<|end|>' }}{% endif %}"""


def test_an_end_that_stands_before_every_header_is_learnt() -> None:
    conversation = talk(user("u"), said("a"), user("v"), said("b"), said("c"))
    assert learnt(ENDS_BEFORE_HEADERS, conversation) == [" a<|end|>", " b<|end|>", " c<|end|>"]


END_BEFORE_A_WORD = """
{%- set ns = namespace(open=false) %}
{%- for m in messages %}
{%- if ns.open %}{{ eos_token }}{% endif %}{{ m.role + ': ' + m.content + '\n' }}{% set ns.open = m.role == 'assistant' %}
{%- endfor %}
{%- if ns.open %}{{ eos_token }}{% endif %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
TRIMS_ALL = """
{%- set ns = namespace(open=false) %}
{%- set all %}
{%- for m in messages %}
{%- if ns.open %}{{ '<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- if m.role == 'user' %}{{ '<|im_end|>\n' }}{% endif %}{% set ns.open = m.role == 'assistant' %}
{%- endfor %}
{%- endset %}{{ all | trim }}
{%- if ns.open %}{{ '<|im_end|>\n' }}{% endif %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_an_end_of_sequence_right_before_a_word_is_learnt() -> None:
    conversation = talk(user("u"), said("a"), user("v"), said("b"))
    assert learnt(END_BEFORE_A_WORD, conversation) == ["a\n</s>", "b\n</s>"]


def test_a_beginning_that_is_trimmed_elsewhere_hides_no_header() -> None:
    conversation = talk(user("u"), said("a"), user("v"), said(""), said("b"), user("w"), said("c"))
    assert "b<|im_end|>" in learnt(TRIMS_ALL, conversation)


def test_text_behind_all_messages_is_nobody_s() -> None:
    source = CHATML.replace(
        "{%- endfor %}", "{%- endfor %}{{ '<|im_end|>\nWas the assistant good?<|im_end|>\n' }}"
    ).replace(" + '<|im_end|>\n' }}\n{%- endfor", " }}\n{%- endfor")
    rendered = make(source).render(talk(user("u"), said("a")))
    assert rendered.text.endswith("assistant\na<|im_end|>\nWas the assistant good?<|im_end|>\n")
    assert trained(rendered) == ["a<|im_end|>"]


# Templates that tracing cannot follow

COPIES = """
{%- set ns = namespace(listed=[]) %}
{%- for m in messages %}{% set ns.listed = ns.listed + [{'role': m.role, 'content': m.content, 'tool_calls': m.tool_calls}] %}{% endfor %}
{%- for m in ns.listed %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
COLLECTS = """
{%- set ns = namespace(out='') %}
{%- for m in messages %}{% set ns.out = ns.out + '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' %}{% endfor %}
{%- if add_generation_prompt %}{% set ns.out = ns.out + '<|im_start|>assistant\n' %}{% endif %}{{ ns.out }}"""
LAST_OUTSIDE = """
{%- for m in messages[:-1] %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- set m = messages[-1] %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.mark.parametrize("source", [COPIES, COLLECTS, LAST_OUTSIDE], ids=["copies", "collects", "last outside"])
def test_where_tracing_cannot_follow_beginnings_and_marks_do(source: str) -> None:
    messages = [user("ask one"), said("answer one"), user("ask two"), said("answer two "), said("user")]
    rendered = make(source).render(talk(*messages))
    assert trained(rendered) == ["answer one<|im_end|>", "answer two <|im_end|>", "user<|im_end|>"]
    stock, _ = render_jinja_template([messages], chat_template=source, **SPECIAL)
    assert rendered.text == stock[0]


@pytest.mark.parametrize("arguments", [{}, {"key": "value"}])
def test_where_tracing_cannot_follow_a_call_is_learnt_whole(arguments: dict[str, str]) -> None:
    """A control token inside a call does not end the turn, even if the rest of the call does not come from the data."""
    source = COPIES.replace(
        "+ m.content + '<|im_end|>", "+ (m.content or '') }}{% for c in m.tool_calls or [] %}{{ '[CALL]' + c.function.name + "
        "'[ID]abc1[ARGS]' + c.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>"
    )  # fmt: skip
    controls = ["<|im_end|>", "[CALL]", "[ID]", "[ARGS]"]
    template = ChatTemplate(
        source, special_tokens=SPECIAL, control_tokens=controls, options=MaskOptions(earlier_reasoning="drop")
    )
    calls = {"tool_calls": [call("look", arguments)]}
    rendered = template.render(
        read(user("ask one"), {"role": "assistant", "content": "", **calls}, result("r"), said("a"))
    )
    assert trained(rendered) == [f"[CALL]look[ID]abc1[ARGS]{json.dumps(arguments)}<|im_end|>", "a<|im_end|>"]


def test_where_tracing_cannot_follow_text_behind_all_messages_is_nobody_s() -> None:
    ends = "{% if not loop.last %}{% set ns.out = ns.out + '<|im_end|>\n' %}{% endif %}{% endfor %}"
    source = COLLECTS.replace(" + '<|im_end|>\n' %}{% endfor %}", " %}" + ends)
    source = source.replace("{%- if add", "{% set ns.out = ns.out + '\nWas it good?\n' %}{% if add")
    with pytest.raises(SequenceError, match="than at the end of the conversation"):
        make(source).render(talk(user("ask one"), said("answer one"), user("ask two"), said("answer two")))
    alike = source.replace("not loop.last", "true")
    rendered = make(alike).render(talk(user("ask one"), said("answer one"), user("ask two"), said("answer two")))
    assert rendered.text.endswith("answer two<|im_end|>\n\nWas it good?\n")
    assert trained(rendered) == ["answer one<|im_end|>", "answer two<|im_end|>"]


# Arguments of calls

PASTES = """
{%- for m in messages %}
{%- if m.role == 'assistant' and m['content'] is none %}
{{- '<|Assistant|>' }}{% for c in m.tool_calls %}{{ '<call>' + c.function.name + '\n' + c.function.arguments + '</call>' }}{% endfor %}{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content + eos_token }}
{%- elif m.role == 'tool' %}{{ '<result>' + m.content + '</result>' }}
{%- else %}{{ '<|User|>' + m.content }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""


def test_arguments_are_text_where_the_template_pastes_them_and_nothing_is_said_beside() -> None:
    rendered = make(PASTES).render(read(user("u"), asked("look", content=None), result("r"), said("a")))
    assert trained(rendered) == ['<call>look\n{"key": "value"}</call></s>', "a</s>"]
    assert rendered.notes["tool_arguments_converted"] == 1


def test_arguments_that_the_template_leaves_out_are_an_error() -> None:
    source = WRITES_IT.replace(" {{ c.function.arguments | tojson }}", "")
    for one in (
        source,
        source.replace("{{ m.content }}", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}").replace(
            "<|im_end|>", "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        ),
    ):
        with pytest.raises(SequenceError, match="drops values of the arguments of the calls of assistant message 2"):
            make(one).render(read(user("u"), asked("look"), result("r"), said("a")))
        assert len(make(one).render(read(user("u"), said("a"))).spans) == 1


# Generation markers

ENDS_WITH_NEXT = """
{%- set ns = namespace(open=false) %}
{%- for m in messages %}
{%- if ns.open %}{% generation %}{{ '<|end|>\n' }}{% endgeneration %}{% set ns.open = false %}{% endif %}
{%- if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content }}{% endgeneration %}{% set ns.open = true %}
{%- else %}{{ '<|' + m.role + '|>' + m.content + '\n' }}{% endif %}
{%- endfor %}
{%- if ns.open %}{% generation %}{{ '<|end|>\n' }}{% endgeneration %}{% endif %}"""
MARKED_LAST_OUTSIDE = """
{%- for m in messages[:-1] %}
{%- if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}
{%- else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}
{%- endfor %}<|assistant|>{% generation %}{{ messages[-1].content + '<|end|>' }}{% endgeneration %}"""


def test_a_marked_end_that_is_written_with_what_comes_next_goes_with_the_turn() -> None:
    conversation = talk(user("u"), said("a"), user("v"), said("b"), said("c"))
    rendered = make(ENDS_WITH_NEXT).render(conversation)
    assert "".join(trained(rendered)) == "a<|end|>\nb<|end|>\nc<|end|>\n"
    _, marked = render_jinja_template(
        [conversation.messages], chat_template=ENDS_WITH_NEXT, return_assistant_tokens_mask=True, **SPECIAL
    )
    assert [(span.start, span.stop) for span in rendered.spans] == list(marked[0])


def test_a_marked_answer_outside_the_loop_is_the_last_message_s() -> None:
    messages = [user("u"), said("a"), user("v"), said("b")]
    assert learnt(MARKED_LAST_OUTSIDE, talk(*messages)) == ["a<|end|>", "b<|end|>"]
    assert learnt(MARKED_LAST_OUTSIDE, talk(*messages, weights=[1, 1, 1, 0])) == ["a<|end|>"]
    assert learnt(MARKED_LAST_OUTSIDE, talk(*messages), train_on="last-turn") == ["b<|end|>"]


# Results of one chat that must not be reused for the next

ASSISTANT = (
    "{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content SHOWN + '<|im_end|>\n' }}{% else %}"
)
GUESTS = {
    "a long question": ASSISTANT.replace("SHOWN", "+ (messages[loop.index0 - 1].content if messages[loop.index0 - 1].content | length > 20 else '')"),
    "with calls": ASSISTANT.replace("m.content SHOWN", "(m.tool_calls[0].function | tojson) + (messages[loop.index0 - 1].content if messages[loop.index0 - 1].content | length > 20 else '')"),
    "measured": "{%- if not loop.first %}{{ messages[loop.index0 - 1].content | length }}{% endif %}" + ASSISTANT.replace("SHOWN", "+ (messages[loop.index0 - 1].content if messages[loop.index0 - 1].content | length > 20 else '')"),
}  # fmt: skip


@pytest.mark.parametrize("name", GUESTS)
def test_words_of_a_question_in_an_answer_s_text_are_never_learnt(name: str) -> None:
    source = CHATML.replace("{%- for m in messages %}", "{%- for m in messages %}" + GUESTS[name]).replace(
        "{%- endfor", "{%- endif %}{%- endfor"
    )
    calls = {"tool_calls": [call("look", {"key": "value"})]} if name == "with calls" else {}
    template = make(source)
    assert len(template.render(talk(user("short one"), said("", **calls) if calls else said("indeed"))).spans) == 1
    for _ in range(2):
        with pytest.raises(SequenceError, match=r"words of message 1 in|cannot be traced"):
            template.render(
                talk(user("a question of more than twenty letters"), said("", **calls) if calls else said("a"))
            )
    assert len(template.render(talk(user("other"), said("", **calls) if calls else said("b"))).spans) == 1


THINKS_AS_TOLD = CHATML.replace(
    "+ m.content", "+ ('<think>\n\n</think>\n\n' if m.role == 'assistant' else '') + m.content"
).replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% if '/no_think' in messages[0].content %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)
ENDS_OF_CALLS = """
{%- for m in messages %}
{%- if m.tool_calls %}<|im_start|>assistant\n{% for c in m.tool_calls %}
{%- if c.function.arguments %}{{ '<call>' + c.function.name + ' ' + c.function.arguments | tojson + '</call><|im_end|>' }}
{%- else %}{{ '<call>' + c.function.name + '</call></calls><|im_end|>' }}{% endif %}{% endfor %}
{%- elif m.role == 'tool' %}<|im_start|>tool\n{{ m.content + '<|im_end|>' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""


def told(text: str) -> Conversation:
    return talk({"role": "system", "content": text}, {"role": "developer", "content": "d"}, user("u"), said("a"))


@pytest.mark.parametrize(
    ("source", "chats"),
    [
        (THINKS_AS_TOLD, [told("think"), told("/no_think")]),
        (ENDS_OF_CALLS, [talk(user("u"), said("", tool_calls=[call("look", some)]), result("r"), said("a")) for some in ({"key": 1}, {})]),
    ],
)  # fmt: skip
def test_the_order_of_chats_decides_nothing(source: str, chats: list[Conversation]) -> None:
    alone = [make(source).render(chat) for chat in chats]
    for order in (chats, chats[::-1]):
        template = make(source)
        together = {id(chat): template.render(chat) for chat in order}
        assert [together[id(chat)] for chat in chats] == alone
    assert alone[0].spans != alone[1].spans


# Tags around reasoning, and turns that a template refuses by themselves


def test_a_tag_of_the_answer_s_own_is_learnt_where_no_prompt_writes_it() -> None:
    source = CHATML.replace("{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", "").replace(
        "<|im_start|>", ""
    )
    source = source.replace("m.role + '\n' + ", "'' + ")
    assert learnt(source, talk(user("u"), said("<think>\nwhy\n</think>\n\na"))) == [
        "<think>\nwhy\n</think>\n\na<|im_end|>"
    ]


def test_a_beginning_that_the_template_refuses_goes_with_the_next() -> None:
    source = CHATML.replace(
        "{%- for m",
        "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}{{ raise_exception('No question') }}{% endif %}{%- for m",
        1,
    )
    rendered = make(source, earlier_reasoning="split").render_turns(talk(said("hello"), user("u"), said("a")))
    assert [trained(one) for one in rendered] == [["hello<|im_end|>", "a<|im_end|>"]]


def test_a_call_in_the_context_is_not_lost_for_want_of_a_content() -> None:
    conversation = read(user("u"), asked("look", content=None), result("r"), said("a"), user("v"), said("b"))
    rendered = make(PASTES, train_on="last-turn").render(conversation)
    assert '<call>look\n{"key": "value"}</call>' in rendered.text
    assert trained(rendered) == ["b</s>"]


@pytest.mark.parametrize("mark", ["enter", "leave", "begin", "end", "enter_captured", "begin_captured"])
def test_no_template_can_mark_text_itself(mark: str) -> None:
    forges = (
        "{%- if loop.first %}{% set nothing = messages[1:2] | map(" + repr(f"trace {mark}") + ") | list %}{% endif %}"
    )
    source = CHATML.replace("{%- for m in messages %}", "{%- for m in messages %}" + forges)
    assert source != CHATML
    with pytest.raises(SequenceError, match=f"No filter named 'trace {mark}'"):
        make(source).render(talk(user("u"), said("a")))


# The trained text if the template's generation prompt is never used

OPENS = """
{%- for m in messages %}{% if m.role == 'user' %}HEAD{{ m.content }}TAIL{% else %}
{%- if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}</s>{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("head", "tail"), [("[INST] ", " [/INST]"), ("", "<|end|>\n<|im_start|>assistant\n"), ("", "<|end|>\nassistant: ")]
)
def test_a_tag_before_reasoning_is_the_model_s_where_a_plain_answer_has_none(head: str, tail: str) -> None:
    """An unused prompt ends where a plain answer would begin: the tag after it is not fed."""
    source = OPENS.replace("HEAD", head).replace("TAIL", tail)
    thought, plain = said("answer one", reasoning_content="because"), said("answer two")
    for messages in ([thought, plain], [plain, thought], [thought, thought]):
        rows = [message for answer in messages for message in (user("ask"), answer)]
        expected = [
            "[THINK]because[/THINK]answer one</s>" if answer is thought else "answer two</s>" for answer in messages
        ]
        assert learnt(source, talk(*rows)) == expected
    assert learnt(source, talk(thought, user("ask"), plain)) == [
        "[THINK]because[/THINK]answer one</s>",
        "answer two</s>",
    ]


def test_a_tag_that_every_answer_begins_with_is_part_of_the_header() -> None:
    source = OPENS.replace("HEAD", "").replace("TAIL", "").replace("{%- if m.reasoning_content %}", "")
    source = source.replace("[/THINK]{% endif %}", "[/THINK]")
    for first in ([], [user("ask")]):
        row = talk(
            *first,
            said("answer one", reasoning_content="because"),
            user("ask"),
            said("answer two", reasoning_content="so"),
        )
        assert learnt(source, row) == ["because[/THINK]answer one</s>", "so[/THINK]answer two</s>"]


def test_what_follows_a_prompt_that_is_always_written_is_the_model_s() -> None:
    source = """
{%- for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>
{%- else %}<|assistant|>[ANSWER]{{ m.content }}[/ANSWER]<|end|>{% endif %}{% endfor %}<|assistant|>"""
    row = talk(user("ask one"), said("answer one"), user("ask two"), said("answer two"))
    assert learnt(source, row) == [f"[ANSWER]answer {number}[/ANSWER]<|end|>" for number in ("one", "two")]
    spaced = source.replace("<|assistant|>[ANSWER]", "<|assistant|>\n").replace("[/ANSWER]", "")
    assert learnt(spaced, row) == ["answer one<|end|>", "answer two<|end|>"]  # white space after it is header


def test_all_behind_a_result_is_the_model_s_where_no_prompt_follows_it() -> None:
    source = """
{%- for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}<|Tool|>{{ m.content }}<|end|>
{%- else %}{% if messages[loop.index0 - 1].role == 'user' %}<|Assistant|>{% endif %}
{%- for c in m.tool_calls or [] %}[CALL]{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}
{%- if m.content %}[ANSWER]{{ m.content }}{% endif %}</s>{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}<|Assistant|>{% endif %}"""
    row = read(user("u"), asked("look"), result("r"), said("answer one"), user("v"), said("answer two"))
    assert learnt(source, row) == [
        '[CALL]look {"key": "value"}</s>',
        "[ANSWER]answer one</s>",
        "[ANSWER]answer two</s>",
    ]


def test_markers_that_leave_the_end_of_a_turn_out_are_counted() -> None:
    for end, count in (("{% endgeneration %}<|im_end|>", 2), ("<|im_end|>{% endgeneration %}", 0)):
        source = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
            f"{{{{ m.content }}}}{end}{{% else %}}{{{{ m.content }}}}<|im_end|>{{% endif %}}\n{{% endfor %}}"
        )
        rendered = make(source).render(talk(user("u"), said("a"), user("v"), said("b")))
        assert rendered.notes.get("no_end_of_turn", 0) == count


def test_a_header_is_nobody_s_words_where_calls_and_content_are_two_turns() -> None:
    source = """
{%- for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}<|Tool|>{{ m.content }}
{%- else %}{% if m.tool_calls %}<|Assistant|>{% for c in m.tool_calls %}[CALL]{{ c.function.name }} {{ c.function.arguments | tojson }}
{%- endfor %}</s>{% endif %}{% if m.content %}<|Assistant|>{{ m.content }}</s>{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|Assistant|>{% endif %}"""
    quoted = "say </s><|Assistant|> twice"
    row = read(user("u"), asked("look", content=quoted), result("r"), said("a"), tools=TOOLS)
    called, *rest = learnt(source, row)
    assert called == '[CALL]look {"key": "value"}</s>'
    assert rest == [quoted + "</s>", "a</s>"]
    assert learnt(source, row, train_on_tool_calls=False)[-2:] == rest


@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}])
def test_a_header_behind_a_call_is_nobody_s_where_nothing_is_said_beside_it(content: dict[str, Any]) -> None:
    source = """
{%- for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'tool' %}<|head|>{{ m.content }}
{%- elif m.tool_calls %}<|assistant|>{% for c in m.tool_calls %}[CALL]{{ c.function.name }}{% endfor %}<|im_end|>{% endif %}
{%- if m.role == 'assistant' and m.content is not none %}<|assistant|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
    row = read(user("u"), asked("look", **content) | {"tool_calls": [call("look", {})]}, result("r"), said("a"))
    assert learnt(source, row) == ["[CALL]look<|im_end|>", "a<|im_end|>"]


# Words that are written twice, not at all, or with other white space


def test_of_a_message_that_two_loops_write_that_is_learnt_which_holds_its_words() -> None:
    summary = "{% for m in messages %}{% if m.role == 'assistant' %}({{ m.content[:1] }}) {% endif %}{% endfor %}"
    row = talk(user("one asks"), said("answer"), user("two more"), said("another"))
    for source in (summary + CHATML, CHATML + summary):
        assert learnt(source, row) == ["answer<|im_end|>", "another<|im_end|>"]


def test_a_turn_of_reasoning_alone_that_the_template_leaves_out_is_counted() -> None:
    source = CHATML.replace("for m in messages", "for m in messages if m.content")
    row = talk(user("u"), {"role": "assistant", "content": "", "reasoning_content": "thought"}, user("v"), said("b"))
    rendered = make(source, earlier_reasoning="drop").render(row)
    assert trained(rendered) == ["b<|im_end|>"]
    assert rendered.notes["reasoning_dropped"] == 1
    with pytest.raises(SequenceError, match="drops the reasoning of assistant message 2"):
        learnt(source, row)


def test_words_are_there_with_other_white_space_too() -> None:
    source = CHATML.replace("m.content +", "(m.content.split() | join(' ')) +")
    assert learnt(source, talk(user("u"), said("two\n  lines"))) == ["two lines<|im_end|>"]


def test_where_tracing_cannot_follow_the_beginning_of_the_next_sequence_is_nobody_s() -> None:
    source = """
{%- set out %}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s><s>
{%- endif %}{% endfor %}{% endset %}{{ '<s>' + out }}{{ '' if out | length > 1 else 'none' }}"""
    assert learnt(source, talk(user("u"), said("a"), user("v"), said("b"))) == ["a</s>", "b</s>"]


# Templates without a generation prompt

ONE_ANSWER = (
    "### Instruction:\n{{ messages[0]['content'] }}\n\n"
    "{% if messages|length > 1 %}### Response:\n{{ messages[1]['content'] }}{{ eos_token }}{% endif %}"
)
PAIRS_OF_ROWS = "{% for b in messages|batch(2) %}Q: {{ b[0].content }}\n{% if b|length > 1 %}A: {{ b[1].content }}</s>{% endif %}{% endfor %}"
COLLECTED = (
    "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ '<|im_start|>' ~ m.role ~ '\n'"
    " ~ m.content ~ '<|im_end|>\n' %}{% endfor %}{{ ns.t }}"
)


@pytest.mark.parametrize(("source", "end"), [(ONE_ANSWER, "</s>"), (PAIRS_OF_ROWS, "</s>"), (COLLECTED, "<|im_end|>")])
def test_no_header_is_learnt_where_nothing_tells_who_wrote_it(source: str, end: str) -> None:
    assert learnt(source, talk(user("What is it?"), said("It is fourteen dogs."))) == ["It is fourteen dogs." + end]


@pytest.mark.parametrize("words", ["    return x\n", "\n\nIndeed", "plain"])
@pytest.mark.parametrize("header", ["<|im_start|>assistant\n", "[/INST] "])
def test_white_space_that_an_answer_begins_with_is_learnt(words: str, header: str) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}{% else %}"
        f"{header}{{{{ m.content }}}}</s>{{% endif %}}{{% endfor %}}"
    )
    assert learnt(source, talk(user("u"), said(words), user("v"), said("ok"))) == [words + "</s>", "ok</s>"]


@pytest.mark.parametrize("words", ["", "  ", "</think>", "<think>\n</think>\n"])
def test_an_empty_answer_is_refused_where_nothing_tells_what_was_written_for_it(words: str) -> None:
    row = talk(user("Say nothing."), said(words), user("Thanks a lot."), said("Welcome indeed."))
    assert learnt(CHATML, row) == [words + "<|im_end|>", "Welcome indeed.<|im_end|>"]
    with pytest.raises(SequenceError, match="assistant message 2 is empty, so the text that the chat template"):
        learnt(COLLECTED, row)


def test_later_reasoning_in_an_answer_is_counted() -> None:
    row = talk(user("u"), said("<think>one</think>first<think>two</think>second"))
    rendered = make(CHATML, train_on_thinking=False).render(row)
    assert trained(rendered) == ["first<think>two</think>second<|im_end|>"]
    assert rendered.notes == {"thinking_tags_kept": 1}


# The end of turn after a call, and empty answers

STOPS_BEHIND_CALLS = """
{%- for m in messages %}
{%- if m.role == 'tool' %}<|tool_response>{{ m.content }}<tool_response|>
{%- else %}{% if not (m.role == 'assistant' and loop.index0 and messages[loop.index0 - 1].role == 'tool') %}<|turn>{{ m.role }}\n{% endif %}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}{{ m.content }}
{%- if not m.tool_calls %}<turn|>\n{% elif loop.last %}<|tool_response>{% endif %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|turn>assistant\n{% endif %}"""


def test_what_stops_a_model_behind_a_call_is_learnt_wherever_a_call_ends_a_turn() -> None:
    controls = ["<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>"]
    template = ChatTemplate(STOPS_BEHIND_CALLS, special_tokens=SPECIAL, control_tokens=controls)
    called = asked("look", content="") | {"tool_calls": [call("look", {})]}
    ended = "<call>look</call><|tool_response>"
    assert trained(template.render(read(user("u"), called))) == [ended]
    messages = [user("u"), called, result("r"), called, result("s"), said("a"), user("v"), said("b")]
    assert trained(template.render(read(*messages))) == [ended, ended, "a<turn|>", "b<turn|>"]


def test_answers_without_words_whose_end_of_turn_is_learnt_are_counted() -> None:
    rendered = make(CHATML).render(talk(user("u"), said(""), user("v"), said("b")))
    assert trained(rendered) == ["<|im_end|>", "b<|im_end|>"]
    assert rendered.notes == {"ends_of_turn_alone": 1}


def test_an_answer_may_quote_a_list_of_content_parts() -> None:
    only_parts = CHATML.replace("m.content", "m.content[0].text")
    quoted = "Print it: [{'type': 'text', 'text': 'x'}]"
    assert learnt(only_parts, talk(user("u"), said(quoted))) == [quoted + "<|im_end|>"]


@pytest.mark.parametrize("footer", ["Was it good?\n", "<|note|>said"])
def test_words_behind_an_end_of_turn_are_learnt_in_no_turn(footer: str) -> None:
    source = CHATML.replace("<|im_end|>\n'", "<|im_end|>\n' + (FOOTER if m.role == 'assistant' else '')")
    source = source.replace("FOOTER", repr(footer))
    assert learnt(source, talk(user("u"), said("a"), user("v"), said("b"))) == ["a<|im_end|>", "b<|im_end|>"]


def test_a_template_that_prints_a_message_in_each_iteration_trains_no_other_s_words() -> None:
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ messages[0] }}</s>{% endfor %}"
    with pytest.raises(SequenceError, match="writes words of message 1 in what it writes for assistant message 2"):
        learnt(source, talk(user("ask me"), said("answer you")))


HEADER_BEHIND_CALLS = """
{%- for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}<|Tool|>{{ m.content }}
{%- else %}{% if m.tool_calls %}<|Assistant|>{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}</s>{% endif %}
{%- if m.content is string and not (loop.index0 and messages[loop.index0 - 1].role == 'tool') %}<|Assistant|>{{ m.content }}</s>{% elif m.content %}{{ m.content }}</s>{% endif %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"""


def test_a_call_without_arguments_is_learnt_where_a_header_follows_it() -> None:
    row = talk(
        user("u"), {"role": "assistant", "content": "", "tool_calls": [call("look", {})]}, result("r"), said("a")
    )
    found = "".join(trained(make(HEADER_BEHIND_CALLS).render(row)))
    assert found.startswith("<call>look {}</call></s>")


CLOSES_THINKING = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n</think>' }}").replace(
    "{{- '<|im_start|>' + m.role + '\n'",
    "{{- '<|im_start|>' + m.role + '\n' + ('</think>' if m.role == 'assistant' else '')",
)


def test_a_closing_tag_that_an_answer_quotes_does_not_move_its_beginning() -> None:
    quotes = "first </think> second"
    assert learnt(CLOSES_THINKING, talk(user("u"), said(quotes))) == [quotes + "<|im_end|>"]


# Messages that a template leaves out

# Ways in which templates write the content of a message other than an answer.
WAYS = (
    "m.content", "m.content | trim", "m.content | upper", "m.content | tojson", "m.content | e", "m.content[:3]",
    "m.content[-3:]", "m.content | replace('e', '')", "m.content | string | list", "m.content.split()[0]",
    "m.content | length", "messages[0].content + m.content",
)  # fmt: skip
PROMPTS = ("system", "developer", "user", "tool")


def omitting(way: str, role: str = "") -> ChatTemplate:
    """Return a template that writes contents in this way, but none of messages with this role."""
    return make(
        "{%- for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content }}</a>"
        f"{{% elif m.role != '{role}' %}}<q>{{{{ {way} }}}}</q>{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}<a>{% endif %}",
        train_on="all",
    )


def prompted(*texts: str) -> Conversation:
    """Return a conversation with a message of each role."""
    return read(*({"role": role, "content": text} for role, text in zip(PROMPTS, texts, strict=True)), said("yes"))


TEXTS = ('\n{"rule": "<one>\té"}  ', "second\n\nthing ", " third 'text'", '["fourth & last"]')


@pytest.mark.parametrize("way", WAYS)
def test_messages_that_are_left_out_are_noted_however_the_others_are_written(way: str) -> None:
    assert omitting(way).render(prompted(*TEXTS)).notes == {}
    for role in PROMPTS:
        rendered = omitting(way if "messages[0]" not in way or role != "system" else "m.content", role)
        assert rendered.render(prompted(*TEXTS)).notes == {f"left_out_message:{role}": 1}


@pytest.mark.parametrize("name", STYLES)
def test_no_style_leaves_out_a_message_except_one_without_system_messages(name: str) -> None:
    style = STYLES[name]
    conversation = talk(*turns(style, 3))
    for choice in ("drop", "split"):
        rendered = make(style.source, earlier_reasoning=choice).render_turns(conversation)
        notes = [note for one in rendered for note in one.notes if note.startswith("left_out_message")]
        assert notes == (["left_out_message:system"] if name == "jumps" else [])


def test_a_message_is_left_out_of_all_texts_of_a_conversation_or_of_none() -> None:
    thinks = [said(f"answer{turn}", reasoning_content=f"because{turn}") for turn in range(3)]
    turned = [message for turn in range(3) for message in (user(f"ask{turn}"), thinks[turn])]
    source = CHATML.replace(
        "m.content", "m.content + (m.reasoning_content if loop.last and m.reasoning_content else '')"
    )
    source = source.replace("for m in messages", "for m in messages if m.role != 'system'")
    for conversation in ([*turned], [*turned, user("more")]):
        row = talk({"role": "system", "content": "rules"}, *conversation)
        rendered = make(source, earlier_reasoning="split").render_turns(row)
        assert len(rendered) > 1
        assert [one.notes.get("left_out_message:system", 0) for one in rendered] == [1] + [0] * (len(rendered) - 1)


def test_messages_are_left_out_with_generation_markers_and_content_parts_too() -> None:
    row = talk({"role": "developer", "content": "rules"}, user("ask"), said("answer"))
    for name in ("marked", "parts"):
        source = STYLES[name].source.replace("for m in messages", "for m in messages if m.role != 'developer'")
        for train_on in ("assistant", "all") if name == "parts" else ("assistant", "markers", "all"):
            rendered = make(source, train_on=train_on).render(row)
            assert rendered.notes.get("left_out_message:developer") == 1
