#include "interrupt.h"

#include <nanobind/nanobind.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

namespace annulus::python {

namespace nb = nanobind;

namespace {
unsigned long main_thread = 0;
}

void find_main_thread() {
  main_thread = nb::cast<unsigned long>(
      nb::module_::import_("threading").attr("main_thread")().attr("ident"));
}

bool on_main_thread() { return PyThread_get_thread_ident() == main_thread; }

void run_interruptibly(bool watch, const std::function<void()>& pass,
                       const std::function<void()>& stop) {
  if (!watch) {
    const nb::gil_scoped_release no_gil;
    pass();
    return;
  }
  constexpr std::chrono::milliseconds kLook{50};
  std::mutex mutex;
  std::condition_variable changed;
  bool ended = false;
  std::exception_ptr failure;
  std::optional<nb::python_error> signal;
  {
    const nb::gil_scoped_release no_gil;
    std::thread runner([&] {
      std::exception_ptr mine;
      try {
        pass();
      } catch (...) {
        mine = std::current_exception();
      }
      const std::lock_guard lock(mutex);
      failure = std::move(mine);
      ended = true;
      changed.notify_one();
    });
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, kLook, [&] { return ended; })) {
      if (signal) continue;  // it is being stopped
      lock.unlock();
      {
        const nb::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) signal.emplace();
      }
      if (signal) stop();
      lock.lock();
    }
    lock.unlock();
    runner.join();
  }
  if (signal) throw nb::python_error(std::move(*signal));
  if (failure) std::rethrow_exception(failure);
}

}  // namespace annulus::python
