// Bindings for index arrays, staging of packs, and gathering of sequences.
#include "bindings/common.h"
#include "index_arrays.h"
#include "pack_stage.h"
#include "runs.h"

namespace {

// ---- index arrays ----

Array<std::int64_t> offsets_from_lengths(const Array<std::int64_t>& lengths, std::int64_t scale, std::int64_t start) {
  require_vector(lengths, "lengths");
  Array<std::int64_t> out(lengths.size() + 1);
  const auto* in = lengths.data();
  auto* result = out.mutable_data();
  const auto count = static_cast<std::size_t>(lengths.size());
  py::gil_scoped_release unlocked;
  sft_idx::offsets_from_lengths(in, count, scale, start, result);
  return out;
}

sft_idx::PackIndex pack_index_of(const py::tuple& parts) {
  if (parts.size() != 4) {
    throw std::invalid_argument("an index must have sequence offsets, token offsets, starts and a number of tokens");
  }
  const auto sequences = parts[0].cast<Array<std::int64_t>>(), tokens = parts[1].cast<Array<std::int64_t>>();
  const auto starts = parts[2].cast<Array<std::uint32_t>>();
  require_vector(sequences, "sequence_offsets");
  require_vector(tokens, "token_offsets");
  require_vector(starts, "starts");
  // Only these exact types: a cast of another array would be a copy that does not live as long as its pointer here.
  if (!sequences.is(parts[0]) || !tokens.is(parts[1]) || !starts.is(parts[2])) {
    throw py::type_error("offsets must be int64, and starts uint32");
  }
  if (sequences.size() < 1 || sequences.size() != tokens.size()) {
    throw std::invalid_argument("sequence_offsets and token_offsets must have packs + 1 values each");
  }
  return {sequences.data(), tokens.data(), static_cast<std::size_t>(sequences.size() - 1),
          starts.data(),    static_cast<std::size_t>(starts.size()), parts[3].cast<std::int64_t>()};
}

using Limits = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
constexpr Limits kNoLimits{0x7FFFFFFF, 1, 0x7FFFFFFF};

py::tuple pack_segments(const py::list& indexes, const Array<std::int64_t>& shards, const Array<std::int64_t>& packs,
                        const Limits& limits) {
  require_vector(shards, "shards");
  require_vector(packs, "packs");
  if (shards.size() != packs.size()) throw std::invalid_argument("expected one shard per pack");
  std::vector<sft_idx::PackIndex> known(indexes.size());
  for (std::size_t i = 0; i < known.size(); ++i) {
    const py::object parts = indexes[i];
    if (!parts.is_none()) known[i] = pack_index_of(parts.cast<py::tuple>());
  }
  const auto *numbers = shards.data(), *wanted = packs.data();
  const auto count = static_cast<std::size_t>(packs.size());
  sft_idx::PackSegments found;
  {
    py::gil_scoped_release unlocked;
    found = sft_idx::pack_segments(known, numbers, wanted, count,
                                   {std::get<0>(limits), std::get<1>(limits), std::get<2>(limits)});
  }
  return py::make_tuple(to_array(found.offsets), to_array(found.shards), to_array(found.starts),
                        to_array(found.lengths));
}

// ---- staging of packs ----

using sft_idx::MaskType;
using sft_idx::PackStage;
using sft_idx::TokenType;

// Called for every pack, so it avoids the Python calls of a comparison of dtypes.
bool is_native(const py::dtype& dtype, char kind, py::ssize_t nbytes) {
  return dtype.kind() == kind && dtype.itemsize() == nbytes && (nbytes == 1 || dtype.byteorder() == '=');
}

TokenType token_type_of(const py::dtype& dtype) {
  if (is_native(dtype, 'u', 2)) return TokenType::u16;
  if (is_native(dtype, 'i', 4)) return TokenType::i32;
  if (is_native(dtype, 'i', 8)) return TokenType::i64;
  throw py::type_error("tokens must be uint16, int32 or int64");
}

MaskType mask_type_of(const py::dtype& dtype) {
  if (is_native(dtype, 'u', 1) || is_native(dtype, 'b', 1)) return MaskType::u8;
  if (is_native(dtype, 'i', 8)) return MaskType::i64;
  if (is_native(dtype, 'f', 4)) return MaskType::f32;
  if (is_native(dtype, 'f', 8)) return MaskType::f64;
  throw py::type_error("masks must be bool, uint8, int64, float32 or float64");
}

// Converts the arrays to kernel input; lengths and sequences have one value per pack.
sft_idx::PackInput input_of(const py::array& tokens, const py::array& mask, const py::array& starts,
                            const std::int64_t* lengths, const std::int64_t* sequences, std::size_t packs,
                            bool token_aligned) {
  require_vector(tokens, "tokens");
  require_vector(mask, "mask");
  require_vector(starts, "starts");
  if (!is_native(starts.dtype(), 'i', 8)) throw py::type_error("starts must be int64");
  if (mask.size() != tokens.size()) {
    throw std::invalid_argument(std::to_string(mask.size()) + " loss mask values for " +
                                std::to_string(tokens.size()) + " tokens, expected one per token");
  }
  return {tokens.data(),
          token_type_of(tokens.dtype()),
          mask.data(),
          mask_type_of(mask.dtype()),
          static_cast<std::size_t>(tokens.size()),
          static_cast<const std::int64_t*>(starts.data()),
          static_cast<std::size_t>(starts.size()),
          lengths,
          sequences,
          packs,
          token_aligned};
}

sft_idx::PackInput input_of(const py::array& tokens, const py::array& mask, const py::array& starts,
                            const Array<std::int64_t>& lengths, const Array<std::int64_t>& sequences,
                            bool token_aligned) {
  require_vector(lengths, "lengths");
  require_vector(sequences, "sequences");
  if (lengths.size() != sequences.size()) {
    throw std::invalid_argument("expected one length and one sequence count per pack");
  }
  return input_of(tokens, mask, starts, lengths.data(), sequences.data(), static_cast<std::size_t>(lengths.size()),
                  token_aligned);
}

bool stage_add_one(PackStage& stage, const py::array& tokens, const py::array& mask, const py::array& starts,
                   bool token_aligned) {
  const std::int64_t length = tokens.size(), sequences = starts.size();
  const auto input = input_of(tokens, mask, starts, &length, &sequences, 1, token_aligned);
  py::gil_scoped_release unlocked;
  return stage.add(input);
}

bool stage_add(PackStage& stage, const py::array& tokens, const py::array& mask, const py::array& starts,
               const Array<std::int64_t>& lengths, const Array<std::int64_t>& sequences, bool token_aligned) {
  const auto input = input_of(tokens, mask, starts, lengths, sequences, token_aligned);
  py::gil_scoped_release unlocked;
  return stage.add(input);
}

void stage_count(PackStage& stage, const py::array& tokens, const py::array& mask, const py::array& starts,
                 const Array<std::int64_t>& lengths, const Array<std::int64_t>& sequences) {
  const auto input = input_of(tokens, mask, starts, lengths, sequences, false);
  if (input.token_type != stage.token_type() || input.mask_type != stage.mask_type()) {
    throw py::type_error("tokens and masks must have the dtypes of the stage");
  }
  py::gil_scoped_release unlocked;
  stage.count(input);
}

py::object first_breach(const py::array& tokens, const py::array& mask, const py::array& starts,
                        const Array<std::int64_t>& lengths, const Array<std::int64_t>& sequences, bool token_aligned,
                        std::int64_t capacity, const py::dtype& token_dtype, const py::dtype& mask_dtype) {
  const auto input = input_of(tokens, mask, starts, lengths, sequences, token_aligned);
  const sft_idx::PackRules rules{capacity, 1, token_type_of(token_dtype), mask_type_of(mask_dtype)};
  std::optional<sft_idx::Breach> breach;
  {
    py::gil_scoped_release unlocked;
    breach = sft_idx::first_breach(input, rules);
  }
  if (!breach) return py::none();
  return py::make_tuple(to_tuple(*breach), in_words(*breach, rules));
}

// A view of staged bytes; valid until the stage is extended or cleared.
template <typename T, typename Allocator>
py::memoryview staged(const std::vector<T, Allocator>& data) {
  return py::memoryview::from_memory(data.data(), static_cast<py::ssize_t>(data.size() * sizeof(T)));
}

void bind_stage(py::module_& m) {
  m.def("first_breach", &first_breach, py::arg("tokens").noconvert(), py::arg("mask").noconvert(),
        py::arg("starts").noconvert(), py::arg("lengths").noconvert(), py::arg("sequences").noconvert(),
        "token_aligned"_a, "capacity"_a, "token_dtype"_a, "mask_dtype"_a,
        "The first rule that packs break when stored in these dtypes, as (rule, pack, position, found, expected) and as"
        " text; None if they break none.");
  py::class_<PackStage>(m, "PackStage", "Checks packs and copies them into the form in which they are written.")
      .def(py::init([](const py::dtype& tokens, const py::dtype& mask, std::int64_t capacity, std::int64_t multiple,
                       std::size_t room, std::int64_t vocab_size) {
             return PackStage(token_type_of(tokens), mask_type_of(mask), capacity, multiple, room, vocab_size);
           }),
           "token_dtype"_a, "mask_dtype"_a, "capacity"_a, "sequence_multiple"_a, "room"_a, "vocab_size"_a = 0)
      .def("add", &stage_add, py::arg("tokens").noconvert(), py::arg("mask").noconvert(),
           py::arg("starts").noconvert(), py::arg("lengths").noconvert(), py::arg("sequences").noconvert(), "token_aligned"_a)
      .def("add_one", &stage_add_one, py::arg("tokens").noconvert(), py::arg("mask").noconvert(),
           py::arg("starts").noconvert(), "token_aligned"_a, "add() for one pack, which is the whole of the arrays.")
      .def("count", &stage_count, py::arg("tokens").noconvert(), py::arg("mask").noconvert(),
           py::arg("starts").noconvert(), py::arg("lengths").noconvert(), py::arg("sequences").noconvert())
      .def("clear", &PackStage::clear)
      .def_property_readonly("tokens", [](const PackStage& s) { return staged(s.tokens()); })
      .def_property_readonly("mask", [](const PackStage& s) { return staged(s.mask()); })
      .def_property_readonly("starts", [](const PackStage& s) { return staged(s.starts()); })
      .def_property_readonly("records", [](const PackStage& s) { return staged(s.records()); })
      .def_property_readonly("num_packs", [](const PackStage& s) { return s.totals().packs; })
      .def_property_readonly("num_sequences", [](const PackStage& s) { return s.totals().sequences; })
      .def_property_readonly("num_tokens", [](const PackStage& s) { return s.totals().tokens; })
      .def_property_readonly("num_trained_tokens", [](const PackStage& s) { return s.totals().trained_tokens; })
      .def_property_readonly("num_masked_packs", [](const PackStage& s) { return s.totals().masked_packs; })
      .def_property_readonly("dropped_first_tokens", [](const PackStage& s) { return s.totals().dropped_first; })
      .def_property_readonly("longest_pack", [](const PackStage& s) { return s.totals().sizes.longest; })
      .def_property_readonly("longest_padded_pack", [](const PackStage& s) { return s.totals().sizes.longest_padded; })
      .def_property_readonly("most_sequences", [](const PackStage& s) { return s.totals().sizes.most_sequences; });
}

// ---- gathering sequences ----

template <typename T>
void gather_sequences(const Array<T>& source, const Array<std::int64_t>& starts, const Array<std::int64_t>& lengths,
                      const Array<std::int64_t>& places, Array<T> out) {
  require_vector(source, "source");
  require_vector(starts, "starts");
  require_vector(lengths, "lengths");
  require_vector(places, "places");
  require_vector(out, "out");
  if (starts.size() != lengths.size() || starts.size() != places.size()) {
    throw std::invalid_argument("expected one start, one length and one place per sequence");
  }
  const void* from = source.data();
  void* to = out.mutable_data();
  const auto *first = starts.data(), *count = lengths.data(), *place = places.data();
  const auto items = static_cast<std::size_t>(source.size()), room = static_cast<std::size_t>(out.size());
  const auto sequences = static_cast<std::size_t>(starts.size());
  py::gil_scoped_release unlocked;
  sft_idx::gather_sequences(from, items, sizeof(T), first, count, place, sequences, to, room);
}

template <typename T>
void bind_gather(py::module_& m) {
  m.def("gather_sequences", &gather_sequences<T>, py::arg("source").noconvert(), py::arg("starts").noconvert(),
        py::arg("lengths").noconvert(), py::arg("places").noconvert(), py::arg("out").noconvert(),
        "For each sequence s, copy lengths[s] items from source[starts[s]] on to out[places[s]] on.");
}

Array<std::int64_t> absolute_offsets(const Array<std::int64_t>& sequence_offsets,
                                     const Array<std::int64_t>& token_offsets, const Array<std::uint32_t>& starts) {
  require_vector(sequence_offsets, "sequence_offsets");
  require_vector(token_offsets, "token_offsets");
  require_vector(starts, "starts");
  if (sequence_offsets.size() < 1 || sequence_offsets.size() != token_offsets.size()) {
    throw std::invalid_argument("sequence_offsets and token_offsets must have packs + 1 values each");
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

void bind_shard(py::module_& m) {
  m.def("offsets_from_lengths", &offsets_from_lengths, py::arg("lengths").noconvert(), "scale"_a = 1, "start"_a = 0,
        "Running sums of int64 lengths, times scale, from start: int64 [n + 1].");
  m.def("pack_segments", &pack_segments, "indexes"_a, py::arg("shards").noconvert(), py::arg("packs").noconvert(),
        "limits"_a = kNoLimits,
        "The sequences of some packs of some shards: CSR offsets int64, shards int32, first tokens and lengths int64.");
  bind_stage(m);
  bind_gather<std::uint16_t>(m);
  bind_gather<std::int32_t>(m);
  bind_gather<std::uint8_t>(m);
  bind_gather<float>(m);
  m.def("absolute_offsets", &absolute_offsets, py::arg("sequence_offsets").noconvert(),
        py::arg("token_offsets").noconvert(), py::arg("starts").noconvert(),
        "The start of each sequence among all tokens of a shard, and the number of tokens: int64 [n + 1].");
}
