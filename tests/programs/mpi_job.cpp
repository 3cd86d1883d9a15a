// mpi_job stop|kill: rank 1 of an MPI job stops or dies, and the others say what they see of it. A
// transport that has initialised MPI, in a program that just ends.
// mpi_job single: the program has initialised MPI without threads, and later finalised it.

#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <string_view>
#include <vector>

#include "annulus/error.h"
#include "annulus/mpi.h"
#include "annulus/ring_check.h"

namespace {

void say_why_not() {
  try {
    (void)annulus::make_mpi_transport();
  } catch (const annulus::ConfigError& error) {
    std::printf("%s\n", error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  if (argc > 1 && std::string_view(argv[1]) == "single") {
    int level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SINGLE, &level);
    say_why_not();
    MPI_Finalize();
    say_why_not();
    return 0;
  }
  const bool stops = argc > 1 && std::string_view(argv[1]) == "stop";
  const auto transport = annulus::make_mpi_transport({.deadline = std::chrono::seconds(1)});
  if (!annulus::check_ring(*transport).forward_ok) return 1;
  if (transport->rank() == 1) {
    std::printf("process %d is lost\n", ::getpid());
    std::fflush(stdout);
    ::raise(stops ? SIGSTOP : SIGKILL);
  }
  // More than MPI stores by itself, so that a send is under way for good.
  std::vector<std::byte> out(20'000'000);
  std::vector<std::byte> in(out.size());
  const auto start = Clock::now();
  try {
    const auto receive = transport->receive(1, 0, in);
    const auto send = transport->send(1, 0, out);
    receive->wait();
    send->wait();
  } catch (const annulus::TransportError& error) {
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    std::printf("rank %d lost rank %d after %.2f s\n", transport->rank(), error.rank(), seconds);
    std::fflush(stdout);
    return 3;
  }
  return 0;
}
