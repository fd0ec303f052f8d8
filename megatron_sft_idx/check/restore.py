"""Files of a shard brought back: under a good header exactly or not at all, without one derived from the data.

Of a header's fields all but a few follow from the data. Where ``.seq.idx`` is damaged, those that do are filled in
anew; if the header's own checksum, 128 bits that stand apart at its end, then fits what is there, the rest is proven to
be what was written: capacity, sequence multiple, pad id, flags and the JSON block. The checksum also fits where only it
was damaged, for no other content comes as close to it as a few bits, and where one bit of the rest was flipped, which
is found by trying. What fits nowhere stays unproven, however plausible it looks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.check.lengths import (
    Lengths,
    Repeated,
    Starts,
    idx_lengths,
    infer_lengths,
    offset_lengths,
    started,
)
from megatron_sft_idx.check.pack_walk import CheckedFile, Meter, OffsetRun, Stream, walk_packs
from megatron_sft_idx.check.rules import Claims, Findings, add_breaches, check_ids
from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError, UnsupportedVersionError
from megatron_sft_idx.layout import (
    FIELDS,
    HEADER_FIXED_NBYTES,
    MASK_DTYPES,
    TOKEN_DTYPES,
    FileDigest,
    Header,
    ShardPaths,
    align,
    mask_dtype_of,
    token_dtype_of,
)
from megatron_sft_idx.layout.files import CHECKSUM_NBYTES, MAX_CAPACITY, MAX_HEADER_NBYTES, decode_metadata
from megatron_sft_idx.shard.publication import Publication, inode_of
from megatron_sft_idx.shard.writer import FORMAT_WRITER, PackChunk, write_idx, write_seq_idx
from megatron_sft_idx.storage import OutputFile, open_array, open_regular
from megatron_sft_idx.storage.local import HashedFile, digest_file
from megatron_sft_idx.storage.progress import Watch
from megatron_sft_idx.storage.publish import move_into_place

_SAME = "byte for byte"
# Added to the name of a file whose place a rebuilt one takes.
_DAMAGED = ".damaged"
_COPY_NBYTES = 1 << 20
_PIECE_TOKENS = 1 << 16
# What only the header knew, and may be told.
_KNOWN = ("capacity", "sequence_multiple", "pad_id")
# Fields that the data does not tell, and the two sizes that are found by trying.
_UNDERIVED = {"flags", *_KNOWN}
_SIZES = {"header_nbytes", "json_nbytes"}
_FIELDS = {field.name: (field.offset, struct.Struct("<" + field.format)) for field in FIELDS}
# Checksums of unlike contents differ in 64 bits or so; in 8 or fewer once in 10^26 times.
_MOST_CHECKSUM_BITS = 8
# Trying every bit takes time by the square of the header's size.
_MOST_TRIED_NBYTES = 1 << 15


@dataclasses.dataclass(frozen=True)
class GivenFacts:
    """What the user knows of a shard whose files do not say it any more; None where nobody knows.

    Attributes:
        token_dtype: of ``.bin``; its size and that of ``.loss.bin`` tell, unless both are empty.
        mask_dtype: of ``.loss.bin``, likewise.
        capacity: most token positions a pack may hold; else the longest pack.
        sequence_multiple: packing counted each sequence as its length rounded up to this; else 1.
        pad_id: the tokenizer's padding id.
        eod_id: the id that every sequence ends with. Taken as a fact: what follows from it may be wrong where it is.

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
    """A shard that files are to be brought back of: new ones are published together, or removed when it is closed.

    A file that is replaced keeps another name, so a kill at any moment leaves all that a second rebuild needs.
    ``faults`` says what is wrong, by path; ``lock`` is that of the journal, None for a dry run, whose bytes go nowhere.
    """

    def __init__(
        self, paths: ShardPaths, faults: Mapping[str, str], known: GivenFacts, watch: Watch, lock: int | None
    ) -> None:
        self.paths, self.faults, self.known, self.watch = paths, faults, known, watch
        self._written: set[str] = set()
        self._new: Publication | None = None
        if lock is not None:
            only = (paths.starts, paths.idx, paths.seq_idx)
            self._new = Publication(paths, {}, work="rebuild", overwrite=True, only=only, lock=lock)

    def close(self) -> None:
        """Remove what is not published."""
        if self._new is not None:
            self._new.abandon()

    def create(self, path: str) -> OutputFile:
        """A new file for ``path``."""
        if self._new is None:
            return OutputFile(os.devnull, append=True)
        self._written.add(path)
        return self._new.open(path)

    def drop(self, path: str) -> None:
        """Do without the new file for ``path``, where there is one."""
        self._written.discard(path)

    def publish(self) -> list[str]:
        """Keep the old files under another name, then let the new ones take their places, ``.seq.idx`` last (rule W2).

        Returns:
            Paths under which the replaced files are kept.

        Raises:
            FormatError: something else has appeared at one of the names. Old files that are no longer at theirs are
                kept under the other one, which the message names.
        """
        new = self._new
        if new is None or not self._written:
            return []
        for path in {*self.paths.all} - self._written:
            new.drop(path)
        before = {path: inode for path in self.paths.all if path in self._written and (inode := inode_of(path))}
        kept: dict[str, str] = {}
        made: list[str] = []
        try:
            for path in before:
                kept[path] = _keep(path, made)
            new.publish()
        except (OSError, FormatError) as error:
            moved = [f"{path} is {name} now" for path, name in kept.items() if inode_of(path) != before[path]]
            for path, name in kept.items():
                if name in made and not new.closed and inode_of(path) == before[path]:
                    os.unlink(name)  # the file never left its place
            if moved:
                # Closed, it has said that all is complete: a later run takes the steps left, with no look back.
                remedy = "" if new.closed else "; move back what is missing, then run the rebuild again"
                raise FormatError(f"{error}. What was there before is kept: {', '.join(moved)}{remedy}") from error
            raise
        return list(kept.values())


