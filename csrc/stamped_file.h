// Files that are opened for each read and closed again, so that a dataset of thousands of them holds none open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace sft_idx {

// What the system said when a file could not be read: an errno, and the path.
struct FileError : std::runtime_error {
  FileError(int number, const std::string& where) : std::runtime_error(where), error(number), path(where) {}
  int error;
  std::string path;
};

// What tells a file from any other that is at its path later, or from itself once it was changed.
struct Stamp {
  std::uint64_t device = 0, inode = 0;
  std::int64_t nbytes = 0, modified_ns = 0, changed_ns = 0;
};

// A regular file as it was when it was looked at. Threads may share one; it has no state but its stamp.
class StampedFile {
 public:
  // Throws FileError where there is no such file, or only something that is not a regular one.
  explicit StampedFile(std::string path);

  const std::string& path() const { return path_; }
  std::int64_t nbytes() const { return stamp_.nbytes; }

  // Bytes [offset, offset + nbytes) into out. False, and out undefined, where the path leads to no file or to another
  // one by now, or the file was changed or ends before. Throws FileError where the disk fails.
  bool read(std::int64_t offset, std::size_t nbytes, void* out) const;

  // Asks the kernel to read these bytes in the background; whether it takes the advice.
  bool will_need(std::int64_t offset, std::int64_t nbytes) const;

 private:
  std::string path_;
  Stamp stamp_;
};

// Some bytes of a file, which may be gone by the time they are read.
struct FileRange {
  const StampedFile* file;
  std::int64_t offset, nbytes;
};

// All ranges end to end into out. How many were read before one whose file is no longer what it was: count
// where all were. Throws std::invalid_argument, before anything is read, unless they are in their files as they were
// looked at and fill out exactly.
std::size_t read_ranges(const FileRange* ranges, std::size_t count, void* out, std::size_t out_nbytes);

// Asks the kernel to read the ranges in the background. How many it took the advice for.
std::size_t advise_ranges(const FileRange* ranges, std::size_t count);

}  // namespace sft_idx
