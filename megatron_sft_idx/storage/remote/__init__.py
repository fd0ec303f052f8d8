"""Object stores: ``s3://bucket/key`` and ``msc://profile/key``.

``s3`` and ``msc`` make one attempt at one request. ``transport`` defines their results and errors, and retries.
``store`` parses paths, makes many requests in parallel, checks responses, makes error messages, and provides objects as
arrays and files. Each library finds endpoints and credentials in its usual places. No message may contain them.
"""

from megatron_sft_idx.storage.remote.store import RemoteArray, RemotePath, RemoteStore, forget_stores, open_store
from megatron_sft_idx.storage.remote.transport import ObjectInfo, RetryPolicy
