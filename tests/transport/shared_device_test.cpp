#include "transport/shared_device.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "annulus/in_process.h"
#include "annulus/ring_attention.h"
#include "annulus/ring_check.h"
#include "support/asleep.h"
#include "support/gate.h"
#include "support/late_backend.h"
#include "support/ring_fixture.h"
#include "support/socket_transport.h"
#include "support/transport_checks.h"

// Device memory between real processes. The device is a late queue, its memory is the host's; the
// rest is what runs on a GPU.
namespace annulus {
namespace {

using std::chrono::milliseconds;
using test::SocketTransport;

constexpr int kKilled = 77;

// Runs body(control) in one process per rank, and says how each ended: 0, kKilled for one that was
// killed, or 1, which has said why. `body` must not use gtest's assertions: they are the parent's.
std::vector<int> run_processes(int ranks, const std::function<void(SocketTransport&)>& body) {
  std::vector<std::vector<int>> sockets(static_cast<std::size_t>(ranks),
                                        std::vector<int>(static_cast<std::size_t>(ranks), -1));
  for (std::size_t a = 0; a < sockets.size(); ++a) {
    for (std::size_t b = a + 1; b < sockets.size(); ++b) {
      int pair[2];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
      sockets[a][b] = pair[0];
      sockets[b][a] = pair[1];
    }
  }
  std::fflush(stdout);
  std::vector<pid_t> children;
  for (std::size_t rank = 0; rank < sockets.size(); ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      for (std::size_t other = 0; other < sockets.size(); ++other) {
        for (const int socket : sockets[other]) {
          if (other != rank && socket >= 0) close(socket);
        }
      }
      int status = 0;
      try {
        SocketTransport control(static_cast<int>(rank), sockets[rank]);
        body(control);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %zu: %s\n", rank, error.what());
        status = 1;
      }
      _exit(status);
    }
    children.push_back(child);
  }
  for (const auto& ends : sockets) {
    for (const int socket : ends) {
      if (socket >= 0) close(socket);
    }
  }
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : kKilled);
    test::forget_late_memory_of(child);  // who was killed could not
  }
  return statuses;
}

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

std::unique_ptr<SharedDevice> connect(Transport& control) {
  std::string why;
  auto shared = share_device_memory(control, test::make_late_sharing(), why);
  require(shared != nullptr, "not shared: " + why);
  return shared;
}

// What devices cannot do is what tests change.
class OtherSharing : public DeviceSharing {
 public:
  [[nodiscard]] std::string complaint() const override { return late_->complaint(); }
  [[nodiscard]] std::shared_ptr<Queue> make_queue() override { return late_->make_queue(); }
  [[nodiscard]] Memory allocate(std::int64_t bytes, const char* what) override {
    return late_->allocate(bytes, what);
  }
  [[nodiscard]] SharedHandle share(const std::byte* memory) override {
    return late_->share(memory);
  }
  [[nodiscard]] std::shared_ptr<std::byte> open(const SharedHandle& handle) override {
    return late_->open(handle);
  }
  [[nodiscard]] std::unique_ptr<SharedWords> adopt(std::span<std::byte> memory) override {
    return late_->adopt(memory);
  }

 private:
  std::shared_ptr<DeviceSharing> late_ = test::make_late_sharing();
};

TEST(SharedDevice, ProcessesPassDeviceMemory) {
  const auto ends = run_processes(3, [](SocketTransport& control) {
    const auto shared = connect(control);
    const auto sharing = test::make_late_sharing();
    const int next = (control.rank() + 1) % 3;
    const int previous = (control.rank() + 2) % 3;
    constexpr std::int64_t kBytes = 5000;
    constexpr int kMessages = 200;  // more than fit the board at a time
    const auto queue = test::make_late_queue();
    const auto copies = test::make_late_queue();
    const Memory out = sharing->allocate(kBytes * kMessages, "out");
    const Memory in = sharing->allocate(kBytes * kMessages, "in");
    const Region from = shared->expose(out.span(), Device{}, copies);
    const Region to = shared->expose(in.span(), Device{}, copies);
    const auto value = [](int rank, int message) {
      return static_cast<std::byte>((rank * 91 + message * 7) & 0xff);
    };
    std::vector<std::unique_ptr<Ticket>> tickets;
    for (int m = 0; m < kMessages; ++m) {
      std::fill_n(out.data() + m * kBytes, kBytes, value(control.rank(), m));
      const Message batch[] = {{Way::receive, previous, 3, &to, m * kBytes, kBytes},
                               {Way::send, next, 3, &from, m * kBytes, kBytes}};
      tickets.push_back(shared->post(batch, queue->record()));
    }
    for (const auto& ticket : tickets) ticket->wait(*queue);
    queue->record().wait();
    for (int m = 0; m < kMessages; ++m) {
      require(in.data()[m * kBytes + 17] == value(previous, m), "message " + std::to_string(m));
    }
    require(control.counters().bytes_sent >= kBytes * kMessages, "bytes are counted");
    shared->check();
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 0, 0}));
}

