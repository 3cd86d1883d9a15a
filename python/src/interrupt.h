#pragma once

#include <functional>

namespace annulus::python {

// Remembers Python's main thread, the only one that receives signals. Needs the GIL.
void find_main_thread();
[[nodiscard]] bool on_main_thread();

// Passes with at least this many operations (multiply-adds count twice) can be interrupted: 0.1 s
// at 20 GFLOP/s. Shorter ones do not need the extra thread.
inline constexpr double kLongPass = 2e9;

// Called with the GIL; runs `pass` without it. With `watch`, the pass runs on a thread of its own
// while this thread, the main thread, checks for signals every 50 ms. If a signal handler raises
// (Ctrl-C), calls `stop`, waits for the pass, and throws the exception as nb::python_error.
void run_interruptibly(bool watch, const std::function<void()>& pass,
                       const std::function<void()>& stop);

}  // namespace annulus::python
