"""What one rendering may write and how much it may do: the text of values, and a count of what is spent.

A template is somebody else's program. Two things keep it from spoiling a corpus or a machine. What it writes must be
text, a number or a plain container of those: the default text of anything else, such as a method whose parentheses
were forgotten, holds an address and would be other text in every run. And each rendering has an *allowance* of units,
about one for a byte that it makes and some for a step that it takes; who asks for more is refused before it is made.
Units are counted and never timed, so the same row is refused, or not, on any machine.

The allowance is far beyond what conversations need: a base for every rendering, and on top, looked at only once the
base is spent, a multiple of the conversation's own size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from jinja2 import TemplateError
from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace

BASE = 1 << 27
"""Units of every rendering."""

PER_UNIT_OF_DATA = 128
"""Further units for each unit that the conversation itself weighs."""

GENEROUS = 1 << 29
"""Up to here four times that: a template may write down anew, for each message, all that was said before."""

COMPILING = 1 << 14
"""Units for what is computed from constants while a template is compiled."""

ITEM = 16
"""Units of one step, and of one item beside what it refers to."""

POINTER = 8
"""Units of one place in a list."""

MAX_NUMBER = 1 << (1 << 16)
"""Whole numbers stay below this, and above its negative."""

_AHEAD = 1 << 18  # loops whose price is below this are paid when they begin
_SMALL = 256  # characters: texts up to this length are paid as if they were narrow
_QUOTED = 12  # the most bytes that Python's quoting makes of a character

_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[Any, ...] = (list, tuple, *_VIEWS)
_SIZED = frozenset({list, tuple, dict, str, range, *_VIEWS})
_NUMBERS = frozenset({int, float, bool, complex, type(None)})


class Overspent(TemplateError):  # noqa: N818 - a refusal: the row is at fault with this template
    """A rendering asked for more than its allowance, or for something whose price cannot be told."""


class NotText(TemplateError):  # noqa: N818 - as above
    """A template writes something that has no text of its own."""


class Allowance:
    """What is left to the rendering that is under way; one at a time.

    Attributes:
        left: units.
        nests: whether the template may have made a list or dict of others, which can be much larger than it looks.
    """

    def __init__(self) -> None:
        self.left = COMPILING
        self.nests = self._template_nests = True
        self._data: Mapping[str, Any] | None = None

    def start(self, variables: Mapping[str, Any]) -> None:
        """Begin a rendering of ``variables``."""
        self.left = BASE
        self.nests = self._template_nests
        self._data = variables

    def compile(self, nests: bool) -> None:
        """Begin to compile a template, which ``nests`` or never does."""
        self.left = COMPILING
        self.nests, self._template_nests = True, nests
        self._data = None

    def spend(self, units: int) -> None:
        """Take units off.

        Raises:
            Overspent: they are not there.
        """
        self.left -= units
        if self.left < 0:
            self.overspent()

    def overspent(self) -> None:
        """Add what the conversation's size allows, once; refuse where that is not enough."""
        if self._data is not None:
            data, self._data = self._data, None
            bounds = Allowance()
            bounds.left = 1 << 62
            more = PER_UNIT_OF_DATA * bounds.weigh([one for one in data.values() if type(one) in (str, list, dict)])
            self.left += max(more, min(4 * more, GENEROUS))
        if self.left < 0:
            raise Overspent(
                "it takes more loop iterations, other steps or characters for one conversation than any should"
            )

    # Sizes

    def weigh(self, value: Any, factor: int = 1, written: bool = False) -> int:
        """Spend what it takes to go through a value and all that is in it, as often as it is in it.

        Args:
            value: what a template holds.
            factor: units for each byte of text.
            written: require that all of it has a text of its own.

        Returns:
            The units that were spent. What ``left`` drops by is another number where ``overspent`` adds to it.

        Raises:
            NotText: something in it has no text of its own, and it is to be ``written``.
        """
        waiting = [value]
        take = waiting.pop
        units = spent = 0
        while waiting:
            one = take()
            kind = type(one)
            units += 2 * ITEM
            if kind is str:
                units += (len(one) if one.isascii() else 4 * len(one)) * factor
            elif kind is dict:
                waiting.extend(one)
                waiting.extend(one.values())
            elif isinstance(one, _CONTAINERS):
                waiting.extend(one)
            elif isinstance(one, int):
                units += one.bit_length() >> 3
            elif isinstance(one, str):
                units += text_bytes(one) * factor
            elif isinstance(one, Namespace):
                waiting.append(vars(one))
            elif written and kind not in _NUMBERS and not isinstance(one, Undefined):
                raise NotText(f"the template writes {_called(one)}")
            if units > 1 << 12:
                self.spend(units)
                spent += units
                units = 0
        self.spend(units)
        return spent + units

    def weighed(self, value: Any) -> Any:
        """The value, having spent what it takes to compare it."""
        kind = type(value)
        if kind is str:
            self.left -= len(value) >> 3
            if self.left < 0:
                self.overspent()
        elif kind not in _NUMBERS:
            self.weigh(value)
        return value

    def key(self, value: Any) -> Any:
        """The value, having made sure that hashing it takes no long time and no deep stack."""
        if type(value) is not str and isinstance(value, tuple):
            self.weigh(value)
            if any(isinstance(part, tuple) for part in value):
                raise Overspent("a key of tuples within tuples")
        return value

    # Loops

    def iterated(self, iterable: Any, weight: int) -> Any:
        """What a loop goes through, every item of which costs ``weight`` units."""
        if type(iterable) in _SIZED and (units := len(iterable) * weight) <= _AHEAD:
            self.left -= units
            if self.left < 0:
                self.overspent()
            return iterable
        return iterable if isinstance(iterable, Undefined) else self.each(iterable, weight)

    def each(self, iterable: Iterable[Any], weight: int = ITEM) -> Iterator[Any]:
        """The items, each paid for when it is taken."""
        items = iter(iterable)  # at once: what cannot be gone through is an error here

        def paid() -> Iterator[Any]:
            for item in items:
                self.left -= weight
                if self.left < 0:
                    self.overspent()
                yield item

        return paid()

    def listed(self, iterable: Any, weight: int = 4 * ITEM) -> list[Any]:
        """A list of what a template goes through."""
        if isinstance(iterable, Sized):
            self.spend(len(iterable) * weight)
            return list(iterable)  # type: ignore[call-overload, no-any-return]
        return list(self.each(iterable, weight))

    # Text

    def text(self, value: Any) -> str:
        """The text of a value that a template writes: as ``str`` has it.

        Raises:
            NotText: it is no text, number or plain container of those.
        """
        if isinstance(value, str):
            return str(value)
        if type(value) not in _NUMBERS:
            self.weigh(value, _QUOTED, written=True)
        text = str(value)
        self.spend(len(text))
        return text

    def soft_text(self, value: Any) -> str:
        """The text of a value, which stays ``Markup`` if it is."""
        if isinstance(value, str):
            self.spend(8 * text_bytes(value))  # what escaping may make of it
            return value
        return self.text(value)

    def joined(self, parts: Any, separator: str = "") -> str:
        """The parts, each of them text, as one text."""
        if type(parts) is not list:
            parts = self.listed(parts)
        units = sum(map(len, parts)) + len(separator) * len(parts)
        if units > _SMALL and not (separator.isascii() and all(map(str.isascii, parts))):
            units *= 4
        self.left -= units
        if self.left < 0:
            self.overspent()
        return separator.join(parts)

    def concatenated(self, *parts: Any) -> str:
        """``a ~ b ~ c``."""
        for part in parts:
            if type(part) is not str:
                return self.joined([self.text(part) for part in parts])
        return self.joined([*parts])

    # Operators

    def added(self, *parts: Any) -> Any:
        """``a + b + c``."""
        for part in parts:
            if type(part) is not str:
                break
        else:
            return self.joined([*parts])
        made, *others = parts
        for other in others:
            made = made + other
            if isinstance(made, str):
                self.spend(text_bytes(made))
            elif isinstance(made, (list, tuple)):
                self.nests = True
                self.spend(POINTER * len(made))
        return self.number(made)

    def subtracted(self, left: Any, right: Any) -> Any:
        """``left - right``."""
        result = self.number(left - right)
        if isinstance(result, (set, frozenset)):
            raise NotText("the template makes a set, whose order differs from run to run; make a list with a loop")
        return result

    def number(self, value: Any) -> Any:
        """The value, if it is no whole number beyond all use."""
        if type(value) is int and not -MAX_NUMBER < value < MAX_NUMBER:
            raise Overspent(f"a number of {value.bit_length()} bits is too large for a chat template")
        return value

    def contains(self, item: Any, holder: Any) -> bool:
        """``item in holder``."""
        kind = type(holder)
        if kind is str:
            self.left -= len(holder) >> 2
            if self.left < 0:
                self.overspent()
        elif kind is dict:
            self.key(item)
        elif isinstance(holder, (list, tuple)) and type(item) in (str, *_NUMBERS):
            self.spend(len(holder) * (ITEM + (len(item) >> 3 if type(item) is str else 0)))
        elif isinstance(holder, (dict, *_CONTAINERS)):
            self.weigh((holder, self.key(item)))
        elif not isinstance(holder, (Undefined, str, range)) or not isinstance(item, (str, int)):
            return item in self.each(holder)
        return item in holder

    def cut(self, part: Any) -> Any:
        """What was cut out of something."""
        if isinstance(part, str):
            self.spend(text_bytes(part))
        elif isinstance(part, (list, tuple)):
            self.spend(POINTER * len(part))
        return part

    def filled(self, template: str, values: Sequence[Any]) -> None:
        """Pay for ``template % values``, where each ``%`` may name any of the values.

        Raises:
            NotText: a value has no text of its own.
        """
        weight = self.weigh(values, _QUOTED, written=True)
        weight += 4 * max(numbers_in(template), sum_of_numbers(values) if "*" in template else 0)
        self.spend(text_bytes(template) + template.count("%") * weight)