def _keep(path: str, made: list[str]) -> str:
    """The second name of a file, or of a copy where the file system has no links.

    It is appended to ``made``, unless a rebuild that was killed has given it already.
    """
    number = 0
    while os.path.lexists(kept := path + _DAMAGED + (f".{number}" if number else "")):
        if os.path.samefile(kept, path):
            return kept
        number += 1
    try:
        os.link(path, kept)
    except OSError:
        copy = OutputFile(f"{kept}.{os.getpid()}.tmp")
        try:
            with contextlib.closing(copy), open_regular(path) as file:
                while piece := file.read(_COPY_NBYTES):
                    copy.write(piece)
                copy.sync()
            move_into_place(copy.path, kept, None)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy.path)
            raise
    made.append(kept)
    return kept


# ---- under a good header ----


def restore(repair: Repair, header: Header) -> dict[str, str]:
    """Write what is missing or damaged beside a good header, as far as it can be derived: its checksums prove it.

    Arrays of ``.seq.idx`` come from ``.seq.bin`` and the first lengths with which they have their checksum; ``.idx``
    from ``.seq.idx``; ``.seq.bin`` from ``.seq.idx`` where every pack is one sequence, else also from the ids.

    Returns:
        How each file came back, by path.
    """
    paths, faults, eod_id = repair.paths, repair.faults, repair.known.eod_id
    done: dict[str, str] = {}
    digests = dict(zip(paths.data, header.digests, strict=True))

    def accept(path: str, digest: FileDigest, how: str) -> None:
        """Keep a new file if it is the one that the header was written with."""
        if digest == digests[path]:
            done[path] = f"{how}, {_SAME}"
        else:
            repair.drop(path)

    packs: Iterable[PackChunk] | None
    if paths.seq_idx not in faults:
        arrays = header.token_offsets_offset, header.nbytes
        stored = [offset_lengths(paths.seq_idx, at, header.num_packs) for at in arrays]
        packs = Repeated(".seq.idx", header.num_packs, lambda: map(PackChunk, *stored))
    elif packs := _restore_arrays(repair, header):
        done[paths.seq_idx] = f"from {packs.origin} and .seq.bin, {_SAME}"
    if packs is None:
        return done
    if paths.idx in faults:
        dtype = header.token_dtype
        digest = write_idx(repair.create(paths.idx), packs, token_dtype_of(dtype)[0], dtype.itemsize, header.num_packs)
        accept(paths.idx, digest, "from .seq.idx")
    if paths.starts in faults:
        how = "one sequence a pack"
        starts: Iterable[NDArray[Any]] = (np.zeros(len(chunk.lengths), "<u4") for chunk in packs)
        if header.num_sequences != header.num_packs:
            if eod_id is None or paths.tokens in faults:
                return done
            how = f"from end-of-sequence id {eod_id}"
            starts = _starts_after(paths.tokens, header, eod_id, packs)
        out = HashedFile(repair.create(paths.starts))
        for some in starts:
            out.write(some)
        accept(paths.starts, out.digest(), how)
    return done


