"""Train on data that is still being produced: a producer publishes numbered shards, and ranks read them as they appear.

The folder of the shards is a catalog. After a checkpoint, ranks acknowledge what they have read, so that it may be
removed. Chunks of JSON lines are read in the same way. Begin with ``live_order``, then ``acks``, ``live_walk`` and
``live_loader``. Any file here may disappear, be incomplete or be malicious. The common part of producers and consumers
is exported here and needs no torch; import the loader from its module.
"""

from megatron_sft_idx.live.acks import (
    Ack,
    ack_folder,
    completed,
    read_acks,
    require_consumer,
    write_ack,
)
from megatron_sft_idx.live.catalog import (
    END,
    PRODUCER,
    Catalog,
    Limits,
    ProducerState,
    State,
    default_max_sequences,
    shard_name,
)
from megatron_sft_idx.live.documents import Record
from megatron_sft_idx.live.live_order import Deal, Item
from megatron_sft_idx.live.waiting import Settling, Stopped, Unchanged, Waiter, looks, patiently, status_of
