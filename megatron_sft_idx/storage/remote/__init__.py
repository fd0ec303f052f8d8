"""Bytes in object stores: ``s3://bucket/key`` and ``msc://profile/key``.

A transport (``s3``, ``msc``) makes one attempt at one request; ``store`` takes paths apart, retries under a bound,
makes many requests at once, checks what came, words errors, and has objects as arrays and files that are read.
Endpoints and credentials come from where each library looks for them; none is ever put into a message.
"""

from megatron_sft_idx.storage.remote.store import (
    ObjectInfo,
    RemoteArray,
    RemotePath,
    RemoteStore,
    RetryPolicy,
    forget_stores,
    open_store,
)
