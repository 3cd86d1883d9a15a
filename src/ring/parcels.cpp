#include "ring/parcels.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "ring/agreement.h"

namespace annulus::ring {

ParcelShape::ParcelShape(const Plan& plan, std::int64_t batch,
                         std::vector<std::int64_t> section_bytes)
    : plan_(&plan), batch_(batch), sections_(std::move(section_bytes)) {
  row_bytes_ = std::accumulate(sections_.begin(), sections_.end(), std::int64_t{0});
}

std::int64_t ParcelShape::bytes(int parcel) const {
  const Parcel& p = plan_->parcels()[static_cast<std::size_t>(parcel)];
  const auto units = static_cast<std::int64_t>(
      plan_->classes()[static_cast<std::size_t>(p.head_class)].units.size());
  return batch_ * units * p.row_count * row_bytes_;
}

std::int64_t ParcelShape::offset(int parcel, std::int64_t batch, int unit_slot, int section) const {
  const Parcel& p = plan_->parcels()[static_cast<std::size_t>(parcel)];
  const auto units = static_cast<std::int64_t>(
      plan_->classes()[static_cast<std::size_t>(p.head_class)].units.size());
  std::int64_t row = (batch * units + unit_slot) * row_bytes_;
  for (int i = 0; i < section; ++i) row += section_bytes(i);
  return row * p.row_count;
}

std::vector<CopyRun> copy_runs(const Placement& placement, const Parcel& parcel) {
  std::vector<CopyRun> runs;
  const std::span<const RowSet> ranges = placement.ranges(parcel.owner);
  std::int64_t stored = 0;
  for (const RowSet& rows : parcel.rows) {
    std::int64_t local = 0;
    for (const RowSet& range : ranges) {
      const RowSet common = intersect(rows, range);
      if (common.count > 0) {
        runs.push_back({stored + (common.first - rows.first) / rows.stride,
                        common.stride / rows.stride,
                        local + (common.first - range.first) / range.stride,
                        common.stride / range.stride, common.count});
        if (common.count == 1) runs.back().parcel_stride = runs.back().local_stride = 1;
      }
      local += range.count;
    }
    stored += rows.count;
  }
  return runs;
}

namespace {

// Hops to one peer follow each other: they make one message.
std::vector<Message> messages(std::span<const Hop> hops, const ParcelShape& shape) {
  std::vector<Message> out;
  for (const Hop& hop : hops) {
    if (out.empty() || out.back().peer != hop.peer) out.push_back({hop.peer, {}, 0, 0});
    out.back().parcels.push_back(hop.parcel);
    out.back().bytes += shape.bytes(hop.parcel);
  }
  return out;
}

// Lays messages out one after the other; returns the total.
std::int64_t lay_out(std::vector<Message>& list) {
  std::int64_t offset = 0;
  for (Message& message : list) {
    message.offset = offset;
    offset += message.bytes;
  }
  return offset;
}

}  // namespace

Courier::Courier(const Plan& plan, ParcelShape shape) : plan_(&plan), shape_(std::move(shape)) {
  const std::size_t parcels = plan.parcels().size();
  outbox_offset_.assign(parcels, -1);
  slot_offset_.assign(parcels, -1);
  slot_of_.assign(parcels, 0);
  for (std::size_t id = 0; id < parcels; ++id) {
    const Parcel& parcel = plan.parcels()[id];
    if (parcel.owner != plan.rank()) continue;
    own_.push_back(static_cast<int>(id));
    own_runs_.push_back(copy_runs(plan.travelling_placement(), parcel));
    outbox_offset_[id] = outbox_bytes_;
    outbox_bytes_ += shape_.bytes(static_cast<int>(id));
  }
  for (int s = 1; s <= plan.steps(); ++s) {
    Step step;
    step.in = messages(plan.incoming(s), shape_);
    step.out = messages(plan.outgoing(s), shape_);
    const int slot = s % 2;
    slot_bytes_[slot] = std::max(slot_bytes_[slot], lay_out(step.in));
    for (const Message& message : step.in) {
      std::int64_t offset = message.offset;
      for (int id : message.parcels) {
        slot_offset_[static_cast<std::size_t>(id)] = offset;
        slot_of_[static_cast<std::size_t>(id)] = slot;
        offset += shape_.bytes(id);
      }
    }
    // A message whose parcels lie one after the other where they are goes out from there; others
    // are staged.
    std::int64_t staged = 0;
    const std::vector<std::int64_t>& source = s == 1 ? outbox_offset_ : slot_offset_;
    for (Message& message : step.out) {
      std::int64_t expected = source[static_cast<std::size_t>(message.parcels.front())];
      message.offset = expected;
      bool direct = true;
      for (int id : message.parcels) {
        direct = direct && source[static_cast<std::size_t>(id)] == expected;
        expected += shape_.bytes(id);
      }
      step.staged.push_back(!direct);
      if (direct) continue;
      message.offset = staged;
      staged += message.bytes;
    }
    staging_bytes_ = std::max(staging_bytes_, staged);
    steps_.push_back(std::move(step));
  }
  std::size_t most_in = 0;
  std::size_t most_out = 0;
  for (const Step& step : steps_) {
    most_in = std::max(most_in, step.in.size());
    most_out = std::max(most_out, step.out.size());
  }
  receives_.reserve(most_in);
  sends_.reserve(most_out);
}

std::int64_t Courier::buffer_bytes() const {
  return outbox_bytes_ + slot_bytes_[0] + slot_bytes_[1] + staging_bytes_;
}

void Courier::allocate() {
  outbox_ = Buffer(outbox_bytes_, "outgoing rows");
  slots_[0] = Buffer(slot_bytes_[0], "incoming rows");
  slots_[1] = Buffer(slot_bytes_[1], "incoming rows");
  staging_ = Buffer(staging_bytes_, "forwarded rows");
}

void Courier::pack(std::span<const LocalRows> sections, ThreadPool& pool) {
  for (std::size_t i = 0; i < own_.size(); ++i) {
    const int id = own_[i];
    const Parcel& parcel = plan_->parcels()[static_cast<std::size_t>(id)];
    const HeadClass& heads = plan_->classes()[static_cast<std::size_t>(parcel.head_class)];
    const auto units = static_cast<std::int64_t>(heads.units.size());
    pool.run_parallel(shape_.batch() * units, [&](std::int64_t index, int) {
      const std::int64_t batch = index / units;
      const int unit = static_cast<int>(index % units);
      for (int s = 0; s < shape_.sections(); ++s) {
        const LocalRows& rows = sections[static_cast<std::size_t>(s)];
        const std::byte* from = rows.at(batch, heads.units[static_cast<std::size_t>(unit)]);
        const std::int64_t bytes = shape_.section_bytes(s);
        std::byte* to = outbox_.data() + outbox_offset_[static_cast<std::size_t>(id)] +
                        shape_.offset(id, batch, unit, s);
        for (const CopyRun& run : own_runs_[i]) {
          for (std::int64_t r = 0; r < run.count; ++r) {
            std::memcpy(to + (run.parcel_first + r * run.parcel_stride) * bytes,
                        from + (run.local_first + r * run.local_stride) * rows.row_step,
                        static_cast<std::size_t>(bytes));
          }
        }
      }
    });
  }
}

void Courier::begin(Transport& transport, int step) {
  const Step& plan = steps_[static_cast<std::size_t>(step - 1)];
  std::byte* slot = slots_[step % 2].data();
  for (const Message& message : plan.in) {
    receives_.push_back(
        transport.receive(message.peer, kTagParcels,
                          {slot + message.offset, static_cast<std::size_t>(message.bytes)}));
  }
  const std::byte* source = step == 1 ? outbox_.data() : slots_[(step + 1) % 2].data();
  const std::vector<std::int64_t>& offsets = step == 1 ? outbox_offset_ : slot_offset_;
  for (std::size_t i = 0; i < plan.out.size(); ++i) {
    const Message& message = plan.out[i];
    const std::byte* bytes = source + message.offset;
    if (plan.staged[i]) {
      std::byte* to = staging_.data() + message.offset;
      bytes = to;
      for (int id : message.parcels) {
        std::memcpy(to, source + offsets[static_cast<std::size_t>(id)],
                    static_cast<std::size_t>(shape_.bytes(id)));
        to += shape_.bytes(id);
      }
    }
    sends_.push_back(transport.send(message.peer, kTagParcels,
                                    {bytes, static_cast<std::size_t>(message.bytes)}));
  }
}

void Courier::finish() {
  for (const auto& transfer : receives_) transfer->wait();
  for (const auto& transfer : sends_) transfer->wait();
  receives_.clear();
  sends_.clear();
}

void Courier::cancel() {
  receives_.clear();
  sends_.clear();
}

std::byte* Courier::parcel(int id) const {
  return slots_[slot_of_[static_cast<std::size_t>(id)]].data() +
         slot_offset_[static_cast<std::size_t>(id)];
}

std::int64_t Courier::bytes_sent() const {
  std::int64_t bytes = 0;
  for (const Step& step : steps_) {
    for (const Message& message : step.out) bytes += message.bytes;
  }
  return bytes;
}

ReturnCourier::ReturnCourier(const Plan& plan, ParcelShape shape)
    : plan_(&plan), shape_(std::move(shape)) {
  const std::size_t parcels = plan.parcels().size();
  slot_offset_.assign(parcels, -1);
  slot_of_.assign(parcels, 0);
  runs_.resize(parcels);
  const auto by_peer = [](const Hop& a, const Hop& b) {
    return a.peer != b.peer ? a.peer < b.peer : a.parcel < b.parcel;
  };
  std::vector<std::vector<Hop>> returning(static_cast<std::size_t>(plan.steps()));
  for (int id = 0; id < static_cast<int>(parcels); ++id) {
    if (plan.parcels()[static_cast<std::size_t>(id)].owner != plan.rank()) continue;
    std::size_t step = 0;
    for (const int consumer : plan.itinerary(id)) {
      returning[step].push_back({id, consumer});
      if (plan.options().schedule == Schedule::ring) ++step;
    }
  }
  std::int64_t largest_step_in = 0;
  std::int64_t largest_message = 0;
  for (int s = 1; s <= plan.steps(); ++s) {
    Step step;
    std::vector<Hop> out;
    for (const Hop& hop : plan.incoming(s)) {
      out.push_back({hop.parcel, plan.parcels()[static_cast<std::size_t>(hop.parcel)].owner});
    }
    std::sort(out.begin(), out.end(), by_peer);
    step.out = messages(out, shape_);
    step.slot_bytes = lay_out(step.out);
    const int slot = s % 2;
    slot_bytes_[slot] = std::max(slot_bytes_[slot], step.slot_bytes);
    for (const Message& message : step.out) {
      std::int64_t offset = message.offset;
      for (int id : message.parcels) {
        slot_offset_[static_cast<std::size_t>(id)] = offset;
        slot_of_[static_cast<std::size_t>(id)] = slot;
        offset += shape_.bytes(id);
      }
    }
    std::vector<Hop>& in = returning[static_cast<std::size_t>(s - 1)];
    std::sort(in.begin(), in.end(), by_peer);
    step.in = messages(in, shape_);
    largest_step_in = std::max(largest_step_in, lay_out(step.in));
    for (const Message& message : step.in)
      largest_message = std::max(largest_message, message.bytes);
    steps_.push_back(std::move(step));
  }
  // The ring returns each own row once per step: all of a step's messages fit a buffer of the
  // shard's size. The gather schedule returns P - 1 copies in its one step: they take turns in two
  // places.
  const bool together = plan.options().schedule == Schedule::ring;
  inbox_bytes_ = together ? largest_step_in : std::min(largest_step_in, 2 * largest_message);
  std::size_t most[2] = {0, 0};
  for (Step& step : steps_) {
    step.posted = together ? step.in.size() : std::min<std::size_t>(2, step.in.size());
    if (!together) {
      for (std::size_t i = 0; i < step.in.size(); ++i)
        step.in[i].offset = i % 2 == 0 ? 0 : largest_message;
    }
    most[0] = std::max(most[0], step.in.size());
    most[1] = std::max(most[1], step.out.size());
  }
  if (!together && inbox_bytes_ > 0) inbox_bytes_ = 2 * largest_message;
  receives_.reserve(most[0]);
  sends_[0].reserve(most[1]);
  sends_[1].reserve(most[1]);
  for (std::size_t id = 0; id < parcels; ++id) {
    if (plan.parcels()[id].owner == plan.rank())
      runs_[id] = copy_runs(plan.travelling_placement(), plan.parcels()[id]);
  }
}

std::int64_t ReturnCourier::buffer_bytes() const {
  return slot_bytes_[0] + slot_bytes_[1] + inbox_bytes_;
}

void ReturnCourier::allocate() {
  slots_[0] = Buffer(slot_bytes_[0], "partial gradients");
  slots_[1] = Buffer(slot_bytes_[1], "partial gradients");
  inbox_ = Buffer(inbox_bytes_, "returning gradients");
}

void ReturnCourier::clear(int step, ThreadPool& pool) {
  const std::size_t slot = static_cast<std::size_t>(step % 2);
  for (const auto& transfer : sends_[slot]) transfer->wait();  // of two steps ago
  sends_[slot].clear();
  const std::int64_t bytes = steps_[static_cast<std::size_t>(step - 1)].slot_bytes;
  constexpr std::int64_t kPiece = 1 << 20;
  pool.run_parallel((bytes + kPiece - 1) / kPiece, [&](std::int64_t i, int) {
    std::memset(slots_[slot].data() + i * kPiece, 0,
                static_cast<std::size_t>(std::min(kPiece, bytes - i * kPiece)));
  });
}

std::byte* ReturnCourier::parcel(int id) const {
  return slots_[slot_of_[static_cast<std::size_t>(id)]].data() +
         slot_offset_[static_cast<std::size_t>(id)];
}

void ReturnCourier::post_receive(Transport& transport, std::size_t index) {
  const Message& message = steps_[static_cast<std::size_t>(current_ - 1)].in[index];
  receives_.push_back(
      transport.receive(message.peer, kTagReturns,
                        {inbox_.data() + message.offset, static_cast<std::size_t>(message.bytes)}));
}

void ReturnCourier::begin(Transport& transport, int step) {
  current_ = step;
  const Step& plan = steps_[static_cast<std::size_t>(step - 1)];
  for (std::size_t i = 0; i < plan.posted; ++i) post_receive(transport, i);
  const std::size_t slot = static_cast<std::size_t>(step % 2);
  for (const Message& message : plan.out) {
    sends_[slot].push_back(transport.send(
        message.peer, kTagReturns,
        {slots_[slot].data() + message.offset, static_cast<std::size_t>(message.bytes)}));
  }
}

void ReturnCourier::finish(Transport& transport, std::span<const LocalRows> sections,
                           ThreadPool& pool) {
  if (current_ == 0) return;
  const Step& plan = steps_[static_cast<std::size_t>(current_ - 1)];
  for (std::size_t i = 0; i < plan.in.size(); ++i) {
    receives_[i]->wait();
    const Message& message = plan.in[i];
    const std::byte* from = inbox_.data() + message.offset;
    for (int id : message.parcels) {
      const Parcel& parcel = plan_->parcels()[static_cast<std::size_t>(id)];
      const HeadClass& heads = plan_->classes()[static_cast<std::size_t>(parcel.head_class)];
      const auto units = static_cast<std::int64_t>(heads.units.size());
      pool.run_parallel(shape_.batch() * units, [&](std::int64_t index, int) {
        const std::int64_t batch = index / units;
        const int unit = static_cast<int>(index % units);
        for (int s = 0; s < shape_.sections(); ++s) {
          const auto* source =
              reinterpret_cast<const float*>(from + shape_.offset(id, batch, unit, s));
          const LocalRows& rows = sections[static_cast<std::size_t>(s)];
          std::byte* target = rows.at(batch, heads.units[static_cast<std::size_t>(unit)]);
          const std::int64_t width =
              shape_.section_bytes(s) / static_cast<std::int64_t>(sizeof(float));
          for (const CopyRun& run : runs_[static_cast<std::size_t>(id)]) {
            for (std::int64_t r = 0; r < run.count; ++r) {
              const float* add = source + (run.parcel_first + r * run.parcel_stride) * width;
              auto* sum = reinterpret_cast<float*>(
                  target + (run.local_first + r * run.local_stride) * rows.row_step);
              for (std::int64_t d = 0; d < width; ++d) sum[d] += add[d];
            }
          }
        }
      });
      from += shape_.bytes(id);
    }
    if (i + plan.posted < plan.in.size()) post_receive(transport, i + plan.posted);
  }
  receives_.clear();
  current_ = 0;
}

void ReturnCourier::wait_sends() {
  for (auto& list : sends_) {
    for (const auto& transfer : list) transfer->wait();
    list.clear();
  }
}

void ReturnCourier::cancel() {
  current_ = 0;
  receives_.clear();
  for (auto& list : sends_) list.clear();
}

std::int64_t ReturnCourier::bytes_sent() const {
  std::int64_t bytes = 0;
  for (const Step& step : steps_) {
    for (const Message& message : step.out) bytes += message.bytes;
  }
  return bytes;
}

}  // namespace annulus::ring
