#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace annulus {

// What is expensive to make, between uses. An item is taken out while it is used, so that a caller
// on another thread makes its own instead of waiting; there may be several of one key. Bounded: at
// most `capacity` items, and at most `most_bytes` beside the latest one; the least recently used
// ones are dropped first, after the lock is gone.
template <typename T>
class LeasePool {
 public:
  explicit LeasePool(std::size_t capacity,
                     std::int64_t most_bytes = std::numeric_limits<std::int64_t>::max())
      : capacity_(capacity), most_bytes_(most_bytes) {}

  [[nodiscard]] std::optional<T> take(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(entries_.begin(), entries_.end(),
                                    [&](const Entry& entry) { return entry.key == key; });
    if (found == entries_.end()) return std::nullopt;
    std::optional<T> item(std::move(found->item));
    entries_.erase(found);
    return item;
  }

  // For one more: what will be dropped for it is gone before it asks for memory of its own.
  void make_room() {
    Entries dropped;
    const std::lock_guard lock(mutex_);
    while (!entries_.empty() && entries_.size() >= capacity_) drop_last(dropped);
  }

  void give_back(std::string key, T item, std::int64_t bytes = 0) {
    Entries dropped;
    const std::lock_guard lock(mutex_);
    entries_.push_front({std::move(key), std::move(item), bytes});
    while (entries_.size() > capacity_ ||
           (entries_.size() > 1 && sum_of_bytes() - bytes > most_bytes_)) {
      drop_last(dropped);
    }
  }

  void clear() {
    Entries dropped;
    const std::lock_guard lock(mutex_);
    dropped.swap(entries_);
  }

  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return entries_.size();
  }

  [[nodiscard]] std::int64_t bytes() const {
    const std::lock_guard lock(mutex_);
    return sum_of_bytes();
  }

  // Of those that are not taken.
  template <typename Body>
  void for_each(const Body& body) const {
    const std::lock_guard lock(mutex_);
    for (const Entry& entry : entries_) body(entry.item);
  }

 private:
  struct Entry {
    std::string key;
    T item;
    std::int64_t bytes;
  };
  using Entries = std::list<Entry>;

  [[nodiscard]] std::int64_t sum_of_bytes() const {
    std::int64_t sum = 0;
    for (const Entry& entry : entries_) sum += entry.bytes;
    return sum;
  }
  void drop_last(Entries& dropped) {
    dropped.splice(dropped.end(), entries_, std::prev(entries_.end()));
  }

  std::size_t capacity_;
  std::int64_t most_bytes_;
  mutable std::mutex mutex_;
  Entries entries_;  // most recently used first
};

}  // namespace annulus
