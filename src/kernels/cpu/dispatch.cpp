#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "annulus/error.h"
#include "kernels/cpu/implementations.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/preference.h"

namespace annulus::cpu {
namespace {

const std::vector<Implementation>& implementations() {
  static const std::vector<Implementation> all = [] {
    std::vector<Implementation> out = highway_implementations();
    const auto others = std::find_if(out.begin(), out.end(), [](const Implementation& i) {
      return std::string_view(i.kernels->name) == "avx512";
    });
    if (others == out.end()) return out;
    // bf16 of their own. CPUs with tiles are slow at other bf16 products (preference.cpp), so what
    // does not run on tiles uses fp32, too.
    const Kernels& rest = *others->kernels;
    std::vector<Implementation> ordered = amx_bf16_implementations(rest);
    for (const Implementation& i : amx_bf16_emulated_implementations(rest)) ordered.push_back(i);
    for (const Implementation& i : avx512_bf16_implementations(rest)) ordered.push_back(i);
    ordered.insert(ordered.end(), out.begin(), out.end());
    return ordered;
  }();
  return all;
}

const IsaChoice& default_choice() {
  static const IsaChoice choice = [] {
    std::vector<std::string_view> usable;
    for (const Implementation& i : implementations()) {
      if (i.usable() && !i.only_by_name) usable.emplace_back(i.kernels->name);
    }
    return choose_isa(cpu_identity(), usable);
  }();
  return choice;
}

// Null if no set is forced.
const char* forced_name() {
  const char* const name = std::getenv("ANNULUS_ISA");
  return name != nullptr && *name != '\0' ? name : nullptr;
}

}  // namespace

const std::vector<const Kernels*>& available_kernels() {
  static const std::vector<const Kernels*> usable = [] {
    std::vector<const Kernels*> out;
    for (const Implementation& i : implementations()) {
      if (!i.usable()) continue;
      const bool is_default = i.kernels->name == default_choice().name;
      out.insert(is_default ? out.begin() : out.end(), i.kernels);
    }
    return out;
  }();
  return usable;
}

std::vector<std::string> compiled_kernel_names() {
  std::vector<std::string> names;
  for (const Implementation& i : implementations()) names.emplace_back(i.kernels->name);
  return names;
}

const Kernels& kernels_by_name(const std::string& name) {
  std::vector<std::string> usable;
  for (const Kernels* kernels : available_kernels()) {
    if (name == kernels->name) return *kernels;
    usable.emplace_back(kernels->name);
  }
  std::string complaint = "there is none of this name";
  for (const Implementation& i : implementations())
    if (name == i.kernels->name) complaint = i.complaint;
  throw ConfigError(fmt::format(
      "ANNULUS_ISA: instruction set '{}' cannot run here: {}; usable on this CPU: {} (compiled in: "
      "{})",
      name, complaint, fmt::join(usable, ", "), fmt::join(compiled_kernel_names(), ", ")));
}

const Kernels& chosen_kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const char* const forced = forced_name();
    return forced != nullptr ? kernels_by_name(forced) : *available_kernels().front();
  }();
  return chosen;
}

std::string choice_reason() {
  return forced_name() != nullptr ? "forced by ANNULUS_ISA" : default_choice().reason;
}

void throw_scratch_exhausted(std::size_t wanted_bytes, std::size_t left_bytes) {
  throw DeviceError(fmt::format(
      "CPU kernel: a task wants {} more bytes of scratch and {} are left: this is a bug "
      "in annulus, please report the call's options",
      wanted_bytes, left_bytes));
}

double measure_fma_peak_gflops(bool bf16) {
  const Implementation* best = nullptr;
  for (const Implementation& i : implementations()) {
    if (i.usable() && !i.only_by_name && i.kernels->native_bf16 == bf16 && best == nullptr)
      best = &i;
  }
  if (best == nullptr) return 0.0;
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t kRounds = 200'000;
  float sink = 0;
  double fastest = 0;
  best->multiply_add(kRounds, &sink);  // warm-up: clock frequency and upper halves of registers
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto start = Clock::now();
    const double flops = best->multiply_add(kRounds, &sink);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    fastest = std::max(fastest, flops / seconds / 1e9);
  }
  return sink == 1.0F ? -fastest : fastest;
}

}  // namespace annulus::cpu
