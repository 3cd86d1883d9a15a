#include "cli/world.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <utility>

#include "annulus/error.h"
#include "annulus/mpi.h"
#include "core/machine.h"

namespace annulus::cli {
namespace {

constexpr std::uint32_t kLength = 0x544f4f4c;  // "TOOL": tags that executors do not use
constexpr std::uint32_t kText = kLength + 1;
constexpr std::uint32_t kMeeting = kLength + 2;
constexpr std::chrono::hours kForever(24 * 365);
// A rank that has failed waits for the verdicts of the others, but not for long: one of them may be
// the cause.
constexpr std::chrono::seconds kLastWords(5);

std::optional<int> number_in(std::initializer_list<const char*> variables) {
  for (const char* variable : variables) {
    const char* text = std::getenv(variable);
    if (text == nullptr || *text == '\0') continue;
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*end == '\0' && value >= 0) return static_cast<int>(value);
  }
  return std::nullopt;
}

void send_text(Transport& transport, int peer, const std::string& text) {
  const std::uint64_t length = text.size();
  const auto first = transport.send(peer, kLength, std::as_bytes(std::span(&length, 1)));
  const auto second = transport.send(peer, kText, std::as_bytes(std::span(text)));
  first->wait();
  second->wait();
}

std::string receive_text(Transport& transport, int peer) {
  std::uint64_t length = 0;
  transport.receive(peer, kLength, std::as_writable_bytes(std::span(&length, 1)))->wait();
  std::string text(length, '\0');
  transport.receive(peer, kText, std::as_writable_bytes(std::span(text)))->wait();
  return text;
}

Json to_json(const Verdict& verdict) {
  return {{"code", verdict.code},
          {"kind", verdict.kind},
          {"message", verdict.message},
          {"echo", verdict.echo}};
}

Verdict verdict_from(const std::string& text) {
  const Json json = Json::parse(text);
  return {json["code"].get<int>(), json["kind"].get<std::string>(),
          json["message"].get<std::string>(), json["echo"].get<bool>()};
}

// Processes that mpirun has not bound to cores share them.
int threads_of_one(const Launch& launch) {
  cpu_set_t mask;
  const bool bound = ::sched_getaffinity(0, sizeof(mask), &mask) == 0 &&
                     CPU_COUNT(&mask) < ::sysconf(_SC_NPROCESSORS_ONLN);
  return std::max(1, bound ? usable_cpus() : usable_cpus() / launch.size_here);
}

}  // namespace

