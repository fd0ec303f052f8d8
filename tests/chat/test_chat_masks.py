"""The effect of options, weights, generation markers and control tokens on trained spans."""

# ruff: noqa: E501 - templates and conversations, one per line

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_styles import (
    ACCUMULATES,
    CHATML,
    CONTROLS,
    MEASURES,
    SPECIAL,
    STYLES,
    TOOLS,
    call,
    learnt,
    make,
    said,
    stock_text,
    talk,
    trained,
    turns,
    user,
)
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_sft_idx.chat.template import ChatTemplate
from megatron_sft_idx.chat.types import MaskOptions, Rendered, Span
from megatron_sft_idx.errors import FormatError, SequenceError

# Options and weights


def test_last_turn_is_what_follows_the_last_question_tools_included() -> None:
    messages = turns(STYLES["tools"], 2)
    rendered = make(STYLES["tools"].source, train_on="last-turn").render(talk(*messages, tools=TOOLS))
    everything = make(STYLES["tools"].source).render(talk(*messages, tools=TOOLS))
    assert rendered.spans == everything.spans[2:]
    assert len(rendered.spans) == 2


def test_last_turn_without_a_question_is_everything() -> None:
    assert learnt(CHATML, talk(said("a"), said("b")), train_on="last-turn") == ["a<|im_end|>", "b<|im_end|>"]


def test_all_trains_every_character_even_where_tracing_fails() -> None:
    for source in (CHATML, ACCUMULATES, MEASURES):
        rendered = make(source, train_on="all").render(talk(user("u"), said("a")))
        assert rendered.spans == [Span(0, len(rendered.text))]


def test_all_with_weights_leaves_the_rest_at_one() -> None:
    messages = talk(user("u"), said("aa"), user("v"), said("bb"), weights=[0, 0.5, 0, 0])
    rendered = make(CHATML, train_on="all").render(messages)
    parts = [(rendered.text[span.start : span.stop], span.weight) for span in rendered.spans]
    assert parts == [
        ("<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n", 1.0),
        ("aa<|im_end|>", 0.5),
        ("\n<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\n", 1.0),
        ("\n", 1.0),
    ]


def test_weights_go_with_their_messages() -> None:
    conversation = talk(user("u"), said("a"), user("v"), said("b"), user("w"), said("c"), weights=[1, 0.25, 1, 0, 1, 2])
    for source in (CHATML, STYLES["marked"].source):
        rendered = make(source).render(conversation)
        assert [span.weight for span in rendered.spans] == [0.25, 2]
        assert [text.rstrip() for text in trained(rendered)] == ["a<|im_end|>", "c<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("thinking", ["answer1 is1.<|im_end|>"]), ("channels", ["<|start|>assistant<|channel|>final<|message|>answer1 is1.<|return|>"])],
)  # fmt: skip
def test_thinking_left_out_with_its_tags(name: str, expected: list[str]) -> None:
    conversation = talk(user("ask"), said("answer1 is1.", reasoning_content="because of"))
    assert learnt(STYLES[name].source, conversation, train_on_thinking=False) == expected


EMPTY_THINKING = CHATML.replace("m.content", "('<think>\n\n</think>\n\n' if m.role == 'assistant' else '') + m.content")


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<seed:think>", "</seed:think>"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("<|channel>thought\n", "<channel|>"),
        ("[THINK]", "[/THINK]"),
    ],
)
def test_thinking_goes_with_its_tags_however_they_are_spelt(opening: str, closing: str) -> None:
    written = f"'{opening}' + (m.reasoning_content or '') + '{closing}'".replace("\n", "\\n")
    source = CHATML.replace("m.content", f"({written} if m.role == 'assistant' else '') + m.content")
    for more in ({}, {"reasoning_content": "because"}):
        conversation = talk(user("u"), said("a", **more))
        thought = f"{opening}{more.get('reasoning_content', '')}{closing}"
        assert learnt(source, conversation) == [f"{thought}a<|im_end|>"]
        assert learnt(source, conversation, train_on_thinking=False) == ["a<|im_end|>"]


