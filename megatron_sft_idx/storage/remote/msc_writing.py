"""Writing through multi-storage-client, to whatever a profile leads: Google's and Microsoft's stores among them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable

from megatron_sft_idx.storage.remote.msc import MultiStorage, translated
from megatron_sft_idx.storage.remote.transport import Changed, Missing
from megatron_sft_idx.storage.remote.writing import CHECKSUM, Stored

__all__ = ["MultiStorageWriter"]


class MultiStorageWriter(MultiStorage):
    """One profile, written.

    The library has no way to write only where nothing is, so ``create`` looks first: of two that try in the same
    moment both may believe that they succeeded.
    """

    def put(self, key: str, chunks: Iterable[bytes | memoryview], nbytes: int, checksum: str, seconds: float) -> None:
        """Write an object; the library knows when in parts, and how long to try."""
        del nbytes, seconds
        # It sends parts from files only, and all of the data has been checked before the first byte is sent.
        with tempfile.NamedTemporaryFile(prefix="megatron-sft-idx-") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            translated(lambda: self._client.upload_file(key, file.name, attributes={CHECKSUM: checksum}))

    def create(self, key: str, data: bytes, checksum: str) -> None:
        """Write an object where there is none."""
        try:
            self.stored(key)
        except Missing:
            translated(lambda: self._client.write(key, data, attributes={CHECKSUM: checksum}))
        else:
            raise Changed("there already")

    def delete(self, key: str) -> None:
        """Remove an object; nothing where there is none."""
        try:
            translated(lambda: self._client.delete(key))
        except Missing:
            return

    def stored(self, key: str) -> Stored:
        """What is there."""
        found = translated(lambda: self._client.info(key, strict=False))
        if found.type != "file":
            raise Missing(found.type)
        return Stored(int(found.content_length), (found.metadata or {}).get(CHECKSUM))

    def abort_uploads(self, key: str) -> int:
        """None: profiles do not tell of uploads that never ended. Stores have rules that remove their parts."""
        del key
        return 0
