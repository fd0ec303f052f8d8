"""What is left of a shard, to a shard again: indexes from each other, from the data, or from a killed build's journal.

``survey`` finds out what is good. ``restore`` works under a good header, ``derive`` without one: ``lengths``, ``packs``
and ``data`` read what is there, ``ends`` finds lengths that nobody wrote down, ``salvage`` proves what a damaged header
said. ``replace`` puts files in their places.
"""

from megatron_sft_idx.rebuild.core import FileState, Report, rebuild
from megatron_sft_idx.rebuild.options import Known
from megatron_sft_idx.rebuild.watch import Advance, Watch

__all__ = ["Advance", "FileState", "Known", "Report", "Watch", "rebuild"]
