// Bindings for elements of JSON arrays, and for token weights from character spans.
#include <string_view>

#include "bindings/common.h"
#include "json_scan.h"
#include "spans.h"

namespace {

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
  return py::make_tuple(to_array(separators), state.depth, state.in_string, state.escaped);
}

// ---- spans ----

template <typename T>
void check_offsets(const Array<T>& offsets, std::int64_t end, const char* name) {
  const auto fail = [name](const char* why) { throw std::invalid_argument(std::string(name) + why); };
  if (offsets.ndim() != 1 || offsets.size() < 1) fail(" must be one-dimensional with at least one value");
  const auto* at = offsets.data();
  if (at[0] != 0 || at[offsets.size() - 1] != end) fail(" must run from 0 to the number of values they divide");
  for (py::ssize_t i = 1; i < offsets.size(); ++i) {
    if (at[i] < at[i - 1]) fail(" must not descend");
  }
}

py::tuple weigh_tokens(const Array<std::uint32_t>& ids, const Array<std::int64_t>& id_offsets, const py::bytes& text,
                       const Array<std::int64_t>& text_offsets, const py::bytes& token_bytes,
                       const Array<std::int64_t>& token_offsets, const Array<std::int64_t>& span_edges,
                       const Array<float>& span_weights, const Array<std::int64_t>& span_offsets) {
  const std::string_view utf8 = text;
  const std::string_view spellings = token_bytes;
  if (ids.ndim() != 1) throw std::invalid_argument("ids must be one-dimensional");
  if (span_edges.ndim() != 2 || span_edges.shape(1) != 2) throw std::invalid_argument("span_edges must be [spans, 2]");
  if (span_weights.ndim() != 1 || span_weights.size() != span_edges.shape(0)) {
    throw std::invalid_argument("span_weights must have one value per span");
  }
  check_offsets(id_offsets, ids.size(), "id_offsets");
  check_offsets(text_offsets, static_cast<std::int64_t>(utf8.size()), "text_offsets");
  if (token_offsets.ndim() != 1 || token_offsets.size() < 1) {
    throw std::invalid_argument("token_offsets must be one-dimensional with at least one value");
  }
  check_offsets(span_offsets, span_edges.shape(0), "span_offsets");
  const auto rows = id_offsets.size() - 1;
  if (text_offsets.size() - 1 != rows || span_offsets.size() - 1 != rows) {
    throw std::invalid_argument("id_offsets, text_offsets and span_offsets must have the same number of rows");
  }
  Array<float> weights(ids.size());
  Array<std::int64_t> straddling(rows);
  Array<std::uint8_t> spelled(rows);
  const sft_idx::TokenizedTexts texts{ids.data(), id_offsets.data(), reinterpret_cast<const std::uint8_t*>(utf8.data()),
                                      text_offsets.data(), static_cast<std::size_t>(rows)};
  const sft_idx::TokenBytes tokens{reinterpret_cast<const std::uint8_t*>(spellings.data()),
                                   static_cast<std::int64_t>(spellings.size()), token_offsets.data(),
                                   static_cast<std::size_t>(token_offsets.size() - 1)};
  const sft_idx::CharacterSpans spans{span_offsets.data(), span_edges.data(), span_weights.data()};
  auto* weights_out = weights.mutable_data();
  auto* straddling_out = straddling.mutable_data();
  auto* spelled_out = spelled.mutable_data();
  {
    py::gil_scoped_release unlocked;
    sft_idx::weigh_tokens(texts, tokens, spans, weights_out, straddling_out, spelled_out);
  }
  return py::make_tuple(weights, straddling, spelled);
}

}  // namespace

void bind_chat(py::module_& m) {
  m.def("scan_json_array", &scan_json_array, py::arg("block").noconvert(), "depth"_a, "in_string"_a, "escaped"_a,
        "Ends of a JSON array's elements in a uint8 block: (int64 positions, depth, in_string, escaped).");
  m.def("weigh_tokens", &weigh_tokens, py::arg("ids").noconvert(), py::arg("id_offsets").noconvert(), "text"_a,
        py::arg("text_offsets").noconvert(), "token_bytes"_a, py::arg("token_offsets").noconvert(),
        py::arg("span_edges").noconvert(), py::arg("span_weights").noconvert(), py::arg("span_offsets").noconvert(),
        "Weights of the tokens under character spans: (weights, straddling, spelled).");
}
