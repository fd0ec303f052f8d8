"""The parser of pickled lists of integer pairs in slow, plain Python, with Python's own list of opcodes."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

MARK = object()
SKIPPED = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"}
NUMBERS = {"INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4"}


def twin(data: bytes) -> list[tuple[int, int]]:
    """Return the list, or raise an error.

    This is pickle's stack machine with only the opcodes that such a list needs.
    """
    stack: list[Any] = []

    def since_mark() -> list[Any]:
        items: list[Any] = []
        while (item := stack.pop()) is not MARK:
            items.insert(0, item)
        return items

    def extend(items: list[Any]) -> None:
        stack[-1].extend(items)

    actions: dict[str, Callable[[], Any]] = {
        "MARK": lambda: stack.append(MARK),
        "EMPTY_LIST": lambda: stack.append([]),
        "LIST": lambda: stack.append(since_mark()),
        "TUPLE": lambda: stack.append(tuple(since_mark())),
        "TUPLE2": lambda: stack.append((stack.pop(-2), stack.pop(-1))),
        "APPEND": lambda: stack[-2].append(stack.pop()),
        "APPENDS": lambda: extend(since_mark()),
        "STOP": lambda: None,
    }
    opcodes = list(pickletools.genops(data))
    for opcode, argument, _ in opcodes:
        if opcode.name in NUMBERS:
            stack.append(int(argument))
        elif opcode.name not in SKIPPED:
            actions[opcode.name]()
    assert opcodes[-1][2] == len(data) - 1
    (found,) = stack
    assert isinstance(found, list)
    assert all(isinstance(pair, tuple) and list(map(type, pair)) == [int, int] for pair in found)
    return found
