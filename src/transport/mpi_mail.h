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

// Packets between the ranks of a ring, sent by MPI's nonblocking calls from buffers of their own.
// MPI cannot cancel a send, nor a receive that has begun: its memory must stay valid until the
// operation ends, which never happens if the other rank has stopped. So MPI never gets the caller's
// memory. The price is two copies of every byte, about 25 us each per packet. This is small: for
// each packet of fp32 keys and values (head dim 64), 8,192 queries compute 1 GFLOP, which takes a
// core 10 ms.
//
// Notes are small, and those from one rank to another arrive in the order in which they were sent.
// Data arrive in any order.
namespace annulus::mpi {

enum class Kind : std::uint32_t {
  ready,     // a receive was posted: id, tag, bytes in value
  retract,   // it was cancelled: id
  mismatch,  // its send has `value` bytes: id
  broken,   // a message between the two ranks was lost because of rank `value`; the text says which
  waits,    // the sender has waited for rank `value` for half of its deadline
  goes_on,  // what the sender waited for has come
  abort,    // the sender aborts because of rank `value`; the text says why
  leave,    // the sender posts nothing after `value` packets of data
  asks,     // asks for a sign of life
  answers,  // the sign of life
  data,     // the bytes from `value` on of the receive `id`
};

struct Header {
  Kind kind = Kind::data;
  std::int32_t source = 0;
  std::uint64_t id = 0;
  std::uint64_t value = 0;
  std::uint32_t tag = 0;
  std::uint32_t unused = 0;
};

// Large enough to hide the latency of a packet; small enough that eight buffers for each direction
// are cheap (4 MiB in all).
inline constexpr std::size_t kPacketBytes = 256 * 1024;

class Mail {
 public:
  class Reader {
   public:
    virtual ~Reader() = default;
    virtual void on_note(const Header& header, std::string_view text) = 0;
    virtual void on_data(const Header& header, std::span<const std::byte> bytes) = 0;
    virtual void on_sent(void* owner) = 0;  // MPI has finished one packet of this owner
  };

  Mail(std::shared_ptr<Communicator> communicator, int rank);
  ~Mail();
  Mail(const Mail&) = delete;
  Mail& operator=(const Mail&) = delete;

  // Throws TransportErrors, which name the peer if MPI does.
  void send_note(int peer, Header header, std::string_view text = {});
  [[nodiscard]] bool has_room(int peer) const;
  void send_data(int peer, Header header, std::span<const std::byte> bytes, void* owner);
  void forget(void* owner);  // stops calls of on_sent for it

  // Handles arrived packets and frees finished ones. True: there were some.
  bool poll(Reader& reader);
  [[nodiscard]] bool idle() const { return notes_.empty() && free_slots_ == kSlots; }
  // Ends all receives. Unfinished sends stay with MPI, and so does their memory.
  void close();

 private:
  static constexpr int kSlots = 8;
  // A rank that does not take its packets must leave slots to the others.
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

  // One receive of notes at a time keeps them in order. MPI stores the few that arrive meanwhile.
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
