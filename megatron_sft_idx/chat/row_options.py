"""How rows are read: the options that decide what each field of a row means."""

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
    """How rows are read.

    Attributes:
        kind: the kind of every row; ``auto`` infers it from the keys of each. The caller must hand rows of
            ``preference`` and ``kto`` to ``preferences``.
        mapping: which fields and roles the rows name in another way.
        mask_alignment: of the masks and labels of tokenised rows: at the token that is trained on, or
            (label) at the position that predicts it.
        train_on: what is trained on. With ``markers`` and ``all``, a conversation may be without an answer. With
            ``all``, rows of plain text are read, and a message of another role that says "do not train" is refused.
        ignore_fields: names of fields without which rows, messages and parts are read; sorted.
        media: whether images and audio are read; else a row that has some is refused.
        system_starts: what a system message after an answer is: the beginning of another conversation, a turn of the
            same one, or (error) nothing that may be guessed.

    Raises:
        FormatError: an option is none of its choices, or options contradict each other.
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
                "--row-kind text goes with --train-on all: plain text has no roles, so every token of it is trained on"
            )
        mapped = {path for _, path in (*self.mapping.fields, *self.mapping.turn_fields)}
        if both := mapped.intersection(self.ignore_fields):
            raise FormatError(f"--ignore-field {min(both)}: the field is mapped too; leave one out")
        targets = dict(self.mapping.fields)
        for target, kind in (("chosen", "preference"), ("rejected", "preference"), ("label", "kto")):
            if target in targets and self.kind != kind:
                raise FormatError(f"--fields {target}={targets[target]} goes with --row-kind {kind}")

    @property
    def requires_answer(self) -> bool:
        """Whether a conversation in which the assistant says nothing is refused."""
        return self.train_on not in ("markers", "all")
