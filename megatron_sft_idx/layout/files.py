"""The files of a shard, the names they have while they are written, and the bytes of Megatron's index."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_sft_idx.errors import FormatError

__all__ = [
    "DATA_SUFFIXES",
    "IDX_HEADER",
    "IDX_HEADER_NBYTES",
    "SUFFIXES",
    "ShardPaths",
    "column_of",
    "idx_nbytes",
    "idx_places",
    "pack_idx_header",
]


# In the order of the digests in the header; the shard id is a hash over these four.
DATA_SUFFIXES = (".bin", ".loss.bin", ".idx", ".seq.bin")
# In the order of publication: a shard exists once its .seq.idx does.
SUFFIXES = (".bin", ".loss.bin", ".seq.bin", ".idx", ".seq.idx")
_UNPUBLISHED = ".tmp"
_COLUMN = re.compile(r"(.*)\.([a-z][a-z0-9_]*)\.col", re.DOTALL)


def column_of(path: str) -> tuple[str, str] | None:
    """Prefix and name of the column that a path would be of: ``X.source.col``; None for any other path."""
    found = _COLUMN.fullmatch(path)
    return (found[1], found[2]) if found else None


@dataclass(frozen=True, slots=True)
class ShardPaths:
    """Paths of one shard's files.

    Attributes:
        prefix: the path all share, as ``--data-path`` takes it.
        ending: added to the name of each while it is not published.
        columns: names of the columns that are meant, beside the five files that every shard has.
    """

    prefix: str
    ending: str = ""
    columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, prefix: str | os.PathLike[str] | ShardPaths) -> ShardPaths:
        """Paths for a prefix; a path of one of its files is taken for its prefix, and paths for themselves.

        Raises:
            FormatError: the prefix is empty or names a folder only.
        """
        if isinstance(prefix, ShardPaths):
            return prefix
        path = os.fspath(prefix)
        if column := column_of(path):
            path = column[0]
        for suffix in (".seq.idx", ".loss.bin", ".seq.bin", ".idx", ".bin"):
            if path.endswith(suffix):
                path = path[: -len(suffix)]
                break
        if os.path.basename(path) in ("", ".", ".."):
            raise FormatError(f"{os.fspath(prefix)!r}: not a prefix; name a shard inside a folder, such as data/train")
        return cls(path)

    @property
    def tokens(self) -> str:
        """``X.bin``: tokens of all packs."""
        return self.prefix + ".bin" + self.ending

    @property
    def loss(self) -> str:
        """``X.loss.bin``: the loss mask of every token."""
        return self.prefix + ".loss.bin" + self.ending

    @property
    def starts(self) -> str:
        """``X.seq.bin``: start positions of the sequences inside their packs."""
        return self.prefix + ".seq.bin" + self.ending

    @property
    def idx(self) -> str:
        """``X.idx``: Megatron's index."""
        return self.prefix + ".idx" + self.ending

    @property
    def seq_idx(self) -> str:
        """``X.seq.idx``: header and offsets; written last."""
        return self.prefix + ".seq.idx" + self.ending

    @property
    def journal(self) -> str:
        """``X.journal``: the record of a build in progress."""
        return self.prefix + ".journal"

    @property
    def index_remedy(self) -> str:
        """What to do about an index that is missing or wrong, as errors say it."""
        return f"restore it from a copy, or make it anew from the other files: megatron-sft-idx rebuild {self.prefix}"

    @property
    def folder(self) -> Path:
        """The folder that holds the shard."""
        return Path(self.prefix).parent

    def column(self, name: str) -> str:
        """``X.<name>.col``: a column."""
        return f"{self.prefix}.{name}.col{self.ending}"

    def with_columns(self, names: Iterable[str]) -> ShardPaths:
        """The same files, and these columns besides those that are meant already."""
        return replace(self, columns=tuple(sorted({*self.columns, *names})))

    def with_columns_of(self, paths: Iterable[str]) -> ShardPaths:
        """The same files, and the columns of this prefix that some paths would be of, published or not."""
        found = (column_of(path.removesuffix(_UNPUBLISHED)) for path in paths)
        return self.with_columns(column[1] for column in found if column and column[0] == self.prefix)

    @property
    def all(self) -> tuple[str, ...]:
        """The five files, and the columns, in the order of publication."""
        files = [self.prefix + suffix + self.ending for suffix in SUFFIXES]
        return (*files[:-1], *map(self.column, self.columns), files[-1])

    @property
    def data(self) -> tuple[str, ...]:
        """The four files with a digest in the header, in its order."""
        return tuple(self.prefix + suffix + self.ending for suffix in DATA_SUFFIXES)

    @staticmethod
    def temporary(path: str) -> str:
        """The name a file has until it is published."""
        return path + _UNPUBLISHED

    @property
    def unpublished(self) -> ShardPaths:
        """The same files under the names that they have until they are published."""
        return replace(self, ending=_UNPUBLISHED)

    def missing(self) -> list[str]:
        """Which of the files are not there."""
        return [path for path in self.all if not os.path.isfile(path)]

    def present(self) -> list[str]:
        """Which of the files are there."""
        return [path for path in self.all if os.path.lexists(path)]


IDX_HEADER = struct.Struct("<9sQBQQ")
IDX_HEADER_NBYTES = IDX_HEADER.size
_MAGIC = b"MMIDIDX\x00\x00"


def pack_idx_header(dtype_code: int, num_packs: int) -> bytes:
    """The 34 bytes before the arrays."""
    return IDX_HEADER.pack(_MAGIC, 1, dtype_code, num_packs, num_packs + 1)


def idx_nbytes(num_packs: int) -> int:
    """Size of the whole ``.idx`` in bytes."""
    return IDX_HEADER_NBYTES + num_packs * (4 + 8) + (num_packs + 1) * 8


def idx_places(num_packs: int) -> tuple[int, int, int]:
    """Where lengths, positions and documents begin in ``.idx``, in bytes."""
    positions = IDX_HEADER_NBYTES + 4 * num_packs
    return IDX_HEADER_NBYTES, positions, positions + 8 * num_packs
