"""Options for reading rows: the meaning of each field of a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_sft_idx.chat.packed_rows import SystemStarts
from megatron_sft_idx.chat.row_mapping import RowMapping
from megatron_sft_idx.chat.types import TrainOn
from megatron_sft_idx.errors import FormatError, check_options

RowKind = Literal["auto", "messages", "alpaca", "prompt-completion", "tokenized", "text", "preference", "kto"]
MaskAlignment = Literal["token", "label"]


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options for reading rows.

    Attributes:
        kind: the kind of every row; ``auto`` infers it from the keys of each row. The caller must pass rows of
            ``preference`` and ``kto`` to ``preferences``.
        mapping: other names of fields and roles in the rows.
        mask_alignment: alignment of the masks and labels of tokenised rows: at the trained token, or (label) at the
            position that predicts it.
        train_on: what is trained on. With ``markers`` and ``all``, a conversation may be without an answer. With
            ``all``, rows of plain text are read, and a "do not train" flag on a message of another role is an error.
        ignore_fields: names of fields to remove from rows, messages and parts; sorted.
        media: whether images and audio are read; otherwise a row with media is rejected.
        system_starts: meaning of a system message after an assistant message: the beginning of another conversation, a
            turn of the same one, or (error) undefined.

    Raises:
        FormatError: an option has an invalid value, or options contradict each other.
    """

    kind: RowKind = "auto"
    mapping: RowMapping = field(default_factory=RowMapping)
    mask_alignment: MaskAlignment = "token"
    train_on: TrainOn = "assistant"
    ignore_fields: tuple[str, ...] = ()
    media: bool = False
    system_starts: SystemStarts = "error"

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "ignore_fields", tuple(sorted({*self.ignore_fields})))
        if self.kind == "text" and self.train_on != "all":
            raise FormatError(
                "--row-kind text needs --train-on all: plain text has no roles, so every token is trained on"
            )
        mapped = {path for _, path in (*self.mapping.fields, *self.mapping.turn_fields)}
        if both := mapped.intersection(self.ignore_fields):
            raise FormatError(f"--ignore-field {min(both)}: the field is also mapped; remove one of the two options")
        targets = dict(self.mapping.fields)
        for target, kind in (("chosen", "preference"), ("rejected", "preference"), ("label", "kto")):
            if target in targets and self.kind != kind:
                raise FormatError(f"--fields {target}={targets[target]} needs --row-kind {kind}")

    @property
    def requires_answer(self) -> bool:
        """Whether a conversation without assistant words is rejected."""
        return self.train_on not in ("markers", "all")
