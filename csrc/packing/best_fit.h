// Best fit decreasing, on size classes.
#pragma once

#include "packing/patterns.h"

namespace sft_idx::packing {

// Each size, largest first, goes into the fullest pack that still holds it: the same packs as item by item, found for
// all packs of equal free space at once, so that the cost follows the number of distinct sizes.
Patterns best_fit(const Problem& problem);

// First fit decreasing: each size, largest first, goes into the first pack opened that still holds it.
Patterns first_fit_decreasing(const Problem& problem);

}  // namespace sft_idx::packing
