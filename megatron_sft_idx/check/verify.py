"""``verify_shard`` checks the files of one shard against every rule of FORMAT.md, and reports each broken rule.

A quick verification reads headers, file sizes and both ends of all arrays. A full one reads every byte, and checks the
bytes while they are in the CPU cache: tokens in a separate thread, all other files in the caller's thread. Only the
token offsets in ``.seq.idx`` are read several times: for packs (in step with the sequence offsets), for ``.idx``, and
for the checksum.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_sft_idx import _native
from megatron_sft_idx.arguments import checked
from megatron_sft_idx.check.media_rules import check_media
from megatron_sft_idx.check.pack_walk import RUN_PACKS, CheckedFile, Meter, OffsetRun, Stream, walk_packs
from megatron_sft_idx.check.rules import (
    Finding,
    Findings,
    HeaderClaims,
    add_breaches,
    check_array_ends,
    check_column,
    check_header,
    check_ids,
    check_pack_ends,
    check_sizes,
    open_columns,
)
from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import IDX_HEADER_NBYTES, SEQ_IDX, SUFFIXES, listed_columns
from megatron_sft_idx.shard.at_prefix import is_building
from megatron_sft_idx.shard.opening import columns_beside, where_to_look
from megatron_sft_idx.storage.progress import Advance

_DEFAULT_MOST = 10
# The names of each file in the fields of the header.
_FIELD_STARTS = {".bin": "tokens", ".loss.bin": "loss", ".idx": "idx", ".seq.bin": "starts"}


@dataclass(frozen=True, slots=True)
class Report:
    """The result of verifying one shard.

    Attributes:
        prefix: the path that the five files share.
        full: whether every byte was read, not only headers, sizes and the ends of arrays.
        findings: broken rules, a bounded number of each.
        omitted: number of further findings, by rule.
        notes: information that breaks no rule: remains of a build next to the shard, checks that were not possible,
            contents that were accepted although they are damaged.
        counts: numbers of packs, sequences and tokens from the header; empty if the header is unreadable.

    Example:
        >>> from megatron_sft_idx import verify_shard
        >>> for line in verify_shard("data/chats").lines():
        ...     print(line)
        data/chats: ok: 7 packs, 16 sequences, 47 tokens; checked: headers, sizes and ends
    """

    prefix: str
    full: bool
    findings: tuple[Finding, ...]
    omitted: dict[str, int]
    notes: tuple[str, ...]
    counts: dict[str, int]

    @property
    def ok(self) -> bool:
        """Whether none of the checks that were made found a broken rule."""
        return not self.findings

    @property
    def num_findings(self) -> int:
        """The number of findings, including omitted ones."""
        return len(self.findings) + sum(self.omitted.values())

    def as_json(self) -> dict[str, Any]:
        """Return the report as an object of plain values."""
        return {**asdict(self), "ok": self.ok, "num_findings": self.num_findings}

    def lines(self) -> Iterable[str]:
        """Return the report as text for people: one line per finding, then the notes and a verdict."""
        yield from map(str, self.findings)
        for rule, count in self.omitted.items():
            yield f"{self.prefix}: {count:,} more like these (rule {rule})"
        for note in self.notes:
            yield f"{self.prefix}: note: {note}"
        depth = "every byte" if self.full else "headers, sizes and ends"
        if self.ok:
            sizes = ", ".join(f"{count:,} {what}" for what, count in self.counts.items())
            yield f"{self.prefix}: ok: {sizes}; checked: {depth}"
        else:
            findings = "1 finding" if self.num_findings == 1 else f"{self.num_findings:,} findings"
            yield f"{self.prefix}: NOT ok: {findings}; checked: {depth}"


@checked
def verify_shard(
    prefix: str | os.PathLike[str],
    *,
    full: bool = False,
    vocab_size: int | None = None,
    most: int = _DEFAULT_MOST,
    beside: Collection[str] | None = None,
    unpublished: Mapping[str, str] | None = None,
    advance: Advance = lambda nbytes: None,
) -> Report:
    """Check the files at a prefix against the rules of FORMAT.md, and report all broken rules.

    Damage does not stop the verification. Everything that the remaining files allow is checked, even if ``Shard`` would
    not open them. Memory stays at a few MiB for any size.

    Args:
        prefix: the path that the five files share.
        full: read every byte: checksums, every pack, ``.idx`` byte for byte. Otherwise only headers, sizes and ends,
            which takes milliseconds for any size.
        vocab_size: with ``full``, every id must be below it. None for the size in the JSON block, if it has one.
        most: maximum number of findings to keep per rule; further ones are only counted.
        beside: names of the columns whose files are at the prefix (``columns_beside``); None to look for them.
        unpublished: current paths of files that are not published yet, by their final paths.
        advance: called with ``full`` by two threads, one at a time, with the number of bytes read since the last call:
            at most a MiB.

    Raises:
        FormatError: an argument has a value that no shard allows.
        ShardNotFoundError: the prefix has no file of a shard or of its build.
        OSError: a file cannot be opened or read, which ends the verification at once.

    Example:
        >>> verify_shard("data/chats", full=True).ok
        True
        >>> with open("data/chats.bin", "r+b") as file:
        ...     nbytes = file.write(bytes([1]))  # another first token
        >>> report = verify_shard("data/chats", full=True)
        >>> report.ok, [(finding.path, finding.rule) for finding in report.findings]
        (False, [('data/chats.bin', 'F3')])
    """
    paths = ShardPaths.of(prefix)
    if vocab_size is not None and vocab_size < 1:
        raise FormatError(f"vocab_size {vocab_size}: expected 1 or more, or None where unknown")
    findings = Findings(paths.prefix, most)
    claims: HeaderClaims | None = None
    is_unfinished = is_building(paths)
    with ExitStack() as stack:
        files = _open_files(paths, unpublished or {}, findings, stack)
        if not files and not is_unfinished:
            raise ShardNotFoundError(paths.prefix, list(paths.all), where_to_look(paths))
        if is_unfinished:
            findings.notes.append(_note_of(paths))
        if ".seq.idx" in files:
            claims = check_header(files[".seq.idx"], findings)
        # Opened before any file is read completely, which may take hours.
        columns: dict[str, CheckedFile] = {}
        if files:
            names = columns_beside([paths.prefix])[paths.prefix] if beside is None else beside
            columns = open_columns(paths, names, unpublished or {}, claims, findings, stack)
        meter = Meter(advance) if full else None
        if claims is not None:
            _check_files(paths, files, claims, findings, vocab_size or claims.vocab_size, meter)
        elif files:
            findings.notes.append("the header cannot be read, so the other files could not be checked against it")
        for name, file in columns.items():
            check_column(file, name, claims, findings, meter)
        if claims is not None and claims.media is not None:
            check_media(paths, files, claims, claims.media, unpublished or {}, findings, meter, stack)
    order = {path: number for number, path in enumerate((paths.seq_idx, *paths.data))}

    def place(found: Finding) -> tuple[bool, int, str, int]:
        # Rules about packs and counts come last, because they can be broken by damage to another file.
        follows = found.rule == "H9" or found.rule[0] in "IOP"
        return follows, order.get(found.path, len(order)), found.path, -1 if found.offset is None else found.offset

    in_order = sorted(findings.kept, key=place)
    counts = {}
    if claims is not None:
        counts = {"packs": claims.num_packs, "sequences": claims.num_sequences, "tokens": claims.num_tokens}
    return Report(paths.prefix, full, tuple(in_order), findings.omitted(), tuple(findings.notes), counts)


def broken_columns(
    prefix: str | os.PathLike[str], header: Header, advance: Advance = lambda nbytes: None
) -> dict[str, Finding]:
    """Check every byte of the columns at a prefix against a header. Return the first finding about each, by name.

    ``advance`` is called with the bytes read since the last call.
    """
    paths = ShardPaths.of(prefix)
    listed = listed_columns(header.metadata)
    claims = HeaderClaims(SEQ_IDX.values(header.encode()), listed=listed)
    absent = Findings(paths.prefix, len(listed))
    with ExitStack() as stack:
        files = open_columns(paths, columns_beside([paths.prefix])[paths.prefix], {}, claims, absent, stack)
        broken = {name: absent.kept.pop(0) for name in sorted(listed) if name not in files}
        for name, file in files.items():
            findings = Findings(paths.prefix, 1)
            check_column(file, name, claims, findings, Meter(advance))
            if findings.kept:
                broken[name] = findings.kept[0]
    return broken


def _open_files(
    paths: ShardPaths, unpublished: Mapping[str, str], findings: Findings, stack: ExitStack
) -> dict[str, CheckedFile]:
    """Open the existing ones of the five files, by suffix; ``stack`` closes them. Each missing one breaks rule F1."""
    files: dict[str, CheckedFile] = {}
    recover = (
        "recover the packs of the interrupted build: megatron-sft-idx rebuild PREFIX" if is_building(paths) else None
    )
    for suffix, path in zip(SUFFIXES, paths.all, strict=True):
        try:
            file = files[suffix] = stack.enter_context(closing(CheckedFile(unpublished.get(path, path))))
            file.path = path  # the path used in findings
        except (FileNotFoundError, NotADirectoryError):
            if os.path.lexists(path):
                found, remedy = "not a regular file", f"remove it, then {findings.remedy(path)}"
            else:
                found, remedy = "file is missing", recover or findings.remedy(path)
            findings.add("F1", path, None, found, "", remedy=remedy)
    return files


def _note_of(paths: ShardPaths) -> str:
    """Return the note about the folder that a killed writer leaves."""
    return (
        f"{os.path.basename(paths.building)}: left by a command that was killed or is still running; run that command"
        f" again to continue, or recover its packs: megatron-sft-idx rebuild {paths.prefix}"
    )


def _check_files(
    paths: ShardPaths,
    files: Mapping[str, CheckedFile],
    claims: HeaderClaims,
    findings: Findings,
    vocab_size: int | None,
    meter: Meter | None,
) -> None:
    """Check the five files against a readable header: their ends, or with a ``meter`` every byte."""
    check_sizes(files, claims, findings)
    # The header gives the positions of the arrays. If these are wrong, every pack would be a finding.
    arrays_found = claims.sound or files[".seq.idx"].nbytes == claims.nbytes[".seq.idx"]
    if arrays_found:
        check_array_ends(files, claims, findings)
    if meter is None:
        if arrays_found:
            check_pack_ends(files, claims, findings)
        return
    array_begins = {".seq.idx": claims.sequence_offsets}
    streams = {suffix: Stream(file, meter, array_begins.get(suffix, 0)) for suffix, file in files.items()}
    if vocab_size is None:
        findings.notes.append(
            "token ids were not checked against a vocabulary, because the shard does not record one; pass"
            " --vocab-size N"
        )
    if not arrays_found:
        findings.notes.append("the positions of the pack offsets are unknown, so the packs were not checked")
    walk = _check_contents(paths, streams, claims, findings, vocab_size, meter, with_packs=arrays_found)
    unchanged = {suffix for suffix, stream in streams.items() if _check_checksum(stream, suffix, claims, findings)}
    if walk is not None:
        # Damaged masks may have other counts than the header, which is right.
        with_masks = ".loss.bin" in unchanged and files[".loss.bin"].nbytes == claims.nbytes.get(".loss.bin")
        _check_counts(walk, files[".seq.idx"].path, claims, findings, with_masks=with_masks)


# ---- every byte ----


def _check_contents(
    paths: ShardPaths,
    streams: Mapping[str, Stream],
    claims: HeaderClaims,
    findings: Findings,
    vocab_size: int | None,
    meter: Meter,
    *,
    with_packs: bool,
) -> _native.PackWalk | None:
    """Check all ids (P8, P9) in a thread, and meanwhile arrays (O1, O2, I1) and packs (P1 to P7).

    An error in one of the two threads stops the other at its next read. Returns the walk over all packs, None if the
    packs were not checked.
    """
    seq_idx = streams[".seq.idx"].file
    tokens, token_dtype = streams.get(".bin"), claims.token_dtype

    def pack_of(token: int) -> int | None:
        return _pack_of(seq_idx, claims, token)

    def check_all_ids() -> None:
        if tokens and token_dtype:
            check_ids(tokens, token_dtype, vocab_size or 1 << 32, findings, pack_of)

    walk = None
    with ThreadPoolExecutor(1) as pool:
        ids = pool.submit(check_all_ids)
        # Otherwise an error would be noticed only after all other files are read.
        ids.add_done_callback(lambda done: meter.stop() if done.exception() else None)
        try:
            if with_packs:
                walk = claims.kernel(findings.most)
                masks = streams.get(".loss.bin") if claims.mask_dtype is not None else None
                runs = _stored_runs(streams[".seq.idx"], claims)
                walk_packs(walk, runs, streams.get(".seq.bin"), masks, claims.mask_dtype)
                add_breaches(walk, paths, claims, findings, pack_of)
                if ".idx" in streams and token_dtype:
                    _check_idx(streams[".idx"], seq_idx, claims, findings)
        except CancelledError:
            ids.result()  # raises the thread's error
            raise
        except BaseException:
            meter.stop()  # otherwise the pool would wait for the thread to read all tokens
            raise
        ids.result()
    return walk


def _check_checksum(stream: Stream, suffix: str, claims: HeaderClaims, findings: Findings) -> bool:
    """Read a file to its end and check its checksum (F3). A wrong size is already a finding.

    Returns whether size and checksum are as expected.
    """
    found = stream.finish()
    if suffix == ".seq.idx":
        what, nbytes, expected = " for the arrays", claims.nbytes[suffix], claims.values["arrays_checksum"]
    else:
        name = _FIELD_STARTS[suffix]
        what, nbytes, expected = "", claims.values[f"{name}_nbytes"], claims.values[f"{name}_checksum"]
    if stream.file.nbytes == nbytes and found != expected:
        findings.add("F3", stream.file.path, None, f"checksum {found.hex()}{what}", expected.hex())
    return bool(stream.file.nbytes == nbytes and found == expected)


def _stored_runs(seq_idx: Stream, claims: HeaderClaims) -> Iterator[OffsetRun]:
    """Yield runs of packs from the two arrays of ``.seq.idx``, as far as the file contains them."""
    num_packs = claims.num_packs
    sequences = np.empty(0, np.int64)
    for first in range(0, num_packs, RUN_PACKS):
        # If packs follow, an ``OffsetRun`` has one offset more than its packs need. The next run begins with the last
        # two sequence offsets of this one.
        num_offsets = min(RUN_PACKS + 2, num_packs + 1 - first)
        sequences = np.concatenate([sequences, seq_idx.take("<i8", num_offsets - len(sequences))])
        tokens = seq_idx.file.array("<i8", claims.token_offsets + 8 * first, num_offsets)
        num_read = min(len(tokens), len(sequences))
        count = min(RUN_PACKS, num_packs - first, num_read - 1)
        if count < 1:
            return
        yield OffsetRun(tokens[:num_read], sequences[:num_read], count)
        sequences = sequences[count:]


def _check_idx(idx: Stream, seq_idx: CheckedFile, claims: HeaderClaims, findings: Findings) -> None:
    """Check all items of ``.idx`` against the token offsets (I1), as far as both files contain them."""
    assert claims.token_dtype is not None
    idx.take(np.uint8, IDX_HEADER_NBYTES)
    num_packs = claims.num_packs
    # The last document ends at the end of all packs.
    for what, dtype, total in (
        ("length", "<i4", num_packs),
        ("position", "<i8", num_packs),
        ("document", "<i8", num_packs + 1),
    ):
        for first in range(0, total, RUN_PACKS):
            count = min(RUN_PACKS, total - first)
            expected = np.arange(first, first + count)
            if what != "document":
                offsets = seq_idx.array("<i8", claims.token_offsets + 8 * first, count + 1)
                expected = np.diff(offsets) if what == "length" else offsets[:count] * claims.token_dtype.itemsize
            items = idx.take(dtype, len(expected))
            wrong = np.flatnonzero(items != expected[: len(items)])
            for i in wrong[: findings.most].tolist():
                offset = idx.position - items.nbytes + items.itemsize * i
                findings.add("I1", idx.file.path, offset, f"{what} {items[i]}", expected[i], pack=first + i)
            findings.counts["I1"] += len(wrong[findings.most :])
            if len(items) < count:
                return


def _pack_of(seq_idx: CheckedFile, claims: HeaderClaims, token: int) -> int | None:
    """Return the number of the pack that holds a token, from the token offsets; None if they are damaged there."""
    low, high = 0, claims.num_packs
    while high - low > 1:
        middle = (low + high) // 2
        offset = seq_idx.array("<i8", claims.token_offsets + 8 * middle, 1)
        if not len(offset):
            return None
        low, high = (middle, high) if offset[0] <= token else (low, middle)
    pair = seq_idx.array("<i8", claims.token_offsets + 8 * low, 2)
    return low if len(pair) == 2 and pair[0] <= token < pair[1] else None


def _check_counts(
    walk: _native.PackWalk, path: str, claims: HeaderClaims, findings: Findings, *, with_masks: bool
) -> None:
    """Compare the header's counts with the counts of the walk (H9).

    Skips a count if some of its data could not be read. Trained tokens are only compared ``with_masks``.
    """
    all_packs = walk.num_packs == claims.num_packs
    for name, comparable in (
        ("num_trained_tokens", with_masks),
        ("num_masked_packs", with_masks and all_packs),
        ("longest_pack", all_packs),
        ("most_sequences", all_packs),
    ):
        claimed, counted = claims.values[name], getattr(walk, name)
        if comparable and claimed != counted:
            findings.add("H9", path, SEQ_IDX.offsets[name], f"{name} {claimed}", f"{counted}, counted in the data")
