"""Types of the native kernels; csrc/bindings.cc is the source."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def offsets_from_lengths(lengths: NDArray[np.int64], scale: int = 1, start: int = 0) -> NDArray[np.int64]: ...
class PackStage:
    def __init__(
        self, token_dtype: np.dtype[Any], mask_dtype: np.dtype[Any], capacity: int, sequence_multiple: int, room: int
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
    def promote_mask(self) -> None: ...
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
    stops: NDArray[np.int64],
    order: NDArray[np.int64],
    out: NDArray[Any],
) -> None: ...
def absolute_offsets(
    sequence_offsets: NDArray[np.int64], token_offsets: NDArray[np.int64], starts: NDArray[np.uint32]
) -> NDArray[np.int64]: ...
