// From lengths to packs: the planners, how few packs could be enough, and which sequence goes where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "packing/patterns.h"

namespace sft_idx::packing {

// ---- sizes, of which each planner makes patterns ----

// Each size, largest first, goes into the fullest pack that still holds it: the same packs as item by item, found for
// all packs of equal free space at once, so that the cost follows the number of distinct sizes.
Patterns best_fit(const Problem& problem);

// First fit decreasing: each size, largest first, goes into the first pack opened that still holds it.
Patterns first_fit_decreasing(const Problem& problem);

enum class Mix {
  kAverage,  // m0: as many sequences a pack as keeps the average of those left
  kFewest,   // m1: as few sequences a pack as fill it
};

constexpr std::uint64_t kMostWork = std::uint64_t{1} << 30;  // seconds

// A subset-sum heuristic in the manner of MBS' (Gupta and Ho 1999) with the sufficient average weight principle
// (SAWMBS: Fleszar and Charalambous, "Average-weight-controlled bin-oriented heuristics for the one-dimensional
// bin-packing problem", EJOR 2011): each pack holds the largest sequence left and is filled exactly, its last two
// sequences found by a two-sum over bitsets, the ones before drawn in proportion to what is left. A pattern is used
// several times, so the cost follows the number of distinct sizes. Integers only: same seed, same plan anywhere.
//
// Hundreds of thousands of distinct sizes make each search long. After `most_work` steps, which are counted and never
// timed, the sequences that are left are packed by best fit.
Patterns exact_fill(const Problem& problem, Mix mix, std::uint64_t seed, std::uint64_t most_work = kMostWork);

// No plan has fewer packs. The largest of: the sequences over the cap, the total size over the capacity, and dual
// feasible functions: maps f of sizes such that sizes that fit one pack still sum to at most one after f, which makes
// sum(f) a bound. Used are Martello and Toth's L2 (1990) and Fekete and Schepers' u^(k) and phi^(eps) (2001).
std::int64_t lower_bound(const Problem& problem);

// ---- sequences ----

// Fills offsets [packs + 1] and sequences [count], CSR: pack p holds sequences[offsets[p] .. offsets[p + 1]).
// Sequences of one class are dealt in an order shuffled by seed, and the packs are in an order shuffled by seed.
// The patterns must use each class of the lengths exactly as often as it occurs, else std::invalid_argument.
void hand_out(const std::int64_t* lengths, std::size_t count, std::int64_t multiple,
              const std::vector<std::int64_t>& sizes, const Patterns& patterns, std::uint64_t seed,
              std::int64_t* offsets, std::int64_t* sequences);

// Each sequence, in an order shuffled by seed, goes into the first pack opened that still holds it. Sizes are not
// grouped here, as their order is what this method is about: n log(packs). Returns the offsets [packs + 1] and fills
// sequences [count]; the packs come in an order shuffled by seed.
std::vector<std::int64_t> first_fit_shuffle(const std::int64_t* lengths, std::size_t count, std::int64_t capacity,
                                            std::int64_t multiple, std::int64_t most, std::uint64_t seed,
                                            std::int64_t* sequences);

// Sequences in order; a new pack starts where the next one does not fit. Returns the offsets [packs + 1].
std::vector<std::int64_t> sequential(const std::int64_t* lengths, std::size_t count, std::int64_t capacity,
                                     std::int64_t multiple, std::int64_t most);

}  // namespace sft_idx::packing
