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

// What mpirun and similar launchers pass to their processes in the environment.
struct Launch {
  bool by_mpi = false;
  int rank = 0;
  int size = 1;
  int size_here = 1;  // processes of the job on this machine
};
[[nodiscard]] Launch launched();

// The participants of a command: this process alone, with threads as ranks, or all processes of an
// MPI job as ranks. In an MPI job only rank 0 reads, writes and prints.
class World {
 public:
  // Chosen by the flags or the launcher. Sets the number of ranks and, unless given, the number of
  // threads. run() compares `arguments`, the command's as CLI11 writes them, between ranks.
  // Collective in an MPI job.
  World(ProblemFlags& flags, std::string arguments);

  [[nodiscard]] bool is_mpi() const { return ring_ != nullptr; }
  [[nodiscard]] const char* name() const { return is_mpi() ? "mpi" : "in-process"; }
  [[nodiscard]] int rank() const { return is_mpi() ? ring_->rank() : 0; }
  [[nodiscard]] bool leads() const { return rank() == 0; }
  [[nodiscard]] Transport& ring() { return *ring_; }  // of an MPI job

  // Runs the command on every rank. An error on one rank ends it on all ranks with the same exit
  // code, and is reported once.
  int run(const std::function<int()>& command);

  // Returns on all ranks what `make` returns on rank 0.
  [[nodiscard]] std::string share(const std::function<std::string()>& make);
  // Returns the texts by rank on rank 0, nothing on other ranks.
  [[nodiscard]] std::vector<std::string> gather(const std::string& text);
  void meet();  // barrier

  // Only passes have a deadline. Otherwise ranks wait for rank 0, which may read files for an hour.
  void set_deadline(std::chrono::milliseconds deadline);
  void set_no_deadline();

 private:
  [[nodiscard]] Verdict agree_on(const Verdict& mine);
  // mpirun can start processes with different arguments. With different numbers of repetitions, for
  // example, ranks would wait for each other for ever.
  void compare_arguments();

  std::string arguments_;
  std::string complaint_;            // about the arguments; run() reports it after comparing them
  std::unique_ptr<Transport> ring_;  // null: threads
  // Only for what ranks report when they finish, which must also work when the ring has failed.
  std::unique_ptr<Transport> verdicts_;
};

// Makes `command` what the tool runs when that subcommand is given, in the World of its flags.
void run_in_world(CLI::App& subcommand, ProblemFlags& flags, Action& chosen,
                  std::function<int(World&)> command);

}  // namespace annulus::cli