def text_bytes(text: str) -> int:
    """The most bytes that hold a text."""
    return len(text) if text.isascii() else 4 * len(text)


def numbers_in(text: str) -> int:
    """The sum of the whole numbers in a format: what it asks for by itself, in characters."""
    return sum(int(digits) if len(digits) < 19 else 1 << 62 for digits in re.findall(r"\d+", text))


def sum_of_numbers(values: Iterable[Any]) -> int:
    """The sum of the whole numbers among arguments, none of them negative."""
    return sum(abs(one) for one in values if isinstance(one, int))


def _called(value: Any) -> str:
    """What a value without a text is, for a sentence."""
    if hasattr(value, "__next__") and type(value).__module__ == "builtins":  # generators and iterators, not loops
        return "values that are still to come: was `| list` forgotten?"
    name = getattr(value, "__name__", None) or getattr(value, "name", None)
    known = f" ({name})" if isinstance(name, str) and name.isidentifier() else ""
    if isinstance(value, Macro):
        what = "a macro"
    elif isinstance(value, (BuiltinMethodType, MethodType)):
        what = "a method"
    elif isinstance(value, (FunctionType, type)) or (callable(value) and known):
        what = "a function"
    else:
        return f"an object of type {type(value).__name__}, which has no text of its own"
    return f"{what}{known}: were parentheses forgotten?"
