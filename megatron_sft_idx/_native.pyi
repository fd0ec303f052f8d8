"""Types of the native kernels; csrc/bindings.cc is the source."""

import numpy as np
from numpy.typing import NDArray

def offsets_from_lengths(lengths: NDArray[np.int64], scale: int = 1, start: int = 0) -> NDArray[np.int64]: ...

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
    whole_characters: bool,
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.uint8]]: ...
