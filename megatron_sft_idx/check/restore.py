"""Bringing files of a shard back: exactly, under a good header of ``.seq.idx``; or both indexes, from the data.

``restore_under_header`` brings a file back byte for byte or not at all, since the header has its checksum.
``derive_indexes`` works without a good header: pack lengths come from an index that is left or from the data, and
``header_proof`` says whether what the damaged header alone knew can be trusted. New files are written through
``Repair``, which publishes them together and keeps those that they replace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.check.header_proof import HEADER_ONLY, DamagedHeader
from megatron_sft_idx.check.lengths import (
    PackLengths,
    RepeatableChunks,
    StartsFile,
    idx_lengths,
    infer_lengths,
    join_starts,
    offset_lengths,
)
from megatron_sft_idx.check.pack_walk import CheckedFile, Meter, OffsetRun, Stream, walk_packs
from megatron_sft_idx.check.rules import Findings, HeaderClaims, add_breaches, check_ids
from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError, UnsupportedVersionError
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
from megatron_sft_idx.storage import OutputFile, open_array, open_regular
from megatron_sft_idx.storage.local import HashedFile, digest_file
from megatron_sft_idx.storage.progress import Watch
from megatron_sft_idx.storage.publish import MAX_NAME_NBYTES, identity, move_into_place

_EXACT = "byte for byte"
# Added to the name of a file that a new one replaces.
_DAMAGED = ".damaged"
_COPY_NBYTES = 1 << 20
# Room in such a name for the number of a process and .tmp, which a copy has until it is whole.
_COPY_ENDING_NBYTES = 24
_CHUNK_TOKENS = 1 << 16


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
        if self._publication is None:
            return self.write_nowhere()
        self._accepted.add(path)
        return self._publication.open(path)

    def write_nowhere(self) -> OutputFile:
        """Open a file that keeps nothing, to learn the checksum of what would be written."""
        return self._at_close.enter_context(contextlib.closing(OutputFile(os.devnull, append=True)))

    def reject(self, path: str) -> None:
        """Do not publish the new file for ``path``. Another one may be created; the rest is up to ``publish``."""
        self._accepted.discard(path)

    def publish(self) -> list[str]:
        """Give every file that is replaced a second name, then put the new ones in their places (rule W2).

        Returns:
            The second names.

        Raises:
            FormatError: something else has appeared at one of the places. If old files are no longer at theirs, the
                message says under which names they are.
        """
        publication = self._publication
        if publication is None or not self._accepted:
            return []
        for path in {*self.paths.all} - self._accepted:
            publication.drop(path)
        accepted = [path for path in self.paths.all if path in self._accepted]
        replaced = {path: there for path in accepted if (there := identity(path))}
        second_names: dict[str, str] = {}
        given_here: list[str] = []
        try:
            for path in replaced:
                second_names[path] = _give_second_name(path, given_here)
            publication.publish()
        except (OSError, FormatError) as error:
            in_place = {path for path in second_names if identity(path) == replaced[path]}
            # Closed, the publication is complete but for renames. The next rebuild finishes it and must find all names.
            if not publication.closed:
                for name in (second_names[path] for path in in_place):
                    if name in given_here:
                        os.unlink(name)
            if moved := [f"{path} is {name} now" for path, name in second_names.items() if path not in in_place]:
                remedy = "" if publication.closed else "; move back what is missing, then run the rebuild again"
                raise FormatError(f"{error}. What was there before is kept: {', '.join(moved)}{remedy}") from error
            raise
        return list(second_names.values())


def _second_name(path: str, number: int) -> str:
    """The name that a damaged file is kept under; of a file with a long name its prefix is cut, so that it fits."""
    prefix = ShardPaths.of(path).prefix
    ending = f"{path.removeprefix(prefix)}{_DAMAGED}" + (f".{number}" if number else "")
    folder, base = os.path.split(prefix)
    room = MAX_NAME_NBYTES - len(ending) - _COPY_ENDING_NBYTES
    return os.path.join(folder, os.fsencode(base)[:room].decode(errors="ignore") + ending)


def _give_second_name(path: str, given_here: list[str]) -> str:
    """Let a file have a second name, or a copy where the file system has no hard links; return that name.

    The name is appended to ``given_here``, unless the file has it already, from a rebuild that was killed. What is
    under other names is left alone, links included.
    """
    number, name = 0, _second_name(path, 0)
    while (there := identity(name)) is not None:
        if there == identity(path):
            return name
        number += 1
        name = _second_name(path, number)
    try:
        os.link(path, name)
    except OSError:
        copy = OutputFile(f"{name}.{os.getpid()}.tmp")
        try:
            with contextlib.closing(copy), open_regular(path) as file:
                while block := file.read(_COPY_NBYTES):
                    copy.write(block)
                copy.sync()
            move_into_place(copy.path, name, None)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy.path)
            raise
    given_here.append(name)
    return name


# ---- under a good header ----


def restore_under_header(repair: Repair, header: Header) -> dict[str, str]:
    """Write each missing or damaged file for which the files that are left give the header's checksum.

    The arrays of ``.seq.idx`` come from ``.seq.bin`` and pack lengths, which several sources may have; ``.idx`` comes
    from ``.seq.idx``; ``.seq.bin`` comes from ``.seq.idx`` if every pack is one sequence, else from the ids too.

    Returns:
        How each file came back, by path.
    """
    paths, faults, eod_id = repair.paths, repair.faults, repair.facts.eod_id
    how_restored: dict[str, str] = {}
    digests = dict(zip(paths.data, header.digests, strict=True))

    def accept(path: str, digest: FileDigest, how: str) -> None:
        if digest == digests[path]:
            how_restored[path] = f"{how}, {_EXACT}"
        else:
            repair.reject(path)

    packs: Iterable[PackChunk] | None
    if paths.seq_idx not in faults:
        lengths, num_sequences = (
            offset_lengths(paths.seq_idx, at, header.num_packs) for at in (header.token_offsets_offset, header.nbytes)
        )
        packs = RepeatableChunks(".seq.idx", header.num_packs, lambda: map(PackChunk, lengths, num_sequences))
    elif packs := _restore_arrays(repair, header):
        how_restored[paths.seq_idx] = f"from {packs.origin} and .seq.bin, {_EXACT}"
    if packs is None:
        return how_restored
    if paths.idx in faults:
        dtype = header.token_dtype
        digest = write_idx(repair.create(paths.idx), packs, token_dtype_of(dtype)[0], dtype.itemsize, header.num_packs)
        accept(paths.idx, digest, "from .seq.idx")
    if paths.starts in faults:
        how = "one sequence a pack"
        starts: Iterable[NDArray[Any]] = (np.zeros(len(chunk.lengths), "<u4") for chunk in packs)
        if header.num_sequences != header.num_packs:
            if eod_id is None or paths.tokens in faults:
                return how_restored
            how = f"from end-of-sequence id {eod_id}"
            starts = _starts_after(paths.tokens, header, eod_id, packs)
        out = HashedFile(repair.create(paths.starts))
        for chunk_of_starts in starts:
            out.write(chunk_of_starts)
        accept(paths.starts, out.digest(), how)
    return how_restored


def _restore_arrays(repair: Repair, header: Header) -> RepeatableChunks[PackChunk] | None:
    """Write ``.seq.idx`` anew and return its packs; None if no source of pack lengths gives the header's checksum."""
    paths = repair.paths
    if paths.starts in repair.faults:
        return None
    starts = StartsFile(paths.starts)
    # The most likely source first. A damaged file may be tried too, because the checksum decides.
    sources: list[Callable[[], PackLengths]] = [
        lambda: idx_lengths(paths.idx, header.digests[0].nbytes)[0],
        lambda: offset_lengths(paths.seq_idx, header.token_offsets_offset, header.num_packs),
    ]
    if not {paths.tokens, paths.loss} & repair.faults.keys():
        dtypes = header.token_dtype, header.mask_dtype
        sources.append(lambda: infer_lengths(paths, starts, dtypes, repair.facts.eod_id, repair.watch))
    for source in sources if os.path.exists(paths.idx) else sources[1:]:
        try:
            packs = join_starts(source(), starts)
            if write_seq_idx(repair.create(paths.seq_idx), packs, header) == header:
                return packs
        except SFTIndexError:  # the source is damaged, or has the lengths of other packs
            pass
        repair.reject(paths.seq_idx)
    return None


