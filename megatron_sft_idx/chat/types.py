"""What passes between the steps of ``chat``: pieces of input, conversations, rendered text, ids with their masks."""

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


class RowError(ValueError):
    """Why a row cannot be used; a caller that knows file and line makes a ``SequenceError`` of it."""


class InputRow(NamedTuple):
    """One row as it was read.

    Attributes:
        position: its line in a JSON-lines file, its record in a file of separated values, else its number, from 1.
        data: its values (``values``), or the error of a row that cannot be read.
        notes: counts for the summary by name, of what is left out of it.
    """

    position: int
    data: Any | SequenceError
    notes: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Piece(ABC):
    """Consecutive rows of one input file; picklable.

    Attributes:
        path: the file, as error messages name it.
        first: position of the first row, from 1: its line in a JSON-lines file, its record in a file of separated
            values (whose header is the first one), else the number of the row.
        num_bytes: how many bytes of the file, as it is on disk, this piece was read from, for progress. Over a file
            they sum to its size or less.
        payload: the bytes that hold the rows.
    """

    path: str
    first: int
    num_bytes: int
    payload: bytes

    @abstractmethod
    def rows(self) -> Iterator[InputRow]:
        """Yields each row. Blank lines give no row, but they count in positions."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash that is equal for pieces of the same rows, wherever these lie: xxh3_128 in hex."""


class Conversation(NamedTuple):
    """One chat in OpenAI's form, as chat templates expect it.

    Attributes:
        messages: dicts with ``role``, a string ``content`` (which may be missing beside tool calls), ``tool_calls``,
            ``reasoning_content``, and whatever else the row's messages hold but fields of ``training_fields``.
        weights: one loss weight a message, in the order of ``messages``; those of messages that are not the
            assistant's have no effect.
        tools: tool schemas handed to the template, or None.
        kwargs: extra template variables that the row itself sets (``chat_template_kwargs``).
        notes: counts for the summary by name.

    Where a row has images or audio, the content of a message may be a list of parts of ``text``, ``image`` and
    ``audio``, which keep their files (``media_parts``).
    """

    messages: list[dict[str, Any]]
    weights: list[float]
    tools: list[dict[str, Any]] | None = None
    kwargs: Mapping[str, Any] = {}
    notes: Mapping[str, int] = {}


class TokenizedRow(NamedTuple):
    """A row that came tokenised: ids and a token-aligned mask (1 = this token is trained on).

    Attributes:
        input_ids: int64 [tokens].
        loss_mask: float32 [tokens].
        notes: counts for the summary by name.
        bounds: where its sequences begin, and the end of the last one, int64 [sequences + 1]; None for one sequence.
    """

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    notes: Mapping[str, int] = {}
    bounds: NDArray[np.int64] | None = None


class TextRow(NamedTuple):
    """A row of plain text, of which every token is trained on.

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
        text: what the template made, to be tokenised as one string without adding special tokens.
        spans: what is trained on, ascending, not overlapping.
        literals: character ranges, ascending ``(start, stop)``, that spell a control token but came from the data,
            so that they must not become one. Nearly every row has none.
        notes: counts for the summary by name, such as how often the template dropped reasoning.
    """

    text: str
    spans: list[Span]
    literals: Sequence[tuple[int, int]] = ()
    notes: Mapping[str, int] = {}


class EncodedItem(NamedTuple):
    """An image or a recording in a sequence: its first position, how many it takes, and the number of its file."""

    kind: Kind
    start: int
    length: int
    blob: int


class Encoded(NamedTuple):
    """One sequence.

    Attributes:
        input_ids: int32 [length].
        loss_mask: float32 [length], token-aligned: the weight of each token, 0 where it is not trained on.
        notes: counts for the summary by name: straddling tokens, literals kept as text, and those of ``Rendered``.
        straddling: the text of a token that brings characters of a header into a span, to be shown to people; empty
            where no token does.
        media: images and recordings of the sequence, in order.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.float32]
    notes: Mapping[str, int] = {}
    straddling: str = ""
    media: Sequence[EncodedItem] = ()


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """Which characters of a rendered conversation are trained on.

    Attributes:
        train_on: ``"assistant"``, every assistant message; ``"last-turn"``, the assistant messages after the
            last user message (tool results between them do not end a turn); ``"markers"``, exactly what the template's
            ``{% generation %}`` markers enclose, whoever says it; ``"all"``, every character.
        train_on_thinking: whether reasoning, with the tags around it, is trained on.
        train_on_tool_calls: whether tool calls are trained on. Those that are not are left out from the end of the
            words before them to the start of the words after them, or to the end of the turn where none follow.
        earlier_reasoning: what becomes of a row if the template leaves out the reasoning of earlier turns: ``"error"``
            refuses it; ``"drop"`` makes one sequence without that reasoning; ``"split"`` makes a sequence of each turn,
            as the model would see it there.
        partial_markers: what becomes of a row of which the template's generation markers leave out something that the
            assistant says: ``"error"`` refuses it, ``"keep"`` trains on what the markers enclose.
        allow_control_tokens: whether text of the data that spells a control token becomes that token.
        template_date: the day, ``YYYY-MM-DD``, that a template is given when it asks for the date.

    Raises:
        FormatError: an option is none of its choices, ``template_date`` is no date, or ``train_on="markers"`` goes with
            an option that trains on something else than the markers enclose.
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
                "--train-on markers trains exactly what the markers enclose: leave out --no-train-on-thinking,"
                " --no-train-on-tool-calls and --earlier-reasoning split"
            )
        if self.template_date is not None:
            try:
                datetime.strptime(self.template_date, "%Y-%m-%d")
            except (TypeError, ValueError):
                raise FormatError(f"--template-date: {self.template_date!r} is not a date like 2025-01-31") from None
