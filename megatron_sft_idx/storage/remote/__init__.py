"""Bytes in object stores: ``s3://bucket/key`` and ``msc://profile/key``.

``s3`` and ``msc`` make one attempt at one request; ``transport`` says what that gives, and repeats it. ``store`` takes
paths apart, makes many requests at once, checks answers and words errors; it has objects as arrays and as files too.
Endpoints and credentials come from where each library looks for them. No message may contain them.
"""

from megatron_sft_idx.storage.remote.store import RemoteArray, RemotePath, RemoteStore, forget_stores, open_store
from megatron_sft_idx.storage.remote.transport import ObjectInfo, RetryPolicy
