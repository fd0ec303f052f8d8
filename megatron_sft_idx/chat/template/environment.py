"""The sandbox that chat templates run in.

Templates come from model hubs and are untrusted code. They run in Jinja's immutable sandbox, set up as
transformers sets it up (``trim_blocks``, ``lstrip_blocks``, loop controls, ``raise_exception``,
``strftime_now``, a ``tojson`` that does not escape HTML), so that the same template gives the same text. What
differs is deliberate: nothing random, no clock, bounded repetition, and short cuts for the attribute look-ups
and calls that chat templates make thousands of times on plain dicts, strings and lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from megatron_sft_idx.chat.template.generated import LOOP_ATTRIBUTES, LookUps
from megatron_sft_idx.errors import FormatError

__all__ = ["GENERATION", "RaisedByTemplate", "TemplateEnvironment"]

GENERATION = "_generation"
"""The method name by which ``{% generation %}`` blocks are known in a syntax tree."""

MAX_REPEATED = 1 << 24
"""The longest string or list that ``*`` may make, in items."""

_MISSING = object()
_PLAIN = frozenset({str, int, bool, float, list, dict, type(None)})
_DICT_ATTRIBUTES = frozenset(dir(dict))


class RaisedByTemplate(TemplateError):  # noqa: N818 - not an error of ours: the template's own words
    """What a template says through ``raise_exception``."""


class _Generation(Extension):
    """Parses ``{% generation %}`` into a call block, which ``trace`` turns into marks."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method(GENERATION), [], [], body).set_lineno(line)


class _TemplateNamespace(Namespace):
    """A namespace without underscore names, which could reach Python's internals.

    Its names are plain attributes, unlike its parent's, because templates read them in every loop.
    """

    __getattribute__ = object.__getattribute__

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # leaves the name `self` to templates
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name[:1] == "_":
            raise SecurityError(f"templates cannot store underscore names such as {name!r} on a namespace")
        self.__dict__[name] = value

    def __repr__(self) -> str:
        return f"<Namespace {self.__dict__!r}>"


class _TemplateDict:
    """``dict(...)`` for templates: makes dicts, and is not the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with the names and filters that chat templates expect.

    The overridden look-ups answer the common cases (exact dicts, strings, lists, ``loop`` and namespaces) as
    the sandbox would, and leave everything else to it.
    """

    code_generator_class = LookUps
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, template_date: str | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters["random"] = _refuse_random
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _clock(template_date)
        self.globals["dict"] = _TemplateDict()
        self.globals["namespace"] = _TemplateNamespace
        self._methods = {
            kind: frozenset(
                name
                for name in dir(kind)
                if name not in ("format", "format_map")
                and super(TemplateEnvironment, self).is_safe_attribute(kind(), name, None)
            )
            for kind in (str, list, dict)
        }

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Answer ``obj.attribute`` as the sandbox does."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            value = obj.get(attribute, _MISSING)
            return value if value is not _MISSING else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext:
            if attribute in LOOP_ATTRIBUTES:
                return getattr(obj, attribute)
        elif kind is _TemplateNamespace:
            value = obj.__dict__.get(attribute, _MISSING)
            if type(value) in _PLAIN:
                return value
        elif attribute in self._methods.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Answer ``obj[argument]`` as the sandbox does."""
        if type(obj) is dict and type(argument) is str:
            value = obj.get(argument, _MISSING)
            if value is not _MISSING:
                return value
            if argument not in _DICT_ATTRIBUTES:
                return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def call(
        __self,  # noqa: N805 - templates may pass any keyword
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call from a template: methods of plain values and ``namespace`` directly, the rest through the sandbox.

        Methods that change their object never get here: the sandbox refuses to hand them out.
        """
        known = type(__obj) is BuiltinMethodType and type(__obj.__self__) in __self._methods
        if known or __obj is _TemplateNamespace:
            if kwargs:  # compiled loops and blocks pass their scopes along, meant for the context
                kwargs.pop("_loop_vars", None)
                kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left * right`` and ``left ** right``, refusing results that would not fit in memory."""
        if operator == "**":
            if not all(type(side) in (int, float) and abs(side) <= 4096 for side in (left, right)):
                raise SecurityError(f"{left!r} ** {right!r} is too large for a chat template")
        else:
            for one, other in ((left, right), (right, left)):
                sequence = isinstance(one, (str, list, tuple)) and isinstance(other, int)
                if sequence and len(one) * other > MAX_REPEATED:
                    raise SecurityError(f"repeating something {other} times is too much for a chat template")
        return super().call_binop(context, operator, left, right)

    def __reduce__(self) -> Any:
        raise TypeError("a template's environment stays in its process; pickle the ChatTemplate")


def _refuse_random(*_args: Any) -> Any:
    raise SecurityError("the random filter would make other text from the same row; take it out of the template")


def _raise_exception(message: Any) -> None:
    raise RaisedByTemplate(str(message))


_encode_json = json.JSONEncoder(ensure_ascii=False).encode


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, Undefined):
        raise TypeError(f"tojson: {value._undefined_message}")
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _encode_json(value)  # the same text without building an encoder each time
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _clock(template_date: str | None) -> Callable[[str], str]:
    day: datetime | None = None
    if template_date is not None:
        try:
            day = datetime.strptime(template_date, "%Y-%m-%d")
        except ValueError:
            raise FormatError(f"--template-date: {template_date!r} is not a date like 2025-01-31") from None

    def strftime_now(style: str) -> str:
        if day is None:
            raise FormatError(
                "the chat template asks for today's date, so its text would change from day to day; "
                "give the date it should see with --template-date YYYY-MM-DD"
            )
        return day.strftime(style)

    return strftime_now
