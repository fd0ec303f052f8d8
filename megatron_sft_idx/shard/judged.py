"""Columns that say which answers are bad: of preference pairs and of KTO. Without them, all answers look good."""

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

# The column of KTO's labels, as preprocess writes it. A column ``label`` of another kind is anybody's.
_KTO_LABEL = ColumnSpec("sequence", np.uint8)
_JUDGED = {"pair": "preference pairs", "label": "KTO labels"}
_IN_COLUMNS = "ask for it in columns, and use a loss that takes it, such as training.losses.dpo_losses"


def require_judged(
    where: str,
    names: Collection[str],
    spec_of: Callable[[str], ColumnSpec],
    metadata: Mapping[str, Any],
    columns: Collection[str],
    remedy: str | Mapping[str, str] = _IN_COLUMNS,
) -> None:
    """FormatError where a column says that answers are bad, and is not among those that are asked for.

    Args:
        where: the shard or file, for the error.
        names: of the columns that it has.
        spec_of: gives the spec of the column of a name; called where the name alone does not tell.
        metadata: of its header. Where they do not say of which kind its rows were, as those of a merged shard may not,
            a column ``label`` of the kind that KTO's is of is taken to be that.
        columns: names of those that are asked for.
        remedy: what to do about it; or that by the name of the column.
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
    """As ``require_judged``, for a shard and the columns that it was written with.

    A header that was rebuilt does not list these any more, so those that lie beside it count.
    """
    paths, names = ShardPaths.of(prefix), {*listed_columns(header.metadata)}
    if header.rebuilt:
        names |= {name for name in _JUDGED if has_column(paths, header, name)}

    def spec_of(name: str) -> ColumnSpec:
        return open_column(paths, name, header, "reopen").spec

    require_judged(prefix, names, spec_of, header.metadata, columns, remedy)
