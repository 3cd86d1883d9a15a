// annulus simulate: what it accepts, prints and refuses. The model itself is in simulate_test.cpp.

#include <gtest/gtest.h>

#include <string>

#include "annulus/simulate.h"
#include "support/tool.h"

namespace annulus::cli {
namespace {

const Words kSimulate = {"simulate", "--tokens", "64k", "--ranks", "16", "--dtype", "bf16"};

TEST_F(Cli, SimulateJsonHasWhatScriptsRelyOn) {
  const Json json = annulus_json(kSimulate + Words{"--schedule", "ring"});
  EXPECT_EQ(json["command"], "simulate");
  EXPECT_EQ(json["cluster"]["name"], "h200");
  EXPECT_EQ(json["schedule"], "ring");
  EXPECT_EQ(json["counted"], true);
  for (const char* pass : {"forward", "backward"}) {
    for (const char* key : {"seconds", "compute_seconds", "transfer_seconds", "flops", "bytes",
                            "busiest_link_seconds"}) {
      EXPECT_GT(json[pass][key].get<double>(), 0.0) << pass << " " << key;
    }
    EXPECT_GE(json[pass]["overlap"].get<double>(), 0.0);
    EXPECT_TRUE(json[pass]["busiest_link"].is_string());
  }
  EXPECT_EQ(json["memory"]["fits"], true);
  EXPECT_EQ(json["parameters"]["tokens"], 65536);
}

TEST_F(Cli, SimulateTextNamesTimesOverlapLinkMemoryAndSources) {
  const Outcome outcome = annulus(kSimulate);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (const char* word : {"forward", "backward", "compute alone", "transfers alone", "overlap",
                           "busiest link", "bound by", "memory", "data sheets", "16 ranks"}) {
    EXPECT_NE(outcome.out.find(word), std::string::npos) << word << "\n" << outcome.out;
  }
}

TEST_F(Cli, SimulateBytesAreThoseOfPlan) {
  const Words problem = {"--tokens",    "64k",    "--ranks",    "16",   "--causal",
                         "--placement", "zigzag", "--schedule", "ring", "--backward-travel",
                         "keys"};
  const Json plan = annulus_json(Words{"plan"} + problem);
  const Json simulated = annulus_json(Words{"simulate"} + problem);
  EXPECT_EQ(simulated["forward"]["bytes"], plan["totals"]["forward_bytes"]);
  EXPECT_EQ(simulated["backward"]["bytes"], plan["totals"]["backward_bytes"]);
}

TEST_F(Cli, SimulateWithoutBackwardReportsNone) {
  EXPECT_TRUE(annulus_json(kSimulate + Words{"--no-backward"})["backward"].is_null());
}

TEST_F(Cli, SimulateSweepsEveryCombination) {
  const Words sweep = kSimulate + Words{"--sweep-ranks",      "4,8",
                                        "--sweep-placements", "contiguous,zigzag",
                                        "--sweep-schedules",  "ring,gather"};
  const Json json = annulus_json(sweep);
  ASSERT_EQ(json["sweep"].size(), 8U);
  EXPECT_EQ(json["sweep"][3]["ranks"], 8);
  EXPECT_EQ(json["sweep"][3]["placement"], "contiguous");
  EXPECT_EQ(json["sweep"][3]["schedule"], "gather");
  // As if asked for alone.
  const Json alone = annulus_json(
      {"simulate", "--tokens", "64k", "--dtype", "bf16", "--ranks", "8", "--schedule", "gather"});
  EXPECT_EQ(json["sweep"][3]["forward"], alone["forward"]);
  EXPECT_NE(annulus(sweep).out.find("zigzag"), std::string::npos);
}

TEST_F(Cli, SimulateReadsClusterFiles) {
  // What --json prints of a cluster is a cluster file.
  const Json preset = annulus_json(kSimulate);
  write_text(folder_ / "whole.json", preset["cluster"].dump());
  EXPECT_EQ(annulus_json(kSimulate + Words{"--cluster", folder_ / "whole.json"})["forward"],
            preset["forward"]);
  write_text(folder_ / "like.json",
             R"({"like": "h200", "ranks_per_host": 4, "between": {"bytes_per_second": 25e9}})");
  const Json like = annulus_json(kSimulate + Words{"--cluster", folder_ / "like.json"});
  EXPECT_EQ(like["cluster"]["name"], (folder_ / "like.json").string());
  EXPECT_EQ(like["cluster"]["ranks_per_host"], 4);
  EXPECT_EQ(like["cluster"]["between"]["bytes_per_second"], 25e9);
  EXPECT_EQ(like["cluster"]["between"]["name"], "InfiniBand");
  EXPECT_EQ(like["cluster"]["inside"], preset["cluster"]["inside"]);
}

TEST_F(Cli, SimulateRefusesInWords) {
  const auto with_file = [&](const std::string& text) {
    write_text(folder_ / "c.json", text);
    return annulus(kSimulate + Words{"--cluster", folder_ / "c.json"});
  };
  expect_refused(annulus(kSimulate + Words{"--cluster", "cray"}), "neither one of h200,");
  expect_refused(annulus(kSimulate + Words{"--cluster", folder_}), "neither one of h200,");
  expect_refused(with_file("{"), "is not JSON");
  expect_refused(with_file("[1]"), "it is [1], expected an object");
  expect_refused(with_file("{}"), "forward_flops_per_second is 0, expected a number above 0");
  expect_refused(with_file(R"({"like": "cray"})"), "there is no cluster 'cray'");
  expect_refused(with_file(R"({"like": 3})"), "like is 3, expected the name of a preset");
  expect_refused(with_file(R"({"like": "h200", "nodes": 3})"), "it has 'nodes', expected members");
  expect_refused(with_file(R"({"like": "h200", "inside": {"speed": 3}})"), "inside has 'speed'");
  expect_refused(with_file(R"({"like": "h200", "inside": 3})"), "inside is 3, expected an object");
  expect_refused(with_file(R"({"like": "h200", "ranks_per_host": 1.5})"),
                 "ranks_per_host is 1.5, expected a whole number");
  expect_refused(with_file(R"({"like": "h200", "ranks_per_host": 1e99})"),
                 "expected a whole number");
  expect_refused(with_file(R"({"like": "h200", "stage_seconds": "1"})"),
                 "stage_seconds is \"1\", expected a number");
  expect_refused(with_file(R"({"like": "h200", "between": {"latency_seconds": -1}})"),
                 "between.latency_seconds is -1");
  expect_refused(annulus(kSimulate + Words{"--sweep-ranks", "4,0"}), "--sweep-ranks");
  expect_refused(annulus(kSimulate + Words{"--sweep-placements", "spiral"}), "spiral");
  expect_refused(annulus(kSimulate + Words{"--head-dim", "513"}),
                 "expected a whole number from 1 to 512");
}

TEST_F(Cli, SimulateHelpNamesEveryPreset) {
  const std::string help = annulus({"simulate", "--help"}).out;
  for (const std::string& name : cluster_preset_names())
    EXPECT_NE(help.find(name), std::string::npos) << name;
}

}  // namespace
}  // namespace annulus::cli
