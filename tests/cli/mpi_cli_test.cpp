// The tool under mpirun, and what happens to a job that loses a rank.

#include <gtest/gtest.h>

#include <cstdlib>
#include <regex>
#include <string>

#include "annulus/mpi.h"
#include "support/asleep.h"
#include "support/tool.h"

namespace annulus::cli {
namespace {

class MpiCli : public Cli {
 protected:
  void SetUp() override {
    if (std::system("command -v mpirun > /dev/null") != 0) {
      GTEST_SKIP() << "there is no mpirun (Debian, Ubuntu: apt-get install openmpi-bin)";
    }
    Cli::SetUp();
  }

  // Any program and what mpirun takes between two of them.
  [[nodiscard]] Outcome mpirun(int processes, const Words& program) const {
    const std::string tool = std::getenv("ANNULUS_BINARY");
    ::setenv("ANNULUS_BINARY", ANNULUS_MPIRUN, 1);
    Outcome outcome = annulus(Words{std::to_string(processes)} + program);
    ::setenv("ANNULUS_BINARY", tool.c_str(), 1);
    return outcome;
  }
  [[nodiscard]] static std::string tool() { return std::getenv("ANNULUS_BINARY"); }
  [[nodiscard]] Outcome on_ranks(int processes, const Words& arguments) const {
    return mpirun(processes, Words{tool()} + arguments);
  }

