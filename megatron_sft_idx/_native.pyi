"""Types of the native kernels; csrc/bindings/ is the source."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def offsets_from_lengths(lengths: NDArray[np.int64], scale: int = 1, start: int = 0) -> NDArray[np.int64]: ...

_PackIndex = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32], int]
_PackIndexes = list[_PackIndex] | list[_PackIndex | None]

def pack_segments(
    indexes: _PackIndexes,
    shards: NDArray[np.int64],
    packs: NDArray[np.int64],
    limits: tuple[int, int, int] = ...,
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]: ...

class PackStage:
    def __init__(
        self,
        token_dtype: np.dtype[Any],
        mask_dtype: np.dtype[Any],
        capacity: int,
        sequence_multiple: int,
        room: int,
        vocab_size: int = 0,
    ) -> None: ...
    def add(
        self,
        tokens: NDArray[Any],
        mask: NDArray[Any],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        sequences: NDArray[np.int64],
        token_aligned: bool,
    ) -> bool: ...
    def add_one(
        self, tokens: NDArray[Any], mask: NDArray[Any], starts: NDArray[np.int64], token_aligned: bool
    ) -> bool: ...
    def count(
        self,
        tokens: NDArray[Any],
        mask: NDArray[Any],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        sequences: NDArray[np.int64],
    ) -> None: ...
    def clear(self) -> None: ...
    tokens: memoryview
    mask: memoryview
    starts: memoryview
    records: memoryview
    num_packs: int
    num_sequences: int
    num_tokens: int
    num_trained_tokens: int
    num_masked_packs: int
    dropped_first_tokens: int
    longest_pack: int
    longest_padded_pack: int
    most_sequences: int

def gather_sequences(
    source: NDArray[Any],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    places: NDArray[np.int64],
    out: NDArray[Any],
) -> None: ...
def absolute_offsets(
    sequence_offsets: NDArray[np.int64], token_offsets: NDArray[np.int64], starts: NDArray[np.uint32]
) -> NDArray[np.int64]: ...

# ---- JSON arrays ----
def scan_json_array(
    block: NDArray[np.uint8], depth: int, in_string: bool, escaped: bool
) -> tuple[NDArray[np.int64], int, bool, bool]: ...

# ---- spans ----

def weigh_tokens(
    ids: NDArray[np.uint32],
    id_offsets: NDArray[np.int64],
    text: bytes,
    text_offsets: NDArray[np.int64],
    token_bytes: bytes,
    token_offsets: NDArray[np.int64],
    span_edges: NDArray[np.int64],
    span_weights: NDArray[np.float32],
    span_offsets: NDArray[np.int64],
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.uint8]]: ...

# ---- packing ----

_Patterns = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]

def packing_histogram(
    lengths: NDArray[np.int64], capacity: int, multiple: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]: ...
def packing_lower_bound(sizes: NDArray[np.int64], counts: NDArray[np.int64], capacity: int, most: int) -> int: ...
def packing_plan(
    sizes: NDArray[np.int64],
    counts: NDArray[np.int64],
    capacity: int,
    most: int,
    planner: str,
    seed: int,
    most_work: int = ...,
) -> _Patterns: ...
def packing_hand_out(
    lengths: NDArray[np.int64],
    multiple: int,
    sizes: NDArray[np.int64],
    pattern_offsets: NDArray[np.int64],
    entries: NDArray[np.int32],
    packs: NDArray[np.int64],
    seed: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def packing_first_fit_shuffle(
    lengths: NDArray[np.int64], capacity: int, multiple: int, most: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def packing_sequential(lengths: NDArray[np.int64], capacity: int, multiple: int, most: int) -> NDArray[np.int64]: ...
def packing_permutation(count: int, seed: int) -> NDArray[np.int64]: ...

# ---- micro-batches ----

# Tokens and masks, and what else is beside them.
_Arrays = tuple[NDArray[Any], ...]
_Shards = list[_Arrays] | list[_Arrays | None]
# What has a row, bytes of a row, rows of each shard, the place of each segment's or pack's rows, output.
_Column = tuple[int, int, tuple[NDArray[Any], ...], NDArray[np.int32], NDArray[np.int64], NDArray[Any]]

def assemble(
    shards: _Shards,
    offsets: NDArray[np.int64],
    segment_shards: NDArray[np.int32],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    multiple: int,
    pad_id: int,
    tokens: NDArray[Any],
    labels: NDArray[np.int64] | None,
    position_ids: NDArray[np.int64] | None,
    loss_mask: NDArray[Any],
    cu_seqlens: NDArray[np.int32],
    cu_seqlens_padded: NDArray[np.int32] | None,
    max_seqlen: NDArray[np.int32],
    columns: tuple[_Column, ...] = ...,
) -> None: ...
def will_need(array: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> int: ...
def check_pickle(data: NDArray[np.uint8]) -> int: ...
def parse_pickled_pairs(data: NDArray[np.uint8]) -> NDArray[np.int64]: ...

# ---- rules ----

# Rule, pack, position, found, expected.
_Breach = tuple[str, int, int, int | float, int]

class PackWalk:
    def __init__(self, *, sequences: int, tokens: int, capacity: int, multiple: int, most: int) -> None: ...
    def packs(self, token_offsets: NDArray[np.int64], sequence_offsets: NDArray[np.int64], count: int) -> None: ...
    def starts(self, starts: NDArray[np.uint32]) -> None: ...
    def mask(self, mask: NDArray[Any]) -> None: ...
    next_sequence: int
    wanted_sequences: int
    known: int
    breaches: list[_Breach]
    counts: dict[str, int]
    num_packs: int
    num_trained_tokens: int
    num_masked_packs: int
    longest_pack: int
    longest_padded_pack: int
    most_sequences: int

def first_breach(
    tokens: NDArray[Any],
    mask: NDArray[Any],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    sequences: NDArray[np.int64],
    token_aligned: bool,
    capacity: int,
    token_dtype: np.dtype[Any],
    mask_dtype: np.dtype[Any],
) -> tuple[_Breach, str] | None: ...

# ---- what is counted and compared in sequences ----

def count_positive(values: NDArray[Any], bounds: NDArray[np.int64]) -> NDArray[np.int64]: ...
def hash_runs(values: NDArray[Any], bounds: NDArray[np.int64]) -> NDArray[np.uint64]: ...

# ---- files that are opened for each read ----

class StampedFile:
    def __init__(self, path: bytes) -> None: ...
    def read(self, offset: int, out: NDArray[Any]) -> bool: ...
    nbytes: int

def read_ranges(
    files: tuple[StampedFile, ...], offsets: NDArray[np.int64], nbytes: NDArray[np.int64], out: NDArray[Any]
) -> int: ...
def advise_ranges(files: tuple[StampedFile, ...], offsets: NDArray[np.int64], nbytes: NDArray[np.int64]) -> int: ...
def resident_nbytes(array: NDArray[Any]) -> int: ...
