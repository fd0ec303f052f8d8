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

from collections.abc import Iterable, Iterator, Mapping, Sized
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from jinja2 import TemplateError
from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace
from markupsafe import Markup

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

_MAX_KEY_DEPTH = 64
_AHEAD = 1 << 18  # loops whose price is below this are paid when they begin
_HARDLY_SPENT = BASE - (1 << 20)
_FEW = 64  # parts, joined before they are paid for while little is spent
_SMALL = 64  # the longest text that is paid by its characters, whatever their width

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

    def weigh(self, value: Any, per_character: int = 1) -> int:
        """Spend what it takes to go through a value and all that is in it, as often as it is in it.

        Returns:
            The units that were spent. What ``left`` drops by is another number where ``overspent`` adds to it.
        """
        waiting = [value]
        take = waiting.pop
        units = spent = 0
        while waiting:
            one = take()
            kind = type(one)
            units += 2 * ITEM
            if kind is str:
                units += (len(one) if len(one) <= _SMALL else text_bytes(one)) * per_character
            elif kind is dict:
                waiting.extend(one)
                waiting.extend(one.values())
            elif kind is list or kind is tuple:
                waiting.extend(one)
            elif isinstance(one, str):
                units += text_bytes(one) * per_character
            elif isinstance(one, _CONTAINERS):
                waiting.extend(one)
            elif isinstance(one, int):
                units += one.bit_length() >> 3
            elif isinstance(one, Namespace):
                waiting.append(vars(one))
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
            deepest = [value]
            for _ in range(_MAX_KEY_DEPTH):
                deepest = [part for one in deepest for part in one if isinstance(part, tuple)]
                if not deepest:
                    break
                self.spend(len(deepest) * ITEM)
            else:
                raise Overspent("a key of tuples within tuples within tuples")
        return value

    # Loops

    def iterated(self, iterable: Any, weight: int) -> Any:
        """What a loop goes through, every item of which costs ``weight`` units."""
        if type(iterable) in _SIZED:
            if len(iterable) * weight > _AHEAD:
                return _Paid(self, iterable, weight)
            self.left -= len(iterable) * weight
            if self.left < 0:
                self.overspent()
            return iterable
        if isinstance(iterable, Undefined):
            return iterable
        return self.each(iterable, weight)

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
            self.written(value)
        text = str(value)
        self.spend(len(text))
        return text

    def written(self, value: Any) -> None:
        """Make sure that a value has a text of its own, wherever in it, and spend what it takes."""
        if isinstance(value, (dict, Namespace, *_CONTAINERS)):
            self.weigh(value, per_character=12)  # the most that quoting can make of one
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if type(one) is str or type(one) in _NUMBERS or isinstance(one, (Markup, Undefined)):
                continue
            if isinstance(one, dict):
                waiting.extend(one)
                waiting.extend(one.values())
            elif isinstance(one, _CONTAINERS):
                waiting.extend(one)
            elif isinstance(one, Namespace):
                waiting.append(vars(one))
            else:
                raise NotText(f"the template writes {_called(one)}")

    def soft_text(self, value: Any) -> str:
        """The text of a value, which stays ``Markup`` if it is."""
        if isinstance(value, str):
            self.spend(8 * text_bytes(value))  # what escaping may make of it
            return value
        return self.text(value)

    def joined(self, parts: Any) -> str:
        """The parts as one text."""
        if type(parts) is not list:
            parts = self.listed(parts)
        if len(parts) > _FEW or self.left < _HARDLY_SPENT:
            units = sum(map(len, parts))
            self.spend(units if all(map(str.isascii, parts)) else 4 * units)
            return "".join(parts)
        text = "".join(parts)  # not long: no part has been paid for by more than a little
        self.left -= len(text) if text.isascii() else 4 * len(text)
        if self.left < 0:
            self.overspent()
        return text

    def joined_by(self, separator: str, parts: list[Any], strict: bool = False) -> str:
        """The parts with a separator between them; those that are no text as text, unless ``strict``."""
        if not strict:
            parts = [part if type(part) is str else self.text(part) for part in parts]
        if separator:
            self.spend(text_bytes(separator) * len(parts))
        texts = [part for part in parts if isinstance(part, str)]
        units = sum(map(len, texts))
        if units > _SMALL and not (separator.isascii() and all(map(str.isascii, texts))):
            units = 4 * units + 4 * len(separator) * len(parts)
        self.spend(units)
        return separator.join(parts)

    def indents(self, value: Any) -> int:
        """How many steps of indentation JSON text of a value has, all lines together."""
        steps = 0
        waiting = [(value, 1)]
        while waiting:
            one, depth = waiting.pop()
            if isinstance(one, (dict, list, tuple)):
                steps += depth * (1 + len(one))
                waiting.extend((inner, depth + 1) for inner in (one.values() if isinstance(one, dict) else one))
        return steps

    def concatenated(self, *parts: Any) -> str:
        """``a ~ b``."""
        for part in parts:
            if type(part) is not str:
                return self.joined([self.text(part) for part in parts])
        return self.joined([*parts])

    # Operators

    def made(self, value: Any) -> Any:
        """What was added up, of at most two values besides constants."""
        if type(value) is str:
            units = len(value)
            self.left -= units if units <= _SMALL or value.isascii() else 4 * units
            if self.left < 0:
                self.overspent()
            return value
        if isinstance(value, str):
            self.spend(text_bytes(value))
        elif isinstance(value, bytes):
            self.spend(len(value))
        elif isinstance(value, (list, tuple)):
            self.nests = True
            self.spend(POINTER * len(value))
        return self.number(value)

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
            return item in holder
        if kind is dict:
            return self.key(item) in holder
        if isinstance(holder, (list, tuple)) and type(item) in (str, *_NUMBERS):
            self.spend(len(holder) * (ITEM + (len(item) >> 3 if type(item) is str else 0)))
        elif isinstance(holder, (dict, *_CONTAINERS)):
            self.weigh(holder)
            self.weigh(self.key(item))
        elif not isinstance(holder, (Undefined, str, range)) or not isinstance(item, (str, int)):
            return item in self.each(holder)
        return item in holder

    def cut(self, part: Any) -> Any:
        """What was cut out of something."""
        kind = type(part)
        if kind is str:
            self.left -= len(part) if len(part) <= _SMALL else text_bytes(part)
        elif kind is list or kind is tuple:
            self.left -= POINTER * len(part)
        if self.left < 0:
            self.overspent()
        return part


class _Paid:
    """A sized iterable whose items are paid for when they are taken: a loop over it may end early."""

    def __init__(self, allowance: Allowance, iterable: Any, weight: int) -> None:
        self._allowance, self._iterable, self._weight = allowance, iterable, weight

    def __len__(self) -> int:
        return len(self._iterable)

    def __iter__(self) -> Iterator[Any]:
        return self._allowance.each(self._iterable, self._weight)


def text_bytes(text: str | bytes) -> int:
    """The most bytes that hold a text."""
    return len(text) if text.isascii() else 4 * len(text)


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
