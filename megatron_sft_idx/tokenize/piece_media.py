"""Images and audio of the rows of one piece: read, looked at, and collected, each file once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from megatron_sft_idx.chat.media_files import LoadedMedia, MediaLimits, read_media, size_of_media
from megatron_sft_idx.chat.media_parts import MediaFile, taken_media
from megatron_sft_idx.chat.types import Conversation, RowError
from megatron_sft_idx.layout.media import HASH_NBYTES, blob_hash
from megatron_sft_idx.packs.run_media import CollectedBlobs
from megatron_sft_idx.packs.source_names import is_passed
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.local import StreamHash

# How many sizes of files are remembered, so that a file which many rows show is decoded once.
_MOST_SIZES = 1 << 16


class MediaSizes(dict[bytes, tuple[int, int]]):
    """Sizes (``LoadedMedia.size``) of files by their hashes, of the last ones that were looked at."""

    def remember(self, hashed: bytes, size: tuple[int, int]) -> None:
        """Remember a size."""
        if len(self) >= _MOST_SIZES:
            self.clear()
        self[hashed] = size


class PieceMedia:
    """Reads the images and audio of a piece.

    Args:
        path: of the file that the piece is of, from whose folder paths are taken if ``limits`` name none.
        limits: what is read, and from where.
        blobs: takes the encoded files.
        sizes: of files that were looked at before; more are added.

    """

    def __init__(self, path: str, limits: MediaLimits, blobs: CollectedBlobs, sizes: MediaSizes) -> None:
        self._limits, self._blobs, self._sizes = limits, blobs, sizes
        self._folder = _folder_of(path)
        self._stream, self._num_read = StreamHash(), 0

    @property
    def digest(self) -> str:
        """Hash of the files of all rows that were read, in order, in hex; empty without any.

        A file that cannot be read counts as such; of one that has to be downloaded, its URL counts.
        """
        return self._stream.hex() if self._num_read else ""

    def load(self, conversations: Sequence[Conversation]) -> tuple[list[Conversation], list[list[LoadedMedia]]]:
        """Conversations of a row as templates get them, and the images and recordings of each.

        RowError: one cannot be read.
        """
        taken = [taken_media(conversation.messages) for conversation in conversations]
        # All are read, also behind a bad one: the digest covers the row.
        found = {id(file): self._loaded(file, data) for file, data in self._read(taken)}
        for each in found.values():
            if isinstance(each, RowError):
                raise each
        loaded = {key: each for key, each in found.items() if isinstance(each, LoadedMedia)}
        plain = [each._replace(messages=messages) for each, (messages, _) in zip(conversations, taken, strict=True)]
        return plain, [[loaded[id(file)] for file in files] for _, files in taken]

    def note(self, conversations: Sequence[Conversation]) -> None:
        """Add the files of a row to the digest, and nothing else."""
        for _ in self._read([taken_media(conversation.messages) for conversation in conversations]):
            pass

    def _read(
        self, taken: Sequence[tuple[object, Sequence[MediaFile]]]
    ) -> Iterator[tuple[MediaFile, bytes | RowError]]:
        """The files of a row, each once: the answers of a pair share those of the prompt."""
        files = {id(file): file for _, of_conversation in taken for file in of_conversation}
        for file in files.values():
            data: bytes | RowError
            try:
                data = read_media(file, self._limits, self._folder)
            except RowError as error:
                data = error
            self._num_read += 1
            self._stream.update(bytes(HASH_NBYTES) if isinstance(data, RowError) else blob_hash(data))
            yield file, data

    def _loaded(self, file: MediaFile, data: bytes | RowError) -> LoadedMedia | RowError:
        if isinstance(data, RowError):
            return data
        hashed = blob_hash(data)
        if (size := self._sizes.get(hashed)) is None:
            try:
                size = size_of_media(file.kind, data, file.what, self._limits)
            except RowError as error:
                return error
            self._sizes.remember(hashed, size)
        return LoadedMedia(file.kind, size, self._blobs.add(hashed, data))


def _folder_of(path: str) -> str | None:
    """Where paths of a file's rows begin; None of a file in a store. Rows of a program begin at the current folder."""
    if is_remote(path):
        return None
    return os.getcwd() if is_passed(path) else os.path.dirname(os.path.abspath(path))
