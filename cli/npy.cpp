#include "cli/npy.h"

#include <bit>
#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "cli/output_file.h"

namespace annulus::cli {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the data of a .npy file is copied as it is");

// Opens the file and reads up to the data.
NpyHeader open_and_read_header(const std::filesystem::path& path, std::ifstream& file) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) fail_npy(path, "does not exist");
  if (std::filesystem::is_directory(status)) fail_npy(path, "is a directory, expected a .npy file");
  if (status.type() == std::filesystem::file_type::none) {
    fail_npy(path, "cannot be examined: " + error.message());
  }
  // The size of a pipe or device is unknown, and the checks below rest on it.
  if (!std::filesystem::is_regular_file(status)) {
    fail_npy(path, "is not a regular file: save the array to a file first");
  }
  errno = 0;
  file.open(path, std::ios::binary | std::ios::ate);
  if (!file) fail_npy(path, "cannot be opened: " + std::generic_category().message(errno));
  const auto file_bytes = static_cast<std::int64_t>(file.tellg());
  if (file_bytes < 0) fail_npy(path, "its size cannot be determined");
  file.seekg(0);
  return parse_npy_header(path, file, file_bytes);
}

}  // namespace

NpyHeader read_npy_header(const std::filesystem::path& path) {
  std::ifstream file;
  return open_and_read_header(path, file);
}

NpyArray read_npy(const std::filesystem::path& path) {
  std::ifstream file;
  NpyHeader header = open_and_read_header(path, file);
  NpyArray array{header.dtype, std::move(header.shape), {}};
  array.data.resize(static_cast<std::size_t>(header.data_bytes));
  file.seekg(static_cast<std::streamoff>(header.data_offset));
  file.read(reinterpret_cast<char*>(array.data.data()),
            static_cast<std::streamsize>(array.data.size()));
  if (file.gcount() != static_cast<std::streamsize>(array.data.size())) {
    fail_npy(path, "only " + std::to_string(file.gcount()) + " of " +
                       std::to_string(header.data_bytes) +
                       " bytes of data could be read: did the file change meanwhile?");
  }
  return array;
}

OutputFile start_npy(const std::filesystem::path& path, DType dtype,
                     std::span<const std::int64_t> shape, std::span<const std::byte> data) {
  const std::string header = format_npy_header(path, dtype, shape, data.size());
  OutputFile file("npy file", path);
  file.write(header);
  file.write(data.data(), data.size());
  return file;
}

void write_npy(const std::filesystem::path& path, DType dtype, std::span<const std::int64_t> shape,
               std::span<const std::byte> data) {
  start_npy(path, dtype, shape, data).commit();
}

}  // namespace annulus::cli
