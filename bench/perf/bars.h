#pragma once

#include <cstdio>

// What a program of 'make perf' has measured, beside the bar that it has to pass.
namespace annulus::perf {

class Bars {
 public:
  void at_most(const char* what, double found, double bar) { say(what, found, "<=", bar); }
  void at_least(const char* what, double found, double bar) { say(what, found, ">=", bar); }
  // For main().
  [[nodiscard]] int exit_status() const { return missed_ > 0 ? 1 : 0; }

 private:
  void say(const char* what, double found, const char* sign, double bar) {
    const bool good = *sign == '<' ? found <= bar : found >= bar;
    if (!good) ++missed_;
    std::printf("%-64s %8.3f   %s %g%s\n", what, found, sign, bar, good ? "" : "   MISSED");
    std::fflush(stdout);
  }

  int missed_ = 0;
};

}  // namespace annulus::perf
