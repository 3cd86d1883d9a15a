#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cli/npy.h"
#include "cli/options.h"
#include "cli/tensors.h"

namespace annulus::cli {

// Reads the headers of q.npy, k.npy, v.npy and, with backward, do.npy, and checks them against each
// other and against the flags.
struct InputFiles {
  std::filesystem::path folder;
  Shape shape;
  DType dtype = DType::f32;  // of the files
};
[[nodiscard]] InputFiles inspect_inputs(const std::filesystem::path& folder, bool backward,
                                        const ProblemFlags& flags);

// Reads the data into ring order, converted to the job's dtype, one file after the other.
void read_inputs(const InputFiles& files, JobTensors& tensors);

// ConfigError if results cannot be written to the folder. Called before the work; creates nothing.
void check_output_folder(const std::filesystem::path& folder, bool backward);

// All files that a run reads and writes, and the output folder, with links followed: --trace and
// --report must be other files. Either argument may be empty.
[[nodiscard]] std::vector<std::filesystem::path> tensor_files(const std::filesystem::path& input,
                                                              const std::filesystem::path& output);

// o.npy, lse.npy and, with backward, dq.npy, dk.npy, dv.npy in the order of the sequence; float16
// if the job ran in fp16, else float32. The files appear together or not at all (see OutputFile).
// Without backward, gradients of an earlier run are removed; returns their names.
std::vector<std::string> write_outputs(const std::filesystem::path& folder,
                                       const JobTensors& tensors);

}  // namespace annulus::cli
