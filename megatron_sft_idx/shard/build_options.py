"""The options of a build, and the files that grow while packs are added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.layout.column import ColumnSpec, Per, check_named_spec
from megatron_sft_idx.layout.files import (
    MASK_DTYPES,
    MAX_CAPACITY,
    SEQ_IDX,
    TOKEN_DTYPES,
    ShardPaths,
    check_column_name,
    mask_dtype_of,
    token_dtype_of,
    vocab_size_of,
)


class GrowingFile(NamedTuple):
    """A file of rows (tokens, masks, starts or a column) that grows as packs are added.

    Rows begin at byte ``begin``.
    """

    path: str
    per: Per
    row_nbytes: int
    begin: int = 0


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options of a build, as stored in its ``build.json``.

    Attributes:
        token_dtype: dtype of the token file: uint16 or int32.
        mask_dtype: dtype of the loss file: uint8 or float32.
        capacity: maximum number of token positions in a pack; None for the longest pack.
        sequence_multiple: each sequence counts as its length rounded up to this.
        pad_id: the tokenizer's padding id; None if it is unknown.
        metadata: JSON object, with the values that were known when the build began.
        columns: the columns to write with the tokens, by name.
        media: whether to write images and audio.

    Raises:
        FormatError: a value is not possible in a shard, or cannot be stored.
    """

    token_dtype: np.dtype[Any]
    mask_dtype: np.dtype[Any]
    capacity: int | None
    sequence_multiple: int
    pad_id: int | None
    metadata: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, ColumnSpec] = field(default_factory=dict)
    media: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_dtype", token_dtype_of(self.token_dtype)[1])
        object.__setattr__(self, "mask_dtype", mask_dtype_of(self.mask_dtype)[1])
        for name, least, optional in (("capacity", 1, True), ("sequence_multiple", 1, False), ("pad_id", 0, True)):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if type(value) is bool or not isinstance(value, int | np.integer) or not least <= value <= MAX_CAPACITY:
                raise FormatError(f"{name} {brief(value)}: expected a whole number from {least} to {MAX_CAPACITY}")
            object.__setattr__(self, name, int(value))
        # Reject a value that cannot be stored now, not after hours of writing.
        SEQ_IDX.nbytes(self.metadata)
        vocab_size_of(self.metadata)
        for name, spec in self.columns.items():
            check_column_name(name)
            if not isinstance(spec, ColumnSpec):
                raise FormatError(f"columns: {name} is {brief(spec)}, expected a ColumnSpec")
            check_named_spec(name, spec)

    def paths_of(self, paths: ShardPaths) -> ShardPaths:
        """Return the paths at a prefix, with all files of a shard that is built with these options."""
        return paths.with_columns(self.columns).with_media(self.media)

    def growing_files(self, paths: ShardPaths) -> list[GrowingFile]:
        """Return the files that grow as packs are added: tokens, masks, starts, then the columns."""
        columns = ((paths.column(name), spec) for name, spec in self.columns.items())
        return [
            GrowingFile(paths.tokens, "token", self.token_dtype.itemsize),
            GrowingFile(paths.loss, "token", self.mask_dtype.itemsize),
            GrowingFile(paths.starts, "sequence", 4),
            *(GrowingFile(path, spec.per, spec.row_nbytes, spec.header_nbytes) for path, spec in columns),
        ]

    def encode(self) -> dict[str, Any]:
        """Return the options as a JSON object, with dtypes as codes."""
        return {
            "token_dtype": token_dtype_of(self.token_dtype)[0],
            "mask_dtype": mask_dtype_of(self.mask_dtype)[0],
            "capacity": self.capacity,
            "sequence_multiple": self.sequence_multiple,
            "pad_id": self.pad_id,
            "metadata": self.metadata,
            **({"columns": {name: spec.encode() for name, spec in self.columns.items()}} if self.columns else {}),
            **({"media": True} if self.media else {}),
        }

    @classmethod
    def decode(cls, content: Mapping[str, Any], path: str) -> BuildOptions:
        """Decode the result of ``encode``, read from the file at ``path``.

        FormatError: not a possible result of ``encode``.
        """
        try:
            dtypes = TOKEN_DTYPES[content["token_dtype"]], MASK_DTYPES[content["mask_dtype"]]
            numbers = content["capacity"], content["sequence_multiple"], content["pad_id"]
            columns = {name: ColumnSpec.decode(spec) for name, spec in content.get("columns", {}).items()}
            return cls(*dtypes, *numbers, {**content["metadata"]}, columns, content.get("media") is True)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{path}: not the options of a build ({error}); remove its folder, and build again"
            ) from None
