#include "annulus/ring_check.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "annulus/error.h"

namespace annulus {
namespace {

// Any tag would do, because every rank makes the same calls. These are unlikely to collide with
// another user's messages.
constexpr std::uint32_t kForwardTag = 0x52494e46;   // "RINF"
constexpr std::uint32_t kBackwardTag = 0x52494e42;  // "RINB"

// Depends on the rank, the direction and the position, to detect blocks of another rank, of the
// other direction, shifted blocks and stale ones.
std::byte pattern_byte(int rank, std::uint32_t tag, std::size_t index) {
  std::uint64_t x =
      (static_cast<std::uint64_t>(static_cast<std::uint32_t>(rank)) << 32 | tag) + index;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;  // the mixing steps of splitmix64
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return static_cast<std::byte>((x ^ (x >> 31)) & 0xffU);
}

bool has_pattern(std::span<const std::byte> block, int rank, std::uint32_t tag) {
  for (std::size_t i = 0; i < block.size(); ++i) {
    if (block[i] != pattern_byte(rank, tag, i)) return false;
  }
  return true;
}

struct Pass {
  bool ok;
  std::string detail;
};

Pass pass_block(Transport& transport, int to, int from, std::uint32_t tag, std::size_t bytes) {
  try {
    std::vector<std::byte> out(bytes);
    for (std::size_t i = 0; i < bytes; ++i) out[i] = pattern_byte(transport.rank(), tag, i);
    // Initialised with the complement of the expected bytes, so that a transport that moves nothing
    // cannot pass.
    std::vector<std::byte> in(bytes);
    for (std::size_t i = 0; i < bytes; ++i) in[i] = ~pattern_byte(from, tag, i);

    const auto receive = transport.receive(from, tag, in);
    const auto send = transport.send(to, tag, out);
    receive->wait();
    send->wait();

    if (has_pattern(in, from, tag)) {
      return {true, std::to_string(bytes) + " bytes from rank " + std::to_string(from) + " ok"};
    }
    for (int rank = 0; rank < transport.size(); ++rank) {
      if (has_pattern(in, rank, tag)) {
        return {false, "got the block of rank " + std::to_string(rank) +
                           ", expected that of rank " + std::to_string(from)};
      }
    }
    std::size_t wrong = 0;
    while (in[wrong] == pattern_byte(from, tag, wrong)) ++wrong;
    return {false, "the block of rank " + std::to_string(from) + " is damaged: byte " +
                       std::to_string(wrong) + " of " + std::to_string(bytes) + " is " +
                       std::to_string(std::to_integer<int>(in[wrong])) + ", expected " +
                       std::to_string(std::to_integer<int>(pattern_byte(from, tag, wrong)))};
  } catch (const TransportError& error) {
    return {false, error.what()};
  }
}

}  // namespace

RingCheck check_ring(Transport& transport, std::size_t bytes) {
  const Transport::Use use(transport, "check_ring");
  const int next = (transport.rank() + 1) % transport.size();
  const int previous = (transport.rank() + transport.size() - 1) % transport.size();
  const Pass forward = pass_block(transport, next, previous, kForwardTag, bytes);
  const Pass backward = pass_block(transport, previous, next, kBackwardTag, bytes);
  return {.forward_ok = forward.ok,
          .backward_ok = backward.ok,
          .detail = "forward: " + forward.detail + "\nbackward: " + backward.detail};
}

}  // namespace annulus
