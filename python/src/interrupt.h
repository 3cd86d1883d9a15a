#pragma once

#include <functional>

namespace annulus::python {

// Remembers Python's main thread, the only one that signals reach. Needs the GIL.
void find_main_thread();
[[nodiscard]] bool on_main_thread();

// Operations (multiply-adds count twice) of a pass from which on it is long enough that a person
// could want to stop it: 0.1 s at 20 GFLOP/s. Shorter ones are spared the thread.
inline constexpr double kLongPass = 2e9;

// Runs `pass` without the GIL; called with it. With `watch` the pass runs on a thread of its own
// while this one, the main thread, looks for signals every 50 ms. When one raises (Ctrl-C), `stop`
// is called, the pass is waited for, and the exception thrown as nb::python_error.
void run_interruptibly(bool watch, const std::function<void()>& pass,
                       const std::function<void()>& stop);

}  // namespace annulus::python
