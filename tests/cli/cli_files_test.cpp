// annulus run on files: right results out of good ones, nothing out of bad ones.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "annulus/half.h"
#include "annulus/pattern.h"
#include "annulus/reference.h"
#include "cli/npy.h"
#include "support/problem.h"
#include "support/tool.h"

namespace annulus::cli {
namespace {

using Extents = std::vector<std::int64_t>;

// A problem small enough for the oracle, in files. Values are rounded to the files' dtype.
struct Data {
  Extents q_shape = {2, 70, 4, 16};
  Extents k_shape = {2, 70, 2, 16};
  DType dtype = DType::f32;
  std::vector<double> q, k, v, dout;

  explicit Data(DType file_dtype = DType::f32) : dtype(file_dtype) {
    std::mt19937_64 engine(7);
    std::normal_distribution<float> normal;
    const auto make = [&](const Extents& shape) {
      std::vector<double> values(
          static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]));
      for (double& x : values) {
        const float value = normal(engine);
        x = dtype == DType::f32 ? value : f16_to_float(float_to_f16(value));
      }
      return values;
    };
    q = make(q_shape);
    k = make(k_shape);
    v = make(k_shape);
    dout = make(q_shape);
  }

  void save(const fs::path& path, const Extents& shape, const std::vector<double>& values) const {
    std::vector<std::byte> bytes(values.size() * size_of(dtype));
    for (std::size_t i = 0; i < values.size(); ++i) {
      store_element(bytes.data(), dtype, static_cast<std::int64_t>(i),
                    static_cast<float>(values[i]));
    }
    start_npy(path, {dtype, shape, std::move(bytes)}).commit();
  }

  void save_all(const fs::path& folder) const {
    fs::create_directories(folder);
    save(folder / "q.npy", q_shape, q);
    save(folder / "k.npy", k_shape, k);
    save(folder / "v.npy", k_shape, v);
    save(folder / "do.npy", q_shape, dout);
  }

  [[nodiscard]] reference::Shape shape() const { return {2, 70, 4, 2, 16}; }
};

std::vector<float> values_of(const NpyArray& array, std::size_t count) {
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(load_element(array.data.data(), array.dtype, static_cast<std::int64_t>(i)));
  }
  return values;
}

// Everything below a folder, with contents: hidden files and leftovers show, too.
std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> found;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    found[entry.path().string()] = entry.is_regular_file() ? read_text(entry.path()) : "<folder>";
  }
  return found;
}

struct FileCase {
  const char* name;
  DType file;
  Words flags;
  DType written;
  double tolerance;
};

class CliFiles : public Cli, public testing::WithParamInterface<FileCase> {};

TEST_P(CliFiles, MatchTheReference) {
  const Data data(GetParam().file);
  data.save_all(folder_ / "in");
  const Outcome outcome =
      annulus(Words{"run", "--input", folder_ / "in", "--output", folder_ / "out", "--segments",
                    "16,64", "--dilations", "1,2", "--causal"} +
              GetParam().flags);
  ASSERT_EQ(outcome.code, 0) << outcome.err;

  const Extents segments = {16, 64};
  const Extents dilations = {1, 2};
  const Pattern pattern = longnet(4, segments, dilations, true);
  const reference::Output output =
      reference::forward(pattern, data.shape(), data.q, data.k, data.v);
  const reference::Gradients gradients =
      reference::backward(pattern, data.shape(), data.q, data.k, data.v, data.dout);
  const auto check = [&](const char* name, const Extents& shape, DType dtype,
                         const std::vector<double>& expected, double tolerance) {
    const NpyArray found = read_npy(folder_ / "out" / name);
    EXPECT_EQ(found.shape, shape) << name;
    EXPECT_EQ(found.dtype, dtype) << name;
    EXPECT_LT(test::relative_rms(values_of(found, expected.size()), expected), tolerance) << name;
  };
  const double tolerance = GetParam().tolerance;
  check("o.npy", data.q_shape, GetParam().written, output.o, tolerance);
  check("lse.npy", {2, 70, 4}, DType::f32, output.lse, tolerance);
  check("dq.npy", data.q_shape, GetParam().written, gradients.dq, tolerance);
  check("dk.npy", data.k_shape, GetParam().written, gradients.dk, tolerance);
  check("dv.npy", data.k_shape, GetParam().written, gradients.dv, tolerance);
  EXPECT_EQ(contents(folder_ / "out").size(), 5U);  // no leftovers
}

