// Bindings for micro-batches, and for advice to the kernel about the pages that they will read.
#include "batch.h"
#include "bindings/common.h"
#include "page_advice.h"

namespace {

using Ints = Array<std::int32_t>;
using Longs = Array<std::int64_t>;

// ---- reading ----

bool has_dtype(const py::array& array, char kind, py::ssize_t itemsize) {
  const py::dtype dtype = array.dtype();
  return dtype.kind() == kind && dtype.itemsize() == itemsize && dtype.byteorder() != '>';
}

sft_idx::ShardView view_of(const py::array& tokens, const py::array& loss) {
  require_vector(tokens, "tokens");
  require_vector(loss, "loss masks");
  if (tokens.size() != loss.size()) {
    throw std::invalid_argument(std::to_string(loss.size()) + " loss mask values for " + std::to_string(tokens.size()) +
                                " tokens, expected one per token");
  }
  const bool u16 = has_dtype(tokens, 'u', 2), u8 = has_dtype(loss, 'u', 1);
  if (!u16 && !has_dtype(tokens, 'i', 4)) throw py::type_error("tokens must be uint16 or int32");
  if (!u8 && !has_dtype(loss, 'f', 4)) throw py::type_error("loss masks must be uint8 or float32");
  return {tokens.data(), loss.data(), tokens.size(), u16 ? sft_idx::IdType::u16 : sft_idx::IdType::i32,
          u8 ? sft_idx::LossType::u8 : sft_idx::LossType::f32};
}

// The shards of a batch. Keeps their arrays alive, because another thread may change the list during the call.
struct Shards {
  std::vector<py::array> arrays;
  std::vector<sft_idx::ShardView> views;

