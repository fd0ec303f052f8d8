"""Bringing files of a shard back: exactly, under a good header of ``.seq.idx``; or both indexes, from the data.

``restore_under_header`` brings a file back byte for byte or not at all, since the header has its checksum.
``derive_indexes`` works without a good header: pack lengths come from ``.idx`` or from the data. New files are written
through ``Repair``, which publishes them together and keeps those that they replace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.check.lengths import first_sequences, idx_lengths, infer_lengths, offset_lengths, read_starts
from megatron_sft_idx.check.pack_walk import CheckedFile, Meter, OffsetRun, Stream, walk_packs
from megatron_sft_idx.check.rules import Findings, HeaderClaims, add_breaches, check_ids
from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError
from megatron_sft_idx.layout import (
    MASK_DTYPES,
    TOKEN_DTYPES,
    FileDigest,
    Header,
    ShardPaths,
    mask_dtype_of,
    token_dtype_of,
)
from megatron_sft_idx.layout.files import MAX_CAPACITY
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.shard.writer import FORMAT_WRITER, PackChunk, write_idx, write_seq_idx
from megatron_sft_idx.storage import OutputFile
from megatron_sft_idx.storage.local import HashedFile, digest_file
from megatron_sft_idx.storage.progress import Watch
from megatron_sft_idx.storage.publish import identity

_EXACT = "byte for byte"
# Added to the name of a file that a new one replaces.
_DAMAGED = ".damaged"
# Fields of the header that no other file tells.
_HEADER_ONLY = ("capacity", "pad_id", "sequence_multiple")


@dataclasses.dataclass(frozen=True)
class GivenFacts:
    """What the user says of a shard whose files do not say it any more; None for what the user does not know.

    Attributes:
        token_dtype: of ``.bin``. Needed only if it is empty: else its size and that of ``.loss.bin`` tell both dtypes.
        mask_dtype: of ``.loss.bin``, likewise.
        capacity: most token positions a pack may hold; if None, the longest pack's.
        sequence_multiple: packing counted each sequence as its length rounded up to this; if None, 1.
        pad_id: the tokenizer's padding id.
        eod_id: the id that every sequence ends with. It is not checked, and what follows from a wrong one is wrong.

    Raises:
        FormatError: a value that no shard can have.
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


# ---- putting new files in their places ----


class Repair:
    """The new files of a damaged shard: published together by ``publish``, or removed by ``close``.

    Files that are replaced stay under another name, so a kill at any moment leaves all that a second rebuild needs.

    Args:
        paths: of the shard.
        faults: what is wrong with a file, by path; a path that is not in it is good.
        facts: what the user says of the shard.
        watch: shows progress.
        lock: descriptor of the journal, which the caller must have locked; None for a dry run, which writes nothing.
    """

    def __init__(
        self, paths: ShardPaths, faults: Mapping[str, str], facts: GivenFacts, watch: Watch, lock: int | None
    ) -> None:
        self.paths, self.faults, self.facts, self.watch = paths, faults, facts, watch
        self._accepted: set[str] = set()
        self._publication: Publication | None = None
        self._at_close = contextlib.ExitStack()
        # Removes the new files that are not published.
        self.close = self._at_close.close
        if lock is not None:
            only = (paths.starts, paths.idx, paths.seq_idx)
            self._publication = Publication(paths, {}, work="rebuild", overwrite=True, only=only, lock=lock)
            self._at_close.callback(self._publication.abandon)

    def create(self, path: str) -> OutputFile:
        """Open a new, empty file, which ``publish`` will put at ``path`` unless it is rejected."""
        if self._publication is None:  # what a dry run writes is only hashed
            return self._at_close.enter_context(contextlib.closing(OutputFile(os.devnull, append=True)))
        self._accepted.add(path)
        return self._publication.open(path)

    def reject(self, path: str) -> None:
        """Do not publish the new file for ``path``. Another one may be created; the rest is up to ``publish``."""
        self._accepted.discard(path)

    @property
    def unpublished(self) -> dict[str, str]:
        """Where the new files are until ``publish``, by the paths that they are for."""
        return {path: self.paths.temporary(path) for path in self._accepted}

    def publish(self) -> list[str]:
        """Give every file that is replaced a second name, then put the new ones in their places (rule W2).

        Returns:
            The second names.

        Raises:
            FormatError: something else has appeared at one of the places, or the file system has no hard links. If old
                files are no longer at their places, the message says under which names they are.
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
            publication.publish()
        except (OSError, FormatError) as error:
            moved = {path: name for path, name in second_names.items() if identity(path) != identity(name)}
            # Closed, the publication is complete but for renames. The next rebuild finishes it and must find all names.
            if not publication.closed:
                for path in second_names.keys() - moved.keys():
                    os.unlink(second_names[path])
            if moved:
                kept = ", ".join(f"{path} is {name} now" for path, name in moved.items())
                raise FormatError(f"{error}. What was there before is kept: {kept}") from error
            raise
        return list(second_names.values())


def _give_second_name(path: str) -> str:
    """Link a file to another name, and return that name. What is under other names is left alone, links included.

    A file that has such a name already, from a rebuild that was killed, gets no other one.
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
            f"{path}: it cannot be kept as {name} ({error.strerror}); copy the shard to another disk, or to a shorter"
            " name, and rebuild it there"
        ) from None
    return name


