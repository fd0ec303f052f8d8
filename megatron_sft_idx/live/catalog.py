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
    "keep it where producer and trainers share a file system; shards that are done may be copied to a bucket"
    " (megatron-sft-idx copy), and trained on from there"
)
State = Literal["running", "waiting for consumers", "waiting for input", "failed", "stopped"]

# ---- what a producer says ----


def default_max_sequences(capacity: int) -> int:
    """The most sequences in a pack where no limit is given; batches are shaped by it before any shard is there."""
    return max(64, capacity // 32)


@shown_by_fields
@dataclass(frozen=True, slots=True)
class Limits(Record):
    """What all shards of a catalog keep to, also those still to come, and how far the producer may run ahead.

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
        """Whether the producer waits for consumers, or removes what they have completed."""
        return (self.max_ahead_shards, self.max_ahead_nbytes, self.keep_recent) != (None, None, None)


@shown_by_fields
@dataclass(frozen=True, slots=True)
class ProducerState(Record):
    """The content of ``_producer.json``: whether the producer is alive, what it promises, and how far it is.

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

    def contradiction(self) -> tuple[str, Any, str] | None:
        """More shards were removed than published."""
        if self.freed <= self.published:
            return None
        return "freed", self.freed, f"no more than the {self.published} published"


@dataclass(frozen=True, slots=True)
class _End(Record):
    shards: int


# ---- the folder ----


def shard_name(number: int) -> str:
    """``shard-000011``; names of a million shards and more have more digits, and do not sort as their numbers do."""
    return f"shard-{number:06d}"


class Catalog(Shown):
    """A catalog's folder; every call looks at the disk anew.

    Args:
        folder: its path. It need not exist yet. FormatError where it is in an object store.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require_local(folder, "a live catalog", _REMEDY)
        self.folder = os.fspath(folder)

    def _shown(self) -> str:
        return self.folder

    def shard_prefix(self, number: int) -> str:
        """The path that the five files of a shard share."""
        return os.path.join(self.folder, shard_name(number))

    def is_published(self, number: int) -> bool:
        """Whether a shard is there, by one of its files."""
        return status_of(ShardPaths.of(self.shard_prefix(number)).seq_idx) is not None

    def numbers(self) -> list[int]:
        """The shards that are there, in order."""
        return [number for number, suffixes in self._found().items() if "seq.idx" in suffixes]

    def present(self) -> list[int]:
        """The shards of which anything is there, also what is being written or was not wholly removed; in order."""
        return list(self._found())

    def shard_nbytes(self, number: int) -> int:
        """How many bytes a shard takes on disk; 0 where it is gone."""
        total, paths = 0, ShardPaths.of(self.shard_prefix(number))
        with contextlib.suppress(FormatError, ShardNotFoundError):
            header = patiently(paths.seq_idx, lambda: read_header(paths))
            paths = paths.with_listed(header.metadata)
        for path in paths.all:
            if (status := status_of(path)) is not None:
                total += status.st_size
        return total

    def producer(self) -> ProducerState | None:
        """What the producer wrote last; None where no producer was ever here. FormatError: the file is damaged."""
        content = read_document(path := os.path.join(self.folder, PRODUCER))
        return None if content is None else ProducerState.parse(path, content)

    def end(self) -> int | None:
        """How many shards there are in all, removed ones included; None where more may come."""
        content = read_document(path := os.path.join(self.folder, END))
        return None if content is None else _End.parse(path, content).shards

    def write_producer(self, state: ProducerState) -> None:
        """Replace ``_producer.json``. The caller must be the producer that holds the catalog."""
        write_document(os.path.join(self.folder, PRODUCER), state, "the state of a producer")

    def write_end(self, shards: int) -> None:
        """Write down that there are so many shards and no more will come. The caller must have published all."""
        write_document(os.path.join(self.folder, END), _End(shards), "the end of a catalog")

    def _found(self) -> dict[int, set[str]]:
        """By the number of each shard of which any file is there, in order: what follows its name in those files."""
        found: dict[int, set[str]] = {}
        for name in listed(self.folder):
            if (match := _NAME.match(name)) and name.startswith(shard_name(number := int(match[1])) + "."):
                found.setdefault(number, set()).add(name[match.end() :])
        return dict(sorted(found.items()))
