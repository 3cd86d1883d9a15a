// mpi_job stop|silent|kill: rank 1 of an MPI job stops or dies, and the others say what they see of
// it; with "silent", nothing has a deadline. A transport that has initialised MPI, in a program
// that just ends. mpi_job attend: rank 1 stops while all compute; most of the others never wait for
// it themselves. mpi_job single: the program has initialised MPI without threads, and later
// finalised it.

#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <string_view>
#include <vector>

#include "annulus/error.h"
#include "annulus/mpi.h"
#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "annulus/ring_check.h"

namespace {

using Clock = std::chrono::steady_clock;

// After half of it all ranks say for whom they wait: the other half is time to hear of it.
constexpr std::chrono::seconds kPatience{8};

void lose(int signal) {
  std::printf("process %d is lost\n", ::getpid());
  std::fflush(stdout);
  ::raise(signal);
}

// More than MPI stores by itself, so that a send is under way for good.
void exchange(annulus::Transport& transport) {
  std::vector<std::byte> out(20'000'000);
  std::vector<std::byte> in(out.size());
  const auto receive = transport.receive(1, 0, in);
  const auto send = transport.send(1, 0, out);
  receive->wait();
  send->wait();
}

void attend(annulus::Transport& transport) {
  constexpr std::int64_t kLocal = 16;
  const int ranks = transport.size();
  annulus::RingOptions options{annulus::dense(1),
                               annulus::Placement::contiguous(kLocal * ranks, ranks)};
  options.kv_heads = 1;
  options.head_dim = 16;
  options.schedule = annulus::Schedule::ring;
  options.backward = false;
  options.threads = 1;
  annulus::RingAttention ring(options, transport);
  std::vector<float> q(kLocal * 16, 0.5F);
  std::vector<float> o(q.size());
  std::vector<float> lse(kLocal);
  const auto view = [&](std::vector<float>& values) {
    return annulus::TensorView(values.data(), annulus::DType::f32, {1, kLocal, 1, 16});
  };
  for (int pass = 0;; ++pass) {
    if (pass == 20 && transport.rank() == 1) lose(SIGSTOP);
    ring.forward(view(q), view(q), view(q), view(o),
                 annulus::TensorView(lse.data(), annulus::DType::f32, {1, kLocal, 1}));
  }
}

void say_why_not() {
  try {
    (void)annulus::make_mpi_transport();
  } catch (const annulus::ConfigError& error) {
    std::printf("%s\n", error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view how = argc > 1 ? argv[1] : "";
  if (how == "single") {
    int level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SINGLE, &level);
    say_why_not();
    MPI_Finalize();
    say_why_not();
    return 0;
  }
  const auto transport = annulus::make_mpi_transport(
      how == "silent"
          ? annulus::MpiOptions{.deadline = std::chrono::hours(24), .silence = kPatience}
          : annulus::MpiOptions{.deadline = kPatience});
  if (!annulus::check_ring(*transport).forward_ok) return 1;
  if (transport->rank() == 1 && how != "attend") lose(how == "kill" ? SIGKILL : SIGSTOP);
  const auto start = Clock::now();
  try {
    (how == "attend" ? attend : exchange)(*transport);
  } catch (const annulus::TransportError& error) {
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    std::printf("rank %d lost rank %d after %.2f s\n", transport->rank(), error.rank(), seconds);
    if (how == "attend") std::printf("%s\n", error.what());
    std::fflush(stdout);
    return 3;
  }
  return 0;
}
