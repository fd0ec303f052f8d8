#include "stamped_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace sft_idx {
namespace {

std::int64_t nanoseconds(const timespec& time) {
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

Stamp stamp_of(const struct stat& status) {
  return {static_cast<std::uint64_t>(status.st_dev), static_cast<std::uint64_t>(status.st_ino), status.st_size,
          nanoseconds(status.st_mtim), nanoseconds(status.st_ctim)};
}

bool same(const Stamp& a, const Stamp& b) {
  return a.device == b.device && a.inode == b.inode && a.nbytes == b.nbytes && a.modified_ns == b.modified_ns &&
         a.changed_ns == b.changed_ns;
}

// An open file, closed at the end of the scope. Not open if the file no longer exists.
class Descriptor {
 public:
  // Opening a pipe would block until its other end is open, so open without blocking.
  explicit Descriptor(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (fd_ < 0 && errno != ENOENT && errno != ENOTDIR) throw FileError(errno, path);
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return fd_; }

  bool is(const Stamp& stamp, const std::string& path) const {
    struct stat status;
    if (fd_ < 0) return false;
    if (::fstat(fd_, &status) != 0) throw FileError(errno, path);
    return same(stamp_of(status), stamp);
  }

 private:
  int fd_;
};

// Returns false if the file ends before.
bool read_all(int fd, std::int64_t offset, std::size_t nbytes, char* out, const std::string& path) {
  while (nbytes > 0) {
    const ssize_t got = ::pread(fd, out, nbytes, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw FileError(errno, path);
    if (got == 0) return false;
    out += got;
    offset += got;
    nbytes -= static_cast<std::size_t>(got);
  }
  return true;
}

}  // namespace

StampedFile::StampedFile(std::string path) : path_(std::move(path)) {
  struct stat status;
  if (::stat(path_.c_str(), &status) != 0) throw FileError(errno, path_);
  if (!S_ISREG(status.st_mode)) throw FileError(S_ISDIR(status.st_mode) ? EISDIR : EINVAL, path_);
  stamp_ = stamp_of(status);
}

bool StampedFile::read(std::int64_t offset, std::size_t nbytes, void* out) const {
  const Descriptor file(path_);
  return file.is(stamp_, path_) && read_all(file.get(), offset, nbytes, static_cast<char*>(out), path_);
}

bool StampedFile::will_need(std::int64_t offset, std::int64_t nbytes) const {
  const Descriptor file(path_);
  return file.is(stamp_, path_) && ::posix_fadvise(file.get(), offset, nbytes, POSIX_FADV_WILLNEED) == 0;
}

std::size_t read_ranges(const FileRange* ranges, std::size_t count, void* out, std::size_t out_nbytes) {
  std::size_t room = out_nbytes;
  for (std::size_t i = 0; i < count; ++i) {
    const FileRange& range = ranges[i];
    if (range.offset < 0 || range.nbytes < 0 || range.offset > range.file->nbytes() ||
        range.nbytes > range.file->nbytes() - range.offset) {
      throw std::invalid_argument("range " + std::to_string(i) + " is outside " + range.file->path());
    }
    if (static_cast<std::size_t>(range.nbytes) > room) throw std::invalid_argument("the ranges do not fit the output");
    room -= static_cast<std::size_t>(range.nbytes);
  }
  if (room != 0) throw std::invalid_argument("the ranges do not fill the output");
  auto* to = static_cast<char*>(out);
  for (std::size_t i = 0; i < count; ++i) {
    const auto nbytes = static_cast<std::size_t>(ranges[i].nbytes);
    if (!ranges[i].file->read(ranges[i].offset, nbytes, to)) return i;
    to += nbytes;
  }
  return count;
}

std::size_t advise_ranges(const FileRange* ranges, std::size_t count) {
  std::size_t taken = 0;
  for (std::size_t i = 0; i < count; ++i) {
    taken += ranges[i].file->will_need(ranges[i].offset, ranges[i].nbytes) ? 1 : 0;
  }
  return taken;
}

}  // namespace sft_idx
