#include "pickles.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

namespace sft_idx {
namespace {

// Kind of the argument after an opcode. Small values are a number of bytes.
enum Argument : std::uint8_t {
  kNone = 0,
  kLine = 10,       // up to a newline
  kTwoLines = 11,
  kSized1 = 21,     // a length of 1, 4 or 8 bytes, then as many bytes
  kSized4 = 24,
  kSized8 = 28,
  kMemo1 = 31,      // a memo number of 1 or 4 bytes, or as decimal digits up to a newline
  kMemo4 = 34,
  kMemoLine = 39,
  kFrame = 48,      // a length of 8 bytes: the unpickler reads that many bytes at once; opcodes follow
  kUnknown = 255,
};

// See Python's pickletools.
constexpr std::array<std::uint8_t, 256> make_arguments() {
  std::array<std::uint8_t, 256> table{};
  for (auto& argument : table) argument = kUnknown;
  for (const char opcode : {'(', '.', '0', '1', '2', 'N', 'R', 'b', 'a', 'e', '}', ']', 'l', 'd', 's', 'u', 't', ')',
                            'Q', 'o'}) {
    table[static_cast<std::uint8_t>(opcode)] = kNone;
  }
  for (const int opcode : {0x81, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8f, 0x90, 0x91, 0x92, 0x93, 0x94, 0x97, 0x98}) {
    table[static_cast<std::size_t>(opcode)] = kNone;
  }
  for (const int opcode : {int{'K'}, 0x80, 0x82}) table[static_cast<std::size_t>(opcode)] = 1;
  for (const int opcode : {int{'M'}, 0x83}) table[static_cast<std::size_t>(opcode)] = 2;
  for (const int opcode : {int{'J'}, 0x84}) table[static_cast<std::size_t>(opcode)] = 4;
  table['G'] = 8;
  table[0x95] = kFrame;
  for (const char opcode : {'I', 'L', 'F', 'S', 'V', 'P'}) table[static_cast<std::uint8_t>(opcode)] = kLine;
  for (const char opcode : {'c', 'i'}) table[static_cast<std::uint8_t>(opcode)] = kTwoLines;
  for (const int opcode : {int{'U'}, int{'C'}, 0x8a, 0x8c}) table[static_cast<std::size_t>(opcode)] = kSized1;
  for (const int opcode : {int{'T'}, int{'X'}, int{'B'}, 0x8b}) table[static_cast<std::size_t>(opcode)] = kSized4;
  for (const int opcode : {0x8d, 0x8e, 0x96}) table[static_cast<std::size_t>(opcode)] = kSized8;
  for (const char opcode : {'h', 'q'}) table[static_cast<std::uint8_t>(opcode)] = kMemo1;
  for (const char opcode : {'j', 'r'}) table[static_cast<std::uint8_t>(opcode)] = kMemo4;
  for (const char opcode : {'g', 'p'}) table[static_cast<std::uint8_t>(opcode)] = kMemoLine;
  return table;
}

constexpr auto kArguments = make_arguments();

class Walk {
 public:
  Walk(const std::uint8_t* data, std::size_t nbytes) : data_(data), nbytes_(nbytes) {}

  std::size_t run() {
    std::uint8_t opcode = 0;
    while (opcode != '.') {
      at_ = next_;
      opcode = static_cast<std::uint8_t>(number(1));
      argument(kArguments[opcode]);
    }
    return next_;
  }

 private:
  void argument(std::uint8_t kind) {
    switch (kind) {
      case kLine:
        line();
        break;
      case kTwoLines:
        line();
        line();
        break;
      case kSized1:
      case kSized4:
      case kSized8:
        skip(number(kind - 20));
        break;
      case kMemo1:
      case kMemo4:
        memo(number(kind - 30));
        break;
      case kMemoLine:
        memo(decimal());
        break;
      case kFrame:
        if (number(8) > nbytes_ - next_) fail("a frame extends past the end");
        break;
      case kUnknown:
        fail("not an opcode of a pickle");
      default:
        skip(kind);
    }
  }

  std::uint64_t number(std::size_t size) {
    const std::size_t begin = next_;
    skip(size);
    std::uint64_t value = 0;
    for (std::size_t i = size; i > 0; --i) value = value << 8 | data_[begin + i - 1];
    return value;
  }

  void skip(std::uint64_t size) {
    if (size > nbytes_ - next_) fail("an argument extends past the end");
    next_ += static_cast<std::size_t>(size);
  }

  // The first byte of a line. Skips the line and its newline.
  std::size_t line() {
    const auto* end = std::find(data_ + next_, data_ + nbytes_, std::uint8_t{'\n'});
    if (end == data_ + nbytes_) fail("a line has no end");
    const std::size_t begin = next_;
    next_ = static_cast<std::size_t>(end - data_) + 1;
    return begin;
  }

  std::uint64_t decimal() {
    std::uint64_t value = 0;
    for (std::size_t i = line(); i + 1 < next_; ++i) {
      const unsigned digit = data_[i] - unsigned{'0'};
      // Python also accepts signs, spaces and underscores, but no pickler writes them here.
      if (digit > 9 || value > nbytes_) fail("an invalid memo number");
      value = 10 * value + digit;
    }
    return value;
  }

  void memo(std::uint64_t index) {
    // An entry needs at least one byte, so no valid number is this large.
    if (index >= nbytes_) {
      fail("memo number " + std::to_string(index) + " in a pickle of " + std::to_string(nbytes_) + " bytes");
    }
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument("byte " + std::to_string(at_) + " of the pickle: " + what);
  }

  const std::uint8_t* data_;
  std::size_t nbytes_;
  std::size_t at_ = 0;
  std::size_t next_ = 0;
};

}  // namespace

std::size_t check_pickle(const std::uint8_t* data, std::size_t nbytes) { return Walk(data, nbytes).run(); }

}  // namespace sft_idx