# ---- under a good header ----


def restore_under_header(repair: Repair, header: Header) -> dict[str, str]:
    """Write each missing or damaged file for which the files that are left give the header's checksum.

    ``.seq.bin`` is zeros if every pack is one sequence, and cannot be derived otherwise. The arrays of ``.seq.idx``
    come from ``.seq.bin`` and pack lengths, which several sources may have; ``.idx`` comes from ``.seq.idx``.

    Returns:
        How each file came back, by path.
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
        accept(paths.starts, out.digest(), "one sequence a pack")
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
        dtype = header.token_dtype
        code = token_dtype_of(dtype)[0]
        digest = write_idx(repair.create(paths.idx), [packs], code, dtype.itemsize, header.num_packs)
        accept(paths.idx, digest, "from .seq.idx")
    return how_restored


def _restore_arrays(repair: Repair, header: Header, starts: NDArray[np.uint32]) -> tuple[PackChunk | None, str]:
    """Write ``.seq.idx`` anew, by the starts of all packs; return its packs, and where their lengths come from.

    The packs are None if no source of lengths gives the header's checksum.
    """
    paths, eod_id = repair.paths, repair.facts.eod_id
    # The most likely source first. A damaged file may be tried too, because the checksum decides.
    sources: list[tuple[str, Callable[[], NDArray[np.int64]]]] = [
        (".idx", lambda: idx_lengths(paths.idx, header.digests[0].nbytes)[0]),
        (".seq.idx", lambda: offset_lengths(paths.seq_idx, header.token_offsets_offset, header.num_packs)),
    ]
    if not {paths.tokens, paths.loss} & repair.faults.keys():
        dtypes = header.token_dtype, header.mask_dtype
        sources.append((_inferred(eod_id), lambda: infer_lengths(paths, starts, dtypes, eod_id, repair.watch)))
    for origin, source in sources if os.path.exists(paths.idx) else sources[1:]:
        try:
            packs = _joined(paths, source(), starts, origin)
            if write_seq_idx(repair.create(paths.seq_idx), [packs], header) == header:
                return packs, origin
        except SFTIndexError:  # the source is damaged, or has the lengths of other packs
            pass
        repair.reject(paths.seq_idx)
    return None, ""


def _inferred(eod_id: int | None) -> str:
    """What inferred lengths come from, in words."""
    return "masks" if eod_id is None else f"masks and end-of-sequence id {eod_id}"


def _joined(paths: ShardPaths, lengths: NDArray[np.int64], starts: NDArray[np.uint32], origin: str) -> PackChunk:
    """Packs by lengths from ``origin`` and by their starts. CorruptShardError if the numbers of packs differ."""
    num_sequences = np.diff(first_sequences(starts))
    if len(lengths) != len(num_sequences):
        detail = (
            f"{len(num_sequences)} packs begin here (starts of 0), {len(lengths)} by {origin};"
            " one of the two is damaged or of another shard: restore it"
        )
        raise CorruptShardError(paths.starts, 0, "P2", detail)
    return PackChunk(lengths, num_sequences)


# ---- without a header ----


def derive_indexes(repair: Repair) -> tuple[dict[str, str], Header]:
    """Write both indexes from the data files, and from ``.idx`` if that is good.

    Returns:
        How each file came back, by path, without an ``.idx`` that is right already; and the new header.

    Raises:
        FormatError: the files that are left do not tell all that has to be known. Says what is missing.
    """
    paths, facts, watch = repair.paths, repair.facts, repair.watch
    if missing := [path for path in (paths.tokens, paths.loss, paths.starts) if path in repair.faults]:
        raise FormatError(
            f"{paths.prefix}: there is no good .seq.idx, and {', '.join(missing)} is missing: it cannot be derived;"
            " restore it from a copy (rule F1)"
        )
    present = [path for path in paths.data if os.path.exists(path)]
    with watch("reading", sum(os.stat(path).st_size for path in present)) as advance:
        digests = {path: digest_file(path, advance=advance) for path in present}
    lengths, dtypes, idx_fault = _index_and_dtypes(repair, digests)
    starts = read_starts(paths.starts)
    origin = ".idx"
    if lengths is None:
        origin = _inferred(facts.eod_id)
        try:
            lengths = infer_lengths(paths, starts, dtypes, facts.eod_id, watch)
        except FormatError as ambiguous:
            raise FormatError(f"{idx_fault}{ambiguous}") from None
    packs = _joined(paths, lengths, starts, origin)
    walk = _measured(repair, dtypes, packs)
    how_restored: dict[str, str] = {}
    code = token_dtype_of(dtypes[0])[0]
    digest = write_idx(repair.create(paths.idx), [packs], code, dtypes[0].itemsize, walk.num_packs)
    if digest == digests.get(paths.idx):
        repair.reject(paths.idx)
    else:
        how_restored[paths.idx] = f"from {origin}"
    digests[paths.idx] = digest
    tokens, loss, index, begins = (digests[path] for path in paths.data)
    header = Header(
        num_packs=walk.num_packs,
        num_sequences=len(starts),
        num_tokens=tokens.nbytes // dtypes[0].itemsize,
        num_trained_tokens=walk.num_trained_tokens,
        num_masked_packs=walk.num_masked_packs,
        token_dtype=dtypes[0],
        mask_dtype=dtypes[1],
        sequence_multiple=facts.sequence_multiple or 1,
        capacity=facts.capacity or walk.longest_padded_pack,
        longest_pack=walk.longest_pack,
        most_sequences=walk.most_sequences,
        pad_id=facts.pad_id,
        digests=(tokens, loss, index, begins),
        arrays_checksum=bytes(16),  # follows when the arrays are written
    )
    header, what = _marked(header, origin, facts)
    header = write_seq_idx(repair.create(paths.seq_idx), [packs], header)
    how_restored[paths.seq_idx] = f"from {origin} and the data; {what}"
    return how_restored, header


def _index_and_dtypes(
    repair: Repair, digests: Mapping[str, FileDigest]
) -> tuple[NDArray[np.int64] | None, tuple[np.dtype[Any], np.dtype[Any]], str]:
    """Pack lengths by ``.idx``, None if it is missing or damaged; dtypes of tokens and masks; the fault of ``.idx``."""
    paths, facts = repair.paths, repair.facts
    idx, token_dtype, fault = None, facts.token_dtype, ""
    if paths.idx in digests:
        try:
            idx, token_dtype = idx_lengths(paths.idx, digests[paths.tokens].nbytes)
        except CorruptShardError as corrupt:
            fault = f"{corrupt}. Without it: "
        if idx is not None and facts.token_dtype not in (None, token_dtype):
            raise FormatError(f"{paths.idx}: says that tokens are {token_dtype}, --token-dtype {facts.token_dtype}")
    return idx, _dtypes_by_size(paths, token_dtype, facts.mask_dtype), fault


def _dtypes_by_size(
    paths: ShardPaths, token_dtype: np.dtype[Any] | None, mask_dtype: np.dtype[Any] | None
) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The dtypes of ``.bin`` and ``.loss.bin`` by their sizes; FormatError where no pair fits, or more than one.

    A token has 2 or 4 bytes and its mask 1 or 4, and the four ratios differ, so only empty files leave a choice.
    """
    tokens_nbytes, loss_nbytes = os.stat(paths.tokens).st_size, os.stat(paths.loss).st_size
    fitting = [
        (tokens, mask)
        for tokens in TOKEN_DTYPES.values()
        for mask in MASK_DTYPES.values()
        if tokens_nbytes % tokens.itemsize == 0
        and tokens_nbytes // tokens.itemsize * mask.itemsize == loss_nbytes
        and token_dtype in (None, tokens)
        and mask_dtype in (None, mask)
    ]
    if len(fitting) == 1:
        return fitting[0]
    sizes = f"{paths.prefix}: .bin has {tokens_nbytes} bytes, .loss.bin {loss_nbytes}"
    if fitting:
        raise FormatError(f"{sizes}, which says nothing of their dtypes; pass --token-dtype and --mask-dtype")
    given = ", ".join(str(dtype) for dtype in (token_dtype, mask_dtype) if dtype is not None)
    expected = given or "uint16 or int32 tokens with uint8 or float32 masks"
    raise FormatError(f"{sizes}, which do not go together as {expected} (rule F2); restore the one that was cut short")


