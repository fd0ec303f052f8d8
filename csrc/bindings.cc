// The one file that knows Python: each function checks shapes, releases the GIL and calls a kernel.
// std::invalid_argument becomes ValueError. Array arguments are never converted: a wrong dtype is a TypeError.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "gather.h"
#include "index_arrays.h"
#include "stage_packs.h"

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

// ---- packs on their way to disk ----

sft_idx::PackShapes shapes_of(const Array<std::int64_t>& lengths, const Array<std::int64_t>& sequences,
                              const Array<std::int64_t>& starts, py::ssize_t tokens) {
  if (lengths.size() != sequences.size()) throw std::invalid_argument("one length and one sequence count a pack");
  return {lengths.data(),
          sequences.data(),
          static_cast<std::size_t>(lengths.size()),
          starts.data(),
          static_cast<std::size_t>(starts.size()),
          static_cast<std::size_t>(tokens)};
}

// The first `count` items of an output array that the caller supplies.
template <typename T>
T* room_for(Array<T>& out, py::ssize_t count) {
  if (out.size() < count) throw std::invalid_argument("the output array is too small");
  return out.mutable_data();
}

py::tuple stage_shapes(const Array<std::int64_t>& lengths, const Array<std::int64_t>& sequences,
                       const Array<std::int64_t>& starts, std::int64_t tokens, std::int64_t capacity,
                       std::int64_t sequence_multiple, Array<std::uint32_t> starts_out) {
  if (sequence_multiple < 1) throw std::invalid_argument("sequence_multiple must be 1 or more");
  const auto shapes = shapes_of(lengths, sequences, starts, tokens);
  auto* out = room_for(starts_out, starts.size());
  sft_idx::ShapeTotals totals;
  {
    py::gil_scoped_release unlocked;
    totals = sft_idx::stage_shapes(shapes, {capacity, sequence_multiple}, out);
  }
  return py::make_tuple(totals.longest_pack, totals.longest_padded_pack, totals.most_sequences);
}

template <typename In, typename Out>
void stage_tokens(const Array<In>& tokens, const Array<std::int64_t>& lengths, const Array<std::int64_t>& sequences,
                  const Array<std::int64_t>& starts, Array<Out> out) {
  const auto shapes = shapes_of(lengths, sequences, starts, tokens.size());
  const auto* in = tokens.data();
  auto* to = room_for(out, tokens.size());
  py::gil_scoped_release unlocked;
  sft_idx::stage_tokens(in, shapes, to);
}

template <typename In, typename Out>
py::tuple stage_mask(const Array<In>& mask, const Array<std::int64_t>& lengths, const Array<std::int64_t>& sequences,
                     const Array<std::int64_t>& starts, bool token_aligned, Array<Out> out) {
  const auto shapes = shapes_of(lengths, sequences, starts, mask.size());
  const auto* in = mask.data();
  auto* to = room_for(out, mask.size());
  sft_idx::MaskTotals totals;
  {
    py::gil_scoped_release unlocked;
    totals = sft_idx::stage_mask(in, shapes, token_aligned, to);
  }
  return py::make_tuple(totals.trained_tokens, totals.masked_packs, totals.dropped_first);
}

template <typename In, typename Out>
void bind_stage_tokens(py::module_& m) {
  m.def("stage_tokens", &stage_tokens<In, Out>, py::arg("tokens").noconvert(), py::arg("lengths").noconvert(),
        py::arg("sequences").noconvert(), py::arg("starts").noconvert(), py::arg("out").noconvert());
}

template <typename In, typename Out>
void bind_stage_mask(py::module_& m) {
  m.def("stage_mask", &stage_mask<In, Out>, py::arg("mask").noconvert(), py::arg("lengths").noconvert(),
        py::arg("sequences").noconvert(), py::arg("starts").noconvert(), "token_aligned"_a,
        py::arg("out").noconvert());
}

