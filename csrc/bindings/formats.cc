// Bindings for other formats.
#include "bindings/common.h"
#include "pickles.h"

namespace {

Array<std::int64_t> parse_pickled_pairs(const Array<std::uint8_t>& data) {
  require_vector(data, "data");
  std::vector<std::int64_t> values;
  {
    const auto* in = data.data();
    const auto nbytes = static_cast<std::size_t>(data.size());
    py::gil_scoped_release unlocked;
    values = sft_idx::parse_pickled_pairs(in, nbytes);
  }
  Array<std::int64_t> out({static_cast<py::ssize_t>(values.size() / 2), py::ssize_t{2}});
  std::copy(values.begin(), values.end(), out.mutable_data());
  return out;
}

std::size_t check_pickle(const Array<std::uint8_t>& data) {
  require_vector(data, "data");
  const auto* in = data.data();
  const auto nbytes = static_cast<std::size_t>(data.size());
  py::gil_scoped_release unlocked;
  return sft_idx::check_pickle(in, nbytes);
}

}  // namespace

void bind_formats(py::module_& m) {
  m.def("parse_pickled_pairs", &parse_pickled_pairs, py::arg("data").noconvert(),
        "Parse a pickled list of pairs of integers: int64 [pairs, 2]. ValueError: the bytes are anything else.");
  m.def("check_pickle", &check_pickle, py::arg("data").noconvert(),
        "Return the end of the pickle in these bytes. ValueError: opcodes or arguments that are not safe to unpickle.");
}
