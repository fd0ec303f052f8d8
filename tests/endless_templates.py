"""Chat templates that try to use too much memory or time, and a program that measures each.

``python endless_templates.py endless 30`` renders 30 of them, always the same ones, one after the other. The process
may use at most 1 GiB more address space than at its start. It prints one JSON object per line: name, seconds, peak
memory above the start in MiB, and type and text of the error. ``python endless_templates.py multiplying 300`` does the
same for filters and methods with large arguments.
"""

# ruff: noqa: E501 - templates, one per line

from __future__ import annotations

import json
import random
import resource
import sys
import time
from pathlib import Path

from jinja2.defaults import DEFAULT_FILTERS

from megatron_sft_idx.chat.template import ChatTemplate, MaskOptions
from megatron_sft_idx.chat.types import Conversation


def repeated(first: str, then: str, times: int = 99999) -> str:
    """Return a template that sets ``n.x`` repeatedly."""
    return f"{{% set n = namespace(x={first}) %}}{{% for i in range({times}) %}}{{% set n.x = {then} %}}{{% endfor %}}{{{{ n.x }}}}"


def loops(depth: int, body: str = "") -> str:
    """Return a template of nested loops of 99,999 iterations each."""
    return "{% for i in range(99999) %}" * depth + body + "{% endfor %}" * depth


BIG = "{% set big = 'abcdefgh' * 2000000 %}"