@pytest.mark.parametrize(
    ("around", "answer"),
    [
        ("m.reasoning_content + '<|out|>' + m.content", "<|out|>answer"),  # a tag that opens every answer
        ("m.reasoning_content + '\n[BEGIN FINAL RESPONSE]\n' + m.content", "answer"),
        ("m.reasoning_content + '<|next|>' + m.content", "answer"),
    ],
)
def test_a_tag_behind_thinking_goes_with_it_where_an_answer_alone_has_none(around: str, answer: str) -> None:
    alone = "'<|out|>' + m.content" if "<|out|>" in around else "m.content"
    source = CHATML.replace(
        "m.content", f"(({around}) if m.reasoning_content else {alone} if m.role == 'assistant' else m.content)"
    )
    for number in (1, 2):
        rows = [user("u"), said("answer", reasoning_content="because")] * number
        assert learnt(source, talk(*rows), train_on_thinking=False) == [f"{answer}<|im_end|>"] * number


def test_empty_thinking_tags_are_thinking_too() -> None:
    conversation = talk(user("u"), said("a"))
    assert learnt(EMPTY_THINKING, conversation) == ["<think>\n\n</think>\n\na<|im_end|>"]
    assert learnt(EMPTY_THINKING, conversation, train_on_thinking=False) == ["a<|im_end|>"]


def test_thinking_inside_the_content_is_left_out_too() -> None:
    conversation = talk(user("u"), said("<think>\nwhy a\n</think>\n\na"))
    assert learnt(CHATML, conversation) == ["<think>\nwhy a\n</think>\n\na<|im_end|>"]
    assert learnt(CHATML, conversation, train_on_thinking=False) == ["a<|im_end|>"]


def test_repeated_words_are_placed_by_a_marked_render() -> None:
    # "a" occurs in the header, in the reasoning and twice in the answer.
    conversation = talk(user("a"), said("a a", reasoning_content="a"))
    assert learnt(STYLES["thinking"].source, conversation, train_on_thinking=False) == ["a a<|im_end|>"]


def test_tool_calls_left_out() -> None:
    style = STYLES["tools"]
    conversation = talk(
        user("u"), said("let me", tool_calls=[call("f", {"k": 1})]), said("", tool_calls=[call("g", {})])
    )
    assert learnt(style.source, conversation, train_on_tool_calls=False) == ["let me"]
    answered = talk(
        user("u"), said("let me", tool_calls=[call("f", {"k": 1})]), {"role": "tool", "content": "r"}, said("so")
    )
    assert learnt(style.source, answered, train_on_tool_calls=False) == ["let me", "so<|im_end|>"]


def test_calls_before_the_answer_leave_the_answer() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls or [] %}<call {{ c.function.name }}>"
    source += "{% endfor %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    conversation = talk(user("u"), said("so it is", tool_calls=[call("look", {})]))
    assert learnt(source, conversation) == ["<call look>so it is;"]
    assert learnt(source, conversation, train_on_tool_calls=False) == ["so it is;"]


def test_reasoning_that_the_template_drops_is_counted() -> None:
    conversation = talk(
        user("u"),
        said("a", reasoning_content="dropped thought"),
        user("v"),
        said("b", reasoning_content="kept thought"),
    )
    rendered = make(STYLES["thinking"].source, earlier_reasoning="drop").render(conversation)
    assert rendered.notes == {"reasoning_dropped": 1}
    assert trained(rendered) == ["a<|im_end|>", "<think>\nkept thought\n</think>\n\nb<|im_end|>"]
    with pytest.raises(
        SequenceError, match="drops the reasoning of assistant message 2; --earlier-reasoning split makes"
    ):
        make(STYLES["thinking"].source).render(conversation)
    assert len(make(STYLES["thinking"].source, train_on_thinking=False).render(conversation).spans) == 2


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("reasoning", ["It is", "four.", "It is four."])
def test_an_answer_that_repeats_dropped_reasoning_is_learnt_whole(reasoning: str, marked: bool) -> None:
    conversation = talk(user("u"), said("It is four.", reasoning_content=reasoning))
    source = CHATML
    if marked:
        block = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + block
        source += "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    rendered = make(source, train_on_thinking=False).render(conversation)
    assert trained(rendered) == ["It is four.<|im_end|>"]
    assert rendered.notes == {"reasoning_dropped": 1}
    with pytest.raises(SequenceError, match="drops the reasoning of assistant message 2"):
        make(source).render(conversation)


