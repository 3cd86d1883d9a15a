// Plans a dilated pattern over four ranks and computes it: enough to need every part of the
// installed package.
#include <annulus/in_process.h>
#include <annulus/pattern.h>
#include <annulus/placement.h>
#include <annulus/plan.h>
#include <annulus/ring_attention.h>
#include <annulus/tensor.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main() {
  constexpr std::int64_t kTokens = 4096;
  constexpr int kHeads = 4;
  constexpr int kRanks = 4;
  constexpr int kHeadDim = 32;
  const std::vector<std::int64_t> segments{2048};
  const std::vector<std::int64_t> dilations{2};

  const annulus::Pattern pattern = annulus::longnet(kHeads, segments, dilations);
  const annulus::Placement placement = annulus::Placement::contiguous(kTokens, kRanks);
  const std::vector<annulus::Plan> views = annulus::Plan::of_all_ranks(
      {.pattern = pattern, .queries = placement, .keys = placement, .kv_heads = kHeads});
  std::printf("%s\n", annulus::plan_table(views.front()).c_str());

  // Per head a rank receives the selected rows of the other half of its segment: (2048 - 1024) / 2.
  for (const annulus::Plan& view : views) {
    if (view.received_unit_rows() != 512 * kHeads) {
      std::printf("rank %d receives %lld rows, expected %d\n", view.rank(),
                  static_cast<long long>(view.received_unit_rows()), 512 * kHeads);
      return EXIT_FAILURE;
    }
  }

  // With v = 1 a row's output is 1 where it attends to something and 0 where it does not.
  std::atomic<int> wrong{0};
  annulus::run_in_process(kRanks, [&](annulus::Transport& transport) {
    annulus::RingAttention attention({.pattern = pattern,
                                      .placement = placement,
                                      .kv_heads = kHeads,
                                      .head_dim = kHeadDim,
                                      .schedule = annulus::Schedule::ring,
                                      .backward = false},
                                     transport);
    const std::int64_t local = placement.local_tokens(transport.rank());
    const auto rows = static_cast<std::size_t>(local * kHeads);
    std::vector<float> q(rows * kHeadDim, 0.5F);
    std::vector<float> v(rows * kHeadDim, 1.0F);
    std::vector<float> o(rows * kHeadDim);
    std::vector<float> lse(rows);
    const auto view = [&](std::vector<float>& data) {
      return annulus::TensorView(data.data(), annulus::DType::f32, {1, local, kHeads, kHeadDim});
    };
    attention.forward(view(q), view(q), view(v), view(o),
                      {lse.data(), annulus::DType::f32, {1, local, kHeads}});

    for (std::int64_t token = 0; token < local; ++token) {
      for (int head = 0; head < kHeads; ++head) {
        const bool selected =
            pattern.branches[0].selects(head, placement.position(transport.rank(), token));
        const float found = o[static_cast<std::size_t>((token * kHeads + head) * kHeadDim)];
        if (!(std::abs(found - (selected ? 1.0F : 0.0F)) < 1e-5F)) ++wrong;
      }
    }
  });
  std::printf("%d of %lld rows are wrong\n", wrong.load(),
              static_cast<long long>(kTokens * kHeads));
  return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
