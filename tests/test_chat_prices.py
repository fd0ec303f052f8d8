"""What a template's operations cost: at least the memory that they make, and no large one for nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_styles import make, said, talk, user

from megatron_sft_idx.chat.template.allowance import BASE, Allowance, Overspent
from megatron_sft_idx.chat.template.environment import TemplateEnvironment
from megatron_sft_idx.chat.template.prices import METHOD_FACTORS, call_method
from megatron_sft_idx.errors import SequenceError

ENOUGH = 1 << 60
LONG = talk(user("q" * 200_000), said("words of mine"))
WORDS = st.text(st.sampled_from("ab ,\n\t<'\x85\u00df\u00e9\u0130\u0390\u4e2d\U0001f600"), max_size=300)


def spent(work: Callable[[Allowance], Any]) -> tuple[int, Any]:
    """What some work costs, and what it gives."""
    allowance = Allowance()
    allowance.left = ENOUGH
    made = work(allowance)
    return ENOUGH - allowance.left, made


def price_of(text: str, name: str, *args: Any) -> tuple[int, Any]:
    """What ``text.name(*args)`` costs, and what it gives."""
    return spent(lambda allowance: call_method(allowance, text, name, args, {}))


def nearly_spent(units: int) -> Allowance:
    """An allowance that has so much left of its base, and much more for a large conversation."""
    allowance = Allowance()
    allowance.start({"messages": LONG.messages})
    allowance.spend(BASE - units)
    return allowance


@pytest.mark.parametrize("left", [0, 1, 5000, 1 << 20, BASE])
def test_what_is_weighed_is_told_even_where_the_base_runs_out(left: int) -> None:
    value = {"a": "b" * 100_000, "c": ["d"] * 500}
    assert nearly_spent(left).weigh(value) == spent(lambda allowance: allowance.weigh(value))[0] > 100_000


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


def held(value: Any) -> int:
    """Bytes of a text, or of a list of texts and all that is in it."""
    return sys.getsizeof(value) + (sum(map(sys.getsizeof, value)) if isinstance(value, (list, tuple)) else 0)


@pytest.mark.parametrize("name", ["split", "rsplit"])
@given(text=WORDS, sep=st.sampled_from([None, " ", ",", "a", "ab"]), count=st.integers(-1, 9))
@settings(max_examples=150, deadline=None)
def test_cutting_is_paid_by_what_it_makes(name: str, text: str, sep: str | None, count: int) -> None:
    units, made = price_of(text, name, sep, count)
    assert units >= held(made)


@pytest.mark.parametrize("text", ["ab " * 85, "\u4e2d " * 128, "a " * 128, "ab,\n" * 64], ids=range(4))
def test_short_texts_are_not_cut_for_a_flat_price(text: str) -> None:
    for name, args in (("split", ()), ("split", (text[-1],)), ("rsplit", ()), ("splitlines", ())):
        units, made = price_of(text, name, *args)
        assert units >= held(made)


@given(WORDS, st.sampled_from(["", "a", "ab", "\u4e2d"]), st.sampled_from(["", "b", "\U0001f600", "a" * 9]))
@settings(max_examples=150, deadline=None)
def test_replacing_is_paid_by_what_it_makes(text: str, old: str, new: str) -> None:
    units, made = price_of(text, "replace", old, new)
    assert units >= held(made) - sys.getsizeof("\u0416")


@pytest.mark.parametrize("name", ["capitalize", "casefold", "encode", "lower", "swapcase", "title", "upper"])
@given(text=WORDS)
@settings(max_examples=60, deadline=None)
def test_results_larger_than_their_text_are_paid_for(name: str, text: str) -> None:
    units, made = price_of(text, name)
    assert units >= held(made) - sys.getsizeof("\u0416")


def test_encoding_is_paid_by_what_it_makes() -> None:
    text = "\N{GREEK SMALL LETTER IOTA WITH DIALYTIKA AND TONOS}\U0001f600\u4e2da" * 100
    for encoding in ("utf-8", "utf-16", "utf-32", "ascii"):
        for errors in ("replace", "xmlcharrefreplace", "backslashreplace", "namereplace"):
            units, made = price_of(text, "encode", encoding, errors)
            assert units >= len(made)
            units, made = price_of("a" * 100, "encode", encoding, errors)
            assert units >= len(made) - 4  # the mark of the byte order


A_TEXT = "{% set a = 'a' * 8000000 %}{% set b = 'b' * 8000000 ~ 'a' %}"
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
    "punycode": "{{ ('\u00e4\u4e2d' * 4000000).encode('punycode') | length }}",
    "from punycode": "{{ ('a' * 8000000 ~ '-' ~ 'b' * 4000000).encode().decode('punycode') | length }}",
}


@pytest.mark.parametrize("name", SLOW)
def test_what_goes_by_the_square_is_refused(name: str) -> None:
    template = make(SLOW[name])
    with pytest.raises(SequenceError, match="it takes more loop iterations"):
        template.render(talk(user("question"), said("words of mine")))


@pytest.mark.parametrize("text", ["words of mine", "\u00df\U0001f600" * 40], ids=["ASCII", "wide"])
def test_one_operation_has_one_price(text: str) -> None:
    # By its method, by the method as compiled templates call it, and by the filter that does nothing else.
    environment = TemplateEnvironment(None)
    for name in METHOD_FACTORS:
        args = ("w",) if name in ("count", "endswith", "find", "partition", "rfind", "rpartition", "startswith") else ()
        args = (text[:1],) if name in ("index", "rindex", "removeprefix", "removesuffix") else args
        units, made = price_of(text, name, *args)
        environment.allowance.left = ENOUGH
        context = environment.from_string("").new_context()
        assert environment.call_method(context, text, name, None, None, *args) == made
        assert ENOUGH - environment.allowance.left == units
    for name in ("capitalize", "lower", "upper"):
        environment.allowance.left = ENOUGH
        weight = spent(lambda allowance: allowance.weigh(((), {})))[0]
        assert environment.filters[name](text) == getattr(text, name)()
        assert ENOUGH - environment.allowance.left - weight == price_of(text, name)[0]


def test_a_refusal_takes_no_more_than_the_conversation_allows() -> None:
    allowance = nearly_spent(0)
    with pytest.raises(Overspent):
        allowance.weigh("a" * (1 << 29))