INSTANTIATE_TEST_SUITE_P(
    All, CliFiles,
    testing::Values(FileCase{"float32", DType::f32, {}, DType::f32, 2e-6},
                    FileCase{"float32_striped",
                             DType::f32,
                             {"--placement", "striped", "--ranks", "3"},
                             DType::f32,
                             2e-6},
                    FileCase{"float32_in_bf16", DType::f32, {"--dtype", "bf16"}, DType::f32, 2e-2},
                    FileCase{"float32_in_fp16", DType::f32, {"--dtype", "fp16"}, DType::f16, 3e-3},
                    FileCase{"float16", DType::f16, {"--placement", "zigzag"}, DType::f16, 3e-3},
                    FileCase{"float16_in_fp32", DType::f16, {"--dtype", "fp32"}, DType::f32, 2e-6}),
    [](const auto& param) { return std::string(param.param.name); });

TEST_F(Cli, ReproducibleFilesAreTheSameForEveryRing) {
  Data().save_all(folder_ / "in");
  for (const char* ranks : {"1", "3"}) {
    ASSERT_EQ(
        annulus({"run", "--input", folder_ / "in", "--output", folder_ / ranks, "--ranks", ranks,
                 "--placement", *ranks == '1' ? "contiguous" : "striped", "--reproducible"})
            .code,
        0);
  }
  for (const char* name : {"o.npy", "lse.npy", "dq.npy", "dk.npy", "dv.npy"}) {
    EXPECT_EQ(read_text(folder_ / "1" / name), read_text(folder_ / "3" / name)) << name;
  }
}