def _restore_arrays(repair: Repair, header: Header) -> Repeated[PackChunk] | None:
    """The packs by which the arrays have the checksum that the header says; the file is written anew."""
    paths = repair.paths
    if paths.starts in repair.faults:
        return None
    starts = Starts(paths.starts)
    # Likely ones first: the checksum decides, so even a damaged file may be tried.
    sources: list[Callable[[], Lengths]] = [
        lambda: idx_lengths(paths.idx, header.digests[0].nbytes)[0],
        lambda: offset_lengths(paths.seq_idx, header.token_offsets_offset, header.num_packs),
    ]
    if not {paths.tokens, paths.loss} & repair.faults.keys():
        dtypes = header.token_dtype, header.mask_dtype
        sources.append(lambda: infer_lengths(paths, starts, dtypes, repair.known.eod_id, repair.watch))
    for source in sources if os.path.exists(paths.idx) else sources[1:]:
        try:
            packs = started(source(), starts)
            if write_seq_idx(repair.create(paths.seq_idx), packs, header) == header:
                return packs
        except SFTIndexError:  # not the lengths that this header was written with
            pass
        repair.drop(paths.seq_idx)
    return None


def _starts_after(path: str, header: Header, eod_id: int, packs: Iterable[PackChunk]) -> Iterator[NDArray[np.uint32]]:
    """Starts inside their packs: at each pack's begin and after each end-of-sequence id but the pack's last."""
    tokens = open_array(path, header.token_dtype, header.num_tokens, nbytes=header.digests[0].nbytes, backend="pread")
    begin = 0
    for chunk in packs:
        edges = np.append(begin, begin + np.cumsum(chunk.lengths))
        first = 0
        while first < len(chunk.lengths):  # some 64 thousand tokens, or one longer pack
            last = max(int(np.searchsorted(edges, edges[first] + _PIECE_TOKENS, side="right")) - 1, first + 1)
            ids, begins = tokens[int(edges[first]) : int(edges[last])], edges[first:last] - edges[first]
            places = np.union1d(begins, np.flatnonzero(ids[:-1] == eod_id) + 1)
            starts: NDArray[np.int64] = places - begins[np.searchsorted(begins, places, side="right") - 1]
            yield starts.astype(np.uint32)
            first = last
        begin = int(edges[-1])


# ---- without a header ----


