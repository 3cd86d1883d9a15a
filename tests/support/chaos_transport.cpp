#include "support/chaos_transport.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "annulus/error.h"
#include "support/forwarding_transport.h"
#include "support/late_backend.h"

namespace annulus::test {
namespace {

// A message on its way to the inner transport.
struct Item {
  enum class State : std::uint8_t { held, posting, posted };

  Item(const Message& from, Event event)
      : region(*from.region), message(from), after(std::move(event)) {
    message.region = &region;  // the caller's message is gone when post() has returned
  }

  const Region region;
  Message message;
  const Event after;
  State state = State::held;
  std::unique_ptr<Ticket> inner;  // of a posted one, unless
  std::exception_ptr error;
};

// State that a transport and its tickets share: the thread that posts delayed messages.
class Pump {
 public:
  Pump(Transport& inner, const ChaosOptions& options)
      : inner_(inner),
        rank_(inner.rank()),
        size_(inner.size()),
        options_(options),
        torn_at_(rank_ == options.torn_rank ? options.tear_at : -1),
        random_(options.seed * 1000003 + static_cast<std::uint64_t>(rank_)),
        thread_([this] { run(); }) {}
  ~Pump() { stop(); }
  Pump(const Pump&) = delete;
  Pump& operator=(const Pump&) = delete;

  // Posts the remaining messages. The inner transport is not used afterwards.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void hold(std::span<const std::unique_ptr<Item>> items) {
    {
      const std::lock_guard lock(mutex_);
      for (const auto& item : items) lanes_[lane_of(*item)].push_back(item.get());
    }
    changed_.notify_all();
  }

  // The inner ticket, once it exists.
  Ticket& posted(Item& item) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return item.state == Item::State::posted; });
    if (item.error) std::rethrow_exception(item.error);
    if (torn_) throw cut(item.message);
    return *item.inner;
  }

  void call_off(Item& item) {
    std::unique_lock lock(mutex_);
    if (item.state == Item::State::held) {
      const auto lane = lanes_.find(lane_of(item));
      std::erase(lane->second, &item);
      if (lane->second.empty()) lanes_.erase(lane);
      return;
    }
    changed_.wait(lock, [&] { return item.state == Item::State::posted; });
  }

  void set_deadline(std::chrono::milliseconds deadline) {
    const std::lock_guard lock(inner_mutex_);
    inner_.set_deadline(deadline);
  }

  void dawdle() {
    std::chrono::microseconds delay;
    {
      const std::lock_guard lock(mutex_);
      delay = roll();
    }
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
  }

  [[nodiscard]] bool torn() const { return torn_; }

 private:
  using Lane = std::tuple<Way, int, std::uint32_t>;
  static Lane lane_of(const Item& item) {
    return {item.message.way, item.message.peer, item.message.tag};
  }

  std::chrono::microseconds roll() {  // requires mutex_
    const std::uint64_t dice = random_();
    const auto longest = static_cast<std::uint64_t>(options_.longest_delay.count());
    return std::chrono::microseconds(dice % 3 == 0 ? dice / 3 % (longest + 1) : 0);
  }

  [[nodiscard]] TransportError cut(const Message& message) const {
    const std::string rank = std::to_string(rank_);
    return TransportError("[rank " + rank + "/" + std::to_string(size_) + "] " +
                              (message.way == Way::send ? "send to" : "receive from") + " rank " +
                              std::to_string(message.peer) + " failed: the link of rank " + rank +
                              " was cut",
                          message.peer);
  }

  void run() {
    forgive_waits_of_this_thread();
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return ending_ || !lanes_.empty(); });
      if (lanes_.empty()) return;
      const std::chrono::microseconds delay = roll();
      if (!ending_ && delay.count() > 0) {
        lock.unlock();
        std::this_thread::sleep_for(delay);  // meanwhile more may come, and be sooner
        lock.lock();
        if (lanes_.empty()) continue;
      }
      const auto lane =
          std::next(lanes_.begin(), static_cast<std::ptrdiff_t>(random_() % lanes_.size()));
      Item& item = *lane->second.front();
      lane->second.pop_front();
      if (lane->second.empty()) lanes_.erase(lane);
      item.state = Item::State::posting;
      if (posted_++ == torn_at_) torn_ = true;
      lock.unlock();
      try {
        if (torn_) throw cut(item.message);
        const std::lock_guard inner_lock(inner_mutex_);
        item.inner = inner_.post(std::span(&item.message, 1), item.after);
      } catch (...) {
        item.error = std::current_exception();
      }
      lock.lock();
      item.state = Item::State::posted;
      changed_.notify_all();
    }
  }

  Transport& inner_;
  const int rank_;  // tickets may outlive the transport
  const int size_;
  const ChaosOptions options_;
  const int torn_at_;
  std::mutex inner_mutex_;  // posts and deadlines: the contract knows one thread of each rank
  std::mutex mutex_;        // guards everything below; never held while waiting for inner_mutex_
  std::condition_variable changed_;
  std::map<Lane, std::deque<Item*>> lanes_;
  std::mt19937_64 random_;
  int posted_ = 0;
  bool ending_ = false;
  std::atomic<bool> torn_ = false;
  std::thread thread_;  // last, because it uses the others
};