def _measured(repair: Repair, dtypes: tuple[np.dtype[Any], np.dtype[Any]], packs: PackChunk) -> _native.PackWalk:
    """Walk all packs for their counts. FormatError if they break a rule."""
    paths, facts = repair.paths, repair.facts
    num_tokens = os.stat(paths.tokens).st_size // dtypes[0].itemsize
    values = {
        "num_packs": len(packs.lengths),
        "num_sequences": int(packs.sequences.sum()),
        "num_tokens": num_tokens,
        "capacity": facts.capacity or MAX_CAPACITY,
        "sequence_multiple": facts.sequence_multiple or 1,
        "token_dtype": token_dtype_of(dtypes[0])[0],
        "mask_dtype": mask_dtype_of(dtypes[1])[0],
        "header_nbytes": 0,
    }
    claims, findings = HeaderClaims(values), Findings(paths.prefix, 1)
    walk = claims.kernel(1)

    token_offsets = _native.offsets_from_lengths(packs.lengths, 1, 0)
    sequence_offsets = _native.offsets_from_lengths(packs.sequences, 1, 0)
    run = OffsetRun(token_offsets, sequence_offsets, len(packs.lengths))

    def pack_of(token: int) -> int | None:
        return int(np.searchsorted(token_offsets, token, side="right")) - 1

    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(contextlib.closing(CheckedFile(path)))
            for path in (paths.tokens, paths.loss, paths.starts)
        ]
        advance = stack.enter_context(repair.watch("checking", sum(file.nbytes for file in files)))
        meter = Meter(advance)
        tokens, loss, starts = (Stream(file, meter) for file in files)
        walk_packs(walk, [run], starts, loss, dtypes[1])
        add_breaches(walk, paths, claims, findings, pack_of)
        check_ids(tokens, dtypes[0], 1 << 32, findings, pack_of)
    for finding in findings.kept:
        if finding.path == paths.seq_idx:  # not written yet, so only its limits can be wrong
            remedy = "pass the --capacity and --sequence-multiple that it was packed with, or none"
            raise FormatError(f"{paths.prefix}: {finding.what}; {remedy}")
        where = f"{finding.path}: byte {finding.offset}"
        raise FormatError(f"{where}: {finding.what}; the files are not of one shard, or one is damaged: restore it")
    return walk


def _marked(header: Header, origin: str, facts: GivenFacts) -> tuple[Header, str]:
    """The header, marked as rebuilt, with a list of what is unknown in its metadata; and the same in words."""
    unknown = [name for name in _HEADER_ONLY if getattr(facts, name) is None]
    words = [
        f"capacity {header.capacity}" + (", the longest pack" if "capacity" in unknown else ""),
        f"sequence multiple {header.sequence_multiple}" + (", not known" if "sequence_multiple" in unknown else ""),
        "pad id not known" if header.pad_id is None else f"pad id {header.pad_id}",
        "metadata lost",
    ]
    rebuilt = {"pack_lengths": origin, "unknown": sorted(["metadata", *unknown])}
    metadata = {"format_writer": FORMAT_WRITER, "rebuilt": rebuilt}
    return dataclasses.replace(header, metadata=metadata, rebuilt=True), "; ".join(words)
