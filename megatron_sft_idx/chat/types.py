"""What passes between the steps of ``chat``: pieces of input, conversations, rendered text, ids with their masks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError


@dataclass(frozen=True, slots=True, eq=False)
class Piece(ABC):
    """Some consecutive rows of one file; picklable.

    Attributes:
        path: the file, as error messages name it.
        first: position of the first row: the line number in JSON-lines files, else the row number; from 1.
        num_bytes: bytes of the file as it is on disk that went into this piece, for progress; over a file
            they sum to its size or less.
        payload: the bytes that hold the rows.
    """

    path: str
    first: int
    num_bytes: int
    payload: bytes

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, Any | SequenceError]]:
        """Yields (position, row), the error in place of a row that cannot be read; blank lines only count."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Says whether two pieces hold the same rows, wherever they come from: xxh3_128 in hex."""


class Conversation(NamedTuple):
    """One chat in OpenAI's form, as chat templates expect it.

    Attributes:
        messages: dicts with ``role`` and string ``content`` (or none beside tool calls), ``tool_calls``,
            ``reasoning_content``, and whatever else the row held. ``weight`` and ``train`` are not in here.
        weights: one loss weight a message, in the order of ``messages``; only assistant messages have a say.
        tools: tool schemas handed to the template, or None.
        kwargs: extra template variables that the row itself sets (``chat_template_kwargs``).
    """

    messages: list[dict[str, Any]]
    weights: list[float]
    tools: list[dict[str, Any]] | None = None
    kwargs: Mapping[str, Any] = {}


class TokenizedRow(NamedTuple):
    """A row that came tokenised: ids and a token-aligned mask (1 = this token is trained on)."""

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32]


class Span(NamedTuple):
    """Characters ``[start, stop)`` of a rendered text that are trained on with ``weight``."""

    start: int
    stop: int
    weight: float = 1.0


class Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: what the template made, to be tokenised as one string without adding special tokens.
        spans: what is trained on, ascending, not overlapping.
        literals: character ranges whose text spells a control token but came from the data, so that it must
            not become one; ascending ``(start, stop)``. Empty in nearly every row.
        notes: counts for the summary, such as reasoning that the template dropped: name to count.
    """

    text: str
    spans: list[Span]
    literals: Sequence[tuple[int, int]] = ()
    notes: Mapping[str, int] = {}


class Encoded(NamedTuple):
    """One sequence: ids and its token-aligned mask, both [length].

    Attributes:
        input_ids: int32.
        loss_mask: float32 weights, token-aligned: nonzero where this token is trained on.
        notes: counts for the summary: straddling tokens, literals kept as text, and the render's notes.
        straddling: a token that brings characters of a header into a span, for people to see; "" where none does.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.float32]
    notes: Mapping[str, int] = {}
    straddling: str = ""


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """What counts as learnt.

    Attributes:
        train_on: ``"assistant"``, every assistant message; ``"last-turn"``, the assistant messages after the
            last user message (tool results between them do not end a turn); ``"all"``, every character.
        train_on_thinking: False leaves out reasoning, with the tags around it.
        train_on_tool_calls: False leaves out tool calls, from the end of the words before them to the start
            of the words after them, or else to the end of the turn.
        turns: what becomes of a row whose reasoning the template leaves out of earlier turns: ``"error"``;
            ``"whole"``, one sequence without it; ``"split"``, a sequence a turn, each as the model would see it.
        partial_markers: ``"keep"`` takes generation markers as they stand where they leave out what the assistant
            says, ``"error"`` refuses the row.
        allow_control_tokens: True lets text of the data that spells a control token become that token.
        template_date: the day, ``YYYY-MM-DD``, that templates which ask for the date are told.
    """

    train_on: str = "assistant"
    train_on_thinking: bool = True
    train_on_tool_calls: bool = True
    turns: str = "error"
    partial_markers: str = "error"
    allow_control_tokens: bool = False
    template_date: str | None = None

    def __post_init__(self) -> None:
        for flag, value, known in (
            ("--train-on", self.train_on, ("assistant", "last-turn", "all")),
            ("--turns", self.turns, ("error", "whole", "split")),
            ("--partial-markers", self.partial_markers, ("error", "keep")),
        ):
            if value not in known:
                raise FormatError(f"{flag}: {value!r} is none of {', '.join(known)}")