  static std::size_t count(const std::string& text, const std::string& word) {
    std::size_t found = 0;
    for (auto at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++found;
    return found;
  }
  // Refused by all processes, told by one.
  static void expect_told_once(const Outcome& outcome, const std::string& because, int code = 2) {
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_EQ(count(outcome.err, "annulus: error: "), 1U) << outcome.err;
    EXPECT_NE(outcome.err.find(because), std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  }
};

TEST_F(MpiCli, TracesReportsAndLogsHaveAllRanks) {
  const fs::path trace = folder_ / "trace.json";
  const fs::path report = folder_ / "report.html";
  const Outcome outcome = on_ranks(3, kSmall + Words{"--trace", trace.string(), "--report",
                                                     report.string(), "--log-level", "info"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  std::map<int, std::pair<double, double>> forward;  // by rank: begin and end
  const Json json = Json::parse(read_text(trace));
  for (const Json& event : json["traceEvents"]) {
    if (event["name"] != "forward" || event["cat"] != "pass") continue;
    const auto begin = event["ts"].get<double>();
    forward[event["pid"].get<int>()] = {begin, begin + event["dur"].get<double>()};
  }
  ASSERT_EQ(forward.size(), 3U);
  // All times are on one clock: no rank ends before all have begun.
  for (const auto& [rank, one] : forward) {
    for (const auto& [other_rank, other] : forward) EXPECT_LT(one.first, other.second);
  }
  EXPECT_NE(read_text(report).find("\"links\":[[0,1,"), std::string::npos);
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_EQ(count(outcome.err, "annulus: [rank " + std::to_string(rank) + "/3] "), 2U);
}

TEST_F(MpiCli, FilesHaveTheBitsOfARingOfThreads) {
  // Results of another problem will do as inputs.
  const fs::path made = folder_ / "made";
  const fs::path in = folder_ / "in";
  ASSERT_EQ(annulus(kSmall + Words{"--batch", "2", "--output", made.string()}).code, 0);
  fs::create_directory(in);
  const std::pair<const char*, const char*> kNames[] = {
      {"o", "q"}, {"dq", "k"}, {"dk", "v"}, {"dv", "do"}};
  for (const auto& [from, to] : kNames) {
    fs::rename(made / (std::string(from) + ".npy"), in / (std::string(to) + ".npy"));
  }
  for (const Words& how : {Words{"--placement", "zigzag", "--schedule", "ring"},
                           Words{"--reproducible", "--dtype", "bf16"}}) {
    const Words command = Words{"run",         "--input", in.string(), "--segments", "50,200",
                                "--dilations", "1,3",     "--threads", "1"} +
                          how;
    const fs::path threads = folder_ / "threads";
    const fs::path processes = folder_ / "processes";
    ASSERT_EQ(annulus(command + Words{"--ranks", "3", "--output", threads.string()}).code, 0);
    const Outcome outcome = on_ranks(3, command + Words{"--output", processes.string()});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(count(outcome.out, "3 ranks over MPI"), 1U) << outcome.out;
    for (const char* name : {"o.npy", "lse.npy", "dq.npy", "dk.npy", "dv.npy"}) {
      EXPECT_TRUE(read_text(threads / name) == read_text(processes / name)) << name;
      EXPECT_GT(read_text(threads / name).size(), 1000U);
    }
  }
}

TEST_F(MpiCli, RunPrintsOneObjectWithTheBytesOfAllRanks) {
  const Outcome outcome = on_ranks(4, kSmall + Words{"--json", "--schedule", "ring"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json found = Json::parse(outcome.out, nullptr, false);
  ASSERT_TRUE(found.is_object()) << outcome.out;
  const Json threads = annulus_json(kSmall + Words{"--ranks", "4", "--schedule", "ring"});
  EXPECT_EQ(found["transport"], "mpi");
  EXPECT_EQ(threads["transport"], "in-process");
  EXPECT_EQ(found["parameters"]["ranks"], 4);
  EXPECT_EQ(found["measured_bytes"], threads["measured_bytes"]);
  EXPECT_EQ(found["peak_bytes_per_rank"].size(), 4U);
  EXPECT_GT(found["backward_seconds"].get<double>(), 0.0);
}

TEST_F(MpiCli, VerifyAndDoctorTakeTheRingOfProcesses) {
  const Outcome verify = on_ranks(3, {"verify", "--filter", "causal_gqa2", "--json"});
  ASSERT_EQ(verify.code, 0) << verify.err;
  const Json passed = Json::parse(verify.out, nullptr, false);
  EXPECT_EQ(passed["passed"], true);
  EXPECT_EQ(passed["configurations"], 270);
  const Outcome doctor = on_ranks(2, {"doctor"});
  EXPECT_EQ(doctor.code, 0) << doctor.err;
  EXPECT_EQ(count(doctor.out, "All is well"), 1U);
  EXPECT_EQ(count(doctor.out, "2 ranks, mpi"), 2U) << doctor.out;
}

TEST_F(MpiCli, WhatIsWrongIsToldOnce) {
  expect_told_once(on_ranks(3, kSmall + Words{"--ranks", "4"}), "MPI has started 3 processes");
  expect_told_once(on_ranks(3, {"run", "--bogus"}), "--bogus");
  expect_told_once(on_ranks(2, {"plan"}), "start it without mpirun");
  expect_told_once(on_ranks(3, {"run", "--input", (folder_ / "nowhere").string()}), "nowhere");
  expect_told_once(on_ranks(3, kSmall + Words{"--grid-rows", "3"}), "hilbert");
  // Names that are no text, too, though ranks tell each other in JSON.
  expect_told_once(on_ranks(3, {"run", "--input", (folder_ / "\xff").string()}), "does not exist");
}

TEST_F(MpiCli, ProcessesShareTheCpusUnlessToldOtherwise) {
  const auto threads = [&](const std::string& variable) {
    const Outcome outcome =
        mpirun(2, Words{"--bind-to", "none", "env", variable, tool()} + kSmall + Words{"--json"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return Json::parse(outcome.out, nullptr, false)["threads"].get<int>();
  };
  EXPECT_EQ(threads("ANNULUS_THREADS="), threads("NO_SUCH_VARIABLE="));  // empty: not there
  EXPECT_EQ(threads("ANNULUS_THREADS=3"), 3);
}

TEST_F(MpiCli, WhatIsWrongOnOneRankEndsAll) {
  const Words on_one = Words{"env", "ANNULUS_ISA=abacus", tool()} + kSmall;
  expect_told_once(mpirun(2, Words{tool()} + kSmall + Words{":", "-n", "1"} + on_one), "abacus");
  expect_told_once(mpirun(1, on_one + Words{":", "-n", "2", tool()} + kSmall), "abacus");
  expect_told_once(mpirun(1, Words{tool()} + kSmall + Words{":", "-n", "1", tool()} + kSmall +
                                 Words{"--causal"}),
                   "causal");
  // Also wrong without MPI, so each process must report the error itself.
  const Words bogus = Words{tool()} + kSmall + Words{"--bogus"};
  expect_told_once(mpirun(2, Words{tool()} + kSmall + Words{":", "-n", "1"} + bogus),
                   "[rank 2/3] The following argument was not expected: --bogus");
  const Words five = Words{tool()} + kSmall + Words{"--ranks", "5"};
  expect_told_once(mpirun(1, Words{tool()} + kSmall + Words{":", "-n", "2"} + five),
                   "--ranks is 5, but not given on rank 0");
}

// Other kernels give other bits, which is an error only with --reproducible.
TEST_F(MpiCli, ReproducibleRanksHaveTheSameKernels) {
  const auto with_another_set_on_one = [&](const Words& arguments) {
    return mpirun(1, Words{tool()} + arguments +
                         Words{":", "-n", "1", "env", "ANNULUS_ISA=scalar", tool()} + arguments);
  };
  EXPECT_EQ(with_another_set_on_one(kSmall).code, 0);
  expect_told_once(with_another_set_on_one(kSmall + Words{"--reproducible"}),
                   "ranks disagree about the kernels: rank 1 has scalar");
}

// Neither would wait for the other for ever, nor blame the library.
TEST_F(MpiCli, DifferentArgumentsAreToldApart) {
  const auto on_second = [&](const Words& command, const Words& more) {
    return mpirun(1, Words{tool()} + command + Words{":", "-n", "1", tool()} + command + more);
  };
  expect_told_once(on_second(kSmall, {"--repeat", "3"}), "--repeat is 3, but not given on rank 0");
  expect_told_once(on_second(kSmall, {"--seed", "7"}), "--seed is 7");
  expect_told_once(on_second(kSmall, {"--input", folder_.string()}), "--input is ");
  expect_told_once(on_second(kSmall, {"--batch", "2"}), "--batch is 2");
  expect_told_once(on_second({"verify", "--filter", "gqa2"}, {"--seed", "2"}), "--seed is 2");
  EXPECT_EQ(on_second(kSmall, {"--threads", "1", "--progress"}).code, 0);  // its own business
}

TEST_F(MpiCli, RingOfThreadsIsStillThere) {
  const Outcome outcome =
      on_ranks(1, kSmall + Words{"--transport", "in-process", "--ranks", "3", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(Json::parse(outcome.out, nullptr, false)["transport"], "in-process");
}

// ---- a rank is lost

// A process that has ended, perhaps as a zombie: no rank waits for it, nor does mpirun.
bool ends(const std::string& process) {
  return test::comes_true([&] {
    const char state = test::kernel_state("/proc/" + process);
    return state == '?' || state == 'Z';
  });
}

class MpiStop : public MpiCli, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(, MpiStop, testing::Values("stop", "silent"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(MpiStop, RankIsNamedAtTheDeadlineOrForItsSilenceAndTheJobEnds) {
  const Outcome outcome = mpirun(3, {ANNULUS_MPI_JOB, GetParam()});
  EXPECT_NE(outcome.code, 0);
  for (const char* rank : {"0", "2"}) {
    std::smatch found;
    const std::regex line(std::string("rank ") + rank + " lost rank 1 after ([0-9.]+) s");
    ASSERT_TRUE(std::regex_search(outcome.out, found, line)) << outcome.out << outcome.err;
    EXPECT_GE(std::stod(found[1]), 8.0);
  }
  std::smatch process;
  ASSERT_TRUE(std::regex_search(outcome.out, process, std::regex("process ([0-9]+) is lost")));
  EXPECT_TRUE(ends(process[1])) << "the stopped process has been left behind";
}

// Of a ring of five, one waits for it. The others wait for that one, and for each other.
TEST_F(MpiCli, RankThatStopsIsNamedByThoseThatNeverWaitForIt) {
  const Outcome outcome = mpirun(5, {ANNULUS_MPI_JOB, "attend"});
  EXPECT_NE(outcome.code, 0);
  for (const char* rank : {"0", "2", "3", "4"}) {
    const std::regex line(std::string("rank ") + rank + " lost rank 1 after ");
    EXPECT_TRUE(std::regex_search(outcome.out, line)) << outcome.out << outcome.err;
  }
}

TEST_F(MpiCli, RankThatDiesEndsTheJobWithAMessage) {
  const Outcome outcome = mpirun(3, {ANNULUS_MPI_JOB, "kill"});
  EXPECT_NE(outcome.code, 0);
  EXPECT_NE(outcome.err.find("signal 9"), std::string::npos) << outcome.err;
}

TEST_F(MpiCli, ProgramsThatInitialiseMpiWithoutThreadsAreToldWhatToCall) {
  const Outcome outcome = mpirun(2, {ANNULUS_MPI_JOB, "single"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(count(outcome.out, "MPI runs with MPI_THREAD_SINGLE"), 2U) << outcome.out;
  EXPECT_EQ(count(outcome.out, "call MPI_Init_thread(..., MPI_THREAD_MULTIPLE, ...)"), 2U);
  EXPECT_EQ(count(outcome.out, "MPI has been finalised"), 2U) << outcome.out;
}

}  // namespace
}  // namespace annulus::cli
