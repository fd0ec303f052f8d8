"""What a caller can catch, what every message owes its reader, and the check of options against their type hints.

::

    SFTIndexError
    ├── ShardNotFoundError (FileNotFoundError)   some of a shard's five files are missing
    ├── FormatError (ValueError)                 bytes that are not what FORMAT.md says
    │   ├── UnsupportedVersionError              a version this package does not read
    │   └── CorruptShardError                    path, byte offset and rule
    ├── SequenceError (ValueError)               a row, sequence or pack that cannot be used
    └── StorageError                             an object store failed to give or to take bytes

A class exists only where a caller would act differently. Every message starts with the path (or says which
argument), then what was found and expected, the rule of FORMAT.md where there is one, and a remedy.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints


class SFTIndexError(Exception):
    """Base of every error this package raises on purpose."""


class ShardNotFoundError(SFTIndexError, FileNotFoundError):
    """Some or all of a shard's five files are not there, or a column of it.

    Attributes:
        prefix: the path the five files share.
        missing: paths of the files that are not there.
    """

    def __init__(self, prefix: str, missing: Sequence[str], remedy: str) -> None:
        self.prefix = prefix
        self.missing = list(missing)
        self.remedy = remedy
        super().__init__(prefix, self.missing, remedy)

    def __str__(self) -> str:
        if all(path.endswith(".col") for path in self.missing):
            return f"{self.prefix}: {self.remedy}"
        missing = ", ".join(self.missing) if len(self.missing) < 5 else f"{self.missing[0]} and the other four"
        return f"{self.prefix}: no shard here, missing {missing} (rule F1); {self.remedy}"


class FormatError(SFTIndexError, ValueError):
    """A file, option or shard is not what the format allows."""


class UnsupportedVersionError(FormatError):
    """A shard of a format version that this package does not read.

    Attributes:
        path: the file that claims the version.
        found: the version it claims.
        supported: the versions this package reads.
    """

    def __init__(self, path: str, found: int, supported: Sequence[int]) -> None:
        self.path, self.found, self.supported = path, found, list(supported)
        super().__init__(path, found, self.supported)

    def __str__(self) -> str:
        versions = ", ".join(map(str, self.supported))
        return (
            f"{self.path}: format version {self.found}, this package reads {versions} (rule H2); "
            "upgrade megatron-sft-idx, or check that the file is not corrupt"
        )


class CorruptShardError(FormatError):
    """Bytes of a shard break a rule of FORMAT.md.

    Attributes:
        path: the file with the broken bytes.
        offset: their position in that file, in bytes.
        rule: the rule's number in FORMAT.md, such as ``"H3"``.
        detail: what was found, what was expected, and what to do.
    """

    def __init__(self, path: str, offset: int, rule: str, detail: str) -> None:
        self.path, self.offset, self.rule, self.detail = path, offset, rule, detail
        super().__init__(path, offset, rule, detail)

    def __str__(self) -> str:
        return f"{self.path}: byte {self.offset}: {self.detail} (rule {self.rule})"


class SequenceError(SFTIndexError, ValueError):
    """A row, sequence or pack that cannot be used.

    Attributes:
        source: where it came from: a file, or the argument's name.
        position: number of the line, row or pack in the source; None if the source as a whole is meant.
        reason: why it cannot be used, and what would help.
    """

    def __init__(self, source: str, position: int | None, reason: str) -> None:
        self.source, self.position, self.reason = source, position, reason
        super().__init__(source, position, reason)

    def __str__(self) -> str:
        where = self.source if self.position is None else f"{self.source}:{self.position}"
        return f"{where}: {self.reason}"


class StorageError(SFTIndexError):
    """An object store did not give or take bytes; the data themselves may be sound.

    It is not an ``OSError``: an ``OSError`` comes from this machine's system, with an error number and a local file.

    Attributes:
        path: the object.
        reason: what the store said, how long it was asked, and what would help.
        missing: whether there is no such object.
    """

    def __init__(self, path: str, reason: str, missing: bool = False) -> None:
        self.path, self.reason, self.missing = path, reason, missing
        super().__init__(path, reason, missing)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


# ---- options, checked ----


def check_option(name: str, value: Any, hint: Any, lowest: int = 1, highest: int = 2**31 - 1) -> None:
    """Hold an option to its type hint, if that is ``bool``, ``int`` or a ``Literal``; any other option passes.

    Raises:
        FormatError: the value is none of the choices, or no number from ``lowest`` to ``highest``.
    """
    if hint is bool and not isinstance(value, bool):
        raise FormatError(f"{name}: {brief(value)}, expected True or False")
    if get_origin(hint) is Literal and not (isinstance(value, str) and value in get_args(hint)):
        raise FormatError(f"{name}: {brief(value)}, choose one of {', '.join(get_args(hint))}")
    is_number = hint is int or (hint == int | None and value is not None)
    if is_number and (not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest):
        raise FormatError(f"{name}: {brief(value)}, expected a whole number from {lowest} to {highest}")


def check_options(options: Any, **ranges: tuple[int, int]) -> None:
    """``check_option`` for every field of a dataclass of options; ``ranges`` gives lowest and highest by name."""
    kind: type = type(options)
    for name, hint in _hints_of(kind).items():
        check_option(name, getattr(options, name), hint, *ranges.get(name, ()))


@cache
def _hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


# ---- arguments of public functions, checked ----

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LISTS = (Sequence, Collection, Iterable, list, tuple)


def checked(function: _Function) -> _Function:
    """Hold the arguments of a public function or constructor to its type hints before it runs.

    Paths, truth values, integers, choices, dicts with string keys, lists of strings and objects of this package are
    checked; all else is left to the function.

    Raises:
        FormatError: of the function that this makes, for an argument of another type.
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
    """The type hint of a parameter; Any where it cannot be evaluated, as of names that only type checkers import."""
    try:
        return eval(function.__annotations__.get(name, "Any"), function.__globals__)
    except (NameError, TypeError):
        return Any


def require_type(name: str, value: Any, hint: Any) -> None:
    """FormatError unless a value is what a type hint says, as far as ``checked`` looks."""
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
            raise FormatError(f"{name}: {brief(value)} holds a character that no path has; leave it out")


def brief(value: Any) -> str:
    """A value for an error message, in one short line."""
    if value is None or isinstance(value, bool | int | float | str | os.PathLike):
        text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge number"
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"a {type(value).__name__}"


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _expected(value: Any, hint: Any) -> str:
    """What a value should be, where it is not what one hint says; else "". Hints of other kinds take any value."""
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
        is_right = isinstance(value, str)  # which of them, the function looks at
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
