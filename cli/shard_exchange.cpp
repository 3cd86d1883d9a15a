#include "cli/shard_exchange.h"

#include <initializer_list>
#include <vector>

namespace annulus::cli {
namespace {

constexpr std::uint32_t kShards = 0x53485244;  // "SHRD"

void move(World& world, const JobTensors& tensors, std::initializer_list<const RingTensor*> which,
          bool to_rank_0) {
  if (!world.is_mpi()) return;
  Transport& ring = world.ring();
  const bool leads = world.leads();
  for (int rank = 1; rank < ring.size(); ++rank) {  // the shards of that rank
    if (!leads && rank != world.rank()) continue;
    std::vector<Region> regions;
    for (const RingTensor* tensor : which) {
      const TensorView shard = tensor->shard(tensors.order, rank);
      if (shard.data == nullptr) continue;
      const auto element = static_cast<std::int64_t>(size_of(shard.dtype));
      const std::int64_t entries = shard.shape[0];
      const std::int64_t bytes = tensor->shard_bytes(tensors.order, rank) / entries;
      for (std::int64_t entry = 0; entry < entries; ++entry) {  // of one entry, a shard is dense
        auto* data = static_cast<std::byte*>(shard.data) + entry * shard.stride[0] * element;
        regions.push_back(ring.expose({data, static_cast<std::size_t>(bytes)}, {}, nullptr));
      }
    }
    std::vector<Message> batch;
    for (const Region& region : regions) {
      batch.push_back({leads == to_rank_0 ? Way::receive : Way::send, leads ? rank : 0, kShards,
                       &region, 0, region.bytes});
    }
    ring.post(batch, Event())->wait();
  }
}

}  // namespace

void send_inputs(World& world, const JobTensors& tensors) {
  move(world, tensors, {&tensors.q, &tensors.k, &tensors.v, &tensors.dout}, false);
}

void collect_results(World& world, const JobTensors& tensors) {
  move(world, tensors, {&tensors.o, &tensors.lse, &tensors.dq, &tensors.dk, &tensors.dv}, true);
}

}  // namespace annulus::cli
