#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cli/npy.h"
#include "cli/options.h"
#include "cli/tensors.h"

namespace annulus::cli {

// The headers of q.npy, k.npy, v.npy and, with backward, do.npy, checked against each other and
// against what the flags say. Nothing but the headers has been read.
struct InputFiles {
  std::filesystem::path folder;
  Shape shape;
  DType dtype = DType::f32;  // of the files
};
[[nodiscard]] InputFiles inspect_inputs(const std::filesystem::path& folder, bool backward,
                                        const ProblemFlags& flags);

// Reads the data into ring order, converted to the job's dtype, one file after the other.
void read_inputs(const InputFiles& files, JobTensors& tensors);

// ConfigError if the folder cannot possibly receive results. Creates nothing: called before the
// work.
void check_output_folder(const std::filesystem::path& folder, bool backward);

// What a run reads and writes, the output folder included, with links followed: nothing else may be
// written there. Either folder may be empty: there is none.
[[nodiscard]] std::vector<std::filesystem::path> tensor_files(const std::filesystem::path& input,
                                                              const std::filesystem::path& output);

// o.npy, lse.npy and, with backward, dq.npy, dk.npy, dv.npy in the order of the sequence; float16
// if the job ran in fp16, else float32. All plain files appear or none (see OutputFile for what is
// not one). Without backward, gradients of an earlier run are removed: they belong to another o.
// Returns the names of those.
std::vector<std::string> write_outputs(const std::filesystem::path& folder,
                                       const JobTensors& tensors);

}  // namespace annulus::cli