Launch launched() {
  Launch launch;
  const auto size = number_in({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"});
  const auto rank = number_in({"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"});
  launch.by_mpi = rank.has_value();
  launch.rank = rank.value_or(0);
  launch.size = size.value_or(1);
  launch.size_here =
      number_in({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}).value_or(launch.size);
  return launch;
}

World::World(ProblemFlags& flags, std::string arguments) : arguments_(std::move(arguments)) {
  const Launch launch = launched();
  if (flags.transport.empty() ? !launch.by_mpi : flags.transport == "in-process") return;
  // If MPI cannot start, ranks cannot communicate. All of them notice; rank 0 reports it.
  try {
    ring_ = make_mpi_transport({.deadline = kForever});
    verdicts_ = make_mpi_transport({.deadline = kForever});
  } catch (const Error&) {
    Verdict verdict = verdict_of(std::current_exception());
    verdict.silent = launch.rank != 0;
    if (launch.by_mpi && !mpi_built()) {
      verdict.message += "; --transport in-process works without MPI";
    }
    throw Told(verdict);
  }
  if (!flags.has("ranks")) flags.ranks = ring_->size();
  if (flags.ranks != ring_->size()) {
    complaint_ = fmt::format(
        "--ranks is {}, but MPI has started {} process{}: leave --ranks out, or start "
        "mpirun -n {}",
        flags.ranks, ring_->size(), ring_->size() == 1 ? "" : "es", flags.ranks);
  }
  const char* const threads = std::getenv("ANNULUS_THREADS");  // empty: as if it were not there
  if (!flags.has("threads") && (threads == nullptr || *threads == '\0')) {
    flags.options.threads = threads_of_one(launch);
  }
}

int World::run(const std::function<int()>& command) {
  if (!is_mpi()) return command();
  Verdict mine;
  try {
    compare_arguments();
    if (!complaint_.empty()) throw ConfigError(complaint_);
    mine.code = command();
  } catch (...) {
    mine = verdict_of(std::current_exception());
    ring_->abort(mine.message);
  }
  Verdict common = agree_on(mine);
  if (common.kind.empty()) return common.code;
  throw Told(std::move(common));
}

void World::compare_arguments() {
  // Lines such as "tokens=600". Some flags may differ, because only rank 0 writes and prints.
  const auto parsed = [](const std::string& text) {
    std::map<std::string, std::string> arguments;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      const std::size_t end = std::min(line.find('='), line.size());
      arguments[line.substr(0, end)] = line.substr(std::min(end + 1, line.size()));
    }
    for (const char* own : {"threads", "device", "output", "json", "progress", "transport"})
      arguments.erase(own);
    return arguments;
  };
  const auto first = parsed(share([&] { return arguments_; }));
  const auto mine = parsed(arguments_);
  for (const auto& both : {first, mine}) {
    for (const auto& argument : both) {
      const std::string& name = argument.first;
      const auto text = [&](const auto& arguments) {
        const auto found = arguments.find(name);
        return found == arguments.end() ? std::string("not given") : found->second;
      };
      if (text(first) == text(mine)) continue;
      throw ConfigError(
          fmt::format("--{} is {}, but {} on rank 0: all processes must get the same arguments",
                      name, text(mine), text(first)));
    }
  }
}

Verdict World::agree_on(const Verdict& mine) {
  const bool failed = !mine.kind.empty();
  if (failed) verdicts_->set_deadline(kLastWords);
  const int ranks = verdicts_->size();
  if (!leads()) {
    try {
      send_text(*verdicts_, 0, to_text(to_json(mine)));
      Verdict common = verdict_from(receive_text(*verdicts_, 0));
      common.silent = true;
      return common;
    } catch (const TransportError&) {  // rank 0 is lost: every rank reports its own error
      return mine;
    }
  }
  // The first that is not an echo is the cause.
  Verdict chosen = mine;
  for (int rank = 1; rank < ranks; ++rank) {
    try {
      Verdict theirs = verdict_from(receive_text(*verdicts_, rank));
      if (theirs.kind.empty() || (!chosen.kind.empty() && !chosen.echo)) continue;
      if (!chosen.kind.empty() && theirs.echo) continue;
      if (!theirs.message.starts_with("[rank ")) {
        theirs.message = fmt::format("[rank {}/{}] {}", rank, ranks, theirs.message);
      }
      chosen = std::move(theirs);
    } catch (const TransportError& failure) {  // the rank is lost or still at work
      if (chosen.kind.empty()) chosen = verdict_of(std::make_exception_ptr(failure));
    }
    if (!chosen.kind.empty()) verdicts_->set_deadline(kLastWords);
  }
  for (int rank = 1; rank < ranks; ++rank) {
    try {
      send_text(*verdicts_, rank, to_text(to_json(chosen)));
    } catch (const TransportError&) {  // rank 0 does not need it
    }
  }
  return chosen;
}

std::string World::share(const std::function<std::string()>& make) {
  if (!leads()) return receive_text(*ring_, 0);
  std::string text = make();
  for (int rank = 1; is_mpi() && rank < ring_->size(); ++rank) send_text(*ring_, rank, text);
  return text;
}

std::vector<std::string> World::gather(const std::string& text) {
  if (!leads()) {
    send_text(*ring_, 0, text);
    return {};
  }
  std::vector<std::string> all = {text};
  for (int rank = 1; is_mpi() && rank < ring_->size(); ++rank) {
    all.push_back(receive_text(*ring_, rank));
  }
  return all;
}

void World::meet() {
  if (!is_mpi()) return;
  const int ranks = ring_->size();
  for (int distance = 1; distance < ranks; distance *= 2) {
    const auto send = ring_->send((rank() + distance) % ranks, kMeeting, {});
    ring_->receive((rank() + ranks - distance) % ranks, kMeeting, {})->wait();
    send->wait();
  }
}

void World::set_deadline(std::chrono::milliseconds deadline) {
  if (is_mpi()) ring_->set_deadline(deadline);
}

void World::set_no_deadline() { set_deadline(kForever); }

void run_in_world(CLI::App& subcommand, ProblemFlags& flags, Action& chosen,
                  std::function<int(World&)> command) {
  subcommand.callback([&subcommand, &flags, &chosen, command = std::move(command)] {
    chosen = [&subcommand, &flags, command] {
      World world(flags, subcommand.config_to_str());
      return world.run([&] { return command(world); });
    };
  });
}

}  // namespace annulus::cli
