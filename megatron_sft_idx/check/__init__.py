"""Checks of a shard's files against every rule of FORMAT.md, and files brought back from what is left of others.

``rules`` has the checks and their findings, ``pack_walk`` reads files and walks their packs, ``verify`` makes a report
of both. ``rebuild`` finds what is wrong and has ``restore`` or ``derive`` write it anew, by pack lengths from
``lengths``. Nothing here may change a file but ``rebuild``, and that may not touch a good one.
"""

from megatron_sft_idx.check.rebuild import FileState, Rebuilt, rebuild
from megatron_sft_idx.check.restore import GivenFacts
from megatron_sft_idx.check.rules import Finding
from megatron_sft_idx.check.verify import Report, verify_shard
from megatron_sft_idx.storage.progress import Advance, Watch
