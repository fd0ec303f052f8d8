#include "pickles.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

namespace sft_idx {

namespace {

// Kind of a value on the stack of the pickle machine. The numbers of pairs are already in the output.
enum class Kind : std::uint8_t { kMark, kInteger, kPair, kList };

constexpr std::uint8_t kNewestProtocol = 5;

class Machine {
 public:
  Machine(const std::uint8_t* data, std::size_t nbytes) : data_(data), nbytes_(nbytes) {}

  std::vector<std::int64_t> run() {
    bool stopped = false;
    while (!stopped) {
      at_ = next_;
      stopped = step(*take(1));
    }
    if (stack_ != std::vector<Kind>{Kind::kList}) fail("the pickle ends without one complete list");
    if (next_ != nbytes_) fail("bytes follow the end of the pickle");
    return std::move(values_);
  }

 private:
  // Processes one opcode (names from Python's pickletools). Returns true for STOP.
  bool step(std::uint8_t opcode) {
    switch (opcode) {
      case 0x80:  // PROTO
        if (*take(1) > kNewestProtocol) fail("an unknown pickle protocol");
        break;
      case 0x95:  // FRAME
        take(8);
        break;
      case 'q':  // BINPUT: stores a value under a number; has no effect without the opcodes that load it
        take(1);
        break;
      case 'r':  // LONG_BINPUT
        take(4);
        break;
      case 'p':  // PUT
        decimal(line());
        break;
      case 0x94:  // MEMOIZE
        break;
      case '(':  // MARK
        stack_.push_back(Kind::kMark);
        break;
      case ']':  // EMPTY_LIST
        stack_.push_back(Kind::kList);
        break;
      case 'l':  // LIST
        reduce({Kind::kMark}, Kind::kList);
        break;
      case 0x86:  // TUPLE2
        reduce({Kind::kInteger, Kind::kInteger}, Kind::kPair);
        break;
      case 't':  // TUPLE
        reduce({Kind::kMark, Kind::kInteger, Kind::kInteger}, Kind::kPair);
        break;
      case 'a':  // APPEND
        reduce({Kind::kList, Kind::kPair}, Kind::kList);
        break;
      case 'e':  // APPENDS
        while (!stack_.empty() && stack_.back() == Kind::kPair) stack_.pop_back();
        reduce({Kind::kList, Kind::kMark}, Kind::kList);
        break;
      case '.':  // STOP
        return true;
      default:
        push_integer(integer(opcode));
    }
    return false;
  }

  std::int64_t integer(std::uint8_t opcode) {
    switch (opcode) {
      case 'K':  // BININT1
        return little_endian(1, false);
      case 'M':  // BININT2
        return little_endian(2, false);
      case 'J':  // BININT
        return little_endian(4, true);
      case 0x8a:  // LONG1
        return little_endian(*take(1), true);
      case 0x8b: {  // LONG4
        const auto size = little_endian(4, true);
        if (size < 0) fail("a negative size");
        return little_endian(static_cast<std::uint64_t>(size), true);
      }
      case 'I':  // INT
        return decimal(line());
      case 'L':  // LONG: the number, then the letter again
        return decimal(long_line());
      default:
        char hex[8];
        std::snprintf(hex, sizeof hex, "0x%02x", opcode);
        fail(std::string("pickle opcode ") + hex + ", which no list of pairs of integers needs");
    }
  }

  std::int64_t little_endian(std::uint64_t size, bool is_signed) {
    if (size > sizeof(std::int64_t)) fail("an integer of more than 64 bits");
    const auto* bytes = take(static_cast<std::size_t>(size));
    std::uint64_t value = 0;
    for (std::uint64_t i = 0; i < size; ++i) value |= std::uint64_t{bytes[i]} << (8 * i);
    if (is_signed && size && size < 8 && bytes[size - 1] & 0x80) value |= ~std::uint64_t{0} << (8 * size);
    return static_cast<std::int64_t>(value);
  }

  std::int64_t decimal(const std::string& text) const {
    std::int64_t value = 0;
    const auto* end = text.data() + text.size();
    const auto result = std::from_chars(text.data(), end, value);
    if (text.empty() || result.ec != std::errc() || result.ptr != end) fail("not a decimal integer of 64 bits");
    return value;
  }

  void push_integer(std::int64_t value) {
    // Two at a time, so that the output has the numbers of the pairs in order.
    if (stack_.size() > 1 && stack_.back() == Kind::kInteger && stack_[stack_.size() - 2] == Kind::kInteger) {
      fail("three integers in a row, expected pairs");
    }
    stack_.push_back(Kind::kInteger);
    values_.push_back(value);
  }

  // Replaces the top of the stack, which must have the given kinds, bottom first.
  void reduce(std::initializer_list<Kind> top, Kind made) {
    if (stack_.size() < top.size() || !std::equal(top.begin(), top.end(), stack_.end() - top.size())) {
      fail("not a list of pairs of integers");
    }
    stack_.resize(stack_.size() - top.size());
    stack_.push_back(made);
  }

  const std::uint8_t* take(std::size_t count) {
    if (count > nbytes_ - next_) fail("the pickle is truncated");
    const auto* start = data_ + next_;
    next_ += count;
    return start;
  }

  std::string line() {
    const auto* start = data_ + next_;
    const auto* end = std::find(start, data_ + nbytes_, '\n');
    const auto* taken = take(static_cast<std::size_t>(end - start) + 1);
    return {taken, taken + (end - start)};
  }

  std::string long_line() {
    auto text = line();
    if (!text.empty() && text.back() == 'L') text.pop_back();
    return text;
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw std::invalid_argument("byte " + std::to_string(at_) + ": " + why);
  }

  const std::uint8_t* data_;
  std::size_t nbytes_;
  std::size_t at_ = 0;    // of the opcode being read
  std::size_t next_ = 0;  // byte to read next
  std::vector<Kind> stack_;
  std::vector<std::int64_t> values_;
};

}  // namespace

std::vector<std::int64_t> parse_pickled_pairs(const std::uint8_t* data, std::size_t nbytes) {
  return Machine(data, nbytes).run();
}

}  // namespace sft_idx
