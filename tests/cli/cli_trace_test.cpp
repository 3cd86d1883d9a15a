// What 'annulus run' writes about a run: --trace, --report and --log-level.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "support/tool.h"

namespace annulus::cli {
namespace {

struct Drawn {
  std::int64_t begin = 0;  // nanoseconds
  std::int64_t end = 0;
  std::string kind;
};

// By rank and track.
std::map<std::pair<int, int>, std::vector<Drawn>> tracks_of(const Json& trace) {
  std::map<std::pair<int, int>, std::vector<Drawn>> tracks;
  for (const Json& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const auto begin = std::llround(event["ts"].get<double>() * 1000);
    const auto length = std::llround(event["dur"].get<double>() * 1000);
    tracks[{event["pid"].get<int>(), event["tid"].get<int>()}].push_back(
        {begin, begin + length, event["cat"].get<std::string>()});
  }
  return tracks;
}

// Everything on a track comes one after the other, or, of steps, within a pass.
void expect_nothing_overlaps(const Json& trace) {
  for (auto& [track, events] : tracks_of(trace)) {
    std::sort(events.begin(), events.end(), [](const Drawn& a, const Drawn& b) {
      return std::tuple(a.begin, -a.end, a.kind) < std::tuple(b.begin, -b.end, b.kind);
    });
    std::vector<std::int64_t> open;
    for (const Drawn& event : events) {
      while (!open.empty() && open.back() <= event.begin) open.pop_back();
      if (!open.empty()) {
        ASSERT_EQ(event.kind, "step");
        ASSERT_LE(event.end, open.back());
      }
      open.push_back(event.end);
    }
  }
}

// What the page shows is in it as JSON.
Json data_of(const std::string& page) {
  const std::string before = "<script id=\"data\" type=\"application/json\">";
  const std::size_t begin = page.find(before) + before.size();
  return Json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

class Traced : public Cli, public testing::WithParamInterface<Words> {};

TEST_P(Traced, EventsNestAndNeverOverlapOnATrack) {
  const fs::path path = folder_ / "trace.json";
  const Json result = annulus_json(kSmall + GetParam() + Words{"--trace", path.string()});
  const Json trace = Json::parse(read_text(path));
  expect_nothing_overlaps(trace);
  const auto ranks = result["parameters"]["ranks"].get<int>();
  std::set<std::pair<int, std::string>> names;
  std::int64_t sent = 0;
  int passes = 0;
  for (const Json& event : trace["traceEvents"]) {
    if (event["name"] == "thread_name")
      names.emplace(event["pid"].get<int>(), event["args"]["name"].get<std::string>());
    if (event["ph"] != "X" || event["cat"] != "pass") continue;
    ++passes;
    sent += event["args"].value("bytes", std::int64_t{0});
  }
  const bool backward = !result["backward_seconds"].is_null();
  const auto repeat = result["repeat"].get<int>();
  EXPECT_EQ(passes, ranks * repeat * (backward ? 2 : 1));
  EXPECT_EQ(sent, repeat * (result["measured_bytes"]["forward"].get<std::int64_t>() +
                            result["measured_bytes"]["backward"].get<std::int64_t>()));
  for (int rank = 0; rank < ranks; ++rank) {
    // A single rank sends nothing.
    const Words kinds =
        ranks > 1 ? Words{"pass", "compute", "send", "receive", "wait"} : Words{"pass", "compute"};
    for (const std::string& kind : kinds)
      EXPECT_TRUE(names.contains({rank, kind})) << rank << " " << kind;
  }
  EXPECT_EQ(trace["otherData"]["dropped_events"], 0);
}

INSTANTIATE_TEST_SUITE_P(
    , Traced,
    testing::Values(Words{}, Words{"--ranks", "1"}, Words{"--ranks", "5", "--schedule", "gather"},
                    Words{"--ranks", "3", "--schedule", "ring", "--repeat", "3"},
                    Words{"--causal", "--placement", "zigzag", "--schedule", "ring",
                          "--backward-travel", "queries"},
                    Words{"--reproducible", "--no-backward"},
                    Words{"--pattern", "dense", "--schedule", "gather", "--backward-travel",
                          "queries"}),
    [](const testing::TestParamInfo<Words>& info) {
      std::string name;
      for (const std::string& word : info.param) {
        for (const char c : word) {
          if (std::isalnum(static_cast<unsigned char>(c)) != 0) name += c;
        }
      }
      return name.empty() ? std::string("as_it_comes") : name;
    });

TEST_F(Cli, ReportIsOnePageThatNeedsNothingElse) {
  const fs::path path = folder_ / "report.html";
  const Json result = annulus_json(
      kSmall + Words{"--schedule", "ring", "--repeat", "2", "--report", path.string()});
  const std::string page = read_text(path);
  EXPECT_EQ(page.rfind("<!doctype html>", 0), 0U);
  for (const char* elsewhere : {"http://", "https://", "src=", "@import", "url("})
    EXPECT_EQ(page.find(elsewhere), std::string::npos) << elsewhere;
  const Json data = data_of(page);
  ASSERT_EQ(data["ranks"].size(), 4U);
  for (const Json& rank : data["ranks"]) {
    EXPECT_GT(rank["compute_seconds"].get<double>(), 0.0);
    EXPECT_LE(rank["compute_seconds"].get<double>() + rank["wait_seconds"].get<double>(),
              rank["pass_seconds"].get<double>() * (1 + 1e-9));
  }
  EXPECT_GT(data["balance"].get<double>(), 0.0);
  EXPECT_LE(data["balance"].get<double>(), 1.0);
  EXPECT_GT(data["waited"].get<double>(), 0.0);
  EXPECT_LT(data["waited"].get<double>(), 1.0);
  // Executors are made by agreements that are no part of a pass.
  std::int64_t sent = 0;
  for (const Json& link : data["links"]) sent += link[2].get<std::int64_t>();
  const auto in_passes = 2 * (result["measured_bytes"]["forward"].get<std::int64_t>() +
                              result["measured_bytes"]["backward"].get<std::int64_t>());
  EXPECT_GE(sent, in_passes);
  EXPECT_LT(sent, in_passes + 10'000);
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(data["memory"][rank]["workspace"].get<std::int64_t>() +
                  data["memory"][rank]["tensors"].get<std::int64_t>(),
              result["peak_bytes_per_rank"][rank].get<std::int64_t>());
  }
  EXPECT_EQ(data["events"].size(), data["events_recorded"].get<std::size_t>());
}

TEST_F(Cli, WhatIsInAReportCannotEndItsScript) {
  const fs::path odd = folder_ / "<script>alert(1)<";
  ASSERT_EQ(annulus(kSmall + Words{"--output", odd.string()}).code, 0);
  for (const auto& [from, to] : {std::pair("o.npy", "q.npy"),
                                 {"dq.npy", "k.npy"},
                                 {"dk.npy", "v.npy"},
                                 {"dv.npy", "do.npy"}})
    fs::rename(odd / from, odd / to);
  const fs::path path = folder_ / "report.html";
  ASSERT_EQ(annulus({"run", "--input", odd.string(), "--report", path.string()}).code, 0);
  const std::string page = read_text(path);
  EXPECT_EQ(page.find("<script>alert"), std::string::npos);
  EXPECT_NE(data_of(page)["facts"]["lines"]["tensors"].get<std::string>().find("<script>alert(1)<"),
            std::string::npos);
}

TEST_F(Cli, TracesAndReportsFollowLinksAndArePlacedTogether) {
  const fs::path link = folder_ / "link.json";
  write_text(folder_ / "real.json", "old");
  fs::create_symlink("real.json", link);
  const fs::path report = folder_ / "report.html";
  const Outcome outcome =
      annulus(kSmall + Words{"--trace", link.string(), "--report", report.string()});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_TRUE(Json::parse(read_text(folder_ / "real.json")).contains("traceEvents"));
  EXPECT_NE(outcome.out.find(report.string()), std::string::npos) << outcome.out;
  expect_refused(annulus(kSmall + Words{"--trace", link.string(), "--report",
                                        (folder_ / "real.json").string()}),
                 "is the same file as");
}

TEST_F(Cli, TracesAreWrittenThroughPipes) {
  const fs::path pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::string text;
  std::thread reader([&] { text = read_text(pipe); });
  const Outcome outcome = annulus(kSmall + Words{"--trace", pipe.string()});
  reader.join();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_TRUE(Json::parse(text).contains("traceEvents"));
}

TEST_F(Cli, FilesThatCannotBeWrittenAreRefusedBeforeAnyWork) {
  expect_refused(annulus(kSmall + Words{"--trace", folder_.string()}), "is a directory");
  expect_refused(
      annulus({"run", "--tokens", "100M", "--report", (folder_ / "no" / "where.html").string()}),
      "cannot be created");
  expect_refused(annulus(kSmall + Words{"--report", ""}), "a file");
  // However it is spelled.
  expect_refused(annulus({"run", "--tokens", "100M", "--trace", (folder_ / "one").string(),
                          "--report", (folder_ / "." / "one").string()}),
                 "is the same file as");
  EXPECT_TRUE(fs::is_empty(folder_));
}

// Otherwise the trace would silently replace a tensor, or a tensor the trace.
TEST_F(Cli, TracesAndReportsAreNotPutWhereTensorsAre) {
  const fs::path data = folder_ / "data";
  ASSERT_EQ(annulus(kSmall + Words{"--output", data.string()}).code, 0);
  for (const auto& [from, to] : {std::pair("o.npy", "q.npy"),
                                 {"dq.npy", "k.npy"},
                                 {"dk.npy", "v.npy"},
                                 {"dv.npy", "do.npy"}})
    fs::rename(data / from, data / to);
  const fs::path out = folder_ / "out";
  fs::create_directory(out);
  fs::create_symlink("out", folder_ / "link");
  write_text(folder_ / "elsewhere", "old");
  fs::create_symlink("../elsewhere", out / "lse.npy");
  const std::string q = read_text(data / "q.npy");
  const Words files{"run", "--input", data.string(), "--output", out.string()};
  for (const char* flag : {"--trace", "--report"}) {
    for (const fs::path& taken : {out / "o.npy", out / "dv.npy", folder_ / "link" / "o.npy",
                                  folder_ / "elsewhere", data / "q.npy", data / "." / "do.npy"})
      expect_refused(annulus(files + Words{flag, taken.string()}), "is the same file as");
    // Where the folder is yet to be made.
    expect_refused(annulus({"run", "--tokens", "100M", "--output", (folder_ / "new/").string(),
                            flag, (folder_ / "new").string()}),
                   "is the same file as");
  }
  // Gradients of an earlier run are removed, and so would be the trace by the next one.
  expect_refused(annulus(files + Words{"--no-backward", "--trace", (out / "dq.npy").string()}),
                 "is the same file as");
  EXPECT_EQ(read_text(data / "q.npy"), q);
  EXPECT_EQ(read_text(folder_ / "elsewhere"), "old");
  EXPECT_FALSE(fs::exists(out / "o.npy") || fs::exists(folder_ / "new"));
  const Outcome beside = annulus(
      files + Words{"--trace", (out / "q.npy").string(), "--report", (data / "o.npy").string()});
  EXPECT_EQ(beside.code, 0) << beside.err;
}

TEST_F(Cli, LogLevelsSayWhatEachRankDid) {
  const auto lines_of = [&](const char* level) {
    const Outcome outcome = annulus(kSmall + Words{"--ranks", "3", "--log-level", level});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    std::vector<std::string> lines;
    std::istringstream stream(outcome.err);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
  };
  EXPECT_TRUE(lines_of("off").empty());
  EXPECT_TRUE(lines_of("warning").empty()) << "nothing had to be recovered from";
  const std::vector<std::string> info = lines_of("info");
  EXPECT_EQ(info.size(), 6U);
  for (int rank = 0; rank < 3; ++rank) {
    const std::string tag = "annulus: [rank " + std::to_string(rank) + "/3] ";
    EXPECT_EQ(std::count_if(info.begin(), info.end(),
                            [&](const std::string& line) { return line.starts_with(tag); }),
              2);
  }
  const std::vector<std::string> debug = lines_of("debug");
  EXPECT_GT(debug.size(), 30U);
  EXPECT_TRUE(std::all_of(debug.begin(), debug.end(), [](const std::string& line) {
    return line.starts_with("annulus: [rank ");
  }));
  expect_refused(annulus(kSmall + Words{"--log-level", "loud"}), "loud");
}

}  // namespace
}  // namespace annulus::cli
