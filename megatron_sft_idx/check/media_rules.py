"""The rules of FORMAT.md about images and audio (M1 to M13) as checks of the two files at rest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.check.pack_walk import CheckedFile, Meter, Stream
from megatron_sft_idx.check.rules import DATA_REMEDY, Findings, HeaderClaims
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import MEDIA_SUFFIXES, MediaChecksums
from megatron_sft_idx.layout.media_layout import ARRAYS, HASH_NBYTES, MEDIA, FirstUse, Items, MediaHeader, broken_items
from megatron_sft_idx.packs.run import WINDOW_TOKENS, count_fitting

# Maximum number of packs, items or blobs whose entries are in memory at once.
_CHUNK = 1 << 15
_DTYPES = {each.name: each.dtype for each in ARRAYS}


class _MediaFile:
    """``.media.items`` with a valid header: its arrays by name, as far as the file contains them."""

    def __init__(self, file: CheckedFile, header: MediaHeader, findings: Findings) -> None:
        self.file, self.header, self._findings, self._places = file, header, findings, header.places()

    def array(self, name: str, first: int, count: int) -> NDArray[Any]:
        """Return ``count`` entries of an array from ``first`` on, or fewer if the file ends before."""
        begin, entries = self._places[name]
        dtype = _DTYPES[name]
        return self.file.array(dtype, begin + first * dtype.itemsize, max(0, min(count, entries - first)))

    def add(self, rule: str, name: str, at: int, found: object, expected: object, pack: int | None = None) -> None:
        """Add a finding about entry ``at`` of an array."""
        offset = self._places[name][0] + at * _DTYPES[name].itemsize
        self._findings.add(rule, self.file.path, offset, found, expected, pack=pack, remedy=DATA_REMEDY)

    def check_ends(self) -> None:
        """Check both ends of the two offset arrays (M5, M10), and the zeros between arrays (M4)."""
        for rule, name, at, expected in self.header.offset_ends():
            for found in self.array(name, at, 1).tolist():  # no entry if the file ends before it
                if found != expected:
                    self.add(rule, name, at, f"{found} as entry {at} of {name}", expected)
        end = self.header.header_nbytes
        for name, (begin, entries) in self._places.items():
            if any(self.file.read(end, begin - end)):
                self._findings.add(
                    "M4", self.file.path, end, "bytes between two arrays are not zero", "", remedy=DATA_REMEDY
                )
            end = begin + entries * _DTYPES[name].itemsize

    def ascending(self, rule: str, name: str, total: int, least: int) -> bool:
        """Return whether an offset array ascends by at least ``least`` (M5, M10). Add the first violation."""
        entries = self._places[name][1]
        for first in range(0, entries - 1, _CHUNK):
            offsets = self.array(name, first, _CHUNK + 1)
            outside = (offsets < 0) | (offsets > total)  # their differences could overflow
            wrong = (np.diff(offsets) < least) | outside[1:] | outside[:-1]
            if wrong.any():
                at = int(np.argmax(wrong))
                expected = f"at least {least} more than the previous offset, and at most {total}"
                self.add(rule, name, first + at + 1, f"{offsets[at + 1]} after {offsets[at]}", expected)
                return False
        return True


def check_media(
    paths: ShardPaths,
    files: Mapping[str, CheckedFile],
    claims: HeaderClaims,
    listed: MediaChecksums,
    unpublished: Mapping[str, str],
    findings: Findings,
    meter: Meter | None,
    stack: ExitStack,
) -> None:
    """Check the two files of images and audio of a shard against their rules; with a ``meter``, read all bytes.

    Args:
        paths: paths of the shard.
        files: the existing ones of its five files, by suffix.
        claims: the claims of its header.
        listed: the checksums in its JSON block.
        unpublished: current paths of files that are not published yet, by their final paths.
        findings: broken rules are added to it.
        meter: counts the bytes that are read; None to check only headers, sizes and ends.
        stack: closes the files.
    """
    opened: dict[str, CheckedFile] = {}
    for suffix in MEDIA_SUFFIXES:
        path = paths.prefix + suffix
        try:
            file = opened[suffix] = stack.enter_context(closing(CheckedFile(unpublished.get(path, path))))
            file.path = path  # the path used in findings
        except (FileNotFoundError, NotADirectoryError):
            found = "file is missing, but .seq.idx lists images or audio"
            findings.add("M1", path, None, found, "", remedy=DATA_REMEDY)
    if meter is not None and (data := opened.get(".media.data")) is not None:
        stream: Stream | None = Stream(data, meter)
    else:
        stream = None
    if ".media.items" in opened:
        _check_items_file(opened, files, claims, listed, findings, meter, stream)
    if stream is not None and (checksum := stream.finish()) != listed.data:
        path = stream.file.path
        findings.add("M13", path, None, f"checksum {checksum.hex()}", listed.data.hex(), remedy=DATA_REMEDY)


def _check_items_file(
    opened: Mapping[str, CheckedFile],
    files: Mapping[str, CheckedFile],
    claims: HeaderClaims,
    listed: MediaChecksums,
    findings: Findings,
    meter: Meter | None,
    stream: Stream | None,
) -> None:
    """Check ``.media.items`` against the rules; with a ``stream`` of ``.media.data``, also each file's hash."""
    file, data = opened[".media.items"], opened.get(".media.data")
    raw = file.read(0, MEDIA.fixed_nbytes)
    raw += file.read(len(raw), MEDIA.stated_nbytes(raw) - len(raw))
    if broken := list(MEDIA.broken_rules(raw)):
        for breach in broken:
            findings.add(breach.rule, file.path, breach.offset, breach.found, breach.expected, remedy=DATA_REMEDY)
        return
    media = _MediaFile(file, MediaHeader.decode(raw, file.path), findings)
    _check_belongs(media, claims, listed, findings)
    is_whole = True
    for each, expected in ((file, media.header.nbytes), (data, media.header.data_nbytes)):
        if each is not None and each.nbytes != expected:
            is_whole = False
            found, at = f"{each.nbytes} bytes", min(each.nbytes, expected)
            findings.add("F2", each.path, at, found, f"{expected}, from the header", remedy=DATA_REMEDY)
    media.check_ends()
    if meter is None:
        return
    checksum = Stream(file, meter, media.header.header_nbytes).finish()
    if is_whole and checksum != media.header.arrays_checksum:
        found, wanted = f"checksum {checksum.hex()} for the arrays", media.header.arrays_checksum.hex()
        findings.add("M13", file.path, None, found, wanted, remedy=DATA_REMEDY)
    if media.ascending("M5", "item_offsets", media.header.num_items, 0) and claims.num_packs == media.header.num_packs:
        _check_items(media, files, claims)
    if media.ascending("M10", "blob_offsets", media.header.data_nbytes, 1):
        if stream is not None:
            _check_blobs(media, stream, findings)
        _check_distinct(media)