def derive(repair: Repair, raw: bytes | None, error: SFTIndexError | None) -> dict[str, str]:
    """Write both indexes from the data files, which are there, and whatever else can be believed.

    ``raw`` are the first bytes of ``.seq.idx``, None where it is missing, and ``error`` says why they are no header.
    Returns how each file came back, by path; an ``.idx`` that is right already is not among them. FormatError: the
    files that are left do not tell all that has to be known; says what is missing.
    """
    paths, known, watch = repair.paths, repair.known, repair.watch
    there = [path for path in paths.data if os.path.exists(path)]
    with watch("reading", sum(os.stat(path).st_size for path in there)) as advance:
        digests = {path: digest_file(path, advance=advance) for path in there}
    lengths, dtypes, fault = _index_and_dtypes(repair, digests)
    starts, stored = Starts(paths.starts), raw or b""
    sizes = _header_sizes(stored, os.stat(paths.seq_idx).st_size, starts.num_packs) if raw is not None else []
    lengths = _proven_lengths(paths.seq_idx, stored, sizes, starts.num_packs) or lengths
    if lengths is None:
        try:
            lengths = infer_lengths(paths, starts, dtypes, known.eod_id, watch)
        except FormatError as nothing:
            raise FormatError(f"{fault}{nothing}") from None
    packs, done = started(lengths, starts), {}
    walk = _measured(repair, dtypes, packs, starts.num_sequences)
    digest = write_idx(
        repair.create(paths.idx), packs, token_dtype_of(dtypes[0])[0], dtypes[0].itemsize, walk.num_packs
    )
    if digest == digests.get(paths.idx):
        repair.drop(paths.idx)
    else:
        done[paths.idx] = f"from {lengths.origin}"
    digests[paths.idx] = digest
    # All that follows from the data, and what is known besides; without the checksum of the arrays.
    tokens, loss, index, begins = (digests[path] for path in paths.data)
    header = Header(
        num_packs=walk.num_packs,
        num_sequences=starts.num_sequences,
        num_tokens=tokens.nbytes // dtypes[0].itemsize,
        num_trained_tokens=walk.num_trained_tokens,
        num_masked_packs=walk.num_masked_packs,
        token_dtype=dtypes[0],
        mask_dtype=dtypes[1],
        sequence_multiple=known.sequence_multiple or 1,
        capacity=known.capacity or walk.longest_padded_pack,
        longest_pack=walk.longest_pack,
        most_sequences=walk.most_sequences,
        pad_id=known.pad_id,
        digests=(tokens, loss, index, begins),
        arrays_checksum=bytes(16),
    )
    # Written nowhere first: what is stored is held against the checksum of the arrays too.
    header = write_seq_idx(OutputFile(os.devnull, append=True), packs, header)
    if proven := _prove(stored, header, sizes, paths.seq_idx):
        _require_same(paths.seq_idx, proven, known)
        header, what = proven, f"{_SAME}, its own checksums prove it"
    elif isinstance(error, UnsupportedVersionError):
        raise error  # it may well be good
    else:
        header, what = _marked(header, lengths.origin, known, _damaged_values(stored, sizes))
    write_seq_idx(repair.create(paths.seq_idx), packs, header)
    done[paths.seq_idx] = f"from {lengths.origin} and the data; {what}"
    return done


def _index_and_dtypes(
    repair: Repair, digests: Mapping[str, FileDigest]
) -> tuple[Lengths | None, tuple[np.dtype[Any], np.dtype[Any]], str]:
    """Lengths by ``.idx``, where it is there and right; dtypes of tokens and masks; and what is wrong with ``.idx``."""
    paths, known = repair.paths, repair.known
    idx, token_dtype, fault = None, known.token_dtype, ""
    if paths.idx in digests:
        try:
            idx, token_dtype = idx_lengths(paths.idx, digests[paths.tokens].nbytes)
        except CorruptShardError as corrupt:
            fault = f"{corrupt}. Without it: "
        if idx and known.token_dtype not in (None, token_dtype):
            raise FormatError(f"{paths.idx}: says that tokens are {token_dtype}, --token-dtype {known.token_dtype}")
    return idx, _dtypes_by_size(paths, token_dtype, known.mask_dtype), fault


