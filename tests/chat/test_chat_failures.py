"""Errors for rows and templates that cannot be used, and for templates that leave the sandbox."""

# ruff: noqa: E501 - tables of failures, one per line

from __future__ import annotations

from collections.abc import Callable

import pytest
from template_styles import CHATML, MEASURES, SPECIAL, STYLES, call, make, said, talk, user
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.template import ChatTemplate, MaskOptions
from megatron_sft_idx.chat.types import Conversation
from megatron_sft_idx.errors import FormatError, SequenceError

PAIR = talk(user("question"), said("words of mine"))

BAD_ROWS: dict[str, tuple[str, Conversation, str]] = {
    "raises": (STYLES["renamed"].source, talk(said("a")), "rejects it: turns must alternate"),
    "words dropped": ("{% for m in messages %}{{ m.role }}{% endfor %}", PAIR, "drops the words 'words of mine' of assistant message 2"),
    "message dropped": ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", PAIR, "drops assistant message 2"),
    "marked words dropped": ("{% for m in messages %}{% generation %}x{% endgeneration %}{% endfor %}", PAIR, "drops the words"),
    "all, words dropped": ("{{ messages[0].content }}", PAIR, "drops assistant message 2"),
    "all, undefined": ("{% for m in messages %}\n{{ m.content }}\n{% endfor %}\n\n{{ nothing.at.all }}", PAIR, "line 5: 'nothing' is undefined"),
    "calls dropped": (CHATML, talk(user("u"), said("a", tool_calls=[call("look_up", {})])), "drops 1 of 1 calls of look_up"),
    "calls dropped, function spoken of": (CHATML, talk(user("u"), said("I look_up it", tool_calls=[call("look_up", {})])), "drops 1 of 1 calls of look_up"),
    "calls dropped, name in a control token": (CHATML, talk(user("u"), said("a", tool_calls=[call("end", {})])), "drops 1 of 1 calls of end"),
    "second call dropped": (CHATML.replace("m.content", "m.content + (m.tool_calls[0].function.name if m.tool_calls else '')"), talk(user("u"), said("a", tool_calls=[call("look_up", {}), call("look_up", {})])), "drops 1 of 2 calls of look_up"),
    "undefined": ("a\n{{ nothing.at.all }}", PAIR, "line 2: 'nothing' is undefined"),
    "wrong type": ("\n\n{{ 'a' + 1 }}", PAIR, "line 3: can only concatenate str"),
    "content missing": (CHATML.replace("m.content", "m.content.text.strip()"), talk(user("u"), {"role": "assistant", "tool_calls": [call("f", {})]}), "has no attribute 'text' (messages[1].content is missing or null;"),
    "runs into itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", PAIR, "maximum recursion depth"),
    "reserved variable": (CHATML, talk(user("u"), said("a"), kwargs={"messages": []}), "messages cannot be given"),
    "measures": (MEASURES, PAIR, "t.jinja cannot be traced, and it ends assistant message 2 differently"),
    "mixes": ("{% for m in messages %}{{ m.role }}{% if m.role == 'assistant' %}{{ m.content }}{{ messages[0].content }}.{% endif %}{% endfor %}", talk(user("question"), said("words"), user("more")), "writes words of message 1 in what it writes for assistant message 2"),
    "marker outside": ("{% generation %}x{% endgeneration %}" + CHATML, PAIR, "is around or outside the loop over the messages"),
    "weights": (CHATML, Conversation([user("u"), said("a")], [1.0]), "1 weights for 2 messages"),
    "endless": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", PAIR, "loop iterations"),
    "endless text": ("{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", PAIR, "characters than any conversation should"),
    "long range": ("{% for a in range(10 ** 9) %}{% endfor %}", PAIR, "line 1: not allowed in a template: Range too big"),
    "long string": ("{{ 'x' * 10 ** 9 }}", PAIR, "repeats text or a list to more than"),
    "great number": ("{{ 9 ** 9 ** 9 }}", PAIR, "computes ** of something other than numbers up to"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named(name: str) -> None:
    source, conversation, reason = BAD_ROWS[name]
    template = make(source, train_on="all") if name.startswith("all") else make(source)
    with pytest.raises(SequenceError) as caught:
        template.render(conversation)
    assert reason in caught.value.reason
    assert name in ("reserved variable", "weights") or "t.jinja" in caught.value.reason


def shown(outcome: object) -> object:
    # The place where Python stops recursion depends on the current depth.
    if isinstance(outcome, ValueError):
        return type(outcome), str(outcome).removesuffix(" while calling a Python object")
    return outcome


def alone(template: ChatTemplate, conversation: Conversation) -> object:
    try:
        return template.render_turns(conversation)
    except ValueError as error:
        return shown(error)


# Endless templates run for seconds, each a dozen times.
@pytest.mark.sample(20)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "endless")) for name in BAD_ROWS]
)
@pytest.mark.parametrize("options", [{}, {"earlier_reasoning": "split"}, {"train_on": "all"}], ids=["", "split", "all"])
def test_many_rows_at_once_become_what_each_becomes_alone(name: str, options: dict[str, str]) -> None:
    source, bad, _ = BAD_ROWS[name]
    template, given = make(source, **options), [PAIR, talk(user("u"), said("a")), bad]
    expected = [alone(make(source, **options), row) for row in given]
    for rows in ([0, 2, 0], [2, 2], [0, 1, 0, 2], []):
        outcomes = template.render_each([given[row] for row in rows])
        assert [*map(shown, outcomes)] == [expected[row] for row in rows]


