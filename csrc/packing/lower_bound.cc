#include "packing/planners.h"

#include <algorithm>

namespace sft_idx::packing {
namespace {

using Wide = __int128;  // counts x sizes x k passes 63 bits on large inputs

constexpr std::int64_t kDepth = 20;  // k of u^(k), and 1/eps of phi^(eps); deeper ones never won in trials

std::int64_t packs_for(Wide sum, Wide unit) { return static_cast<std::int64_t>((sum + unit - 1) / unit); }

// u^(k) with cutoff eps, for every relevant eps: sizes below eps count 0, sizes above capacity - eps count 1, sizes
// in between count u^(k). k = 0 means the identity, which gives L2. One sweep over the classes from both ends.
std::int64_t cut_bound(const Problem& problem, std::int64_t k) {
  const Wide capacity = problem.capacity;
  const Wide one = k == 0 ? capacity : capacity * k;
  auto value = [&](std::int64_t size) -> Wide {
    if (k == 0) return size;
    const Wide scaled = static_cast<Wide>(size) * (k + 1);
    return scaled % capacity == 0 ? static_cast<Wide>(size) * k : scaled / capacity * capacity;
  };
  Wide sum = 0;
  for (std::size_t c = 0; c < problem.classes(); ++c) sum += value(problem.sizes[c]) * problem.counts[c];
  Wide best = sum;
  std::size_t above = problem.classes();  // first class larger than capacity - eps
  for (std::size_t c = 0; c < problem.classes() && problem.sizes[c] * 2 <= problem.capacity; ++c) {
    const std::int64_t eps = problem.sizes[c];
    while (above > 0 && problem.sizes[above - 1] > problem.capacity - eps) {
      --above;
      sum += (one - value(problem.sizes[above])) * problem.counts[above];
    }
    best = std::max(best, sum);
    sum -= value(eps) * problem.counts[c];
  }
  return packs_for(best, one);
}

// phi^(eps) with q = floor(capacity / eps) steps: the rest that a large size leaves is counted in whole steps.
std::int64_t step_bound(const Problem& problem, std::int64_t eps) {
  const std::int64_t steps = problem.capacity / eps;
  Wide sum = 0;
  for (std::size_t c = 0; c < problem.classes(); ++c) {
    const std::int64_t size = problem.sizes[c];
    const std::int64_t value = size * 2 > problem.capacity ? steps - (problem.capacity - size) / eps : size >= eps;
    sum += static_cast<Wide>(value) * problem.counts[c];
  }
  return packs_for(sum, steps);
}

}  // namespace

std::int64_t lower_bound(const Problem& problem) {
  Wide sequences = 0;
  for (const std::int64_t count : problem.counts) sequences += count;
  std::int64_t best = packs_for(sequences, problem.most);
  for (std::int64_t k = 0; k <= kDepth; ++k) best = std::max(best, cut_bound(problem, k));
  for (std::int64_t q = 2; q <= kDepth && q < problem.capacity; ++q) {
    best = std::max(best, step_bound(problem, problem.capacity / (q + 1) + 1));
  }
  return best;
}

}  // namespace sft_idx::packing
