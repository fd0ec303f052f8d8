"""Limits on the output and the work of one rendering of a template: an allowance of units that it spends.

A template is an untrusted program. Two rules keep it from damaging a corpus or a machine. First, its output must be
text, numbers or plain containers of those. Anything else, such as a method without its parentheses, has a default text
with a memory address, which differs between processes. Second, each rendering has an *allowance* of units. It pays
about one unit for each byte that goes into or comes out of an operation, and some for each step. Units are counted, not
timed, so a row is rejected on every machine or on none.

The allowance is far larger than conversations need. Every rendering has the same base. Once that is spent, a multiple
of the conversation's own size is added, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from jinja2 import TemplateError
from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace

BASE = 1 << 27
"""Units that every rendering begins with."""

PER_UNIT_OF_DATA = 128
"""Once the base is spent, this many further units are added for each unit that the conversation weighs."""

GENEROUS = 1 << 29
"""The further units are four times as many up to this number: a short conversation may be written again per message."""

COMPILING = 1 << 14
"""Units for compiling a template, during which Jinja computes expressions of constants."""

ITEM = 16
"""Units of one step, or of one item of a container; the item's value counts by itself."""

POINTER = 8
"""Units of one item that is copied from one list to another."""

MAX_NUMBER = 1 << (1 << 16)
"""Whole numbers stay below this, and above its negative."""

QUOTED = 12
"""The most bytes that Python's ``repr`` makes of a byte of text."""

_SMALL = 1 << 16  # characters: shorter texts are joined first and checked afterwards

_CONTAINERS: tuple[Any, ...] = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
NUMBERS = frozenset({int, float, bool, complex, type(None)})
"""Types of values whose text and comparison cost next to nothing, large whole numbers apart."""


class Overspent(TemplateError):  # noqa: N818 - a rejection: this row fails with this template
    """A rendering needed more than its allowance, or used something that templates must not use."""


class NotText(TemplateError):  # noqa: N818 - as above
    """A template writes a value that is not text, a number or a plain container of those."""