TEST_F(Cli, ForwardNeedsNoOutputGradientAndWritesNone) {
  Data().save_all(folder_ / "in");
  fs::remove(folder_ / "in" / "do.npy");
  const Outcome outcome = annulus({"run", "--input", folder_ / "in", "--output",
                                   (folder_ / "out").string() + "/", "--no-backward"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(contents(folder_ / "out").size(), 2U);
}

TEST_F(Cli, NaNInTheInputIsComputedWithAndReachesOnlyWhatAttendsToIt) {
  Data data;
  data.k[0] = std::nan("");  // token 0, key/value head 0: query heads 0 and 1
  data.save_all(folder_ / "in");
  const Json json = annulus_json({"run", "--input", folder_ / "in", "--output", folder_ / "out",
                                  "--segments", "35", "--dilations", "1"});
  EXPECT_LT(json["sampled_relative_error"].get<double>(), 2e-6);  // NaN where NaN is due is right
  const NpyArray o = read_npy(folder_ / "out" / "o.npy");
  for (std::int64_t i = 0; i < 2 * 70 * 4 * 16; ++i) {
    const std::int64_t token = i / (4 * 16);  // over both sequences
    const bool attends = token < 35 && i / 16 % 4 < 2;
    ASSERT_EQ(std::isnan(load_element(o.data.data(), o.dtype, i)), attends) << i;
  }
}

TEST_F(Cli, ErrorsAreRelativeToTheTermsWhateverTheInput) {
  const auto run = [&](const std::function<void(Data&)>& change) {
    Data data;
    change(data);
    data.save_all(folder_ / "in");
    return annulus_json({"run", "--input", folder_ / "in", "--output", folder_ / "out",
                         "--segments", "35", "--dilations", "1"});
  };
  const auto set = [](std::vector<double>& values, double offset, double factor) {
    for (double& x : values) x = static_cast<float>(offset + factor * x);
  };
  const auto expect_small = [](const Json& json, double most) {
    ASSERT_TRUE(json["sampled_relative_error"].is_number()) << json;
    EXPECT_LT(json["sampled_relative_error"].get<double>(), most) << json["sampled_errors"];
  };
  expect_small(run([&](Data& data) { set(data.v, 5.0, 0.0); }), 2e-6);
  expect_small(run([&](Data& data) { set(data.v, 5.0, 0.03); }), 2e-6);
  expect_small(run([&](Data& data) {
                 for (auto* tensor : {&data.q, &data.k, &data.v, &data.dout})
                   set(*tensor, 0, 1e-20);
               }),
               2e-6);
  // Scores of 40,000 have an absolute error of 0.004: results mean little, but something.
  expect_small(run([&](Data& data) {
                 set(data.q, 0.0, 100.0);
                 set(data.k, 0.0, 100.0);
               }),
               1e-2);
  // Nothing was compared: that is not an error of 0.
  const Json nan = run([&](Data& data) {
    for (auto* tensor : {&data.q, &data.k, &data.v, &data.dout}) set(*tensor, std::nan(""), 0);
  });
  EXPECT_TRUE(nan["sampled_relative_error"].is_null()) << nan;
  EXPECT_EQ(nan["sampled_errors"]["nonfinite_rows"], nan["sampled_errors"]["rows"]);
}

// The results fit into fp32, but intermediate products overflow: an error of the inputs.
TEST_F(Cli, InputsWhoseProductsOverflowAreSaidToDoSo) {
  Data data;
  for (auto* tensor : {&data.q, &data.k}) {
    for (double& x : *tensor) x *= 1e-3;
  }
  for (auto* tensor : {&data.v, &data.dout}) {
    for (double& x : *tensor) x *= 1e19;
  }
  data.save_all(folder_ / "in");
  expect_refused(annulus({"run", "--input", folder_ / "in", "--output", folder_ / "out",
                          "--segments", "35", "--dilations", "1"}),
                 "the inputs overflow fp32: do (up to ");
  EXPECT_FALSE(fs::exists(folder_ / "out" / "o.npy"));

  // Scores that fp32 cannot hold: o is NaN where the definition is finite.
  for (auto* tensor : {&data.q, &data.k}) {
    for (double& x : *tensor) x *= 1e23;
  }
  data.save_all(folder_ / "in");
  for (const char* dtype : {"fp32", "bf16"}) {
    for (const Words& more : {Words{"--ranks", "2"}, Words{"--causal"}}) {  // its first row is fine
      expect_refused(annulus(Words{"run", "--input", folder_ / "in", "--output", folder_ / "out",
                                   "--no-backward", "--pattern", "dense", "--dtype", dtype} +
                             more),
                     "the inputs overflow fp32: q (up to ");
    }
  }
  EXPECT_FALSE(fs::exists(folder_ / "out" / "o.npy"));
}

// What is wrong with the files, how to make it so, and a word of the complaint.
struct BadFile {
  const char* name;
  std::function<void(const Data& data, const fs::path& in)> spoil;
  const char* complaint;
};

std::string npy_text(const std::string& descr, const std::string& order, const std::string& shape,
                     std::size_t data_bytes) {
  const std::string dict =
      "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
  std::string text = "\x93NUMPY";
  text +=
      {'\x01', '\x00', static_cast<char>(dict.size() % 256), static_cast<char>(dict.size() / 256)};
  return text + dict + std::string(data_bytes, '\0');
}

class CliBadFiles : public Cli, public testing::WithParamInterface<BadFile> {};

TEST_P(CliBadFiles, AreRefusedAndNothingIsWritten) {
  const Data data;
  data.save_all(folder_ / "in");
  fs::create_directory(folder_ / "out");
  write_text(folder_ / "out" / "o.npy", "precious");
  GetParam().spoil(data, folder_ / "in");
  const auto before = contents(folder_);
  for (const char* out : {"out", "new"}) {
    expect_refused(annulus({"run", "--input", folder_ / "in", "--output", folder_ / out}),
                   GetParam().complaint);
    EXPECT_EQ(contents(folder_), before);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, CliBadFiles,
    testing::Values(
        BadFile{"truncated_data",
                [](const Data&, const fs::path& in) {
                  fs::resize_file(in / "k.npy", fs::file_size(in / "k.npy") - 1);
                },
                "k.npy': has"},
        BadFile{"truncated_header",
                [](const Data&, const fs::path& in) { fs::resize_file(in / "q.npy", 20); },
                "truncated"},
        BadFile{"empty", [](const Data&, const fs::path& in) { fs::resize_file(in / "v.npy", 0); },
                "not a .npy file"},
        BadFile{"trailing_bytes",
                [](const Data&, const fs::path& in) {
                  write_text(in / "do.npy", read_text(in / "do.npy") + "x");
                },
                "trailing"},
        BadFile{"huge_in_the_header_only",
                [](const Data&, const fs::path& in) {
                  write_text(in / "q.npy",
                             npy_text("<f4", "False", "(1, 1000000000, 1000, 128)", 64));
                },
                "truncated or its header is wrong"},
        BadFile{"overflowing_shape",
                [](const Data&, const fs::path& in) {
                  write_text(in / "q.npy",
                             npy_text("<f4", "False", "(4611686018427387904, 8, 8, 8)", 64));
                },
                "more than 2^63 bytes"},
        BadFile{"integers",
                [](const Data&, const fs::path& in) {
                  write_text(in / "v.npy", npy_text("<i4", "False", "(2, 70, 2, 16)", 17920));
                },
                "the dtype is '<i4'"},
        BadFile{"big_endian",
                [](const Data&, const fs::path& in) {
                  write_text(in / "v.npy", npy_text(">f4", "False", "(2, 70, 2, 16)", 17920));
                },
                "the dtype is '>f4'"},
        BadFile{"fortran_order",
                [](const Data&, const fs::path& in) {
                  write_text(in / "v.npy", npy_text("<f4", "True", "(2, 70, 2, 16)", 17920));
                },
                "fortran_order"},
        BadFile{"three_axes",
                [](const Data& data, const fs::path& in) {
                  data.save(in / "q.npy", {140, 4, 16}, data.q);
                },
                "four axes"},
        BadFile{"no_tokens",
                [](const Data& data, const fs::path& in) {
                  data.save(in / "q.npy", {2, 0, 4, 16}, {});
                },
                "axes from 1"},
        BadFile{"other_tokens_in_k",
                [](const Data& data, const fs::path& in) {
                  data.save(in / "k.npy", {2, 35, 4, 16}, data.k);
                },
                "[2, 70, key/value heads, 16]"},
        BadFile{"heads_that_do_not_divide",
                [](const Data& data, const fs::path& in) {
                  std::vector<double> k(2 * 70 * 3 * 16, 0.5);
                  data.save(in / "k.npy", {2, 70, 3, 16}, k);
                },
                "a divisor of the 4 heads"},
        BadFile{"v_unlike_k",
                [](const Data& data, const fs::path& in) {
                  data.save(in / "v.npy", data.q_shape, data.q);
                },
                "as in k.npy"},
        BadFile{"do_unlike_q",
                [](const Data& data, const fs::path& in) {
                  data.save(in / "do.npy", data.k_shape, data.k);
                },
                "as in q.npy"},
        BadFile{"mixed_dtypes",
                [](const Data& data, const fs::path& in) {
                  const Data narrow(DType::f16);
                  narrow.save(in / "k.npy", data.k_shape, data.k);
                },
                "the dtype is fp16, expected fp32"},
        BadFile{"missing_do", [](const Data&, const fs::path& in) { fs::remove(in / "do.npy"); },
                "--no-backward"},
        BadFile{"missing_q", [](const Data&, const fs::path& in) { fs::remove(in / "q.npy"); },
                "does not exist"},
        BadFile{"folder_instead_of_file",
                [](const Data&, const fs::path& in) {
                  fs::remove(in / "k.npy");
                  fs::create_directory(in / "k.npy");
                },
                "is a directory"},
        BadFile{"missing_folder", [](const Data&, const fs::path& in) { fs::remove_all(in); },
                "does not exist"}),
    [](const auto& param) { return std::string(param.param.name); });

TEST_F(Cli, FlagsThatContradictTheFilesAreRefused) {
  Data().save_all(folder_ / "in");
  const Words run = {"run", "--input", folder_ / "in"};
  expect_refused(annulus(run + Words{"--tokens", "71"}), "--tokens is 71");
  expect_refused(annulus(run + Words{"--kv-heads", "4"}), "--kv-heads is 4");
  EXPECT_EQ(annulus(run + Words{"--tokens", "70", "--heads", "4"}).code, 0);
}

TEST_F(Cli, OutputsThatCannotBeReplacedAreFoundBeforeTheWork) {
  fs::create_directory(folder_ / "out");
  write_text(folder_ / "out" / "o.npy", "precious");
  fs::create_directories(folder_ / "out" / "dk.npy" / "in_the_way");
  const auto before = contents(folder_);
  for (const Words& more : {Words{}, Words{"--no-backward"}}) {
    expect_refused(
        annulus(Words{"run", "--tokens", "1M", "--dtype", "bf16", "--output", folder_ / "out"} +
                more),
        "dk.npy is a directory");
  }
  EXPECT_EQ(contents(folder_), before);
  fs::remove_all(folder_ / "out" / "dk.npy");
  fs::create_symlink("nowhere", folder_ / "out" / "dk.npy");
  expect_refused(annulus({"run", "--tokens", "1M", "--dtype", "bf16", "--output", folder_ / "out"}),
                 "dk.npy is a link");
}

// The second result would be written over the first.
TEST_F(Cli, ResultsWhoseNamesAreOneFileAreRefused) {
  fs::create_directory(folder_ / "out");
  write_text(folder_ / "out" / "o.npy", "precious");
  fs::create_symlink("o.npy", folder_ / "out" / "lse.npy");
  expect_refused(annulus(kSmall + Words{"--output", folder_ / "out"}), "is the same file as");
  EXPECT_EQ(read_text(folder_ / "out" / "o.npy"), "precious");
  EXPECT_EQ(contents(folder_ / "out").size(), 2U);
}

TEST_F(Cli, ResultsFollowLinksInTheOutputFolder) {
  fs::create_directories(folder_ / "out");
  fs::create_directories(folder_ / "elsewhere");
  write_text(folder_ / "elsewhere" / "real.npy", "old");
  fs::create_symlink("../elsewhere/real.npy", folder_ / "out" / "o.npy");
  ASSERT_EQ(annulus(kSmall + Words{"--output", folder_ / "out"}).code, 0);
  EXPECT_TRUE(fs::is_symlink(folder_ / "out" / "o.npy"));
  EXPECT_EQ(read_npy(folder_ / "elsewhere" / "real.npy").shape, (Extents{1, 200, 4, 16}));
  EXPECT_EQ(contents(folder_ / "out").size(), 5U);
}

// dq, dk and dv beside an o that is not theirs would be taken for its gradients.
TEST_F(Cli, ForwardAloneRemovesTheGradientsOfAnEarlierRun) {
  const Words run = kSmall + Words{"--output", folder_ / "out"};
  ASSERT_EQ(annulus(run).code, 0);
  write_text(folder_ / "out" / "notes.txt", "mine");
  const auto before = contents(folder_);
  const Surroundings full_disk{.environment = {}, .file_bytes = 10'000};
  EXPECT_EQ(annulus(run + Words{"--no-backward", "--seed", "2"}, full_disk).code, 2);
  EXPECT_EQ(contents(folder_), before);
  const Outcome alone = annulus(run + Words{"--no-backward", "--seed", "2"});
  ASSERT_EQ(alone.code, 0);
  EXPECT_NE(alone.out.find("dq.npy, dk.npy, dv.npy, which an earlier run left"), std::string::npos)
      << alone.out;
  const auto after = contents(folder_ / "out");
  EXPECT_EQ(after.size(), 3U);
  EXPECT_TRUE(after.contains(folder_ / "out" / "lse.npy"));
  EXPECT_EQ(after.at(folder_ / "out" / "notes.txt"), "mine");

  // The tool must not remove anything but plain files.
  write_text(folder_ / "elsewhere.npy", "precious");
  fs::create_symlink("../elsewhere.npy", folder_ / "out" / "dq.npy");
  expect_refused(annulus(run + Words{"--no-backward"}), "dq.npy would stay");
  EXPECT_TRUE(fs::is_symlink(folder_ / "out" / "dq.npy"));
  EXPECT_EQ(read_text(folder_ / "elsewhere.npy"), "precious");
}

TEST_F(Cli, FullDiskLeavesNothingBehind) {
  fs::create_directory(folder_ / "out");
  const auto before = contents(folder_);
  // 200 x 4 x 16 floats are 51,200 bytes; lse needs 3,200.
  for (const char* out : {"out", "new"}) {
    const Outcome outcome = annulus(kSmall + Words{"--output", folder_ / out},
                                    {.environment = {}, .file_bytes = 10'000});
    expect_refused(outcome, "cannot be written");
    EXPECT_EQ(contents(folder_), before);
  }
}

TEST_F(Cli, OutputFoldersThatCannotBeAreFoundBeforeTheWork) {
  write_text(folder_ / "file", "");
  const Words much = {"run", "--tokens", "1M", "--dtype", "bf16", "--output"};
  expect_refused(annulus(much + Words{folder_ / "file"}), "is not a folder");
  expect_refused(annulus(much + Words{folder_ / "a" / "b"}), "does not exist");
}

}  // namespace
}  // namespace annulus::cli
