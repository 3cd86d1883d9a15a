#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "annulus/cuda.h"
#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/mpi.h"
#include "annulus/ring_check.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device_facts.h"
#include "cli/options.h"
#include "cli/oracle_check.h"
#include "cli/world.h"
#include "core/machine.h"
#include "kernels/cpu/kernel.h"

namespace annulus::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  annulus doctor
      what this machine has, what Annulus will use, and whether it works
  annulus doctor --ranks 16
      the ring check over more ranks
  mpirun -n 4 annulus doctor
      does MPI deliver messages, and does every process compute correctly?
  annulus doctor --device cuda:1
      check only this GPU; an error if it cannot be used
  ANNULUS_ISA=avx2 annulus doctor
      does a forced instruction set work here?
  annulus doctor --json > report.json
      to attach to a bug report)";

struct DoctorFlags {
  ProblemFlags problem;  // ranks, threads, device
  bool json = false;
};

struct Check {
  std::string name;
  bool ok = false;
  std::string detail;
};

// The optional parts of the library, and whether they are built.
std::vector<std::pair<std::string, std::string>> backends() {
  return {{"cpu", "built"},
          {"in_process", "built"},
          {"mpi", mpi_built() ? "built" : "not built"},
          {"gloo", "not built"},
          {"nccl", "not built"},
          {"cuda", cuda_built() ? "built" : "not built"}};
}

// A GPU that the driver lists. `complaint` says why Annulus cannot use it.
struct Gpu {
  Device device;
  CudaDevice facts;
  std::string complaint;
};

std::vector<Gpu> find_gpus() {
  std::vector<Gpu> gpus;
  for (int i = 0; i < cuda_device_count(); ++i) {
    Gpu gpu;
    gpu.device = {Device::Kind::cuda, i};
    try {
      gpu.facts = cuda_device(i);
    } catch (const DeviceError& error) {
      gpu.complaint = error.what();
    }
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

// "sm90, where they fit; ..." and how to get others.
std::string kernels_text(const Gpu& gpu) {
  const std::string& kernels = gpu.facts.kernels;
  if (!forced_cuda_kernels().empty()) return kernels + ", forced by ANNULUS_CUDA_KERNELS";
  if (kernels == "portable") return "portable, the only ones for this device";
  return fmt::format(
      "{} for bf16 and fp16 with head dim 64 or 128, else portable; force others: "
      "ANNULUS_CUDA_KERNELS=portable annulus ...",
      kernels);
}

Json to_json(const Gpu& gpu) {
  Json json = {{"device", name_of(gpu.device)}, {"usable", gpu.complaint.empty()}};
  if (!gpu.complaint.empty()) {
    json["complaint"] = gpu.complaint;
    return json;
  }
  json["name"] = gpu.facts.name;
  json["capability"] = fmt::format("{}.{}", gpu.facts.major, gpu.facts.minor);
  json["multiprocessors"] = gpu.facts.multiprocessors;
  json["memory_bytes"] = gpu.facts.memory_bytes;
  json["free_bytes"] = gpu.facts.free_bytes;
  json["driver"] = gpu.facts.driver;
  json["kernels"] = gpu.facts.kernels;
  return json;
}

// Passes a block once around the ring in each direction.
std::vector<Check> check_links(World& world, int ranks) {
  std::vector<RingCheck> found(static_cast<std::size_t>(ranks));
  if (world.is_mpi()) {
    world.set_deadline(InProcessOptions{}.deadline);
    const RingCheck mine = check_ring(world.ring());
    world.set_no_deadline();
    const std::vector<std::string> all =
        world.gather(to_text(Json{mine.forward_ok, mine.backward_ok, mine.detail}));
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const Json json = Json::parse(all[rank]);
      found[rank] = {json[0].get<bool>(), json[1].get<bool>(), json[2].get<std::string>()};
    }
  } else {
    run_in_process(ranks, [&](Transport& transport) {
      found[static_cast<std::size_t>(transport.rank())] = check_ring(transport);
    });
  }
  const auto direction = [&](const char* name, bool RingCheck::*ok) {
    Check check{.name = fmt::format("ring pass {}", name), .ok = true, .detail = ""};
    for (int rank = 0; rank < ranks; ++rank) {
      const RingCheck& one = found[static_cast<std::size_t>(rank)];
      if (one.*ok) continue;
      check.ok = false;
      check.detail += fmt::format("rank {}: {} ", rank, one.detail);
    }
    if (check.ok) {
      check.detail = fmt::format("{} ranks, {}", ranks, world.is_mpi() ? "mpi" : "in_process");
    }
    return check;
  };
  return {direction("forward", &RingCheck::forward_ok),
          direction("backward", &RingCheck::backward_ok)};
}

// The ranks of an MPI job may be on different machines, so a check that failed on one rank has
// failed.
void add_failures_elsewhere(World& world, std::vector<Check>& checks) {
  Json mine = Json::array();
  for (const Check& check : checks) {
    mine.push_back({check.ok ? "" : check.name + ": " + check.detail});
  }
  const std::vector<std::string> all = world.gather(to_text(mine));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    for (const Json& failure : Json::parse(all[rank])) {
      const std::string text = failure[0].get<std::string>();
      if (!text.empty()) {
        checks.push_back({.name = fmt::format("rank {}", rank), .ok = false, .detail = text});
      }
    }
  }
}

