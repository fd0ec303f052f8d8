"""What passes between the steps of ``chat``: conversations, rendered text, token ids with their masks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Conversation", "Encoded", "Rendered", "Span", "TokenizedRow"]


@dataclass(frozen=True, slots=True)
class Conversation:
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
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """A row that came tokenised: ids and a token-aligned mask (1 = this token is trained on)."""

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``[start, stop)`` of a rendered text that are trained on with ``weight``."""

    start: int
    stop: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Rendered:
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
    literals: list[tuple[int, int]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sequence: ids and its token-aligned mask, both [length].

    Attributes:
        input_ids: int32.
        loss_mask: float32 weights, token-aligned: nonzero where this token is trained on.
        notes: counts for the summary: straddling tokens, literals kept as text, and the render's notes.
        straddling: a token that brings characters of a header into a span, for people to see; "" where none does.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.float32]
    notes: dict[str, int] = field(default_factory=dict)
    straddling: str = ""
