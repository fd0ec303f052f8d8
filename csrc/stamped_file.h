// Files that are opened for each read and closed again, so that a dataset of thousands of files keeps none open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace sft_idx {

// The errno and the path of a file that could not be read.
struct FileError : std::runtime_error {
  FileError(int number, const std::string& where) : std::runtime_error(where), error(number), path(where) {}
  int error;
  std::string path;
};

// Identifies a version of a file: differs for another file at the same path, and after a change.
struct Stamp {
  std::uint64_t device = 0, inode = 0;
  std::int64_t nbytes = 0, modified_ns = 0, changed_ns = 0;
};

// A regular file in the version that existed at construction. Threads can share it: its only state is the stamp.
class StampedFile {
 public:
  // Throws FileError if the file does not exist or is not a regular file.
  explicit StampedFile(std::string path);

  const std::string& path() const { return path_; }
  std::int64_t nbytes() const { return stamp_.nbytes; }

  // Reads bytes [offset, offset + nbytes) into out. Returns false, with undefined content of out, if the file was
  // removed, replaced or changed, or ends before. Throws FileError if the disk fails.
  bool read(std::int64_t offset, std::size_t nbytes, void* out) const;

  // Asks the kernel to read these bytes in the background. Returns whether it accepted.
  bool will_need(std::int64_t offset, std::int64_t nbytes) const;

 private:
  std::string path_;
  Stamp stamp_;
};

// A range of bytes of a file, which may have changed when they are read.
struct FileRange {
  const StampedFile* file;
  std::int64_t offset, nbytes;
};

// Reads all ranges into out, one after another. Returns how many were read before the first one with a changed file;
// count if all were read. Throws std::invalid_argument, before anything is read, unless the ranges are inside their
// files at construction and fill out exactly.
std::size_t read_ranges(const FileRange* ranges, std::size_t count, void* out, std::size_t out_nbytes);

// Asks the kernel to read the ranges in the background. Returns the number of accepted ranges.
std::size_t advise_ranges(const FileRange* ranges, std::size_t count);

}  // namespace sft_idx
