"""Bytes in object stores: ``s3://bucket/key`` and ``msc://profile/key``.

``paths`` takes paths apart, a transport (``s3``, ``s3_obstore``, ``msc``) makes one attempt at one request, ``store``
retries under the bound of ``retry``, checks what came and words errors, ``threads`` makes many requests at once,
``array`` is an object as an array, ``listing`` knows folders and globs.
Endpoints and credentials come from where each library looks for them; none is ever put into a message.
"""

from megatron_sft_idx.storage.remote.array import RemoteArray
from megatron_sft_idx.storage.remote.paths import RemotePath, is_remote
from megatron_sft_idx.storage.remote.retry import RetryPolicy
from megatron_sft_idx.storage.remote.store import ObjectStore, RemoteStore, forget_stores, open_store
from megatron_sft_idx.storage.remote.transport import ObjectInfo

__all__ = [
    "ObjectInfo",
    "ObjectStore",
    "RemoteArray",
    "RemotePath",
    "RemoteStore",
    "RetryPolicy",
    "forget_stores",
    "is_remote",
    "open_store",
]
