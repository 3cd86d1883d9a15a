#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace annulus {

// Base of objects that are made and destroyed with every message. Each thread keeps a few for
// reuse, so that a steady exchange of messages allocates nothing. For final classes only.
template <typename Derived>
class Pooled {
 public:
  static void* operator new(std::size_t bytes) {
    std::vector<void*>& kept = reusable().memory;
    if (kept.empty()) return ::operator new(bytes);
    void* memory = kept.back();
    kept.pop_back();
    return memory;
  }
  static void operator delete(void* memory) {
    std::vector<void*>& kept = reusable().memory;
    if (kept.size() == kept.capacity()) {
      ::operator delete(memory);
    } else {
      kept.push_back(memory);
    }
  }

 private:
  struct Reusable {
    static constexpr std::size_t kMost = 256;
    std::vector<void*> memory;
    Reusable() { memory.reserve(kMost); }
    ~Reusable() {
      for (void* m : memory) ::operator delete(m);
    }
  };
  static Reusable& reusable() {
    static thread_local Reusable list;
    return list;
  }
};

}  // namespace annulus
