"""``X.upload``: which shard is being uploaded to a remote prefix.

Objects are replaced one by one, so two uploads of different shards to one prefix would mix their files. Each first
makes this object, which one of them can; whoever finds another shard's leaves. Uploads of the same shard do not
disturb each other. One that was killed leaves its claim behind: the next one of the same shard takes it over.
"""

from __future__ import annotations

import json

import xxhash

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage.remote import ObjectStore
from megatron_sft_idx.storage.remote.files import ObjectWriter

__all__ = ["Claim"]

_VERSION = 1
_MAX_NBYTES = 4096
_ATTEMPTS = 5


class Claim:
    """A shard's right to a remote prefix.

    Args:
        store: to read with.
        writer: to write with.
        key: of the prefix.
        path: of the prefix, as people write it.
        shard_id: of the shard that is uploaded.
    """

    def __init__(self, store: ObjectStore, writer: ObjectWriter, key: str, path: str, shard_id: bytes) -> None:
        self._store, self._writer, self._key, self._path = store, writer, key + ".upload", path + ".upload"
        self._shard_id = shard_id.hex()

    def take(self, *, overwrite: bool = False) -> None:
        """Make the claim, or find that it is held by an upload of the same shard.

        Raises:
            FormatError: another shard holds it, and ``overwrite`` is False; or something that is no claim is there.
        """
        data = json.dumps({"version": _VERSION, "shard_id": self._shard_id}).encode()
        for _ in range(_ATTEMPTS):
            self._writer.create(self._key, data, xxhash.xxh3_128_hexdigest(data))
            # Read even where it was made just now: some stores let two make one object, and the later one stays.
            held = self._read()
            if held == self._shard_id:
                return
            if held == "":
                raise FormatError(
                    f"{self._path}: an object that is no claim of an upload is here, and is never replaced; choose"
                    " another prefix, or remove it yourself"
                )
            if held is not None and not overwrite:
                break
            if held is not None:
                self._writer.delete(self._key)
        raise FormatError(
            f"{self._path}: another shard is being uploaded to this prefix, or such an upload was killed; wait for it,"
            " or pass overwrite (--overwrite) if none is at work any more"
        )

    def release(self) -> None:
        """Give it up, if it is still this shard's."""
        if self._read() == self._shard_id:
            self._writer.delete(self._key)

    def _read(self) -> str | None:
        """The shard that holds the claim, None for nobody; what cannot be read is somebody else's."""
        found = self._store.head(self._key)
        if found is None:
            return None
        if found.nbytes > _MAX_NBYTES:
            return ""
        try:
            held = json.loads(bytes(self._store.read(self._key, 0, found.nbytes)))
        except ValueError:
            return ""
        shard_id = held.get("shard_id") if isinstance(held, dict) and held.get("version") == _VERSION else None
        return shard_id if isinstance(shard_id, str) else ""
