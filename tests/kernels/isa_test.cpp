// Which kernels run, and that the environment variable ANNULUS_ISA decides it. The choice is made
// once per process, so every setting gets a process of its own: this program again, with a test
// that is disabled otherwise.

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__linux__)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/error.h"
#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "core/machine.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/preference.h"
#include "support/kernel_task.h"
#include "support/ring_fixture.h"

namespace annulus {
namespace {

std::vector<std::string> available_names() {
  std::vector<std::string> names;
  for (const cpu::Kernels* kernels : cpu::available_kernels()) names.emplace_back(kernels->name);
  return names;
}

// What the child prints on one line: "isa=avx2" or "ConfigError=...". `setting` is a shell
// assignment.
std::string run_child(const std::string& setting) {
  char path[PATH_MAX] = {};
  if (readlink("/proc/self/exe", path, sizeof(path) - 1) <= 0) return "no /proc/self/exe";
  const std::string command =
      setting + " '" + path +
      "' --gtest_also_run_disabled_tests --gtest_filter=IsaChild.DISABLED_RunsARing 2>&1";
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return "popen failed";
  std::string answer;
  std::array<char, 4096> line{};
  while (std::fgets(line.data(), static_cast<int>(line.size()), pipe) != nullptr) {
    const std::string text = line.data();
    if (text.starts_with("isa=") || text.find("Error=") != std::string::npos)
      answer = text.substr(0, text.size() - 1);
  }
  const int status = pclose(pipe);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0
             ? answer
             : "exit status " + std::to_string(status) + ", " + answer;
}

#if defined(__x86_64__) && defined(__linux__)
// From here on the system refuses tiles, as containers and hypervisors may: asking for them is an
// error, everything else goes on.
bool refuse_tiles() {
  constexpr std::uint32_t kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kRequestPermission, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{std::size(program), program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0 &&
         syscall(SYS_arch_prctl, kRequestPermission, 18) == -1 && errno == EPERM;
}

// This thread takes signals on a stack that has room for all registers but tiles.
bool take_signals_on_a_small_stack() {
  static std::array<char, 4096> memory;
  stack_t stack{};
  stack.ss_sp = memory.data();
  stack.ss_size = memory.size();
  return sigaltstack(&stack, nullptr) == 0;
}
#else
bool refuse_tiles() { return false; }
bool take_signals_on_a_small_stack() { return false; }
#endif

// Runs a small ring and says on stdout which kernels did it, and whether they were right.
TEST(IsaChild, DISABLED_RunsARing) {
  if (std::getenv("ANNULUS_TEST_REFUSE_TILES") != nullptr && !refuse_tiles()) {
    std::printf("isa=cannot refuse\n");
    return;
  }
  if (std::getenv("ANNULUS_TEST_SMALL_STACK") != nullptr && !take_signals_on_a_small_stack()) {
    std::printf("isa=no small stack\n");
    return;
  }
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const std::vector<std::int64_t> segments = {16, 64};
    const std::vector<std::int64_t> dilations = {1, 2};
    test::Problem problem =
        test::make_problem("child", longnet(2, segments, dilations, true), 1, 150, 40, 2);
    problem.dtype = dtype;
    const RingOptions options = ring_options(problem, Placement::zigzag(150, 3));
    const test::Inputs inputs = test::random_inputs(problem, 1);
    std::string isa;
    const auto outcomes = test::run_ranks(1, [&](Transport& transport) {
      RingOptions alone = options;
      alone.placement = Placement::contiguous(150, 1);
      isa = RingAttention(alone, transport).kernels();
    });
    std::printf("%s=%s\n", outcomes[0].kind.empty() ? "isa" : outcomes[0].kind.c_str(),
                outcomes[0].kind.empty() ? isa.c_str() : outcomes[0].message.c_str());
    if (!outcomes[0].kind.empty()) return;
    test::expect_matches(problem, test::run_ring(options, inputs),
                         test::reference_of(problem, inputs));
  }
}

TEST(Isa, EnvironmentVariableForcesEachAvailableOne) {
  for (const std::string& name : available_names())
    EXPECT_EQ(run_child("ANNULUS_ISA=" + name), "isa=" + name);
}

TEST(Isa, BestOneRunsWhenNothingIsForced) {
  const std::string best = cpu::available_kernels().front()->name;
  EXPECT_EQ(run_child("env -u ANNULUS_ISA"), "isa=" + best);
  EXPECT_EQ(run_child("ANNULUS_ISA="), "isa=" + best);
}

TEST(Isa, UnknownOrUnusableOneIsAConfigErrorThatNamesTheUsable) {
  std::vector<std::string> wrong = {"avx1024", "AVX2", "avx2 ", "best"};
  const std::vector<std::string> usable = available_names();
  for (const char* name :
       {"amx_bf16", "amx_bf16_emulated", "avx512_bf16", "avx512", "avx2", "neon", "scalar"}) {
    if (std::find(usable.begin(), usable.end(), name) == usable.end()) wrong.emplace_back(name);
  }
  for (const std::string& name : wrong) {
    const std::string answer = run_child("ANNULUS_ISA='" + name + "'");
    EXPECT_TRUE(answer.starts_with("ConfigError=")) << answer;
    EXPECT_NE(answer.find("'" + name + "'"), std::string::npos) << answer;
    for (const std::string& good : usable)
      EXPECT_NE(answer.find(good), std::string::npos) << answer;
  }
}

#if defined(__x86_64__) && defined(__linux__)
bool cpu_has_tiles() {
  const std::vector<std::string> features = cpu_features();
  return std::find(features.begin(), features.end(), "amx_bf16") != features.end();
}

TEST(Isa, TilesThatCannotBeUsedAreRefusedInWords) {
  const std::vector<std::string> usable = available_names();
  const bool runs = std::find(usable.begin(), usable.end(), "amx_bf16") != usable.end();
  const std::string answer = run_child("ANNULUS_ISA=amx_bf16");
  if (runs) {
    EXPECT_EQ(answer, "isa=amx_bf16");
  } else {
    EXPECT_NE(answer.find(cpu_has_tiles() ? "the system does not let" : "this CPU has no AMX"),
              std::string::npos)
        << answer;
  }
}
#endif

#if defined(__x86_64__) && defined(__linux__)
TEST(Isa, NextSetRunsWhereTheSystemRefusesTiles) {
  const std::string chosen = run_child("env -u ANNULUS_ISA ANNULUS_TEST_REFUSE_TILES=1");
  if (chosen == "isa=cannot refuse") GTEST_SKIP() << "no seccomp here";
  std::vector<std::string> usable = available_names();
  std::erase(usable, "amx_bf16");
  const std::vector<std::string_view> rest(usable.begin(), usable.end());
  std::vector<std::string_view> by_width;  // as choose_isa wants them
  for (const char* name : {"avx512_bf16", "avx512", "avx2", "scalar"})
    if (std::find(rest.begin(), rest.end(), name) != rest.end()) by_width.emplace_back(name);
  EXPECT_EQ(chosen, "isa=" + std::string(cpu::choose_isa(cpu_identity(), by_width).name));
  const std::string forced = run_child("ANNULUS_ISA=amx_bf16 ANNULUS_TEST_REFUSE_TILES=1");
  EXPECT_TRUE(forced.starts_with("ConfigError=")) << forced;
  EXPECT_NE(forced.find(cpu_has_tiles() ? "the system does not let" : "this CPU has no AMX"),
            std::string::npos)
      << forced;
}
#endif

#if defined(__x86_64__) && defined(__linux__)
// "No space left on device", says Linux.
TEST(Isa, SignalStackThatIsTooSmallForTilesIsNamed) {
  const std::vector<std::string> usable = available_names();
  if (std::find(usable.begin(), usable.end(), "amx_bf16") == usable.end())
    GTEST_SKIP() << "there are no tiles to refuse";
  const std::string forced = run_child("ANNULUS_ISA=amx_bf16 ANNULUS_TEST_SMALL_STACK=1");
  EXPECT_TRUE(forced.starts_with("ConfigError=")) << forced;
  EXPECT_NE(forced.find("alternate signal stack"), std::string::npos) << forced;
  const std::string chosen = run_child("env -u ANNULUS_ISA ANNULUS_TEST_SMALL_STACK=1");
  EXPECT_TRUE(chosen.starts_with("isa=avx512")) << chosen;
}
#endif

// They are there for tests: nothing but their name brings them up.
TEST(Isa, EmulatedTilesAreNeverChosen) {
  EXPECT_NE(std::string(cpu::available_kernels().front()->name), "amx_bf16_emulated");
  EXPECT_EQ(run_child("env -u ANNULUS_ISA").find("emulated"), std::string::npos);
}

TEST(Isa, EveryAvailableOneCanBeAskedForByName) {
  const std::vector<std::string> compiled = cpu::compiled_kernel_names();
  for (const std::string& name : available_names()) {
    EXPECT_EQ(cpu::kernels_by_name(name).name, name);
    EXPECT_NE(std::find(compiled.begin(), compiled.end(), name), compiled.end());
  }
  EXPECT_THROW((void)cpu::kernels_by_name("sse2"), ConfigError);
}

TEST(Isa, ScalarRunsEverywhereAndComesLast) { EXPECT_EQ(available_names().back(), "scalar"); }

// The CPU says what it has; all of it must be used.
TEST(Isa, AvailableOnesAreThoseOfTheCpu) {
#if defined(__x86_64__)
  std::vector<std::string> expected;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) expected.emplace_back("avx512_bf16");
  if (avx512) expected.emplace_back("avx512");
#if defined(__linux__)
  if (avx512) expected.emplace_back("amx_bf16_emulated");
  // Whether the system lets us is its own matter: TilesThatCannotBeUsedAreRefusedInWords.
  const std::vector<std::string> runs = available_names();
  if (std::find(runs.begin(), runs.end(), "amx_bf16") != runs.end()) {
    EXPECT_TRUE(cpu_has_tiles());
    expected.emplace_back("amx_bf16");
  }
#endif
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    expected.emplace_back("avx2");
  expected.emplace_back("scalar");
  std::vector<std::string> found = available_names();
  std::sort(found.begin(), found.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(found, expected);
#endif
}

std::string chosen_for(const CpuIdentity& cpu, std::vector<std::string_view> usable) {
  return std::string(cpu::choose_isa(cpu, usable).name);
}
const std::vector<std::string_view> kAllOfX86 = {"avx512_bf16", "avx512", "avx2", "scalar"};

TEST(IsaPreference, TilesWhereTheyMayBeUsed) {
  const CpuIdentity rapids{.vendor = "GenuineIntel", .family = 6, .model = 207, .stepping = 2};
  EXPECT_EQ(chosen_for(rapids, {"amx_bf16", "avx512_bf16", "avx512", "avx2", "scalar"}),
            "amx_bf16");
  EXPECT_EQ(chosen_for(rapids, {"avx512_bf16", "avx512", "avx2", "scalar"}), "avx512");
}

// The signatures are EAX of CPUID leaf 1, as the machines report them.
TEST(IsaPreference, NativeBf16OnlyWhereItIsKnownToBeFast) {
  const auto chosen = [](const char* vendor, std::uint32_t signature) {
    return chosen_for(decode_cpu_identity(vendor, signature), kAllOfX86);
  };
  EXPECT_EQ(chosen("AuthenticAMD", 0x00A10F11), "avx512_bf16");  // EPYC 9004, Zen 4
  EXPECT_EQ(chosen("AuthenticAMD", 0x00A60F12), "avx512_bf16");  // Ryzen 7000, Zen 4
  EXPECT_EQ(chosen("AuthenticAMD", 0x00B00F21), "avx512_bf16");  // EPYC 9005, Zen 5
  EXPECT_EQ(chosen("GenuineIntel", 0x000806F8), "avx512");       // Sapphire Rapids
  EXPECT_EQ(chosen("GenuineIntel", 0x000C06F2), "avx512");       // Emerald Rapids
  EXPECT_EQ(chosen("GenuineIntel", 0x000A06D1), "avx512");       // Granite Rapids: not measured
  EXPECT_EQ(chosen("GenuineIntel", 0x0005065B), "avx512");       // Cooper Lake: not measured
  EXPECT_EQ(chosen("HygonGenuine", 0x00A10F11), "avx512");
  EXPECT_EQ(chosen("", 0), "avx512");
}

TEST(IsaPreference, SignaturesAreDecodedWithTheirExtendedFields) {
  const CpuIdentity zen4 = decode_cpu_identity("AuthenticAMD", 0x00A10F11);
  EXPECT_EQ((std::array{zen4.family, zen4.model, zen4.stepping}), (std::array{25, 17, 1}));
  const CpuIdentity rapids = decode_cpu_identity("GenuineIntel", 0x000806F8);
  EXPECT_EQ((std::array{rapids.family, rapids.model, rapids.stepping}), (std::array{6, 143, 8}));
  // Neither family 6 nor 15: no extended model.
  const CpuIdentity pentium = decode_cpu_identity("GenuineIntel", 0x00010543);
  EXPECT_EQ((std::array{pentium.family, pentium.model, pentium.stepping}), (std::array{5, 4, 3}));
}

TEST(IsaPreference, OtherwiseTheWidestIsTaken) {
  const CpuIdentity rapids{.vendor = "GenuineIntel", .family = 6, .model = 143, .stepping = 8};
  EXPECT_EQ(chosen_for(rapids, {"avx512", "avx2", "scalar"}), "avx512");
  EXPECT_EQ(chosen_for(rapids, {"avx2", "scalar"}), "avx2");
  EXPECT_EQ(chosen_for({}, {"neon", "scalar"}), "neon");
  EXPECT_EQ(chosen_for({}, {"scalar"}), "scalar");
  EXPECT_EQ(chosen_for({}, {"avx512_bf16"}), "avx512_bf16");
}

TEST(IsaPreference, ReasonNamesTheCpuAndWhatIsKnownOfIt) {
  const auto reason = [](const char* vendor, int family, int model) {
    return cpu::choose_isa({.vendor = vendor, .family = family, .model = model}, kAllOfX86).reason;
  };
  EXPECT_EQ(reason("GenuineIntel", 6, 143),
            "GenuineIntel family 6 model 143 multiplies bf16 more slowly than fp32");
  EXPECT_EQ(reason("GenuineIntel", 6, 173),
            "GenuineIntel family 6 model 173 is not known to multiply bf16 faster than fp32");
  EXPECT_EQ(reason("AuthenticAMD", 25, 17),
            "the best that runs here: AuthenticAMD family 25 model 17 multiplies bf16 faster than "
            "fp32");
}

TEST(IsaPreference, IsWhatRunsHere) {
  std::vector<std::string_view> usable;
  for (const std::string& name : cpu::compiled_kernel_names()) {
    for (const cpu::Kernels* kernels : cpu::available_kernels()) {
      if (name == kernels->name && name != "amx_bf16_emulated") usable.emplace_back(kernels->name);
    }
  }
  EXPECT_EQ(cpu::available_kernels().front()->name, chosen_for(cpu_identity(), usable));
}

// Native bf16 rounds the weights to bf16 and multiplies pairs; widening first does not. So the bits
// tell which one ran.
TEST(Isa, NativeBf16IsReportedAndIsWhatRuns) {
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    EXPECT_EQ(kernels->native_bf16, std::string(kernels->name).find("bf16") != std::string::npos)
        << kernels->name;
    if (!kernels->native_bf16) continue;
    const cpu::Kernels& wide = cpu::kernels_by_name("avx512");
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const test::TaskData data = test::random_task(
          1, dtype, 64, false, test::progression(0, 1, 40), test::progression(0, 1, 80));
      const test::TaskResult native = test::run_task(*kernels, data);
      const test::TaskResult widened = test::run_task(wide, data);
      EXPECT_EQ(native.o != widened.o, dtype == DType::bf16) << name_of(dtype);
      EXPECT_EQ(native.dq != widened.dq, dtype == DType::bf16) << name_of(dtype);
      // Both are bf16-accurate, one of them to fp32: that is how far apart they are.
      const std::vector<double> o(widened.o.begin(), widened.o.end());
      EXPECT_LT(test::relative_rms(native.o, o), 4e-3);
    }
  }
}

