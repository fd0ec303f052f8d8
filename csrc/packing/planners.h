// From lengths to packs: planners, a lower bound of the number of packs, and the assignment of sequences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "packing/patterns.h"

namespace sft_idx::packing {

// ---- planners: from sizes to patterns ----

// Best fit decreasing: each size, largest first, goes into the fullest pack with room for it. The result is the same as
// item by item, but packs of equal free space are handled at once, so the cost depends on the number of distinct sizes.
Patterns best_fit(const Problem& problem);

// First fit decreasing: each size, largest first, goes into the first opened pack with room for it.
Patterns first_fit_decreasing(const Problem& problem);

enum class Mix {
  kAverage,  // m0: as many sequences per pack as keep the average of the remaining ones
  kFewest,   // m1: as few sequences per pack as fill it
};

constexpr std::uint64_t kMostWork = std::uint64_t{1} << 30;  // takes seconds

// A subset-sum heuristic in the manner of MBS' (Gupta and Ho 1999) with the sufficient average weight principle
// (SAWMBS: Fleszar and Charalambous, "Average-weight-controlled bin-oriented heuristics for the one-dimensional
// bin-packing problem", EJOR 2011): each pack gets the largest remaining sequence and is filled exactly. Its last two
// sequences are found by a two-sum over bitsets, the others are drawn in proportion to the remaining counts. A pattern
// is used several times, so the cost depends on the number of distinct sizes. Uses only integers, so the same seed
// gives the same plan on any machine.
//
// Hundreds of thousands of distinct sizes make each search slow. After `most_work` steps, which are counted, not timed,
// the remaining sequences are packed by best fit.
Patterns exact_fill(const Problem& problem, Mix mix, std::uint64_t seed, std::uint64_t most_work = kMostWork);

// A lower bound of the number of packs of any plan: the maximum of the number of sequences divided by the cap, the
// total size divided by the capacity, and bounds from dual feasible functions. These map sizes to f(size) such that
// sizes that fit into one pack sum to at most one, so sum(f) is a bound. Used are Martello and Toth's L2 (1990) and
// Fekete and Schepers' u^(k) and phi^(eps) (2001).
std::int64_t lower_bound(const Problem& problem);

// ---- sequences ----

// Fills offsets [packs + 1] and sequences [count], CSR: pack p holds sequences[offsets[p] .. offsets[p + 1]).
// The sequences of a class, and the packs, are shuffled with the seed.
// The patterns must use each class of the lengths exactly as often as it occurs; otherwise throws
// std::invalid_argument.
void hand_out(const std::int64_t* lengths, std::size_t count, std::int64_t multiple,
              const std::vector<std::int64_t>& sizes, const Patterns& patterns, std::uint64_t seed,
              std::int64_t* offsets, std::int64_t* sequences);

// First fit: each sequence, in an order shuffled with the seed, goes into the first opened pack with room for it. Sizes
// are not grouped, because this method depends on their order: n log(packs). Returns the offsets [packs + 1] and fills
// sequences [count]; the packs are shuffled with the seed.
std::vector<std::int64_t> first_fit_shuffle(const std::int64_t* lengths, std::size_t count, std::int64_t capacity,
                                            std::int64_t multiple, std::int64_t most, std::uint64_t seed,
                                            std::int64_t* sequences);

// Next fit: keeps the order; a new pack starts if the next sequence does not fit. Returns the offsets [packs + 1].
std::vector<std::int64_t> sequential(const std::int64_t* lengths, std::size_t count, std::int64_t capacity,
                                     std::int64_t multiple, std::int64_t most);

}  // namespace sft_idx::packing
