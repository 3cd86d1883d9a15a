// What backward_sm90.py calls: the Hopper backward kernel by a C interface.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cuda/sm90/backward/launch.h"

using namespace annulus::cuda;

// Sizes of what the script lays out by itself.
extern "C" void backward_sm90_sizes(int* sizes) {
  const int all[] = {sizeof(BackwardParams), sizeof(Channel), sizeof(Run),   sizeof(Group),
                     sizeof(Member),         sizeof(Item),    sizeof(Source)};
  std::memcpy(sizes, all, sizeof all);
}

// Puts items and launches into chains, in place, for `blocks` of threads. Returns how many launches
// there are then: at most as many as items.
extern "C" int backward_sm90_chains(const Run* runs, int run_count, const Group* groups,
                                    int group_count, const Member* members, int member_count,
                                    Item* items, int item_count, Launch* launches, int launch_count,
                                    int blocks, int step, double distance, ItemTurn* turns) {
  Tables tables;
  tables.runs.assign(runs, runs + run_count);
  tables.groups.assign(groups, groups + group_count);
  tables.members.assign(members, members + member_count);
  tables.items.assign(items, items + item_count);
  tables.launches.assign(launches, launches + launch_count);
  const std::vector<ItemTurn> all = put_in_chains(tables, {blocks, step, distance});
  std::copy(tables.items.begin(), tables.items.end(), items);
  std::copy(tables.launches.begin(), tables.launches.end(), launches);
  std::copy(all.begin(), all.end(), turns);
  return static_cast<int>(tables.launches.size());
}

// 0, or not: `message` then says why.
extern "C" int backward_sm90(const void* params, int row_stride, void* next_item, const void* turns,
                             void* progress, void* stream, char* message, int size) {
  const auto& p = *static_cast<const BackwardParams*>(params);
  if (!backward_sm90_fits(p.shape)) {
    std::strncpy(message, "does not fit", size);
    return 2;
  }
  LaunchTraits traits;
  traits.query_stride = traits.key_stride = row_stride;
  const cudaError_t error = launch_backward_sm90(
      p, static_cast<cudaStream_t>(stream),
      {traits, static_cast<std::int32_t*>(next_item), static_cast<const ItemTurn*>(turns),
       static_cast<std::int32_t*>(progress)});
  if (error == cudaSuccess) return 0;
  std::strncpy(message, cudaGetErrorString(error), size);
  return 1;
}