// The manual says what a product of tiles computes, and in which order: so do those in plain C++.
TEST(Isa, EmulatedTilesComputeTheSameBits) {
  const std::vector<std::string> usable = available_names();
  if (std::find(usable.begin(), usable.end(), "amx_bf16") == usable.end())
    GTEST_SKIP() << "there are no tiles to compare with";
  for (const int dim : {40, 64, 128}) {
    for (const double size :
         {1.0, 1e-37, 1e30}) {  // outputs that are subnormal, sums that overflow
      test::TaskData data = test::random_task(
          2, DType::bf16, dim, true, test::progression(0, 1, 100), test::progression(0, 1, 100));
      for (double& x : data.v) x = test::as_stored(DType::bf16, x * size);
      test::TaskRun run;
      run.out_dtype = DType::bf16;
      const test::TaskResult tiles = test::run_task(cpu::kernels_by_name("amx_bf16"), data, run);
      const test::TaskResult plain =
          test::run_task(cpu::kernels_by_name("amx_bf16_emulated"), data, run);
      for (std::size_t m = 0; m < 5; ++m) {
        const std::vector<float>& a = *tiles.members()[m];
        const std::vector<float>& b = *plain.members()[m];
        ASSERT_EQ(a.size(), b.size());
        EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0)
            << test::kResultNames[m] << " " << dim << " " << size;
      }
    }
  }
}

