#pragma once

#include <exception>
#include <string>

#include "cli/commands.h"

namespace annulus::cli {

// How a command ended: its exit code and, unless `kind` is empty, an error message.
struct Verdict {
  int code = kOk;
  std::string kind;  // "usage", "config", "transport", "device", "verification", "internal"
  std::string message;
  bool echo = false;    // only says that another rank has failed
  bool silent = false;  // another rank reports it
};

// Carries a verdict out of a command.
class Told : public std::exception {
 public:
  explicit Told(Verdict verdict) : verdict_(std::move(verdict)) {}
  [[nodiscard]] const Verdict& verdict() const { return verdict_; }
  [[nodiscard]] const char* what() const noexcept override { return verdict_.message.c_str(); }

 private:
  Verdict verdict_;
};

[[nodiscard]] Verdict verdict_of(const std::exception_ptr& error);

// Prints the error on standard error and, if `json`, as an object on standard output. Returns the
// exit code.
int report(const Verdict& verdict, bool json);

}  // namespace annulus::cli
