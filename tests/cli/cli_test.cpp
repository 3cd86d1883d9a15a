// The commands of the tool: what they accept, print and return. Files are in cli_files_test.cpp.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "annulus/cuda.h"
#include "kernels/cpu/kernel.h"
#include "ring/option_list.h"
#include "ring/option_text.h"
#include "support/tool.h"

namespace annulus::cli {
namespace {

// --- run -----------------------------------------------------------------------------------------

TEST_F(Cli, RunJsonHasWhatScriptsRelyOn) {
  const Json json =
      annulus_json(kSmall + Words{"--ranks", "3", "--repeat", "2", "--schedule", "ring",
                                  "--segments", "32,128", "--dilations", "1,4"});
  for (const char* key : {"forward_seconds", "backward_seconds", "forward_gflops",
                          "backward_gflops", "sampled_relative_error"}) {
    ASSERT_TRUE(json.contains(key) && json[key].is_number()) << key;
    EXPECT_GT(json[key].get<double>(), 0.0) << key;
  }
  for (const char* pass : {"forward", "backward"}) {
    EXPECT_GT(json["predicted_bytes"][pass].get<std::int64_t>(), 0);
    EXPECT_EQ(json["predicted_bytes"][pass], json["measured_bytes"][pass]);
  }
  EXPECT_LT(json["sampled_relative_error"].get<double>(), 2e-6);
  EXPECT_EQ(json["peak_bytes_per_rank"].size(), 3U);
  EXPECT_EQ(json["schedule"], "ring");
  EXPECT_TRUE(json["kernels"].is_string());
  EXPECT_GE(json["threads"].get<int>(), 1);
  EXPECT_EQ(json["forward_seconds_all"].size(), 2U);
  EXPECT_EQ(json["parameters"]["tokens"], 200);
  EXPECT_EQ(json["parameters"]["dilations"], Json({1, 4}));
  EXPECT_EQ(json["parameters"]["placement"], "contiguous");
}

TEST_F(Cli, RunTableShowsTimeSpeedBytesMemoryErrorAndWhereLimitsComeFrom) {
  const Outcome outcome = annulus(kSmall);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");  // no progress: it is no terminal
  for (const char* word : {"forward", "backward", "time", "GFLOP/s", "sent", "memory", "error",
                           "longnet", "contiguous", "fp32", "derived from"}) {
    EXPECT_NE(outcome.out.find(word), std::string::npos) << word << "\n" << outcome.out;
  }
  EXPECT_NE(annulus(kSmall + Words{"--progress"}).err.find("annulus: backward"), std::string::npos);
}

TEST_F(Cli, RunAcceptsEveryCombinationOfTheMainFlags) {
  const std::vector<Words> cases = {
      {"--pattern", "dense", "--causal", "--placement", "zigzag", "--schedule", "ring"},
      {"--pattern", "head_groups", "--segments", "16,64", "--dilations", "1,2", "--group-scale"},
      {"--offsets", "interleaved", "--mix-gradient", "detached", "--placement", "striped"},
      {"--group-scale", "--segments", "16,64", "--dilations", "1,2", "--dtype", "bf16"},
      {"--kv-heads", "2", "--batch", "2", "--dtype", "bf16", "--placement", "hilbert"},
      {"--placement", "hilbert", "--grid-rows", "10", "--grid-cols", "20", "--dtype", "fp16"},
      {"--align", "64", "--backward-travel", "keys", "--schedule", "gather", "--scale", "0.5"},
      {"--reproducible", "--ranks", "5", "--threads", "1", "--seed", "9"},
      {"--no-backward", "--min-tokens-for-ring", "10"},
      {"--pattern", "dense", "--window", "20,5", "--ranks", "3", "--placement", "striped"},
      {"--offsets", "all", "--segments", "64,200", "--dilations", "2,8", "--window", "40,0"},
      {"--window", "-1,3", "--segments", "64,128", "--dilations", "1,3", "--dtype", "bf16"},
      {"--window", "30,0", "--causal", "--reproducible", "--ranks", "3"},
  };
  for (const Words& more : cases) {
    const Outcome outcome = annulus(kSmall + more);
    EXPECT_EQ(outcome.code, 0) << more[0] << " " << outcome.err;
  }
  EXPECT_EQ(annulus({"run", "--tokens", "3", "--ranks", "8"}).code, 0);  // ranks without tokens
}

TEST_F(Cli, RunWithoutBackwardReportsNone) {
  const Json json = annulus_json(kSmall + Words{"--no-backward"});
  EXPECT_TRUE(json["backward_seconds"].is_null());
  EXPECT_EQ(json["predicted_bytes"]["backward"], 0);
}

// Gradients that are zero but for rounding: the error is measured against the terms of the sums.
TEST_F(Cli, RunAcceptsVanishingGradients) {
  const std::vector<Words> cases = {
      {"--tokens", "1", "--ranks", "1", "--pattern", "dense"},
      {"--tokens", "100", "--segments", "4", "--dilations", "4"},
      {"--tokens", "100", "--segments", "4", "--dilations", "4", "--dtype", "bf16"},
      {"--tokens", "2", "--pattern", "dense", "--causal", "--dtype", "fp16"}};
  for (const Words& flags : cases) {
    const Json json = annulus_json(Words{"run"} + flags);
    ASSERT_TRUE(json.contains("sampled_relative_error")) << json;
    EXPECT_LT(json["sampled_relative_error"].get<double>(), 1e-2) << json;
  }
}

TEST_F(Cli, LimitsAreCheckedAndNamed) {
  expect_refused(annulus(kSmall + Words{"--max-qkv-elements", "100"}), "--max-qkv-elements");
  expect_refused(annulus(kSmall + Words{"--max-communication-bytes", "1KiB"}), "allows 1024");
  expect_refused(annulus({"run", "--tokens", "2000m", "--batch", "2147483647"}), "elements");
  const Outcome bench = annulus({"bench", "--tokens", "900m"});
  EXPECT_EQ(bench.code, 2);
  EXPECT_NE(bench.err.find("elements"), std::string::npos) << bench.err;
}

// --- options: every one in ring/option_list.h is a flag, without anybody's doing -----------------

// Another value than the default, as one would type it.
template <typename T>
std::string another(const ring::OptionInfo& info, const T& usual) {
  if constexpr (ring::Named<T>) {
    return ring::names_like(usual).back().text;
  } else if constexpr (std::is_integral_v<T>) {
    // Larger limits refuse nothing; a divisor of the heads; a head dim that there is.
    return std::string(info.name) == "head_dim" ? "32" : std::to_string(usual + 1);
  } else {
    return "0.25";
  }
}

TEST_F(Cli, EveryOptionIsAFlagThatReachesTheExecutor) {
  RingOptions usual{.pattern = {}, .placement = Placement::contiguous(1, 1)};
  const std::string help = annulus({"run", "--help"}).out;
  const Words small = {"run", "--tokens", "200", "--heads", "4"};
  ring::for_each_option(usual, [&](const ring::OptionInfo& info, auto& option) {
    using Value = std::decay_t<decltype(option)>;
    SCOPED_TRACE(info.name);
    std::string flag = info.name;
    std::replace(flag.begin(), flag.end(), '_', '-');
    if constexpr (std::is_same_v<Value, bool>) {
      flag = (option ? "--no-" : "--") + flag;
      const Json json = annulus_json(small + Words{flag});
      EXPECT_EQ(json["parameters"][info.name], !option);
    } else if constexpr (std::is_same_v<Value, Device>) {
      flag = "--" + flag;  // there is but one in every build, and the others are refused by name
      EXPECT_EQ(annulus_json(small + Words{flag, "cpu"})["parameters"][info.name], "cpu");
      const Outcome refused = annulus(small + Words{flag, "cuda:977"});
      EXPECT_NE(refused.code, 0);
      EXPECT_NE(refused.err.find("cuda:977"), std::string::npos) << refused.err;
    } else {
      flag = "--" + flag;
      const std::string text = another(info, option);
      ASSERT_EQ(ring::read_text(info, text, option), "");
      const Json found = annulus_json(small + Words{flag, text})["parameters"][info.name];
      EXPECT_EQ(found.is_string() ? found.get<std::string>() : found.dump(), text);
    }
    EXPECT_NE(help.find(flag), std::string::npos) << flag;
    EXPECT_NE(help.find(info.help), std::string::npos) << info.help;
  });
}

TEST_F(Cli, NumbersMayHaveUnits) {
  const auto parameter = [&](const char* flag, const char* text, const char* name) {
    return annulus_json(kSmall + Words{flag, text})["parameters"][name].get<std::int64_t>();
  };
  EXPECT_EQ(parameter("--max-communication-bytes", "2GiB", "max_communication_bytes"),
            std::int64_t{2} << 30);
  EXPECT_EQ(parameter("--min-tokens-for-ring", "16k", "min_tokens_for_ring"), 16384);
  for (const char* wrong : {"", "x", "2x", "2kk", "-1", "9G9", "9999999999G"}) {
    expect_refused(annulus(kSmall + Words{"--max-qkv-elements", wrong}),
                   "--max-qkv-elements: found '");
  }
}

// --- bad arguments -------------------------------------------------------------------------------

struct BadArguments {
  Words words;
  const char* complaint;
};

TEST_F(Cli, BadArgumentsAreRefusedWithAReason) {
  const std::vector<BadArguments> cases = {
      {{"frobnicate"}, "there is no command 'frobnicate'"},
      {{"run", "--nope"}, "--nope"},
      {{"run", "stray"}, "stray"},
      {{"run", "--tokens", "0"}, "--tokens: found '0'"},
      {{"run", "--tokens", "12x"}, "--tokens: found '12x'"},
      // Multiplied out in 64 bits these would be 1,024.
      {{"plan", "--tokens", "-9223372036854775807k"}, "--tokens: found '-9223372036854775807k'"},
      {{"plan", "--segments", "-9223372036854775807k", "--dilations", "1"},
       "--segments: found '-9"},
      {{"run", "--tokens"}, "--tokens"},
      {{"run", "--heads", "6", "--kv-heads", "4"}, "divisor"},
      {{"run", "--head-dim", "0"}, "--head-dim"},
      {{"run", "--head-dim", "513"}, "'513', expected a whole number from 1 to 512"},
      {{"run", "--pattern", "snake"}, "snake"},
      {{"run", "--dtype", "fp8"}, "fp8"},
      {{"run", "--placement", "random"}, "random"},
      {{"run", "--ranks", "0"}, "--ranks"},
      {{"run", "--segments", "4,8"}, "--segments without --dilations"},
      {{"run", "--segments", "4,8", "--dilations", "1"}, "expected one of each per branch"},
      {{"run", "--segments", "4", "--dilations", "0"}, "--dilations: found '0'"},
      {{"run", "--pattern", "dense", "--segments", "4", "--dilations", "1"}, "found dense"},
      {{"run", "--pattern", "head_groups", "--heads", "2"}, "at most one branch per head"},
      {{"run", "--pattern", "dense", "--group-scale"}, "longnet or head_groups, found dense"},
      {{"run", "--scale", "nan"}, "scale is nan"},
      {{"run", "--window", "3"}, "--window: found '3', expected two whole numbers"},
      {{"run", "--window", "3,-2"}, "--window: found '3,-2'"},
      {{"run", "--window", "1,2,3"}, "--window: found '1,2,3'"},
      {{"run", "--window", "x,0"}, "--window: found 'x,0'"},
      {{"run", "--documents", folder_ / "missing"}, "cannot be read"},
      {{"run", "--documents", folder_}, "cannot be read"},
      {{"run", "--documents", "/dev/zero"}, "'?????????????????????????', expected whole numbers"},
      {{"plan", "--documents", "/dev/null"}, "document boundaries begin with nothing"},
      {{"run", "--causal", "--window", "3,1"}, "window.after is 1 in a causal pattern"},
      {{"plan", "--causal", "--window", "3,1"}, "window.after is 1 in a causal pattern"},
      {{"simulate", "--causal", "--window", "3,1"}, "window.after is 1 in a causal pattern"},
      {{"bench", "--causal", "yes", "--window", "3,1"}, "window.after is 1 in a causal pattern"},
      {{"run", "--scale", "x"}, "--scale"},
      {{"run", "--reproducible", "--schedule", "ring"}, "reproducible"},
      {{"run", "--placement", "zigzag", "--align", "8"}, "--align"},
      {{"run", "--grid-rows", "8"}, "hilbert"},
      {{"run", "--repeat", "0"}, "--repeat"},
      {{"run", "--threads", "-1"}, "--threads"},
      {{"run", "--threads", "4097"}, "expected a whole number from 0 to 4096"},
      {{"run", "--seed", "-1"}, "--seed"},
      {{"run", "--output", ""}, "--output: found '', expected a folder"},
      {{"run", "--output="}, "--output"},
      {{"run", "--input", ""}, "--input: found '', expected a folder"},
      {{"run", "--ranks", ""}, "--ranks: found ''"},
      {{"plan", "--svg", ""}, "--svg: found '', expected a file name"},
      {{"plan", "--tokens", "0"}, "--tokens: found '0'"},
      {{"bench", "--tokens", "0"}, "--tokens: found '0'"},
      {{"bench", "--head-dim", "513"}, "'513', expected a whole number from 1 to 512"},
      {{"plan", "--travel", "sideways"}, "sideways"},
      {{"plan", "--heads", "6", "--kv-heads", "4"}, "divisor"},
      {{"plan", "--scale", "nan"}, "scale is nan"},
      {{"plan", "--scale", "-1"}, "scale is -1"},
      {{"plan", "--head-dim", "513"}, "'513', expected a whole number from 1 to 512"},
      {{"plan", "--reproducible", "--schedule", "ring"}, "reproducible"},
      {{"plan", "--rank", "-1"}, "--rank: found '-1', expected a whole number from 0"},
      {{"plan", "--rank", "4"}, "--rank is 4"},
      {{"plan", "--svg", folder_ / "no" / "plan.svg"}, "cannot be written"},
      {{"plan", "--pattern", "dense", "--tokens", "2047M", "--heads", "65536", "--head-dim", "256",
        "--batch", "2147483647"},
       "more bytes than can be counted"},
      {{"verify", "--quick", "--full"}, "--full"},
      {{"verify", "--filter", "nothing_has_this_name"}, "--filter"},
      {{"bench", "--suite", "everything"}, "everything"},
      {{"doctor", "--ranks", "x"}, "--ranks"},
  };
  for (const BadArguments& one : cases) {
    SCOPED_TRACE(one.words[0] + " " + one.words.back());
    expect_refused(annulus(one.words), one.complaint);
  }
}

TEST_F(Cli, ErrorsAreJsonForThoseWhoAskForJson) {
  const Json usage = annulus_json({"run", "--tokens", "zero"}, 2);
  EXPECT_EQ(usage["kind"], "usage");
  EXPECT_NE(usage["error"].get<std::string>().find("--tokens"), std::string::npos);
  const Json config = annulus_json({"run", "--input", folder_ / "nowhere"}, 2);
  EXPECT_EQ(config["kind"], "config");
}

// A file name may have any bytes; in JSON, U+FFFD replaces bytes that are not UTF-8.
TEST_F(Cli, NamesThatAreNoTextDoNotSpoilJson) {
  const std::string name = "\xff";
  const Json error = annulus_json({"run", "--input", folder_ / name}, 2);
  EXPECT_EQ(error["kind"], "config");
  EXPECT_NE(error["error"].get<std::string>().find("\xef\xbf\xbd"), std::string::npos);
  EXPECT_EQ(annulus_json({"run", "--pattern", name}, 2)["kind"], "usage");
  EXPECT_EQ(annulus_json({"plan", "--tokens", "1000", "--svg", folder_ / name})["command"], "plan");
  EXPECT_TRUE(fs::exists(folder_ / name));
}

TEST_F(Cli, InstructionSetsCanBeForcedAndUnknownOnesAreErrors) {
  const Json json = annulus_json(kSmall, 0, {.environment = {{"ANNULUS_ISA", "scalar"}}});
  EXPECT_EQ(json["kernels"], "scalar");
  for (const char* command : {"run", "verify", "bench", "doctor"}) {
    expect_refused(annulus({command}, {.environment = {{"ANNULUS_ISA", "mmx"}}}), "mmx");
  }
  expect_refused(annulus(kSmall, {.environment = {{"ANNULUS_THREADS", "many"}}}),
                 "ANNULUS_THREADS");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they reserve address space
TEST_F(Cli, OutOfMemoryHasItsOwnExitCode) {
  const Outcome outcome =
      annulus({"run", "--tokens", "1M", "--heads", "64", "--max-qkv-elements", "1000000000000"},
              {.environment = {}, .address_bytes = rlim_t{2} << 30});
  EXPECT_EQ(outcome.code, 4) << outcome.err;
  EXPECT_NE(outcome.err.find("out of memory"), std::string::npos) << outcome.err;
}
#endif

// --- the other commands --------------------------------------------------------------------------

TEST_F(Cli, HelpTeachesByExamples) {
  for (const char* command : {"run", "verify", "plan", "simulate", "bench", "doctor"}) {
    const Outcome outcome = annulus({command, "--help"});
    EXPECT_EQ(outcome.code, 0);
    EXPECT_NE(outcome.out.find(std::string("Examples:\n  annulus ") + command), std::string::npos);
    EXPECT_NE(outcome.out.find("--json"), std::string::npos) << command;
  }
  EXPECT_EQ(annulus({"--help"}).code, 0);
  EXPECT_EQ(annulus({"--version"}).out, "annulus " ANNULUS_VERSION "\n");
  EXPECT_EQ(annulus({}).code, 2);
}

TEST_F(Cli, VerifyPassesAndSaysHowMany) {
  const Json json = annulus_json({"verify", "--filter", "longnet_causal", "--filter", "fp32"});
  EXPECT_EQ(json["passed"], true) << json["failures"];
  EXPECT_GT(json["configurations"].get<int>(), 5);
  EXPECT_LT(json["worst"]["fp32 dq"]["found"].get<double>(), 2e-6);
  const Outcome outcome = annulus({"verify", "--filter", "dense_gqa8_full_fp32", "--full"});
  EXPECT_EQ(outcome.code, 0) << outcome.out;
  EXPECT_NE(outcome.out.find("100 of 100 configurations passed"), std::string::npos) << outcome.out;
}

TEST_F(Cli, PlanPredictsWhatRunMeasures) {
  const Words problem = {"--tokens",   "600",  "--ranks",    "3",      "--heads",     "4",
                         "--head-dim", "16",   "--kv-heads", "2",      "--schedule",  "ring",
                         "--dtype",    "bf16", "--segments", "64,512", "--dilations", "1,4"};
  for (const char* travel : {"keys", "queries"}) {
    const Json plan = annulus_json(Words{"plan", "--travel", travel} + problem);
    const Json run = annulus_json(Words{"run", "--backward-travel", travel} + problem);
    EXPECT_EQ(plan["totals"]["backward_bytes"], run["measured_bytes"]["backward"]) << travel;
    if (std::string(travel) == "keys") {
      EXPECT_EQ(plan["totals"]["forward_bytes"], run["measured_bytes"]["forward"]);
    }
    EXPECT_EQ(plan["ranks"].size(), 3U);
    double pairs = 0.0;
    for (const Json& rank : plan["ranks"]) pairs += rank["pairs"].get<double>();
    EXPECT_EQ(pairs, run["allowed_pairs"].get<double>());
  }
}

TEST_F(Cli, AllOffsetsAreOneLineOfThePlanAndSendNoRowTwice) {
  const Words shape = {"plan", "--tokens", "1000", "--ranks", "4", "--heads", "2"};
  const Words all = shape + Words{"--segments", "1000", "--dilations", "5", "--offsets", "all"};
  const Words dense = shape + Words{"--pattern", "dense"};
  for (const Words& window : {Words{"--window", "99,0"}, Words{"--window", "-1,-1"}}) {
    const Json found = annulus_json(all + window);
    const Json expected = annulus_json(dense + window);
    EXPECT_EQ(found["parcels"], expected["parcels"]);
    EXPECT_EQ(found["head_classes"], 1);
    // With a window of 99, dilation 5 reaches back 95 tokens.
    const std::int64_t least = window[1] == "99,0"
                                   ? 2 * 3 * 95
                                   : expected["totals"]["unit_rows_moved"].get<std::int64_t>();
    EXPECT_EQ(found["totals"]["unit_rows_moved"], least);
  }
  const Outcome text = annulus(all);
  EXPECT_NE(text.out.find("branches 0 to 4: whole sequence, dilation 5, 5 offsets"),
            std::string::npos)
      << text.out;
  EXPECT_EQ(annulus_json(all)["parameters"]["dilations"], Json({5}));
}

TEST_F(Cli, AWindowIsShownAndCounted) {
  const Words window = {"--pattern", "dense",   "--causal", "--window", "99,0", "--tokens",
                        "1000",      "--ranks", "4",        "--heads",  "2"};
  const double pairs = 2.0 * (1000 * 100 - 99 * 100 / 2);  // the first 99 tokens see fewer
  const Json run = annulus_json(Words{"run", "--head-dim", "16"} + window);
  EXPECT_EQ(run["allowed_pairs"].get<double>(), pairs);
  EXPECT_EQ(run["parameters"]["window"], Json({99, 0}));
  EXPECT_TRUE(annulus_json(kSmall)["parameters"]["window"].is_null());
  const Json plan = annulus_json(Words{"plan", "--head-dim", "16"} + window);
  EXPECT_EQ(plan["totals"]["pairs"].get<double>(), pairs);
  EXPECT_EQ(plan["totals"]["forward_bytes"], run["measured_bytes"]["forward"]);
  // Each rank but the first needs the last 99 rows of the rank before it.
  EXPECT_EQ(plan["totals"]["unit_rows_moved"], 2 * 3 * 99);
  const Json simulated = annulus_json(Words{"simulate", "--head-dim", "16"} + window);
  EXPECT_EQ(simulated["forward"]["flops"].get<double>(), 4 * 16 * pairs);
  EXPECT_EQ(simulated["forward"]["computed_flops"].get<double>(), 4 * 16 * pairs);

  const Outcome text = annulus(Words{"plan", "--svg", folder_ / "plan.svg"} + window);
  for (const std::string& shown : {text.out, read_text(folder_ / "plan.svg")})
    EXPECT_NE(shown.find("causal, window (99, 0)"), std::string::npos) << shown;
  EXPECT_NE(annulus(Words{"run"} + window).out.find("window (99, 0)"), std::string::npos);
  const Json bench = annulus_json({"bench", "--window", "9,0", "--tokens", "64", "--head-dim", "16",
                                   "--dtype", "fp32", "--repeat", "1"});
  ASSERT_EQ(bench["rows"].size(), 1U);
  EXPECT_EQ(bench["rows"][0]["window"], Json({9, 0}));
  const Json verify = annulus_json(
      {"verify", "--window", "11,4", "--filter", "longnet_gqa2_full_fp32", "--filter", "ranks3"});
  EXPECT_EQ(verify["passed"], true);
}

TEST_F(Cli, EveryLineThatBeginsWith0IsABatchEntry) {
  write_text(folder_ / "two", "0 150, 210\n210 , 250\n\n0\t300\r\n");
  write_text(folder_ / "one", "0\n150\n210\n");
  write_text(folder_ / "none", "0,300\n0\n");
  const Words shape = {"--tokens", "300",     "--heads", "4",       "--head-dim",
                       "16",       "--batch", "2",       "--ranks", "3"};
  struct Case {
    const char* file;
    Json documents;
    double pairs;  // of a head
  };
  const auto square = [](double n) { return n * n; };
  const std::vector<Case> cases = {{"one", Json({0, 150, 210}), 2 * (square(150) + square(60))},
                                   {"none", Json({{0, 300}, {0, 0}}), square(300)},
                                   {"two", Json({{0, 150, 210, 210, 250}, {0, 300}}),
                                    square(150) + square(60) + square(40) + square(300)}};
  for (const Case& one : cases) {
    const Words problem = shape + Words{"--pattern", "dense", "--documents", folder_ / one.file};
    const Json run = annulus_json(Words{"run"} + problem);
    EXPECT_EQ(run["parameters"]["documents"], one.documents);
    EXPECT_EQ(run["allowed_pairs"].get<double>(), 4 * one.pairs) << one.file;
    const Json plan = annulus_json(Words{"plan"} + problem);
    EXPECT_EQ(plan["totals"]["forward_bytes"], run["measured_bytes"]["forward"]);
    const Json simulated = annulus_json(Words{"simulate"} + problem);
    EXPECT_EQ(simulated["forward"]["flops"].get<double>(), 4 * 16 * 4 * one.pairs);
  }
  const Words two = {"--documents", folder_ / "two"};
  EXPECT_NE(annulus(Words{"plan"} + shape + two).out.find("5 documents in 2 batch entries"),
            std::string::npos);
  expect_refused(annulus(Words{"run", "--tokens", "300"} + two), "batch is 1");
  write_text(folder_ / "two", "0 150\n0 210 x\n");
  expect_refused(annulus(Words{"run"} + shape + two), "has 'x', expected whole numbers");
}

TEST_F(Cli, BalancedPlacementsSuitTheDocuments) {
  write_text(folder_ / "documents", "0 100 150 190 600\n0 20 600\n");
  const Words problem = {
      "--tokens",  "600",   "--heads",  "4",           "--head-dim",         "16",
      "--batch",   "2",     "--ranks",  "4",           "--schedule",         "ring",
      "--pattern", "dense", "--causal", "--documents", folder_ / "documents"};
  const auto with = [&](const char* placement) {
    return problem + Words{"--placement", placement};
  };
  const Json plan = annulus_json(Words{"plan"} + with("balanced"));
  EXPECT_EQ(plan["parameters"]["placement"], "balanced");
  const auto balance = [](const Json& json) { return json["totals"]["balance"].get<double>(); };
  EXPECT_GT(balance(plan), balance(annulus_json(Words{"plan"} + with("zigzag"))));
  EXPECT_GT(balance(plan), 0.9);
  const Json run = annulus_json(Words{"run"} + with("balanced"));
  EXPECT_EQ(run["measured_bytes"]["forward"], plan["totals"]["forward_bytes"]);
  EXPECT_LT(run["sampled_relative_error"].get<double>(), 2e-6);
  const Json sweep = annulus_json(Words{"simulate"} + problem +
                                  Words{"--sweep-placements", "balanced,contiguous"});
  EXPECT_EQ(sweep["sweep"][0]["placement"], "balanced");
  EXPECT_EQ(annulus_json({"verify", "--filter", "documents_causal_gqa2_full_fp32", "--filter",
                          "balanced", "--full"})["passed"],
            true);
}

TEST_F(Cli, PlanDrawsAPicture) {
  const Outcome outcome = annulus({"plan", "--tokens", "64k", "--svg", folder_ / "plan.svg"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("work balance"), std::string::npos);
  const std::string picture = read_text(folder_ / "plan.svg");
  EXPECT_NE(picture.find("<svg"), std::string::npos);
  EXPECT_NE(picture.find("</svg>"), std::string::npos);
}

TEST_F(Cli, PlanDestroysNothingThatIsNoPlainFile) {
  const Words plan = {"plan", "--tokens", "1000", "--svg"};
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  const int reader = ::open((folder_ / "pipe").c_str(), O_RDWR | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  ASSERT_GE(::fcntl(reader, F_SETPIPE_SZ, 1 << 20), 0);
  EXPECT_EQ(annulus(plan + Words{folder_ / "pipe"}).code, 0);
  std::string picture(1 << 20, '\0');
  const ssize_t bytes = ::read(reader, picture.data(), picture.size());
  ::close(reader);
  EXPECT_TRUE(fs::is_fifo(folder_ / "pipe"));
  picture.resize(static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
  EXPECT_NE(picture.find("</svg>"), std::string::npos);

  write_text(folder_ / "real.svg", "old");
  fs::create_symlink("real.svg", folder_ / "link.svg");
  EXPECT_EQ(annulus(plan + Words{folder_ / "link.svg"}).code, 0);
  EXPECT_TRUE(fs::is_symlink(folder_ / "link.svg"));
  EXPECT_EQ(read_text(folder_ / "real.svg"), picture);
}

// Renaming over the file that standard output is redirected to would lose the table.
TEST_F(Cli, PlanCanDrawOnItsStandardOutput) {
  // A link of our own: a tool that fails here and runs as root would replace the system's.
  fs::create_symlink("/proc/self/fd/1", folder_ / "stdout");
  const Outcome outcome = annulus({"plan", "--tokens", "1000", "--svg", folder_ / "stdout"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(fs::is_symlink(folder_ / "stdout"));
  EXPECT_EQ(outcome.out.rfind("<svg", 0), 0U) << outcome.out.substr(0, 80);
  EXPECT_NE(outcome.out.find("work balance"), std::string::npos);
}

TEST_F(Cli, DoctorFindsThisMachineHealthy) {
  const Json json = annulus_json({"doctor", "--ranks", "5"});
  EXPECT_EQ(json["healthy"], true) << json["checks"];
  EXPECT_EQ(json["backends"]["in_process"], "built");
  EXPECT_EQ(json["backends"]["cuda"], cuda_built() ? "built" : "not built");
  EXPECT_EQ(json["device"], "cpu");
  EXPECT_EQ(json["kernels"], json["isa"]);
  EXPECT_GE(json["checks"].size(), 5U);
  EXPECT_FALSE(json["isa_usable"].empty());
  EXPECT_NE(annulus({"doctor"}).out.find("ANNULUS_ISA"), std::string::npos);
}

TEST_F(Cli, DoctorSaysWhetherThereAreGpus) {
  const Json cuda = annulus_json({"doctor"})["cuda"];
  const std::string text = annulus({"doctor"}).out;
  EXPECT_EQ(cuda["built"], cuda_built());
  EXPECT_EQ(cuda["devices"].size(), static_cast<std::size_t>(cuda_device_count()));
  const std::string complaint = cuda_complaint();
  if (complaint.empty()) {
    EXPECT_TRUE(cuda["complaint"].is_null());
    EXPECT_NE(text.find("cuda:0 "), std::string::npos) << text;
  } else {
    EXPECT_EQ(cuda["complaint"], complaint);
    EXPECT_NE(text.find("no device: " + complaint), std::string::npos) << text;
  }
  EXPECT_NE(text.find(cuda_built() ? "cuda built" : "cuda not built"), std::string::npos) << text;
  // Without GPUs, too, everything else is healthy; asking for the CPU leaves GPUs alone.
  EXPECT_EQ(annulus_json({"doctor", "--device", "cpu"})["checks"].size(), 5U);
}

TEST_F(Cli, EveryCommandSaysWhereItComputed) {
  for (const Words& words :
       {kSmall, Words{"verify", "--filter", "dense_gqa1_full_fp32"},
        Words{"bench", "--tokens", "64", "--repeat", "1", "--no-backward"}, Words{"doctor"}}) {
    const Json json = annulus_json(words + Words{"--device", "cpu"});
    EXPECT_EQ(json["device"], "cpu") << words[0];
    EXPECT_TRUE(json["device_name"].is_string()) << words[0];
    EXPECT_TRUE(json["driver"].is_null()) << words[0];
    EXPECT_EQ(json["kernels"], cpu::chosen_kernels().name) << words[0];
  }
}

// On a machine with a GPU cli_cuda_test is the test.
TEST_F(Cli, WithoutAGpuItIsOneLineAndTheExitCodeOfMissingDevices) {
  const std::string complaint = cuda_complaint();
  if (complaint.empty()) GTEST_SKIP() << "there is a CUDA device";
  for (const char* command : {"run", "verify", "bench", "doctor"}) {
    const Outcome outcome = annulus({command, "--device", "cuda:1"});
    EXPECT_EQ(outcome.code, 4) << command;
    EXPECT_EQ(outcome.out, "") << command;
    EXPECT_EQ(outcome.err, "annulus: error: device is cuda:1: " + complaint + "\n");
    EXPECT_EQ(annulus_json({command, "--device", "cuda"}, 4)["kind"], "device") << command;
    expect_refused(annulus({command, "--device", "tpu"}), "tpu");
  }
}

TEST_F(Cli, BenchReportsMedianSpreadAndShareOfPeak) {
  const Json json = annulus_json({"bench", "--tokens", "64,128", "--head-dim", "16", "--dtype",
                                  "fp32", "--causal", "both", "--repeat", "2"});
  EXPECT_TRUE(json["cpu"].is_string());
  ASSERT_EQ(json["rows"].size(), 4U);
  for (const Json& row : json["rows"]) {
    EXPECT_GT(row["forward"]["gflops"].get<double>(), 0.0);
    EXPECT_EQ(row["backward"]["seconds_all"].size(), 2U);
    EXPECT_GT(row["forward"]["share_of_peak"].get<double>(), 0.0);
  }
  for (const char* suite : {"ring", "dilated", "scaling"}) {
    const Json other = annulus_json({"bench", "--suite", suite, "--tokens", "64", "--repeat", "1",
                                     "--head-dim", "16", "--heads", "2"});
    EXPECT_GE(other["rows"].size(), 1U) << suite;
  }
  EXPECT_NE(annulus({"bench", "--tokens", "64", "--repeat", "1"}).out.find("of peak"),
            std::string::npos);
}

}  // namespace
}  // namespace annulus::cli
