#include "simulate/replay.h"

#include <algorithm>
#include <queue>
#include <span>
#include <tuple>

#include <fmt/format.h>

namespace annulus::simulation {
namespace {

// The messages that a rank waits for at one point.
struct Batch {
  int open = 0;      // messages whose end is not known yet
  double ready = 0;  // the latest known end
};

// The message batches of a rank.
enum Which : std::uint8_t { kRows, kReturns, kInbox0, kInbox1, kBatches };
constexpr int kNothing = -1;

// Where a rank continues. The names say what has just been done.
enum class At : std::uint8_t {
  entered,         // the journey; packs its rows next
  begun,           // a step; waits for its rows next
  arrived,         // rows of the step
  posted,          // the transfers of the next step; with `blocking` they have finished
  cleared,         // the buffer for gradients of the step
  computed,        // the step
  returned,        // gradients of the step before; adds them next
  added,           // gradients of the step before
  inbox_returned,  // one message of gradients, of a gather
  inbox_added,
  inboxes_empty,  // all gradients have been received and sent
  done,
};

struct Rank {
  At at = At::entered;
  At after_returns = At::added;  // where to go on once returned gradients are added
  int step = 0;
  int returning = 0;  // step whose gradients are being returned; 0: none
  int waits_for = kNothing;
  std::size_t inbox = 0;  // message of the step that is received next
  double waits_since = 0;
  Batch batches[kBatches];
};

struct Event {
  // At equal times ranks come before ports, so that a port sees all messages it may choose from.
  enum Kind : std::uint8_t { rank, port };
  double time;
  Kind kind;
  std::uint32_t what;   // rank or port
  std::uint64_t order;  // order of creation, to break ties

  bool operator>(const Event& other) const {
    return std::tie(time, kind, order) > std::tie(other.time, other.kind, other.order);
  }
};

}  // namespace

class Replay::Run {
 public:
  Run(Replay& replay, const Journey& journey)
      : replay_(replay),
        journey_(journey),
        steps_(journey.rows->steps()),
        ranks_(static_cast<std::size_t>(replay.ranks_)),
        rows_posted_(journey.rows->all().size(), 0),
        returns_posted_(journey.returns != nullptr ? journey.returns->all().size() : 0, 0) {}

  void run() {
    for (int r = 0; r < replay_.ranks_; ++r)
      push(now_of(r), Event::rank, static_cast<std::uint32_t>(r));
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.time;
      if (event.kind == Event::rank) {
        go_on(static_cast<int>(event.what));
      } else {
        send_next(event.what);
      }
    }
  }