// A tiny LongNet on a ring of three against the oracle, with the kernels that would be used.
Check check_kernels(DType dtype, const Device& device, const ProblemFlags& flags) {
  const bool on_cpu = device.kind == Device::Kind::cpu;
  Check check{
      .name = fmt::format("attention {}{}", name_of(dtype), on_cpu ? "" : " " + name_of(device)),
      .ok = false,
      .detail = ""};
  try {
    const std::vector<std::int64_t> segments = {32, 64};
    const std::vector<std::int64_t> dilations = {1, 2};
    RingOptions options{.pattern = longnet(4, segments, dilations, true),
                        .placement = Placement::zigzag(150, 3)};
    options.kv_heads = 2;
    options.dtype = dtype;
    options.schedule = Schedule::ring;
    options.threads = flags.options.threads;
    options.device = device;
    check.ok = true;
    if (!on_cpu && !forced_cuda_kernels().empty()) {
      if (const std::string complaint = device_complaint(options); !complaint.empty()) {
        check.detail = "left out: " + complaint;
        return check;
      }
    }
    const OracleCheck::Outcome outcome = OracleCheck(options, 1).run(options);
    for (const Deviation& deviation : outcome.deviations) {
      check.ok = check.ok && deviation.ok();
      check.detail += fmt::format("{}{} {:.1e}", check.detail.empty() ? "" : ", ", deviation.tensor,
                                  deviation.found);
    }
    if (!on_cpu) check.detail = outcome.kernels + ": " + check.detail;
    if (!check.ok) check.detail += ": too large; run 'annulus verify' and report its output";
  } catch (const Error& error) {
    check = {.name = check.name, .ok = false, .detail = error.what()};
  }
  return check;
}

std::string memory_text() {
  const auto text = [](const std::optional<std::int64_t>& bytes) {
    return bytes ? format_bytes(*bytes) : std::string("unknown");
  };
  return text(available_memory_bytes()) + " available of " + text(total_memory_bytes());
}

