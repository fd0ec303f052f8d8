// Foreign formats.
#include "bindings/common.h"
#include "pack_rules.h"
#include "pickle_walk.h"
#include "pickled_pairs.h"

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

template <typename Token, typename Mask>
bool packs_are_sound(const Array<Token>& tokens, const Array<Mask>& mask, const Array<std::int64_t>& starts,
                     const Array<std::int64_t>& lengths, const Array<std::int64_t>& sequences,
                     std::int64_t most_tokens) {
  require_vector(tokens, "tokens");
  require_vector(mask, "mask");
  require_vector(starts, "starts");
  require_vector(lengths, "lengths");
  require_vector(sequences, "sequences");
  if (mask.size() != tokens.size() || sequences.size() != lengths.size()) return false;
  const sft_idx::PackColumns<Token, Mask> columns{tokens.data(),
                                                  mask.data(),
                                                  static_cast<std::size_t>(tokens.size()),
                                                  starts.data(),
                                                  static_cast<std::size_t>(starts.size()),
                                                  lengths.data(),
                                                  sequences.data(),
                                                  static_cast<std::size_t>(lengths.size())};
  py::gil_scoped_release unlocked;
  return sft_idx::packs_are_sound(columns, most_tokens);
}

template <typename Token, typename Mask>
void bind_packs_are_sound(py::module_& m) {
  m.def("packs_are_sound", &packs_are_sound<Token, Mask>, py::arg("tokens").noconvert(), py::arg("mask").noconvert(),
        py::arg("starts").noconvert(), py::arg("lengths").noconvert(), py::arg("sequences").noconvert(),
        "most_tokens"_a, "Whether packs keep every rule and their masks are 0 at every sequence's end.");
}

}  // namespace

void bind_formats(py::module_& m) {
  m.def("parse_pickled_pairs", &parse_pickled_pairs, py::arg("data").noconvert(),
        "A pickled list of pairs of integers, from its bytes: int64 [pairs, 2]. Anything else is a ValueError.");
  m.def("check_pickle", &check_pickle, py::arg("data").noconvert(),
        "Where the pickle in these bytes ends. ValueError: opcodes or arguments that an unpickler must not be given.");
  bind_packs_are_sound<std::uint16_t, std::uint8_t>(m);
  bind_packs_are_sound<std::uint16_t, float>(m);
  bind_packs_are_sound<std::int32_t, std::uint8_t>(m);
  bind_packs_are_sound<std::int32_t, float>(m);
}