@pytest.mark.parametrize("reasoning", ["It is", "four.", "It is four.", "It is four. So be it."])
def test_reasoning_that_the_answer_repeats_is_told_from_it(reasoning: str) -> None:
    conversation = talk(user("u"), said("It is four.", reasoning_content=reasoning))
    thinking = CHATML.replace(
        "m.content", "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '') + m.content"
    )
    assert thinking != CHATML
    assert learnt(thinking, conversation) == [f"<think>{reasoning}</think>It is four.<|im_end|>"]
    assert learnt(thinking, conversation, train_on_thinking=False) == ["It is four.<|im_end|>"]


@pytest.mark.parametrize("words", ["a", "name", "look", "assistant"])
def test_words_that_only_the_header_or_the_call_spells_are_left_out(words: str) -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.tool_calls %}"
        """{{ '{"name": "' + m.tool_calls[0].function.name + '"}' }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"""
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert learnt(source, talk(user("u"), said("", tool_calls=[call("look", {})]))) == ['{"name": "look"}<|im_end|>']
    with pytest.raises(SequenceError, match=f"drops the words '{words}' of assistant message 2"):
        make(source).render(talk(user("u"), said(words, tool_calls=[call("look", {})])))


def test_one_sequence_a_turn_keeps_what_the_template_would_drop() -> None:
    conversation = talk(
        user("u"),
        said("a", reasoning_content="first thought"),
        user("v"),
        said("b", reasoning_content="second thought"),
        said("c", reasoning_content="third thought"),
        user("bye"),
    )
    one, two = make(STYLES["thinking"].source, earlier_reasoning="split").render_turns(conversation)
    assert trained(one) == ["<think>\nfirst thought\n</think>\n\na<|im_end|>"]
    assert trained(two) == [
        f"<think>\n{which} thought\n</think>\n\n{words}<|im_end|>" for which, words in (("second", "b"), ("third", "c"))
    ]
    stock = [dict(message, thinking=message.get("reasoning_content")) for message in conversation.messages]
    assert [one.text, two.text] == [stock_text(STYLES["thinking"], stock[:count], None) for count in (2, 5)]


def test_turns_that_the_next_one_begins_with_are_one_sequence() -> None:
    conversation = talk(user("u"), said("a"), user("v"), said("b"), weights=[1, 1, 1, 0.5])
    (whole,) = make(CHATML, earlier_reasoning="split").render_turns(conversation)
    assert whole == make(CHATML).render(conversation)
    (unread,) = make(CHATML, earlier_reasoning="split").render_turns(talk(user("u"), said("a"), weights=[1, 0]))
    assert unread.spans == []


def test_reasoning_that_no_turn_keeps_is_an_error_turn_by_turn() -> None:
    with pytest.raises(SequenceError, match=r"drops the reasoning of assistant message 2;.*--earlier-reasoning drop"):
        make(CHATML, earlier_reasoning="split").render_turns(talk(user("u"), said("a", reasoning_content="why")))


def test_a_prompt_with_thinking_on_or_off_comes_from_the_row() -> None:
    source = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n' + (lead or '') }}")
    conversation = talk(user("u"), said("<think>\n\n</think>\n\na"))
    assert learnt(source, conversation) == ["<think>\n\n</think>\n\na<|im_end|>"]
    led = talk(user("u"), said("<think>\n\n</think>\n\na"), kwargs={"lead": "<think>\n\n</think>\n\n"})
    assert learnt(source, led) == ["a<|im_end|>"]


