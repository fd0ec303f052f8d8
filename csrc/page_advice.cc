#include "page_advice.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace sft_idx {
namespace {

std::uintptr_t page_nbytes() {
  static const auto size = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// Addresses of whole pages.
struct Pages {
  std::uintptr_t begin, end;
};

Pages pages_of(std::uintptr_t begin, std::uintptr_t end) {
  const std::uintptr_t page = page_nbytes();
  return {begin / page * page, (end + page - 1) / page * page};
}

bool advise(Pages pages, int advice) {
  return pages.begin < pages.end &&
         madvise(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin, advice) == 0;
}

}  // namespace

std::int64_t advise_will_need(const void* data, std::size_t count, std::size_t item_nbytes, const std::int64_t* starts,
                              const std::int64_t* stops, std::size_t ranges) {
  for (std::size_t i = 0; i < ranges; ++i) {
    if (starts[i] < 0 || stops[i] < starts[i] || stops[i] > static_cast<std::int64_t>(count)) {
      throw std::invalid_argument("range " + std::to_string(i) + " is outside the array");
    }
  }
  const auto base = reinterpret_cast<std::uintptr_t>(data);
  std::int64_t accepted = 0;
  Pages open{0, 0};
  for (std::size_t i = 0; i < ranges; ++i) {
    if (starts[i] == stops[i]) continue;
    const Pages next = pages_of(base + static_cast<std::uintptr_t>(starts[i]) * item_nbytes,
                                base + static_cast<std::uintptr_t>(stops[i]) * item_nbytes);
    if (next.begin >= open.begin && next.begin <= open.end) {
      open.end = std::max(open.end, next.end);
      continue;
    }
    accepted += advise(open, MADV_WILLNEED) ? 1 : 0;
    open = next;
  }
  return accepted + (advise(open, MADV_WILLNEED) ? 1 : 0);
}

std::int64_t resident_nbytes(const void* data, std::size_t nbytes) {
  const auto page = static_cast<std::size_t>(page_nbytes());
  constexpr std::size_t pages_a_call = std::size_t{1} << 16;
  std::vector<unsigned char> found(std::min(pages_a_call, nbytes / page + 1));
  std::int64_t resident = 0;
  // mincore takes a non-const pointer, but does not change the memory.
  auto* base = static_cast<char*>(const_cast<void*>(data));
  for (std::size_t done = 0; done < nbytes;) {
    const std::size_t part = std::min(nbytes - done, found.size() * page);
    if (mincore(base + done, part, found.data()) != 0) {
      throw std::invalid_argument(std::string("mincore: ") + std::strerror(errno) +
                                  ": expected an array over a memory map");
    }
    for (std::size_t i = 0; i * page < part; ++i) {
      if ((found[i] & 1) != 0) resident += static_cast<std::int64_t>(std::min(page, part - i * page));
    }
    done += part;
  }
  return resident;
}

}  // namespace sft_idx
