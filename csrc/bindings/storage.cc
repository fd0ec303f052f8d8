// Bindings for files that are opened for each read.
#include <cerrno>

#include "bindings/common.h"
#include "page_advice.h"
#include "stamped_file.h"

namespace {

using sft_idx::StampedFile;

// Raises an OSError with the path, of the subclass for its errno.
void translate(std::exception_ptr raised) {
  try {
    if (raised) std::rethrow_exception(raised);
  } catch (const sft_idx::FileError& failed) {
    errno = failed.error;
    const py::object name = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(failed.path.c_str()));
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, name.ptr());
  }
}

StampedFile look_at(const py::bytes& name) {
  std::string path = name;
  if (path.find('\0') != std::string::npos) throw std::invalid_argument("a path must not contain a zero byte");
  return StampedFile(std::move(path));
}

// The tuple keeps the files alive. Unlike a list, it cannot change during the call.
std::vector<sft_idx::FileRange> ranges_of(const py::tuple& files, const Array<std::int64_t>& offsets,
                                          const Array<std::int64_t>& nbytes) {
  require_vector(offsets, "offsets");
  require_vector(nbytes, "nbytes");
  const auto count = static_cast<py::ssize_t>(files.size());
  if (offsets.size() != count || nbytes.size() != count) {
    throw std::invalid_argument("expected one offset and one size per file");
  }
  std::vector<sft_idx::FileRange> ranges;
  ranges.reserve(files.size());
  for (py::ssize_t i = 0; i < count; ++i) {
    ranges.push_back({&files[static_cast<std::size_t>(i)].cast<const StampedFile&>(), offsets.data()[i], nbytes.data()[i]});
  }
  return ranges;
}

bool read_into(const StampedFile& file, std::int64_t offset, py::array out) {
  require_vector(out, "out");
  const sft_idx::FileRange range{&file, offset, out.nbytes()};
  void* to = out.mutable_data();
  py::gil_scoped_release unlocked;
  return sft_idx::read_ranges(&range, 1, to, static_cast<std::size_t>(range.nbytes)) == 1;
}

std::size_t read_ranges(const py::tuple& files, const Array<std::int64_t>& offsets, const Array<std::int64_t>& nbytes,
                        py::array out) {
  require_vector(out, "out");
  const auto ranges = ranges_of(files, offsets, nbytes);
  void* to = out.mutable_data();
  const auto room = static_cast<std::size_t>(out.nbytes());
  py::gil_scoped_release unlocked;
  return sft_idx::read_ranges(ranges.data(), ranges.size(), to, room);
}

std::size_t advise_ranges(const py::tuple& files, const Array<std::int64_t>& offsets,
                          const Array<std::int64_t>& nbytes) {
  const auto ranges = ranges_of(files, offsets, nbytes);
  py::gil_scoped_release unlocked;
  return sft_idx::advise_ranges(ranges.data(), ranges.size());
}

std::int64_t resident_nbytes(const py::array& array) {
  require_vector(array, "array");
  const void* data = array.data();
  const auto nbytes = static_cast<std::size_t>(array.nbytes());
  py::gil_scoped_release unlocked;
  return sft_idx::resident_nbytes(data, nbytes);
}

}  // namespace

void bind_storage(py::module_& m) {
  py::register_local_exception_translator(&translate);
  py::class_<StampedFile>(m, "StampedFile", "A file with its identity at construction, opened again for each read.")
      .def(py::init(&look_at), "path"_a)
      .def_property_readonly("nbytes", &StampedFile::nbytes)
      .def("read", &read_into, "offset"_a, py::arg("out").noconvert(),
           "Fill out with bytes from offset on; False if the file was replaced or changed since construction.");
  m.def("read_ranges", &read_ranges, "files"_a, py::arg("offsets").noconvert(), py::arg("nbytes").noconvert(),
        py::arg("out").noconvert(),
        "Read one range of each StampedFile into out, concatenated; return how many were read before a changed file.");
  m.def("advise_ranges", &advise_ranges, "files"_a, py::arg("offsets").noconvert(), py::arg("nbytes").noconvert(),
        "Ask the kernel to read ranges of StampedFiles in advance; return the number of accepted ranges.");
  m.def("resident_nbytes", &resident_nbytes, py::arg("array").noconvert(),
        "Number of bytes of an array over a memory map, from its beginning on, that are in the page cache.");
}
