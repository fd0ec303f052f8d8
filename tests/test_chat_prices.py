"""What a template's operations cost: at least the memory that they make, and no large one for nothing."""

# ruff: noqa: E501 - tables of templates, one a line

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_styles import make, said, talk, user

from megatron_sft_idx.chat.template.allowance import BASE, Allowance, Overspent
from megatron_sft_idx.chat.template.prices import call_method
from megatron_sft_idx.errors import SequenceError

ENOUGH = 1 << 60
PAIR = talk(user("question"), said("words of mine"))
LONG = talk(user("q" * 200_000), said("words of mine"))
WORDS = st.text(st.sampled_from("ab ,\n\t<'\x85\u00df\u00e9\u0130\u0390\u4e2d\U0001f600"), max_size=300)


def nearly_spent(units: int) -> Allowance:
    """An allowance that has so much left of its base, and much more for a large conversation."""
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
# Each is paid by a value's size, and the base, of which 50 or 2 million units are left, runs out while that is found.
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
    with pytest.raises(Overspent, match="it takes more loop iterations"):
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
    allowance = Allowance()
    allowance.remaining = ENOUGH
    made = call_method(allowance, text, name, data.draw(MAKING[name]), {})
    held = sys.getsizeof(made) + (sum(map(sys.getsizeof, made)) if isinstance(made, list) else 0)
    assert ENOUGH - allowance.remaining >= held - sys.getsizeof("\u0416")


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
    with pytest.raises(SequenceError, match="it takes more loop iterations"):
        template.render(PAIR)
    assert time.process_time() - start < 10


def test_tuples_in_tuples_are_no_keys() -> None:
    for source in (
        "{{ {((messages | length,),): 1} }}",
        "{{ dict([(((1,), 2), 1)]) }}",
        "{{ {}.get(((1,),)) }}",
        "{{ [((1,),)] | unique | list }}",
    ):
        with pytest.raises(SequenceError, match="a key of tuples within tuples"):
            make(source).render(PAIR)


BENIGN = [
    "m.content.split('</think>')[-1].lstrip('\n')", "m.content.split('\n')[0]", "m.content | replace('\n', '\n    ')", "m.content.strip() | trim",
    "m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')", "m | tojson(indent=4)", "'%s' | format(m.content)",
    "m.content | replace('&', '&amp;') | replace('<', '&lt;')", "m.content | title | lower", "m.content | indent(4)", "m.content.rsplit('</think>', 1)[0]",
    "'{}: {}'.format(m.role, m.content)", "m.content | e", "m.content | safe + '<x>'", "('' + m.content) ~ m.content + '\n'", "m.content.replace(m.role, m.content[:99])",
]  # fmt: skip


@pytest.mark.parametrize("count", [1, 50, 5000])
@pytest.mark.parametrize("letters", ["word, <a>\n", "\u4e2d\u6587 "])
def test_what_ordinary_templates_do_to_long_conversations_passes(count: int, letters: str) -> None:
    messages = [(said if i % 2 else user)(letters * (1_000_000 // count // len(letters))) for i in range(count)]
    for expression in BENIGN:
        source = f"{{% for m in messages %}}{{{{ m.role ~ '\n' ~ ({expression}) }}}}{{% endfor %}}"
        assert make(source)._template.plain({"messages": messages})
