// Packs filled to the last position, largest sequence first.
#pragma once

#include <cstdint>

#include "packing/patterns.h"

namespace sft_idx::packing {

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

}  // namespace sft_idx::packing
