#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"

// Runs ranks as threads of this process and determines which failure was the first.

namespace annulus {
namespace {

class Launcher {
 public:
  explicit Launcher(std::size_t ranks) : ranks_(ranks), errors_(ranks) {}

  // Calls run_rank(rank), which calls attempt(), on every rank.
  void run(const std::function<void(std::size_t rank)>& run_rank,
           const std::function<void(std::size_t rank, const std::string& reason)>& abort) {
    if (ranks_ == 1) {
      run_rank(0);
      rethrow();
      return;
    }
    std::vector<std::thread> threads;
    threads.reserve(ranks_);
    std::string cannot_start;
    for (std::size_t rank = 0; rank < ranks_ && cannot_start.empty(); ++rank) {
      try {
        threads.emplace_back(run_rank, rank);
      } catch (const std::system_error& error) {
        cannot_start = "in-process ring: cannot start the thread of rank " + std::to_string(rank) +
                       "/" + std::to_string(ranks_) + ": " + error.what();
        abort(rank, cannot_start);
      }
    }
    for (std::thread& thread : threads) thread.join();
    if (!cannot_start.empty()) throw DeviceError(cannot_start);
    rethrow();
  }

  // The body of one rank, on the rank's thread.
  void attempt(Transport& transport, const std::function<void(Transport&)>& body) {
    const auto rank = static_cast<std::size_t>(transport.rank());
    const auto fail = [&](const std::string& reason) {
      errors_[rank] = std::current_exception();
      int nobody = -1;
      first_to_fail_.compare_exchange_strong(nobody, transport.rank());
      transport.abort(reason);
      first_to_abort_.store(transport.health().lost_rank);  // this error is the same on every rank
    };
    try {
      body(transport);
    } catch (const std::exception& exception) {
      fail(exception.what());
    } catch (...) {
      fail("an exception of unknown type");
    }
  }

 private:
  void rethrow() const {
    if (first_to_fail_ < 0) return;
    // The rank that aborted first has the root cause, even if an echo on another rank left its body
    // earlier: a body may call abort() itself and throw later. If that rank caught its own error,
    // report the first failure instead.
    const int aborter = first_to_abort_;
    const std::exception_ptr root =
        aborter >= 0 ? errors_[static_cast<std::size_t>(aborter)] : nullptr;
    std::rethrow_exception(root ? root : errors_[static_cast<std::size_t>(first_to_fail_)]);
  }

  const std::size_t ranks_;
  std::vector<std::exception_ptr> errors_;
  std::atomic<int> first_to_fail_{-1};
  std::atomic<int> first_to_abort_{-1};
};

}  // namespace

void run_in_process(int ranks, const std::function<void(Transport&)>& body,
                    const InProcessOptions& options) {
  std::vector<std::unique_ptr<Transport>> ring = make_in_process_ring(ranks, options);
  Launcher launcher(ring.size());
  launcher.run(
      [&](std::size_t rank) {
        launcher.attempt(*ring[rank], body);
        // Ranks that still wait for this one must not wait until their deadline.
        ring[rank].reset();
      },
      [&](std::size_t rank, const std::string& reason) { ring[rank]->abort(reason); });
}

void run_in_process(std::span<const std::unique_ptr<Transport>> ring,
                    const std::function<void(Transport&)>& body) {
  Launcher launcher(ring.size());
  launcher.run([&](std::size_t rank) { launcher.attempt(*ring[rank], body); },
               [&](std::size_t rank, const std::string& reason) { ring[rank]->abort(reason); });
}

}  // namespace annulus
