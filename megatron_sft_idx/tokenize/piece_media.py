"""Images and audio of the rows of one piece: read, check and collect them, each file once."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_sft_idx.chat.media_files import LoadedMedia, MediaLimits, is_url, read_media, size_of_media
from megatron_sft_idx.chat.media_parts import MediaFile, taken_media
from megatron_sft_idx.chat.types import Conversation, RowError
from megatron_sft_idx.layout.media_layout import HASH_NBYTES, Kind, blob_hash
from megatron_sft_idx.packs.run_media import CollectedBlobs
from megatron_sft_idx.packs.source_names import is_passed
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.local import StreamHash

# Number of file sizes to cache, so that a file used in many rows is decoded once.
_MOST_SIZES = 1 << 16


class MediaSizes(dict[tuple[Kind, bytes], tuple[int, int]]):
    """Cache of file sizes (``LoadedMedia.size``) by kind and hash, for the most recent files."""

    def remember(self, key: tuple[Kind, bytes], size: tuple[int, int]) -> None:
        """Add a size."""
        if len(self) >= _MOST_SIZES:
            self.clear()
        self[key] = size


class PieceMedia:
    """Reads the images and audio of a piece.

    Args:
        path: path of the piece's file; relative paths start in its folder, unless ``limits`` has another one.
        limits: limits and sources.
        blobs: collects the encoded files.
        sizes: sizes of known files; new ones are added.
    """

    def __init__(self, path: str, limits: MediaLimits, blobs: CollectedBlobs, sizes: MediaSizes) -> None:
        self._limits, self._blobs, self._sizes = limits, blobs, sizes
        self._folder = _folder_of(path)
        self._stream, self._num_read = StreamHash(), 0

    @property
    def digest(self) -> str:
        """Hash of the files of all rows read so far, in order, in hex; empty without any.

        An unreadable file counts as such. For a file to download, its URL counts.
        """
        return self._stream.hex() if self._num_read else ""

    def load(self, conversations: Sequence[Conversation]) -> tuple[list[Conversation], list[list[LoadedMedia]]]:
        """Return the conversations of a row in the form for templates, and the images and recordings of each.

        RowError: one is unreadable.
        """
        taken = [taken_media(conversation.messages) for conversation in conversations]
        # All are read, even after a bad one, because the digest covers the row.
        found = {key: self._loaded(file) for key, file in _each_once(taken).items()}
        loaded: dict[int, LoadedMedia] = {}
        for key, each in found.items():
            if isinstance(each, RowError):
                raise each
            loaded[key] = each
        plain = [each._replace(messages=messages) for each, (messages, _) in zip(conversations, taken, strict=True)]
        return plain, [[loaded[id(file)] for file in files] for _, files in taken]

    def note(self, conversations: Sequence[Conversation]) -> None:
        """Only add the files of a row to the digest. Nothing is downloaded."""
        for file in _each_once([taken_media(conversation.messages) for conversation in conversations]).values():
            if isinstance(file.given, str) and is_url(file.given):
                self._count(file, b"")
            else:
                self._read(file)

    def _count(self, file: MediaFile, hashed: bytes) -> None:
        is_elsewhere = isinstance(file.given, str) and is_url(file.given)
        self._num_read += 1
        self._stream.update(blob_hash(str(file.given).encode()) if is_elsewhere else hashed)

    def _read(self, file: MediaFile) -> tuple[bytes, bytes] | RowError:
        """Return a file and its hash, or why it is unreadable."""
        try:
            data = read_media(file, self._limits, self._folder)
        except RowError as error:
            self._count(file, bytes(HASH_NBYTES))
            return error
        hashed = blob_hash(data)
        self._count(file, hashed)
        return data, hashed

    def _loaded(self, file: MediaFile) -> LoadedMedia | RowError:
        read = self._read(file)
        if isinstance(read, RowError):
            return read
        data, hashed = read
        if (size := self._sizes.get((file.kind, hashed))) is None:
            try:
                size = size_of_media(file.kind, data, file.what, self._limits)
            except RowError as error:
                return error
            self._sizes.remember((file.kind, hashed), size)
        return LoadedMedia(file.kind, size, self._blobs.add(hashed, data))


def _each_once(taken: Sequence[tuple[object, Sequence[MediaFile]]]) -> dict[int, MediaFile]:
    """Return the files of a row by object identity: the answers of a pair share the files of the prompt."""
    return {id(file): file for _, files in taken for file in files}


def _folder_of(path: str) -> str | None:
    """Return the folder for relative paths in a file's rows: None for remote files, the current one for programs."""
    if is_remote(path):
        return None
    return os.getcwd() if is_passed(path) else os.path.dirname(os.path.abspath(path))
