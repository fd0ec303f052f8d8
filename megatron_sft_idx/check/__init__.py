"""Check a shard's files against every rule of FORMAT.md, and restore files from the remaining ones.

``rules`` has the checks and their findings, ``pack_walk`` reads files and walks their packs, ``verify`` combines both
into a report. ``rebuild`` finds the damage and lets ``restore`` or ``derive`` write new files, with pack lengths from
``lengths``. Only ``rebuild`` may change files here, and it must not touch a good one.
"""

from megatron_sft_idx.check.rebuild import FileState, Rebuilt, rebuild
from megatron_sft_idx.check.restore import GivenFacts
from megatron_sft_idx.check.rules import Finding
from megatron_sft_idx.check.verify import Report, verify_shard
from megatron_sft_idx.storage.progress import Advance, Watch
