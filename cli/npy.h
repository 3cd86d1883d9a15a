#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "annulus/tensor.h"
#include "cli/npy_header.h"
#include "cli/output_file.h"

namespace annulus::cli {

// numpy's file format, restricted to what Annulus computes on: float32 and float16, little endian,
// C order. Whatever else a file contains is a ConfigError that names the file, what was found and
// what is expected; bf16 has no code in the format.

struct NpyArray {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;
};

// Formats 1.0, 2.0 and 3.0. Both check the shape against the size of the file before anything of
// that size is allocated, so a header cannot ask for more memory than the file has bytes.
[[nodiscard]] NpyHeader read_npy_header(const std::filesystem::path& path);
[[nodiscard]] NpyArray read_npy(const std::filesystem::path& path);

// Format 1.0, by OutputFile's rules: a plain file appears complete or not at all, and a failure
// leaves what was there as it was.
void write_npy(const std::filesystem::path& path, DType dtype, std::span<const std::int64_t> shape,
               std::span<const std::byte> data);
// The same without the last step, commit(), for files that are put in place together.
[[nodiscard]] OutputFile start_npy(const std::filesystem::path& path, DType dtype,
                                   std::span<const std::int64_t> shape,
                                   std::span<const std::byte> data);

}  // namespace annulus::cli
