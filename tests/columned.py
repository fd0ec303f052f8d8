"""Shards with all kinds of columns. Each value shows the place it belongs to."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sample_packs import Sample

from megatron_sft_idx.layout.column import COLUMN_DTYPES, PAIR, ColumnSpec
from megatron_sft_idx.shard import Shard, ShardWriter, build_options, columns, writer

# The comparisons of --where, in Python.
OPERATORS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
FILES = {"files": [{"name": f"{letter}.jsonl", "fingerprint": letter * 32} for letter in "abc"]}
SOURCE = ColumnSpec("sequence", np.uint32, 2, metadata=FILES)
# Each unit of rows, and all dtypes, with narrow and wide rows.
SPECS: dict[str, ColumnSpec] = {
    "source": SOURCE,
    **{
        f"{per}_{dtype.name}": ColumnSpec(per, dtype, 1 + code % 4, "label" if code % 2 else "token", {"code": code})
        for code, dtype in COLUMN_DTYPES.items()
        for per in (("token", "sequence", "pack")[code % 3],)  # type: ignore[assignment]
    },
}


def values_of(spec: ColumnSpec, first: int, rows: int) -> NDArray[Any]:
    """Return rows that contain their own number, as far as the dtype can hold it."""
    numbers = np.arange(first, first + rows)
    if spec.kind == SOURCE.kind and spec.metadata.get("files"):
        return np.stack([numbers % len(spec.metadata["files"]), numbers], 1).astype(np.uint32)
    if spec == PAIR:
        return np.stack([numbers // 2, numbers % 2], 1).astype(np.uint32)
    wide = (numbers[:, None] * spec.width + np.arange(spec.width)) % 120
    return (wide if spec.width > 1 else wide[:, 0]).astype(spec.dtype)


def write_columned(
    prefix: str | os.PathLike[str],
    packs: Sequence[Sample],
    specs: Mapping[str, ColumnSpec] = SPECS,
    *,
    first: int = 0,
    **options: Any,
) -> Any:
    """Write packs with columns. The values count tokens, sequences and packs, starting at ``first``."""
    counts = {"token": first, "sequence": first, "pack": first}
    with ShardWriter(prefix, columns=specs, **{"durable": False, **options}) as writer:
        for pack in packs:
            rows = {"token": len(pack.tokens), "sequence": len(pack.starts), "pack": 1}
            columns = {name: values_of(spec, counts[spec.per], rows[spec.per]) for name, spec in specs.items()}
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts, columns=columns)
            counts = {per: count + rows[per] for per, count in counts.items()}
        return writer.finalize()


class _AnyRows:
    """A replacement for ``NamedRows`` that accepts all rows."""

    def __init__(self, *_: object) -> None:
        pass

    def require(self, rows: object) -> None:
        pass

    accept = require

    def finish(self) -> None:
        pass


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Allow columns named ``source`` or ``pair`` that break C9 or C10, as another program could write them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (columns, writer):
            patch.setattr(module, "NamedRows", _AnyRows)
        for module in (columns, build_options):
            patch.setattr(module, "check_named_spec", lambda name, spec: None)
        yield


def assert_columns(shard: Shard, specs: Mapping[str, ColumnSpec] = SPECS, *, first: int = 0) -> None:
    """Check that all columns are complete and as written by ``write_columned``."""
    assert sorted(shard.columns) == sorted(specs)
    for name, spec in specs.items():
        column = shard.columns[name]
        assert column.spec == spec, name
        expected = values_of(spec, first, len(column))
        np.testing.assert_array_equal(column.values[:], expected, strict=True)