  explicit Shards(const py::list& shards) {
    for (const py::handle item : shards) {
      if (item.is_none()) {
        views.emplace_back();
        continue;
      }
      const auto pair = py::cast<py::tuple>(item);
      if (pair.size() < 2 || !py::isinstance<py::array>(pair[0]) || !py::isinstance<py::array>(pair[1])) {
        throw py::type_error("a shard must be None, or begin with a pair of arrays, tokens and loss masks");
      }
      arrays.push_back(py::reinterpret_borrow<py::array>(pair[0]));
      arrays.push_back(py::reinterpret_borrow<py::array>(pair[1]));
      views.push_back(view_of(arrays[arrays.size() - 2], arrays.back()));
    }
  }
};

sft_idx::SegmentTable table_of(const Longs& offsets, const Ints& shards, const Longs& starts, const Longs& lengths) {
  require_vector(offsets, "offsets");
  require_vector(shards, "shards");
  require_vector(starts, "starts");
  require_vector(lengths, "lengths");
  if (offsets.size() < 1 || shards.size() != starts.size() || starts.size() != lengths.size()) {
    throw std::invalid_argument("segments need rows + 1 offsets, and one shard, start and length per segment");
  }
  return {offsets.data(), static_cast<std::size_t>(offsets.size() - 1), shards.data(), starts.data(), lengths.data(),
          static_cast<std::size_t>(starts.size())};
}

// ---- writing ----

void require_matrix(const py::array& array, std::size_t rows, py::ssize_t columns, const char* name) {
  if (!is_plain(array, 2) || array.shape(0) != static_cast<py::ssize_t>(rows) || array.shape(1) != columns) {
    throw std::invalid_argument(std::string(name) + " must be contiguous, aligned, and of shape [" +
                                std::to_string(rows) + ", " + std::to_string(columns) + "]");
  }
}

py::ssize_t columns_of(const py::array& array, const char* name) {
  if (array.ndim() != 2) throw std::invalid_argument(std::string(name) + " must be two-dimensional");
  return array.shape(1);
}

// A column is a tuple, because tuples cannot change during the call: what has a row (1 token, 2 sequence, 3 pack), the
// bytes of a row, the rows of each shard, the shard and the first row of each segment (or pack), and the output.
sft_idx::BatchColumn column_of(const py::handle given, const sft_idx::SegmentTable& table, py::ssize_t seq_length,
                               py::ssize_t width) {
  if (!py::isinstance<py::tuple>(given)) throw py::type_error("a column must be a tuple");
  auto [per, nbytes, shards, slots, starts, out] =
      given.cast<std::tuple<int, py::ssize_t, py::tuple, py::array, py::array, py::array>>();
  if (per < 1 || per > 3 || nbytes < 1) {
    throw std::invalid_argument("columns: per must be 1, 2 or 3, and rows need at least one byte");
  }
  if (!has_dtype(slots, 'i', 4) || !has_dtype(starts, 'i', 8)) {
    throw py::type_error("columns: shards must be int32, and first rows int64");
  }
  require_vector(slots, "slots");
  require_vector(starts, "starts");
  const auto entries = static_cast<py::ssize_t>(per == 3 ? table.rows : table.segments);
  if (slots.size() != entries || starts.size() != entries) {
    throw std::invalid_argument("columns need one shard and one first row per segment or pack");
  }
  const py::ssize_t a_row = per == 1 ? seq_length : per == 2 ? width - 1 : 1;
  if (!(out.flags() & py::array::c_style) || out.nbytes() / nbytes != static_cast<py::ssize_t>(table.rows) * a_row ||
      out.nbytes() % nbytes != 0) {
    throw std::invalid_argument("columns: an output must be contiguous, with the number of rows of the batch");
  }
  sft_idx::BatchColumn column{static_cast<sft_idx::Per>(per), static_cast<std::size_t>(nbytes), {},
                              static_cast<const std::int32_t*>(slots.data()),
                              static_cast<const std::int64_t*>(starts.data()), out.mutable_data()};
  for (const py::handle item : shards) {
    const auto rows = item.cast<py::array>();
    if (!(rows.flags() & py::array::c_style) || rows.nbytes() % nbytes != 0) {
      throw std::invalid_argument("columns: the rows of a shard must be contiguous and complete");
    }
    column.shards.push_back({rows.data(), rows.nbytes() / nbytes});
  }
  return column;
}

void assemble(const py::list& shards, const Longs& offsets, const Ints& segment_shards, const Longs& starts,
              const Longs& lengths, std::int64_t multiple, std::int32_t pad_id, py::array tokens,
              std::optional<Longs> labels, std::optional<Longs> position_ids, py::array loss_mask, Ints cu_seqlens,
              std::optional<Ints> cu_seqlens_padded, Ints max_seqlen, const py::tuple& columns) {
  const Shards from(shards);
  const auto table = table_of(offsets, segment_shards, starts, lengths);
  const bool wide = labels.has_value(), u8 = !wide && has_dtype(loss_mask, 'u', 1);
  if (wide != position_ids.has_value()) throw std::invalid_argument("labels and position_ids must be given together");
  if (!has_dtype(tokens, 'i', wide ? 8 : 4)) throw py::type_error("tokens must be int64 with labels, otherwise int32");
  if (!u8 && !has_dtype(loss_mask, 'f', 4)) throw py::type_error("loss masks must be float32, or uint8 without labels");
  const py::ssize_t seq_length = columns_of(tokens, "tokens");
  require_matrix(tokens, table.rows, seq_length, "tokens");
  if (wide) require_matrix(*labels, table.rows, seq_length, "labels");
  if (wide) require_matrix(*position_ids, table.rows, seq_length, "position_ids");
  require_matrix(loss_mask, table.rows, seq_length, "loss_mask");
  const py::ssize_t width = columns_of(cu_seqlens, "cu_seqlens");
  require_matrix(cu_seqlens, table.rows, width, "cu_seqlens");
  require_vector(max_seqlen, "max_seqlen");
  if (static_cast<std::size_t>(max_seqlen.size()) != table.rows) {
    throw std::invalid_argument("expected one max_seqlen per row");
  }
  auto& padded = cu_seqlens_padded;
  if (padded.has_value() != (multiple > 1)) {
    throw std::invalid_argument("cu_seqlens_padded must be given if and only if the sequence multiple is above 1");
  }
  if (padded) require_matrix(*padded, table.rows, width, "cu_seqlens_padded");
  const sft_idx::BoundariesOut bounds{cu_seqlens.mutable_data(), padded ? padded->mutable_data() : nullptr,
                                      max_seqlen.mutable_data()};
  const sft_idx::BatchShape shape{seq_length, width, multiple, pad_id};
  const sft_idx::BatchOut out{tokens.mutable_data(), wide ? labels->mutable_data() : nullptr,
                              wide ? position_ids->mutable_data() : nullptr, loss_mask.mutable_data(),
                              u8 ? sft_idx::LossType::u8 : sft_idx::LossType::f32};
  std::vector<sft_idx::BatchColumn> beside;
  for (const py::handle column : columns) beside.push_back(column_of(column, table, seq_length, width));
  py::gil_scoped_release unlocked;
  sft_idx::assemble(from.views, table, shape, bounds, out, beside);
}

// ---- advice ----

std::int64_t will_need(const py::array& array, const Longs& starts, const Longs& stops) {
  require_vector(array, "array");
  require_vector(starts, "starts");
  require_vector(stops, "stops");
  if (starts.size() != stops.size()) throw std::invalid_argument("expected one start and one stop per range");
  const void* data = array.data();
  const auto count = static_cast<std::size_t>(array.size()), ranges = static_cast<std::size_t>(starts.size());
  const auto item_nbytes = static_cast<std::size_t>(array.itemsize());
  const auto *begin = starts.data(), *end = stops.data();
  py::gil_scoped_release unlocked;
  return sft_idx::advise_will_need(data, count, item_nbytes, begin, end, ranges);
}

}  // namespace

void bind_training(py::module_& m) {
  m.def("assemble", &assemble, "shards"_a, py::arg("offsets").noconvert(), py::arg("segment_shards").noconvert(),
        py::arg("starts").noconvert(), py::arg("lengths").noconvert(), "multiple"_a, "pad_id"_a,
        py::arg("tokens").noconvert(), py::arg("labels").noconvert(), py::arg("position_ids").noconvert(),
        py::arg("loss_mask").noconvert(), py::arg("cu_seqlens").noconvert(), py::arg("cu_seqlens_padded").noconvert(),
        py::arg("max_seqlen").noconvert(), "columns"_a = py::tuple(),
        "Assemble a micro-batch in the dtypes of Megatron, or, without labels, only int32 ids and masks.");
  m.def("will_need", &will_need, py::arg("array").noconvert(), py::arg("starts").noconvert(),
        py::arg("stops").noconvert(),
        "Ask the kernel to read items [start, stop) of an array over a memory map in advance.");
}
