// Bindings for checking a shard's files against the rules, and for counts and hashes of runs.
#include "verify.h"

#include "bindings/common.h"
#include "runs.h"

namespace {

using sft_idx::PackWalk;

void walk_packs(PackWalk& walk, const Array<std::int64_t>& token_offsets, const Array<std::int64_t>& sequence_offsets,
                std::size_t count) {
  require_vector(token_offsets, "token_offsets");
  require_vector(sequence_offsets, "sequence_offsets");
  const auto given = static_cast<std::size_t>(token_offsets.size());
  if (token_offsets.size() != sequence_offsets.size() || given <= count || given > count + 2) {
    throw std::invalid_argument("each array of offsets must have count + 1 values, or count + 2 if more packs follow");
  }
  const auto *tokens = token_offsets.data(), *sequences = sequence_offsets.data();
  py::gil_scoped_release unlocked;
  walk.packs(tokens, sequences, count, given == count + 2);
}

void walk_starts(PackWalk& walk, const Array<std::uint32_t>& starts) {
  require_vector(starts, "starts");
  const auto* values = starts.data();
  const auto count = static_cast<std::size_t>(starts.size());
  py::gil_scoped_release unlocked;
  walk.starts(values, count);
}

template <typename Mask>
void walk_mask(PackWalk& walk, const Array<Mask>& mask) {
  require_vector(mask, "mask");
  const auto* values = mask.data();
  const auto count = static_cast<std::size_t>(mask.size());
  py::gil_scoped_release unlocked;
  walk.mask(values, count);
}

py::list breaches_of(const PackWalk& walk) {
  py::list out;
  for (const auto& breach : walk.breaches()) out.append(to_tuple(breach));
  return out;
}

// Reduces each run of `values` to one number with `kernel`.
template <typename Out, typename Value, typename Kernel>
Array<Out> by_run(const Array<Value>& values, const Array<std::int64_t>& bounds, Kernel kernel) {
  require_vector(values, "values");
  require_vector(bounds, "bounds");
  if (!bounds.size()) throw std::invalid_argument("bounds must have one value more than there are runs");
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
        "Hash the values of each run, independently of their dtype: uint64 [runs].");
}

}  // namespace

void bind_verify(py::module_& m) {
  py::class_<PackWalk>(m, "PackWalk", "Checks the packs of one shard against the rules while their arrays are read.")
      .def(py::init([](std::int64_t sequences, std::int64_t tokens, std::int64_t capacity, std::int64_t multiple,
                       std::size_t most) {
             return PackWalk({sequences, tokens, capacity, multiple, most});
           }),
           py::kw_only(), "sequences"_a, "tokens"_a, "capacity"_a, "multiple"_a, "most"_a)
      .def("packs", &walk_packs, py::arg("token_offsets").noconvert(), py::arg("sequence_offsets").noconvert(), "count"_a)
      .def("starts", &walk_starts, py::arg("starts").noconvert())
      .def("mask", &walk_mask<std::uint8_t>, py::arg("mask").noconvert())
      .def("mask", &walk_mask<float>, py::arg("mask").noconvert())
      .def_property_readonly("next_sequence", &PackWalk::next_sequence)
      .def_property_readonly("wanted_sequences", &PackWalk::wanted_sequences)
      .def_property_readonly("known", &PackWalk::known)
      .def_property_readonly("breaches", &breaches_of)
      .def_property_readonly("counts", &PackWalk::counts)
      .def_property_readonly("num_packs", [](const PackWalk& w) { return w.totals().packs; })
      .def_property_readonly("num_trained_tokens", [](const PackWalk& w) { return w.totals().trained_tokens; })
      .def_property_readonly("num_masked_packs", [](const PackWalk& w) { return w.totals().masked_packs; })
      .def_property_readonly("longest_pack", [](const PackWalk& w) { return w.totals().sizes.longest; })
      .def_property_readonly("longest_padded_pack", [](const PackWalk& w) { return w.totals().sizes.longest_padded; })
      .def_property_readonly("most_sequences", [](const PackWalk& w) { return w.totals().sizes.most_sequences; });
  m.def("count_positive", &count_positive<std::uint8_t>, py::arg("values").noconvert(), py::arg("bounds").noconvert());
  m.def("count_positive", &count_positive<float>, py::arg("values").noconvert(), py::arg("bounds").noconvert(),
        "Count the values above zero in each run, between adjacent bounds: int64 [runs].");
  bind_hash_runs<std::uint16_t>(m);
  bind_hash_runs<std::int32_t>(m);
  bind_hash_runs<std::uint8_t>(m);
  bind_hash_runs<float>(m);
}