# Generation markers


def stock_spans(source: str, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    texts, indices = render_jinja_template(
        [messages], chat_template=source, return_assistant_tokens_mask=True, **SPECIAL
    )
    return texts[0], [(start, stop) for start, stop in indices[0] if start < stop]


MARKED_VARIANTS = {
    "around the answer": STYLES["marked"].source,
    "with sets inside": """{% set x = 'out' %}{% for m in messages %}{% if m.role == 'assistant' %}
{%- generation %}{% set x = m.content %}{{ x }}{% for c in ['!', '?'] %}{{ c }}{% endfor %}{% endgeneration %}{{ x }}
{%- else %}{{ m.content }}{{ x }}{% endif %}{% endfor %}""",
    "some answers only": """{% for m in messages %}{% if m.role == 'assistant' and loop.last %}
{%- generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}""",
    "end of turn after the loop": """{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}
{%- generation %}{{ eos_token }}{% endgeneration %}""",
    "several blocks, one empty": """{% for m in messages %}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content }}{% endgeneration %}-{% generation %}{% endgeneration %}-{% generation %}.{% endgeneration %}
{%- else %}{{ m.content | tojson }}{% endif %}{% endfor %}""",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MARKED_VARIANTS)
def test_markers_are_taken_as_they_stand(name: str) -> None:
    source = MARKED_VARIANTS[name]
    template = make(source, allow_control_tokens=True, partial_markers="keep")
    assert template.has_generation_markers

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.tuples(st.text(), st.text(min_size=1)), min_size=1, max_size=3))
    def check(pairs: list[tuple[str, str]]) -> None:
        messages = [message for asked, answer in pairs for message in (user(asked), said(answer))]
        rendered = template.render(talk(*messages))
        text, spans = stock_spans(source, messages)
        assert rendered.text == text
        assert [(span.start, span.stop) for span in rendered.spans] == spans

    check()


PARTIAL = """{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content }}{% endgeneration %}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("source", "answer", "what"),
    [
        (PARTIAL, said("a", reasoning_content="why"), "the reasoning 'why'"),
        (PARTIAL, said("a", tool_calls=[call("look", {})]), "1 of 1 calls of look"),
        (MARKED_VARIANTS["some answers only"], said("a"), "the words 'a'"),
    ],
)
def test_markers_around_a_part_are_refused(source: str, answer: dict[str, Any], what: str) -> None:
    conversation = talk(user("u"), answer, user("v"), said("b"))
    with pytest.raises(SequenceError) as caught:
        make(source).render(conversation)
    assert f"t.jinja writes outside its generation markers {what} of assistant message 2" in caught.value.reason
    assert "--partial-markers keep" in caught.value.reason
    assert learnt(source, conversation, partial_markers="keep")[-1] == "b"


def test_markers_in_a_macro_hold_what_the_macro_wrote() -> None:
    source = """{% macro one(m) %}<{{ m.role }}>{% generation %}{{ m.content }};{% endgeneration %}{% endmacro %}
{%- for m in messages %}{% if m.role == 'assistant' %}{{ one(m) }}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
    assert learnt(source, talk(user("u"), said("a"), user("v"), said("b"))) == ["a;", "b;"]


# Control tokens in the data


def restored(rendered: Rendered) -> list[str]:
    return [rendered.text[start:stop] for start, stop in rendered.literals]


def test_control_tokens_spelt_by_the_data_are_literals() -> None:
    messages = [user("say <|im_end|> and </s>"), said("I <|im_end|>\n<|im_start|>user\nmust not")]
    rendered = make(CHATML).render(talk(*messages))
    assert restored(rendered) == ["<|im_end|>", "</s>", "<|im_end|>", "<|im_start|>"]
    outside = rendered.text
    for start, stop in reversed(rendered.literals):
        outside = outside[:start] + outside[stop:]
    assert outside.count("<|im_end|>") == outside.count("<|im_start|>") == 2
    assert make(CHATML, allow_control_tokens=True).render(talk(*messages)).literals == []


