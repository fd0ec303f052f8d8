"""Columns that mark bad answers, in preference pairs and KTO data.

Without them, all answers would be trained as good.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import listed_columns
from megatron_sft_idx.shard.columns import open_column
from megatron_sft_idx.shard.opening import has_column

# The column of KTO labels, as preprocess writes it. A column ``label`` of another kind has some other meaning.
_KTO_LABEL = ColumnSpec("sequence", np.uint8)
_JUDGED = {"pair": "preference pairs", "label": "KTO labels"}
_IN_COLUMNS = "request the column with columns=, and use a loss that needs it, such as training.losses.dpo_losses"


def require_judged(
    where: str,
    names: Collection[str],
    spec_of: Callable[[str], ColumnSpec],
    metadata: Mapping[str, Any],
    columns: Collection[str],
    remedy: str | Mapping[str, str] = _IN_COLUMNS,
) -> None:
    """Raise FormatError if a column marks bad answers and is not among the requested columns.

    Args:
        where: the shard or file, for the error message.
        names: names of its columns.
        spec_of: returns the spec of a column by name; called only if the name is not enough.
        metadata: metadata of its header. If it does not have the kind of the rows (a merged shard may not), a column
            ``label`` of the same kind as KTO's is treated as KTO labels.
        columns: names of the requested columns.
        remedy: the remedy for the message, or remedies by column name.
    """
    options = metadata.get("options")
    row_kind = options.get("row_kind", "kto") if isinstance(options, dict) else "kto"
    missing = {*_JUDGED}.intersection(names).difference(columns)
    if "label" in missing and (row_kind != "kto" or spec_of("label").kind != _KTO_LABEL.kind):
        missing.remove("label")
    if missing:
        name = min(missing)
        raise FormatError(
            f"{where}: holds {_JUDGED[name]} (column '{name}'), so a plain loss would also train on the"
            f" rejected answers; {remedy if isinstance(remedy, str) else remedy[name]}"
        )


def require_shard_judged(
    prefix: str, header: Header, columns: Collection[str], remedy: str | Mapping[str, str] = _IN_COLUMNS
) -> None:
    """Call ``require_judged`` for a shard and the columns that it was written with.

    A rebuilt header no longer lists these columns, so the columns next to the shard are used instead.
    """
    paths, names = ShardPaths.of(prefix), {*listed_columns(header.metadata)}
    if header.rebuilt:
        names |= {name for name in _JUDGED if has_column(paths, header, name)}

    def spec_of(name: str) -> ColumnSpec:
        return open_column(paths, name, header, "reopen").spec

    require_judged(prefix, names, spec_of, header.metadata, columns, remedy)
