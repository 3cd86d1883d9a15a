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

// One journey of rows through the steps of a plan, together with the work of each step, as in
// RingAttention::Impl::run_steps. Times are in seconds, by rank or by rank and step.
struct Journey {
  const MessageTable* rows = nullptr;
  const MessageTable* returns = nullptr;  // gradients that return; null: none
  // Ring: a rank waits for all returning messages of a step together. Gather: one after the other
  // by ascending sender, with at most two receives posted.
  bool returns_together = true;
  bool compute_last = false;  // reproducible: computes after all rows have arrived
  bool blocking = false;      // RingOptions::blocking
  std::vector<double> pack;
  std::vector<double> compute;  // [rank][step], or one per rank where compute comes last
  double clear_per_byte = 0;  // clearing buffers for gradients, before the step that computes them
  double add_per_byte = 0;    // adding gradients that have returned
};

// Replays a pass of all ranks on a cluster, event by event in order of time. A pass may have
// several journeys; a rank begins the next one when it has finished the one before.
//
// A message starts when both sides have posted it. It passes the sender's port and the receiver's
// port, each of which serves one message at a time. The sender's port takes the earliest message
// whose receiver's port is free, and among equally early ones the first in the table. The
// receiver's port starts at the same time. So messages that share a real link take turns here, and
// no link is idle while a message waits for it. Tiles and copies of ranks that share a processor
// take turns, too, in order of arrival.
class Replay {
 public:
  Replay(const Cluster& cluster, int ranks, double start_seconds);
  void run(const Journey& journey);

  [[nodiscard]] double seconds() const;  // when the last rank has finished
  [[nodiscard]] double waiting() const;  // summed over all ranks: waiting for rows
  struct Busy {
    std::string what;
    double seconds = 0;
  };
  [[nodiscard]] Busy busiest_link() const;

 private:
  class Run;
  struct Port {
    double free = 0;  // when the port becomes free
    double busy = 0;
    bool chooses = false;  // an event is scheduled at which the port takes its next message
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
  std::vector<double> processors_;  // when each becomes free
  std::vector<double> now_;         // the current time of each rank
  double waiting_ = 0;
};

}  // namespace annulus::simulation
