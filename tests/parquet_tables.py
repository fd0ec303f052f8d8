"""Tables of packs, written with pyarrow like other tools do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sample_packs import Sample


def table_of(
    packs: Sequence[Sample], ids: Any = None, mask: Any = None, starts: Any = None, masks: Any = None
) -> pa.Table:
    """Return a table of the three columns, by default with Bridge's types."""
    return pa.table(
        {
            "input_ids": pa.array([p.tokens for p in packs], ids or pa.list_(pa.int64())),
            "loss_mask": pa.array(masks or [p.label_mask for p in packs], mask or pa.list_(pa.int8())),
            "seq_start_id": pa.array([p.starts for p in packs], starts or pa.list_(pa.int64())),
        }
    )


def write_groups(path: Path, table: pa.Table, sizes: Sequence[int], **options: Any) -> Path:
    """Write a table in row groups of these sizes, which may be 0."""
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        first = 0
        for size in sizes:
            writer.write_table(table.slice(first, size), row_group_size=max(size, 1))
            first += size
    return path
