"""The data passed between the steps of ``chat``: pieces of input, conversations, rendered text, ids with masks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError, check_options
from megatron_sft_idx.layout.media_layout import Kind

TrainOn: TypeAlias = Literal["assistant", "last-turn", "markers", "all"]
EarlierReasoning: TypeAlias = Literal["error", "drop", "split"]
PartialMarkers: TypeAlias = Literal["error", "keep"]

IGNORED_FIELD, LEFT_OUT_MESSAGE = "ignored_field:", "left_out_message:"
"""Beginnings of the names of notes; the name of a field or a role follows."""


class RowError(ValueError):
    """The reason why a row cannot be used. A caller that knows file and line converts it to a ``SequenceError``."""


class InputRow(NamedTuple):
    """One row of the input.

    Attributes:
        position: its line in a JSON-lines file, its record in a file of separated values, else its number, from 1.
        data: its values (``values``), or the error of a row that cannot be read.
        notes: counts for the summary, by name, of what was dropped from it.
    """

    position: int
    data: Any | SequenceError
    notes: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Piece(ABC):
    """Consecutive rows of one input file; picklable.

    Attributes:
        path: path of the file in error messages.
        first: position of the first row, from 1: its line in a JSON-lines file, its record in a file of separated
            values (whose header is the first one), else the number of the row.
        num_bytes: number of bytes of the file on disk from which this piece was read, for progress. Over a file they
            sum to at most its size.
        payload: the bytes with the rows.
    """

    path: str
    first: int
    num_bytes: int
    payload: bytes

    @abstractmethod
    def rows(self) -> Iterator[InputRow]:
        """Yield each row. Blank lines give no row, but count in positions."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash that is equal for pieces with the same rows, independent of their location: xxh3_128 in hex."""


class Conversation(NamedTuple):
    """One chat in OpenAI's form, as expected by chat templates.

    Attributes:
        messages: dicts with ``role``, a string ``content`` (which may be missing next to tool calls), ``tool_calls``,
            ``reasoning_content``, and all other fields of the row's messages except those in ``training_fields``.
        weights: one loss weight per message, in the order of ``messages``. Only weights of assistant messages have an
            effect.
        tools: tool schemas for the template, or None.
        kwargs: extra template variables set by the row itself (``chat_template_kwargs``).
        notes: counts for the summary, by name.

    If a row has images or audio, the content of a message may be a list of parts of ``text``, ``image`` and
    ``audio``, which keep their files (``media_parts``).
    """

    messages: list[dict[str, Any]]
    weights: list[float]
    tools: list[dict[str, Any]] | None = None
    kwargs: Mapping[str, Any] = {}
    notes: Mapping[str, int] = {}


class TokenizedRow(NamedTuple):
    """A tokenised row: ids and a token-aligned mask (1 = this token is trained on).

    Attributes:
        input_ids: int64 [tokens].
        loss_mask: float32 [tokens].
        notes: counts for the summary by name.
        bounds: start of each of its sequences, and end of the last one, int64 [sequences + 1]; None for one sequence.
    """

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    notes: Mapping[str, int] = {}
    bounds: NDArray[np.int64] | None = None


class TextRow(NamedTuple):
    """A row of plain text. Every token is trained on.

    Attributes:
        text: the text.
        notes: counts for the summary by name.
    """

    text: str
    notes: Mapping[str, int] = {}


class Span(NamedTuple):
    """Characters ``[start, stop)`` of a rendered text that are trained on with ``weight``."""

    start: int
    stop: int
    weight: float = 1.0


class Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: output of the template, to be tokenised as one string without adding special tokens.
        spans: what is trained on, in ascending order without overlap.
        literals: character ranges, ascending ``(start, stop)``, that spell a control token but came from the data, so
            they must not become one. Nearly every row has none.
        notes: counts for the summary, by name, such as how often the template dropped reasoning.
    """

    text: str
    spans: list[Span]
    literals: Sequence[tuple[int, int]] = ()
    notes: Mapping[str, int] = {}


class EncodedItem(NamedTuple):
    """An image or a recording in a sequence: first position, number of positions, and number of its file."""

    kind: Kind
    start: int
    length: int
    blob: int


class Encoded(NamedTuple):
    """One sequence.

    Attributes:
        input_ids: int32 [length].
        loss_mask: float32 [length], token-aligned: the weight of each token, 0 if it is not trained on.
        notes: counts for the summary, by name: straddling tokens, literals kept as text, and the notes of ``Rendered``.
        straddling: the text of a token that contains characters of both a header and a span, for display; "" if there
            is none.
        media: images and recordings of the sequence, in order.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.float32]
    notes: Mapping[str, int] = {}
    straddling: str = ""
    media: Sequence[EncodedItem] = ()


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """Options for which characters of a rendered conversation are trained on.

    Attributes:
        train_on: ``"assistant"``, every assistant message; ``"last-turn"``, the assistant messages after the last user
            message (tool results between them do not end a turn); ``"markers"``, exactly the text inside the template's
            ``{% generation %}`` markers, of any role; ``"all"``, every character.
        train_on_thinking: whether reasoning, with the tags around it, is trained on.
        train_on_tool_calls: whether tool calls are trained on. Otherwise they are excluded from the end of the words
            before them to the start of the words after them, or to the end of the turn if none follow.
        earlier_reasoning: what to do with a row if the template drops the reasoning of earlier turns: ``"error"``
            rejects it; ``"drop"`` makes one sequence without that reasoning; ``"split"`` makes a sequence of each turn,
            as the model would see it there.
        partial_markers: what to do with a row if the template's generation markers do not cover all assistant words:
            ``"error"`` rejects it, ``"keep"`` trains on the text inside the markers.
        allow_control_tokens: whether text of the data that spells a control token becomes that token.
        template_date: the day, ``YYYY-MM-DD``, for templates that ask for the date.

    Raises:
        FormatError: an option has an invalid value, ``template_date`` is not a date, or ``train_on="markers"`` is
            combined with an option that selects other text.
    """

    train_on: TrainOn = "assistant"
    train_on_thinking: bool = True
    train_on_tool_calls: bool = True
    earlier_reasoning: EarlierReasoning = "error"
    partial_markers: PartialMarkers = "error"
    allow_control_tokens: bool = False
    template_date: str | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.train_on == "markers" and not (
            self.train_on_thinking and self.train_on_tool_calls and self.earlier_reasoning != "split"
        ):
            raise FormatError(
                "--train-on markers trains on exactly the text that the markers enclose: leave out"
                " --no-train-on-thinking, --no-train-on-tool-calls and --earlier-reasoning split"
            )
        if self.template_date is not None:
            try:
                datetime.strptime(self.template_date, "%Y-%m-%d")
            except (TypeError, ValueError):
                raise FormatError(f"--template-date: {self.template_date!r} is not a date like 2025-01-31") from None
