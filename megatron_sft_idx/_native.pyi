"""Types of the native kernels; csrc/bindings.cc is the source."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def offsets_from_lengths(lengths: NDArray[np.int64], scale: int = 1, start: int = 0) -> NDArray[np.int64]: ...
def stage_shapes(
    lengths: NDArray[np.int64],
    sequences: NDArray[np.int64],
    starts: NDArray[np.int64],
    tokens: int,
    capacity: int,
    sequence_multiple: int,
    starts_out: NDArray[np.uint32],
) -> tuple[int, int, int]: ...
def stage_tokens(
    tokens: NDArray[Any],
    lengths: NDArray[np.int64],
    sequences: NDArray[np.int64],
    starts: NDArray[np.int64],
    out: NDArray[Any],
) -> None: ...
def stage_mask(
    mask: NDArray[Any],
    lengths: NDArray[np.int64],
    sequences: NDArray[np.int64],
    starts: NDArray[np.int64],
    token_aligned: bool,
    out: NDArray[Any],
) -> tuple[int, int, int]: ...
def gather_sequences(
    source: NDArray[Any], offsets: NDArray[np.int64], order: NDArray[np.int64], out: NDArray[Any]
) -> None: ...
def absolute_offsets(
    sequence_offsets: NDArray[np.int64], token_offsets: NDArray[np.int64], starts: NDArray[np.uint32]
) -> NDArray[np.int64]: ...
