// The limits of `annulus verify`: what is allowed of 16-bit results is what roundings can do.

#include "cli/oracle_check.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/ring_attention.h"

namespace annulus::cli {
namespace {

std::map<std::string, Deviation> deviations(double softcap, MixGradient mix) {
  using List = std::vector<std::int64_t>;
  RingOptions options{longnet(4, List{16, 64}, List{1, 4}, true), Placement::zigzag(96, 2)};
  options.batch = 2;
  options.kv_heads = 2;
  options.head_dim = 32;
  options.dtype = DType::bf16;
  options.softcap = softcap;
  options.mix_gradient = mix;
  std::map<std::string, Deviation> found;
  for (const Deviation& deviation : OracleCheck(options, 1).run(options).deviations)
    found[deviation.tensor] = deviation;
  return found;
}

// A softcap makes gradients of scores small, and the effect of a rounded delta on them as well.
TEST(OracleCheck, IsAsStrictWithASoftcap) {
  for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
    const auto without = deviations(0, mix);
    for (const double softcap : {10.0, 1.0, 0.1}) {
      for (const auto& [name, deviation] : deviations(softcap, mix)) {
        EXPECT_TRUE(deviation.ok()) << softcap << " " << name << " " << deviation.found;
        EXPECT_LT(deviation.allowed, 1.2 * without.at(name).allowed) << softcap << " " << name;
      }
    }
  }
}

}  // namespace
}  // namespace annulus::cli