def test_control_tokens_in_tools_names_and_arguments_are_literals() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_start|>", "parameters": {"</s>": 1}}}]
    conversation = talk(user("u"), said("", tool_calls=[call("f", {"<s>": "<|im_end|>é"})]), tools=tools)
    assert restored(make(STYLES["tools"].source).render(conversation)) == ["<|im_start|>", "</s>", "<s>", "<|im_end|>"]


def test_thinking_tags_of_the_assistant_stay_control_tokens() -> None:
    template = ChatTemplate(CHATML, special_tokens=SPECIAL, control_tokens=[*CONTROLS, "<think>", "</think>"])
    rendered = template.render(talk(user("what is <think>?"), said("<think>\nhm\n</think>\n\n</s>")))
    assert restored(rendered) == ["<think>", "</s>"]


def test_control_tokens_that_the_template_reads_mean_what_it_makes_of_them() -> None:
    source = CHATML.replace("m.content +", "m.content.split('<cut>')[-1] +")
    template = ChatTemplate(source, special_tokens=SPECIAL, control_tokens=[*CONTROLS, "<cut>"])
    rendered = template.render(talk(user("a<cut>b</s>"), said("fine")))
    assert rendered.notes == {"control_tokens_read_by_template": 1}
    assert restored(rendered) == ["</s>"]


def test_a_template_that_runs_away_without_a_control_token_is_not_said_to_read_it() -> None:
    endless = "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"
    source = "{% if messages[0].content[0] == 'a' and '</s>' not in messages[0].content %}" + endless + "{% endif %}"
    with pytest.raises(SequenceError, match="characters than any conversation should"):
        make(source + CHATML).render(talk(user("a</s>"), said("fine")))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([*CONTROLS, "a", " ", "Zq", "Zq0x", "<", "|", "é"]), max_size=5).map("".join),
        min_size=2,
        max_size=4,
    )
)
def test_literals_are_exactly_the_data_s_control_tokens(contents: list[str]) -> None:
    messages = [user(text) if number % 2 == 0 else said(text) for number, text in enumerate(contents)]
    rendered = make(STYLES["late end"].source).render(talk(*messages))
    # The expected spans are computed here from the template.
    text, expected, longest_first = "<s>", [], sorted(CONTROLS, key=len, reverse=True)
    for number, content in enumerate(contents):
        text += "</s>" if number and number % 2 == 0 else ""
        text += "<|User|>" if number % 2 == 0 else "<|Assistant|>"
        at = 0
        while at < len(content):
            token = next((token for token in longest_first if content.startswith(token, at)), None)
            if token:
                expected.append((len(text) + at, len(text) + at + len(token)))
            at += len(token) if token else 1
        text += content
    text += "</s>" if len(contents) % 2 == 0 else ""
    assert rendered.text == text
    assert rendered.literals == expected


# Forms of input


def test_arguments_take_the_form_that_the_template_writes_well() -> None:
    text, parsed = '{"k": "é"}', {"k": "é"}
    dumps = STYLES["tools"].source
    pastes = dumps.replace("call.arguments | tojson", "call.arguments")
    both = dumps.replace(
        "call.arguments | tojson", "(call.arguments if call.arguments is string else call.arguments | tojson)"
    )
    for source, converted in ((dumps, {str: 1, dict: 0}), (pastes, {str: 0, dict: 1}), (both, {str: 0, dict: 0})):
        for arguments in (text, parsed):
            rendered = make(source).render(talk(user("u"), said("", tool_calls=[call("f", arguments)])))
            assert '"arguments": {"k": "é"}}' in rendered.text
            assert rendered.notes.get("tool_arguments_converted", 0) == converted[type(arguments)]


def test_arguments_that_are_not_json_are_left_alone() -> None:
    rendered = make(STYLES["tools"].source).render(talk(user("u"), said("", tool_calls=[call("f", "not json")])))
    assert '"arguments": "not json"' in rendered.text