def _dtypes_by_size(
    paths: ShardPaths, token_dtype: np.dtype[Any] | None, mask_dtype: np.dtype[Any] | None
) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The dtypes of ``.bin`` and ``.loss.bin`` by their sizes; FormatError where no pair fits, or more than one.

    A token takes 2 or 4 bytes and its mask 1 or 4, and all four ratios differ. Only of empty files nothing is known.
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
    repair: Repair, dtypes: tuple[np.dtype[Any], np.dtype[Any]], packs: Repeated[PackChunk], num_sequences: int
) -> _native.PackWalk:
    """The counts of all packs. FormatError where they break a rule or have not the tokens of ``.bin``."""
    paths, known = repair.paths, repair.known
    damaged = "one of them is damaged: restore it"
    num_tokens, found = os.stat(paths.tokens).st_size // dtypes[0].itemsize, sum(int(c.lengths.sum()) for c in packs)
    if found != num_tokens:
        raise FormatError(
            f"{paths.prefix}: .bin has {num_tokens} tokens, the packs by the index {found}; they are not of one shard,"
            f" or {damaged}"
        )
    values = {
        "num_packs": packs.num_packs,
        "num_sequences": num_sequences,
        "num_tokens": num_tokens,
        "capacity": known.capacity or MAX_CAPACITY,
        "sequence_multiple": known.sequence_multiple or 1,
        "token_dtype": token_dtype_of(dtypes[0])[0],
        "mask_dtype": mask_dtype_of(dtypes[1])[0],
        "header_nbytes": 0,
    }
    claims, findings = Claims(values), Findings(paths.prefix, 1)
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
        if finding.path == paths.seq_idx:  # there is none yet, so that only the limits can be wrong
            remedy = "pass the --capacity and --sequence-multiple that it was packed with, or none"
            raise FormatError(f"{paths.prefix}: {finding.what}; {remedy}")
        place = f"{finding.path}: byte {finding.offset}"
        raise FormatError(f"{place}: {finding.what}; the files are not of one shard, or {damaged}")
    return walk


def _runs(packs: Iterable[PackChunk]) -> Iterator[OffsetRun]:
    token = sequence = 0
    for chunk in packs:
        begins = _native.offsets_from_lengths(chunk.lengths, 1, token)
        firsts = _native.offsets_from_lengths(chunk.sequences, 1, sequence)
        token, sequence = int(begins[-1]), int(firsts[-1])
        yield OffsetRun(begins, firsts, len(chunk.lengths))


def _require_same(path: str, proven: Header, known: GivenFacts) -> None:
    for name in _KNOWN:
        said, stored = getattr(known, name), getattr(proven, name)
        if said not in (None, stored):
            option = "--" + name.replace("_", "-")
            raise FormatError(f"{path}: its header proves {name} {stored}, {option} is {said}; leave the option out")


def _marked(header: Header, origin: str, known: GivenFacts, unproven: Mapping[str, Any]) -> tuple[Header, str]:
    """The header that says what is no longer known, and the same in words."""
    unknown = {name for name in _KNOWN if getattr(known, name) is None}
    rebuilt: dict[str, Any] = {"pack_lengths": origin, "unknown": sorted(["metadata", *unknown])}
    words = [
        f"capacity {header.capacity}" + (", the longest pack" if "capacity" in unknown else ""),
        f"sequence multiple {header.sequence_multiple}" + (", not known" if "sequence_multiple" in unknown else ""),
        "pad id not known" if header.pad_id is None else f"pad id {header.pad_id}",
        "metadata lost",
    ]
    if unproven:
        rebuilt["unproven"] = unproven
        said = ", ".join(f"{name} {unproven[name]}" for name in _KNOWN)
        words[-1] += f" (the damaged header says, unproven: {said})"
    metadata = {"format_writer": FORMAT_WRITER, "rebuilt": rebuilt}
    return dataclasses.replace(header, metadata=metadata, rebuilt=True), "; ".join(words)


# ---- what a damaged header still proves ----


def _field(raw: bytes, name: str) -> Any:
    offset, form = _FIELDS[name]
    return form.unpack_from(raw, offset)[0]


