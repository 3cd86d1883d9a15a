// Executors on a GPU: the host does not wait for the device when documents change, and memory is
// used again.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "annulus/in_process.h"
#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "core/memory.h"
#include "kernels/backend.h"
#include "support/random_plans.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

// Keeps a queue of the device under test from doing anything until it is released. A host that
// waits for the queue in between would wait forever: after a minute it is released anyway.
class Hold {
 public:
  explicit Hold(Queue& queue)
      : words_(backend_of(test_device(), 0)->sharing()->adopt(std::as_writable_bytes(page()))) {
    words_->wait(queue, 0, 1);
    watchman_ = std::thread([this] {
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, std::chrono::minutes(1), [&] { return released_; })) return;
      host_waited_ = true;
      let_go();
    });
  }
  ~Hold() {
    release();
    watchman_.join();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    let_go();
    changed_.notify_all();
  }
  [[nodiscard]] bool host_waited() {
    const std::lock_guard lock(mutex_);
    return host_waited_;
  }

 private:
  static constexpr std::size_t kPageWords = 1024;

  [[nodiscard]] std::span<std::uint32_t> page() { return page_; }
  void let_go() { std::atomic_ref(page_[0]).store(1, std::memory_order_release); }

  alignas(4096) std::uint32_t page_[kPageWords] = {};
  std::unique_ptr<SharedWords> words_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool released_ = false;
  bool host_waited_ = false;
  std::thread watchman_;
};

std::array<const ShardTensor*, 9> tensors_of(const Shard& s) {
  return {&s.q, &s.k, &s.v, &s.dout, &s.o, &s.lse, &s.dq, &s.dk, &s.dv};
}

class CudaExecutor : public testing::Test {
 protected:
  void SetUp() override {
    if (test_device().kind == Device::Kind::cpu) GTEST_SKIP() << "no GPU in ANNULUS_TEST_DEVICE";
  }
};

TEST_F(CudaExecutor, TakesOtherDocumentsBehindWorkThatIsUnderWay) {
  constexpr std::int64_t kTokens = 700;
  Problem problem =
      make_problem("documents", longnet(4, List{64, 256}, List{1, 2}, true), 2, kTokens, 64);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    problem.dtype = dtype;
    const Inputs inputs = random_inputs(problem, 5);
    RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 1));
    options.deterministic = true;  // bits are compared
    const std::vector<Document> lists[] = {packed_documents(List{0, 300, kTokens}),
                                           packed_documents(List{0, 1, 2, 55, 600}),
                                           packed_documents(List{0, 128, 256, kTokens})};
    std::vector<Results> expected;
    for (const std::vector<Document>& list : lists) {
      options.pattern.documents = list;
      expected.push_back(run_ring(options, inputs));
    }
    run_in_process(1, [&](Transport& transport) {
      RingAttention ring(options, transport);
      const std::shared_ptr<Queue> queue = backend_of(test_device(), 0)->make_queue();
      ring.use_queue(queue);
      std::vector<Shard> shards;
      for (std::size_t i = 0; i < std::size(lists); ++i) shards.emplace_back(options, 0);
      const auto load_all = [&] {
        for (Shard& shard : shards) {
          shard.load(inputs);
          for (const ShardTensor* tensor : tensors_of(shard)) tensor->upload();
        }
      };
      load_all();
      const auto enqueue_all = [&] {
        for (std::size_t i = 0; i < std::size(lists); ++i) {
          ring.set_documents(lists[i]);
          shards[i].enqueue(ring);
        }
      };
      // Kernels are loaded, and memory grows, in the first calls.
      for (int i = 0; i < 2; ++i) {
        enqueue_all();
        ring.synchronize();
      }
      load_all();
      const auto hold = std::make_unique<Hold>(*queue);
      enqueue_all();
      EXPECT_FALSE(hold->host_waited()) << "the host waited for the device";
      hold->release();
      ring.synchronize();
      for (std::size_t i = 0; i < std::size(lists); ++i) {
        for (const ShardTensor* tensor : tensors_of(shards[i])) tensor->download();
        Results found = empty_results(options);
        shards[i].collect(found);
        EXPECT_EQ(first_difference(found, expected[i]), "") << "list " << i;
      }
    });
  }
}

std::atomic<int> allocations = 0;

bool count(std::int64_t, const char*) {
  ++allocations;
  return true;
}

TEST_F(CudaExecutor, MemoryOfAllKindsIsUsedAgain) {
  const std::shared_ptr<Backend> backend = backend_of(test_device(), 0);
  const std::shared_ptr<DeviceSharing> sharing = backend->sharing();
  const std::function<Memory()> kinds[] = {
      [&] { return backend->allocate(5000, "rows"); },
      [&] { return backend->allocate_staging(5000, "rows"); },
      [&] { return sharing->allocate(5000, "rows"); },
  };
  const AllocationHook before = set_allocation_hook(&count);
  for (std::size_t i = 0; i < std::size(kinds); ++i) {
    SpareMemory spare;
    allocations = 0;
    for (int round = 0; round < 3; ++round) {
      const SpareMemory::Scope scope(spare);
      EXPECT_EQ(kinds[i]().bytes(), 5000);
    }
    EXPECT_EQ(allocations, 1) << "kind " << i;
  }
  set_allocation_hook(before);
}

}  // namespace
}  // namespace annulus::test
