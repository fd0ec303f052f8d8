"""Restore files of a shard exactly, using a good header of ``.seq.idx``, which has their checksums.

New files are written with ``Repair``, which publishes them together and keeps the files that they replace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.check.lengths import first_sequences, idx_lengths, infer_lengths, offset_lengths, read_starts
from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError
from megatron_sft_idx.layout import (
    FileDigest,
    Header,
    ShardPaths,
    mask_dtype_of,
    token_dtype_of,
)
from megatron_sft_idx.layout.files import MAX_CAPACITY
from megatron_sft_idx.shard.pack_log import PackChunk
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.shard.writer import write_idx, write_seq_idx
from megatron_sft_idx.storage import OutputFile
from megatron_sft_idx.storage.building import Building
from megatron_sft_idx.storage.local import HashedFile
from megatron_sft_idx.storage.progress import Watch
from megatron_sft_idx.storage.publish import identity

_EXACT = "byte for byte"
# Suffix for a file that a new one replaces.
_DAMAGED = ".damaged"


@dataclasses.dataclass(frozen=True)
class GivenFacts:
    """Facts about a shard from the user that the files no longer contain; None if the user does not know a fact.

    Attributes:
        token_dtype: dtype of ``.bin``. Needed only if it is empty; otherwise its size and that of ``.loss.bin``
            determine both dtypes.
        mask_dtype: dtype of ``.loss.bin``, likewise.
        capacity: maximum number of token positions in a pack; if None, the length of the longest pack.
        sequence_multiple: packing counted each sequence as its length rounded up to this; if None, 1.
        pad_id: the tokenizer's padding id.
        eod_id: the id at the end of every sequence. It is not checked; a wrong one gives wrong results.

    Raises:
        FormatError: a value is not possible in a shard.
    """

    token_dtype: np.dtype[Any] | None = None
    mask_dtype: np.dtype[Any] | None = None
    capacity: int | None = None
    sequence_multiple: int | None = None
    pad_id: int | None = None
    eod_id: int | None = None

    def __post_init__(self) -> None:
        if self.token_dtype is not None:
            token_dtype_of(self.token_dtype)
        if self.mask_dtype is not None:
            mask_dtype_of(self.mask_dtype)
        for name, least in (("capacity", 1), ("sequence_multiple", 1), ("pad_id", 0), ("eod_id", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value <= MAX_CAPACITY:
                raise FormatError(f"{name} {value}: expected a whole number from {least} to {MAX_CAPACITY}")


# ---- replacing files ----


class Repair:
    """The new files of a damaged shard, published together by ``publish`` or removed by ``close``.

    Replaced files are kept under another name, so after a kill at any moment a second rebuild has all it needs.

    Args:
        paths: paths of the shard.
        faults: the damage of each file by path; a path without an entry is good.
        facts: facts from the user about the shard.
        watch: reports progress.
        building: the folder of the prefix, which the caller has taken; None for a dry run, which writes nothing.
    """

    def __init__(
        self, paths: ShardPaths, faults: Mapping[str, str], facts: GivenFacts, watch: Watch, building: Building | None
    ) -> None:
        self.paths, self.faults, self.facts, self.watch = paths, faults, facts, watch
        self._accepted: set[str] = set()
        self._publication: Publication | None = None
        self._at_close = contextlib.ExitStack()
        # Removes the new files that are not published.
        self.close = self._at_close.close
        if building is not None:
            only, content = (paths.starts, paths.idx, paths.seq_idx), {"work": "rebuild"}
            self._publication = Publication(paths, content, overwrite=True, only=only, any_file=True, building=building)
            self._at_close.callback(self._publication.abandon)

    def create(self, path: str) -> OutputFile:
        """Open a new, empty file. ``publish`` will move it to ``path`` unless it is rejected."""
        if self._publication is None:  # output of a dry run is only hashed
            return self._at_close.enter_context(contextlib.closing(OutputFile(os.devnull, append=True)))
        self._accepted.add(path)
        return self._publication.open(path)

    def reject(self, path: str) -> None:
        """Do not publish the new file for ``path``. Another one may be created. ``publish`` handles the rest."""
        self._accepted.discard(path)

    @property
    def unpublished(self) -> dict[str, str]:
        """Return the current paths of the new files until ``publish``, by their final paths."""
        paths = self.paths
        return {path: paths.unpublished.prefix + paths.suffix(path) for path in self._accepted}

    def publish(self) -> list[str]:
        """Give every file that is replaced a second name, then move the new files to their paths (rule W2).

        Returns:
            The second names.

        Raises:
            FormatError: a new file has appeared at one of the paths, or the file system has no hard links. If old files
                are no longer at their paths, the message gives their new names.
        """
        publication = self._publication
        if publication is None or not self._accepted:
            return []
        for path in {*self.paths.all} - self._accepted:
            publication.drop(path)
        second_names: dict[str, str] = {}
        try:
            for path in self.paths.all:
                if path in self._accepted and os.path.lexists(path):
                    second_names[path] = _give_second_name(path)
            publication.complete()
            publication.finish()
        except (OSError, FormatError) as error:
            moved = {path: name for path, name in second_names.items() if identity(path) != identity(name)}
            # After closing, only renames are missing. The next rebuild finishes them and must find all names.
            if not publication.closed:
                for path in second_names.keys() - moved.keys():
                    os.unlink(second_names[path])
            if moved:
                kept = ", ".join(f"{path} is now {name}" for path, name in moved.items())
                raise FormatError(f"{error}. The previous files are kept: {kept}") from error
            raise
        return list(second_names.values())


def _give_second_name(path: str) -> str:
    """Link a file to another name and return that name. Files and links that have other names already stay unchanged.

    If a killed rebuild already gave the file such a name, it gets no further one.
    """
    number, name = 0, path + _DAMAGED
    while (there := identity(name)) is not None:
        if there == identity(path):
            return name
        number += 1
        name = f"{path}{_DAMAGED}.{number}"
    try:
        os.link(path, name)
    except OSError as error:
        raise FormatError(
            f"{path}: it cannot be kept under the name {name} ({error.strerror}); copy the shard to another disk, or"
            " to a shorter name, and rebuild it there"
        ) from None
    return name


# ---- sources of the files ----


def inferred_in_words(eod_id: int | None) -> str:
    """Return the source of inferred lengths as text."""
    return "masks" if eod_id is None else f"masks and end-of-sequence id {eod_id}"


def joined_packs(paths: ShardPaths, lengths: NDArray[np.int64], starts: NDArray[np.uint32], origin: str) -> PackChunk:
    """Combine lengths from ``origin`` and starts into packs. CorruptShardError: the numbers of packs differ."""
    num_sequences = np.diff(first_sequences(starts))
    if len(lengths) != len(num_sequences):
        detail = (
            f"{len(num_sequences)} packs begin here (starts of 0), but there are {len(lengths)} according to {origin};"
            " one of the two is damaged or belongs to another shard: restore it"
        )
        raise CorruptShardError(paths.starts, 0, "P2", detail)
    return PackChunk(lengths, num_sequences)


# ---- with a good header ----


def restore_under_header(repair: Repair, header: Header) -> dict[str, str]:
    """Write each missing or damaged file if the remaining files reproduce the header's checksum.

    ``.seq.bin`` is zeros if every pack has one sequence, and cannot be derived otherwise. The arrays of ``.seq.idx``
    come from ``.seq.bin`` and pack lengths, for which there may be several sources. ``.idx`` comes from ``.seq.idx``.

    Returns:
        The method used to restore each file, by path.
    """
    paths, faults = repair.paths, repair.faults
    how_restored: dict[str, str] = {}
    digests = dict(zip(paths.data, header.digests, strict=True))

    def accept(path: str, digest: FileDigest, how: str) -> None:
        if digest == digests[path]:
            how_restored[path] = f"{how}, {_EXACT}"
        else:
            repair.reject(path)

    if paths.starts in faults and header.num_sequences == header.num_packs:
        out = HashedFile(repair.create(paths.starts))
        out.write(np.zeros(header.num_packs, "<u4"))
        accept(paths.starts, out.digest(), "one sequence per pack")
    packs: PackChunk | None = None
    if paths.seq_idx not in faults:
        lengths = offset_lengths(paths.seq_idx, header.token_offsets_offset, header.num_packs)
        packs = PackChunk(lengths, offset_lengths(paths.seq_idx, header.nbytes, header.num_packs))
    elif paths.starts not in faults or paths.starts in how_restored:
        is_new = paths.starts in how_restored
        starts = np.zeros(header.num_packs, np.uint32) if is_new else read_starts(paths.starts)
        packs, origin = _restore_arrays(repair, header, starts)
        if packs is not None:
            how_restored[paths.seq_idx] = f"from {origin} and .seq.bin, {_EXACT}"
    if packs is None:
        return how_restored
    if paths.idx in faults:
        digest = write_idx(repair.create(paths.idx), [packs], header.token_dtype, header.num_packs)
        accept(paths.idx, digest, "from .seq.idx")
    return how_restored


def _restore_arrays(repair: Repair, header: Header, starts: NDArray[np.uint32]) -> tuple[PackChunk | None, str]:
    """Write a new ``.seq.idx`` from the starts of all packs. Return its packs and the source of their lengths.

    The packs are None if no source of lengths reproduces the header's checksum.
    """
    paths, eod_id = repair.paths, repair.facts.eod_id
    # The most likely source first. A damaged file can be tried too, because the checksum decides.
    sources: list[tuple[str, Callable[[], NDArray[np.int64]]]] = [
        (".idx", lambda: idx_lengths(paths.idx, header.digests[0].nbytes)[0]),
        (".seq.idx", lambda: offset_lengths(paths.seq_idx, header.token_offsets_offset, header.num_packs)),
    ]
    if not {paths.tokens, paths.loss} & repair.faults.keys():
        dtypes = header.token_dtype, header.mask_dtype
        sources.append((inferred_in_words(eod_id), lambda: infer_lengths(paths, starts, dtypes, eod_id, repair.watch)))
    for origin, source in sources if os.path.exists(paths.idx) else sources[1:]:
        try:
            packs = joined_packs(paths, source(), starts, origin)
            if write_seq_idx(repair.create(paths.seq_idx), [packs], header) == header:
                return packs, origin
        except SFTIndexError:  # the source is damaged, or has the lengths of other packs
            pass
        repair.reject(paths.seq_idx)
    return None, ""