def test_rows_behind_one_that_fails_do_not_keep_its_error_waiting() -> None:
    """A job that ends at its first bad row does not render later rows, which may each take seconds."""
    seen: list[str] = []

    def note(text: str) -> str:
        seen.append(text)
        if text == "bad":
            raise ValueError(text)
        return ""

    rows = [talk(user(text), said("a"), kwargs={"note": note}) for text in ("good", "bad", "late")]
    outcomes = make(CHATML + "{{ note(messages[0].content) }}").render_each(rows)
    assert isinstance(next(outcomes), list)
    assert isinstance(next(outcomes), SequenceError)
    assert "bad" in seen
    assert "late" not in seen
    assert isinstance(next(outcomes), list)
    assert "late" in seen


UNUSABLE: dict[str, tuple[Callable[[], object], str]] = {
    "syntax": (lambda: make("a\n{% if x %}"), "t.jinja: line 2: Unexpected end of template"),
    "unknown filter": (lambda: make("{{ x | nope }}"), "t.jinja: line 1: No filter named 'nope'"),
    "stray break": (lambda: make("\n{% break %}"), "t.jinja: line"),
    "too deep": (lambda: make("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"), "t.jinja: the chat template is nested too deeply"),
    "train on": (lambda: MaskOptions(train_on="answers"), "train_on: 'answers', choose one of assistant, last-turn, markers, all"),
    "turns": (lambda: MaskOptions(earlier_reasoning="Split"), "earlier_reasoning: 'Split', choose one of error, drop, split"),
    "markers": (lambda: MaskOptions(partial_markers=None), "partial_markers: None, choose one of error, keep"),
    "thinking": (lambda: MaskOptions(train_on_thinking="no"), "train_on_thinking: 'no', expected True or False"),
    "day": (lambda: MaskOptions(template_date="yesterday"), "--template-date: 'yesterday' is not a date like 2025-01-31"),
    "kind": (lambda: RowOptions(kind="chat"), "kind: 'chat', choose one of auto, messages, alpaca, "),
    "alignment": (lambda: RowOptions(mask_alignment="left"), "mask_alignment: 'left', choose one of token, label"),
    "number": (lambda: MaskOptions(template_date=20250131), "20250131 is not a date like 2025-01-31"),
    "date": (lambda: make(CHATML, template_date="31.1.2025"), "'31.1.2025' is not a date like 2025-01-31"),
    "reserved": (lambda: ChatTemplate(CHATML, template_kwargs={"tools": []}), "tools cannot be given"),
    "no date": (lambda: make("{{ strftime_now('%Y') }}").render(PAIR), "set a fixed date with --template-date"),
    "internals": (lambda: make("{{ messages.__class__.__mro__ }}").render(PAIR), "unsafe"),
    "changes data": (lambda: make("{{ messages.append(1) }}").render(PAIR), "unsafe"),
    "format": (lambda: make("{{ '{0.__class__.__mro__}'.format(1) }}").render(PAIR), "unsafe"),
    "underscores": (lambda: make("{% set n = namespace() %}{% set n._x = 1 %}").render(PAIR), "underscore names"),
    "chance": (lambda: make("{{ messages | random }}").render(PAIR), "random"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_template_is_named(name: str) -> None:
    attempt, message = UNUSABLE[name]
    with pytest.raises(FormatError) as caught:
        attempt()
    assert message in str(caught.value)


def test_templates_cannot_see_the_marks() -> None:
    for name in ("trace enter", "trace_enter", "enter"):
        with pytest.raises(FormatError):
            make("{{ 1 | " + name + " }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ {'a': 1}.items() | list }}{{ {'items': 1}.items is callable }}{{ {'a': 1}.get('b', 2) }}",
        "{{ {'a': {'b': 1}}.a.b }}{{ {'a': 1}['b'] is defined }}{{ {'a': 1}.b is defined }}{{ {'get': 1}['get'] }}",
        "{% for a in [1, 2] %}{{ loop.index }}{{ loop.revindex }}{{ loop.previtem }}{{ loop.cycle('x', 'y') }}{% endfor %}",
        "{% set n = namespace(a=1, items=2) %}{% set n.b = [n.a] %}{{ n.a }}{{ n.items }}{{ n.b }}{{ n.c is defined }}{{ n }}",
        "{{ ' a,b '.strip().split(',') }}{{ 'a%sb' | format(1) }}{{ '{} {a}'.format(1, a=2) }}{{ 'x'.join(['a', 'b']) }}",
        "{{ dict(a=1) | tojson }}{{ {'é': '<&>'} | tojson }}{{ {'b': 1, 'a': [1.0, none]} | tojson(indent=2) }}",
        "{{ {'a': 'é'} | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}{{ 'ab' * 3 }}{{ 2 ** 10 }}",
        "{% macro m(x, y=2) %}{{ x }}{{ y }}{{ caller() }}{% endmacro %}{% call m(1) %}in{% endcall %}",
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}{% for x in [] %}{% else %}none{% endfor %}",
        "{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{% for m in messages %}{% set x %} {{ m.content }} {% endset %}{{ x | trim | upper }}{{ x | length }}{% endfor %}",
        "{% filter upper %}{% for m in messages %}{{ m.role }}{% if loop.first %}{% continue %}{% endif %}!{% endfor %}{% endfilter %}",
    ],
)
def test_the_sandbox_answers_as_transformers_does(source: str) -> None:
    messages = [user("question"), said("words")]
    stock = render_jinja_template([messages], chat_template=source, **SPECIAL)[0][0]
    silent = make(source, train_on="all")
    assert (
        silent.render(talk(user("question"))).text
        == render_jinja_template([messages[:1]], chat_template=source, **SPECIAL)[0][0]
    )
    assert silent._template.plain({**SPECIAL, "messages": messages}) == stock
    assert silent._template.render(messages, {**SPECIAL, "messages": messages}).text == stock
