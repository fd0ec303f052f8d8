"""Checks of the arguments of public functions against their type hints.

Without these checks, a wrong type would end in a traceback deep inside the package, or be misread: a masked array as
its raw values, a number as a path.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron_sft_idx.errors import FormatError, brief

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LISTS = (Sequence, Collection, Iterable, list, tuple)


def checked(function: _Function) -> _Function:
    """Check the arguments of a public function or constructor against its type hints before it runs.

    Only paths, bools, integers, choices, dicts with string keys, lists of strings and objects of this package are
    checked.

    Raises:
        FormatError: raised by the returned function if an argument has another type.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for name, value in given.items():
            if value is not signature.parameters[name].default:
                require_type(name, value, _hint_of(function, name))
        return function(*args, **kwargs)

    return checking  # type: ignore[return-value]


@cache
def _hint_of(function: Callable[..., Any], name: str) -> Any:
    """Return the type hint of a parameter, or Any if it cannot be evaluated (names imported only for type checkers)."""
    try:
        return eval(function.__annotations__.get(name, "Any"), function.__globals__)
    except (NameError, TypeError):
        return Any


def require_fields(instance: Any) -> None:
    """Raise FormatError if a field of a dataclass has another type than its hint. Call it in ``__post_init__``."""
    hints = get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if value is not field.default:
            require_type(field.name, value, hints[field.name])


def require_type(name: str, value: Any, hint: Any) -> None:
    """Raise FormatError unless a value matches a type hint, as far as ``checked`` checks types."""
    expected = [told for kind in (get_args(hint) if _is_union(hint) else [hint]) if (told := _expected(value, kind))]
    all_kinds = len(get_args(hint)) if _is_union(hint) else 1
    if len(expected) == all_kinds:
        raise FormatError(f"{name}: {brief(value)}, expected {' or '.join(dict.fromkeys(expected))}")
    if isinstance(value, str | os.PathLike) and not isinstance(value, bytes):
        try:
            is_path = b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:
            is_path = False
        if not is_path:
            raise FormatError(f"{name}: {brief(value)} contains a character that cannot be in a path; remove it")


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _expected(value: Any, hint: Any) -> str:
    """Return the expected type if the value does not match a hint, else "". Unsupported hints accept any value."""
    origin, is_protocol = get_origin(hint) or hint, getattr(hint, "_is_protocol", False)
    told: dict[Any, tuple[bool, str]] = {
        type(None): (value is None, "None"),
        bool: (type(value).__name__ in ("bool", "bool_"), "True or False"),
        int: (
            isinstance(value, Integral) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**63,
            "a whole number",
        ),
        str: (isinstance(value, str), "a string"),
        os.PathLike: (isinstance(value, os.PathLike), "a path"),
    }
    if origin in told:
        is_right, expected = told[origin]
    elif origin is Literal:
        is_right = isinstance(value, str)  # the function checks which of the choices it is
        expected = f"one of {', '.join(map(str, get_args(hint)))}"
    elif origin is Mapping:
        is_right = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        items = get_args(hint)[1:]
        wrong = [why for each in (value.values() if is_right and items else ()) if (why := _expected(each, items[0]))]
        is_right, expected = is_right and not wrong, "a dict by name" + (f" of {wrong[0]} each" if wrong else "")
    elif origin in _LISTS and get_args(hint)[:1] == (str,):
        is_list = isinstance(value, Collection) and not isinstance(value, str | bytes) and not hasattr(value, "dtype")
        is_right, expected = is_list and all(isinstance(each, str) for each in value), "a list of strings"
    elif isinstance(origin, type) and origin.__module__.startswith(__package__) and not is_protocol:
        is_right, expected = isinstance(value, origin), f"a {origin.__name__}"
    else:
        return ""
    return "" if is_right else expected
