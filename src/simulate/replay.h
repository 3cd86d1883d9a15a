#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <tuple>
#include <vector>

#include "annulus/simulate.h"
#include "simulate/messages.h"

namespace annulus::simulation {

// One journey of rows through the steps of a plan, and what is computed meanwhile: what
// RingAttention::Impl::run_steps does. Seconds are by rank, and by rank and step.
struct Journey {
  const MessageTable* rows = nullptr;
  const MessageTable* returns = nullptr;  // gradients on their way back; null: nothing returns
  // All messages of a step that return are waited for together (ring), or one by one by ascending
  // sender, no more than two of them received at a time (gather).
  bool returns_together = true;
  bool compute_last = false;  // reproducible: nothing is computed before everything is there
  bool blocking = false;      // RingOptions::blocking
  std::vector<double> pack;
  std::vector<double> compute;  // [rank][step], or one per rank where compute comes last
  double clear_per_byte = 0;    // of returning gradients, before the step that makes them
  double add_per_byte = 0;      // ... where they arrive
};

// A pass of all ranks on a cluster, event by event in order of time. Journeys of a pass follow each
// other, each rank going on when it is through with the one before.
//
// A message is on its way once both sides have posted it. It then passes the sender's port and the
// receiver's, each of which takes one message after the other. The sender's takes the first come
// whose receiver's port is free, and of those that come at the same time the first in the table;
// the receiver's begins when the sender's does. Messages that share links in truth take turns here,
// and no link stands idle that has something to do. Tiles and copies of ranks that share a
// processor take turns likewise, the first come first.
class Replay {
 public:
  Replay(const Cluster& cluster, int ranks, double start_seconds);
  void run(const Journey& journey);

  [[nodiscard]] double seconds() const;  // until the last rank is through
  [[nodiscard]] double waiting() const;  // of all ranks together: for rows
  struct Busy {
    std::string what;
    double seconds = 0;
  };
  [[nodiscard]] Busy busiest_link() const;

 private:
  class Run;
  struct Port {
    double free = 0;  // from then on
    double busy = 0;
    bool chooses = false;  // there is an event at which it takes the next message
    struct Pending {
      double since;
      std::uint32_t message;
      bool returning;
      bool operator<(const Pending& other) const {
        return std::tie(since, returning, message) <
               std::tie(other.since, other.returning, other.message);
      }
    };
    std::deque<Pending> pending;  // ascending
  };
  struct Route {
    const Wire* wire;
    std::size_t out;  // ports
    std::size_t in;
  };
  [[nodiscard]] Route route(int from, int to) const;
  [[nodiscard]] std::size_t network_port(int rank) const;

  const Cluster* cluster_;
  int ranks_;
  int hosts_;
  int ports_per_host_;
  std::vector<Port> ports_;         // inside out, inside in, between out, between in
  std::vector<double> processors_;  // free from then on
  std::vector<double> now_;         // of every rank
  double waiting_ = 0;
};

}  // namespace annulus::simulation
