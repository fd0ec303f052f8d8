"""The layout of a column file, ``X.<name>.col``: values next to the tokens, one row per token, sequence or pack.

The file begins with a header of the same form as that of ``.seq.idx``, with 128 bytes of fixed fields (``COLUMN``). It
holds the id of the shard that the column belongs to, and the checksum of the values. The values follow up to the end of
the file: rows x width items, row by row. A shard that was written with a column lists the checksum of the column's
header. Because the header holds the checksum of the values, this one checksum covers the whole file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.layout.files import MAX_COUNT, Check, HeaderForm, plain_array, require_dtype
from megatron_sft_idx.lines import shown_by_fields

Per = Literal["token", "sequence", "pack"]
Alignment = Literal["token", "label"]


def _checks(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[Check]:
    """Rule C4, about the fixed fields of a column's header."""
    alignments = tuple(_ALIGNMENTS.values()) if values["per"] == PER["token"] else (0,)
    return [
        ("per", "C4", values["per"] in PER.values(), "1 (token), 2 (sequence) or 3 (pack)"),
        ("dtype", "C4", values["dtype"] in COLUMN_DTYPES, f"1 to {len(COLUMN_DTYPES)}"),
        ("alignment", "C4", values["alignment"] in alignments, " or ".join(map(str, alignments))),
        ("zero", "C4", not values["zero"], "0"),
        ("width", "C4", 1 <= values["width"] <= MAX_WIDTH, f"1 to {MAX_WIDTH}"),
        ("rows", "C4", values["rows"] < MAX_COUNT, f"below {MAX_COUNT}"),
        ("zeros", "C4", not any(values["zeros"]), "zeros"),
        ("reserved", "C4", not any(values["reserved"]), "zeros"),
    ]


COLUMN = HeaderForm(
    "a column",
    b"\x89SFTCOL\n",
    1,
    "magic 8s, version I, header_nbytes I, shard_id 16s, per B, dtype B, alignment B, zero B, width I, rows Q,"
    "json_nbytes I, zeros 4s, checksum 16s, reserved 56s",
    ["C1", "C1", "C2", "C3", "C4", "C4"],
    _checks,
)
COLUMN_MAGIC, FIXED_NBYTES = COLUMN.magic, COLUMN.fixed_nbytes
MAX_WIDTH = 1 << 16
# The key of a shard's JSON block for the columns whose values were multiplied into the loss masks.
WEIGHTED_BY = "loss_weight_columns"
PER: dict[Per, int] = {"token": 1, "sequence": 2, "pack": 3}
# The loss mask has the alignment "label".
_ALIGNMENTS: dict[Alignment, int] = {"label": 1, "token": 2}
# Dtypes by code. 1 to 8 are Megatron's codes (megatron.core.datasets.indexed_dataset.DType), 9 and 10 are ours.
COLUMN_DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2", "<u4", "<f2"), 1)
}
_WHOLE = re.compile(r"[+-]?[0-9]+(?:\.0*)?")


def number_of(text: str) -> int | float:
    """Parse a number. Whole numbers, also with ``.0``, are exact; all others become the nearest float64.

    >>> number_of("9007199254740993.0"), number_of("0.5"), number_of("1e3")
    (9007199254740993, 0.5, 1000.0)
    """
    return (int(Decimal(text)) if _WHOLE.fullmatch(text) else 0) or float(text)  # -0.0 keeps its sign