// Rank 0 looks for messages while rank 1 leaves them. Each has a size of its own, so that one which
// is taken before its turn is found out.
TEST(SharedDevice, MessagesOfOneTagKeepTheirOrder) {
  constexpr int kRounds = 300;
  constexpr int kMessages = 32;
  run_in_process(2, [](Transport& control) {
    const auto shared = connect(control);
    const Memory memory = test::make_late_sharing()->allocate(kMessages * 8, "rows");
    const Region region = shared->expose(memory.span(), Device{}, test::make_late_queue());
    const Way way = control.rank() == 0 ? Way::receive : Way::send;
    std::vector<Message> batch;
    for (int m = 0; m < kMessages; ++m)
      batch.push_back({way, 1 - control.rank(), 3, &region, 0, 8 * (m + 1)});
    for (int round = 0; round < kRounds; ++round) {
      std::vector<std::unique_ptr<Ticket>> tickets;
      for (const Message& message : batch)
        tickets.push_back(shared->post(std::span(&message, 1), Event()));
      for (const auto& ticket : tickets) ticket->wait();
    }
  });
}

TEST(SharedDevice, RingOfProcessesGivesTheBitsOfOneProcess) {
  const std::int64_t segments[] = {32, 150};
  const std::int64_t dilations[] = {1, 3};
  const test::Problem problem =
      test::make_problem("processes", longnet(4, segments, dilations, true), 2, 150, 24);
  const test::Inputs inputs = test::random_inputs(problem, 11);
  for (const Schedule schedule : {Schedule::ring, Schedule::gather}) {
    RingOptions options = test::ring_options(problem, Placement::zigzag(150, 3));
    options.schedule = schedule;
    options.threads = 1;
    const auto ends = run_processes(3, [&](SocketTransport& control) {
      // Here, because a forked process has none of its parent's threads.
      const test::Results expected = test::run_ring(options, inputs);
      const test::LateBackends late(true);
      RingAttention ring(options, control);
      require(ring.transfers() == "shared device memory", ring.transfers());
      for (int turn = 0; turn < 3; ++turn) {
        test::Shard shard(options, control.rank());
        shard.load(inputs);
        shard.forward(ring);
        shard.backward(ring);
        test::Results found = expected;
        shard.collect(found);
        require(test::first_difference(found, expected).empty(),
                test::first_difference(found, expected));
      }
    });
    EXPECT_EQ(ends, (std::vector<int>{0, 0, 0}));
  }
}

// Rank 1 has posted what its device never gets to, and dies.
TEST(SharedDevice, QueuesDoNotWaitForAProcessThatWasKilled) {
  const auto ends = run_processes(2, [](SocketTransport& control) {
    const auto shared = connect(control);
    const auto sharing = test::make_late_sharing();
    const auto queue = test::make_late_queue();
    const Memory memory = sharing->allocate(1000, "rows");
    const Region region = shared->expose(memory.span(), Device{}, test::make_late_queue());
    const bool dies = control.rank() == 1;
    const Message message{dies ? Way::send : Way::receive, 1 - control.rank(), 3, &region, 0, 1000};
    const auto ticket = shared->post(std::span(&message, 1),
                                     dies ? Event(std::make_shared<test::Gate>()) : Event());
    ticket->wait(*queue);
    if (dies) kill(getpid(), SIGKILL);
    queue->record().wait();
    const Health health = shared->health();
    require(!health.alive && health.lost_rank == 1, "health: " + health.reason);
    require(health.reason.find("has ended") != std::string::npos, health.reason);
    try {
      shared->check();
    } catch (const TransportError& error) {
      require(error.rank() == 1, error.what());
      return;
    }
    require(false, "nobody misses rank 1");
  });
  EXPECT_EQ(ends, (std::vector<int>{0, kKilled}));
}

TEST(SharedDevice, HostsDoNotWaitForAProcessThatWasKilled) {
  const auto ends = run_processes(3, [](SocketTransport& control) {
    const auto shared = connect(control);
    const auto sharing = test::make_late_sharing();
    const Memory memory = sharing->allocate(1000, "rows");
    const Region region = shared->expose(memory.span(), Device{}, test::make_late_queue());
    if (control.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(50));
      kill(getpid(), SIGKILL);
    }
    const Message message{control.rank() == 0 ? Way::receive : Way::send, 1, 3, &region, 0, 1000};
    const TransportError error =
        test::transport_error([&] { shared->post(std::span(&message, 1), Event())->wait(); });
    require(error.rank() == 1, error.what());
    require(std::string(error.what()).find("timed out") == std::string::npos, error.what());
  });
  EXPECT_EQ(ends, (std::vector<int>{0, kKilled, 0}));
}

