#include "simulate/messages.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "annulus/error.h"
#include "plan/traffic.h"

namespace annulus::simulation {

MessageTable::MessageTable(const Plan& plan, Way way, std::int64_t row_bytes)
    : ranks_(plan.ranks()), steps_(plan.steps()) {
  const auto ranks = static_cast<std::size_t>(ranks_);
  const auto cells = static_cast<std::size_t>(steps_) * ranks;
  out_begin_.reserve(cells + 1);
  in_begin_.assign(cells + 1, 0);
  const auto distance = [&](const Message& m) {
    return m.to - m.from + (m.to < m.from ? ranks_ : 0);
  };
  std::vector<Message> of_step;
  int step = 0;
  traffic_of(plan).for_each_hop_list(
      plan.options().schedule, [&](std::span<const Traffic::FlowHop> hops) {
        ++step;
        of_step.clear();
        for (const Traffic::FlowHop& hop : hops) {
          const double bytes = static_cast<double>(hop.unit_rows) * static_cast<double>(row_bytes);
          of_step.push_back(way == Way::there ? Message{hop.from, hop.to, bytes}
                                              : Message{hop.to, hop.owner, bytes});
        }
        std::sort(of_step.begin(), of_step.end(), [&](const Message& a, const Message& b) {
          return std::tuple(a.from, distance(a)) < std::tuple(b.from, distance(b));
        });
        const std::size_t first = messages_.size();
        for (const Message& m : of_step) {
          if (messages_.size() > first && messages_.back().from == m.from &&
              messages_.back().to == m.to)
            messages_.back().bytes += m.bytes;
          else
            messages_.push_back(m);
        }
        if (messages_.size() >= std::numeric_limits<std::uint32_t>::max()) {
          throw ConfigError("simulate: more than 2^32 messages: choose fewer ranks");
        }
        std::size_t next = first;
        for (int rank = 0; rank < ranks_; ++rank) {
          out_begin_.push_back(static_cast<std::uint32_t>(next));
          while (next < messages_.size() && messages_[next].from == rank) ++next;
        }
        for (std::size_t i = first; i < messages_.size(); ++i)
          ++in_begin_[index(messages_[i].to, step) + 1];
      });
  out_begin_.push_back(static_cast<std::uint32_t>(messages_.size()));
  for (std::size_t i = 1; i < in_begin_.size(); ++i) in_begin_[i] += in_begin_[i - 1];
  in_.resize(messages_.size());
  std::vector<std::uint32_t> next(in_begin_.begin(), in_begin_.end() - 1);
  for (int s = 1; s <= steps_; ++s) {
    // Senders ascend, so every receiver's list does.
    const std::uint32_t end = out_begin_[index(0, s) + ranks];
    for (std::uint32_t i = out_begin_[index(0, s)]; i < end; ++i)
      in_[next[index(messages_[i].to, s)]++] = i;
  }
}

double MessageTable::sent(int rank, int step) const {
  const Range range = outgoing(rank, step);
  double bytes = 0;
  for (std::uint32_t i = range.begin; i < range.end; ++i) bytes += messages_[i].bytes;
  return bytes;
}

double MessageTable::received(int rank, int step) const {
  double bytes = 0;
  for (const std::uint32_t i : incoming(rank, step)) bytes += messages_[i].bytes;
  return bytes;
}

double MessageTable::total_bytes() const {
  double bytes = 0;
  for (const Message& m : messages_) bytes += m.bytes;
  return bytes;
}

}  // namespace annulus::simulation
