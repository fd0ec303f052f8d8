"""Limits on the output and the work of chat templates: they depend on counts, and errors name the row."""

# ruff: noqa: E501 - tables of templates, one per line

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chats import preprocess
from endless_templates import ENDLESS, drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from template_styles import CHATML, SPECIAL, STYLES, TOOLS, call, make, said, talk, turns, user
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_sft_idx.chat.template.allowance import BASE, Allowance, Overspent
from megatron_sft_idx.errors import SequenceError

PAIR = talk(user("question"), said("words of mine"))
HERE = Path(__file__).parents[1]


@pytest.mark.parametrize("count", [30, pytest.param(len(ENDLESS), marks=pytest.mark.slow)])
def test_endless_templates_are_refused_in_little_memory(count: int) -> None:
    # The child limits its own address space; exceeding that is a MemoryError, with another message.
    command = [sys.executable, HERE / "endless_templates.py", "endless", str(count)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert run.returncode == 0, run.stderr
    found = {one["name"]: one for one in map(json.loads, run.stdout.splitlines())}
    assert found.keys() == drawn("endless", count).keys()
    assert len(ENDLESS) >= 100
    for name, one in found.items():
        assert one["kind"] == "_Runaway", (name, one)
        assert one["says"].startswith("conversation: t.jinja: line "), (name, one)
        assert "more memory than is available" not in one["says"], (name, one)


def test_a_refusal_names_its_row_and_obeys_on_bad_row(tmp_path: Path) -> None:
    endless = "{% if 'go on' in messages[0].content %}{{ 'a'.center(10 ** 10) }}{% endif %}" + CHATML
    (tmp_path / "t.jinja").write_text(endless)
    rows = [{"messages": [user("a"), said("b")]}, {"messages": [user("go on"), said("b")]}]
    options = ("--chat-template", tmp_path / "t.jinja")
    stopped = preprocess(tmp_path / "x", *options, rows=rows)
    assert stopped.code == 1
    assert "rows.jsonl:2: " in stopped.err
    assert "t.jinja: line 1: not allowed in a template: it needs more loop iterations" in stopped.err
    assert not (tmp_path / "x.bin").exists()
    skipped = preprocess(tmp_path / "x", *options, "--on-bad-row", "skip", rows=rows)
    assert skipped.code == 0, skipped.err
    assert "1 bad row" in skipped.err or "rows.jsonl:2" in skipped.err
    assert (tmp_path / "x.bin").exists()


# name: (what a template writes, the error)
NO_TEXT = {
    "method": ("{{ messages[0].items }}", "writes a method (items): were parentheses forgotten?"),
    "method, in a loop": ("{% for m in messages %}{{ m.items }}{% endfor %}", "writes a method (items)"),
    "method of a number": ("{{ 5 | attr('to_bytes') }}", "writes a method (to_bytes)"),
    "method of text": ("{{ messages[0].content.strip }}", "writes a method (strip)"),
    "method of a list": ("{{ messages.index }}", "writes a method (index)"),
    "format": ("{{ 'a'.format }}", "writes a function"),
    "in a list": ("{{ [1, messages[0].items] }}", "writes a method (items)"),
    "in a dict in a list": ("{{ [{'a': messages[0].items}] }}", "writes a method (items)"),
    "in a tuple": ("{{ (1, messages[0].items) }}", "writes a method (items)"),
    "as a key": ("{{ {messages[0].items: 1} }}", "writes a method (items)"),
    "in a view": ("{{ {'a': messages[0].items}.values() }}", "writes a method (items)"),
    "in a namespace": ("{{ namespace(a=messages[0].items) }}", "writes a method (items)"),
    "concatenated": ("{{ 'a' ~ messages[0].items }}", "writes a method (items)"),
    "joined": ("{{ ['a', messages[0].items] | join }}", "writes a method (items)"),
    "joined with": ("{{ ['a', 'b'] | join(messages[0].items) }}", "writes a method (items)"),
    "joined attributes": ("{{ messages | join('', attribute='items') }}", "writes a method (items)"),
    "string": ("{{ messages[0].items | string }}", "writes a method (items)"),
    "%": ("{{ '%s' % messages[0].items }}", "writes a method (items)"),
    "%, a tuple": ("{{ '%s %r' % (1, messages[0].items) }}", "writes a method (items)"),
    "%, a dict": ("{{ '%(a)s' % {'a': messages[0].items} }}", "writes a method (items)"),
    "format filter": ("{{ '%s' | format(messages[0].items) }}", "writes a method (items)"),
    "format method": ("{{ '{}'.format(messages[0].items) }}", "writes a method (items)"),
    "format method, repr": ("{{ '{!r}'.format(messages[0].items) }}", "writes a method (items)"),
    "format method, attribute": ("{{ '{0.items}'.format(messages[0]) }}", "writes a method (items)"),
    "format_map": ("{{ '{a}'.format_map({'a': messages[0].items}) }}", "writes a method (items)"),
    "upper": ("{{ messages[0].items | upper }}", "writes a method (items)"),
    "trim": ("{{ messages[0].items | trim }}", "writes a method (items)"),
    "title": ("{{ messages[0].items | title }}", "writes a method (items)"),
    "center": ("{{ messages[0].items | center }}", "writes a method (items)"),
    "replace": ("{{ messages[0].items | replace('a', 'b') }}", "writes a method (items)"),
    "replaced by": ("{{ 'a' | replace('a', messages[0].items) }}", "writes a method (items)"),
    "escape": ("{{ messages[0].items | e }}", "writes a method (items)"),
    "safe": ("{{ messages[0].items | safe }}", "writes a method (items)"),
    "urlencode": ("{{ messages[0].items | urlencode }}", "writes a method (items)"),
    "urlize": ("{{ messages[0].items | urlize }}", "writes a method (items)"),
    "urlize, generator": ("{{ messages | map(attribute='role') | urlize }}", "was `| list` forgotten?"),
    "pprint": ("{{ [messages[0].items] | pprint }}", "writes a method (items)"),
    "wordcount": ("{{ messages[0].items | wordcount }}", "writes a method (items)"),
    "striptags": ("{{ messages[0].items | striptags }}", "writes a method (items)"),
    "xmlattr": ("{{ {'a': messages[0].items} | xmlattr }}", "writes a method (items)"),
    "by map": ("{{ [messages[0].items] | map('string') | list }}", "writes a method (items)"),
    "under autoescape": ("{% autoescape true %}{{ messages[0].items }}{% endautoescape %}", "writes a method (items)"),
    "in captured text": ("{% set x %}{{ messages[0].items }}{% endset %}{{ x }}", "writes a method (items)"),
    "in a macro": ("{% macro f(a) %}{{ a }}{% endmacro %}{{ f(messages[0].items) }}", "writes a method (items)"),
    "Markup": ("{{ ('%s' | safe) % messages[0].items }}", "writes a method (items)"),
    "Markup, joined": ("{{ (',' | safe).join([messages[0].items]) }}", "writes a method (items)"),
    "Markup, format": ("{{ ('{}' | safe).format(messages[0].items) }}", "writes a method (items)"),
    "macro": ("{% macro f() %}{% endmacro %}{{ f }}", "writes a macro (f): were parentheses forgotten?"),
    "function": ("{{ raise_exception }}", "were parentheses forgotten?"),
    "class": ("{{ namespace }}", "were parentheses forgotten?"),
    "dict": ("{{ dict }}", "an object of type"),
    "generator": ("{{ messages | map(attribute='role') }}", "a generator instead of its values: was `| list` forgotten?"),
    "selection": ("{{ messages | selectattr('role') }}", "was `| list` forgotten?"),
    "reversed": ("{{ messages | reverse }}", "was `| list` forgotten?"),
    "loop": ("{% for m in messages %}{{ loop }}{% endfor %}", "an object of type LoopContext"),
    "self": ("{{ self }}", "an object of type TemplateReference"),
    "block": ("{% block b %}{% endblock %}{{ self.b }}", "were parentheses forgotten?"),
    "cycler": ("{{ cycler(1, 2) }}", "an object of type Cycler"),
    "joiner": ("{{ joiner() }}", "an object of type Joiner"),
    "set": ("{{ messages[0].keys() - {'a': 1}.keys() }}", "creates a set, which has a different order in each run"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_has_no_text_is_not_written(name: str) -> None:
    source, says = NO_TEXT[name]
    for options in ({}, {"train_on": "all"}):
        with pytest.raises(SequenceError) as caught:
            make(source, **options).render(PAIR)
        assert f"t.jinja fails on it: line 1: the template {says}"[:40] in caught.value.reason
        assert says in caught.value.reason


EXPRESSIONS = [
    "(1 + 2) ~ 3", "'a' + 'b' + 'c' + x", "x + x + x + x + x", "[1] + [2, x] + []", "(1,) + (2,)", "1.5 + 2", "1 - 2 - n",
    "n - x | length", "n + 1 - n", "2 * x", "[1] * 3", "7 // 2 / 2", "7 % 4", "2 ** 3 ** 2", "'%s-%d' % (x, 3)", "'%5.2f|' % 1.5",
    "'%(a)s' % {'a': x}", "'%%' % ()", "x ~ 1 ~ none ~ true ~ [1, 'a'] ~ {'a': 1.5}", "x[1:]", "x[::-1]", "x[-1]", "x[99] is defined",
    "[1, 2, 3][1:][0]", "d.a.b", "d['a']['b']", "d.nothing", "d.nothing is defined", "d.items() | list", "d.keys() | list", "d.values()",
    "d.keys()", "d.get('a').get('z', 5)", "d.items is callable", "'a' in x", "'a' not in x", "'a' in d", "1 in [1, 2]", "n in [1, 2]",
    "x in ['words', x]", "d in [d]", "'r' in d.a.keys()", "1 < n < 5", "n == 3 == 3", "d == d", "[1, 2] == [1, n - 1]", "x != 'a'", "n is odd",
    "x is in [x]", "x is eq 'words'", "x is upper", "n is divisibleby 3", "range(3) | list", "3 in range(5)", "'a' in range(5)",
    "x | upper | lower | title | capitalize", "'  a ' | trim", "'xax' | trim('x')", "x | length", "x | first ~ x | last", "x | list",
    "[3, 1, 2] | sort", "['b', 'A'] | sort | join(',')", "['b', 'A'] | sort(reverse=true, case_sensitive=true)", "[1, 1, 2] | unique | list",
    "[1, 2, 3] | sum", "[[1], [2]] | sum(start=[])", "[{'a': 1}, {'a': 2}] | sum(attribute='a')", "[1, 2] | join", "[1, 2] | join('-')",
    "[{'a': 1}, {'a': 2}] | join(', ', attribute='a')", "[1, 2, 3] | batch(2, 'x') | list", "[1, 2, 3] | slice(2) | list", "[1, 2] | reverse | list",
    "'ab' | reverse", "[3, 1] | min ~ [3, 1] | max", "['a', 'b'] | map('upper') | list", "[d] | map(attribute='a.b') | list",
    "[1, 2, 3] | select('odd') | list", "[1, 2, 3] | reject('odd') | list", "[d] | selectattr('a') | list | length", "[d] | rejectattr('z') | list | length",
    "d | dictsort", "d | items | list", "d | tojson", "d | tojson(indent=2)", "d | string", "x | replace('w', 'v')", "x | replace('o', '0', 1)",
    "x | center(20)", "x | center", "'a\nb' | indent", "'a\nb' | indent('> ', true)", "'a b c d' | wordwrap(3)", "'a b c d e f g' | truncate(9)",
    "x | wordcount", "'<a>' | e", "'<a>' | escape ~ '<b>'", "('<a>' | safe) + '<b>'", "('<%s>' | safe) % '<b>'", "('-' | safe).join(['<', '>'])",
    "('{}' | safe).format('<')", "'<a>b</a>' | striptags", "'a b' | urlencode", "{'a': 'b c'} | urlencode", "'see http://a.com' | urlize",
    "{'a': 'b', 'c': none} | xmlattr", "[1, {'a': 2}] | pprint", "1.5 | round ~ 1.25 | round(1, 'floor')", "'12' | int + 1", "n | int(99999999) ~ 'z' | float(99999999.5) ~ 'z' | int(default=99999999)", "'ff' | int(base=16)",
    "'1.5' | float", "-3 | abs", "13000 | filesizeformat", "none | default('a') ~ nothing | default('b')", "[d, d] | groupby('a.b') | list | length",
    "'%s' | format(x)", "'%(a)s' | format(a=1)", "'{} {a} {0}'.format(x, a=2) if false else '{} {a}'.format(x, a=2)", "'{0[a]}'.format({'a': 1})",
    "'{:>5}|{:05.1f}'.format('a', 1.5)", "'{a}'.format_map({'a': 1})", "'{!r}'.format('a')", "x.split('o')", "' a  b '.split()", "'a,b,c'.rsplit(',', 1)",
    "'a\nb'.splitlines()", "x.partition('r')", "x.upper().lower().title().strip('W')", "x.startswith('w') and x.endswith(('s', 't'))", "x.find('r') ~ x.count('o')",
    "x.ljust(9) ~ x.rjust(9) ~ x.center(9) ~ '7'.zfill(3)", "'\t'.expandtabs()", "x.replace('o', 'oo')", "', '.join(['a', x])",
    "x.isdigit() ~ '1'.isdigit()", "x.removeprefix('wo')", "[1, 2, 1].count(1) ~ [1, 2].index(2)", "(5).bit_length()", "(1.5).is_integer()",
    "dict(a=1, b=x)", "dict([('a', 1)])", "namespace(a=1)", "cycler('a', 'b').next()", "joiner(', ')() ~ 'x'", "nothing", "[nothing]", "(1,)", "()", "[]", "{}",
    "true ~ false ~ none", "1e100 ~ 10 ** 30", "'\u00e9\U0001f600' + x", "x if n > 2 else 'no'", "not x", "x and n", "x or n", "{n: x}", "{(1, n): x}",
]  # fmt: skip


@pytest.mark.sample(50)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_are_answered_as_transformers_answers_them(expression: str) -> None:
    head = "{% set x = 'words' %}{% set n = 3 %}{% set d = {'a': {'b': 'c'}} %}"
    source = f"{head}{{{{ {expression} }}}}{{% for x in [x] %}}{{{{ {expression} }}}}{{% set y = {expression} %}}{{{{ y }}}}{{% endfor %}}"
    stock = render_jinja_template([[user("a")]], chat_template=source)[0][0]
    assert make(source)._template.plain({"messages": [user("a")]}) == stock
    assert make(source)._template.render([], {"messages": [user("a")]}).text == stock


def conversation(count: int, characters: int, letter: str) -> list[dict[str, object]]:
    """Return alternating messages of some characters each."""
    return [
        (said if index % 2 else user)(f"{index} " + letter * max(0, characters - len(str(index)) - 1))
        for index in range(count)
    ]


@pytest.mark.sample(15)
@pytest.mark.parametrize(("count", "characters"), [(2, 500_000), (100, 10_000), (2000, 500), (20_000, 50)])
@pytest.mark.parametrize("name", STYLES)
def test_ordinary_templates_keep_their_allowance(name: str, count: int, characters: int) -> None:
    template = make(STYLES[name].source)._template
    for letter in ("a", "\U0001f600"):
        messages = conversation(count, characters, letter)
        if name == "parts":
            messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        variables = {**SPECIAL, "messages": messages, "tools": TOOLS if STYLES[name].calls else None}
        assert letter * 40 in template.plain(variables)
        assert letter * 40 in template.render(messages, variables).text


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_conversation_of_any_style_keeps_its_allowance(data: st.DataObject) -> None:
    style = STYLES[data.draw(st.sampled_from(sorted(STYLES)))]
    count = data.draw(st.integers(1, 300))
    letter = data.draw(st.sampled_from(["a", "<", "\x00", "\u0416", "\U0001f600", "\n", " b"]))
    length = data.draw(st.integers(1, 1_000_000 // count // len(letter)))
    messages = [{**one, "content": letter * length} for one in turns(style, count)]
    template = make(style.source)._template
    template.plain({**SPECIAL, "messages": messages, "tools": TOOLS if style.calls else None})
    assert template._environment.allowance.remaining > 0


def test_tools_are_written_whole() -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": "d" * 500}} for i in range(500)]
    messages = [user("a"), said("", tool_calls=[call("f1", {"a": "b" * 100_000})])]
    template = make(
        "{{ tools | tojson(indent=4) }}{% for m in messages %}{{ m | tojson }}{{ [m] | tojson }}{% endfor %}"
    )
    text = template._template.plain({"messages": messages, "tools": tools})
    assert json.loads(text[: text.index("]{") + 1]) == tools


def test_the_conversations_own_size_is_looked_at_once_the_base_is_spent() -> None:
    allowance = Allowance()
    allowance.start({"messages": [user("a" * 100_000)]})
    allowance.spend(BASE + 1_000_000)
    assert allowance.remaining > 0
    with pytest.raises(Overspent):
        allowance.spend(BASE)
    allowance.start({"messages": [user("a")]})
    with pytest.raises(Overspent):
        allowance.spend(BASE + 1_000_000)


RENDERS = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from template_styles import STYLES, SPECIAL, TOOLS, make, turns
made = []
for name, style in sorted(STYLES.items()):
    variables = {**SPECIAL, "messages": turns(style, 4), "tools": TOOLS if style.calls else None}
    made.append(make(style.source)._template.plain(variables))
views = "{{ {'a': 1, 'b': 2}.keys() }}{{ {'a': 1}.items() }}{{ messages[0].values() }}{{ namespace(b=1, a=2) }}"
made.append(make(views)._template.plain({"messages": turns(STYLES["chatml"], 2)}))
for source in ("{{ messages[0].items }}", "{{ messages[0].keys() - [] }}", "{{ 'a'.center(10 ** 10) }}"):
    try:
        made.append(make(source)._template.plain({"messages": turns(STYLES["chatml"], 2)}))
    except Exception as error:
        made.append(str(error))
print(hashlib.sha256(repr(made).encode("utf-8", "surrogatepass")).hexdigest())
"""


def test_a_template_renders_the_same_in_any_process() -> None:
    digests = set()
    for seed in ("0", "1", "12345"):
        run = subprocess.run(
            [sys.executable, "-c", RENDERS, HERE], capture_output=True, text=True, timeout=300, check=False,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        digests.add(run.stdout)
    assert len(digests) == 1
