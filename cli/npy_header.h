#pragma once

#include <cstdint>
#include <filesystem>
#include <istream>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "annulus/tensor.h"

namespace annulus::cli {

// What stands before the data of a .npy file: magic, version, and a Python dict of dtype, order and
// shape. `path` is for messages.

struct NpyHeader {
  DType dtype = DType::f32;  // f32 or f16
  std::vector<std::int64_t> shape;
  std::int64_t data_offset = 0;  // bytes from the start of the file
  std::int64_t data_bytes = 0;   // what the shape needs, and exactly what the file has
};

// Reads up to the data of a file of `file_bytes` bytes. Formats 1.0, 2.0 and 3.0; the shape is
// checked against the size of the file.
[[nodiscard]] NpyHeader parse_npy_header(const std::filesystem::path& path, std::istream& file,
                                         std::int64_t file_bytes);

// Format 1.0. ConfigError for what the format cannot hold, or if `data_bytes` is not what the shape
// needs.
[[nodiscard]] std::string format_npy_header(const std::filesystem::path& path, DType dtype,
                                            std::span<const std::int64_t> shape,
                                            std::size_t data_bytes);

[[noreturn]] void fail_npy(const std::filesystem::path& path, const std::string& problem);

}  // namespace annulus::cli
