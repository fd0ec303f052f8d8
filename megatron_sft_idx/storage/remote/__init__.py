"""Bytes in object stores: ``s3://bucket/key`` and ``msc://profile/key``.

A transport (``s3``, ``msc``) makes one attempt at one request. ``store`` takes paths apart, retries for a limited time,
makes many requests at once, checks answers and words errors; it also has objects as arrays and as files to read.
Endpoints and credentials come from where each library looks for them. No message may contain them.
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
