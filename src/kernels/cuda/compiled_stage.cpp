#include "kernels/cuda/compiled_stage.h"

#include <cstddef>
#include <cstring>
#include <utility>

#include "kernels/cuda/device/runtime.h"

namespace annulus::cuda {
namespace {

// Arranges the items of each launch for persistent blocks.
void arrange_all(Tables& tables, int blocks, int tile) {
  std::vector<Item> items;
  std::vector<Launch> launches;
  for (const Launch& launch : tables.launches) {
    const std::vector<Item> arranged = arrange_items(tables, launch, blocks, tile);
    launches.push_back({launch.branch, static_cast<std::int32_t>(items.size()),
                        static_cast<std::int32_t>(arranged.size())});
    items.insert(items.end(), arranged.begin(), arranged.end());
  }
  tables.items = std::move(items);
  tables.launches = std::move(launches);
}

}  // namespace

bool covers(const Tables& tables, const Launch& launch, std::int64_t rows) {
  std::int64_t count = 0;
  for (std::int32_t i = 0; i < launch.items; ++i)
    count += tables.items[static_cast<std::size_t>(launch.first_item + i)].rows;
  return count == rows;
}

CompiledStage compile_stage(const Stage& stage, const Computation& computation, Side side, int tile,
                            ItemOrder order, int step, int device) {
  CompiledStage out;
  out.tables = make_tables(stage, computation, side, tile, computation.reproducible);
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "asking for the number of multiprocessors");
  if (order == ItemOrder::in_chains)  // may split launches
    out.turns = put_in_chains(out.tables, {.blocks = multiprocessors, .step = step});
  for (const Launch& launch : out.tables.launches) {
    out.traits.push_back(launch_traits(out.tables, launch));
    out.parcels.push_back({parcels_of(out.tables, launch, Side::queries),
                           parcels_of(out.tables, launch, Side::keys)});
  }
  if (order == ItemOrder::in_turn || order == ItemOrder::as_made) put_by_position(out.tables, tile);
  if (order == ItemOrder::in_turn) arrange_all(out.tables, multiprocessors, tile);
  if (order == ItemOrder::longest_first) put_longest_first(out.tables, side);
  return out;
}

void CompiledStage::upload(int device_index, Uploads& uploads, Queue& queue) {
  std::vector<std::byte> bytes;
  const auto append = [&](const auto& list) {
    const std::size_t at = (bytes.size() + 15) / 16 * 16;
    const std::size_t size = list.size() * sizeof(list[0]);
    bytes.resize(at + size);
    if (size > 0) std::memcpy(bytes.data() + at, list.data(), size);
    return at;
  };
  const std::size_t runs = append(tables.runs);
  const std::size_t groups = append(tables.groups);
  const std::size_t members = append(tables.members);
  const std::size_t repeats = append(tables.repeats);
  const std::size_t items = append(tables.items);
  const std::size_t chains = append(turns);
  const std::size_t earlier = append(tables.earlier);
  const std::size_t of_queries = append(tables.later);
  memory =
      allocate_reusable(device_index, static_cast<std::int64_t>(bytes.size()), "tables of tiles");
  uploads.copy(memory.data(), bytes, "the tables of tiles", queue);
  const std::byte* base = memory.data();
  device.runs = reinterpret_cast<const Run*>(base + runs);
  device.groups = reinterpret_cast<const Group*>(base + groups);
  device.members = reinterpret_cast<const Member*>(base + members);
  device.repeats = reinterpret_cast<const Repeat*>(base + repeats);
  device.items = reinterpret_cast<const Item*>(base + items);
  if (!turns.empty()) device_turns = reinterpret_cast<const ItemTurn*>(base + chains);
  turns = {};
  if (!tables.earlier.empty()) key_sums = reinterpret_cast<const std::uint32_t*>(base + earlier);
  if (!tables.later.empty()) later = reinterpret_cast<const std::uint32_t*>(base + of_queries);
  std::vector<Launch> launches = std::move(tables.launches);
  tables = {};
  tables.launches = std::move(launches);
}

void CompiledStage::find_rows(const ReceivedRows& received, std::int64_t row_bytes) {
  // Gradients of keys are added row by row, without bulk copies.
  const bool queries_return =
      received.gradients.layout != nullptr && received.gradients.layout->sections() == 1;
  for (std::size_t i = 0; i < traits.size(); ++i) {
    // Rows of statistics are between rows of queries.
    traits[i].queries = grid_of(received.queries, parcels[i].queries, row_bytes, kMapStep);
    traits[i].keys = grid_of(received.keys, parcels[i].keys, row_bytes, row_bytes);
    if (queries_return) {
      const std::int64_t bytes = received.gradients.layout->section_bytes(0);
      traits[i].query_gradients = grid_of(received.gradients, parcels[i].queries, bytes, kMapStep);
    }
  }
}

}  // namespace annulus::cuda
