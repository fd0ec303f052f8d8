#include "runs.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace sft_idx {
namespace {

void check_bounds(const std::int64_t* bounds, std::size_t runs, std::size_t size) {
  if (bounds[0] < 0 || bounds[runs] > static_cast<std::int64_t>(size)) {
    throw std::invalid_argument("bounds from " + std::to_string(bounds[0]) + " to " + std::to_string(bounds[runs]) +
                                " exceed an array of " + std::to_string(size));
  }
  for (std::size_t i = 0; i < runs; ++i) {
    if (bounds[i + 1] < bounds[i]) {
      throw std::invalid_argument("bounds[" + std::to_string(i + 1) + "] is smaller than the bound before it");
    }
  }
}

// A number that is the same for equal values of different types: ids unchanged, masks as the bits of their float32.
template <typename Value>
std::uint64_t number_of(Value value) {
  if constexpr (std::is_same_v<Value, std::uint8_t> || std::is_same_v<Value, float>) {
    const float weight = static_cast<float>(value) + 0.0f;  // -0 becomes 0
    std::uint32_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return bits;
  } else {
    return static_cast<std::uint32_t>(value);
  }
}

}  // namespace

template <typename Mask>
void count_positive(const Mask* values, std::size_t size, const std::int64_t* bounds, std::size_t runs,
                    std::int64_t* out) {
  check_bounds(bounds, runs, size);
  for (std::size_t i = 0; i < runs; ++i) {
    std::int64_t count = 0;
    for (std::int64_t j = bounds[i]; j < bounds[i + 1]; ++j) count += values[j] > 0;
    out[i] = count;
  }
}

template void count_positive(const std::uint8_t*, std::size_t, const std::int64_t*, std::size_t, std::int64_t*);
template void count_positive(const float*, std::size_t, const std::int64_t*, std::size_t, std::int64_t*);

template <typename Value>
void hash_runs(const Value* values, std::size_t size, const std::int64_t* bounds, std::size_t runs,
               std::uint64_t* out) {
  check_bounds(bounds, runs, size);
  for (std::size_t i = 0; i < runs; ++i) {
    // One multiplication per value, from MurmurHash3's finalizer; the shift moves high bits back down.
    std::uint64_t hash = 0x9e3779b97f4a7c15u;
    for (std::int64_t j = bounds[i]; j < bounds[i + 1]; ++j) {
      hash = (hash ^ number_of(values[j])) * 0xff51afd7ed558ccdu;
      hash ^= hash >> 32;
    }
    out[i] = hash;
  }
}

template void hash_runs(const std::uint16_t*, std::size_t, const std::int64_t*, std::size_t, std::uint64_t*);
template void hash_runs(const std::int32_t*, std::size_t, const std::int64_t*, std::size_t, std::uint64_t*);
template void hash_runs(const std::uint8_t*, std::size_t, const std::int64_t*, std::size_t, std::uint64_t*);
template void hash_runs(const float*, std::size_t, const std::int64_t*, std::size_t, std::uint64_t*);

void gather_sequences(const void* source, std::size_t source_count, std::size_t item_nbytes,
                      const std::int64_t* starts, const std::int64_t* lengths, const std::int64_t* places,
                      std::size_t sequences, void* out, std::size_t out_count) {
  const auto* from = static_cast<const char*>(source);
  auto* to = static_cast<char*>(out);
  const auto is_within = [](std::int64_t first, std::int64_t count, std::size_t size) {
    const auto items = static_cast<std::int64_t>(size);
    return first >= 0 && first <= items && count >= 0 && count <= items - first;
  };
  for (std::size_t s = 0; s < sequences; ++s) {
    const char* outside = !is_within(starts[s], lengths[s], source_count) ? "source"
                          : !is_within(places[s], lengths[s], out_count)  ? "output"
                                                                          : nullptr;
    if (outside != nullptr) {
      throw std::invalid_argument("sequence " + std::to_string(s) + " is outside the " + outside);
    }
    std::memcpy(to + static_cast<std::size_t>(places[s]) * item_nbytes,
                from + static_cast<std::size_t>(starts[s]) * item_nbytes,
                static_cast<std::size_t>(lengths[s]) * item_nbytes);
  }
}

}  // namespace sft_idx