def test_the_same_message_object_twice_is_two_messages() -> None:
    again = said("same")
    assert learnt(CHATML, talk(user("u"), again, user("v"), again)) == ["same<|im_end|>", "same<|im_end|>"]


def test_threads_may_share_a_template() -> None:
    template = make(CHATML)
    results: list[list[str]] = []

    def work(number: int) -> None:
        for _ in range(50):
            results.append([str(number), *trained(template.render(talk(user("u"), said(f"a{number}" * 20))))])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200
    assert all(text == f"a{number}" * 20 + "<|im_end|>" for number, text in results)


def test_the_date_is_the_one_given() -> None:
    source = CHATML + "{{ strftime_now('%d %b %Y') }}"
    assert make(source, template_date="2025-01-31").render(talk(user("u"), said("a"))).text.endswith("31 Jan 2025")


def test_words_that_look_like_the_next_text_s_beginning_stay_words() -> None:
    style = STYLES["late end"]
    for words in ("</s><s>", "x</s><s>", "<s>"):
        messages = [user(""), said(words)]
        assert trained(make(style.source).render(talk(*messages))) == [words + "</s>"]
        again = [*messages, user("more"), said(words)]
        assert trained(make(style.source).render(talk(*again))) == [words + "</s>"] * 2


def test_a_break_behind_the_else_of_a_loop_ends_the_loop_around_it() -> None:
    source = (
        "{% for m in messages %}{% for x in [] %}{% set y = x %}{% else %}{% if m.content == 'stop' %}{% break %}"
        "{% endif %}{% endfor %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}."
        "{% endgeneration %}{% endif %}\n{% endfor %}"
    )
    assert learnt(source, talk(user("u"), said("a"), user("v"), said("b"), user("stop"))) == ["a.", "b."]


# Exactly the text between markers

EVERYONE = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }};{% endgeneration %}{% endfor %}"
AROUND_THE_LOOP = "{% generation %}{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}{% endgeneration %}"


@pytest.mark.parametrize("source", [EVERYONE, AROUND_THE_LOOP, *MARKED_VARIANTS.values()])
def test_markers_alone_are_trained_as_transformers_does(source: str) -> None:
    messages = [user("one asks"), said("an answer"), user("two more"), said("another")]
    text, spans = stock_spans(source, messages)
    rendered = make(source, train_on="markers").render(talk(*messages))
    assert rendered.text == text
    joined = [rendered.text[one.start : one.stop] for one in rendered.spans]
    assert "".join(joined) == "".join(text[start:stop] for start, stop in spans)


def test_what_markers_enclose_has_the_weight_of_who_says_it() -> None:
    messages = [user("one asks"), said("an answer"), user("two more"), said("another")]
    rendered = make(EVERYONE, train_on="markers").render(talk(*messages, weights=[0, 0, 1, 0.5]))
    spans = [(rendered.text[one.start : one.stop], one.weight) for one in rendered.spans]
    assert spans == [("one asks;", 1.0), ("two more;", 1.0), ("another;", 0.5)]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (EVERYONE, "enclose text of message 1 (user); fix the markers, or train on exactly the enclosed text"),
        (AROUND_THE_LOOP, "enclose text of message 1 (user)"),
    ],
)
def test_markers_around_others_are_refused_by_name(source: str, reason: str) -> None:
    with pytest.raises(SequenceError) as caught:
        make(source).render(talk(user("one asks"), said("an answer")))
    assert reason in caught.value.reason
    assert "--train-on markers" in caught.value.reason


def test_markers_alone_need_markers_and_no_other_choice() -> None:
    with pytest.raises(FormatError, match="this template has none"):
        make(CHATML, train_on="markers")
    for options in ({"train_on_thinking": False}, {"train_on_tool_calls": False}, {"earlier_reasoning": "split"}):
        with pytest.raises(FormatError, match="on exactly the text that the markers enclose"):
            MaskOptions(train_on="markers", **options)
