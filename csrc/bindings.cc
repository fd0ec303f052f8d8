// The one file that knows Python: each function checks shapes, releases the GIL and calls a kernel.
// std::invalid_argument becomes ValueError. Array arguments are never converted: a wrong dtype is a TypeError.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "index_arrays.h"
#include "json_scan.h"

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

// ---- JSON arrays ----

py::tuple scan_json_array(const Array<std::uint8_t>& block, std::int64_t depth, bool in_string, bool escaped) {
  if (block.ndim() != 1) throw std::invalid_argument("block must be one-dimensional");
  if (depth < 1) throw std::invalid_argument("depth must be at least 1: the array is closed");
  sft_idx::JsonScanState state{depth, in_string, escaped};
  std::vector<std::int64_t> separators;
  {
    const auto* in = block.data();
    const auto nbytes = static_cast<std::size_t>(block.size());
    py::gil_scoped_release unlocked;
    sft_idx::scan_json_array(in, nbytes, state, separators);
  }
  Array<std::int64_t> out(static_cast<py::ssize_t>(separators.size()));
  std::copy(separators.begin(), separators.end(), out.mutable_data());
  return py::make_tuple(out, state.depth, state.in_string, state.escaped);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Kernels of megatron_sft_idx: arrays in, arrays out, GIL released.";
  m.def("offsets_from_lengths", &offsets_from_lengths, py::arg("lengths").noconvert(), "scale"_a = 1, "start"_a = 0,
        "Running sums of int64 lengths, times scale, from start: int64 [n + 1].");
  // ---- JSON arrays ----
  m.def("scan_json_array", &scan_json_array, py::arg("block").noconvert(), "depth"_a, "in_string"_a, "escaped"_a,
        "Ends of a JSON array's elements in a uint8 block: (int64 positions, depth, in_string, escaped).");
}
