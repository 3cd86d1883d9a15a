#include "cli/verdict.h"

#include <cstdio>
#include <filesystem>
#include <new>

#include "annulus/error.h"
#include "cli/console.h"

namespace annulus::cli {

Verdict verdict_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Told& told) {
    return told.verdict();
  } catch (const ConfigError& failure) {
    return {kUsage, "config", failure.what()};
  } catch (const std::filesystem::filesystem_error& failure) {
    return {kUsage, "config", failure.what()};
  } catch (const TransportError& failure) {
    const std::string message = failure.what();
    const bool echo = message.find(" aborted the transport: ") != std::string::npos;
    return {kTransport, "transport", message, echo};
  } catch (const DeviceError& failure) {
    return {kDevice, "device", failure.what()};
  } catch (const std::bad_alloc&) {
    return {kDevice, "device",
            "out of memory: use a shorter sequence, fewer heads or a 16-bit --dtype"};
  } catch (const VerificationError& failure) {
    return {kFailed, "verification", failure.what()};
  } catch (const std::exception& failure) {
    return {kFailed, "internal", failure.what()};
  }
}

int report(const Verdict& verdict, bool json) {
  if (verdict.silent) return verdict.code;
  std::fflush(stdout);
  std::fprintf(stderr, "annulus: error: %s\n", verdict.message.c_str());
  if (json) {
    try {
      print_json({{"error", verdict.message}, {"kind", verdict.kind}});
    } catch (const Error&) {  // standard output is what failed
    }
  }
  return verdict.code;
}

}  // namespace annulus::cli
