#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/transport.h"

namespace annulus::test {

// A small transport between processes, for a few small messages in host memory. Every pair of ranks
// has a pair of sockets, made before the processes are forked.
class SocketTransport final : public Transport {
 public:
  // sockets[p] is this rank's end towards rank p.
  SocketTransport(int rank, std::vector<int> sockets)
      : rank_(rank), sockets_(std::move(sockets)), frames_(sockets_.size()) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return static_cast<int>(sockets_.size()); }
  [[nodiscard]] std::string name() const override { return "sockets"; }
  [[nodiscard]] bool reaches(const Device&) const override { return false; }

  [[nodiscard]] std::unique_ptr<Ticket> post(std::span<const Message> messages,
                                             const Event& after) override {
    after.wait();
    auto ticket = std::make_unique<Receives>(*this);
    for (const Message& message : messages) {
      if (message.way == Way::receive) {
        ticket->list.push_back(
            {message.peer, message.tag, message.data(), static_cast<std::size_t>(message.bytes)});
        continue;
      }
      const Header header{message.tag, static_cast<std::uint32_t>(message.bytes)};
      write_all(message.peer, &header, sizeof(header));
      write_all(message.peer, message.data(), header.bytes);
      ++counters_.messages_sent;
      counters_.bytes_sent += header.bytes;
    }
    return ticket;
  }

  void abort(const std::string&) noexcept override {
    alive_ = false;
    for (const int socket : sockets_) static_cast<void>(shutdown(socket, SHUT_RDWR));
  }
  [[nodiscard]] Health health() const override {
    return alive_ ? Health{} : Health{false, -1, "the sockets are closed"};
  }
  void set_deadline(std::chrono::milliseconds deadline) override { deadline_ = deadline; }
  [[nodiscard]] std::chrono::milliseconds deadline() const override { return deadline_; }
  [[nodiscard]] TransportCounters counters() const override { return counters_; }
  void count(const TransportCounters& moved) override {
    counters_.messages_sent += moved.messages_sent;
    counters_.bytes_sent += moved.bytes_sent;
  }

 private:
  struct Header {
    std::uint32_t tag;
    std::uint32_t bytes;
  };
  struct Frame {
    std::uint32_t tag = 0;
    std::vector<std::byte> bytes;
  };
  struct Receives final : Ticket {
    struct One {
      int peer;
      std::uint32_t tag;
      std::byte* data;
      std::size_t bytes;
    };
    explicit Receives(SocketTransport& of) : transport(of) {}
    void wait() override {
      for (const One& one : list) transport.receive_one(one);
      list.clear();
    }
    SocketTransport& transport;
    std::vector<One> list;
  };

  void receive_one(const Receives::One& one) {
    std::deque<Frame>& frames = frames_[static_cast<std::size_t>(one.peer)];
    for (;;) {
      for (auto frame = frames.begin(); frame != frames.end(); ++frame) {
        if (frame->tag != one.tag) continue;
        if (frame->bytes.size() != one.bytes) lost(one.peer, "a message of another size");
        std::memcpy(one.data, frame->bytes.data(), one.bytes);
        frames.erase(frame);
        return;
      }
      Header header{};
      read_all(one.peer, &header, sizeof(header));
      Frame frame{header.tag, std::vector<std::byte>(header.bytes)};
      read_all(one.peer, frame.bytes.data(), header.bytes);
      frames.push_back(std::move(frame));
    }
  }
  [[noreturn]] void lost(int peer, const char* why) {
    throw TransportError("sockets: rank " + std::to_string(peer) + ": " + why, peer);
  }
  void write_all(int peer, const void* data, std::size_t bytes) {
    const int socket = sockets_[static_cast<std::size_t>(peer)];
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t n =
          ::send(socket, static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL);
      if (n <= 0) lost(peer, "cannot be written to");
      done += static_cast<std::size_t>(n);
    }
  }
  void read_all(int peer, void* data, std::size_t bytes) {
    const int socket = sockets_[static_cast<std::size_t>(peer)];
    for (std::size_t done = 0; done < bytes;) {
      pollfd ready{socket, POLLIN, 0};
      if (poll(&ready, 1, static_cast<int>(deadline_.count())) != 1) lost(peer, "timed out");
      const ssize_t n = ::recv(socket, static_cast<char*>(data) + done, bytes - done, 0);
      if (n <= 0) lost(peer, "has closed its end");
      done += static_cast<std::size_t>(n);
    }
  }

  int rank_;
  std::vector<int> sockets_;
  std::vector<std::deque<Frame>> frames_;
  std::chrono::milliseconds deadline_{20'000};
  TransportCounters counters_;
  std::atomic<bool> alive_{true};
};

}  // namespace annulus::test