def _check_belongs(media: _MediaFile, claims: HeaderClaims, listed: MediaChecksums, findings: Findings) -> None:
    """Check that the header belongs to this shard: checksums (M1), shard id and number of packs (M4)."""
    header, path = media.header, media.file.path
    for field, found, expected in zip(("data_checksum", "arrays_checksum"), header.checksums, listed, strict=True):
        if found != expected:
            found_text = f"{field} {found.hex()}"
            findings.add(
                "M1", path, MEDIA.offsets[field], found_text, f"{expected.hex()}, from .seq.idx", remedy=DATA_REMEDY
            )
    if not claims.sound:
        return
    if header.shard_id != claims.values["shard_id"]:
        found_text, expected_text = f"items of shard {header.shard_id.hex()}", claims.values["shard_id"].hex()
        findings.add("M4", path, MEDIA.offsets["shard_id"], found_text, expected_text, remedy=DATA_REMEDY)
    if header.num_packs != claims.num_packs:
        found_text = f"{header.num_packs} packs"
        findings.add("M4", path, MEDIA.offsets["num_packs"], found_text, claims.num_packs, remedy=DATA_REMEDY)


def _windows(
    files: Mapping[str, CheckedFile], claims: HeaderClaims
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[Any] | None]]:
    """Yield packs in bounded runs: first pack, bounds of packs and of sequences in tokens of the run, and mask.

    Stops at the first pack with damaged offsets or starts, which other rules report.
    """
    seq_idx, starts, loss = (files.get(suffix) for suffix in (".seq.idx", ".seq.bin", ".loss.bin"))
    first = 0
    while seq_idx is not None and starts is not None and first < claims.num_packs:
        count = min(_CHUNK, claims.num_packs - first)
        tokens = seq_idx.array("<i8", claims.token_offsets + 8 * first, count + 1)
        sequences = seq_idx.array("<i8", claims.sequence_offsets + 8 * first, count + 1)
        if not len(tokens) == len(sequences) == count + 1:
            return
        count = max(1, min(count_fitting(tokens, WINDOW_TOKENS), count_fitting(sequences, WINDOW_TOKENS)))
        tokens, sequences = tokens[: count + 1], sequences[: count + 1]
        ends = tokens[0], tokens[-1], sequences[0], sequences[-1]
        if min(np.diff(tokens).min(), np.diff(sequences).min()) < 1 or min(ends) < 0:
            return
        if tokens[-1] > claims.num_tokens or sequences[-1] > claims.num_sequences:
            return
        begins = starts.array("<u4", 4 * int(sequences[0]), int(sequences[-1] - sequences[0])).astype(np.int64)
        bounds = np.append(begins + np.repeat(tokens[:-1] - tokens[0], np.diff(sequences)), tokens[-1] - tokens[0])
        if len(begins) != sequences[-1] - sequences[0] or np.diff(bounds).min() < 1:
            return
        mask = None
        if loss is not None and claims.mask_dtype is not None:
            size = claims.mask_dtype.itemsize
            mask = loss.array(claims.mask_dtype, size * int(tokens[0]), int(tokens[-1] - tokens[0]))
            mask = mask if len(mask) == tokens[-1] - tokens[0] else None
        yield first, tokens - tokens[0], bounds, mask
        first += count


