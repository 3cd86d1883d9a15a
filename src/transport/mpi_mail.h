#pragma once

#include <mpi.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "transport/mpi_session.h"

// Packets between the ranks of a ring, by MPI's nonblocking calls, from and into memory of their
// own. MPI cannot call off a send, nor a receive that has begun: what it is given must stay until
// it is through, which it never is with a rank that has stopped. So the caller's memory is never
// given to it. The price is two copies of every byte, some 25 us each for a packet. 8,192 queries
// make a GFLOP of a packet of fp32 keys and values (head dim 64): 10 ms of a core, 200 times that.
//
// Notes are small and arrive in the order in which one rank sent them to another; data arrive in
// any order.
namespace annulus::mpi {

enum class Kind : std::uint32_t {
  ready,     // a receive was posted: id, tag, bytes in value
  retract,   // ... and called off: id
  mismatch,  // its send has `value` bytes: id
  broken,   // a message between the two ranks was lost because of rank `value`; the text says which
  waits,    // for rank `value`, and has for half of its deadline
  goes_on,  // what was waited for has come
  abort,    // by the rank that sends it because of rank `value`; the text says why
  leave,    // nothing comes after `value` packets of data
  asks,     // whether the other process is there
  answers,  // it is
  data,     // bytes from `value` on of the receive `id`
};

struct Header {
  Kind kind = Kind::data;
  std::int32_t source = 0;
  std::uint64_t id = 0;
  std::uint64_t value = 0;
  std::uint32_t tag = 0;
  std::uint32_t unused = 0;
};

// Long enough that the latency of a packet does not matter, short enough that eight of them each
// way are no burden (4 MiB in all).
inline constexpr std::size_t kPacketBytes = 256 * 1024;

class Mail {
 public:
  class Reader {
   public:
    virtual ~Reader() = default;
    virtual void on_note(const Header& header, std::string_view text) = 0;
    virtual void on_data(const Header& header, std::span<const std::byte> bytes) = 0;
    virtual void on_sent(void* owner) = 0;  // MPI is through with one packet of this owner
  };

  Mail(std::shared_ptr<Communicator> communicator, int rank);
  ~Mail();
  Mail(const Mail&) = delete;
  Mail& operator=(const Mail&) = delete;

  // TransportErrors name the peer where MPI does.
  void send_note(int peer, Header header, std::string_view text = {});
  [[nodiscard]] bool has_room(int peer) const;
  void send_data(int peer, Header header, std::span<const std::byte> bytes, void* owner);
  void forget(void* owner);  // on_sent is not called for it any more

  // Takes in what has arrived and clears away what has been sent. True: there was something.
  bool poll(Reader& reader);
  [[nodiscard]] bool idle() const { return notes_.empty() && free_slots_ == kSlots; }
  // Receives nothing more. What MPI has not finished sending is left to it, memory included.
  void close();

 private:
  static constexpr int kSlots = 8;
  // A rank that does not take its packets must not keep all slots from the others.
  static constexpr int kSlotsPerPeer = 4;
  static constexpr std::size_t kTextBytes = 1000;
  static constexpr std::size_t kSlotBytes = sizeof(Header) + kPacketBytes;

  struct Note {
    std::vector<std::byte> bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  using Slot = std::unique_ptr<std::byte[]>;

  void receive_note();
  void receive_data(std::size_t slot);
  bool poll_notes(Reader& reader);
  bool poll_data(Reader& reader);
  bool poll_sends(Reader& reader);

  std::shared_ptr<Communicator> communicator_;
  const int rank_;
  bool closed_ = false;

  // One receive of notes at a time keeps their order; MPI stores the few that come meanwhile.
  std::vector<std::byte> note_;
  MPI_Request note_request_ = MPI_REQUEST_NULL;
  std::array<Slot, kSlots> in_;
  std::array<MPI_Request, kSlots> in_requests_{};

  std::deque<Note> notes_;
  std::array<Slot, kSlots> out_;
  std::array<MPI_Request, kSlots> out_requests_{};
  std::array<void*, kSlots> owners_{};
  std::array<int, kSlots> peers_{};
  std::vector<int> slots_of_peer_;
  int free_slots_ = kSlots;
};

}  // namespace annulus::mpi
