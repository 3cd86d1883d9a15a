#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "annulus/transport.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/verdict.h"

namespace annulus::cli {

// What mpirun and its relatives tell the processes that they start.
struct Launch {
  bool by_mpi = false;
  int rank = 0;
  int size = 1;
  int size_here = 1;  // processes of the job on this machine
};
[[nodiscard]] Launch launched();

// Who takes part in a command: this process alone, whose rings are threads, or all processes of an
// MPI job, which are the ring. Then rank 0 reads, writes and prints, and the others are silent.
class World {
 public:
  // As the flags or the launcher say. Sets the number of ranks and, unless they are given, that of
  // threads. `arguments` is what run() compares: the command's, as CLI11 writes them. Collective in
  // an MPI job.
  World(ProblemFlags& flags, std::string arguments);

  [[nodiscard]] bool is_mpi() const { return ring_ != nullptr; }
  [[nodiscard]] const char* name() const { return is_mpi() ? "mpi" : "in-process"; }
  [[nodiscard]] int rank() const { return is_mpi() ? ring_->rank() : 0; }
  [[nodiscard]] bool leads() const { return rank() == 0; }
  [[nodiscard]] Transport& ring() { return *ring_; }  // of an MPI job

  // The command on every rank. Whatever goes wrong on any of them ends it on all, with the same
  // exit code, and is told once.
  int run(const std::function<int()>& command);

  // What rank 0's `make` returns, on all ranks.
  [[nodiscard]] std::string share(const std::function<std::string()>& make);
  // By rank, on rank 0; elsewhere empty.
  [[nodiscard]] std::vector<std::string> gather(const std::string& text);
  void meet();  // returns when every rank has come

  // Deadlines are for passes. Otherwise ranks wait for rank 0, which may read for an hour.
  void set_deadline(std::chrono::milliseconds deadline);
  void set_no_deadline();

 private:
  [[nodiscard]] Verdict agree_on(const Verdict& mine);
  // mpirun can start processes with arguments of their own. Ranks that disagree about how often to
  // repeat would wait for each other for ever.
  void compare_arguments();

  std::string arguments_;
  std::string complaint_;            // about the arguments; run() reports it after comparing them
  std::unique_ptr<Transport> ring_;  // null: threads
  // Only for what ranks say when they are done, which they can also when the ring is broken.
  std::unique_ptr<Transport> verdicts_;
};

// Makes `command` what the tool runs when that subcommand is given, in the World of its flags.
void run_in_world(CLI::App& subcommand, ProblemFlags& flags, Action& chosen,
                  std::function<int(World&)> command);

}  // namespace annulus::cli