def _header_sizes(raw: bytes, file_nbytes: int, num_packs: int) -> list[int]:
    """Sizes the header may have had: by its own field, and by what the arrays of so many packs leave of the file."""
    arrays, smallest = 8 * (num_packs + 1), HEADER_FIXED_NBYTES + CHECKSUM_NBYTES
    said = _field(raw, "header_nbytes") if len(raw) >= HEADER_FIXED_NBYTES else 0
    sizes = dict.fromkeys((said, file_nbytes - arrays - align(arrays)))
    return [n for n in sizes if n % 64 == 0 and smallest <= n <= min(MAX_HEADER_NBYTES, file_nbytes, len(raw))]


def _proven_lengths(path: str, raw: bytes, sizes: list[int], num_packs: int) -> Lengths | None:
    """Lengths by the arrays of a ``.seq.idx`` whose header is damaged, where its checksum of the arrays still fits."""
    for size in sizes:
        if digest_file(path, size).checksum == _field(raw, "arrays_checksum"):
            return offset_lengths(path, align(size + 8 * (num_packs + 1)), num_packs)
    return None


def _prove(raw: bytes, derived: Header, sizes: list[int], path: str) -> Header | None:
    """The header as it was written, or None where, with what is ``derived`` filled in, no size proves it."""
    template = derived.encode()
    for size in sizes:
        body, stored = raw[: size - CHECKSUM_NBYTES], raw[size - CHECKSUM_NBYTES : size]
        stripped = len(body[HEADER_FIXED_NBYTES:].rstrip(b"\0"))
        for json_nbytes in {stripped, _field(raw, "json_nbytes")}:
            end = HEADER_FIXED_NBYTES + json_nbytes
            if end > len(body):
                continue
            filled = bytearray(body[:end].ljust(len(body), b"\0"))
            for name, (offset, form) in _FIELDS.items():
                if name not in _UNDERIVED | _SIZES:
                    filled[offset : offset + form.size] = template[offset : offset + form.size]
            for name, value in (("header_nbytes", size), ("json_nbytes", json_nbytes)):
                _FIELDS[name][1].pack_into(filled, _FIELDS[name][0], value)
            if _fits(filled, stored, end):
                try:
                    return Header.decode(bytes(filled) + xxhash.xxh3_128_digest(filled), path)
                except FormatError:  # the checksum is right and a rule broken: not written by a writer that keeps them
                    continue
    return None


def _fits(filled: bytearray, stored: bytes, end: int) -> bool:
    """Whether the checksum ``stored`` proves a header, at once or with one bit flipped, which is then done.

    ``filled`` is the header without its checksum, where everything that can be derived is; its JSON block ends at
    ``end``.
    """
    unlike = int.from_bytes(stored, "big") ^ int.from_bytes(xxhash.xxh3_128_digest(filled), "big")
    if unlike.bit_count() <= _MOST_CHECKSUM_BITS:
        return True
    if len(filled) > _MOST_TRIED_NBYTES:
        return False
    underived = [_FIELDS[name] for name in _UNDERIVED]
    places = [at for offset, form in underived for at in range(offset, offset + form.size)]
    for at in (*places, *range(HEADER_FIXED_NBYTES, end)):
        for bit in range(8):
            filled[at] ^= 1 << bit
            if xxhash.xxh3_128_digest(filled) == stored:
                return True
            filled[at] ^= 1 << bit
    return False


def _damaged_values(raw: bytes, sizes: list[int]) -> dict[str, Any]:
    """What an unproven header says of the things that only it knew; empty where its JSON block is unreadable."""
    for size in sizes:
        block = raw[HEADER_FIXED_NBYTES : size - CHECKSUM_NBYTES].rstrip(b"\0")
        if (metadata := decode_metadata(block)) is not None:
            return {"metadata": metadata} | {name: _field(raw, name) for name in sorted(_KNOWN)}
    return {}
