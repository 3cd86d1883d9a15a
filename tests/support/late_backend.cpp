#include "support/late_backend.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "kernels/cached_rows.h"

namespace annulus::test {
namespace {

std::atomic<std::int64_t> waits{0};
thread_local bool waits_count = true;

class LateEvent final : public Event::State {
 public:
  void wait() override {
    if (waits_count) ++waits;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return happened_; });
    if (failure_) throw DeviceError("late queue: " + *failure_);
  }
  void happen(const std::shared_ptr<const std::string>& failure) {
    const std::lock_guard lock(mutex_);
    happened_ = true;
    failure_ = failure;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool happened_ = false;
  std::shared_ptr<const std::string> failure_;
};

class LateQueue final : public Queue {
 public:
  explicit LateQueue(std::uint64_t seed) : random_(seed), thread_([this] { run(); }) {}
  ~LateQueue() override {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  LateQueue(const LateQueue&) = delete;
  LateQueue& operator=(const LateQueue&) = delete;

  [[nodiscard]] Device device() const override { return {}; }
  [[nodiscard]] Event record() override {
    auto event = std::make_shared<LateEvent>();
    push([this, event] { event->happen(failure_); }, true);
    return Event(event);
  }
  void wait(const Event& event) override {
    if (event.state() != nullptr) push([event] { event.wait(); });
  }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    const auto size = static_cast<std::size_t>(bytes);
    push([=, this] {
      if (to != from) std::memset(to, 0xff, size);
      dawdle();
      std::memmove(to, from, size);
    });
  }

  void push(std::function<void()> work, bool always = false) {
    {
      const std::lock_guard lock(mutex_);
      work_.push_back({std::move(work), always});
    }
    changed_.notify_all();
  }
  // Runs on the queue's thread.
  void dawdle() {
    const std::uint64_t dice = random_();
    if (dice % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(dice / 4 % 120));
  }

 private:
  struct Work {
    std::function<void()> run;
    bool always;  // also after a failure
  };

  void run() {
    waits_count = false;
    for (;;) {
      Work work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return ending_ || !work_.empty(); });
        if (work_.empty()) return;
        work = std::move(work_.front());
        work_.pop_front();
      }
      if (failure_ != nullptr && !work.always) continue;
      dawdle();
      try {
        work.run();
      } catch (const std::exception& error) {
        failure_ = std::make_shared<const std::string>(error.what());
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  bool ending_ = false;
  std::shared_ptr<const std::string> failure_;  // of the queue's thread
  std::mt19937_64 random_;                      // of the queue's thread
  std::thread thread_;                          // last, because it uses the others
};

void enqueue(Queue& queue, std::function<void()> work) {
  static_cast<LateQueue&>(queue).push(std::move(work));
}

class LateWords final : public SharedWords {
 public:
  explicit LateWords(std::span<std::byte> memory)
      : words_(reinterpret_cast<std::atomic<std::uint32_t>*>(memory.data())) {}