def _starts_after(path: str, header: Header, eod_id: int, packs: Iterable[PackChunk]) -> Iterator[NDArray[np.uint32]]:
    """Sequence starts in their packs: at each pack's begin, and after each end-of-sequence id but the pack's last."""
    tokens = open_array(path, header.token_dtype, header.num_tokens, nbytes=header.digests[0].nbytes, backend="pread")
    begin = 0
    for chunk in packs:
        edges = np.append(begin, begin + np.cumsum(chunk.lengths))
        first = 0
        while first < len(chunk.lengths):  # some 64 thousand tokens, or one longer pack
            last = max(int(np.searchsorted(edges, edges[first] + _CHUNK_TOKENS, side="right")) - 1, first + 1)
            ids, begins = tokens[int(edges[first]) : int(edges[last])], edges[first:last] - edges[first]
            positions = np.union1d(begins, np.flatnonzero(ids[:-1] == eod_id) + 1)
            starts: NDArray[np.int64] = positions - begins[np.searchsorted(begins, positions, side="right") - 1]
            yield starts.astype(np.uint32)
            first = last
        begin = int(edges[-1])


# ---- without a header ----


def derive_indexes(repair: Repair, raw: bytes | None, error: SFTIndexError | None) -> dict[str, str]:
    """Write both indexes from the data files, which must be there, and from what can be proven of the damaged header.

    Args:
        repair: of the shard.
        raw: the first bytes of ``.seq.idx``, all of its header if that is not longer than allowed; None if the file is
            missing.
        error: why ``raw`` is no good header; None if the file is missing.

    Returns:
        How each file came back, by path; without an ``.idx`` that is right already.

    Raises:
        FormatError: the files that are left do not tell all that has to be known. Says what is missing.
    """
    paths, facts, watch = repair.paths, repair.facts, repair.watch
    present = [path for path in paths.data if os.path.exists(path)]
    with watch("reading", sum(os.stat(path).st_size for path in present)) as advance:
        digests = {path: digest_file(path, advance=advance) for path in present}
    lengths, dtypes, idx_fault = _index_and_dtypes(repair, digests)
    starts = StartsFile(paths.starts)
    damaged = DamagedHeader(paths.seq_idx, raw or b"", starts.num_packs)
    lengths = damaged.pack_lengths() or lengths
    if lengths is None:
        try:
            lengths = infer_lengths(paths, starts, dtypes, facts.eod_id, watch)
        except FormatError as ambiguous:
            raise FormatError(f"{idx_fault}{ambiguous}") from None
    packs, how_restored = join_starts(lengths, starts), {}
    walk = _measured(repair, dtypes, packs, starts.num_sequences)
    digest = write_idx(
        repair.create(paths.idx), packs, token_dtype_of(dtypes[0])[0], dtypes[0].itemsize, walk.num_packs
    )
    if digest == digests.get(paths.idx):
        repair.reject(paths.idx)
    else:
        how_restored[paths.idx] = f"from {lengths.origin}"
    digests[paths.idx] = digest
    tokens, loss, index, begins = (digests[path] for path in paths.data)
    header = Header(
        num_packs=walk.num_packs,
        num_sequences=starts.num_sequences,
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
        arrays_checksum=bytes(16),
    )
    # The checksum of the arrays follows from the data too.
    header = write_seq_idx(repair.write_nowhere(), packs, header)
    if proven := damaged.prove(header):
        _require_same(paths.seq_idx, proven, facts)
        header, what = proven, f"{_EXACT}, its own checksums prove it"
    elif isinstance(error, UnsupportedVersionError):
        raise error  # of a newer version it may be good
    else:
        header, what = _marked(header, lengths.origin, facts, damaged.unproven_values())
    write_seq_idx(repair.create(paths.seq_idx), packs, header)
    how_restored[paths.seq_idx] = f"from {lengths.origin} and the data; {what}"
    return how_restored


