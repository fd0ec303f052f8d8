"""Functions and classes that a chat template can use by name, replacing or extending Jinja's own.

``raise_exception``, ``strftime_now``, ``dict`` and ``namespace`` work as in transformers. Nothing is random, and the
date is an option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

from megatron_sft_idx.chat.template.allowance import POINTER, Overspent
from megatron_sft_idx.chat.template.filters import refused
from megatron_sft_idx.chat.template.operators import Operators
from megatron_sft_idx.errors import FormatError

MAX_MESSAGE = 2000
"""The longest message of ``raise_exception``, in characters."""


class RaisedByTemplate(TemplateError):  # noqa: N818 - not our error, but the template's message
    """A message raised by a template through ``raise_exception``."""


class TemplateNamespace(Namespace):
    """A namespace without names that begin with an underscore, which could reach Python's internals.

    Its names are plain attributes, unlike in its parent, because templates read them in every loop.
    """

    __getattribute__ = object.__getattribute__

    def __init__(self, names: Mapping[str, Any]) -> None:
        for name, value in names.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name[:1] == "_":
            raise SecurityError(f"templates cannot store underscore names such as {name!r} on a namespace")
        self.__dict__[name] = value

    def __repr__(self) -> str:
        return f"<Namespace {self.__dict__!r}>"


def paid_dict(operators: Operators, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    """``dict(*args, **kwargs)``, paid for."""
    if args and not isinstance(args[0], Mapping):
        pairs = operators.allowance.paid_list(args[0])
        args = ([(operators.key(key), value) for key, value in pairs], *args[1:])
    for items in (*args, kwargs):
        operators.allowance.spend(4 * POINTER * len(items))
    return dict(*args, **kwargs)


class TemplateDict:
    """``dict(...)`` for templates: makes dicts, but is not the class."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """A dict of pairs, of another dict, or of keywords."""
        return paid_dict(self._operators, args, kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        """A dict with these keys, each with the same value."""
        return dict.fromkeys(map(self._operators.key, self._operators.allowance.paid_list(keys)), value)


def globals_of(operators: Operators, template_date: str | None) -> dict[str, Any]:
    """Return functions for templates, by name, that extend or replace Jinja's own.

    Raises:
        ValueError: ``template_date`` is not a date.
    """
    day = None if template_date is None else datetime.strptime(template_date, "%Y-%m-%d")

    def strftime_now(style: str) -> str:
        if day is None:
            raise FormatError(
                "the chat template uses today's date, so its text would change every day; set a fixed date with"
                " --template-date YYYY-MM-DD"
            )
        if re.search(r"%[^a-zA-Z%]*[0-9]", style):  # the C library of some machines pads a field to this width
            raise Overspent("it uses a date format with a width; write %Y, %m or %d without a width")
        operators.allowance.spend(256 * len(style))
        return day.strftime(style)

    def raise_exception(message: Any) -> None:
        said = operators.allowance.text(message)
        raise RaisedByTemplate(said if len(said) <= MAX_MESSAGE else f"{said[:MAX_MESSAGE]}...")

    return {
        "dict": TemplateDict(operators),
        "lipsum": refused("lipsum()", "it would give different text for the same row"),
        "namespace": TemplateNamespace,
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }
