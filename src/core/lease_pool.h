#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "annulus/device.h"
#include "annulus/events.h"
#include "core/caches.h"
#include "core/memory_state.h"

namespace annulus {

// Keeps objects that are expensive to make between uses. take() removes an item from the pool, so
// that a second thread makes its own instead of waiting; several items may have one key. On each
// device the pool keeps the latest item and, beside it, as many items and bytes as idle_allowance()
// permits. It drops the least recently used ones first, outside the lock, and all of them when
// memory runs out (drop_caches).
template <typename T>
class LeasePool {
 public:
  explicit LeasePool(std::size_t capacity, std::int64_t most_bytes = kShareOfMemory)
      : state_(std::make_shared<State>()), capacity_(capacity), most_bytes_(most_bytes) {
    register_cache(state_);
  }

  [[nodiscard]] std::optional<T> take(const std::string& key) {
    return take(key, [](const T&) { return true; });
  }

  // The latest item of this key that is accepted.
  template <typename Accept>
  [[nodiscard]] std::optional<T> take(const std::string& key, const Accept& accept) {
    const std::lock_guard lock(state_->mutex);
    Entries& entries = state_->entries;
    const auto found = std::find_if(entries.begin(), entries.end(), [&](const Entry& entry) {
      return entry.key == key && accept(entry.item);
    });
    if (found == entries.end()) {
      record_event(EventKind::cache, "miss", -1);
      return std::nullopt;
    }
    record_event(EventKind::cache, "hit", -1, found->bytes);
    std::optional<T> item(std::move(found->item));
    entries.erase(found);
    return item;
  }

  // Makes room for one more item before the caller allocates memory for it.
  void make_room() {
    Entries dropped;
    const std::lock_guard lock(state_->mutex);
    while (!state_->entries.empty() && state_->entries.size() >= capacity_)
      drop_one(dropped, std::prev(state_->entries.end()));
  }

  void give_back(std::string key, T item, std::int64_t bytes = 0, const Device& device = {}) {
    const Allowance most = idle_allowance(capacity_, most_bytes_, recent_memory_state(device));
    Entries dropped;
    const std::lock_guard lock(state_->mutex);
    Entries& entries = state_->entries;
    entries.push_front({std::move(key), std::move(item), bytes, device});
    while (entries.size() > capacity_) drop_one(dropped, std::prev(entries.end()));
    // Counts items of this device only: dropping those of other devices would not free memory here.
    std::size_t items = 1;
    std::int64_t sum = 0;
    for (auto entry = std::next(entries.begin()); entry != entries.end();) {
      const auto here = entry++;
      if (here->device != device) continue;
      ++items;
      sum += here->bytes;
      if (items > most.items || sum > most.bytes) drop_one(dropped, here);
    }
  }

  void clear() { (void)state_->drop(); }

  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(state_->mutex);
    return state_->entries.size();
  }

  [[nodiscard]] std::int64_t bytes() const {
    const std::lock_guard lock(state_->mutex);
    return sum_of_bytes(state_->entries);
  }

  // Visits the idle items.
  template <typename Body>
  void for_each(const Body& body) const {
    const std::lock_guard lock(state_->mutex);
    for (const Entry& entry : state_->entries) body(entry.item);
  }

 private:
  struct Entry {
    std::string key;
    T item;
    std::int64_t bytes;
    Device device;
  };
  using Entries = std::list<Entry>;

  [[nodiscard]] static std::int64_t sum_of_bytes(const Entries& entries) {
    std::int64_t sum = 0;
    for (const Entry& entry : entries) sum += entry.bytes;
    return sum;
  }
  void drop_one(Entries& dropped, typename Entries::iterator entry) {
    record_event(EventKind::cache, "evict", -1, entry->bytes);
    dropped.splice(dropped.end(), state_->entries, entry);
  }

  struct State final : Cache {
    mutable std::mutex mutex;
    Entries entries;  // most recently used first

    Dropped drop() override {
      Entries dropped;
      {
        const std::lock_guard lock(mutex);
        dropped.swap(entries);
      }
      if (!dropped.empty()) record_event(EventKind::cache, "clear", -1, sum_of_bytes(dropped));
      return {std::ssize(dropped), sum_of_bytes(dropped)};
    }
  };

  std::shared_ptr<State> state_;
  std::size_t capacity_;
  std::int64_t most_bytes_;
};

}  // namespace annulus
