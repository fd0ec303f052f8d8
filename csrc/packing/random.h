// Random numbers that are the same on every machine and with every standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace sft_idx::packing {

// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
// std::shuffle and std::uniform_int_distribution are not used, because their results depend on the library.
class Random {
 public:
  // Streams of one seed are independent. Each use has its own stream, so that no use changes the numbers of another.
  Random(std::uint64_t seed, std::uint64_t stream) : state_(mix(seed) ^ mix(~stream)) {}

  std::uint64_t next() { return mix(state_ += 0x9E3779B97F4A7C15ULL); }

  // Uniform in [0, bound), bound > 0, by the high half of a product (Lemire, "Fast random integer generation in
  // an interval", 2019). Without his rejection step: the bias is at most bound / 2^64.
  std::uint64_t below(std::uint64_t bound) {
    return static_cast<std::uint64_t>((static_cast<unsigned __int128>(next()) * bound) >> 64);
  }

 private:
  static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }

  std::uint64_t state_;
};

// Uses of the streams of the caller's seed.
enum Stream : std::uint64_t { kItems = 1, kPacks = 2, kPatterns = 3, kOrder = 4 };

// Fisher-Yates, from the end. If 32 bits are enough, one random number is used for two values: both halves are as
// uniform as the whole, and hand-out spends most of its time on the shuffle.
template <typename T>
void shuffle(T* values, std::size_t count, Random& random) {
  std::size_t i = count;
  for (; i > 0xFFFFFFFF; --i) std::swap(values[i - 1], values[random.below(i)]);
  for (; i > 2; i -= 2) {
    const std::uint64_t bits = random.next();
    std::swap(values[i - 1], values[(bits >> 32) * i >> 32]);
    std::swap(values[i - 2], values[(bits & 0xFFFFFFFF) * (i - 1) >> 32]);
  }
  if (i == 2) std::swap(values[1], values[random.below(2)]);
}

}  // namespace sft_idx::packing
