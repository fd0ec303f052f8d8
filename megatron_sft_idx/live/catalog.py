"""The folder of a catalog: the names of its shards, and the documents of its producer.

::

    shard-000000.*        shards, six digits at least, each published atomically
    _producer.json        ProducerState: alive, what is published, limits, how far the input is read
    _END.json             how many shards there are; written once, last
    _acks/NAME/           Ack: how far each rank of consumer NAME has trained, as of its last checkpoint
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.lines import Shown, shown_by_fields
from megatron_sft_idx.live.documents import Positive, Record, read_document, write_document
from megatron_sft_idx.live.waiting import listed, patiently, status_of
from megatron_sft_idx.shard import read_header
from megatron_sft_idx.storage import require_local

PRODUCER, END, ACKS = "_producer.json", "_END.json", "_acks"
_NAME = re.compile(r"shard-([0-9]{6,18})\.")
_REMEDY = (
    "put it on a file system that producer and trainers share; finished shards can be copied to a bucket"
    " (megatron-sft-idx copy) for training"
)
State = Literal["running", "waiting for consumers", "waiting for input", "failed", "stopped"]

# ---- documents of the producer ----


def default_max_sequences(capacity: int) -> int:
    """Return the default limit of sequences in a pack; batches get their shape from it before any shard exists."""
    return max(64, capacity // 32)


@shown_by_fields
@dataclass(frozen=True, slots=True)
class Limits(Record):
    """Limits for all shards of a catalog, including future ones, and for how far the producer may run ahead.

    Attributes:
        capacity: maximum number of token positions in a pack.
        max_sequences_per_pack: maximum number of sequences in a pack; the width of ``cu_seqlens``.
        sequence_multiple: each sequence counts as its length rounded up to this.
        token_dtype: ``uint16`` or ``int32``.
        consumers: number of training runs that read the catalog.
        max_ahead_shards: maximum number of published shards that some consumer has not completed; None for no limit.
        max_ahead_nbytes: maximum size of these in bytes; None for no limit.
        keep_recent: number of completed shards to keep, the newest; older ones are removed. None removes nothing.
    """

    capacity: Positive
    max_sequences_per_pack: Positive
    sequence_multiple: Positive = 1
    token_dtype: Literal["uint16", "int32"] = "int32"
    consumers: Positive = 1
    max_ahead_shards: Positive | None = None
    max_ahead_nbytes: Positive | None = None
    keep_recent: int | None = None

    @property
    def needs_acks(self) -> bool:
        """Whether the producer waits for consumers, or removes shards that they have completed."""
        return (self.max_ahead_shards, self.max_ahead_nbytes, self.keep_recent) != (None, None, None)


@shown_by_fields
@dataclass(frozen=True, slots=True)
class ProducerState(Record):
    """The content of ``_producer.json``: whether the producer is alive, its limits, and its progress.

    Attributes:
        limits: what consumers can rely on.
        beat: increases with every rewrite, about every two seconds while the producer is alive. It is not a clock: a
            consumer records, with its own clock, when it last saw a change.
        state: what the producer is doing.
        reason: why it failed or stopped.
        published: shards below this number have been published.
        freed: shards below this number have been removed.
        options: the options that determine the bytes of the shards, compared when the producer is restarted.
        input: the position in the input, as of the last published shard.
    """

    limits: Limits
    beat: int = 0
    state: State = "running"
    reason: str | None = None
    published: int = 0
    freed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    input: dict[str, Any] = field(default_factory=dict)

    def contradiction(self) -> tuple[str, Any, str] | None:
        """Return an error if more shards were removed than published."""
        if self.freed <= self.published:
            return None
        return "freed", self.freed, f"at most the {self.published} published shards"


@dataclass(frozen=True, slots=True)
class _End(Record):
    shards: int


# ---- the folder ----


def shard_name(number: int) -> str:
    """Return ``shard-000011``.

    From a million shards on, names have more digits, and sort differently from the numbers.
    """
    return f"shard-{number:06d}"


class Catalog(Shown):
    """The folder of a catalog. Every call reads the disk again.

    Args:
        folder: its path. It need not exist yet. FormatError: it is in an object store.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require_local(folder, "a live catalog", _REMEDY)
        self.folder = os.fspath(folder)

    def _shown(self) -> str:
        return self.folder

    def shard_prefix(self, number: int) -> str:
        """Return the path that the five files of a shard share."""
        return os.path.join(self.folder, shard_name(number))

    def is_published(self, number: int) -> bool:
        """Return whether a shard exists, checked by one of its files."""
        return status_of(ShardPaths.of(self.shard_prefix(number)).seq_idx) is not None

    def numbers(self) -> list[int]:
        """Return the existing shards, in order."""
        return [number for number, suffixes in self._found().items() if "seq.idx" in suffixes]

    def present(self) -> list[int]:
        """Return the shards with at least one file, in order. Unfinished and partly removed shards count too."""
        return list(self._found())

    def shard_nbytes(self, number: int) -> int:
        """Return the size of a shard on disk in bytes; 0 if it is gone."""
        total, paths = 0, ShardPaths.of(self.shard_prefix(number))
        with contextlib.suppress(FormatError, ShardNotFoundError):
            header = patiently(paths.seq_idx, lambda: read_header(paths))
            paths = paths.with_listed(header.metadata)
        for path in paths.all:
            if (status := status_of(path)) is not None:
                total += status.st_size
        return total

    def producer(self) -> ProducerState | None:
        """Return the latest state of the producer; None if there never was one. FormatError: the file is damaged."""
        content = read_document(path := os.path.join(self.folder, PRODUCER))
        return None if content is None else ProducerState.parse(path, content)

    def end(self) -> int | None:
        """Return the total number of shards, including removed ones; None if more may come."""
        content = read_document(path := os.path.join(self.folder, END))
        return None if content is None else _End.parse(path, content).shards

    def write_producer(self, state: ProducerState) -> None:
        """Replace ``_producer.json``. The caller must be the producer that holds the catalog's lock."""
        write_document(os.path.join(self.folder, PRODUCER), state, "the state of a producer")

    def write_end(self, shards: int) -> None:
        """Record the final number of shards. The caller must have published all of them."""
        write_document(os.path.join(self.folder, END), _End(shards), "the end of a catalog")

    def _found(self) -> dict[int, set[str]]:
        """Return for each shard with any file, in order of numbers, the suffixes of these files."""
        found: dict[int, set[str]] = {}
        for name in listed(self.folder):
            if (match := _NAME.match(name)) and name.startswith(shard_name(number := int(match[1])) + "."):
                found.setdefault(number, set()).add(name[match.end() :])
        return dict(sorted(found.items()))
