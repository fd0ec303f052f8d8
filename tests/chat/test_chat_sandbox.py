"""Calls in chat templates: the same result as in plain Jinja or an error, and large results are paid for first."""

# ruff: noqa: E501 - tables of templates, one per line

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from endless_templates import MULTIPLYING, drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError
from markupsafe import Markup
from template_styles import make, said, talk, user
from transformers.utils.chat_template_utils import _compile_jinja_template

from megatron_sft_idx.chat.template.allowance import BASE, Allowance, NotText, Overspent
from megatron_sft_idx.chat.template.environment import TemplateEnvironment
from megatron_sft_idx.chat.template.methods import call_method
from megatron_sft_idx.errors import SequenceError

ENOUGH = 1 << 60
PAIR = talk(user("question"), said("words of mine"))
LONG = talk(user("q" * 200_000), said("words of mine"))
WORDS = st.text(st.sampled_from("ab ,\n\t<'\x85\u00df\u00e9\u0130\u0390\u4e2d\U0001f600"), max_size=300)
HERE = Path(__file__).parents[1]

# ---- the same as in plain Jinja, or an error ----

STOCK = _compile_jinja_template("").environment  # the environment of transformers
TEXTS = (
    "",
    "a",
    "b",
    "ab",
    "Ab c",
    " a\tb\n\nc ",
    "a,b",
    "<b>&'",
    "%s",
    "{}",
    "{0}",
    "\u0390\U0001f600",
    "12",
    "1.5",
    "key",
    "x.y",
    "upper",
    "string",
    "http://a.b c@d.e",
)
ITEMS: list[Any] = [
    [],
    ["a"],
    ["b", "A", "a"],
    [3, 1, 2, 1],
    [[1], [2]],
    [{"key": "x"}, {"key": "A"}, {"key": 1}],
    ("a", "b"),
]
MAPS: list[Any] = [{}, {"key": "x"}, {"key": 1, "b": [1, "c"], "A": None}, {"items": 1, "x": {"y": "z"}}]
NUMBERS: list[Any] = [-2, 0, 1, 2, 5, 1.5, -0.25, True, False, None]
VALUE = st.one_of(*map(st.sampled_from, (TEXTS, [*map(Markup, TEXTS)], ITEMS, MAPS, NUMBERS)))
ARGUMENTS = st.lists(st.one_of(VALUE, st.sampled_from(TEXTS), st.sampled_from(NUMBERS)), max_size=3)

REFUSED = {
    "filters": {"random"},
    "globals": {"lipsum"},
    "methods": {
        "encode",
        "maketrans",
        "translate",
        "escape",
        "as_integer_ratio",
        "conjugate",
        "from_bytes",
        "to_bytes",
        "fromhex",
        "fromkeys",
        "isdisjoint",
    },
    "methods of ranges": {"count", "index"},
}


def callable_names(value: Any) -> list[str]:
    """Return the methods of a value that Jinja's sandbox allows."""
    return [
        name
        for name in dir(value)
        if callable(getattr(value, name)) and STOCK.is_safe_attribute(value, name, getattr(value, name))
    ]


def outcome(environment: Any, source: str, variables: dict[str, Any]) -> str | Exception:
    """Return the text that a template renders, or its error."""
    try:
        if isinstance(environment, TemplateEnvironment):
            environment.allowance.start({})
        return str(environment.from_string(source).render(variables))
    except Exception as error:
        return error


def agree(source: str, variables: dict[str, Any], refused: bool = False) -> None:
    """Check that a template renders as in plain Jinja, or that it fails in both, or that it is refused by name."""
    ours = outcome(TemplateEnvironment(None), source, dict(variables))
    if refused and isinstance(ours, (Overspent, SecurityError, NotText)):
        return
    stock = outcome(STOCK, source, dict(variables))
    if refused:
        assert isinstance(stock, Exception), (source, variables, ours)
    elif isinstance(ours, NotText):
        assert isinstance(stock, Exception) or " at 0x" in stock or "object" in stock, (source, variables, stock)
    elif isinstance(ours, Overspent):
        assert isinstance(stock, Exception) or "nested tuples" in str(ours), (source, variables, ours, stock)
    elif isinstance(ours, Exception):
        assert isinstance(stock, Exception), (source, variables, ours, stock)
    else:
        assert ours == stock, (source, variables, stock)


