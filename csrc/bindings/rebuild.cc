// What is derived where indexes are lost.
#include "bindings/common.h"
#include "pack_places.h"

namespace {

py::tuple first_fits(const Array<bool>& flags, std::int64_t base, std::int64_t tokens,
                     const Array<std::uint32_t>& starts, const Array<std::int64_t>& offsets, std::int64_t least) {
  require_vector(flags, "flags");
  require_vector(starts, "starts");
  require_vector(offsets, "offsets");
  if (!offsets.size()) throw std::invalid_argument("offsets hold one value more than there are packs");
  const auto* set = static_cast<const std::uint8_t*>(static_cast<const py::array&>(flags).data());
  const sft_idx::EndFlags ends{set, static_cast<std::size_t>(flags.size()), base, tokens};
  const auto num_starts = static_cast<std::size_t>(starts.size()), packs = static_cast<std::size_t>(offsets.size()) - 1;
  const auto* in = starts.data();
  const auto* bounds = offsets.data();
  sft_idx::Placed placed;
  {
    py::gil_scoped_release unlocked;
    placed = sft_idx::first_fits(ends, in, num_starts, bounds, packs, least);
  }
  return py::make_tuple(to_array(placed.begins), placed.least);
}

}  // namespace

void bind_rebuild(py::module_& m) {
  m.def("first_fits", &first_fits, py::arg("flags").noconvert(), "base"_a, "tokens"_a, py::arg("starts").noconvert(),
        py::arg("offsets").noconvert(), "least"_a,
        "Where packs begin, each at its first place, as far as the flags reach; and where the next search goes on.");
}
