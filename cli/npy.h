#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "annulus/tensor.h"
#include "cli/output_file.h"

namespace annulus::cli {

// NumPy's file format, restricted to what Annulus computes on: float32 and float16, little endian,
// C order. Anything else in a file is a ConfigError that says which file, what was found and what
// is expected. docs/decisions/023-npy-files.md says why no library reads them.

struct NpyHeader {
  DType dtype = DType::f32;  // f32 or f16
  std::vector<std::int64_t> shape;
  std::int64_t data_offset = 0;  // bytes from the start of the file
  std::int64_t data_bytes = 0;   // what the shape needs, and exactly what the file has
};

struct NpyArray {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;
};

// Formats 1.0, 2.0 and 3.0. Both check the shape against the size of the file before they allocate
// anything of that size, so a header cannot ask for more memory than the file has bytes.
[[nodiscard]] NpyHeader read_npy_header(const std::filesystem::path& path);
[[nodiscard]] NpyArray read_npy(const std::filesystem::path& path);

// Writes format 1.0. The file appears with commit(), alone or together with others.
[[nodiscard]] OutputFile start_npy(const std::filesystem::path& path, const NpyArray& array);

}  // namespace annulus::cli