@shown_by_fields
@dataclass(frozen=True)
class ColumnSpec:
    """The properties of a column without its values.

    Attributes:
        per: the unit of a row: a token, a sequence or a pack.
        dtype: dtype of the items, one of ``COLUMN_DTYPES``.
        width: number of items in a row: values are [rows] if it is 1, else [rows, width].
        alignment: for a column of tokens, what row j belongs to: ``token`` j, or the ``label`` at j, which is token j +
            1. Readers report the alignment and never shift values. It is ``token`` for all other columns.
        metadata: JSON object that is stored with the column.

    Raises:
        FormatError: the format does not allow one of the values.

    Example:
        >>> from megatron_sft_idx import Shard, ShardWriter
        >>> with ShardWriter("data/rated", columns={"score": ColumnSpec("sequence", np.float32)}) as writer:
        ...     writer.add_pack([5, 6, 7, 8, 9], [1, 1, 0, 1, 0], [0, 3], columns={"score": [0.5, 2.0]})
        >>> Shard("data/rated", columns=["score"])[0]["score"]
        array([0.5, 2. ], dtype=float32)
    """

    per: Per
    dtype: Any
    width: int = 1
    alignment: Alignment = "token"
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtype = require_dtype("column: dtype", self.dtype).newbyteorder("<")
        for attribute, value, choices in (
            ("per", self.per, get_args(Per)),
            ("alignment", self.alignment, get_args(Alignment)),
            ("dtype", dtype, [*COLUMN_DTYPES.values()]),
        ):
            if not isinstance(value, str | np.dtype) or value not in choices:
                found = value if attribute == "dtype" else brief(value)
                raise FormatError(f"column: unknown {attribute} {found}; choose one of {', '.join(map(str, choices))}")
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "alignment", self.alignment if self.per == "token" else "token")
        if isinstance(self.width, bool) or not isinstance(self.width, int) or not 1 <= self.width <= MAX_WIDTH:
            raise FormatError(f"column: width {brief(self.width)}: expected a whole number from 1 to {MAX_WIDTH}")
        COLUMN.nbytes(self.metadata)  # rejects metadata that cannot be stored

    @classmethod
    def of(
        cls,
        per: Per,
        values: NDArray[Any],
        *,
        alignment: Alignment = "token",
        metadata: Mapping[str, Any] | None = None,
    ) -> ColumnSpec:
        """Return the spec for a column with the values of an array, [rows] or [rows, width]."""
        return cls(per, values.dtype, values.shape[1] if values.ndim > 1 else 1, alignment, metadata or {})

    @property
    def header_nbytes(self) -> int:
        """Size of the file before the values, in bytes."""
        return COLUMN.nbytes(self.metadata)

    @property
    def row_nbytes(self) -> int:
        """Size of a row in bytes."""
        return int(self.dtype.itemsize) * self.width

    @property
    def kind(self) -> tuple[Per, str, int, Alignment]:
        """The spec without metadata.

        Columns of the same name can be joined or read together if their kinds are equal.
        """
        return self.per, self.dtype.str, self.width, self.alignment

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of an array with this number of rows: [rows] or [rows, width]."""
        return (rows,) if self.width == 1 else (rows, self.width)

    def array(self, name: str, values: ArrayLike, rows: int) -> NDArray[Any]:
        """Convert values to the column's dtype and shape, as they are stored.

        Raises:
            ValueError: the values have another shape, or do not fit the dtype.
        """
        try:
            array = plain_array(values)
        except ValueError as error:
            raise ValueError(f"column {name} {error}") from None
        if array.shape != self.shape(rows):
            raise ValueError(
                f"column {name} has shape {array.shape}; expected {self.shape(rows)}: one row per {self.per}"
            )
        if array.dtype == self.dtype:
            return np.ascontiguousarray(array, self.dtype)
        is_integer = self.dtype.kind in "iu"
        if array.dtype.kind not in ("iub" if is_integer else "iubf"):
            raise ValueError(f"column {name} has dtype {array.dtype}; expected {self.dtype}")
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(array, self.dtype)
        # Floating-point values are rounded. A value that is too large would become infinite.
        if (stored != array if is_integer else np.isinf(stored) & ~np.isinf(array)).any():
            raise ValueError(f"column {name} has values that do not fit into {self.dtype}; choose a larger dtype")
        return stored

    def encode(self) -> dict[str, Any]:
        """The spec as a JSON object."""
        code = next(code for code, dtype in COLUMN_DTYPES.items() if dtype == self.dtype)
        spec = {"per": self.per, "dtype": code, "width": self.width, "alignment": self.alignment}
        return spec | {"metadata": dict(self.metadata)}

    @classmethod
    def decode(cls, value: Any) -> ColumnSpec:
        """Return the spec for an object from ``encode``. ValueError: ``encode`` cannot have made this object."""
        try:
            dtype = COLUMN_DTYPES[value["dtype"]]
            return cls(value["per"], dtype, value["width"], value["alignment"], {**value["metadata"]})
        except (FormatError, KeyError, TypeError) as error:
            raise ValueError(f"not a column: {error}") from None


def weighted_by(metadata: Mapping[str, Any]) -> list[str]:
    """Return the columns that were multiplied into the masks of a shard, as its JSON block lists them."""
    names = metadata.get(WEIGHTED_BY)
    return [str(name) for name in names] if isinstance(names, list) else []


def is_source(spec: ColumnSpec) -> bool:
    """Return whether a column has the form of ``source``: (file, row) per sequence, and file names as metadata."""
    files = spec.metadata.get("files")
    names_files = isinstance(files, list) and all(
        isinstance(file, dict) and isinstance(file.get("name"), str) for file in files
    )
    return names_files and spec.kind[:3] == ("sequence", "<u4", 2)


def check_named_spec(name: str, spec: ColumnSpec) -> None:
    """Raise FormatError if a column named ``source`` or ``pair`` does not have the required form (C9, C10)."""
    if name == "source" and not is_source(spec):
        raise FormatError(
            "column source: expected uint32 values of width 2 per sequence, and metadata with 'files', a list of"
            " objects with a 'name' (rule C9); choose another name for other values"
        )
    if name == "pair" and spec.kind != PAIR.kind:
        raise FormatError(
            "column pair: expected uint32 values of width 2 per sequence (rule C10); choose another name for other"
            " values"
        )


class NamedRows:
    """Check the rows of a ``source`` or ``pair`` column as they arrive in order (rules C9 and C10).

    Columns with any other name accept all rows.

    Example:
        >>> rows = NamedRows("pair", PAIR)
        >>> rows.require(np.array([[7, 0]], np.uint32))
        >>> rows.accept(np.array([[7, 0]], np.uint32))
        >>> rows.require(np.array([[8, 1]], np.uint32))
        Traceback (most recent call last):
        ...
        ValueError: column pair: sequences 0 and 1 have [[7, 0], [8, 1]], expected [n, 0] and [n, 1] (rule C10)
    """

    def __init__(self, name: str, spec: ColumnSpec) -> None:
        self._name, self._num_rows = name, 0
        self._num_files = len(spec.metadata["files"]) if name == "source" else 0
        self._half_pair = np.empty((0, 2), np.uint32)  # the chosen sequence of a pair that is still incomplete

    def require(self, rows: NDArray[Any]) -> None:
        """Raise ValueError if the next rows break a rule. The rows count only after ``accept``."""
        if self._name == "source" and rows[:, 0].max(initial=0) >= self._num_files:
            at = int(np.argmax(rows[:, 0] >= self._num_files))
            raise ValueError(
                f"column source: sequence {self._num_rows + at} is from file {rows[at, 0]}, expected a number below"
                f" {self._num_files} (rule C9)"
            )
        if self._name == "pair":
            both = np.concatenate([self._half_pair, rows])
            whole = both[: len(both) // 2 * 2]
            if (torn := torn_pairs(whole)).size or (len(both) % 2 and both[-1, 1] != 0):
                at = int(torn[0]) if torn.size else len(both) - 1
                first = self._num_rows - len(self._half_pair) + at
                raise ValueError(
                    f"column pair: sequences {first} and {first + 1} have {both[at : at + 2].tolist()}, expected [n,"
                    " 0] and [n, 1] (rule C10)"
                )

    def accept(self, rows: NDArray[Any]) -> None:
        """Count rows that ``require`` has accepted."""
        self._num_rows += len(rows)
        if self._name == "pair":
            both = np.concatenate([self._half_pair, rows])
            self._half_pair = both[len(both) // 2 * 2 :].copy()

    def finish(self) -> None:
        """Raise ValueError if rows are missing at the end."""
        if len(self._half_pair):
            raise ValueError(
                f"column pair: the last pair has no rejected sequence, {self._half_pair.tolist()} (rule C10)"
            )


def num_rows_in(of: Any, per: Per) -> int:
    """Return the number of rows of a column: one per token, sequence or pack counted by ``of``, e.g. a ``Header``."""
    return {"token": int(of.num_tokens), "sequence": int(of.num_sequences), "pack": int(of.num_packs)}[per]


# The column ``pair``: the number of a pair, and 0 for its chosen sequence or 1 for its rejected one.
PAIR = ColumnSpec("sequence", np.uint32, 2)


def torn_pairs(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Return which of the rows 0, 2, 4, ... of a column ``pair`` [n, 2] do not begin a complete pair, as int64 indices.

    A complete pair is two neighbouring rows such as (7, 0) and (7, 1): the chosen, then the rejected sequence of pair
    7.
    """
    chosen, rejected = rows[: len(rows) // 2 * 2 : 2], rows[1::2]
    torn = (chosen[:, 0] != rejected[:, 0]) | (chosen[:, 1] != 0) | (rejected[:, 1] != 1)
    return 2 * np.flatnonzero(np.append(torn, np.ones(len(rows) % 2, bool)))


@dataclass(frozen=True)
class ColumnHeader:
    """The contents of the header of a column.

    Attributes:
        spec: dtype, width, unit of a row, metadata.
        shard_id: id of the shard that the column belongs to, 16 bytes.
        rows: number of rows of the column.
        checksum: xxh3_128 of all values, 16 bytes.
    """

    spec: ColumnSpec
    shard_id: bytes
    rows: int
    checksum: bytes

    @property
    def nbytes(self) -> int:
        """Size of the whole file in bytes."""
        return self.spec.header_nbytes + self.rows * self.spec.row_nbytes

    def encode(self) -> bytes:
        """Encode the header. Its last 16 bytes are its checksum, which the shard lists."""
        alignment = _ALIGNMENTS[self.spec.alignment] if self.spec.per == "token" else 0
        values = self.spec.encode() | {"per": PER[self.spec.per], "alignment": alignment}
        del values["metadata"]
        values |= {"shard_id": self.shard_id, "rows": self.rows, "checksum": self.checksum}
        return COLUMN.encode(values, self.spec.metadata)

    @classmethod
    def decode(cls, raw: bytes, path: str) -> ColumnHeader:
        """Decode the header at the start of a file. See ``HeaderForm.broken_rules`` for ``raw``.

        Raises:
            CorruptShardError: a rule of FORMAT.md is broken (C1 to C4).
            UnsupportedVersionError: another version.
        """
        COLUMN.require_sound(raw, path, "restore it")
        values = COLUMN.values(raw)
        per = next(name for name, code in PER.items() if code == values["per"])
        alignment: Alignment = "label" if values["alignment"] == _ALIGNMENTS["label"] else "token"
        dtype, metadata = COLUMN_DTYPES[values["dtype"]], COLUMN.metadata(raw)
        spec = ColumnSpec(per, dtype, values["width"], alignment, metadata or {})
        return cls(spec, values["shard_id"], values["rows"], values["checksum"])
