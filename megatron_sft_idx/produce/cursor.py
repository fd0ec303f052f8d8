"""How much of the input has become shards, and where a producer resumes.

Each shard has the cursor after it in its header, so shards and cursor can never disagree.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.doubts import doubts
from megatron_sft_idx.live import PRODUCER, Catalog, Limits, ProducerState, Record
from megatron_sft_idx.produce.feed import Position
from megatron_sft_idx.produce.produce_options import ProduceOptions
from megatron_sft_idx.shard import read_header
from megatron_sft_idx.shard.publication import finish_interrupted
from megatron_sft_idx.tokenize import RowEncoder, noted_differences

# The key for the cursor in the JSON block of a shard's header.
CURSOR = "cursor"


@dataclass(frozen=True, slots=True)
class Cursor(Record):
    """How much of the input has become shards.

    position: a position in the input; everything before it is in shards.
    rows: number of rows before it.
    skipped: number of these rows that could not be used.
    """

    position: Position = field(default_factory=Position)
    rows: int = 0
    skipped: int = 0


def find_start(
    catalog: Catalog, options: ProduceOptions, encoder: RowEncoder, num_files: int
) -> tuple[ProducerState, Cursor]:
    """Return the state and the cursor to resume from, for an empty folder or an unfinished catalog.

    Shards that were published after the last write of the state count too, because each has its own cursor. While there
    is no shard, the options may change.

    Raises:
        FormatError: the folder has shards that no producer made, or was made with other options; the message says
            which.
    """
    limits, described = options.limits(encoder), options.describe(encoder, num_files)
    state = catalog.producer()
    if state is None and ((present := catalog.present()) or catalog.end() is not None):
        raise FormatError(
            f"{catalog.folder}: contains {len(present)} shards, but no _producer.json, which records how they were"
            " made; choose another folder"
        )
    if state is None or (not state.published and not catalog.is_published(0) and catalog.end() is None):
        beat = 0 if state is None else state.beat
        return ProducerState(limits, beat, options=described, input=Cursor().to_json()), Cursor()
    _require_same_options(catalog, state, limits, described | {"packing": options.packing.by_name()})
    cursor = Cursor.parse(os.path.join(catalog.folder, PRODUCER), state.input, f"{CURSOR}.")
    published = state.published
    while True:
        paths = ShardPaths.of(catalog.shard_prefix(published))
        finish_interrupted(paths)  # from a producer that was killed during its renames
        if not catalog.is_published(published):
            break
        cursor = _cursor_behind(paths)
        published += 1
    state = ProducerState(limits, state.beat, "running", None, published, state.freed, described, cursor.to_json())
    return state, cursor


def _require_same_options(catalog: Catalog, state: ProducerState, limits: Limits, described: dict[str, Any]) -> None:
    """Raise FormatError if options that determine the bytes of shards differ."""
    differs = noted_differences(state.options, described)
    if state.limits.token_dtype != limits.token_dtype:
        differs.append(f"token dtype was {state.limits.token_dtype}, is {limits.token_dtype}")
    if differs:
        raise FormatError(
            f"{catalog.folder}: this catalog was started with other options: {'; '.join(differs)}; use the old values"
            " to continue it, or choose another folder"
        )


def _cursor_behind(paths: ShardPaths) -> Cursor:
    """Return the cursor in the header of a shard. FormatError: it is not possible to continue after the shard."""
    metadata = read_header(paths).metadata
    if reasons := doubts(metadata):
        raise FormatError(
            f"{paths.seq_idx}: {'; '.join(reasons)}; remove the files"
            f" {paths.prefix}.*, and run the command again to make them again"
        )
    content = metadata.get(CURSOR)
    if not isinstance(content, dict):
        raise FormatError(
            f"{paths.seq_idx}: was not made by this producer, because its header has no cursor; choose another folder"
        )
    return Cursor.parse(paths.seq_idx, content, f"{CURSOR}.")
