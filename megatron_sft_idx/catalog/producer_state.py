"""``_producer.json``: whether the producer is alive, what it promises, and how far it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast, get_args

from megatron_sft_idx.catalog.documents import Document

__all__ = ["Limits", "ProducerState", "State", "default_max_sequences"]

State = Literal["running", "waiting for consumers", "waiting for input", "failed", "stopped"]


def default_max_sequences(capacity: int) -> int:
    """Most sequences of a pack where nobody says: batches are shaped by it before the data is there."""
    return max(64, capacity // 32)


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds for every shard of a catalog, the ones still to come too, and how far the producer may run ahead.

    Attributes:
        capacity: most token positions of a pack.
        max_sequences_per_pack: most sequences of a pack; ``cu_seqlens`` is made that wide.
        sequence_multiple: each sequence counts as its length rounded up to this.
        token_dtype: ``uint16`` or ``int32``.
        consumers: training runs that read the catalog.
        max_ahead_shards: most published shards that a consumer has not completed; None for no limit.
        max_ahead_nbytes: most bytes of these; None for no limit.
        keep_recent: completed shards that are kept, the newest; older ones are removed. None removes nothing.
    """

    capacity: int
    max_sequences_per_pack: int
    sequence_multiple: int = 1
    token_dtype: str = "int32"
    consumers: int = 1
    max_ahead_shards: int | None = None
    max_ahead_nbytes: int | None = None
    keep_recent: int | None = None

    @property
    def needs_acks(self) -> bool:
        """Whether the producer waits for consumers, or removes what they have completed."""
        return (self.max_ahead_shards, self.max_ahead_nbytes, self.keep_recent) != (None, None, None)

    @classmethod
    def parse(cls, document: Document) -> Limits:
        """FormatError where a field is missing or of another type."""
        token_dtype = document.text("token_dtype")
        if token_dtype not in ("uint16", "int32"):
            raise document.wrong("token_dtype", token_dtype, "uint16 or int32")
        return cls(
            capacity=document.whole("capacity", 1),
            max_sequences_per_pack=document.whole("max_sequences_per_pack", 1),
            sequence_multiple=document.whole("sequence_multiple", 1),
            token_dtype=token_dtype,
            consumers=document.whole("consumers", 1),
            max_ahead_shards=document.whole_or_none("max_ahead_shards", 1),
            max_ahead_nbytes=document.whole_or_none("max_ahead_nbytes", 1),
            keep_recent=document.whole_or_none("keep_recent"),
        )


@dataclass(frozen=True, slots=True)
class ProducerState:
    """The content of ``_producer.json``.

    Attributes:
        limits: what consumers may rely on.
        beat: grows with every rewrite, which a living producer does about every two seconds. No clock is in here: a
            watcher notes, on its own, when it last saw this change.
        state: what the producer is doing.
        reason: why it failed or stopped.
        published: shards below this number have been published.
        freed: shards below this number have been removed.
        options: what decides over the bytes of the shards, as the producer compares it when it is started again.
        input: how far the input is read, as of the last published shard.
    """

    limits: Limits
    beat: int = 0
    state: State = "running"
    reason: str | None = None
    published: int = 0
    freed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    input: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What ``parse`` reads."""
        return asdict(self)

    @classmethod
    def parse(cls, document: Document) -> ProducerState:
        """FormatError where a field is missing or of another type."""
        state = document.text("state")
        if state not in get_args(State):
            raise document.wrong("state", state, " | ".join(get_args(State)))
        parsed = cls(
            limits=Limits.parse(document.document("limits")),
            beat=document.whole("beat"),
            state=cast(State, state),
            reason=document.text_or_none("reason"),
            published=document.whole("published"),
            freed=document.whole("freed"),
            options=document.mapping("options"),
            input=document.mapping("input"),
        )
        if parsed.freed > parsed.published:
            raise document.wrong("freed", parsed.freed, f"no more than the {parsed.published} published")
        return parsed