class Allowance:
    """The remaining budget of the current rendering; ``start`` begins the next one.

    Any method may raise ``Overspent`` if too few units remain. Methods that make text may raise ``NotText``.

    Attributes:
        remaining: remaining units.
        nests: whether the template may have put lists or dicts into others. Such a value may contain one list a
            thousand times, so the length of its text is only known after traversing it.
    """

    def __init__(self) -> None:
        self.remaining = COMPILING
        self.nests = self._template_nests = True
        self._data: Mapping[str, Any] | None = None

    def start(self, variables: Mapping[str, Any]) -> None:
        """Begin a rendering with these template variables."""
        self.remaining = BASE
        self.nests = self._template_nests
        self._data = variables

    def compile(self, nests: bool) -> None:
        """Begin to compile a template; ``nests`` applies to its renderings."""
        self.remaining = COMPILING
        self.nests, self._template_nests = True, nests
        self._data = None

    def spend(self, units: int) -> None:
        """Subtract units. The most frequent methods do this inline, because a call takes longer than the rest."""
        self.remaining -= units
        if self.remaining < 0:
            self.extend_or_refuse()

    def extend_or_refuse(self) -> None:
        """Add units for the conversation's size, at most once per rendering. Call it when ``remaining`` < 0.

        Raises:
            Overspent: ``remaining`` is still negative.
        """
        if self._data is not None:
            data, self._data = self._data, None
            measuring = Allowance()  # a second object, so that measuring the conversation spends nothing of this one
            measuring.remaining = 1 << 62
            values = [value for value in data.values() if type(value) in (str, list, dict)]
            more = PER_UNIT_OF_DATA * measuring.weigh(values)
            self.remaining += max(more, min(4 * more, GENEROUS))
        if self.remaining < 0:
            raise Overspent(
                "it needs more loop iterations, steps or characters than any conversation should; fix the loop or"
                " value that grows, or skip such rows with --on-bad-row skip"
            )

    def weigh(self, value: Any, factor: int = 1, written: bool = False) -> int:
        """Spend units for the size of a value: for each item of its containers and each byte of its texts.

        An item that occurs several times in a value is counted each time.

        Args:
            value: any value of a template.
            factor: units for each byte of text.
            written: whether the value is to be written as text, so that everything in it must have a defined text.

        Returns:
            The units that were spent. (``remaining`` may drop by less: spending can extend the allowance.)

        Raises:
            NotText: part of a ``written`` value has no defined text.
        """
        waiting = [value]  # a stack of values to weigh, instead of recursion, which Python limits
        take = waiting.pop
        units = spent = 0
        while waiting:
            one = take()
            kind = type(one)
            units += 2 * ITEM
            if isinstance(one, str):
                units += text_bytes(one) * factor
            elif kind is dict:
                waiting.extend(one)
                waiting.extend(one.values())
            elif isinstance(one, _CONTAINERS):
                waiting.extend(one)
            elif isinstance(one, int):
                units += one.bit_length() >> 3
            elif isinstance(one, Namespace):
                waiting.append(vars(one))
            elif written and kind not in NUMBERS and not isinstance(one, (Undefined, range)):
                raise NotText(f"the template writes {_description(one)}")
            if units > 1 << 12:
                self.spend(units)
                spent += units
                units = 0
        self.spend(units)
        return spent + units

    def made(self, value: Any) -> Any:
        """Return a value that an operation has just made, after paying for it: text and lists by their bytes.

        An integer of absolute value ``MAX_NUMBER`` or more is rejected.
        """
        if isinstance(value, str):
            self.remaining -= len(value) if value.isascii() else 4 * len(value)
            if self.remaining < 0:
                self.extend_or_refuse()
        elif isinstance(value, (list, tuple)):
            self.spend(POINTER * len(value))
        elif type(value) is int and not -MAX_NUMBER < value < MAX_NUMBER:
            raise Overspent(f"a number of {value.bit_length()} bits is too large for a chat template")
        return value

    def paid_items(self, iterable: Iterable[Any], weight: int = ITEM) -> Iterator[Any]:
        """Iterate over something, and pay ``weight`` units for each item when it is taken."""
        items = iter(iterable)  # before the first item is requested, so that an error for non-iterables occurs here

        def paid() -> Iterator[Any]:
            for item in items:
                self.remaining -= weight
                if self.remaining < 0:
                    self.extend_or_refuse()
                yield item

        return paid()

    def paid_list(self, iterable: Any, weight: int = 4 * ITEM) -> list[Any]:
        """Return a list of the items, paying ``weight`` units for each."""
        if isinstance(iterable, Sized):
            self.spend(len(iterable) * weight)
            return list(iterable)  # type: ignore[call-overload, no-any-return]
        return list(self.paid_items(iterable, weight))

    def text(self, value: Any) -> str:
        """Return the text of a value that a template writes, as a plain ``str``."""
        if isinstance(value, str):
            return str(value)
        if type(value) not in NUMBERS:
            self.weigh(value, QUOTED, written=True)
        text = str(value)
        self.spend(len(text))
        return text

    def soft_text(self, value: Any) -> str:
        """Return the text of a value. A string, which may be ``Markup``, stays the same object."""
        if isinstance(value, str):
            self.spend(8 * text_bytes(value))  # escaping may produce this much
            return value
        return self.text(value)

    def joined(self, strings: Any, separator: str = "") -> str:
        """Return ``separator.join(strings)``. The caller must ensure that all of them are strings."""
        if type(strings) is not list:
            strings = self.paid_list(strings)
        units = sum(map(len, strings)) + len(separator) * len(strings)
        if units < _SMALL:
            text = separator.join(strings)
            self.remaining -= units if text.isascii() else 4 * units
            if self.remaining < 0:
                self.extend_or_refuse()
            return text
        wide = not (separator.isascii() and all(map(str.isascii, strings)))
        self.spend(4 * units if wide else units)
        return separator.join(strings)


def text_bytes(text: str) -> int:
    """Return the maximum size of a text in bytes in Python, which stores all characters at one width."""
    return len(text) if text.isascii() else 4 * len(text)


def _description(value: Any) -> str:
    """Return the end of an error message about a value without a defined text."""
    if hasattr(value, "__next__") and type(value).__module__ == "builtins":  # generators and iterators, not loops
        return "a generator instead of its values: was `| list` forgotten?"
    name = getattr(value, "__name__", None) or getattr(value, "name", None)
    shown = f" ({name})" if isinstance(name, str) and name.isidentifier() else ""
    if isinstance(value, Macro):
        kind = "a macro"
    elif isinstance(value, (BuiltinMethodType, MethodType)):
        kind = "a method"
    elif isinstance(value, (FunctionType, type)) or (callable(value) and shown):
        kind = "a function"
    else:
        return f"an object of type {type(value).__name__}, which cannot be written as text"
    return f"{kind}{shown}: were parentheses forgotten?"