def _check_items(media: _MediaFile, files: Mapping[str, CheckedFile], claims: HeaderClaims) -> None:
    """Check all items against the packs that contain them (M6 to M9, M12)."""
    order, num_checked = FirstUse(), 0
    for first, pack_bounds, bounds, mask in _windows(files, claims):
        offsets = media.array("item_offsets", first, len(pack_bounds))
        if len(offsets) < len(pack_bounds):
            return  # the file ends early, which is reported as a wrong size
        begin, end = int(offsets[0]), int(offsets[-1])
        items = Items(*(media.array(name, begin, end - begin) for name in ("starts", "lengths", "kinds", "blobs")))
        if len(items.blobs) < end - begin:
            return
        packs = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        broken = [*broken_items(items, packs, pack_bounds, bounds, mask)]
        if wrong := order.broken(items.blobs, media.header.num_blobs):
            broken.append(wrong)
        names = {"M8": "kinds", "M9": "blobs"}
        for each in broken:
            pack = first + int(packs[each.item])
            name = names.get(each.rule, "starts")
            media.add(each.rule, name, begin + each.item, each.found, each.expected, pack)
        num_checked = first + len(offsets) - 1
    if num_checked == claims.num_packs and claims.sound and order.num_used < media.header.num_blobs:
        media.add("M9", "blobs", 0, f"{order.num_used} blobs used by items", media.header.num_blobs)


def _check_blobs(media: _MediaFile, stream: Stream, findings: Findings) -> None:
    """Check every blob against its hash (M11)."""
    for first in range(0, media.header.num_blobs, _CHUNK):
        sizes = np.diff(media.array("blob_offsets", first, _CHUNK + 1)).tolist()
        hashes = media.array("blob_hashes", first, _CHUNK)
        for at, (size, expected) in enumerate(zip(sizes, hashes, strict=False)):
            begin, hashed = stream.position, hashlib.blake2b(digest_size=HASH_NBYTES)
            for chunk in stream.chunks(np.uint8, size):
                hashed.update(chunk.data)
            if hashed.digest() != bytes(expected):
                found = f"blob {first + at} with hash {hashed.hexdigest()}"
                findings.add("M11", stream.file.path, begin, found, bytes(expected).hex(), remedy=DATA_REMEDY)


def _check_distinct(media: _MediaFile) -> None:
    """Check that no two blobs are equal (M11): each is stored once."""
    hashes = media.array("blob_hashes", 0, media.header.num_blobs)
    order = np.argsort(hashes.view("S16") if len(hashes) else hashes, kind="stable")
    twice = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    if len(twice):
        at = int(max(order[twice[0]], order[twice[0] + 1]))
        media.add("M11", "blob_hashes", at, f"blob {at} has the same hash as another blob", "")
