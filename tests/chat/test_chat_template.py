"""Templates in common styles: the text equals transformers' rendering, and spans follow the template's meaning."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.compiler import CodeGenerator
from markupsafe import Markup
from template_styles import CONTROLS, SPECIAL, STYLES, TOOLS, Style, make, stock_text, trained, turns

from megatron_sft_idx.chat.template import ChatTemplate
from megatron_sft_idx.chat.template.environment import TemplateEnvironment
from megatron_sft_idx.chat.types import Conversation


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("count", [1, 3])
def test_each_style_is_learnt_exactly(name: str, count: int) -> None:
    style = STYLES[name]
    messages = turns(style, count)
    tools = TOOLS if style.calls else None
    before = copy.deepcopy(messages)
    rendered = make(style.source, earlier_reasoning="drop").render(Conversation(messages, [1.0] * len(messages), tools))
    assert messages == before
    assert rendered.literals == []
    stock = [dict(m, thinking=m["reasoning_content"]) if "reasoning_content" in m else m for m in messages]
    assert rendered.text == stock_text(style, stock, tools)
    expected = [
        style.said(message, index == len(messages) - 1)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    assert trained(rendered) == expected
    assert all(span.weight == 1.0 for span in rendered.spans)


# Fragments that look like template text, prompts or the marks of tracing, or that templates trim.
NASTY = st.sampled_from(
    [
        "assistant",
        "assistant\n",
        "<think>",
        "<think>\n",
        "user",
        "<",
        "<|",
        "<|im_start|>",
        "<|im_end|>",
        "</s>",
        "<s>",
        "[/INST]",
        " ",
        "\n",
        "\n\n",
        "<|assistant|>",
        "model",
        "a",
        "é",
        "🦜",
        "{{ x }}",
        "\U000f0000",
        "\U000f00000\U000f0001",
        "\\",
        '"',
        "\U000f10001.0\U000f1001",
        "zqsaid",
        "Zq0x",
        "<b>",
        "true",
        "None",
        "\u2028",
        "\x1f",
    ]
)
TEXT = st.lists(st.one_of(NASTY, st.text(max_size=6)), max_size=6).map("".join)


def answers(style: Style) -> st.SearchStrategy[str]:
    texts = TEXT.filter(lambda text: not style.thinks or "</think" not in text)
    # If only the data's own text ends the turn, a blank answer is indistinguishable from none.
    return texts.filter(lambda text: text.strip() != "").map(lambda text: text + "." if style.trims else text)


@st.composite
def conversations(draw: st.DrawFn, style: Style) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if style.system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXT)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXT)})
        if style.calls and draw(st.booleans()):
            call = {"function": {"name": draw(st.sampled_from(["f", "assistant"])), "arguments": {"k": draw(TEXT)}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": draw(TEXT)})
        answer = {"role": "assistant", "content": draw(answers(style))}
        if style.thinks and draw(st.booleans()):
            answer["reasoning_content"] = "so " + draw(answers(style)) + " so"
        messages.append(answer)
    return messages


@pytest.mark.parametrize("examples", [15, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in STYLES if name not in ("brackets", "next tag")])
def test_any_conversation_is_learnt_exactly(name: str, examples: int) -> None:
    style = STYLES[name]
    template = make(style.source, allow_control_tokens=True, earlier_reasoning="drop")

    @settings(max_examples=examples, deadline=None)
    @given(conversations(style))
    def check(messages: list[dict[str, Any]]) -> None:
        rendered = template.render(Conversation(messages, [1.0] * len(messages)))
        stock = [dict(m, thinking=m["reasoning_content"]) if "reasoning_content" in m else m for m in messages]
        assert rendered.text == stock_text(style, stock, None)
        last = len(messages) - 1
        speakers = [(i, m) for i, m in enumerate(messages) if m["role"] == "assistant"]
        assert trained(rendered) == [style.said(message, index == last) for index, message in speakers]

    check()


def test_pickled_template_is_the_same() -> None:
    template = make(STYLES["chatml"].source, train_on="last-turn")
    twin = pickle.loads(pickle.dumps(template))
    messages = turns(STYLES["chatml"], 2)
    conversation = Conversation(messages, [1.0] * len(messages))
    assert twin.fingerprint == template.fingerprint
    assert twin.render(conversation) == template.render(conversation)


def test_fingerprint_changes_with_whatever_changes_text_or_spans() -> None:
    source = STYLES["chatml"].source
    others = [
        make(source + " "),
        make(source, train_on="all"),
        make(source, train_on_thinking=False),
        make(source, train_on_tool_calls=False),
        make(source, allow_control_tokens=True),
        make(source, template_date="2025-01-31"),
        ChatTemplate(source, special_tokens=SPECIAL, control_tokens=CONTROLS[1:]),
        ChatTemplate(source, special_tokens={"bos_token": "<s>"}, control_tokens=CONTROLS),
        ChatTemplate(source, special_tokens=SPECIAL, control_tokens=CONTROLS, template_kwargs={"a": 1}),
    ]
    prints = [template.fingerprint for template in (make(source), *others)]
    assert len(set(prints)) == len(prints)
    assert make(source).fingerprint == make(source).fingerprint


EXPRESSIONS = (
    "v.key", "v['key']", "v.other", "v['other']", "v.items", "v['items']", "v.get('key')", "v.missing.deeper", "v[0]",
    "v[-1]", "v[9]", "v[-9]", "v[true]", "v['0']", "v[1:]", "v[v]", "v.startswith('a')", "v.strip()", "v.split('b')[0]",
    "v.split('b', 1)[-1].lstrip('x')", "v.endswith(w)", "v.strip(chars='a')", "v.key.strip()", "v is string",
    "v.key is string", "v.other is string", "v.other == 'x'", "v.other != 'x'", "v.key == 'x' == v.key", "not v.other",
    "v.other or 'else'", "(v.other and 'yes') or w", "v.other and 'yes'", "'yes' if v.other else 'no'",
    "v.other if v.key else 'no'", "v.other is defined", "v.key is none", "'a' in v.other", "v.index0", "loop.first",
    "v.__class__", "v['__class__']", "v.pop('key')", "v.append(1)", "v.format(1)", "v.mro", "v.strip.__self__",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    {"key": "x"}, {"key": None, "items": 1, "0": 2}, {"key": {"deeper": "a"}, "other": " b "}, {0: "zero", "other": []},
    "", "abab", Markup("ab<"), [], ["a"], [["b"], {"key": 1}], ("a", "b"), OrderedDict(key="x"), None, 0, True, 1.5,
)  # fmt: skip


@pytest.mark.sample(16)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_what_templates_look_up_themselves_is_what_the_sandbox_answers(expression: str) -> None:
    class AskingEnvironment(TemplateEnvironment):
        code_generator_class = CodeGenerator

    source = "{% for v in values %}{{ EXPRESSION }};{% endfor %}{{ loop.index0 }}".replace("EXPRESSION", expression)

    def answer(environment: TemplateEnvironment, value: Any) -> str:
        try:
            return environment.from_string(source).render(values=[value], w=value, loop={"first": 3, "index0": 4})
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    for value in VALUES:
        assert answer(TemplateEnvironment(None), value) == answer(AskingEnvironment(None), value)