 private:
  double& now_of(int rank) { return replay_.now_[static_cast<std::size_t>(rank)]; }
  Rank& of(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  void push(double time, Event::Kind kind, std::uint32_t what) {
    events_.push({time, kind, what, made_++});
  }

  // True: no time passes. False: the rank continues at `next` later.
  bool take(int r, double seconds, At next) {
    of(r).at = next;
    if (seconds <= 0) return true;
    push(now_ + seconds, Event::rank, static_cast<std::uint32_t>(r));
    return false;
  }
  bool wait(int r, int which, At next) {
    Rank& rank = of(r);
    rank.at = next;
    const Batch& batch = rank.batches[which];
    if (batch.open == 0 && batch.ready <= now_) return true;
    rank.waits_for = which;
    rank.waits_since = now_;
    if (batch.open == 0) push(batch.ready, Event::rank, static_cast<std::uint32_t>(r));
    return false;
  }
  // The same on the processor, after earlier requests of the ranks that share it.
  bool process(int r, double seconds, At next) {
    if (seconds <= 0) return take(r, 0, next);
    double& free =
        replay_.processors_[static_cast<std::size_t>(r) /
                            static_cast<std::size_t>(replay_.cluster_->ranks_per_processor)];
    free = std::max(free, now_) + seconds;
    return take(r, free - now_, next);
  }
  [[nodiscard]] double compute_seconds(int r) {
    const auto at = static_cast<std::size_t>(r);
    if (journey_.compute_last) return journey_.compute[at];
    return journey_.compute[at * (static_cast<std::size_t>(steps_) + 1) +
                            static_cast<std::size_t>(of(r).step)];
  }

  // Runs a rank up to the next point at which time passes.
  void go_on(int r) {
    Rank& rank = of(r);
    if (rank.waits_for != kNothing) {
      replay_.waiting_ += now_ - rank.waits_since;
      rank.waits_for = kNothing;
    }
    while (advance(r)) {
    }
    if (rank.at == At::done) now_of(r) = now_;
  }

  // False: time passes, or the rank is done.
  bool advance(int r) {
    Rank& rank = of(r);
    const bool returns = journey_.returns != nullptr && rank.step > 0;
    switch (rank.at) {
      case At::entered:
        return process(r, steps_ > 0 ? journey_.pack[static_cast<std::size_t>(r)] : 0.0, At::begun);
      case At::begun:
        return rank.step == 0 ? take(r, 0, At::arrived) : wait(r, kRows, At::arrived);
      case At::arrived:
        if (rank.step < steps_) {
          post_rows(r, rank.step + 1);
          if (journey_.compute_last && rank.step + 1 == steps_) {
            ++rank.step;
            return wait(r, kRows, At::posted);
          }
          if (journey_.blocking) return wait(r, kRows, At::posted);
        }
        return take(r, 0, At::posted);
      case At::posted:
        return process(
            r, returns ? journey_.clear_per_byte * journey_.returns->sent(r, rank.step) : 0.0,
            At::cleared);
      case At::cleared:
        return process(r, compute_seconds(r), At::computed);
      case At::computed:
        if (!returns) return next_step(r);
        rank.after_returns = At::added;
        return finish_returns(r);
      case At::added:
        post_returns(r, rank.step);
        if (journey_.blocking) {
          rank.after_returns = At::begun;
          return finish_returns(r);
        }
        return next_step(r);
      case At::returned:
        return take_added(r, journey_.returns->received(r, rank.returning));
      case At::inbox_returned:
        return process(r, journey_.add_per_byte * inbox_bytes(r), At::inbox_added);
      case At::inbox_added:
        post_inbox(r, rank.inbox + 2);
        ++rank.inbox;
        return empty_inboxes(r);
      case At::inboxes_empty:
        return take_added(r, 0);
      case At::done:
        return false;
    }
    return false;
  }

  bool next_step(int r) {
    Rank& rank = of(r);
    if (rank.step < steps_) {
      ++rank.step;
      return take(r, 0, At::begun);
    }
    if (rank.returning > 0) {
      rank.after_returns = At::done;
      return finish_returns(r);
    }
    rank.at = At::done;
    return false;
  }

  // ---- gradients on their way back
  bool finish_returns(int r) {
    Rank& rank = of(r);
    if (rank.returning == 0) return take_added(r, 0);
    if (journey_.returns_together) return wait(r, kReturns, At::returned);
    rank.inbox = 0;
    return empty_inboxes(r);
  }
  bool empty_inboxes(int r) {
    Rank& rank = of(r);
    if (rank.inbox < journey_.returns->incoming(r, rank.returning).size())
      return wait(r, kInbox0 + static_cast<int>(rank.inbox % 2), At::inbox_returned);
    return wait(r, kReturns, At::inboxes_empty);
  }
  bool take_added(int r, double bytes) {
    Rank& rank = of(r);
    rank.returning = 0;
    if (rank.after_returns == At::begun) {  // blocking: the step is over
      if (rank.step < steps_) {
        ++rank.step;
        return process(r, journey_.add_per_byte * bytes, At::begun);
      }
      rank.after_returns = At::done;
    }
    if (!process(r, journey_.add_per_byte * bytes, rank.after_returns)) return false;
    return rank.at != At::done;
  }
  double inbox_bytes(int r) {
    const Rank& rank = of(r);
    return journey_.returns->all()[journey_.returns->incoming(r, rank.returning)[rank.inbox]].bytes;
  }

  // ---- messages
  void post_rows(int r, int step) {
    Batch& batch = of(r).batches[kRows];
    const std::span<const std::uint32_t> in = journey_.rows->incoming(r, step);
    const MessageTable::Range out = journey_.rows->outgoing(r, step);
    batch = {static_cast<int>(in.size() + (out.end - out.begin)), now_};
    for (const std::uint32_t i : in) post(false, i, 0);
    for (std::uint32_t i = out.begin; i < out.end; ++i) post(false, i, 0);
  }
  void post_returns(int r, int step) {
    Rank& rank = of(r);
    rank.returning = step;
    const std::span<const std::uint32_t> in = journey_.returns->incoming(r, step);
    const MessageTable::Range out = journey_.returns->outgoing(r, step);
    const std::size_t received = journey_.returns_together ? in.size() : 0;
    rank.batches[kReturns] = {static_cast<int>(received + (out.end - out.begin)), now_};
    if (journey_.returns_together) {
      for (const std::uint32_t i : in) post(true, i, 0);
    } else {
      post_inbox(r, 0);
      post_inbox(r, 1);
    }
    for (std::uint32_t i = out.begin; i < out.end; ++i) post(true, i, 0);
  }
  void post_inbox(int r, std::size_t index) {
    const std::span<const std::uint32_t> in = journey_.returns->incoming(r, of(r).returning);
    if (index >= in.size()) return;
    of(r).batches[kInbox0 + index % 2] = {1, now_};
    post(true, in[index], index % 2 == 1 ? kOddInbox : 0);
  }

  // Bits of a message.
  static constexpr std::uint8_t kOneSide = 1;
  static constexpr std::uint8_t kOddInbox = 2;

  // The message starts when the second side posts it.
  void post(bool returning, std::uint32_t i, std::uint8_t inbox) {
    std::uint8_t& posted = (returning ? returns_posted_ : rows_posted_)[i];
    posted |= inbox;
    if ((posted & kOneSide) == 0) {
      posted |= kOneSide;
      return;
    }
    const MessageTable::Message& message = table(returning).all()[i];
    const std::size_t at = replay_.route(message.from, message.to).out;
    Port& port = replay_.ports_[at];
    const Port::Pending mine{now_, i, returning};
    port.pending.insert(std::upper_bound(port.pending.begin(), port.pending.end(), mine), mine);
    if (!port.chooses) push(std::max(now_, port.free), Event::port, static_cast<std::uint32_t>(at));
    port.chooses = true;
  }
  std::deque<Port::Pending>::iterator choose(Port& port) {
    constexpr std::ptrdiff_t kMostLookedAt = 64;  // for the thousands of messages of a gather
    const auto end = port.pending.begin() +
                     std::min(kMostLookedAt, static_cast<std::ptrdiff_t>(port.pending.size()));
    const auto found = std::find_if(port.pending.begin(), end, [&](const Port::Pending& pending) {
      const MessageTable::Message& message = table(pending.returning).all()[pending.message];
      const Route route = replay_.route(message.from, message.to);
      return !route.wire->limits_receiving || replay_.ports_[route.in].free <= now_;
    });
    return found != end ? found : port.pending.begin();
  }
  void send_next(std::size_t at) {
    Port& port = replay_.ports_[at];
    const auto choice = choose(port);
    const Port::Pending next = *choice;
    port.pending.erase(choice);
    const MessageTable::Message& message = table(next.returning).all()[next.message];
    const double seconds = seconds_of(message, *replay_.route(message.from, message.to).wire);
    port.free = now_ + seconds;
    port.busy += seconds;
    port.chooses = !port.pending.empty();
    if (port.chooses) push(port.free, Event::port, static_cast<std::uint32_t>(at));
    receive(next.returning, next.message);
  }
  void receive(bool returning, std::uint32_t i) {
    const MessageTable::Message& message = table(returning).all()[i];
    const Route route = replay_.route(message.from, message.to);
    const double seconds = seconds_of(message, *route.wire);
    double end = now_ + seconds;  // this message has just entered the sender's port
    if (route.wire->limits_receiving) {
      Port& in = replay_.ports_[route.in];
      in.free = std::max(now_, in.free) + seconds;
      in.busy += seconds;
      end = in.free;
    }
    end += route.wire->latency_seconds;
    const std::uint8_t posted = (returning ? returns_posted_ : rows_posted_)[i];
    const int at_sender = returning ? kReturns : kRows;
    const int inbox = (posted & kOddInbox) != 0 ? kInbox1 : kInbox0;
    complete(message.from, at_sender, end);
    complete(message.to, returning && !journey_.returns_together ? inbox : at_sender, end);
  }
  void complete(int r, int which, double end) {
    Rank& rank = of(r);
    Batch& batch = rank.batches[which];
    batch.ready = std::max(batch.ready, end);
    if (--batch.open == 0 && rank.waits_for == which)
      push(batch.ready, Event::rank, static_cast<std::uint32_t>(r));
  }
  const MessageTable& table(bool returning) const {
    return returning ? *journey_.returns : *journey_.rows;
  }
  static double seconds_of(const MessageTable::Message& message, const Wire& wire) {
    return wire.bytes_per_second > 0 ? message.bytes / wire.bytes_per_second : 0.0;
  }

  Replay& replay_;
  const Journey& journey_;
  const int steps_;
  double now_ = 0;
  std::vector<Rank> ranks_;
  std::vector<std::uint8_t> rows_posted_;  // by message
  std::vector<std::uint8_t> returns_posted_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t made_ = 0;
};

Replay::Replay(const Cluster& cluster, int ranks, double start_seconds)
    : cluster_(&cluster),
      ranks_(ranks),
      hosts_((ranks + cluster.ranks_per_host - 1) / cluster.ranks_per_host),
      ports_per_host_(cluster.ports_per_host > 0 ? cluster.ports_per_host : cluster.ranks_per_host),
      ports_(2 * static_cast<std::size_t>(ranks) +
             2 * static_cast<std::size_t>(hosts_) * static_cast<std::size_t>(ports_per_host_)),
      processors_(static_cast<std::size_t>(ranks), 0.0),
      now_(static_cast<std::size_t>(ranks), start_seconds) {}

void Replay::run(const Journey& journey) { Run(*this, journey).run(); }

std::size_t Replay::network_port(int rank) const {
  const int host = rank / cluster_->ranks_per_host;
  const int local = rank % cluster_->ranks_per_host;
  const int port =
      static_cast<int>(std::int64_t{local} * ports_per_host_ / cluster_->ranks_per_host);
  return static_cast<std::size_t>(host) * static_cast<std::size_t>(ports_per_host_) +
         static_cast<std::size_t>(port);
}

Replay::Route Replay::route(int from, int to) const {
  const auto ranks = static_cast<std::size_t>(ranks_);
  if (from / cluster_->ranks_per_host == to / cluster_->ranks_per_host) {
    return {&cluster_->inside, static_cast<std::size_t>(from),
            ranks + static_cast<std::size_t>(to)};
  }
  const std::size_t network =
      static_cast<std::size_t>(hosts_) * static_cast<std::size_t>(ports_per_host_);
  return {&cluster_->between, 2 * ranks + network_port(from),
          2 * ranks + network + network_port(to)};
}

double Replay::seconds() const { return *std::max_element(now_.begin(), now_.end()); }

double Replay::waiting() const { return waiting_; }

Replay::Busy Replay::busiest_link() const {
  const auto most = std::max_element(ports_.begin(), ports_.end(),
                                     [](const Port& a, const Port& b) { return a.busy < b.busy; });
  if (most == ports_.end() || most->busy == 0) return {};
  const auto ranks = static_cast<std::size_t>(ranks_);
  auto at = static_cast<std::size_t>(most - ports_.begin());
  if (at < 2 * ranks) {
    return {fmt::format("{} {} rank {}", cluster_->inside.name, at < ranks ? "out of" : "into",
                        at % ranks),
            most->busy};
  }
  at -= 2 * ranks;
  const auto per_host = static_cast<std::size_t>(ports_per_host_);
  const std::size_t network = static_cast<std::size_t>(hosts_) * per_host;
  return {fmt::format("{} {} host {}, port {}", cluster_->between.name,
                      at < network ? "out of" : "into", at % network / per_host,
                      at % network % per_host),
          most->busy};
}

}  // namespace annulus::simulation