// Rank 0 has begun to copy from rank 2, which dies before its device gets to it. A host that waits
// for rank 1's message, next in the same queue, waits for that of rank 2, too.
TEST(SharedDevice, HostsDoNotWaitForEarlierMessagesOfAProcessThatWasKilled) {
  // Beside the ring, the processes see whether rank 0 has taken rank 2's message.
  auto* const taken = static_cast<std::atomic<bool>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(taken, MAP_FAILED);
  const auto ends = run_processes(3, [taken](SocketTransport& control) {
    const auto shared = connect(control);
    const Memory memory = test::make_late_sharing()->allocate(2000, "rows");
    const Region region = shared->expose(memory.span(), Device{}, test::make_late_queue());
    const auto send = [&](const Event& after) {
      const Message message{Way::send, 0, 3, &region, 0, 1000};
      return shared->post(std::span(&message, 1), after);
    };
    if (control.rank() == 2) {
      const auto ticket = send(Event(std::make_shared<test::Gate>()));
      const auto queue = test::make_late_queue();
      try {
        ticket->wait(*queue);  // until rank 0 has taken it
        *taken = true;
        std::this_thread::sleep_for(
            milliseconds(200));                // so that rank 0 waits already, or it soon will
      } catch (const std::exception& error) {  // nothing may wait for the gate, which stays shut
        std::fprintf(stderr, "rank 2: %s\n", error.what());
        _exit(1);
      }
      kill(getpid(), SIGKILL);
    }
    if (control.rank() == 1) {
      // Later than rank 2: messages are copied in the order in which they are taken.
      require(test::comes_true([&] { return taken->load(); }), "rank 2's message is never taken");
      try {
        send(Event())->wait();
      } catch (const TransportError&) {  // the ring has ended before it was copied
      }
      return;
    }
    const Message first{Way::receive, 2, 3, &region, 0, 1000};
    const Message second{Way::receive, 1, 3, &region, 1000, 1000};
    const auto not_waited_for = shared->post(std::span(&first, 1), Event());
    const auto waited_for = shared->post(std::span(&second, 1), Event());
    waited_for->wait();
    require(!shared->health().alive, "nobody misses rank 2");
  });
  munmap(taken, 4096);
  EXPECT_EQ(ends, (std::vector<int>{0, 0, kKilled}));
}

// What fails in the middle of a pass is told to all ranks, by the message that it happened to.
TEST(SharedDevice, MemoryThatCannotBeOpenedEndsTheRing) {
  class Blind final : public OtherSharing {
   public:
    [[nodiscard]] std::shared_ptr<std::byte> open(const SharedHandle& handle) override {
      if (opened_++ > 0) throw DeviceError("no more memory can be opened");
      return OtherSharing::open(handle);  // while ranks find each other
    }

   private:
    int opened_ = 0;
  };
  run_in_process(2, [](Transport& control) {
    std::string why;
    const auto sharing = std::make_shared<Blind>();
    const auto shared = share_device_memory(control, sharing, why);
    ASSERT_NE(shared, nullptr) << why;
    const Memory memory = sharing->allocate(1000, "rows");
    const Region region = shared->expose(memory.span(), Device{}, sharing->make_queue());
    const Message message{
        control.rank() == 0 ? Way::receive : Way::send, 1 - control.rank(), 3, &region, 0, 1000};
    const TransportError error =
        test::transport_error([&] { shared->post(std::span(&message, 1), Event())->wait(); });
    EXPECT_EQ(error.rank(), 0);
    EXPECT_NE(std::string(error.what()).find("no more memory can be opened"), std::string::npos)
        << error.what();
  });
}

// One rank cannot: all of them hear why, and nothing is broken.
TEST(SharedDevice, OneRankThatCannotShareIsToldToAll) {
  class Unable final : public OtherSharing {
   public:
    [[nodiscard]] std::string complaint() const override { return "no such thing here"; }
  };
  run_in_process(3, [](Transport& control) {
    std::string why;
    std::shared_ptr<DeviceSharing> sharing = test::make_late_sharing();
    if (control.rank() == 2) sharing = std::make_shared<Unable>();
    EXPECT_EQ(share_device_memory(control, sharing, why), nullptr);
    EXPECT_EQ(why, "rank 2: no such thing here");
    if (control.rank() == 1) sharing = nullptr;
    EXPECT_EQ(share_device_memory(control, sharing, why), nullptr);
    EXPECT_EQ(why, "rank 1: there is no way to share memory of its device");
    EXPECT_TRUE(check_ring(control).forward_ok);
  });
}

// Some devices map words and cannot wait for them: that is found out before there is a pass.
TEST(SharedDevice, WordsAreTriedBeforeTheyAreNeeded) {
  class Mute final : public SharedWords {
   public:
    void wait(Queue&, std::size_t, std::uint32_t) override {
      throw DeviceError("queues cannot wait for words");
    }
    void write(Queue&, std::size_t, std::uint32_t) override {}
  };
  class Unable final : public OtherSharing {
   public:
    [[nodiscard]] std::unique_ptr<SharedWords> adopt(std::span<std::byte>) override {
      return std::make_unique<Mute>();
    }
  };
  run_in_process(2, [](Transport& control) {
    std::string why;
    std::shared_ptr<DeviceSharing> sharing = test::make_late_sharing();
    if (control.rank() == 1) sharing = std::make_shared<Unable>();
    EXPECT_EQ(share_device_memory(control, sharing, why), nullptr);
    EXPECT_EQ(why, "rank 1: queues cannot wait for words");
  });
}

}  // namespace
}  // namespace annulus
