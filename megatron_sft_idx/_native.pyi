"""Types of the native kernels; csrc/bindings.cc is the source."""

import numpy as np
from numpy.typing import NDArray

def offsets_from_lengths(lengths: NDArray[np.int64], scale: int = 1, start: int = 0) -> NDArray[np.int64]: ...

# ---- packing ----

_Patterns = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]

def packing_histogram(
    lengths: NDArray[np.int64], capacity: int, multiple: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]: ...
def packing_lower_bound(sizes: NDArray[np.int64], counts: NDArray[np.int64], capacity: int, most: int) -> int: ...
def packing_plan(
    sizes: NDArray[np.int64], counts: NDArray[np.int64], capacity: int, most: int, planner: str, seed: int
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
