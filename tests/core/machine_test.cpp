// How many CPUs this process may use: the number of threads follows from it.

#include <gtest/gtest.h>

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>

#include "core/machine.h"
#include "core/thread_pool.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;
using Files = std::map<std::string, std::string>;

// A root directory with these files; gone with the test.
class FakeRoot {
 public:
  explicit FakeRoot(const Files& files) {
    std::string name = (fs::temp_directory_path() / "annulus_machine_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
    for (const auto& [file, text] : files) {
      fs::create_directories((path_ / file).parent_path());
      std::ofstream(path_ / file) << text << '\n';
    }
  }
  ~FakeRoot() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;

  [[nodiscard]] std::optional<int> cpus() const { return control_group_cpus(path_); }

 private:
  fs::path path_;
};

TEST(ControlGroup, QuotaIsRoundedUpToWholeCpus) {
  const auto cpus = [](const std::string& limit) {
    return FakeRoot({{"proc/self/cgroup", "0::/"}, {"sys/fs/cgroup/cpu.max", limit}}).cpus();
  };
  EXPECT_EQ(cpus("200000 100000"), 2);
  EXPECT_EQ(cpus("200001 100000"), 3);
  EXPECT_EQ(cpus("1000 100000"), 1);
  EXPECT_EQ(cpus("max 100000"), std::nullopt);
  EXPECT_EQ(cpus(""), std::nullopt);
  EXPECT_EQ(cpus("200000"), std::nullopt);
  EXPECT_EQ(cpus("200000 0"), std::nullopt);
}

TEST(ControlGroup, TightestAncestorCounts) {
  Files files = {
      {"proc/self/cgroup", "0::/job/step/task"},
      {"sys/fs/cgroup/job/cpu.max", "300000 100000"},
      {"sys/fs/cgroup/job/step/cpu.max", "max 100000"},
      {"sys/fs/cgroup/job/step/task/cpu.max", "800000 100000"},
  };
  EXPECT_EQ(FakeRoot(files).cpus(), 3);
  files["sys/fs/cgroup/job/step/task/cpu.max"] = "150000 100000";
  EXPECT_EQ(FakeRoot(files).cpus(), 2);
}

// Docker with the host's name space: the path is the host's, the mount is the container's.
TEST(ControlGroup, PathThatIsNotMountedLeavesTheTop) {
  EXPECT_EQ(FakeRoot({{"proc/self/cgroup", "0::/docker/0123abcd"},
                      {"sys/fs/cgroup/cpu.max", "400000 100000"}})
                .cpus(),
            4);
}

TEST(ControlGroup, VersionOneIsUnderstood) {
  Files files = {
      {"proc/self/cgroup", "5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/job\n0::/job"},
      {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1"},
      {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000"},
      {"sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "250000"},
      {"sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000"},
      {"sys/fs/cgroup/memory/job/cpu.cfs_quota_us", "100000"},  // not where it counts
      {"sys/fs/cgroup/memory/job/cpu.cfs_period_us", "100000"},
  };
  EXPECT_EQ(FakeRoot(files).cpus(), 3);
  files["sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us"] = "-1";
  EXPECT_EQ(FakeRoot(files).cpus(), std::nullopt);
  // The kernel's order of names need not be the directory's; "cpu" is a link to it then.
  EXPECT_EQ(FakeRoot({{"proc/self/cgroup", "4:cpuacct,cpu:/job"},
                      {"sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "500000"},
                      {"sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000"}})
                .cpus(),
            5);
}

TEST(ControlGroup, NoneIsNoLimit) {
  EXPECT_EQ(FakeRoot(Files{}).cpus(), std::nullopt);
  EXPECT_EQ(FakeRoot(Files{{"proc/self/cgroup", "nonsense"}}).cpus(), std::nullopt);
}

// What usable_cpus() and the shared pool say in a child whose environment is `setting` and whose
// affinity mask, if asked, is one CPU of this process's own.
struct Counts {
  int cpus = 0;
  int threads = 0;
};
Counts counts_in_child(bool one_cpu, const char* setting) {
  int ends[2] = {-1, -1};
  if (pipe(ends) != 0) return {};
  const pid_t child = fork();
  if (child == 0) {
    if (setting != nullptr) {
      setenv("ANNULUS_THREADS", setting, 1);
    } else {
      unsetenv("ANNULUS_THREADS");
    }
    cpu_set_t mask;
    if (one_cpu && sched_getaffinity(0, sizeof(mask), &mask) == 0) {
      std::size_t first = 0;
      while (!CPU_ISSET(first, &mask)) ++first;
      CPU_ZERO(&mask);
      CPU_SET(first, &mask);
      if (sched_setaffinity(0, sizeof(mask), &mask) != 0) _exit(1);
    }
    const Counts counts{usable_cpus(), ThreadPool::shared()->threads()};
    _exit(write(ends[1], &counts, sizeof(counts)) == sizeof(counts) ? 0 : 1);
  }
  close(ends[1]);
  Counts counts;
  EXPECT_EQ(read(ends[0], &counts, sizeof(counts)), static_cast<ssize_t>(sizeof(counts)));
  close(ends[0]);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  return counts;
}

TEST(UsableCpus, FollowTheAffinityMaskAndThreadsFollowThem) {
  const Counts all = counts_in_child(false, nullptr);
  EXPECT_GE(all.cpus, 1);
  EXPECT_EQ(all.threads, all.cpus);
  EXPECT_LE(all.cpus, control_group_cpus().value_or(all.cpus));
  const Counts one = counts_in_child(true, nullptr);
  EXPECT_EQ(one.cpus, 1);
  EXPECT_EQ(one.threads, 1);
}

TEST(UsableCpus, EnvironmentDecidesUnlessItIsEmpty) {
  EXPECT_EQ(counts_in_child(true, "3").threads, 3);
  EXPECT_EQ(counts_in_child(true, "").threads, 1);
}

}  // namespace
}  // namespace annulus
