"""Types of the native kernels; csrc/bindings.cc is the source."""

import numpy as np
from numpy.typing import NDArray

def offsets_from_lengths(lengths: NDArray[np.int64], scale: int = 1, start: int = 0) -> NDArray[np.int64]: ...

# ---- JSON arrays ----
def scan_json_array(
    block: NDArray[np.uint8], depth: int, in_string: bool, escaped: bool
) -> tuple[NDArray[np.int64], int, bool, bool]: ...
