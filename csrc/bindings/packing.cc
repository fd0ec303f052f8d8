// Bindings for packing lengths into packs.
#include <cstring>
#include <numeric>
#include <utility>

#include "bindings/common.h"
#include "packing/histogram.h"
#include "packing/planners.h"
#include "packing/random.h"

namespace {

template <typename T>
std::vector<T> to_vector(const Array<T>& array, const char* name) {
  if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " must be one-dimensional");
  return std::vector<T>(array.data(), array.data() + array.size());
}

std::size_t length_count(const Array<std::int64_t>& lengths, std::int64_t capacity, std::int64_t multiple,
                         std::int64_t most = 1) {
  if (most < 1) throw std::invalid_argument("the maximum number of sequences per pack must be at least 1");
  if (lengths.ndim() != 1) throw std::invalid_argument("lengths must be one-dimensional");
  if (multiple < 1) throw std::invalid_argument("the sequence multiple must be at least 1");
  if (capacity < multiple) throw std::invalid_argument("the capacity is less than the sequence multiple");
  if (capacity > 0x7FFFFFFF) throw std::invalid_argument("the capacity is more than 2147483647");
  return static_cast<std::size_t>(lengths.size());
}

py::tuple packing_histogram(const Array<std::int64_t>& lengths, std::int64_t capacity, std::int64_t multiple) {
  const auto count = length_count(lengths, capacity, multiple);
  const auto* in = lengths.data();
  sft_idx::packing::Histogram result;
  {
    py::gil_scoped_release unlocked;
    result = sft_idx::packing::histogram(in, count, capacity, multiple);
  }
  return py::make_tuple(to_array(result.sizes), to_array(result.counts), result.total);
}

sft_idx::packing::Problem to_problem(const Array<std::int64_t>& sizes, const Array<std::int64_t>& counts,
                                     std::int64_t capacity, std::int64_t most) {
  sft_idx::packing::Problem problem{to_vector(sizes, "sizes"), to_vector(counts, "counts"), capacity, most};
  problem.check();
  return problem;
}

std::int64_t packing_lower_bound(const Array<std::int64_t>& sizes, const Array<std::int64_t>& counts,
                                 std::int64_t capacity, std::int64_t most) {
  const auto problem = to_problem(sizes, counts, capacity, most);
  py::gil_scoped_release unlocked;
  return sft_idx::packing::lower_bound(problem);
}

sft_idx::packing::Patterns make_plan(const sft_idx::packing::Problem& problem, const std::string& planner,
                                     std::uint64_t seed, std::uint64_t most_work) {
  using sft_idx::packing::Mix;
  if (planner == "best-fit") return sft_idx::packing::best_fit(problem);
  if (planner == "first-fit-decreasing") return sft_idx::packing::first_fit_decreasing(problem);
  if (planner == "exact-fill-average") return sft_idx::packing::exact_fill(problem, Mix::kAverage, seed, most_work);
  if (planner == "exact-fill-fewest") return sft_idx::packing::exact_fill(problem, Mix::kFewest, seed, most_work);
  throw std::invalid_argument("no planner named " + planner);
}

// Entries are passed as an int32 array [n, 2].
static_assert(sizeof(sft_idx::packing::Entry) == 2 * sizeof(std::int32_t));

py::tuple packing_plan(const Array<std::int64_t>& sizes, const Array<std::int64_t>& counts, std::int64_t capacity,
                       std::int64_t most, const std::string& planner, std::uint64_t seed, std::uint64_t most_work) {
  const auto problem = to_problem(sizes, counts, capacity, most);
  sft_idx::packing::Patterns plan;
  {
    py::gil_scoped_release unlocked;
    plan = make_plan(problem, planner, seed, most_work);
  }
  Array<std::int32_t> entries({static_cast<py::ssize_t>(plan.entries.size()), py::ssize_t{2}});
  const auto bytes = static_cast<std::size_t>(entries.nbytes());
  if (bytes > 0) std::memcpy(entries.mutable_data(), plan.entries.data(), bytes);
  return py::make_tuple(to_array(plan.offsets), entries, to_array(plan.packs));
}

