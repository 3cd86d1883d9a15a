#include "cli/tensor_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cstring>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/half.h"

namespace annulus::cli {
namespace fs = std::filesystem;
namespace {

std::string text_of(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

void check_flag(const char* flag, const std::optional<std::int64_t>& given, std::int64_t found,
                const fs::path& folder) {
  if (!given || *given == found) return;
  throw ConfigError(fmt::format("{} is {}, the files in '{}' have {}: leave the flag out", flag,
                                *given, folder.string(), found));
}

// Token by token, because ring order may differ from the file's.
void copy_in(const NpyArray& array, const TokenOrder& order, const RingTensor& tensor) {
  const TensorView& view = tensor.view();
  const std::int64_t row = view.stride[1];
  for (std::int64_t batch = 0; batch < view.shape[0]; ++batch) {
    for (std::int64_t index = 0; index < view.shape[1]; ++index) {
      const std::int64_t from = (batch * view.shape[1] + order.position_of(index)) * row;
      const std::int64_t to = tensor.row(batch, index, 0);
      if (array.dtype == view.dtype) {
        const std::size_t size = size_of(view.dtype);
        std::memcpy(static_cast<std::byte*>(view.data) + static_cast<std::size_t>(to) * size,
                    array.data.data() + static_cast<std::size_t>(from) * size,
                    static_cast<std::size_t>(row) * size);
        continue;
      }
      for (std::int64_t i = 0; i < row; ++i) {
        store_element(view.data, view.dtype, to + i,
                      load_element(array.data.data(), array.dtype, from + i));
      }
    }
  }
}

NpyArray copy_out(const RingTensor& tensor, const TokenOrder& order) {
  const TensorView& view = tensor.view();
  NpyArray array;
  array.dtype = view.dtype == DType::f16 ? DType::f16 : DType::f32;
  for (int axis = 0; axis < view.rank; ++axis) {
    array.shape.push_back(view.shape[static_cast<std::size_t>(axis)]);
  }
  array.data.resize(static_cast<std::size_t>(view.elements()) * size_of(array.dtype));
  const std::int64_t row = view.stride[1];
  for (std::int64_t batch = 0; batch < view.shape[0]; ++batch) {
    for (std::int64_t index = 0; index < view.shape[1]; ++index) {
      const std::int64_t to = (batch * view.shape[1] + order.position_of(index)) * row;
      const std::int64_t from = tensor.row(batch, index, 0);
      for (std::int64_t i = 0; i < row; ++i) {
        store_element(array.data.data(), array.dtype, to + i,
                      load_element(view.data, view.dtype, from + i));
      }
    }
  }
  return array;
}

// Absolute and without a slash at the end.
fs::path normalised(const fs::path& folder) {
  const fs::path path = fs::absolute(folder).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

[[noreturn]] void fail_output(const fs::path& folder, const std::string& problem) {
  throw ConfigError("output folder '" + folder.string() + "': " + problem);
}

constexpr const char* kInputs[] = {"q.npy", "k.npy", "v.npy", "do.npy"};
constexpr const char* kForwardResults[] = {"o.npy", "lse.npy"};
constexpr const char* kGradients[] = {"dq.npy", "dk.npy", "dv.npy"};

// Makes the output folder if there is none, and removes it again unless it is kept.
class OutputFolder {
 public:
  explicit OutputFolder(const fs::path& folder) : folder_(normalised(folder)) {
    std::error_code error;
    created_ = fs::create_directory(folder_, error);
    if (error) fail_output(folder_, "cannot be created: " + error.message());
  }
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;
  ~OutputFolder() {
    std::error_code ignored;
    if (created_) fs::remove(folder_, ignored);
  }
  void keep() { created_ = false; }
  [[nodiscard]] const fs::path& path() const { return folder_; }

 private:
  fs::path folder_;
  bool created_ = false;
};

// Gradients of an earlier run must not stay beside the output of this one.
std::vector<fs::path> stale_gradients(const fs::path& folder) {
  std::vector<fs::path> stale;
  for (const char* name : kGradients) {
    std::error_code error;
    const fs::file_status status = fs::symlink_status(folder / name, error);
    if (!fs::exists(status)) continue;
    if (!fs::is_regular_file(status)) {
      fail_output(folder,
                  std::string(name) +
                      " would stay beside results without gradients, because it is not a plain "
                      "file: remove it or choose another folder");
    }
    stale.push_back(folder / name);
  }
  return stale;
}

}  // namespace

InputFiles inspect_inputs(const fs::path& folder, bool backward, const ProblemFlags& flags) {
  if (!fs::is_directory(folder)) {
    throw ConfigError("input folder '" + folder.string() +
                      "' does not exist: expected a folder with q.npy, k.npy, v.npy and do.npy");
  }
  InputFiles files{.folder = folder, .shape = {}, .dtype = DType::f32};
  std::vector<std::int64_t> q;
  std::vector<std::int64_t> k;
  for (const std::string name : kInputs) {
    if (name == "do.npy" && !backward) continue;
    if (name == "do.npy" && !fs::exists(folder / name)) {
      throw ConfigError(
          "input folder '" + folder.string() +
          "' has no do.npy, the gradient of the output: add it, or use --no-backward");
    }
    const NpyHeader header = read_npy_header(folder / name);
    const auto fail = [&](const std::string& found, const std::string& expected) {
      throw ConfigError(
          fmt::format("npy file '{}': {}, expected {}", (folder / name).string(), found, expected));
    };
    if (header.shape.size() != 4) {
      fail("the shape is " + text_of(header.shape), "four axes: batch, tokens, heads, head dim");
    }
    for (const std::int64_t extent : header.shape) {
      if (extent < 1 || extent > 2147483647) {
        fail("the shape is " + text_of(header.shape), "axes from 1 to 2^31 - 1");
      }
    }
    if (header.shape[2] > kMostHeads) {
      fail(fmt::format("has {} heads", header.shape[2]), fmt::format("at most {}", kMostHeads));
    }
    if (name == "q.npy") {
      q = header.shape;
      files.dtype = header.dtype;
    } else if (header.dtype != files.dtype) {
      fail(fmt::format("the dtype is {}", name_of(header.dtype)),
           fmt::format("{} as in q.npy", name_of(files.dtype)));
    }
    if (name == "k.npy") {
      k = header.shape;
      const std::vector<std::int64_t> expected = {q[0], q[1], k[2], q[3]};
      if (k != expected) {
        fail("the shape is " + text_of(k),
             fmt::format("[{}, {}, key/value heads, {}] to match q.npy", q[0], q[1], q[3]));
      }
      if (q[2] % k[2] != 0) {
        fail(fmt::format("has {} key/value heads", k[2]),
             fmt::format("a divisor of the {} heads of q.npy", q[2]));
      }
    } else if (name == "v.npy" && header.shape != k) {
      fail("the shape is " + text_of(header.shape), text_of(k) + " as in k.npy");
    } else if (name == "do.npy" && header.shape != q) {
      fail("the shape is " + text_of(header.shape), text_of(q) + " as in q.npy");
    }
  }
  files.shape = {.batch = q[0],
                 .tokens = q[1],
                 .heads = static_cast<int>(q[2]),
                 .kv_heads = static_cast<int>(k[2]),
                 .head_dim = static_cast<int>(q[3])};
  const auto given = [&](const char* name, std::int64_t value) {
    return flags.has(name) ? std::optional(value) : std::nullopt;
  };
  check_flag("--batch", given("batch", flags.options.batch), q[0], folder);
  check_flag("--tokens", flags.tokens, q[1], folder);
  check_flag("--heads", flags.heads, q[2], folder);
  check_flag("--kv-heads", given("kv_heads", flags.options.kv_heads), k[2], folder);
  check_flag("--head-dim", given("head_dim", flags.options.head_dim), q[3], folder);
  return files;
}

void read_inputs(const InputFiles& files, JobTensors& tensors) {
  const auto read = [&](const char* name, const RingTensor& tensor) {
    if (tensor.view().data == nullptr) return;
    const NpyArray array = read_npy(files.folder / name);
    const TensorView& view = tensor.view();
    if (!std::equal(array.shape.begin(), array.shape.end(), view.shape.begin(), view.shape.end()) ||
        array.dtype != files.dtype) {
      throw ConfigError("npy file '" + (files.folder / name).string() +
                        "' changed while it was read");
    }
    copy_in(array, tensors.order, tensor);
  };
  read("q.npy", tensors.q);
  read("k.npy", tensors.k);
  read("v.npy", tensors.v);
  read("do.npy", tensors.dout);
}

void check_output_folder(const fs::path& folder, bool backward) {
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  if (!fs::exists(status)) {
    const fs::path parent = normalised(folder).parent_path();
    if (!fs::is_directory(parent)) {
      fail_output(folder, "'" + parent.string() + "' does not exist: create it first");
    }
    if (::access(parent.c_str(), W_OK | X_OK) != 0) {
      fail_output(folder, "'" + parent.string() + "' cannot be written to");
    }
    return;
  }
  if (!fs::is_directory(status)) fail_output(folder, "is not a folder");
  if (::access(folder.c_str(), W_OK | X_OK) != 0) fail_output(folder, "cannot be written to");
  const auto check_name = [&](const char* name) {
    const fs::path path = folder / name;
    if (fs::is_directory(path, error)) {
      fail_output(folder, std::string(name) + " is a directory");
    }
    if (!fs::is_symlink(fs::symlink_status(path, error))) return;
    (void)fs::canonical(path, error);
    if (error) fail_output(folder, std::string(name) + " is a link: " + error.message());
  };
  for (const char* name : kForwardResults) check_name(name);
  for (const char* name : kGradients) check_name(name);
  if (!backward) (void)stale_gradients(folder);
}

std::vector<fs::path> tensor_files(const fs::path& input, const fs::path& output) {
  std::vector<fs::path> files;
  const auto add = [&](const fs::path& folder, std::span<const char* const> names) {
    if (folder.empty()) return;
    for (const char* name : names) files.push_back(folder / name);
  };
  add(input, kInputs);
  add(output, kForwardResults);
  add(output, kGradients);
  if (!output.empty()) files.push_back(normalised(output));  // where there is none yet
  for (fs::path& file : files) {
    std::error_code error;
    const fs::path found = fs::weakly_canonical(fs::absolute(file), error);
    if (!error) file = found;
  }
  return files;
}

std::vector<std::string> write_outputs(const fs::path& folder, const JobTensors& tensors) {
  OutputFolder output(folder);
  std::vector<OutputFile> files;
  const auto write = [&](const char* name, const RingTensor& tensor) {
    files.push_back(start_npy(output.path() / name, copy_out(tensor, tensors.order)));
  };
  write(kForwardResults[0], tensors.o);
  write(kForwardResults[1], tensors.lse);
  std::vector<fs::path> stale;
  if (tensors.dq.view().data != nullptr) {
    write(kGradients[0], tensors.dq);
    write(kGradients[1], tensors.dk);
    write(kGradients[2], tensors.dv);
  } else {
    stale = stale_gradients(output.path());
  }
  commit_together(files, stale);
  output.keep();
  std::vector<std::string> removed;
  for (const fs::path& path : stale) removed.push_back(path.filename().string());
  return removed;
}

}  // namespace annulus::cli
