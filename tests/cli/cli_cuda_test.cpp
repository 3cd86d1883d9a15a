// The tool on a GPU. Where there is none the program ends with kSkipped and says why.

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "annulus/cuda.h"
#include "support/test_device.h"
#include "support/tool.h"

namespace annulus::cli {
namespace {

class CliCuda : public Cli {
 protected:
  void SetUp() override {
    ::setenv("ANNULUS_TEST_DEVICE", "cuda:0", 0);
    (void)test::test_device();
    Cli::SetUp();
  }
  static bool hopper() { return cuda_device(0).major == 9; }
};

const Words kOnDevice = {"--device", "cuda"};

TEST_F(CliCuda, RunMatchesTheDefinitionOnEveryKindOfRing) {
  const std::vector<Words> cases = {
      {},
      {"--dtype", "bf16", "--head-dim", "64"},
      {"--dtype", "fp16", "--head-dim", "128", "--causal", "--placement", "zigzag"},
      {"--batch", "2", "--kv-heads", "2", "--dtype", "bf16", "--placement", "striped"},
      {"--mix-gradient", "detached", "--schedule", "ring"},
      {"--reproducible", "--ranks", "5"},
      {"--deterministic", "--dtype", "bf16", "--head-dim", "64"},
      {"--no-backward", "--pattern", "dense"},
      {"--ranks", "8", "--tokens", "3"},
  };
  for (const Words& more : cases) {
    // Later flags of the same name would be refused, so the small problem is spelled out.
    Words words = {"run", "--heads", "4"};
    if (more.empty() || more.back() != "3") words = words + Words{"--tokens", "777"};
    const Json json = annulus_json(words + kOnDevice + more);
    SCOPED_TRACE(more.empty() ? "" : more[0] + " " + more.back());
    EXPECT_EQ(json["device"], "cuda:0");
    EXPECT_EQ(json["device_name"], cuda_device(0).name);
    EXPECT_EQ(json["measured_bytes"], json["predicted_bytes"]);
  }
}

TEST_F(CliCuda, RunSaysWhichKernelsRan) {
  const auto kernels = [&](const Words& more, const Surroundings& around = {}) {
    return annulus_json(Words{"run", "--tokens", "500"} + kOnDevice + more, 0, around)["kernels"]
        .get<std::string>();
  };
  const Words narrow = {"--dtype", "bf16", "--head-dim", "64"};
  EXPECT_EQ(kernels({"--dtype", "fp32"}), "portable");
  EXPECT_EQ(kernels(narrow, {.environment = {{"ANNULUS_CUDA_KERNELS", "portable"}}}), "portable");
  EXPECT_EQ(kernels(narrow + Words{"--reproducible"}), "portable");
  if (!hopper()) return;
  EXPECT_EQ(kernels(narrow), "sm90");
  EXPECT_EQ(kernels(narrow + Words{"--deterministic"}), "sm90");
  EXPECT_EQ(kernels(narrow + Words{"--mix-gradient", "detached"}),
            "portable forward, sm90 backward");
}

TEST_F(CliCuda, KernelsThatCannotDoItAreAnError) {
  const Words fp32 = Words{"run", "--tokens", "500"} + kOnDevice;
  expect_refused(annulus(fp32, {.environment = {{"ANNULUS_CUDA_KERNELS", "sm90"}}}),
                 "ANNULUS_CUDA_KERNELS is sm90");
  for (const char* command : {"run", "verify", "bench", "doctor"}) {
    expect_refused(
        annulus(Words{command} + kOnDevice, {.environment = {{"ANNULUS_CUDA_KERNELS", "sm42"}}}),
        "sm42");
  }
}

TEST_F(CliCuda, DevicesThatAreNotThereAreAnError) {
  for (const char* command : {"run", "verify", "bench", "doctor"}) {
    expect_refused(annulus({command, "--device", "cuda:977"}), "device is cuda:977, expected 0 to");
  }
}

TEST_F(CliCuda, VerifyRunsWithEveryFamilyThatFits) {
  const Json json = annulus_json(Words{"verify", "--filter", "longnet"} + kOnDevice);
  EXPECT_EQ(json["passed"], true) << json["failures"];
  EXPECT_GT(json["configurations_by_kernels"]["portable"].get<int>(), 5);
  EXPECT_LE(json["worst"]["fp32 dq, portable"]["found"].get<double>(), 2e-6);
  if (!hopper()) return;
  EXPECT_GT(json["configurations_by_kernels"]["sm90"].get<int>(), 5);
  const Json forced = annulus_json(Words{"verify", "--filter", "longnet"} + kOnDevice, 0,
                                   {.environment = {{"ANNULUS_CUDA_KERNELS", "sm90"}}});
  EXPECT_GT(forced["left_out"].get<int>(), 5);
  EXPECT_FALSE(forced["configurations_by_kernels"].contains("portable"));
}

TEST_F(CliCuda, BenchReportsTimeSpeedBytesAndWhereItRan) {
  const Json json = annulus_json(
      Words{"bench", "--tokens", "1024", "--head-dim", "64", "--causal", "no", "--repeat", "2"} +
      kOnDevice);
  EXPECT_EQ(json["device"], "cuda:0");
  EXPECT_TRUE(json["driver"].is_string());
  ASSERT_EQ(json["rows"].size(), 1U);
  const Json& row = json["rows"][0];
  EXPECT_GE(row["passes_per_repetition"].get<int>(), 1);
  for (const char* pass : {"forward", "backward"}) {
    EXPECT_EQ(row[pass]["seconds_all"].size(), 2U);
    EXPECT_GT(row[pass]["seconds"].get<double>(), 0.0);
    EXPECT_GT(row[pass]["gflops"].get<double>(), 0.0);
    EXPECT_TRUE(row[pass]["share_of_peak"].is_null());
  }
  const Json ring = annulus_json(
      Words{"bench", "--suite", "ring", "--tokens", "2048", "--repeat", "1"} + kOnDevice);
  EXPECT_GT(ring["rows"][1]["forward"]["bytes_sent"].get<std::int64_t>(), 0);
  EXPECT_NE(
      annulus(Words{"bench", "--tokens", "512", "--repeat", "1"} + kOnDevice).out.find("TFLOP/s"),
      std::string::npos);
}

TEST_F(CliCuda, DoctorListsAndChecksTheDevice) {
  const Json json = annulus_json({"doctor"});
  EXPECT_EQ(json["healthy"], true) << json["checks"];
  EXPECT_TRUE(json["cuda"]["complaint"].is_null());
  ASSERT_GE(json["cuda"]["devices"].size(), 1U);
  const Json& gpu = json["cuda"]["devices"][0];
  EXPECT_EQ(gpu["name"], cuda_device(0).name);
  EXPECT_GE(gpu["memory_bytes"].get<std::int64_t>(), gpu["free_bytes"].get<std::int64_t>());
  int checked = 0;
  for (const Json& check : json["checks"]) {
    if (check["name"].get<std::string>().find("cuda:0") != std::string::npos) ++checked;
  }
  EXPECT_EQ(checked, 3);
  const std::string text = annulus(Words{"doctor"} + kOnDevice).out;
  EXPECT_NE(text.find(cuda_device(0).name), std::string::npos) << text;
  if (hopper()) {
    EXPECT_NE(text.find("ANNULUS_CUDA_KERNELS=portable"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace annulus::cli
