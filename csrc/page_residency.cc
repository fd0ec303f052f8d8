#include "page_residency.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace sft_idx {

std::int64_t resident_nbytes(const void* data, std::size_t nbytes) {
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  constexpr std::size_t pages_a_call = std::size_t{1} << 16;
  std::vector<unsigned char> found(std::min(pages_a_call, nbytes / page + 1));
  std::int64_t resident = 0;
  // mincore takes a pointer to what it does not change.
  auto* base = static_cast<char*>(const_cast<void*>(data));
  for (std::size_t done = 0; done < nbytes;) {
    const std::size_t part = std::min(nbytes - done, found.size() * page);
    if (mincore(base + done, part, found.data()) != 0) {
      throw std::invalid_argument(std::string("mincore: ") + std::strerror(errno) + ": expected an array over a map");
    }
    for (std::size_t i = 0; i * page < part; ++i) {
      if ((found[i] & 1) != 0) resident += static_cast<std::int64_t>(std::min(page, part - i * page));
    }
    done += part;
  }
  return resident;
}

}  // namespace sft_idx