ENDLESS = {
    "~ doubles": repeated("'a'", "n.x ~ n.x"),
    "+ doubles": repeated("'a'", "n.x + n.x"),
    "+ doubles, wide characters": repeated("'\N{GRINNING FACE}'", "n.x + n.x"),
    "+ trebles, in one expression": repeated("'a'", "n.x + 'b' + n.x + 'c' + n.x + n.x"),
    "+ doubles, in a variable named loop": "{% set loop = {'index': 'a'} %}" + "{% set loop = {'index': loop.index + loop.index} %}" * 60,
    "+ doubles, in an argument named loop": "{% macro f(loop, k) %}{% if k %}{{ f({'index': loop.index + loop.index}, k - 1) }}{% endif %}{% endmacro %}{{ f({'index': 'a'}, 60) }}",
    "+ of a list": repeated("[1]", "n.x + n.x"),
    "+ of a tuple": repeated("(1,)", "n.x + n.x"),
    "list in list in list": repeated("[1]", "[n.x, n.x]"),
    "list in list, as JSON": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "list in list, compared": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "tuple in tuple, as a key": "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} }}",
    "deep tuple, as a key": "{% set n = namespace(x=(1,)) %}{% for i in range(99999) %}{% set n.x = (n.x,) %}{% endfor %}{{ {n.x: 1} }}",
    "tuple in tuple, as a subscript": "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {}[n.x] }}",
    "arguments of a macro": "{% macro f(k) %}{% if k %}{{ f(k - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}{% endmacro %}{{ f(60, 1, 2) }}",
    "n * n": repeated("3", "n.x * n.x", 40),
    "n + n": repeated("1", "n.x + n.x"),
    "n - -n": repeated("1", "n.x - (0 - n.x)"),
    "**": "{{ 9 ** 9 ** 9 }}",
    "**, often": loops(2, "{% set x = 4095 ** 4095 %}"),
    "//, often": "{% set y = 4000 ** 4000 %}" + loops(2, "{% set x = y // 3 ** 99 %}"),
    "divisibleby, often": "{% set y = 4000 ** 4000 %}" + loops(2, "{% set x = y is divisibleby(3 ** 99) %}"),
    "** and *": "{{ (4000 ** 4000) * (4000 ** 4000) * (4000 ** 4000) }}",
    "text * number": "{{ 'a' * 10 ** 10 }}",
    "list * number": "{{ [0] * 10 ** 10 }}",
    "text * number, often": repeated("''", "n.x + 'a' * 9999999"),
    "% with a width": "{{ '%1000000000d' % 1 }}",
    "% with a precision": "{{ '%.1000000000f' % 1 }}",
    "% with a star": "{{ '%*d' % (10 ** 9, 1) }}",
    "% by name": BIG + "{{ ('%(a)s' * 1000) % {'a': big} }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format, nested": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "format of text, often": BIG + "{{ ('{0}' * 1000).format(big) }}",
    "format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "center": "{{ 'a'.center(10 ** 10) }}",
    "center, constant": "{{ 'a'.center(10000000000) }}",
    "center filter": "{{ 'a' | center(10 ** 10) }}",
    "center filter, constant": "{{ 'a' | center(1000000000) }}",
    "center, by map": "{{ ['a'] | map('center', 10 ** 10) | join }}",
    "center, looked up": "{% set f = 'a'['center'] %}{{ f(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "rjust": "{{ 'a'.rjust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "replace": BIG + "{{ big.replace('a', big) }}",
    "replace nothing": BIG + "{{ big.replace('', 'b' * 9999) }}",
    "replace filter": BIG + "{{ big | replace('', 'b' * 9999) }}",
    "join": BIG + "{{ big.join([1, 2] | map('string')) }}{{ big.join('a' * 9999) }}",
    "join filter": BIG + "{{ range(99999) | join(big) }}",
    "join of large parts": BIG + "{{ ([big] * 9999) | join }}",
    "split": BIG + "{{ big.split('a') | length }}{{ ('a ' * 8000000).split() | length }}{{ ('a ' * 8000000).split() | length }}",
    "splitlines": "{{ ('a\n' * 8000000).splitlines() | length }}",
    "translate": "{{ 'a'.translate({97: 'b' * 9999999}) }}",
    "encode": BIG + "{{ (big.encode() * 1000) | length }}",
    "to_bytes": "{{ (5).to_bytes(10 ** 10) }}",
    "slice filter": "{{ [1] | slice(10 ** 9) | list }}",
    "slice filter, in a loop": "{% for a in [1] | slice(10 ** 9) %}{% endfor %}",
    "batch filter": "{{ [1] | batch(10 ** 9, 'a') | list }}",
    "indent filter": "{{ ('a\n' * 9999) | indent(10 ** 6) }}",
    "indent filter, text": BIG + "{{ ('a\n' * 9999) | indent(big) }}",
    "wordwrap filter": BIG + "{{ big | wordwrap(1) }}",
    "wordwrap filter, wrapstring": BIG + "{{ ('a ' * 9999) | wordwrap(1, wrapstring=big) }}",
    "tojson with an indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "tojson, often": BIG + loops(2, "{% set x = big | tojson %}"),
    "urlize": BIG + "{{ ('a.com ' * 99999) | urlize(rel=big) }}",
    "xmlattr": BIG + "{{ {'a': big, 'b': big, 'c': big, 'd': big} | xmlattr }}",
    "escape": "{{ ('<' * 9999999) | escape | replace('l', '<' * 999) }}",
    "pprint": "{{ range(99999) | list | pprint }}",
    "striptags": "{{ ('<!-- -->' * 1000000) | striptags }}",
    "title": BIG + "{{ big | title }}{{ big | title }}",
    "sum of lists": "{% set l = range(9999) | list %}{{ ([l] * 9999) | sum(start=[]) | length }}",
    "sort": "{% set l = range(99999) | list %}{% for i in range(9999) %}{% set x = l | sort %}{% endfor %}",
    "unique": BIG + loops(2, "{% set x = [big, big] | unique | list %}"),
    "list of a range, often": "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + [range(99999) | list] %}{% endfor %}",
    "round": "{{ 5 | round(-10 ** 9) }}{{ 5 | round(10 ** 9, 'ceil') }}",
    "int": "{{ ('1' * 9999999) | int(base=2) }}",
    "dict of a range": "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + [dict.fromkeys(range(99999))] %}{% endfor %}",
    "slices of text": BIG + "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + [big[i:]] %}{% endfor %}",
    "slices of messages": loops(2, "{% set x = messages[1:] %}"),
    "search": BIG + loops(2, "{% if 'no' in big %}{% endif %}"),
    "comparison": BIG + "{% set other = big[1:] ~ 'h' %}" + loops(2, "{% if other == big ~ '' %}{% endif %}"),
    "strip": BIG + loops(2, "{% set x = big.strip() %}"),
    "two loops": loops(2),
    "six loops": loops(6),
    "six loops that write": loops(6, "a"),
    "two loops that write much": loops(2, "{{ messages[0].content * 999 }}"),
    "loop that captures": "{% set x %}" + loops(2, "{{ messages[0].content * 999 }}") + "{% endset %}",
    "loop of generators": loops(2, "{% for m in messages | map(attribute='role') | list %}{{ m }}{% endfor %}"),
    "loop with a condition": "{% for i in range(99999) %}{% for j in range(99999) if j > i %}{% endfor %}{% endfor %}",
    "loop length of a generator": loops(1, "{% for j in range(99999) | map('string') %}{{ loop.length }}{% break %}{% endfor %}"),
    "long range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "recursive loop": "{% for a in [1, 2] recursive %}{% if loop.depth < 99 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "recursive macro": "{% macro f(k) %}{% if k %}{{ f(k - 1) }}{{ f(k - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "recursive block": "{% set n = namespace(x=0) %}{% block b scoped %}{% set n.x = n.x + 1 %}{% if n.x < 99 %}{{ self.b() }}{{ self.b() }}{% endif %}{% set n.x = n.x - 1 %}{% endblock %}",
    "macro that writes much": BIG + "{% macro f() %}{{ big }}{{ big }}{{ big }}{{ big }}{% endmacro %}{{ f() ~ f() ~ f() ~ f() }}",
    "caller": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call f() %}" * 40 + "a" + "{% endcall %}" * 40,
    "filter block": BIG + "{% filter replace('a', big) %}{{ big }}{% endfilter %}",
    "strftime": "{{ strftime_now('%1000000000Y') }}",
    "strftime, long": "{{ strftime_now('%c' * 9999999) }}",
    "raise_exception": BIG + "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ raise_exception(n.x) }}",
    "autoescape": "{% autoescape true %}" + repeated("'<'", "n.x ~ n.x") + "{% endautoescape %}",
    "autoescape, replaced in": "{% autoescape true %}{{ ('<' * 1000000) | replace('l', ('x' * 1000000) | safe) }}{% endautoescape %}",
    "autoescape, replaced": "{% autoescape true %}{{ ('<' * 1000000) | replace('&' | safe, 'x' * 1000000) }}{% endautoescape %}",
    "Markup, replaced": "{{ (('<' * 1000000) | escape).replace('<', 'x' * 1000000).replace('l', 'x' * 1000000) }}",
    "Markup": repeated("'<' | escape", "n.x + n.x"),
    "Markup, joined": BIG + "{{ ('<' | escape).join([big] * 9999) }}",
    "Markup, %": BIG + "{{ (('%s' * 99) | escape) % ((big,) * 99) }}",
    "cyclers": "{% set r = range(99999) %}" + loops(2, "{% set c = cycler(*r) %}"),
    "cycler": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = cycler(n.x, n.x).items %}{% endfor %}{{ n.x }}",
    "unique, of one hash": "{{ range(0, 99999 * 2305843009213693951, 2305843009213693951) | unique | list }}",
    "fromkeys, of one hash": "{{ dict.fromkeys(range(0, 99999 * 2305843009213693951, 2305843009213693951)) }}",
    "sort by many attributes": "{{ range(99999) | sort(attribute='a,' * 99999) }}",
    "groupby, a long attribute": "{{ range(99999) | groupby('a.' * 99999, default={}) }}",
    "join, a long attribute": "{% set n = namespace(x=['a']) %}{% for i in range(999) %}{% set n.x = [n.x] %}{% endfor %}{{ ([n.x] * 999999) | join('', attribute='0.' * 999 + '0') }}",
    "groupby": "{% set l = range(99999) | list %}{% for i in range(9999) %}{% set x = l | map('string') | groupby('0') %}{% endfor %}",
    "namespaces of many": "{% set d = dict.fromkeys(range(99999) | map('string')) %}" + loops(2, "{% set x = namespace(d) %}{% set y = namespace(**d) %}"),
    "macro of many": "{% macro f() %}{{ kwargs | length }}{% endmacro %}{% set d = dict.fromkeys(range(99999) | map('string')) %}" + loops(2, "{{ f(**d) }}"),
    "map, a long attribute": "{% set n = namespace(x=['a']) %}{% for i in range(999) %}{% set n.x = [n.x] %}{% endfor %}{{ ([n.x] * 999999) | map(attribute='0.' * 999 + '0') | list }}",
    "sum, a long attribute": "{% set n = namespace(x=[1]) %}{% for i in range(999) %}{% set n.x = [n.x] %}{% endfor %}{% for i in range(9999) %}{{ ([n.x] * 9) | sum(attribute='0.' * 999 + '0') }}{% endfor %}",
    "Markup.escape": repeated("[]", "n.x + [('' | safe).escape('<' * 9999999)]"),
    "format of many fields": repeated("''", "('{0}' * 99999).format(1)"),
    "namespace in itself": "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
}  # fmt: skip

LARGE = "{% set s = 'aB <\\t\\n' * 60000 %}{% set w = s[:-1] ~ '\U0001f600' %}{% set l = [s[:9]] * 9000 %}{% set d = {'a': s, 'b': l} %}"
"""Statements that set large variables: narrow text, wide text, a list, a dict."""

_ARGUMENTS = (
    "",
    "10 ** 9",
    "s",
    "w",
    "l",
    "'a', s",
    "'', s",
    "9 ** 9, s",
    "s, s",
    "-(10 ** 9)",
    "'a.' * 99999",
    "1, 'ceil'",
    "attribute='0.' * 9999",
)
_FILTERS = sorted({*DEFAULT_FILTERS} - {"random"})
_TEXT_METHODS = [name for name in dir(str) if not name.startswith("_")]
MULTIPLYING = {
    **{
        f"{v} | {name}({arguments})": f"{LARGE}{{% set x = {v} | {name}({arguments}) %}}{{{{ (x | list)[0] | string | length }}}}"
        for name in _FILTERS
        for v in "sld"
        for arguments in _ARGUMENTS
    },
    **{
        f"{v}.{name}({arguments})": f"{LARGE}{{{{ {v}.{name}({arguments}) | string | length }}}}"
        for name in _TEXT_METHODS
        for v in ("w", "(s | safe)")
        for arguments in _ARGUMENTS
    },
}
"""Jinja filters and string methods with arguments that may multiply output or take long."""


FAMILIES = {"endless": ENDLESS, "multiplying": MULTIPLYING}


def drawn(family: str, count: int) -> dict[str, str]:
    """Return some templates of a family, always the same ones."""
    return dict(random.Random(0).sample(list(FAMILIES[family].items()), count))


PAIR = Conversation([{"role": "user", "content": "question"}, {"role": "assistant", "content": "words"}], [1.0, 1.0])


def _status(field: str) -> int:
    """Return a number of kibibytes from /proc."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def main() -> None:
    """Render each template and print the outcome."""
    limit = (_status("VmSize") << 10) + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    options = MaskOptions(template_date="2025-01-31")
    family, count = sys.argv[1], int(sys.argv[2])
    for name, source in drawn(family, count).items():
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        before, start = _status("VmRSS"), time.perf_counter()
        try:
            template = ChatTemplate(source, options=options, name="t.jinja")
            says = (
                template.render(PAIR).text
                if family == "endless"
                else template._template.plain({"messages": PAIR.messages})
            )
            kind = "rendered"
        except Exception as error:
            kind, says = type(error).__name__, str(error)
        seconds = round(time.perf_counter() - start, 2)
        peak = (_status("VmHWM") - before) >> 10
        print(json.dumps({"name": name, "seconds": seconds, "mib": peak, "kind": kind, "says": says[:300]}), flush=True)


if __name__ == "__main__":
    main()