int doctor(World& world, const DoctorFlags& flags) {
  const cpu::Kernels& chosen = cpu::chosen_kernels();  // ConfigError names what is possible instead
  // A device that the user asks for must exist.
  const bool asked = flags.problem.has("device");
  const DeviceFacts device = device_facts(flags.problem.options.device);
  const std::vector<Gpu> gpus = find_gpus();
  const char* forced = std::getenv("ANNULUS_ISA");
  const bool is_forced = forced != nullptr && *forced != '\0';
  const std::vector<std::string> compiled = cpu::compiled_kernel_names();
  std::vector<std::string> usable;
  for (const cpu::Kernels* kernels : cpu::available_kernels()) usable.emplace_back(kernels->name);
  const int threads = ThreadPool::of(flags.problem.options.threads)->threads();
  const double peak = cpu::measure_fma_peak_gflops(false);
  const double bf16_peak = cpu::measure_fma_peak_gflops(true);

  std::vector<Check> links = check_links(world, flags.problem.ranks);
  std::vector<Check> checks;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    checks.push_back(check_kernels(dtype, {}, flags.problem));
  }
  for (const Gpu& gpu : gpus) {
    if (!gpu.complaint.empty() || (asked && gpu.device != device.device)) continue;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      checks.push_back(check_kernels(dtype, gpu.device, flags.problem));
    }
  }
  add_failures_elsewhere(world, checks);
  checks.insert(checks.begin(), links.begin(), links.end());
  if (!world.leads()) return kOk;
  const bool healthy =
      std::all_of(checks.begin(), checks.end(), [](const Check& check) { return check.ok; });

  if (flags.json) {
    const auto bytes = [](const std::optional<std::int64_t>& value) {
      return value ? Json(*value) : Json();
    };
    Json json;
    json["command"] = "doctor";
    json["healthy"] = healthy;
    json["version"] = ANNULUS_VERSION;
    add_device(json, device);
    json["kernels"] = device.kernels;
    json["cpu"] = cpu_name();
    json["cpu_features"] = cpu_features();
    json["isa"] = chosen.name;
    json["isa_forced"] = is_forced;
    json["isa_reason"] = cpu::choice_reason();
    json["isa_usable"] = usable;
    json["isa_compiled"] = compiled;
    json["native_bf16"] = chosen.native_bf16;
    json["peak_gflops_per_thread"] = {{"fp32", peak},
                                      {"bf16", bf16_peak > 0.0 ? Json(bf16_peak) : Json()}};
    json["transport"] = world.name();
    json["threads"] = threads;
    json["memory_total_bytes"] = bytes(total_memory_bytes());
    json["memory_available_bytes"] = bytes(available_memory_bytes());
    for (const auto& [name, state] : backends()) json["backends"][name] = state;
    const std::string complaint = cuda_complaint();
    json["cuda"] = {{"built", cuda_built()},
                    {"complaint", complaint.empty() ? Json() : Json(complaint)},
                    {"devices", Json::array()}};
    for (const Gpu& gpu : gpus) json["cuda"]["devices"].push_back(to_json(gpu));
    json["checks"] = Json::array();
    for (const Check& check : checks) {
      json["checks"].push_back({{"name", check.name}, {"ok", check.ok}, {"detail", check.detail}});
    }
    print_json(json);
    return healthy ? kOk : kFailed;
  }

  std::string text;
  const auto fact = [&](const char* name, const std::string& value) {
    text += fmt::format("  {:<16} {}\n", name, value);
  };
  fact("version", ANNULUS_VERSION);
  fact("CPU", cpu_name());
  fact("features", fmt::format("{}", fmt::join(cpu_features(), " ")));
  fact("instruction set",
       fmt::format("{}, {}{}", chosen.name, cpu::choice_reason(),
                   chosen.native_bf16 && is_forced ? ", multiplies bf16 natively" : ""));
  fact("", fmt::format("usable: {}; compiled in: {}", fmt::join(usable, ", "),
                       fmt::join(compiled, ", ")));
  fact("", fmt::format("force another: ANNULUS_ISA={} annulus ...", usable.back()));
  fact("peak per thread",
       fmt::format("{} fp32{}", format_flops(peak),
                   bf16_peak > 0.0 ? ", " + format_flops(bf16_peak) + " bf16" : ""));
  fact("threads", fmt::format("{} (--threads or ANNULUS_THREADS choose another number)", threads));
  fact("memory", memory_text());
  std::string linked;
  for (const auto& [name, state] : backends()) {
    linked += fmt::format("{}{} {}", linked.empty() ? "" : ", ", name, state);
  }
  fact("backends", linked);
  if (const std::string complaint = cuda_complaint(); !complaint.empty()) {
    fact("CUDA", "no device: " + complaint);
  }
  for (const Gpu& gpu : gpus) {
    const std::string name = name_of(gpu.device);
    if (!gpu.complaint.empty()) {
      fact(name.c_str(), "not usable: " + gpu.complaint);
      continue;
    }
    fact(name.c_str(), fmt::format("{}, capability {}.{}, {} multiprocessors, driver {}",
                                   gpu.facts.name, gpu.facts.major, gpu.facts.minor,
                                   gpu.facts.multiprocessors, gpu.facts.driver));
    fact("", fmt::format("{} of memory, {} free", format_bytes(gpu.facts.memory_bytes),
                         format_bytes(gpu.facts.free_bytes)));
    fact("", "kernels: " + kernels_text(gpu));
  }
  text += "\n";
  for (const Check& check : checks) {
    text +=
        fmt::format("  {} {:<22} {}\n", check.ok ? "ok    " : "FAILED", check.name, check.detail);
  }
  text += healthy ? "\n  All is well.\n" : "\n  Something is wrong: see FAILED above.\n";
  print(text);
  return healthy ? kOk : kFailed;
}

}  // namespace

void add_doctor(CLI::App& tool, Action& chosen) {
  CLI::App* command =
      tool.add_subcommand("doctor", "Show what this machine has and check that it works");
  const auto flags = std::make_shared<DoctorFlags>();
  add_ranks_flag(*command, flags->problem, "Ranks of the ring check (default 4)", 256);
  add_transport_flag(*command, flags->problem);
  add_output_flags(*command, flags->json);
  add_machine_flags(*command, flags->problem);
  command->footer(kExamples);
  run_in_world(*command, flags->problem, chosen,
               [flags](World& world) { return doctor(world, *flags); });
}

}  // namespace annulus::cli