def _index_and_dtypes(
    repair: Repair, digests: Mapping[str, FileDigest]
) -> tuple[PackLengths | None, tuple[np.dtype[Any], np.dtype[Any]], str]:
    """Pack lengths by ``.idx``, None if it is missing or damaged; dtypes of tokens and masks; the fault of ``.idx``."""
    paths, facts = repair.paths, repair.facts
    idx, token_dtype, fault = None, facts.token_dtype, ""
    if paths.idx in digests:
        try:
            idx, token_dtype = idx_lengths(paths.idx, digests[paths.tokens].nbytes)
        except CorruptShardError as corrupt:
            fault = f"{corrupt}. Without it: "
        if idx and facts.token_dtype not in (None, token_dtype):
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
    asked = " and ".join(f"{what} {dtype}" for what, dtype in (("tokens", token_dtype), ("masks", mask_dtype)) if dtype)
    expected = asked or "uint16 or int32 tokens with uint8 or float32 masks"
    raise FormatError(f"{sizes}, which do not go together as {expected} (rule F2); restore the one that was cut short")


def _measured(
    repair: Repair, dtypes: tuple[np.dtype[Any], np.dtype[Any]], packs: RepeatableChunks[PackChunk], num_sequences: int
) -> _native.PackWalk:
    """Walk all packs for their counts. FormatError if they break a rule, or do not have the tokens of ``.bin``."""
    paths, facts = repair.paths, repair.facts
    damaged = "one of them is damaged: restore it"
    num_tokens = os.stat(paths.tokens).st_size // dtypes[0].itemsize
    if (in_packs := sum(int(chunk.lengths.sum()) for chunk in packs)) != num_tokens:
        raise FormatError(
            f"{paths.prefix}: .bin has {num_tokens} tokens, the packs by the index {in_packs}; they are not of one"
            f" shard, or {damaged}"
        )
    values = {
        "num_packs": packs.num_packs,
        "num_sequences": num_sequences,
        "num_tokens": num_tokens,
        "capacity": facts.capacity or MAX_CAPACITY,
        "sequence_multiple": facts.sequence_multiple or 1,
        "token_dtype": token_dtype_of(dtypes[0])[0],
        "mask_dtype": mask_dtype_of(dtypes[1])[0],
        "header_nbytes": 0,
    }
    claims, findings = HeaderClaims(values), Findings(paths.prefix, 1)
    walk = claims.kernel(1)

    def pack_of(token: int) -> int | None:
        first = 0
        for run in _runs(packs):
            if token < run.token_offsets[-1]:
                return first + int(np.searchsorted(run.token_offsets, token, side="right")) - 1
            first += run.packs
        return None

    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(contextlib.closing(CheckedFile(path)))
            for path in (paths.tokens, paths.loss, paths.starts)
        ]
        advance = stack.enter_context(repair.watch("checking", sum(file.nbytes for file in files)))
        meter = Meter(advance)
        tokens, loss, starts = (Stream(file, meter) for file in files)
        walk_packs(walk, _runs(packs), starts, loss, dtypes[1])
        add_breaches(walk, paths, claims, findings, pack_of)
        check_ids(tokens, dtypes[0], 1 << 32, findings, pack_of)
    for finding in findings.kept:
        if finding.path == paths.seq_idx:  # not written yet, so only its limits can be wrong
            remedy = "pass the --capacity and --sequence-multiple that it was packed with, or none"
            raise FormatError(f"{paths.prefix}: {finding.what}; {remedy}")
        where = f"{finding.path}: byte {finding.offset}"
        raise FormatError(f"{where}: {finding.what}; the files are not of one shard, or {damaged}")
    return walk


