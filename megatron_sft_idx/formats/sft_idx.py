"""Shards of this package, as one of the formats.

All reading and writing is in ``shard``; these classes are adapters to ``PackedReader`` and ``PackedWriter``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from megatron_sft_idx.formats.base import PackedReader, PackedSpec, PackedWriter, recogniser
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import MEDIA_ENTRY, listed_media
from megatron_sft_idx.packs.run import MaskAlignment, PackRun, checked_runs, read_window
from megatron_sft_idx.shard import BuildOptions, ShardWriter
from megatron_sft_idx.shard.columns import open_column
from megatron_sft_idx.shard.judged import require_shard_judged
from megatron_sft_idx.shard.media_reader import open_media
from megatron_sft_idx.shard.opening import column_names, open_files, read_header
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.storage import ReadOptions
from megatron_sft_idx.storage.publish import require_space


@recogniser
def recognise(path: str) -> bool:
    """Return whether there is a shard at this prefix, or the path is one of its files."""
    return bool(read_header(ShardPaths.of(path)))


# Entries of the JSON block that hold only for one shard's files, not for a copy.
_OF_THESE_FILES = ("format_writer", "columns", MEDIA_ENTRY)


def spec_of(header: Header) -> PackedSpec:
    """Return the spec of a shard from its header, without columns, which have their own headers."""
    return PackedSpec(
        num_packs=header.num_packs,
        num_sequences=header.num_sequences,
        num_tokens=header.num_tokens,
        longest_pack=header.longest_pack,
        token_dtype=header.token_dtype,
        mask_dtype=header.mask_dtype,
        capacity=header.capacity,
        sequence_multiple=header.sequence_multiple,
        pad_id=header.pad_id,
        num_trained_tokens=header.num_trained_tokens,
        metadata={key: value for key, value in header.metadata.items() if key not in _OF_THESE_FILES},
        media=listed_media(header.metadata) is not None,
    )


class Reader(PackedReader):
    """One shard, open.

    Args:
        path: the shard's prefix, or one of its files; or the paths of an unpublished shard.
        columns: names of the columns to read with packs; None for all.
    """

    label_only = (
        "mask alignment {} would shift the masks twice, because a shard's loss masks are label-aligned (rule P6);"
        " leave the option out"
    )

    def __init__(
        self, path: str | os.PathLike[str] | ShardPaths, *, mask_alignment: MaskAlignment = "label", **options: Any
    ) -> None:
        self._paths = ShardPaths.of(path)
        super().__init__(self._paths.prefix, mask_alignment=mask_alignment, **options)

    def _open(self, *, columns: Sequence[str] | None = ()) -> None:
        self._files = open_files(self._paths, ReadOptions(), None)
        header = self._files.header
        self.identity, self.num_packs = header.shard_id.hex(), header.num_packs
        self._dtypes = header.token_dtype, header.mask_dtype
        names = column_names(self._paths, header) if columns is None else columns
        self._opened = {name: open_column(self._paths, name, header) for name in names}
        self.columns = {name: column.spec for name, column in self._opened.items()}
        self._media = open_media(self._paths, header)
        self.has_media = self._media is not None
        self.spec = dataclasses.replace(spec_of(header), columns=self.columns)

    def require_judged(self, columns: Collection[str], remedy: str) -> None:
        """See ``PackedReader``. The shard's header lists its columns."""
        require_shard_judged(self.path, self._files.header, columns, remedy)

    def read(self, index: int) -> Pack:
        """Return pack ``index``, as views of the mapped files."""
        window = read_window(self._files, index, index + 1, columns=self._opened)
        pack = self._checked(index, window.run()).pack(0)
        if self._media is not None:
            pack["media"] = self._media.of_pack(index, len(pack["input_ids"]))
        return pack

    def _runs(self) -> Iterator[PackRun]:
        """Yield all packs and check the checksums of the shard; an error about damage is raised after the last run."""
        first_pack = 0
        for run in checked_runs(self._files, self._opened, lambda nbytes: None, self._media):
            yield self._checked(first_pack, run)
            first_pack += len(run)


class Writer(PackedWriter):
    """A shard being written at a prefix. The spec's metadata go to its header. The format can store everything."""

    format = "sft-idx"
    reader = Reader
    stores_columns = True
    stores_media = True

    def _begin(self, spec: PackedSpec) -> None:
        nbytes = spec.num_tokens * (spec.token_dtype.itemsize + spec.mask_dtype.itemsize) + spec.column_nbytes()
        require_space(self._path, nbytes)
        options = BuildOptions(
            spec.token_dtype,
            spec.mask_dtype,
            spec.capacity or None,  # 0 where there are no packs
            spec.sequence_multiple,
            spec.pad_id,
            dict(spec.metadata),
            dict(spec.columns),
            spec.media,
        )
        self._writer = ShardWriter.begin(self._path, options, work="convert", overwrite=self._overwrite)

    def _append(self, run: PackRun) -> None:
        self._writer.add_run(run)

    def _finish(self) -> None:
        self._writer.complete()

    def reread(self) -> Reader:
        """Return a reader of the files under their unpublished names."""
        return Reader(self._writer.paths.unpublished, columns=tuple(self.columns))

    def publish(self) -> None:
        """Publish the shard."""
        self._writer.finalize()
        self.found = self._writer.found

    def abandon(self) -> None:
        """Remove the output."""
        if hasattr(self, "_writer"):  # otherwise _begin failed before creating anything
            self._writer.abandon()
