"""Whether shards may become one, and what the header of that one says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.merge.origin import MAX_RUNS, ORIGIN, Run, extend_runs, origin_entry, own_run, runs_of
from megatron_sft_idx.shard.fingerprints import template_of, tokenizer_of

__all__ = ["PER_SHARD", "SPLIT", "Agreement"]

# What a part of a split says of the whole.
SPLIT = "split"
# Keys of the JSON block that count or name what is in one shard: not true of a merged one, nor of a part.
PER_SHARD = frozenset({"notes", "packing", "sources", ORIGIN, SPLIT})


@dataclass(frozen=True, slots=True)
class _Field:
    """Something that all shards have in common.

    Attributes:
        name: as messages say it.
        value_of: gives it, None where a shard does not know.
        remedy: how shards that differ in it can become one all the same.
        block: entry of the JSON block it is read from, if it is.
    """

    name: str
    value_of: Callable[[Header], Any]
    remedy: str
    block: str = ""


_COPY = "copy one with ShardWriter(..., {}=...).add_shard(Shard(...)), which converts, and merge the copy"
_TOKENIZERS = "they come from different tokenizers: preprocess one again with the tokenizer of the other"
_CAPACITY = (
    "pack one again (megatron-sft-idx pack SHARD --seq-length N), or take the largest with mixed_capacity"
    " (--mixed-capacity), as for tokenised corpora that are packed afterwards"
)
_MULTIPLE = "pack one again (megatron-sft-idx pack SHARD --seq-length N --sequence-multiple M)"
_TEMPLATES = "preprocess one again with the template of the other, or pass mixed_templates (--mixed-templates)"
# Masks are label-aligned everywhere: a header that claims anything else is refused when it is read (rule H5).
_FIELDS = (
    _Field("token dtype", lambda header: header.token_dtype, _COPY.format("token_dtype")),
    _Field("mask dtype", lambda header: header.mask_dtype, _COPY.format("mask_dtype")),
    # An empty shard may have a capacity of 0: it was to be that of the longest pack.
    _Field("capacity", lambda header: header.capacity or None, _CAPACITY),
    _Field("sequence multiple", lambda header: header.sequence_multiple, _MULTIPLE),
    _Field("pad id", lambda header: header.pad_id, _TOKENIZERS),
    _Field("tokenizer", tokenizer_of, _TOKENIZERS, "tokenizer"),
    _Field("chat template", template_of, _TEMPLATES, "chat_template"),
)
_COMPARED = {field.block for field in _FIELDS if field.block}


@dataclass(slots=True)
class _Seen:
    """What the shards so far say of one field.

    Attributes:
        known: first shard that knows it, and its value there.
        unknown: first shard that does not know it.
        num_unknown: shards that do not know it.
        differs: whether two values were let pass.
    """

    known: tuple[str, Any] | None = None
    unknown: str = ""
    num_unknown: int = 0
    differs: bool = False


class Agreement:
    """Takes the headers of the shards that are to be one, in order, and keeps some hundred bytes of each.

    Args:
        mixed_capacity: let capacities differ; the largest is that of the merged shard.
        mixed_templates: let chat templates differ.
    """

    def __init__(self, *, mixed_capacity: bool = False, mixed_templates: bool = False) -> None:
        self._mixed = {"capacity": mixed_capacity, "chat template": mixed_templates}
        self._seen = {field.name: _Seen() for field in _FIELDS}
        self._first: Header | None = None
        self._capacity, self._rebuilt = 0, False
        self._compared: dict[str, Any] = {}  # entries of the JSON block that fields are read from
        self._blocks: dict[str, Any] = {}  # other entries that are the same everywhere
        self._dropped: set[str] = set()  # names of those that are not
        self._own: list[Run] = []
        self._runs: list[Run] = []

    def add(self, prefix: str, header: Header) -> None:
        """Take one more shard.

        Raises:
            FormatError: it does not go together with one before it; says both values and both prefixes.
        """
        for field in _FIELDS:
            self._compare(field, prefix, header)
        own = {key: value for key, value in header.metadata.items() if key not in PER_SHARD | _COMPARED}
        if self._first is None:
            self._first, self._blocks = dataclasses.replace(header, metadata={}), own
        differ = {key for key in own.keys() | self._blocks if own.get(key) != self._blocks.get(key)}
        self._dropped |= differ
        for key in differ:
            self._blocks.pop(key, None)
        self._capacity = max(self._capacity, header.capacity)
        self._rebuilt |= header.rebuilt
        extend_runs(self._own, [own_run(header)])
        if len(self._runs) <= MAX_RUNS:  # else it is not going to be listed
            extend_runs(self._runs, runs_of(header))

    def _compare(self, field: _Field, prefix: str, header: Header) -> None:
        value, seen = field.value_of(header), self._seen[field.name]
        if value is None:
            seen.unknown = seen.unknown or prefix
            seen.num_unknown += 1
        elif seen.known is None:
            seen.known = prefix, value
            if field.block:
                self._compared[field.block] = header.metadata[field.block]
        elif value != seen.known[1]:
            if not self._mixed.get(field.name):
                first, expected = seen.known
                raise FormatError(
                    f"{prefix}: {field.name} {value}, in {first} {expected}; a merged shard has one: {field.remedy}"
                )
            seen.differs = True
            self._compared.pop(field.block, None)

    def header(self) -> Header:
        """What the merged shard has in common with its sources; counts and checksums are those of the first.

        Raises:
            FormatError: there were no shards, or they are too many for their names to fit a header.
        """
        if self._first is None:
            raise FormatError("an empty list of shards; name at least one")
        runs = self._runs if len(self._runs) <= MAX_RUNS else self._own
        if len(runs) > MAX_RUNS:
            raise FormatError(
                f"{len(runs)} shards, a header has room for the names of {MAX_RUNS}; merge some first, then the results"
            )
        pad_id = self._seen["pad id"].known
        return dataclasses.replace(
            self._first,
            capacity=self._capacity,
            pad_id=pad_id[1] if pad_id else None,
            metadata=self._blocks | self._compared | {ORIGIN: origin_entry(runs)},
            rebuilt=self._rebuilt,
        )

    def notes(self) -> list[str]:
        """What was not compared, or differs: a sentence each."""
        notes = []
        for name, seen in self._seen.items():
            if seen.known and seen.num_unknown:
                others = f" and {seen.num_unknown - 1:,} more" if seen.num_unknown > 1 else ""
                notes.append(f"{seen.unknown}{others}: {name} not recorded, taken to be that of {seen.known[0]}")
            if seen.differs:
                notes.append(f"{name}: not the same in all shards, as was allowed")
        if nowhere := [name for name, seen in self._seen.items() if not seen.known]:
            notes.append(f"recorded in none of the shards, so not compared: {', '.join(nowhere)}")
        if self._dropped:
            notes.append(f"not the same in all shards, so left out of the header: {', '.join(sorted(self._dropped))}")
        return notes
