// What the binding files share. They are the only files that know Python: each function checks shapes, releases the
// GIL and calls a kernel. std::invalid_argument becomes ValueError. Array arguments are never converted: a wrong
// dtype is a TypeError.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

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

void bind_shard(py::module_& m);
void bind_chat(py::module_& m);
void bind_packing(py::module_& m);
