"""Is a shard whole, and make it whole: every rule of FORMAT.md held against files, and files brought back.

``rules`` says what is broken, ``pack_walk`` reads files once and walks their packs; ``verify`` and ``rebuild`` are
built on both. ``restore`` brings files back by pack lengths, which ``lengths`` reads from what is left of indexes and
``infer`` finds in the data. What lives here changes no file but through ``rebuild``, and that none which is good.
"""

from megatron_sft_idx.check.rebuild import FileState, Rebuilt, rebuild
from megatron_sft_idx.check.restore import GivenFacts
from megatron_sft_idx.check.rules import Finding
from megatron_sft_idx.check.verify import Report, verify_shard
from megatron_sft_idx.storage.progress import Advance, Watch
