#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "annulus/error.h"
#include "annulus/simulate.h"

namespace annulus {
namespace {

void check_number(const Cluster& cluster, const char* what, double value, bool may_be_zero) {
  if (std::isfinite(value) && (value > 0 || (may_be_zero && value == 0))) return;
  throw ConfigError(fmt::format("cluster '{}': {} is {}, expected a number {}", cluster.name, what,
                                value, may_be_zero ? "of 0 or more" : "above 0"));
}

void check_count(const Cluster& cluster, const char* what, std::int64_t value, int least) {
  if (value >= least) return;
  throw ConfigError(
      fmt::format("cluster '{}': {} is {}, expected {} or more", cluster.name, what, value, least));
}

void check_wire(const Cluster& cluster, const char* which, const Wire& wire) {
  const auto what = [&](const char* member) { return fmt::format("{}.{}", which, member); };
  check_number(cluster, what("bytes_per_second").c_str(), wire.bytes_per_second, true);
  check_number(cluster, what("latency_seconds").c_str(), wire.latency_seconds, true);
}

// NVIDIA H200 Tensor Core GPU data sheet: 989 TFLOP/s dense bf16 (1,979 with sparsity), 141 GB at
// 4.8 TB/s, NVLink 900 GB/s, which is both ways together. DGX H200 data sheet: eight of them, and
// one ConnectX-7 port of 400 Gb/s (InfiniBand NDR) for each. What these kernels reach of the peak
// is measured: docs/performance.md, dense, 16k tokens, head dim 128.
Cluster h200() {
  constexpr double kPeak = 989e12;
  Cluster c;
  c.name = "h200";
  c.source =
      "data sheets of H200 (989 TFLOP/s bf16, 141 GB at 4.8 TB/s, NVLink 450 GB/s each way) and "
      "DGX "
      "H200 (a 400 Gb/s InfiniBand port per GPU); 70 % and 60 % of the peak in forward and "
      "backward "
      "and 6 us between processes of a host as measured with annulus; 10 us between hosts assumed";
  c.ranks_per_host = 8;
  c.forward_flops_per_second = 0.70 * kPeak;
  c.backward_flops_per_second = 0.60 * kPeak;
  c.copy_bytes_per_second = 4.8e12;
  c.memory_bytes = 141'000'000'000;
  c.inside = {"NVLink", 450e9, 6e-6, true};
  c.between = {"InfiniBand", 50e9, 10e-6, true};
  return c;
}

}  // namespace

void Cluster::validate() const {
  check_count(*this, "ranks_per_host", ranks_per_host, 1);
  check_count(*this, "ranks_per_processor", ranks_per_processor, 1);
  check_count(*this, "ports_per_host", ports_per_host, 0);
  check_count(*this, "memory_bytes", memory_bytes, 0);
  if (ranks_per_host % ranks_per_processor != 0) {
    throw ConfigError(fmt::format(
        "cluster '{}': ranks_per_processor is {}, expected a divisor of the {} ranks per "
        "host: a processor is in one host",
        name, ranks_per_processor, ranks_per_host));
  }
  if (ports_per_host > ranks_per_host) {
    throw ConfigError(fmt::format(
        "cluster '{}': ports_per_host is {}, expected at most the {} ranks per host, or 0", name,
        ports_per_host, ranks_per_host));
  }
  check_number(*this, "forward_flops_per_second", forward_flops_per_second, false);
  check_number(*this, "backward_flops_per_second", backward_flops_per_second, false);
  check_number(*this, "copy_bytes_per_second", copy_bytes_per_second, true);
  check_number(*this, "stage_seconds", stage_seconds, true);
  check_wire(*this, "inside", inside);
  check_wire(*this, "between", between);
}

const std::vector<std::string>& cluster_preset_names() {
  static const std::vector<std::string> names{"h200", "h200-infiniband", "h200-one-port"};
  return names;
}

Cluster cluster_preset(const std::string& name) {
  Cluster c = h200();
  c.name = name;
  if (name == "h200") return c;
  if (name == "h200-infiniband") {  // no NVLink: one GPU per host
    c.ranks_per_host = 1;
    return c;
  }
  if (name == "h200-one-port") {  // eight GPUs share one network port
    c.ports_per_host = 1;
    return c;
  }
  throw ConfigError(fmt::format("there is no cluster '{}', expected one of {}", name,
                                fmt::join(cluster_preset_names(), ", ")));
}

}  // namespace annulus
