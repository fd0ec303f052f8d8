"""The methods of strings, lists, dicts and numbers that a chat template may call, and their costs.

All pay a general charge for the bytes that go in, before the method runs, and for the bytes that come out. This limits
memory and time if a result is at most a few times as long as its inputs. If an argument multiplies, such as a width or
a replacement, or if the time depends on a product, a *bound* on the work is computed from the arguments and also paid
in advance. Otherwise ``{{ "".center(9000000000) }}`` would allocate 9 GB in one call. Jinja's filters pay in the same
way, with the same bounds (``filters``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from megatron_sft_idx.chat.template.allowance import ITEM, Allowance, Overspent, text_bytes
from megatron_sft_idx.chat.template.operators import Operators, sum_of_numbers

Arguments = tuple[Any, ...]
Bound = Callable[[str, Arguments], int]
"""Bounds the work on a text, in units beyond its bytes, given the further arguments of the method or filter."""

ESCAPED = 8
"""Units of a byte that is escaped: a quotation mark becomes five characters, in five passes over the text."""

WORD = 64
"""Units of a byte of text that is taken apart: a string object, and a pointer to it."""

SHORT = 64
"""Characters: what a shorter argument costs is not looked at."""


def nothing(text: str, arguments: Arguments) -> int:
    """For methods whose output is no longer than the text, and that traverse it once."""
    return 0


def padded(text: str, arguments: Arguments) -> int:
    """For methods that pad to a width, which is 80 if no argument sets it."""
    return 4 * max(80, sum_of_numbers(arguments))


def searched(text: str, arguments: Arguments) -> int:
    """For methods that may compare a whole argument at each character of the text, like searches from the right."""
    compared = 0
    for one in arguments:
        if isinstance(one, str) and len(one) >= SHORT:
            compared += len(one)
    return text_bytes(text) * compared // SHORT


def replaced(text: str, arguments: Arguments) -> int:
    """For methods that replace the first text argument by the second."""
    old, new, *_ = *(one for one in arguments if isinstance(one, str)), "", ""
    if isinstance(text, Markup):  # any text may be escaped before it is searched for
        return ESCAPED * len(text) // max(1, len(old)) * text_bytes(new)
    return text.count(old) * text_bytes(new)


def multiplied(text: str, arguments: Arguments) -> int:
    """For methods that may write all arguments, or a given number of blanks, next to each character."""
    written = sum(text_bytes(one) for one in arguments if isinstance(one, str))
    return text_bytes(text) * (WORD + sum_of_numbers(arguments) + written)


def squared(text: str, arguments: Arguments) -> int:
    """For methods that may copy the text once for each of its characters."""
    return multiplied(text, arguments) + (text_bytes(text) ** 2 >> 6)


def _split(text: str, arguments: Arguments) -> int:
    separator = next((one for one in arguments if isinstance(one, str) and one), None)
    pieces = len(text) if separator is None else text.count(separator)
    return searched(text, arguments) + 2 * WORD * (2 + pieces)


def _joined(text: str, arguments: Arguments) -> int:
    """For ``join`` of Markup; that of plain strings is paid for elsewhere."""
    return text_bytes(text) * sum(len(one) for one in arguments if isinstance(one, list))


METHODS: dict[type, dict[str, Bound]] = {
    str: {
        **dict.fromkeys(
            (
                "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
                "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
                "isupper", "lower", "partition", "removeprefix", "removesuffix", "startswith", "swapcase",
                "title", "upper",
            ),
            nothing,
        ),
        **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip"), searched),
        **dict.fromkeys(("rsplit", "split", "splitlines"), _split),
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), padded),
        "expandtabs": multiplied,
        "join": _joined,
        "replace": replaced,
    },
    Markup: dict.fromkeys(("striptags", "unescape"), squared),
    list: dict.fromkeys(("count", "index", "copy"), nothing),
    tuple: dict.fromkeys(("count", "index"), nothing),
    dict: dict.fromkeys(("get", "items", "keys", "values", "copy"), nothing),
    int: dict.fromkeys(("bit_count", "bit_length", "is_integer"), nothing),
    float: dict.fromkeys(("hex", "is_integer"), nothing),
}  # fmt: skip
"""The methods that templates may call, by type, and what bounds their work. (``format`` is the sandbox's.)"""

QUICK = frozenset(name for name, bound in METHODS[str].items() if bound in (nothing, searched))
"""Methods of strings that pay for the string twice, as what goes in and what comes out, if their argument is short."""


def call_method(operators: Operators, value: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Pay for and call method ``name`` of a value of a built-in type or of Markup.

    Raises:
        Overspent: the method costs more than the rest of the allowance, or templates must not call it.
        NotText: an argument of a method of Markup has no defined text.
    """
    allowance = operators.allowance
    bound = METHODS.get(type(value), {}).get(name)
    if bound is None:  # of a subclass, as Markup is one of str
        inherited = (names[name] for kind, names in METHODS.items() if isinstance(value, kind) and name in names)
        bound = next(inherited, None)
    if bound is None:
        kind_name = value.__name__ if isinstance(value, type) else type(value).__name__
        raise Overspent(
            f"chat templates cannot call {kind_name}.{name}; change the template, or compute the value beforehand and"
            " store it in the rows"
        )
    if isinstance(value, str):
        if name == "join" and len(args) == 1:
            args = (allowance.paid_list(args[0], ITEM),)
            if not isinstance(value, Markup):
                alike = all(isinstance(item, str) for item in args[0])
                return allowance.joined(args[0], value) if alike else value.join(args[0])
        pay_for_text(allowance, value, bound, (*args, *kwargs.values()) if kwargs else args)
        result = getattr(value, name)(*args, **kwargs)
        return result if type(result) is bool else allowance.made(result)
    if name == "get":
        operators.key(args[0] if args else None)
    elif name in ("count", "index", "copy"):
        allowance.weigh((value, args))
    return getattr(value, name)(*args, **kwargs)


def pay_for_text(allowance: Allowance, text: str, bound: Bound, arguments: Arguments, written: bool = False) -> None:
    """Pay for a method or filter of a text before it runs.

    Args:
        allowance: the allowance that pays.
        text: its input; if this is Markup, the arguments may be escaped.
        bound: function that bounds the work.
        arguments: its further arguments.
        written: whether they become text, so that each must have a defined text.
    """
    plain = type(text) is str
    if arguments and not (len(arguments) == 1 and type(arguments[0]) is str and len(arguments[0]) < SHORT):
        allowance.weigh(arguments, 1 if plain else ESCAPED, written or not plain)
    units = len(text) if text.isascii() else 4 * len(text)
    if bound is not nothing:
        units += bound(text, arguments)
    allowance.remaining -= units if plain else ESCAPED * units
    if allowance.remaining < 0:
        allowance.extend_or_refuse()
