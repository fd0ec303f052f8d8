// How few packs could be enough.
#pragma once

#include <cstdint>

#include "packing/patterns.h"

namespace sft_idx::packing {

// No plan has fewer packs. The largest of: the sequences over the cap, the total size over the capacity, and dual
// feasible functions: maps f of sizes such that sizes that fit one pack still sum to at most one after f, which makes
// sum(f) a bound. Used are Martello and Toth's L2 (1990) and Fekete and Schepers' u^(k) and phi^(eps) (2001).
std::int64_t lower_bound(const Problem& problem);

}  // namespace sft_idx::packing
