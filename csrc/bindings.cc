// The one file that knows Python: each function checks shapes, releases the GIL and calls a kernel.
// std::invalid_argument becomes ValueError. Array arguments are never converted: a wrong dtype is a TypeError.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "index_arrays.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// ---- index arrays ----

Array<std::int64_t> offsets_from_lengths(const Array<std::int64_t>& lengths, std::int64_t scale, std::int64_t start) {
  if (lengths.ndim() != 1) throw std::invalid_argument("lengths must be one-dimensional");
  Array<std::int64_t> out(lengths.size() + 1);
  const auto* in = lengths.data();
  auto* result = out.mutable_data();
  const auto count = static_cast<std::size_t>(lengths.size());
  py::gil_scoped_release unlocked;
  sft_idx::offsets_from_lengths(in, count, scale, start, result);
  return out;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Kernels of megatron_sft_idx: arrays in, arrays out, GIL released.";
  m.def("offsets_from_lengths", &offsets_from_lengths, py::arg("lengths").noconvert(), "scale"_a = 1, "start"_a = 0,
        "Running sums of int64 lengths, times scale, from start: int64 [n + 1].");
}