py::tuple packing_hand_out(const Array<std::int64_t>& lengths, std::int64_t multiple,
                           const Array<std::int64_t>& sizes, const Array<std::int64_t>& pattern_offsets,
                           const Array<std::int32_t>& entries, const Array<std::int64_t>& packs, std::uint64_t seed) {
  if (entries.ndim() != 2 || entries.shape(1) != 2) throw std::invalid_argument("entries must be [n, 2]");
  const auto count = length_count(lengths, 0x7FFFFFFF, multiple);
  sft_idx::packing::Patterns plan;
  plan.offsets = to_vector(pattern_offsets, "pattern_offsets");
  plan.packs = to_vector(packs, "packs");
  plan.entries.resize(static_cast<std::size_t>(entries.shape(0)));
  const auto bytes = static_cast<std::size_t>(entries.nbytes());
  if (bytes > 0) std::memcpy(plan.entries.data(), entries.data(), bytes);
  const auto class_sizes = to_vector(sizes, "sizes");
  plan.check(class_sizes.size());
  Array<std::int64_t> offsets(std::accumulate(plan.packs.begin(), plan.packs.end(), std::int64_t{0}) + 1);
  Array<std::int64_t> sequences(lengths.size());
  const auto* in = lengths.data();
  auto* out = offsets.mutable_data();
  auto* dealt = sequences.mutable_data();
  {
    py::gil_scoped_release unlocked;
    sft_idx::packing::hand_out(in, count, multiple, class_sizes, plan, seed, out, dealt);
  }
  return py::make_tuple(offsets, sequences);
}

py::tuple packing_first_fit_shuffle(const Array<std::int64_t>& lengths, std::int64_t capacity, std::int64_t multiple,
                                    std::int64_t most, std::uint64_t seed) {
  const auto count = length_count(lengths, capacity, multiple, most);
  Array<std::int64_t> sequences(lengths.size());
  const auto* in = lengths.data();
  auto* out = sequences.mutable_data();
  std::vector<std::int64_t> offsets;
  {
    py::gil_scoped_release unlocked;
    offsets = sft_idx::packing::first_fit_shuffle(in, count, capacity, multiple, most, seed, out);
  }
  return py::make_tuple(to_array(offsets), sequences);
}

Array<std::int64_t> packing_sequential(const Array<std::int64_t>& lengths, std::int64_t capacity,
                                       std::int64_t multiple, std::int64_t most) {
  const auto count = length_count(lengths, capacity, multiple, most);
  const auto* in = lengths.data();
  std::vector<std::int64_t> offsets;
  {
    py::gil_scoped_release unlocked;
    offsets = sft_idx::packing::sequential(in, count, capacity, multiple, most);
  }
  return to_array(offsets);
}

Array<std::int64_t> packing_permutation(std::size_t count, std::uint64_t seed) {
  Array<std::int64_t> out(static_cast<py::ssize_t>(count));
  auto* values = out.mutable_data();
  py::gil_scoped_release unlocked;
  std::iota(values, values + count, 0);
  sft_idx::packing::Random random(seed, sft_idx::packing::kOrder);
  sft_idx::packing::shuffle(values, count, random);
  return out;
}

}  // namespace

void bind_packing(py::module_& m) {
  m.def("packing_histogram", &packing_histogram, py::arg("lengths").noconvert(), "capacity"_a, "multiple"_a,
        "Distinct sizes in units of the multiple, ascending, their counts, and the sum of the lengths.");
  m.def("packing_lower_bound", &packing_lower_bound, py::arg("sizes").noconvert(), py::arg("counts").noconvert(),
        "capacity"_a, "most"_a, "Lower bound of the number of packs.");
  m.def("packing_plan", &packing_plan, py::arg("sizes").noconvert(), py::arg("counts").noconvert(), "capacity"_a,
        "most"_a, "planner"_a, "seed"_a, "most_work"_a = sft_idx::packing::kMostWork,
        "Plan packs as patterns: offsets, entries (class, times) and packs of each pattern.");
  m.def("packing_hand_out", &packing_hand_out, py::arg("lengths").noconvert(), "multiple"_a,
        py::arg("sizes").noconvert(), py::arg("pattern_offsets").noconvert(), py::arg("entries").noconvert(),
        py::arg("packs").noconvert(), "seed"_a,
        "Assign sequences to the packs of patterns: CSR offsets and sequences.");
  m.def("packing_first_fit_shuffle", &packing_first_fit_shuffle, py::arg("lengths").noconvert(), "capacity"_a,
        "multiple"_a, "most"_a, "seed"_a, "First fit in shuffled order: CSR offsets and sequences.");
  m.def("packing_sequential", &packing_sequential, py::arg("lengths").noconvert(), "capacity"_a, "multiple"_a,
        "most"_a, "Next fit in the given order: CSR offsets.");
  m.def("packing_permutation", &packing_permutation, "count"_a, "seed"_a, "A random order of [0, count).");
}
