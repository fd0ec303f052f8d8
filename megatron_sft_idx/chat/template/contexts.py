"""The short context of messages in which an answer is judged."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any


class Contexts:
    """The contexts in which the answers of a conversation are judged.

    A *block* is a question with everything that answers it. The smallest context has: the system messages at the
    beginning; from the answer's block, its question, the answer, the answers before and after it, the last one, and the
    results of calls among these; and the next question.

    Args:
        roles: the role of each message.
    """

    def __init__(self, roles: Sequence[Any]) -> None:
        self._count = len(roles)
        self._system = next((at for at, role in enumerate(roles) if role in ("user", "assistant", "tool")), len(roles))
        self._starts = [  # of blocks
            at
            for at in range(self._system, len(roles))
            if at == self._system or (roles[at] == "user" and roles[at - 1] != "user")
        ]
        self._answers: list[list[int]] = []  # by block
        self._questions: list[range] = []
        for start, stop in pairwise([*self._starts, len(roles)]):
            self._answers.append([at for at in range(start, stop) if roles[at] == "assistant"])
            behind = next((at for at in range(start, stop) if roles[at] != "user"), stop)
            self._questions.append(range(start, behind))

    def of(self, message: int) -> Iterator[tuple[list[int], bool]]:
        """The contexts of an answer, the smallest first and the whole conversation last.

        Yields:
            Positions of messages, and whether their calls are to be cut down (``reduced``).
        """
        block = bisect_right(self._starts, message) - 1
        answers, begin = self._answers[block], self._starts[block]
        end = self._starts[block + 1] if block + 1 < len(self._starts) else self._count
        number = bisect_left(answers, message)
        kept = sorted({*range(max(0, number - 1), min(number + 2, len(answers))), len(answers) - 1})
        small = [*range(self._system), *range(begin, answers[0])]
        for one in kept:
            small += range(answers[one], answers[one + 1] if one + 1 < len(answers) else end)
        small += self._questions[block + 1] if block + 1 < len(self._starts) else ()
        yield small, True
        yield small, False
        before = self._starts[max(0, block - 1)]
        further = self._starts[block + 2] if block + 2 < len(self._starts) else self._count
        large = [*range(self._system), *range(before, further)]
        if large != small:
            yield large, False
        if len(large) < self._count:
            yield [*range(self._count)], False