// The instruction that rounds to bf16 beside tiles takes subnormal numbers for zero, always: so
// does whatever stands in for it.
TEST(Isa, TilesRoundSubnormalOutputsToZero) {
  for (const std::string& name : available_names()) {
    if (!name.starts_with("amx_bf16")) continue;
    test::TaskData data = test::random_task(3, DType::bf16, 8, false, test::progression(0, 1, 5),
                                            test::progression(0, 1, 2));
    std::fill(data.k.begin(), data.k.end(), 0.0);  // both keys have weight 1/2
    for (std::size_t i = 0; i < data.v.size(); ++i) data.v[i] = i < 8 ? -0x1p-126 : 0;
    test::TaskRun run;
    run.out_dtype = DType::bf16;
    test::TaskResult result;
    test::run_forward(cpu::kernels_by_name(name), data, run, result);
    for (const float x : result.o) EXPECT_EQ(x, 0.0F) << name;
    for (double& x : data.v) x *= 4;  // now it is a normal number
    test::run_forward(cpu::kernels_by_name(name), data, run, result);
    for (const float x : result.o) EXPECT_EQ(x, -0x1p-125F) << name;
  }
}

TEST(Isa, PeakIsMeasured) {
  EXPECT_GT(cpu::measure_fma_peak_gflops(false), 0.1);
  const auto& usable = cpu::available_kernels();
  const bool native = std::any_of(usable.begin(), usable.end(), [](const cpu::Kernels* kernels) {
    return kernels->native_bf16 && std::string(kernels->name) != "amx_bf16_emulated";
  });
  EXPECT_EQ(cpu::measure_fma_peak_gflops(true) > 0, native);
}

}  // namespace
}  // namespace annulus
