// Shared helpers of the binding files. Only these files use Python: each function checks shapes, releases the GIL and
// calls a kernel. std::invalid_argument becomes ValueError. Array arguments are never converted: a wrong dtype is a
// TypeError.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "rules.h"

namespace py = pybind11;
using namespace py::literals;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
Array<T> to_array(const std::vector<T>& values) {
  Array<T> out(static_cast<py::ssize_t>(values.size()));
  std::copy(values.begin(), values.end(), out.mutable_data());
  return out;
}

// Requires an array that a kernel can read through a typed pointer. pybind11 has already checked the dtype. Items that
// are not aligned, for example in a buffer that begins at an odd byte, would be undefined behaviour.
inline bool is_plain(const py::array& array, py::ssize_t dimensions) {
  constexpr int wanted = py::array::c_style | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  return array.ndim() == dimensions && (array.flags() & wanted) == wanted;
}

inline void require_vector(const py::array& array, const char* name) {
  if (!is_plain(array, 1)) {
    throw std::invalid_argument(std::string(name) + " must be one-dimensional, contiguous and aligned");
  }
}

inline py::tuple to_tuple(const sft_idx::Breach& breach) {
  return py::make_tuple(breach.rule, breach.pack, breach.at, breach.found, breach.expected);
}

void bind_shard(py::module_& m);
void bind_chat(py::module_& m);
void bind_packing(py::module_& m);
void bind_training(py::module_& m);
void bind_formats(py::module_& m);
void bind_verify(py::module_& m);
void bind_storage(py::module_& m);