def spelt(arguments: list[Any], names: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the arguments of a call, the last ones by name, and the variables that hold them."""
    variables = {f"a{number}": value for number, value in enumerate(arguments)}
    plain = len(arguments) - len(names)
    written = [*[f"a{number}" for number in range(plain)], *[f"{name}=a{plain + at}" for at, name in enumerate(names)]]
    return ", ".join(written), variables


@pytest.mark.parametrize("name", sorted(STOCK.filters))
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_filters_are_those_of_plain_jinja(name: str, data: st.DataObject) -> None:
    value, arguments = data.draw(VALUE), data.draw(ARGUMENTS)
    try:
        parameters = [
            one.name
            for one in inspect.signature(STOCK.filters[name]).parameters.values()
            if one.kind == one.POSITIONAL_OR_KEYWORD
        ]
    except ValueError:
        parameters = []
    if name == "tojson":  # for other calls, failure depends on how far the encoder gets
        arguments = [one for one in arguments if one is None or isinstance(one, (str, int))]
    names = data.draw(st.lists(st.sampled_from(parameters), max_size=len(arguments), unique=True)) if parameters else []
    call, variables = spelt(arguments, names)
    form = data.draw(
        st.sampled_from(
            [
                "{{ v | NAME }}",
                "{{ (v | NAME) | list }}",
                "{{ [v] | map('F', ARGS) | list }}",
                "{% filter NAME %}{{ v }}{% endfilter %}",
                "{% autoescape true %}{{ v | NAME }}{{ '<' ~ v }}{% endautoescape %}",
            ]
        )
    )
    source = form.replace("NAME", f"{name}({call})").replace("'F', ARGS", f"'{name}'" + (f", {call}" if call else ""))
    agree(source, {"v": value, **variables}, refused=name in REFUSED["filters"])


@pytest.mark.parametrize("name", sorted(STOCK.tests))
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_tests_are_those_of_plain_jinja(name: str, data: st.DataObject) -> None:
    value, other = data.draw(VALUE), data.draw(VALUE)
    call = data.draw(st.sampled_from(["", ", a"]))
    forms = [
        f"{{{{ [v, a] | select('{name}'{call}) | list }}}}",
        f"{{{{ [v] | reject('{name}'{call}) | list | length }}}}",
    ]
    if name.isidentifier():
        forms.append(f"{{{{ v is {name}{'(a)' if call else ''} }}}}")
    agree(data.draw(st.sampled_from(forms)), {"v": value, "a": other})


METHODS = sorted(
    {(kind.__name__, name) for kind in (str, list, tuple, dict, int, float) for name in callable_names(kind())}
    | {("Markup", name) for name in callable_names(Markup())}
    | {("range", "count"), ("range", "index")}
)


@pytest.mark.sample(60)
@pytest.mark.parametrize(("kind", "name"), METHODS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_methods_are_those_of_plain_jinja(kind: str, name: str, data: st.DataObject) -> None:
    kinds = {
        "str": TEXTS,
        "Markup": [*map(Markup, TEXTS)],
        "list": [one for one in ITEMS if type(one) is list],
        "tuple": [("a", "b"), ()],
        "dict": MAPS,
        "int": [-2, 0, 5, True, 1 << 70],
        "float": [1.5, -0.25],
        "range": [range(3)],
    }
    arguments = data.draw(ARGUMENTS)
    call, variables = spelt(arguments, [])
    form = data.draw(
        st.sampled_from(
            [
                "{{ v.NAME(ARGS) }}",
                "{{ v.NAME(ARGS) | list }}",
                "{% set f = v['NAME'] %}{{ f(ARGS) }}",
                "{% set f = v.NAME %}{% for i in [1] %}{{ f(ARGS) }}{% endfor %}",
                "{{ (v | attr('NAME'))(ARGS) }}",
            ]
        )
    )
    refused = name in REFUSED["methods"] or (kind == "range" and name in REFUSED["methods of ranges"])
    agree(
        form.replace("NAME", name).replace("ARGS", call),
        {"v": data.draw(st.sampled_from(kinds[kind])), **variables},
        refused,
    )


@pytest.mark.parametrize("name", sorted({*STOCK.globals} - {"strftime_now"}))
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_functions_are_those_of_plain_jinja(name: str, data: st.DataObject) -> None:
    call, variables = spelt(data.draw(ARGUMENTS), [])
    named = data.draw(st.sampled_from(["", ", key=1", ", b=a0", ", self=1"])) if call else ""
    use = {"cycler": ".next()", "joiner": "()", "namespace": ".key"}.get(name, "")
    agree(f"{{{{ {name}({call}{named}){use} }}}}", variables, refused=name in REFUSED["globals"])


def test_what_is_refused_is_named_with_a_remedy() -> None:
    for source, says in {
        "{{ 'a'.encode() }}": "chat templates cannot call str.encode; change the template",
        "\n{{ [1, 2] | random }}": "line 2: not allowed in a template: it calls the random filter; it would give",
        "{{ lipsum() }}": "it calls lipsum(); it would give different text",
    }.items():
        with pytest.raises(ValueError, match=r"t\.jinja: ") as caught:
            make(source).render(PAIR)
        assert says in str(caught.value)


STRINGS = st.text(st.sampled_from("ab{}\\\n'\"%N\u4e2d\U0001f600"), max_size=5)


@given(
    st.lists(st.one_of(STRINGS, st.sampled_from(["x", "y", "n", "z", "d"])), min_size=2, max_size=5),
    st.sampled_from(["+", "~"]),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
@settings(max_examples=400, deadline=None)
def test_joined_text_is_that_of_plain_jinja(operands: list[str], operator: str, constant: list[bool]) -> None:
    written = [
        one if not fixed and one in ("x", "y", "n", "z", "d") else json.dumps(one, ensure_ascii=False)
        for one, fixed in zip(operands, constant, strict=False)
    ]
    agree(f"{{{{ {f' {operator} '.join(written)} }}}}", {"x": "words{y}", "y": Markup("<b>"), "n": 3, "d": [1]})


COMPARED: list[Any] = ["", "a", "ab", 1, 2, 1.5, True, None, [], [1], ["a"], [[1], "a"], (1,), {}, {"a": 1}]


@given(
    st.lists(st.sampled_from(COMPARED), min_size=2, max_size=3),
    st.lists(st.sampled_from(["==", "!=", "<", ">=", "in", "not in"]), min_size=2, max_size=2),
)
@settings(max_examples=400, deadline=None)
def test_comparisons_are_those_of_plain_jinja(operands: list[Any], operators: list[str]) -> None:
    source = "a" + "".join(
        f" {operator} {name}" for operator, name in zip(operators, "bc"[: len(operands) - 1], strict=False)
    )
    agree(f"{{{{ {source} }}}}{{{{ 1 if {source} else 2 }}}}", dict(zip("abc", operands, strict=False)))


# ---- paid for before anything large is made ----


@pytest.mark.parametrize("count", [80, pytest.param(len(MULTIPLYING), marks=pytest.mark.slow)])
def test_no_argument_makes_a_template_take_much(count: int) -> None:
    command = [sys.executable, HERE / "endless_templates.py", "multiplying", str(count)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert run.returncode == 0, run.stderr
    found = {one["name"]: one for one in map(json.loads, run.stdout.splitlines())}
    assert found.keys() == drawn("multiplying", count).keys()
    for name, one in found.items():
        assert one["mib"] < 600, (name, one)
        assert one["seconds"] < 20, (name, one)
        assert "more memory than is available" not in one["says"], (name, one)


def nearly_spent(units: int) -> Allowance:
    """Return an allowance with ``units`` left of its base, and much more for a large conversation."""
    allowance = Allowance()
    allowance.start({"messages": LONG.messages})
    allowance.spend(BASE - units)
    return allowance


@pytest.mark.parametrize("left", [0, 1, 5000, 1 << 20, BASE])
def test_what_is_weighed_is_told_even_where_the_base_runs_out(left: int) -> None:
    value = {"a": "b" * 100_000, "c": ["d"] * 500}
    allowance = Allowance()
    allowance.remaining = ENOUGH
    assert nearly_spent(left).weigh(value) == allowance.weigh(value) > 100_000
    assert ENOUGH - allowance.remaining == allowance.weigh(value)


def test_a_refusal_takes_no_more_than_the_conversation_allows() -> None:
    allowance = nearly_spent(0)
    with pytest.raises(Overspent):
        allowance.weigh("a" * (1 << 29))


PADDED = "{{% for i in range({}) %}}{{% set x = 'a' * 16000000 %}}{{% endfor %}}{{% set big = 'a' * 4000000 %}}"
# Each call costs as much as a value's size. The base has 50 or 2 million units left, and runs out during counting.
BY_SIZE = {
    "% by name": PADDED.format(5) + "{{ (('%(a)s' * 10) % {'a': big}) | length }}",
    "format filter": PADDED.format(5) + "{{ ('%(a)s' * 10) | format(a=big) | length }}",
    "pprint": PADDED.format(5) + "{{ [big] | pprint | length }}",
    "urlize": PADDED.format(8) + "{{ ('a.com ' * 10) | urlize(rel=big) | length }}",
    "map": PADDED.format(8) + "{{ range(500) | map('default', big) | list | length }}",
}


@pytest.mark.parametrize("name", BY_SIZE)
def test_no_large_operation_is_free_when_the_base_runs_out(name: str) -> None:
    template = make(BY_SIZE[name])._template
    with pytest.raises(Overspent, match="it needs more loop iterations"):
        template.plain({"messages": LONG.messages})


MAKING: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    **dict.fromkeys(("capitalize", "casefold", "lower", "splitlines", "swapcase", "title", "upper"), st.just(())),
    **dict.fromkeys(("split", "rsplit"), st.tuples(st.sampled_from([None, " ", ",", "a", "ab"]), st.integers(-1, 9))),
    **dict.fromkeys(("center", "ljust", "rjust"), st.tuples(st.integers(-9, 999), st.sampled_from("a\U0001f600"))),
    **dict.fromkeys(("expandtabs", "zfill"), st.tuples(st.integers(-9, 999))),
    "replace": st.tuples(st.sampled_from(["", "a", "ab", "\u4e2d"]), st.sampled_from(["", "b", "\U0001f600", "a" * 9])),
}


@pytest.mark.parametrize("name", MAKING)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_methods_are_paid_by_what_they_make(name: str, data: st.DataObject) -> None:
    text = data.draw(WORDS) * data.draw(st.sampled_from([1, 40]))
    environment = TemplateEnvironment(None)
    environment.allowance.remaining = ENOUGH
    made = call_method(environment, text, name, data.draw(MAKING[name]), {})
    held = sys.getsizeof(made) + (sum(map(sys.getsizeof, made)) if isinstance(made, list) else 0)
    assert ENOUGH - environment.allowance.remaining >= held - sys.getsizeof("\u0416")


A_TEXT = "{% set a = 'a' * 8000000 %}{% set b = 'b' * 8000000 ~ 'a' %}"
DEEP = "{% set n = namespace(x=1) %}{% for i in range(900) %}{% set n.x = [n.x] %}{% endfor %}"
SLOW = {
    "rfind": A_TEXT + "{{ a.rfind('ab' ~ a[4000000:]) }}",
    "rindex": A_TEXT + "{{ a.rindex('ab' ~ a[4000000:]) }}",
    "rpartition": A_TEXT + "{{ a.rpartition('ab' ~ a[4000000:]) | length }}",
    "rsplit": A_TEXT + "{{ a.rsplit('ab' ~ a[4000000:]) | length }}",
    "rsplit by name": A_TEXT + "{{ a.rsplit(sep='ab' ~ a[4000000:]) | length }}",
    "strip": A_TEXT + "{{ a.strip(b) | length }}",
    "lstrip": A_TEXT + "{{ a.lstrip(b) | length }}",
    "rstrip": A_TEXT + "{{ a.rstrip(b) | length }}",
    "trim": A_TEXT + "{{ a | trim(b) | length }}",
    "Markup": A_TEXT + "{{ (a | safe).rfind('ab' ~ a[4000000:]) }}",
    "looked up": A_TEXT + "{% set f = a['rfind'] %}{{ f('ab' ~ a[4000000:]) }}",
    "startswith": A_TEXT + "{{ a.startswith((a[1:4000000] ~ 'b' ~ a[4000000:],) * 999999) }}",
    "endswith": A_TEXT + "{{ a.endswith((a[1:4000000] ~ 'b' ~ a[4000000:],) * 999999) }}",
    "replace by names": A_TEXT + "{{ a | replace(new=b, old='a') }}",
    "replace numbers": A_TEXT + "{{ ('1' * 9999) | replace(1, b) }}",
    "Markup.join": A_TEXT + "{{ (a | safe).join('abc' | list * 99) }}",
    "Markup.replace": A_TEXT + "{{ ('<' | safe * 9999).replace('&', a) }}",
    "indented JSON of deep lists": DEEP + "{{ ([n.x] * 99999) | tojson(indent=64) }}",
    "wordwrap": A_TEXT + "{{ a[:999999] | wordwrap(1) }}",
    "striptags": "{{ ('<!-- -->' * 200000) | striptags }}",
    "format of many": A_TEXT + "{{ ('{0}' * 99).format(a) }}",
    "format with widths": "{{ ('{0:9999999}' * 99).format(1) }}",
    "list of sums": "{{ ([messages * 999999] * 9) | sum(start=[]) }}",
    "addition in one expression": A_TEXT + "{{ " + "+".join("ab" * 40) + "}}",
    "concatenation in one expression": A_TEXT + "{{ " + "~".join("ab" * 40) + "}}",
    "splitlines": "{{ ('\n' * 8000000).splitlines() | length }}",
    "list in list, as text": DEEP.replace("[n.x]", "[n.x, n.x]").replace("900", "60") + "{{ 'a' + n.x | string }}",
}


@pytest.mark.parametrize("name", SLOW)
def test_what_goes_by_the_square_is_refused_soon(name: str) -> None:
    template = make(SLOW[name])
    start = time.process_time()
    with pytest.raises(SequenceError, match="it needs more loop iterations"):
        template.render(PAIR)
    assert time.process_time() - start < 10


def test_tuples_in_tuples_are_no_keys() -> None:
    for source in (
        "{{ {((messages | length,),): 1} }}",
        "{{ dict([(((1,), 2), 1)]) }}",
        "{{ {}.get(((1,),)) }}",
        "{{ [((1,),)] | unique | list }}",
    ):
        with pytest.raises(SequenceError, match="nested tuples as a key"):
            make(source).render(PAIR)


BENIGN = [
    "m.content.split('</think>')[-1].lstrip('\n')", "m.content.split('\n')[0]", "m.content | replace('\n', '\n    ')", "m.content.strip() | trim",
    "m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')", "m | tojson(indent=4)", "'%s' | format(m.content)",
    "m.content | replace('&', '&amp;') | replace('<', '&lt;')", "m.content | title | lower", "m.content | indent(4)", "m.content.rsplit('</think>', 1)[0]",
    "'{}: {}'.format(m.role, m.content)", "m.content | e", "m.content | safe + '<x>'", "('' + m.content) ~ m.content + '\n'", "m.content.replace(m.role, m.content[:99])",
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [1, 50, 5000])
@pytest.mark.parametrize("letters", ["word, <a>\n", "\u4e2d\u6587 "])
def test_what_ordinary_templates_do_to_long_conversations_passes(count: int, letters: str) -> None:
    messages = [(said if i % 2 else user)(letters * (1_000_000 // count // len(letters))) for i in range(count)]
    for expression in BENIGN:
        source = f"{{% for m in messages %}}{{{{ m.role ~ '\n' ~ ({expression}) }}}}{{% endfor %}}"
        assert make(source)._template.plain({"messages": messages})
