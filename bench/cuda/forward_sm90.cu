// What forward_sm90.py calls: tables come as plain arrays, a launch as a list of 64-bit numbers.
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/cuda/sm90/forward/launch.h"
#include "kernels/cuda/work/launch_traits.h"

using namespace annulus;        // NOLINT
using namespace annulus::cuda;  // NOLINT

struct HostTables {
  const Run* runs;
  const Group* groups;
  const Member* members;
  const Repeat* repeats;
  const Item* items;
  std::int64_t run_count, group_count, member_count, repeat_count, item_count;
};

namespace {

Tables tables_of(const HostTables& host) {
  Tables tables;
  tables.runs.assign(host.runs, host.runs + host.run_count);
  tables.groups.assign(host.groups, host.groups + host.group_count);
  tables.members.assign(host.members, host.members + host.member_count);
  tables.repeats.assign(host.repeats, host.repeats + host.repeat_count);
  tables.items.assign(host.items, host.items + host.item_count);
  tables.launches.push_back({0, 0, static_cast<std::int32_t>(host.item_count)});
  return tables;
}

class Reader {
 public:
  explicit Reader(const std::int64_t* at) : at_(at) {}
  std::int64_t number() { return *at_++; }
  template <typename T>
  T* pointer() {
    return reinterpret_cast<T*>(number());
  }
  TensorRows rows() {
    TensorRows out;
    out.base = pointer<std::byte>();
    out.batch_step = number();
    out.head_step = number();
    out.row_step = number();
    return out;
  }
  Channel channel() {
    Channel out;
    out.local = rows();
    out.sources = pointer<const Source>();
    out.row_bytes = number();
    out.bytes_before = number();
    out.bytes_all = number();
    return out;
  }

 private:
  const std::int64_t* at_;
};

}  // namespace

// sizes of the structs that Python lays out
extern "C" void sizes(std::int64_t* out) {
  out[0] = sizeof(Run);
  out[1] = sizeof(Group);
  out[2] = sizeof(Member);
  out[3] = sizeof(Repeat);
  out[4] = sizeof(Item);
  out[5] = sizeof(Source);
}

extern "C" void traits(const HostTables* host, std::int64_t* out) {
  const Tables tables = tables_of(*host);
  const LaunchTraits found = launch_traits(tables, tables.launches.front());
  out[0] = found.causal ? 1 : 0;
  out[1] = static_cast<int>(found.weights);
  out[2] = found.query_stride;
  out[3] = found.key_stride;
}

extern "C" std::int64_t arrange(const HostTables* host, std::int64_t blocks, Item* out,
                                std::int64_t capacity) {
  const Tables tables = tables_of(*host);
  const std::vector<Item> items =
      arrange_items(tables, tables.launches.front(), static_cast<int>(blocks), kForwardSm90Tile);
  if (static_cast<std::int64_t>(items.size()) > capacity) return -1;
  std::memcpy(out, items.data(), items.size() * sizeof(Item));
  return static_cast<std::int64_t>(items.size());
}

extern "C" const char* forward(const std::int64_t* call, double scale, double out_factor) {
  Reader in(call);
  ForwardParams p;
  p.shape.dtype = static_cast<DType>(in.number());
  p.shape.head_dim = static_cast<int>(in.number());
  p.shape.scale = static_cast<float>(scale);
  p.shape.aligned = true;
  p.shape.batch = in.number();
  p.shape.query_tokens = in.number();
  p.shape.key_tokens = in.number();
  p.shape.heads = static_cast<int>(in.number());
  p.shape.kv_heads = static_cast<int>(in.number());
  p.tables.runs = in.pointer<const Run>();
  p.tables.groups = in.pointer<const Group>();
  p.tables.members = in.pointer<const Member>();
  p.tables.repeats = in.pointer<const Repeat>();
  p.tables.items = in.pointer<const Item>();
  p.first_item = static_cast<std::int32_t>(in.number());
  p.items = static_cast<std::int32_t>(in.number());
  p.q = in.channel();
  p.k = in.channel();
  p.v = in.channel();
  p.lse = in.rows();
  p.state = in.rows();
  p.out = in.rows();
  p.out_dtype = static_cast<DType>(in.number());
  p.for_good = in.number() != 0;
  p.out_factor = static_cast<float>(out_factor);
  p.load_state = in.number() != 0;
  LaunchTraits traits;
  traits.causal = in.number() != 0;
  traits.weights = static_cast<PairWeights>(in.number());
  traits.query_stride = static_cast<std::int32_t>(in.number());
  traits.key_stride = static_cast<std::int32_t>(in.number());
  const auto stream = in.pointer<CUstream_st>();
  p.later = in.pointer<const std::uint32_t>();
  if (!forward_sm90_fits(p.shape)) return "does not fit";
  const cudaError_t error = launch_forward_sm90(p, traits, stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
