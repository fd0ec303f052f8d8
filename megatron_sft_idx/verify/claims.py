"""What the header of ``.seq.idx`` says, taken as far as it can be: whoever verifies goes on where a reader stops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from megatron_sft_idx.layout import HEADER_FIXED_NBYTES, MASK_DTYPES, TOKEN_DTYPES, align
from megatron_sft_idx.layout.header import (
    CHECKSUM_NBYTES,
    MAGIC,
    Broken,
    broken_outline,
    broken_rules,
    decode_metadata,
    field_values,
)
from megatron_sft_idx.layout.mmididx import idx_nbytes
from megatron_sft_idx.layout.values import MAX_CAPACITY, MAX_COUNT
from megatron_sft_idx.verify.files import CheckedFile
from megatron_sft_idx.verify.findings import Findings

__all__ = ["Claims", "check_header"]

_UPGRADE = "upgrade megatron-sft-idx, or restore the file from a copy"


@dataclass(frozen=True)
class Claims:
    """A header's fields, none of which is known to be right.

    Attributes:
        values: the fixed fields by name.
        sound: no rule of the header is broken, so what it says of the files is what its writer said.
        vocab_size: the tokenizer's, from the JSON block; None where that does not say.
    """

    values: dict[str, Any]
    sound: bool
    vocab_size: int | None

    def count(self, name: str) -> int:
        """A count, no larger than the format allows: sums and products of a few of them fit 63 bits."""
        return min(int(self.values[name]), MAX_COUNT)

    @property
    def num_packs(self) -> int:
        """Packs."""
        return self.count("num_packs")

    @property
    def num_sequences(self) -> int:
        """Sequences in all packs."""
        return self.count("num_sequences")

    @property
    def num_tokens(self) -> int:
        """Tokens in all packs."""
        return self.count("num_tokens")

    @property
    def capacity(self) -> int:
        """Most positions of a pack."""
        return min(int(self.values["capacity"]), MAX_CAPACITY)

    @property
    def sequence_multiple(self) -> int:
        """What sequences are rounded up to."""
        return max(1, min(int(self.values["sequence_multiple"]), MAX_CAPACITY))

    @property
    def token_dtype(self) -> np.dtype[Any] | None:
        """Dtype of ``.bin``; None for a code that means nothing."""
        return TOKEN_DTYPES.get(self.values["token_dtype"])

    @property
    def mask_dtype(self) -> np.dtype[Any] | None:
        """Dtype of ``.loss.bin``; None for a code that means nothing."""
        return MASK_DTYPES.get(self.values["mask_dtype"])

    @property
    def sequence_offsets_offset(self) -> int:
        """Where ``sequence_offsets`` begin in ``.seq.idx``, in bytes."""
        return int(self.values["header_nbytes"])

    @property
    def token_offsets_offset(self) -> int:
        """Where ``token_offsets`` begin in ``.seq.idx``, in bytes."""
        return align(self.sequence_offsets_offset + 8 * (self.num_packs + 1))

    @property
    def seq_idx_nbytes(self) -> int:
        """Size of the whole ``.seq.idx``."""
        return self.token_offsets_offset + 8 * (self.num_packs + 1)

    def nbytes(self, suffix: str) -> int | None:
        """Size of a file by the counts; None where that takes a dtype that means nothing."""
        tokens, masks = self.token_dtype, self.mask_dtype
        sizes = {
            ".bin": tokens and self.num_tokens * tokens.itemsize,
            ".loss.bin": masks and self.num_tokens * masks.itemsize,
            ".seq.bin": 4 * self.num_sequences,
            ".idx": idx_nbytes(self.num_packs),
            ".seq.idx": self.seq_idx_nbytes,
        }
        return sizes[suffix]


def check_header(file: CheckedFile, findings: Findings) -> Claims | None:
    """Hold the header against rules H1 to H8; None where it cannot be read at all."""
    raw = file.read(0, HEADER_FIXED_NBYTES)
    outline, damaged = broken_outline(raw), False
    if outline and outline.rule == "H1" and _whole_with_magic(file):
        # Eight bytes are damaged; the rest is what its checksum says, and worth checking.
        damaged = True
        _add(findings, file, outline)
        raw = MAGIC + raw[len(MAGIC) :]
        outline = None
    if outline:
        _add(findings, file, outline, _UPGRADE if outline.rule == "H2" else None)
        return None
    values = field_values(raw)
    size = int(values["header_nbytes"])
    raw += file.read(len(raw), size - len(raw))
    if len(raw) < size:
        findings.add("H3", file.path, len(raw), "a file that ends inside the header", f"{size} bytes of it")
        return None
    broken = list(broken_rules(raw))
    for rule in broken:
        _add(findings, file, rule)
    metadata = decode_metadata(raw[HEADER_FIXED_NBYTES:][: values["json_nbytes"]])
    if metadata is not None and not isinstance(metadata.get("format_writer"), int):
        findings.add("H7", file.path, HEADER_FIXED_NBYTES, "no format_writer in the JSON block", "a number")
    stated = _stated_vocab_size(metadata or {})
    if stated is not None and _vocab_size(metadata or {}) is None:
        found = f"tokenizer.vocab_size {stated!r:.40} in the JSON block"
        findings.add("P9", file.path, HEADER_FIXED_NBYTES, found, "a whole number from 1 on")
    return Claims(values, not broken and not damaged, _vocab_size(metadata or {}))


def _add(findings: Findings, file: CheckedFile, broken: Broken, remedy: str | None = None) -> None:
    findings.add(broken.rule, file.path, broken.offset, broken.found, broken.expected, remedy=remedy)


def _whole_with_magic(file: CheckedFile) -> bool:
    """Whether the header would match its checksum with the right magic."""
    raw = MAGIC + file.read(len(MAGIC), HEADER_FIXED_NBYTES - len(MAGIC))
    if broken_outline(raw):
        return False
    size = field_values(raw)["header_nbytes"]
    raw += file.read(HEADER_FIXED_NBYTES, size - HEADER_FIXED_NBYTES)
    digest = xxhash.xxh3_128_digest(raw[:-CHECKSUM_NBYTES])
    return len(raw) == size and digest == raw[-CHECKSUM_NBYTES:]


def _stated_vocab_size(metadata: dict[str, Any]) -> Any:
    tokenizer = metadata.get("tokenizer")
    return tokenizer.get("vocab_size") if isinstance(tokenizer, dict) else None


def _vocab_size(metadata: dict[str, Any]) -> int | None:
    size = _stated_vocab_size(metadata)
    return size if isinstance(size, int) and size > 0 and not isinstance(size, bool) else None