def _runs(packs: Iterable[PackChunk]) -> Iterator[OffsetRun]:
    token = sequence = 0
    for chunk in packs:
        begins = _native.offsets_from_lengths(chunk.lengths, 1, token)
        firsts = _native.offsets_from_lengths(chunk.sequences, 1, sequence)
        token, sequence = int(begins[-1]), int(firsts[-1])
        yield OffsetRun(begins, firsts, len(chunk.lengths))


def _require_same(path: str, proven: Header, facts: GivenFacts) -> None:
    """FormatError if the user says something else than a proven header."""
    for name in HEADER_ONLY:
        given, stored = getattr(facts, name), getattr(proven, name)
        if given not in (None, stored):
            option = "--" + name.replace("_", "-")
            raise FormatError(f"{path}: its header proves {name} {stored}, {option} is {given}; leave the option out")


def _marked(header: Header, origin: str, facts: GivenFacts, unproven: Mapping[str, Any]) -> tuple[Header, str]:
    """The header, marked as rebuilt, with a list of what is unknown in its metadata; and the same in words."""
    unknown = {name for name in HEADER_ONLY if getattr(facts, name) is None}
    rebuilt: dict[str, Any] = {"pack_lengths": origin, "unknown": sorted(["metadata", *unknown])}
    words = [
        f"capacity {header.capacity}" + (", the longest pack" if "capacity" in unknown else ""),
        f"sequence multiple {header.sequence_multiple}" + (", not known" if "sequence_multiple" in unknown else ""),
        "pad id not known" if header.pad_id is None else f"pad id {header.pad_id}",
        "metadata lost",
    ]
    if unproven:
        rebuilt["unproven"] = unproven
        values = ", ".join(f"{name} {unproven[name]}" for name in HEADER_ONLY)
        words[-1] += f" (the damaged header says, unproven: {values})"
    metadata = {"format_writer": FORMAT_WRITER, "rebuilt": rebuilt}
    return dataclasses.replace(header, metadata=metadata, rebuilt=True), "; ".join(words)
