// A shard's files held against the rules.
#include "verify.h"

#include <tuple>

#include "bindings/common.h"

namespace {

using sft_idx::PackWalk;

template <typename Id>
py::tuple find_bad_ids(const Array<Id>& ids, std::int64_t limit, std::size_t most) {
  require_vector(ids, "ids");
  const auto* in = ids.data();
  const auto count = static_cast<std::size_t>(ids.size());
  sft_idx::BadIds found;
  {
    py::gil_scoped_release unlocked;
    found = sft_idx::find_bad_ids(in, count, limit, most);
  }
  return py::make_tuple(found.count, to_array(found.positions));
}

template <typename Found>
bool is_scaled(const Array<Found>& found, const Array<std::int64_t>& values, std::int64_t scale, std::int64_t shift) {
  require_vector(found, "found");
  require_vector(values, "values");
  if (found.size() != values.size()) throw std::invalid_argument("found and values differ in length");
  const auto* in = found.data();
  const auto* wanted = values.data();
  const auto count = static_cast<std::size_t>(found.size());
  py::gil_scoped_release unlocked;
  return sft_idx::is_scaled(in, wanted, count, scale, shift);
}

void walk_packs(PackWalk& walk, const Array<std::int64_t>& token_offsets, const Array<std::int64_t>& sequence_offsets,
                std::size_t count) {
  require_vector(token_offsets, "token_offsets");
  require_vector(sequence_offsets, "sequence_offsets");
  const auto given = static_cast<std::size_t>(token_offsets.size());
  if (token_offsets.size() != sequence_offsets.size() || given <= count || given > count + 2) {
    throw std::invalid_argument("offsets hold count + 1 values each, or count + 2 where more packs follow");
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

using BreachTuple = std::tuple<const char*, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

std::vector<BreachTuple> breaches_of(const PackWalk& walk) {
  std::vector<BreachTuple> out;
  for (const auto& b : walk.breaches()) out.emplace_back(b.rule, b.pack, b.at, b.found, b.expected);
  return out;
}

}  // namespace

void bind_verify(py::module_& m) {
  m.def("find_bad_ids", &find_bad_ids<std::uint16_t>, py::arg("ids").noconvert(), "limit"_a, "most"_a);
  m.def("find_bad_ids", &find_bad_ids<std::int32_t>, py::arg("ids").noconvert(), "limit"_a, "most"_a,
        "How many ids are outside 0 to limit - 1, and the positions of the first ones.");
  m.def("is_scaled", &is_scaled<std::int32_t>, py::arg("found").noconvert(), py::arg("values").noconvert(), "scale"_a,
        "shift"_a);
  m.def("is_scaled", &is_scaled<std::int64_t>, py::arg("found").noconvert(), py::arg("values").noconvert(), "scale"_a,
        "shift"_a, "Whether found is shift + scale * values, in 64 bits that wrap around.");
  py::class_<PackWalk>(m, "PackWalk", "The packs of one shard, held against the rules while their arrays stream by.")
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
      .def_property_readonly("longest_pack", [](const PackWalk& w) { return w.totals().longest_pack; })
      .def_property_readonly("longest_padded_pack", [](const PackWalk& w) { return w.totals().longest_padded_pack; })
      .def_property_readonly("most_sequences", [](const PackWalk& w) { return w.totals().most_sequences; });
}
