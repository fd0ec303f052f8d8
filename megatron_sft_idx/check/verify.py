"""``verify_shard``: one shard against every rule of FORMAT.md that files at rest can be held to.

A quick look reads the header and the ends of all arrays. A full one reads every byte and checks it while it is in the
processor's cache: tokens in one thread, all else in another. Only the offsets of tokens are read twice: the packs need
them in step with those of sequences, and their checksum one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.check.pack_walk import RUN_PACKS, CheckedFile, Meter, OffsetRun, Stream, walk_packs
from megatron_sft_idx.check.rules import (
    Claims,
    Finding,
    Findings,
    add_breaches,
    check_arrays,
    check_columns,
    check_corners,
    check_header,
    check_headless,
    check_ids,
    check_sizes,
)
from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import FIELDS, IDX_HEADER_NBYTES, SUFFIXES, idx_places
from megatron_sft_idx.shard.opening import where_to_look
from megatron_sft_idx.shard.publication import is_journal
from megatron_sft_idx.storage.progress import Advance

_MOST = 10
_NAMES = {".bin": "tokens", ".loss.bin": "loss", ".idx": "idx", ".seq.bin": "starts"}
_PLACES = {field.name: field.offset for field in FIELDS}


@dataclass(frozen=True, slots=True)
class Report:
    """What one shard's verification found.

    Attributes:
        prefix: the path that the five files share.
        full: every byte was read, not only headers, sizes and ends.
        findings: broken rules, a bounded number of each.
        omitted: how many more there are, by rule.
        notes: what is no fault of the shard: remains of a build beside it, checks that could not be made.
        counts: packs, sequences and tokens as the header has them; empty where it cannot be read.
    """

    prefix: str
    full: bool
    findings: tuple[Finding, ...]
    omitted: dict[str, int]
    notes: tuple[str, ...]
    counts: dict[str, int]

    @property
    def ok(self) -> bool:
        """Whether no rule is broken as far as was looked."""
        return not self.findings

    @property
    def num_findings(self) -> int:
        """All of them, those omitted included."""
        return len(self.findings) + sum(self.omitted.values())

    def as_json(self) -> dict[str, Any]:
        """As an object of plain values."""
        return {**asdict(self), "ok": self.ok, "num_findings": self.num_findings}

    def lines(self) -> Iterable[str]:
        """As text for people: one line a finding, then a verdict."""
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


def verify_shard(
    prefix: str | os.PathLike[str],
    *,
    full: bool = False,
    vocab_size: int | None = None,
    most: int = _MOST,
    advance: Advance = lambda nbytes: None,
) -> Report:
    """Hold the files at a prefix against the rules of FORMAT.md, and say all that is wrong.

    Goes on as far as what is left allows: opens what ``Shard`` refuses. Memory stays at a few MiB for any size.

    Args:
        prefix: the path that the five files share.
        full: read every byte: checksums, every pack, ``.idx`` byte for byte. Otherwise headers, sizes and ends, which
            takes milliseconds for any size.
        vocab_size: with ``full``, every id must be below it; None takes it from the JSON block where that says it.
        most: findings kept of each rule; the others are counted.
        advance: called with ``full`` by two threads in turn, with the bytes read since the last call: a MiB at most.

    Raises:
        FormatError: an argument that cannot be.
        ShardNotFoundError: nothing of a shard, or of a build of one, is at the prefix.
        OSError: a file cannot be read.
    """
    paths = ShardPaths.of(prefix)
    if vocab_size is not None and vocab_size < 1:
        raise FormatError(f"vocab_size {vocab_size}: expected 1 or more, or None where unknown")
    findings, claims = Findings(paths.prefix, most), None
    left = _remains(paths)
    with ExitStack() as stack:
        files = _open_files(paths, findings)
        for file in files.values():
            stack.callback(file.close)
        if not files and not left:
            raise ShardNotFoundError(paths.prefix, list(paths.all), where_to_look(paths))
        if left:
            findings.notes.append(
                f"{', '.join(left)}: left by a build that was killed, or of one that is under way; preprocess --resume"
                f" goes on with it, megatron-sft-idx rebuild {paths.prefix} recovers its packs, --overwrite drops it"
            )
        if ".seq.idx" in files:
            claims = check_header(files[".seq.idx"], findings)
        if claims is not None:
            check_sizes(files, claims, findings)
            # Offsets are where the header says only if it can be trusted; a wrong place would be a finding a pack.
            placed = claims.sound or files[".seq.idx"].nbytes == claims.nbytes[".seq.idx"]
            if placed:
                check_arrays(files, claims, findings)
            if full:
                meter = Meter(advance)
                _check_all(paths, files, claims, findings, placed, vocab_size or claims.vocab_size, meter)
            elif placed:
                check_corners(files, claims, findings)
        else:
            check_headless(files, findings)
        if files:
            check_columns(paths, claims, findings, Meter(advance) if full else None)
    order = {path: number for number, path in enumerate((paths.seq_idx, *paths.data))}
    kept = sorted(
        findings.kept, key=lambda finding: (order.get(finding.path, len(order)), finding.path, finding.offset)
    )
    counts = {}
    if claims is not None:
        counts = {"packs": claims.num_packs, "sequences": claims.num_sequences, "tokens": claims.num_tokens}
    return Report(paths.prefix, full, tuple(kept), findings.omitted(), tuple(findings.notes), counts)


def _open_files(paths: ShardPaths, findings: Findings) -> dict[str, CheckedFile]:
    """The files that are there, by suffix; the others break rule F1."""
    files: dict[str, CheckedFile] = {}
    recover = "megatron-sft-idx rebuild PREFIX recovers what the build left" if is_journal(paths.journal) else None
    for suffix, path in zip(SUFFIXES, paths.all, strict=True):
        try:
            files[suffix] = CheckedFile(path)
        except (FileNotFoundError, NotADirectoryError):
            if os.path.lexists(path):
                found, remedy = "something that is no regular file", f"remove it, then {findings.remedy(path)}"
            else:
                found, remedy = "no such file", recover or findings.remedy(path)
            findings.add("F1", path, 0, found, "one of the five files of a shard", remedy=remedy)
    return files


def _remains(paths: ShardPaths) -> list[str]:
    """Names of what a build leaves when it is killed."""
    folder, name = os.path.split(paths.prefix)
    ours = tuple(f"{name}{suffix}.tmp" for suffix in SUFFIXES)
    try:
        entries = os.listdir(folder or ".")
    except (FileNotFoundError, NotADirectoryError):
        return []
    journal = [f"{name}.journal"] if is_journal(paths.journal) else []
    return sorted(journal + [entry for entry in entries if entry.startswith(ours)])


# ---- every byte ----


def _check_all(
    paths: ShardPaths,
    files: Mapping[str, CheckedFile],
    claims: Claims,
    findings: Findings,
    placed: bool,
    vocab_size: int | None,
    meter: Meter,
) -> None:
    """Checksums (F3), the arrays (O1, O2, I1), every pack (P1 to P9) and the counts (H9) of what is there."""
    begins = {".seq.idx": claims.sequence_offsets}
    streams = {suffix: Stream(file, meter, begins.get(suffix, 0)) for suffix, file in files.items()}
    if vocab_size is None:
        findings.notes.append("ids are only held to their dtype: the header names no vocabulary, --vocab-size N does")

    def pack_of(token: int) -> int | None:
        return _pack_of(files[".seq.idx"], claims, token)

    tokens, dtype = streams.get(".bin"), claims.token_dtype
    with ThreadPoolExecutor(1) as pool:
        try:
            ids = tokens and dtype and pool.submit(check_ids, tokens, dtype, vocab_size or 1 << 32, findings, pack_of)
            if placed:
                walk = claims.kernel(findings.most)
                masks = streams.get(".loss.bin") if claims.mask_dtype is not None else None
                runs = _stored_runs(streams, claims, findings)
                walk_packs(walk, runs, streams.get(".seq.bin"), masks, claims.mask_dtype)
                add_breaches(walk, paths, claims, findings, pack_of)
                _check_counts(walk, masks, files[".seq.idx"].path, claims, findings)
            else:
                findings.notes.append("where the offsets of the packs are is not known, so the packs were not checked")
            if ids:
                ids.result()
        except BaseException:
            meter.stop()  # or the pool would wait for the thread to read all tokens
            raise
    for suffix, stream in streams.items():
        # Where the file has the size that its checksum was taken of.
        found, file, values = stream.finish(), stream.file, claims.values
        if suffix == ".seq.idx":
            what, nbytes, expected = " of the arrays", claims.nbytes[suffix], values["arrays_checksum"]
        else:
            name = _NAMES[suffix]
            what, nbytes, expected = "", values[f"{name}_nbytes"], values[f"{name}_checksum"]
        if file.nbytes == nbytes and file.shrunk is None and found != expected:
            begin = begins.get(suffix, 0)
            findings.add("F3", file.path, begin, f"checksum {found.hex()}{what}", expected.hex())
        if file.shrunk is not None:
            findings.add(
                "F2", file.path, file.shrunk, "the end of the file, which was cut while it was read", file.nbytes
            )


def _stored_runs(streams: Mapping[str, Stream], claims: Claims, findings: Findings) -> Iterator[OffsetRun]:
    """The packs by the arrays of ``.seq.idx``, as far as it has them; ``.idx`` is held to them on the way."""
    num_packs, seq_idx = claims.num_packs, streams[".seq.idx"]
    idx = streams.get(".idx") if claims.token_dtype is not None else None

    def token_offsets(first: int, count: int) -> NDArray[np.int64]:
        return seq_idx.file.array("<i8", claims.token_offsets + 8 * first, count)

    if idx:
        idx.take(np.uint8, IDX_HEADER_NBYTES)
    sequences = np.empty(0, np.int64)
    for first in range(0, num_packs, RUN_PACKS):
        # One offset more than the run needs, where there is one: see Run.
        wanted = min(RUN_PACKS + 2, num_packs + 1 - first)
        sequences = np.concatenate([sequences, seq_idx.take("<i8", wanted - len(sequences))])
        tokens = token_offsets(first, wanted)
        given = min(len(tokens), len(sequences))
        count = min(RUN_PACKS, num_packs - first, given - 1)
        if count < 1:
            break
        _compare(idx, "length", "<i4", first, np.diff(tokens[: count + 1]), findings)
        yield OffsetRun(tokens[:given], sequences[:given], count)
        sequences = sequences[count:]
    if not idx or idx.position != idx_places(num_packs)[1]:
        return
    assert claims.token_dtype is not None
    for first in range(0, num_packs, RUN_PACKS):
        begins = token_offsets(first, min(RUN_PACKS, num_packs - first)) * claims.token_dtype.itemsize
        _compare(idx, "position", "<i8", first, begins, findings)
    for first in range(0, num_packs + 1, RUN_PACKS):  # the last document ends where all packs do
        documents = np.arange(first, min(first + RUN_PACKS, num_packs + 1))
        _compare(idx, "document", "<i8", first, documents, findings)


def _compare(
    idx: Stream | None, what: str, dtype: str, first: int, expected: NDArray[np.int64], findings: Findings
) -> None:
    """Rule I1 for the next items of ``.idx``, of packs ``first`` on."""
    for found in idx.pieces(dtype, len(expected)) if idx else ():
        assert idx is not None
        bad = np.flatnonzero(found != expected[: len(found)])
        base = idx.position - found.nbytes
        for i in bad[: findings.most].tolist():
            offset = base + found.itemsize * i
            findings.add("I1", idx.file.path, offset, f"{what} {found[i]}", expected[i], pack=first + i)
        findings.counts["I1"] += len(bad[findings.most :])
        first, expected = first + len(found), expected[len(found) :]


def _pack_of(seq_idx: CheckedFile, claims: Claims, token: int) -> int | None:
    """Which pack holds a token, by the offsets; None where they do not tell."""
    low, high = 0, claims.num_packs
    while high - low > 1:
        middle = (low + high) // 2
        found = seq_idx.array("<i8", claims.token_offsets + 8 * middle, 1)
        if not len(found):
            return None
        low, high = (middle, high) if found[0] <= token else (low, middle)
    pair = seq_idx.array("<i8", claims.token_offsets + 8 * low, 2)
    return low if len(pair) == 2 and pair[0] <= token < pair[1] else None


def _check_counts(walk: _native.PackWalk, masks: Stream | None, path: str, claims: Claims, findings: Findings) -> None:
    """Rule H9, for the counts of what was seen whole."""
    whole, dtype = walk.num_packs == claims.num_packs, claims.mask_dtype
    seen = masks and dtype and masks.position == claims.num_tokens * dtype.itemsize
    for name, comparable in (
        ("num_trained_tokens", seen),
        ("num_masked_packs", seen and whole),
        ("longest_pack", whole),
        ("most_sequences", whole),
    ):
        said, counted = claims.values[name], getattr(walk, name)
        if comparable and said != counted:
            findings.add("H9", path, _PLACES[name], f"{name} {said}", f"{counted} by the data")
