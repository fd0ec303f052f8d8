"""A live catalog: a folder of numbered shards that training reads while they are still being made.

::

    shard-000000.*        shards, six digits at least, each published atomically
    _producer.json        ProducerState: alive, what is published, limits, how far the input is read
    _END.json             how many shards there are; written once, last
    _acks/NAME/           Ack: how far each rank of consumer NAME has trained, as of its last checkpoint

Whoever reads here must expect that everything may be gone, torn or hostile a moment later.
"""

from megatron_sft_idx.catalog.acks import (
    Ack,
    Base,
    Leftover,
    ack_folder,
    completed,
    read_acks,
    require_consumer,
    write_ack,
)
from megatron_sft_idx.catalog.folder import Catalog, shard_name
from megatron_sft_idx.catalog.patience import Patience
from megatron_sft_idx.catalog.producer_state import Limits, ProducerState, default_max_sequences
from megatron_sft_idx.catalog.watch import CatalogWatch

__all__ = [
    "Ack",
    "Base",
    "Catalog",
    "CatalogWatch",
    "Leftover",
    "Limits",
    "Patience",
    "ProducerState",
    "ack_folder",
    "completed",
    "default_max_sequences",
    "read_acks",
    "require_consumer",
    "shard_name",
    "write_ack",
]
