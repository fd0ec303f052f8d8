"""Files brought back under a good header: its checksums prove each of them, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.layout import FileDigest, Header, token_dtype_of
from megatron_sft_idx.rebuild.data import DataFiles
from megatron_sft_idx.rebuild.ends import EndLengths
from megatron_sft_idx.rebuild.lengths import IdxLengths, Lengths, OffsetLengths
from megatron_sft_idx.rebuild.options import Known
from megatron_sft_idx.rebuild.packs import StartedPacks, Starts, StoredPacks, pieces
from megatron_sft_idx.rebuild.replace import Replacement
from megatron_sft_idx.rebuild.survey import Survey
from megatron_sft_idx.rebuild.watch import Watch
from megatron_sft_idx.shard.index import PackChunk, write_idx, write_seq_idx
from megatron_sft_idx.storage import open_array
from megatron_sft_idx.storage.hashing import HashedFile

__all__ = ["restore"]

_SAME = "byte for byte"


def restore(found: Survey, header: Header, known: Known, new: Replacement, watch: Watch) -> dict[str, str]:
    """Write what is missing or damaged beside a good header, as far as it can be derived.

    Returns:
        How each file came back, by path.
    """
    return _Restoration(found, header, known, new, watch).run()


class _Restoration:
    def __init__(self, found: Survey, header: Header, known: Known, new: Replacement, watch: Watch) -> None:
        self._found, self._header, self._known, self._new, self._watch = found, header, known, new, watch
        self._paths = found.paths
        self._digests = dict(zip(self._paths.data, header.digests, strict=True))
        self._done: dict[str, str] = {}

    def run(self) -> dict[str, str]:
        """Arrays first: all else follows from them."""
        faults, paths = self._found.faults, self._paths
        packs: Iterable[PackChunk] | None
        packs = StoredPacks(paths.seq_idx, self._header) if self._found.arrays_good else self._restore_arrays()
        if packs is not None and paths.idx in faults:
            self._restore_idx(packs)
        if packs is not None and paths.starts in faults:
            self._restore_starts(packs)
        return self._done

    def _good(self, *wanted: str) -> bool:
        return not any(path in self._found.faults for path in wanted)

    def _restore_arrays(self) -> Iterable[PackChunk] | None:
        """The packs by which the arrays have the checksum that the header says."""
        path, header = self._paths.seq_idx, self._header
        if not self._good(self._paths.starts):
            return None
        starts = Starts(self._paths.starts)
        for source in self._sources():
            try:
                lengths = source()
                packs = StartedPacks(lengths, starts)
                if write_seq_idx(self._new.create(path), packs, header) == header:
                    self._done[path] = f"from {lengths.origin} and .seq.bin, {_SAME}"
                    return packs
            except SFTIndexError:  # not the lengths that this header was written with
                pass
            self._new.drop(path)
        return None

    def _sources(self) -> Iterator[Callable[[], Lengths]]:
        """Where lengths may be had, likely ones first: the checksum decides, so even a damaged file may be tried."""
        paths, header = self._paths, self._header
        if self._found.digests[paths.idx] is not None:
            yield lambda: IdxLengths(paths.idx, self._digests[paths.tokens].nbytes)
        yield lambda: OffsetLengths(paths.seq_idx, header.token_offsets_offset, header.num_packs)
        if self._good(paths.tokens, paths.loss):
            files = DataFiles(paths, header.token_dtype, header.mask_dtype)
            yield lambda: EndLengths(files, self._known.eod_id, self._watch)

    def _restore_idx(self, packs: Iterable[PackChunk]) -> None:
        path, dtype = self._paths.idx, self._header.token_dtype
        file = self._new.create(path)
        digest = write_idx(file, packs, token_dtype_of(dtype)[0], dtype.itemsize, self._header.num_packs)
        self._accept(path, digest, f"from .seq.idx, {_SAME}")

    def _restore_starts(self, packs: Iterable[PackChunk]) -> None:
        """All zeros where every pack is one sequence; else what follows each end-of-sequence id."""
        path, header, eod_id = self._paths.starts, self._header, self._known.eod_id
        out = HashedFile(self._new.create(path))
        if header.num_sequences == header.num_packs:
            for chunk in packs:
                out.write(np.zeros(len(chunk.lengths), "<u4"))
            self._accept(path, out.digest(), f"one sequence a pack, {_SAME}")
        elif eod_id is not None and self._good(self._paths.tokens):
            nbytes = self._digests[self._paths.tokens].nbytes
            tokens = open_array(
                self._paths.tokens, header.token_dtype, header.num_tokens, nbytes=nbytes, backend="pread"
            )
            for piece in pieces(packs):
                out.write(_starts_after(tokens[piece.tokens], eod_id, piece.packs.lengths))
            self._accept(path, out.digest(), f"from end-of-sequence id {eod_id}, {_SAME}")
        else:
            self._new.drop(path)

    def _accept(self, path: str, digest: FileDigest, how: str) -> None:
        """Keep a new file if it is the one that the header was written with."""
        if digest == self._digests[path]:
            self._done[path] = how
        else:
            self._new.drop(path)


def _starts_after(tokens: NDArray[Any], eod_id: int, lengths: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Starts inside their packs, uint32: at each pack's begin and after each end-of-sequence id but the pack's last."""
    begins = np.cumsum(lengths) - lengths
    edges = np.union1d(begins, np.flatnonzero(tokens[:-1] == eod_id) + 1)
    starts: NDArray[np.int64] = edges - begins[np.searchsorted(begins, edges, side="right") - 1]
    return starts.astype(np.uint32)
