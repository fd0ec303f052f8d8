// What is counted and compared in sequences.
#include "bindings/common.h"
#include "runs.h"

namespace {

// Runs of `values`, each made one number by `kernel`.
template <typename Out, typename Value, typename Kernel>
Array<Out> by_run(const Array<Value>& values, const Array<std::int64_t>& bounds, Kernel kernel) {
  require_vector(values, "values");
  require_vector(bounds, "bounds");
  if (!bounds.size()) throw std::invalid_argument("bounds hold one value more than there are runs");
  Array<Out> out(bounds.size() - 1);
  const auto* in = values.data();
  const auto size = static_cast<std::size_t>(values.size()), runs = static_cast<std::size_t>(out.size());
  const auto* from = bounds.data();
  auto* to = out.mutable_data();
  py::gil_scoped_release unlocked;
  kernel(in, size, from, runs, to);
  return out;
}

template <typename Mask>
Array<std::int64_t> count_positive(const Array<Mask>& values, const Array<std::int64_t>& bounds) {
  return by_run<std::int64_t>(values, bounds, &sft_idx::count_positive<Mask>);
}

template <typename Value>
Array<std::uint64_t> hash_runs(const Array<Value>& values, const Array<std::int64_t>& bounds) {
  return by_run<std::uint64_t>(values, bounds, &sft_idx::hash_runs<Value>);
}

template <typename Value>
void bind_hash_runs(py::module_& m) {
  m.def("hash_runs", &hash_runs<Value>, py::arg("values").noconvert(), py::arg("bounds").noconvert(),
        "A hash of each run's values, the same whatever their dtype: uint64 [runs].");
}

}  // namespace

void bind_report(py::module_& m) {
  m.def("count_positive", &count_positive<std::uint8_t>, py::arg("values").noconvert(), py::arg("bounds").noconvert());
  m.def("count_positive", &count_positive<float>, py::arg("values").noconvert(), py::arg("bounds").noconvert(),
        "How many values of each run, between neighbouring bounds, are above zero: int64 [runs].");
  bind_hash_runs<std::uint16_t>(m);
  bind_hash_runs<std::int32_t>(m);
  bind_hash_runs<std::uint8_t>(m);
  bind_hash_runs<float>(m);
}
