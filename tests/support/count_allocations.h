#pragma once

// Counts the allocations of all threads of this program: operator new of all kinds, malloc,
// aligned_alloc. Include it in one source file of a program only, because it replaces functions of
// the C library.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <cerrno>

namespace annulus::test {

inline std::atomic<bool> allocations_watched{false};
inline std::atomic<std::int64_t> allocations_seen{0};

inline void note_allocation() {
  if (allocations_watched.load(std::memory_order_relaxed)) allocations_seen.fetch_add(1);
}

}  // namespace annulus::test

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

// The sanitizers have an allocator of their own, with hooks. GCC has the function but not the
// header that declares it (sanitizer/allocator_interface.h).
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*,
                                                                             std::size_t),
                                                         void (*free_hook)(const volatile void*));

namespace annulus::test {
inline const bool allocations_hooked =
    __sanitizer_install_malloc_and_free_hooks(
        [](const volatile void*, std::size_t) { note_allocation(); },
        [](const volatile void*) {}) != 0;
}  // namespace annulus::test

#else

// glibc's own functions, by the names under which a replacement can call them. free() accepts what
// they return.
// NOLINTBEGIN(bugprone-reserved-identifier,misc-definitions-in-headers)
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) {
  annulus::test::note_allocation();
  return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) {
  annulus::test::note_allocation();
  return __libc_calloc(count, bytes);
}
void* realloc(void* memory, std::size_t bytes) {
  annulus::test::note_allocation();
  return __libc_realloc(memory, bytes);
}
void* aligned_alloc(std::size_t align, std::size_t bytes) {
  annulus::test::note_allocation();
  return __libc_memalign(align, bytes);
}
void* memalign(std::size_t align, std::size_t bytes) {
  annulus::test::note_allocation();
  return __libc_memalign(align, bytes);
}
int posix_memalign(void** out, std::size_t align, std::size_t bytes) {
  annulus::test::note_allocation();
  void* const memory = __libc_memalign(align, bytes);
  if (memory == nullptr) return ENOMEM;
  *out = memory;
  return 0;
}
}  // extern "C"
   // NOLINTEND(bugprone-reserved-identifier,misc-definitions-in-headers)

#endif
