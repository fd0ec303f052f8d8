"""``preprocess`` on a Ray cluster: the same bytes as on one machine.

::

    driver                          tasks, anywhere                     shared file system
    cut files into stretches   ->   tokenise a stretch              ->  a part: lengths, ids, masks
    plan all packs on lengths  <-   lengths, four bytes a sequence
    share the plan out         ->   gather an output shard          <-  parts
                                                                    ->  five files a shard

Nothing but stretches, lengths, counts and the plan goes through the driver. Every task may be done twice: parts and
shards appear whole or not at all, and say what they were made from.
"""

from megatron_sft_idx.preprocess.distributed.driver import preprocess_on_ray
from megatron_sft_idx.preprocess.distributed.state import RunFolder

__all__ = ["RunFolder", "preprocess_on_ray"]