void bind_stage(py::module_& m) {
  m.def("stage_shapes", &stage_shapes, py::arg("lengths").noconvert(), py::arg("sequences").noconvert(),
        py::arg("starts").noconvert(), "tokens"_a, "capacity"_a, "sequence_multiple"_a,
        py::arg("starts_out").noconvert(),
        "Check rules P1 to P5; returns longest pack, longest padded pack, most sequences.");
  bind_stage_tokens<std::uint16_t, std::uint16_t>(m);
  bind_stage_tokens<std::uint16_t, std::int32_t>(m);
  bind_stage_tokens<std::int32_t, std::uint16_t>(m);
  bind_stage_tokens<std::int32_t, std::int32_t>(m);
  bind_stage_tokens<std::int64_t, std::uint16_t>(m);
  bind_stage_tokens<std::int64_t, std::int32_t>(m);
  bind_stage_mask<std::uint8_t, std::uint8_t>(m);
  bind_stage_mask<std::uint8_t, float>(m);
  bind_stage_mask<std::int64_t, std::uint8_t>(m);
  bind_stage_mask<std::int64_t, float>(m);
  bind_stage_mask<float, std::uint8_t>(m);
  bind_stage_mask<float, float>(m);
  bind_stage_mask<double, std::uint8_t>(m);
  bind_stage_mask<double, float>(m);
}

// ---- gathering sequences ----

template <typename T>
void gather_sequences(const Array<T>& source, const Array<std::int64_t>& offsets, const Array<std::int64_t>& order,
                      Array<T> out) {
  if (offsets.size() < 1) throw std::invalid_argument("offsets hold at least the final one");
  const void* from = source.data();
  void* to = out.mutable_data();
  py::gil_scoped_release unlocked;
  sft_idx::gather_sequences(from, static_cast<std::size_t>(source.size()), sizeof(T), offsets.data(),
                            static_cast<std::size_t>(offsets.size()), order.data(),
                            static_cast<std::size_t>(order.size()), to, static_cast<std::size_t>(out.size()));
}

template <typename T>
void bind_gather(py::module_& m) {
  m.def("gather_sequences", &gather_sequences<T>, py::arg("source").noconvert(), py::arg("offsets").noconvert(),
        py::arg("order").noconvert(), py::arg("out").noconvert(),
        "Copy source[offsets[s]:offsets[s + 1]] for each s of order, end to end, into out.");
}

Array<std::int64_t> absolute_offsets(const Array<std::int64_t>& sequence_offsets,
                                     const Array<std::int64_t>& token_offsets, const Array<std::uint32_t>& starts) {
  if (sequence_offsets.size() < 1 || sequence_offsets.size() != token_offsets.size()) {
    throw std::invalid_argument("sequence_offsets and token_offsets hold packs + 1 values each");
  }
  const auto packs = static_cast<std::size_t>(sequence_offsets.size() - 1);
  if (sequence_offsets.data()[packs] != starts.size()) throw std::invalid_argument("starts do not match the offsets");
  Array<std::int64_t> out(starts.size() + 1);
  const auto *sequences = sequence_offsets.data(), *tokens = token_offsets.data();
  const auto* from = starts.data();
  auto* to = out.mutable_data();
  const auto count = static_cast<std::size_t>(starts.size());
  py::gil_scoped_release unlocked;
  sft_idx::absolute_offsets(sequences, tokens, packs, from, count, to);
  return out;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Kernels of megatron_sft_idx: arrays in, arrays out, GIL released.";
  m.def("offsets_from_lengths", &offsets_from_lengths, py::arg("lengths").noconvert(), "scale"_a = 1, "start"_a = 0,
        "Running sums of int64 lengths, times scale, from start: int64 [n + 1].");
  bind_stage(m);
  bind_gather<std::uint16_t>(m);
  bind_gather<std::int32_t>(m);
  bind_gather<std::uint8_t>(m);
  bind_gather<float>(m);
  m.def("absolute_offsets", &absolute_offsets, py::arg("sequence_offsets").noconvert(),
        py::arg("token_offsets").noconvert(), py::arg("starts").noconvert(),
        "Where each sequence of a shard begins, in tokens from the shard's first, and the token count: int64 [n + 1].");
}
