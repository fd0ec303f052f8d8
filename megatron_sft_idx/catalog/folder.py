"""The folder: names of shards, which are there, and the producer's two documents."""

from __future__ import annotations

import os
import re

from megatron_sft_idx.catalog.documents import kind_of_document, read_document, write_document
from megatron_sft_idx.catalog.producer_state import ProducerState
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.storage import require_local

__all__ = ["ACKS", "END", "PRODUCER", "Catalog", "shard_name"]

PRODUCER, END, ACKS = "_producer.json", "_END.json", "_acks"
_REMEDY = (
    "keep it where producer and trainers share a file system; shards that are done may be copied to a bucket"
    " (megatron-sft-idx copy), and trained on from there"
)
_PRODUCER_KIND = kind_of_document("the state of a producer", ProducerState.parse)
_END_KIND = kind_of_document("the end of a catalog", lambda document: document.whole("shards"))
_NAME = re.compile(r"shard-([0-9]{6,18})\.")


def shard_name(number: int) -> str:
    """``shard-000011``: more digits where six are not enough, so names do not sort as numbers do."""
    return f"shard-{number:06d}"


class Catalog:
    """One catalog, as it is on disk at the moment of each call; holds nothing but its path.

    Args:
        folder: need not be there yet; FormatError for one in an object store.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require_local(folder, "a live catalog", _REMEDY)
        self.folder = os.fspath(folder)

    def shard_prefix(self, number: int) -> str:
        """The path that the five files of a shard share."""
        return os.path.join(self.folder, shard_name(number))

    def is_published(self, number: int) -> bool:
        """Whether a shard is there: one look at one file."""
        return os.path.exists(ShardPaths.of(self.shard_prefix(number)).seq_idx)

    def numbers(self) -> list[int]:
        """The shards that are there, in order."""
        return [number for number, suffixes in self._found().items() if "seq.idx" in suffixes]

    def present(self) -> list[int]:
        """The shards of which anything is there, also what is being written or was not wholly removed; in order."""
        return list(self._found())

    def shard_nbytes(self, number: int) -> int:
        """What a shard takes on disk; 0 where it is gone."""
        total = 0
        for path in ShardPaths.of(self.shard_prefix(number)).all:
            try:
                total += os.stat(path).st_size
            except FileNotFoundError:
                continue
        return total

    def producer(self) -> ProducerState | None:
        """What the producer last said; None where none ever was here.

        Raises:
            FormatError: the file is damaged, or of another version.
        """
        document = read_document(os.path.join(self.folder, PRODUCER))
        return None if document is None else ProducerState.parse(document)

    def end(self) -> int | None:
        """How many shards there are in all, removed ones included; None where more may come.

        Raises:
            FormatError: the file is damaged, or of another version.
        """
        document = read_document(os.path.join(self.folder, END))
        return None if document is None else document.whole("shards")

    def write_producer(self, state: ProducerState) -> None:
        """Replace ``_producer.json``; for the one producer that holds the catalog."""
        write_document(os.path.join(self.folder, PRODUCER), state.to_json(), _PRODUCER_KIND)

    def write_end(self, shards: int) -> None:
        """Say that there are so many shards and no more will come; every one is published."""
        write_document(os.path.join(self.folder, END), {"shards": shards}, _END_KIND)

    def _found(self) -> dict[int, set[str]]:
        """What follows the name, of every shard of which anything is there; numbers in order."""
        found: dict[int, set[str]] = {}
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return found
        for name in names:
            if (match := _NAME.match(name)) and name.startswith(shard_name(number := int(match[1])) + "."):
                found.setdefault(number, set()).add(name[match.end() :])
        return dict(sorted(found.items()))