  void wait(Queue& queue, std::size_t word, std::uint32_t value) override {
    enqueue(queue, [at = words_ + word, value] {
      while (static_cast<std::int32_t>(at->load(std::memory_order_acquire) - value) < 0)
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
  }
  void write(Queue& queue, std::size_t word, std::uint32_t value) override {
    enqueue(queue, [at = words_ + word, value] { at->store(value, std::memory_order_release); });
  }

 private:
  std::atomic<std::uint32_t>* words_;
};

std::string name_of_late_memory(int process, int number) {
  return "/annulus-late-" + std::to_string(process) + "-" + std::to_string(number);
}

// Host memory that other processes can map, by name.
class SharedAllocations {
 public:
  static SharedAllocations& instance() {
    static SharedAllocations all;
    return all;
  }
  [[nodiscard]] std::byte* make(std::size_t bytes) {
    static std::atomic<int> next{0};
    const std::string name = name_of_late_memory(getpid(), next++);
    std::byte* memory = map(name, bytes);
    const std::lock_guard lock(mutex_);
    all_[memory] = {name, bytes};
    return memory;
  }
  void free(std::byte* memory) {
    const std::lock_guard lock(mutex_);
    const auto found = all_.find(memory);
    shm_unlink(found->second.name.c_str());
    munmap(memory, found->second.bytes);
    all_.erase(found);
  }
  // The name of the shared memory that contains this memory, and the offset in it; empty: it cannot
  // be shared.
  [[nodiscard]] std::pair<std::string, std::int64_t> find(const std::byte* memory) {
    const std::lock_guard lock(mutex_);
    auto after = all_.upper_bound(const_cast<std::byte*>(memory));
    if (after == all_.begin()) return {};
    const auto& [base, allocation] = *--after;
    if (memory >= base + allocation.bytes) return {};
    return {allocation.name, memory - base};
  }
  // This process's mapping of that name; null: none.
  [[nodiscard]] std::byte* at(const std::string& name) {
    const std::lock_guard lock(mutex_);
    for (const auto& [memory, allocation] : all_)
      if (allocation.name == name) return memory;
    return nullptr;
  }
  [[nodiscard]] static std::byte* map(const std::string& name, std::size_t bytes) {
    const int file = shm_open(name.c_str(), bytes > 0 ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
    struct stat found {};
    if (file < 0 || (bytes > 0 && ftruncate(file, static_cast<off_t>(bytes)) != 0) ||
        fstat(file, &found) != 0)
      throw DeviceError("late sharing: no memory " + name);
    void* memory = mmap(nullptr, static_cast<std::size_t>(found.st_size), PROT_READ | PROT_WRITE,
                        MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) throw DeviceError("late sharing: cannot map " + name);
    return static_cast<std::byte*>(memory);
  }

 private:
  struct Allocation {
    std::string name;
    std::size_t bytes;
  };
  std::mutex mutex_;
  std::map<std::byte*, Allocation> all_;
};

class LateSharing final : public DeviceSharing {
 public:
  [[nodiscard]] std::string complaint() const override { return ""; }
  [[nodiscard]] std::shared_ptr<Queue> make_queue() override { return make_late_queue(); }
  [[nodiscard]] Memory allocate(std::int64_t bytes, const char*) override {
    if (bytes == 0) return {};
    std::byte* memory = SharedAllocations::instance().make(static_cast<std::size_t>(bytes));
    std::memset(memory, 0xff, static_cast<std::size_t>(bytes));
    return {memory, bytes, {}, [](std::byte* m) { SharedAllocations::instance().free(m); }};
  }
  // Memory of another owner is known by its address, within the process.
  [[nodiscard]] SharedHandle share(const std::byte* memory) override {
    const auto [name, offset] = SharedAllocations::instance().find(memory);
    SharedHandle handle;
    handle.offset = offset;
    if (name.empty()) {
      std::memcpy(handle.bytes.data() + 1, &memory, sizeof(memory));
    } else {
      std::memcpy(handle.bytes.data(), name.data(), name.size());
    }
    return handle;
  }
  [[nodiscard]] std::shared_ptr<std::byte> open(const SharedHandle& handle) override {
    const auto* name = reinterpret_cast<const char*>(handle.bytes.data());
    std::byte* memory = nullptr;
    if (*name == '\0') {
      std::memcpy(&memory, handle.bytes.data() + 1, sizeof(memory));
    } else {
      // Ranks of one process need no second mapping. Mappings of other processes stay until this
      // process ends: there are few, even in thousands of tests.
      memory = SharedAllocations::instance().at(name);
      if (memory == nullptr) memory = SharedAllocations::map(name, 0);
    }
    return {memory, [](std::byte*) {}};
  }
  [[nodiscard]] std::unique_ptr<SharedWords> adopt(std::span<std::byte> memory) override {
    return std::make_unique<LateWords>(memory);
  }
};

class LateEngine final : public Engine {
 public:
  LateEngine(std::unique_ptr<Engine> inner, std::shared_ptr<Queue> now)
      : inner_(std::move(inner)), now_(std::move(now)) {}

  void allocate(const ReceivedRows& received, Queue&) override {
    inner_->allocate(received, *now_);
  }
  [[nodiscard]] std::string kernels() const override { return inner_->kernels(); }
  [[nodiscard]] std::int64_t state_bytes() const override { return inner_->state_bytes(); }
  [[nodiscard]] std::int64_t list_bytes() const override { return inner_->list_bytes(); }

  void begin_forward(const ForwardCall& call, Queue& queue) override {
    enqueue(queue, [=, this] { inner_->begin_forward(call, *now_); });
  }
  void forward(int stage, const ForwardCall& call, Queue& queue) override {
    enqueue(queue, [=, this] { inner_->forward(stage, call, *now_); });
  }
  void finish_forward(const ForwardCall& call, Queue& queue) override {
    enqueue(queue, [=, this] { inner_->finish_forward(call, *now_); });
  }
  void begin_backward(const BackwardCall& call, Queue& queue) override {
    enqueue(queue, [=, this] { inner_->begin_backward(call, *now_); });
  }
  void backward(int stage, const BackwardCall& call, Queue& queue) override {
    enqueue(queue, [=, this] { inner_->backward(stage, call, *now_); });
  }
  void finish_backward(const BackwardCall& call, Queue& queue) override {
    enqueue(queue, [=, this] { inner_->finish_backward(call, *now_); });
  }
  [[nodiscard]] GradientSums sums(const BackwardCall& call) const override {
    return inner_->sums(call);
  }
  [[nodiscard]] TensorRows statistics() const override { return inner_->statistics(); }

 private:
  std::unique_ptr<Engine> inner_;
  std::shared_ptr<Queue> now_;
};

class LateCacheKernels final : public CacheKernels {
 public:
  LateCacheKernels(std::unique_ptr<CacheKernels> inner, std::shared_ptr<Queue> now)
      : inner_(std::move(inner)), now_(std::move(now)) {}

  void copy(const TensorRows& from, const TensorRows& to, int heads, std::int64_t row_bytes,
            std::span<const RowCopy> copies, Queue& queue) override {
    enqueue(queue, [=, this, all = std::vector(copies.begin(), copies.end())] {
      inner_->copy(from, to, heads, row_bytes, all, *now_);
    });
  }
  void reserve(const CachedKeys& keys, std::span<const QueryRun> runs, Queue& queue) override {
    inner_->reserve(keys, runs, queue);
  }
  void attend(const TensorRows& q, const CachedKeys& keys, std::span<const QueryRun> runs,
              Queue& queue) override {
    enqueue(queue, [=, this, all = std::vector(runs.begin(), runs.end())] {
      inner_->attend(q, keys, all, *now_);
    });
  }
  void merge(std::span<const PartialRows> parts, const HeadNumbers& sinks,
             std::span<const RowCopy> copies, const TensorRows& o, const TensorRows& lse,
             Queue& queue) override {
    enqueue(queue, [=, this, all = std::vector(parts.begin(), parts.end()),
                    rows = std::vector(copies.begin(), copies.end())] {
      inner_->merge(all, sinks, rows, o, lse, *now_);
    });
  }
  [[nodiscard]] std::int64_t workspace_bytes() const override { return inner_->workspace_bytes(); }

 private:
  std::unique_ptr<CacheKernels> inner_;
  std::shared_ptr<Queue> now_;
};

class LateBackend final : public Backend {
 public:
  LateBackend(std::shared_ptr<Backend> inner, bool shared)
      : inner_(std::move(inner)), shared_(shared), now_(inner_->make_queue()) {}

  [[nodiscard]] Device device() const override { return inner_->device(); }
  [[nodiscard]] std::string kernels() const override { return inner_->kernels(); }
  [[nodiscard]] std::int64_t scratch_bytes() const override { return inner_->scratch_bytes(); }
  [[nodiscard]] std::string complaint(const Computation& computation) const override {
    return inner_->complaint(computation);
  }
  [[nodiscard]] Memory allocate(std::int64_t bytes, const char* what) override {
    Memory memory = inner_->allocate(bytes, what);
    if (bytes > 0) std::memset(memory.data(), 0xff, static_cast<std::size_t>(bytes));
    return memory;
  }
  [[nodiscard]] Memory allocate_staging(std::int64_t bytes, const char* what) override {
    return allocate(bytes, what);
  }
  [[nodiscard]] std::shared_ptr<Queue> make_queue() override { return make_late_queue(); }
  [[nodiscard]] bool immediate() const override { return false; }
  [[nodiscard]] std::shared_ptr<DeviceSharing> sharing() override {
    return shared_ ? make_late_sharing() : nullptr;
  }
  [[nodiscard]] std::unique_ptr<Engine> compile(const Computation& computation,
                                                std::span<const Stage> forward,
                                                std::span<const Stage> backward) override {
    return std::make_unique<LateEngine>(inner_->compile(computation, forward, backward), now_);
  }
  [[nodiscard]] std::unique_ptr<CopyProgram> compile(const ParcelLayout& layout,
                                                     std::vector<ParcelCopy> copies,
                                                     Queue&) override {
    return inner_->compile(layout, std::move(copies), *now_);
  }
  void pack(const CopyProgram& program, std::span<const TensorRows> sections, std::byte* buffer,
            Queue& queue) override {
    enqueue(queue, [=, this, &program, rows = std::vector(sections.begin(), sections.end())] {
      inner_->pack(program, rows, buffer, *now_);
    });
  }
  void add(const CopyProgram& program, const std::byte* buffer,
           std::span<const TensorRows> sections, Queue& queue) override {
    enqueue(queue, [=, this, &program, rows = std::vector(sections.begin(), sections.end())] {
      inner_->add(program, buffer, rows, *now_);
    });
  }
  void clear(std::byte* memory, std::int64_t bytes, Queue& queue) override {
    enqueue(queue, [=, this] { inner_->clear(memory, bytes, *now_); });
  }
  [[nodiscard]] std::unique_ptr<CacheKernels> cache_kernels(const CacheShape& shape) override {
    return std::make_unique<LateCacheKernels>(inner_->cache_kernels(shape), now_);
  }

 private:
  std::shared_ptr<Backend> inner_;
  bool shared_;
  std::shared_ptr<Queue> now_;
};

}  // namespace

std::shared_ptr<Backend> make_late(std::shared_ptr<Backend> inner) {
  return std::make_shared<LateBackend>(std::move(inner), false);
}

std::shared_ptr<Backend> make_late_shared(std::shared_ptr<Backend> inner) {
  return std::make_shared<LateBackend>(std::move(inner), true);
}

std::shared_ptr<Queue> make_late_queue() {
  static std::atomic<std::uint64_t> next{1};
  return std::make_shared<LateQueue>(next++);
}

void forget_late_memory_of(int process) {
  for (int i = 0; i < 100; ++i) shm_unlink(name_of_late_memory(process, i).c_str());
}

std::shared_ptr<DeviceSharing> make_late_sharing() { return std::make_shared<LateSharing>(); }

std::int64_t host_waits() { return waits; }

void forgive_waits_of_this_thread() { waits_count = false; }

}  // namespace annulus::test
