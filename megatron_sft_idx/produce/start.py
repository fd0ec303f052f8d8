"""Where a producer begins: an empty catalog, or one that it was making before, whatever ended it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.live import Catalog, Limits, ProducerState, Record
from megatron_sft_idx.produce.feed import Position
from megatron_sft_idx.produce.options import ProduceOptions
from megatron_sft_idx.shard import read_header, remove_remains
from megatron_sft_idx.tokenize import RowEncoder, option_differences, packing_differences

__all__ = ["CURSOR", "Cursor", "find_start"]

# The key of the header's JSON block that holds a shard's cursor: publishing a shard and moving on is one step.
CURSOR = "cursor"


@dataclass(frozen=True, slots=True)
class Cursor(Record):
    """How far the input has become shards.

    Attributes:
        position: in the input.
        rows: before it.
        skipped: of these, rows that could not be used.
    """

    position: Position = field(default_factory=Position)
    rows: int = 0
    skipped: int = 0


def find_start(
    catalog: Catalog, options: ProduceOptions, encoder: RowEncoder, num_files: int
) -> tuple[ProducerState, Cursor]:
    """The state to go on from, and the place in the input.

    Shards that were published after the state was last written are counted, since each holds its own cursor. Where
    there is no shard yet, the options may be others.

    Args:
        catalog: held by this producer.
        options: what it is told.
        encoder: made from them.
        num_files: of the input; 0 where they are not all there yet.

    Raises:
        FormatError: the folder holds shards that no producer made, or was made with other options; says which.
    """
    limits = options.limits(encoder)
    wanted = options.describe(encoder, num_files)
    state = catalog.producer()
    if state is None:
        if (present := catalog.present()) or catalog.end() is not None:
            raise FormatError(
                f"{catalog.folder}: {len(present)} shards are here, and no _producer.json that says how they were made;"
                " name another folder"
            )
        return ProducerState(limits, options=wanted, input=Cursor().to_json()), Cursor()
    if not state.published and not catalog.is_published(0) and catalog.end() is None:
        return ProducerState(limits, state.beat, options=wanted, input=Cursor().to_json()), Cursor()
    if differs := _differences(state, wanted, limits, options, encoder):
        raise FormatError(
            f"{catalog.folder}: this catalog was begun with other options: {'; '.join(differs)}; give the same ones to"
            " go on with it, or name another folder"
        )
    path = os.path.join(catalog.folder, "_producer.json")
    cursor = Cursor.parse(path, state.input, f"{CURSOR}.")
    published = state.published
    while catalog.is_published(published):
        prefix = catalog.shard_prefix(published)
        # The last thing to go of a build is its journal.
        remove_remains(prefix)
        paths = ShardPaths.of(prefix)
        content = read_header(prefix).metadata.get(CURSOR)
        if not isinstance(content, dict):
            raise FormatError(
                f"{paths.seq_idx}: not a shard that this producer made, its header has no cursor; name another folder"
            )
        cursor = Cursor.parse(paths.seq_idx, content, f"{CURSOR}.")
        published += 1
    return (
        ProducerState(limits, state.beat, "running", None, published, state.freed, wanted, cursor.to_json()),
        cursor,
    )


def _differences(
    state: ProducerState, wanted: Mapping[str, Any], limits: Limits, options: ProduceOptions, encoder: RowEncoder
) -> list[str]:
    """What decides over the bytes of the shards and is another now."""
    differs = option_differences(state.options, encoder) + packing_differences(state.options, options.packing)
    for group in ("sharding", "input"):
        found = state.options.get(group)
        before = found if isinstance(found, dict) else {}
        for key in sorted({*before, *wanted[group]}):
            if before.get(key) != wanted[group].get(key):
                name = key.replace("_", " ")
                differs.append(f"{name} was {before.get(key)!r}, is {wanted[group].get(key)!r}")
    if state.limits.token_dtype != limits.token_dtype:
        differs.append(f"token dtype was {state.limits.token_dtype}, is {limits.token_dtype}")
    return differs