class ChaosTicket final : public Ticket {
 public:
  ChaosTicket(std::shared_ptr<Pump> pump, std::span<const Message> messages, const Event& after)
      : pump_(std::move(pump)) {
    for (const Message& message : messages)
      items_.push_back(std::make_unique<Item>(message, after));
    pump_->hold(items_);
  }
  ~ChaosTicket() override {
    for (const auto& item : items_) pump_->call_off(*item);
  }
  ChaosTicket(const ChaosTicket&) = delete;
  ChaosTicket& operator=(const ChaosTicket&) = delete;

  void wait() override {
    for (const auto& item : items_) pump_->posted(*item).wait();
    pump_->dawdle();
  }
  void wait(Queue& queue) override {
    for (const auto& item : items_) pump_->posted(*item).wait(queue);
    pump_->dawdle();
  }

 private:
  std::shared_ptr<Pump> pump_;
  std::vector<std::unique_ptr<Item>> items_;
};

class ChaosTransport final : public ForwardingTransport {
 public:
  ChaosTransport(std::unique_ptr<Transport> wrapped, const ChaosOptions& options)
      : ForwardingTransport(std::move(wrapped)),
        options_(options),
        pump_(std::make_shared<Pump>(inner(), options)) {}
  ~ChaosTransport() override { pump_->stop(); }
  ChaosTransport(const ChaosTransport&) = delete;
  ChaosTransport& operator=(const ChaosTransport&) = delete;

  [[nodiscard]] std::string name() const override { return "chaos over " + inner().name(); }
  [[nodiscard]] std::unique_ptr<Ticket> post(std::span<const Message> messages,
                                             const Event& after) override {
    for (const Message& message : messages) {
      if (message.region == nullptr) return inner().post(messages, after);  // which refuses it
    }
    return std::make_unique<ChaosTicket>(pump_, messages, after);
  }
  void abort(const std::string& reason) noexcept override {
    if (!pump_->torn() || options_.abort_gets_out) inner().abort(reason);
  }
  [[nodiscard]] Health health() const override {
    if (pump_->torn()) return {false, rank(), "the link of this rank was cut"};
    return inner().health();
  }
  void set_deadline(std::chrono::milliseconds deadline) override { pump_->set_deadline(deadline); }

 private:
  const ChaosOptions options_;
  const std::shared_ptr<Pump> pump_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_chaos_ring(
    std::vector<std::unique_ptr<Transport>> inner, const ChaosOptions& options) {
  std::vector<std::unique_ptr<Transport>> ring;
  for (auto& transport : inner)
    ring.push_back(std::make_unique<ChaosTransport>(std::move(transport), options));
  return ring;
}

}  // namespace annulus::test
