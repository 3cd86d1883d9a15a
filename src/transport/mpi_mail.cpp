#include "transport/mpi_mail.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "annulus/error.h"
#include "transport/rank_prefix.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace annulus::mpi {
namespace {

constexpr int kNotes = 0;
constexpr int kData = 1;

void check(int code, const char* call, int peer = -1) {
  if (code == MPI_SUCCESS) return;
  throw TransportError(std::string(call) +
                           (peer >= 0 ? " with rank " + std::to_string(peer) : std::string()) +
                           " failed: " + error_text(code),
                       peer);
}

// Orders a send before its receive, also between ranks of one process. MPI guarantees this, but
// ThreadSanitizer cannot see it.
#if defined(__SANITIZE_THREAD__)
char order;
void before_sending() { __tsan_release(&order); }
void after_receiving() { __tsan_acquire(&order); }
#else
void before_sending() {}
void after_receiving() {}
#endif

Header header_of(const std::byte* packet) {
  Header header;
  std::memcpy(&header, packet, sizeof(header));
  return header;
}

// The bytes of a packet after its header. A failed request has neither.
std::size_t text_bytes(const MPI_Status& status) {
  int bytes = 0;
  check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
  if (bytes < static_cast<int>(sizeof(Header))) {
    throw TransportError("MPI gave a packet of " + std::to_string(bytes) + " bytes");
  }
  return static_cast<std::size_t>(bytes) - sizeof(Header);
}

}  // namespace

Mail::Mail(std::shared_ptr<Communicator> communicator, int rank)
    : communicator_(std::move(communicator)),
      rank_(rank),
      note_(sizeof(Header) + kTextBytes),
      slots_of_peer_(static_cast<std::size_t>(communicator_->size())) {
  in_requests_.fill(MPI_REQUEST_NULL);
  out_requests_.fill(MPI_REQUEST_NULL);
  for (Slot& slot : in_) slot = std::make_unique_for_overwrite<std::byte[]>(kSlotBytes);
  try {
    receive_note();
    for (std::size_t slot = 0; slot < in_.size(); ++slot) receive_data(slot);
  } catch (...) {
    close();  // MPI holds some of the memory, and no destructor will run
    throw;
  }
}

Mail::~Mail() { close(); }

void Mail::receive_note() {
  check(MPI_Irecv(note_.data(), static_cast<int>(note_.size()), MPI_BYTE, MPI_ANY_SOURCE,
                  communicator_->tag(rank_, kNotes), communicator_->handle(), &note_request_),
        "MPI_Irecv");
}

void Mail::receive_data(std::size_t slot) {
  check(MPI_Irecv(in_[slot].get(), static_cast<int>(kSlotBytes), MPI_BYTE, MPI_ANY_SOURCE,
                  communicator_->tag(rank_, kData), communicator_->handle(), &in_requests_[slot]),
        "MPI_Irecv");
}

void Mail::send_note(int peer, Header header, std::string_view text) {
  if (closed_) return;
  header.source = rank_;
  text = text.substr(0, kTextBytes);
  Note& note = notes_.emplace_back();
  note.bytes.resize(sizeof(header) + text.size());
  std::memcpy(note.bytes.data(), &header, sizeof(header));
  if (!text.empty()) std::memcpy(note.bytes.data() + sizeof(header), text.data(), text.size());
  before_sending();
  check(MPI_Isend(note.bytes.data(), static_cast<int>(note.bytes.size()), MPI_BYTE,
                  communicator_->process(peer), communicator_->tag(peer, kNotes),
                  communicator_->handle(), &note.request),
        "MPI_Isend", peer);
}

bool Mail::has_room(int peer) const {
  return !closed_ && free_slots_ > 0 &&
         slots_of_peer_[static_cast<std::size_t>(peer)] < kSlotsPerPeer;
}

void Mail::send_data(int peer, Header header, std::span<const std::byte> bytes, void* owner) {
  header.source = rank_;
  std::size_t slot = 0;
  while (out_requests_[slot] != MPI_REQUEST_NULL) ++slot;
  if (out_[slot] == nullptr) out_[slot] = std::make_unique_for_overwrite<std::byte[]>(kSlotBytes);
  std::memcpy(out_[slot].get(), &header, sizeof(header));
  if (!bytes.empty()) std::memcpy(out_[slot].get() + sizeof(header), bytes.data(), bytes.size());
  before_sending();
  check(MPI_Isend(out_[slot].get(), static_cast<int>(sizeof(header) + bytes.size()), MPI_BYTE,
                  communicator_->process(peer), communicator_->tag(peer, kData),
                  communicator_->handle(), &out_requests_[slot]),
        "MPI_Isend", peer);
  owners_[slot] = owner;
  peers_[slot] = peer;
  ++slots_of_peer_[static_cast<std::size_t>(peer)];
  --free_slots_;
}

void Mail::forget(void* owner) { std::replace(owners_.begin(), owners_.end(), owner, {}); }

bool Mail::poll(Reader& reader) {
  if (closed_) return false;
  // Notes first: they announce the receives that data belong to, never the other way round.
  const bool read = poll_notes(reader);
  const bool received = poll_data(reader);
  const bool sent = poll_sends(reader);
  return read || received || sent;
}

bool Mail::poll_notes(Reader& reader) {
  bool any = false;
  for (;;) {
    int arrived = 0;
    MPI_Status status;
    check(MPI_Test(&note_request_, &arrived, &status), "MPI_Test");
    if (arrived == 0) return any;
    after_receiving();
    any = true;
    const std::size_t bytes = text_bytes(status);
    const std::string text(reinterpret_cast<const char*>(note_.data()) + sizeof(Header), bytes);
    const Header header = header_of(note_.data());
    receive_note();
    reader.on_note(header, text);
  }
}

bool Mail::poll_data(Reader& reader) {
  int count = 0;
  std::array<int, kSlots> done{};
  std::array<MPI_Status, kSlots> statuses;
  check(MPI_Testsome(kSlots, in_requests_.data(), &count, done.data(), statuses.data()),
        "MPI_Testsome");
  if (count > 0) after_receiving();
  for (int i = 0; i < count; ++i) {
    const auto slot = static_cast<std::size_t>(done[static_cast<std::size_t>(i)]);
    const std::size_t bytes = text_bytes(statuses[static_cast<std::size_t>(i)]);
    const std::byte* packet = in_[slot].get();
    reader.on_data(header_of(packet), {packet + sizeof(Header), bytes});
    receive_data(slot);
  }
  return count > 0;
}

bool Mail::poll_sends(Reader& reader) {
  bool any = false;
  if (free_slots_ < kSlots) {
    int count = 0;
    std::array<int, kSlots> done{};
    check(MPI_Testsome(kSlots, out_requests_.data(), &count, done.data(), MPI_STATUSES_IGNORE),
          "MPI_Testsome");
    for (int i = 0; i < count; ++i) {
      const auto slot = static_cast<std::size_t>(done[static_cast<std::size_t>(i)]);
      --slots_of_peer_[static_cast<std::size_t>(peers_[slot])];
      ++free_slots_;
      if (void* owner = std::exchange(owners_[slot], nullptr)) reader.on_sent(owner);
    }
    any = count > 0;
  }
  for (Note& note : notes_) {
    int sent = 0;
    check(MPI_Test(&note.request, &sent, MPI_STATUS_IGNORE), "MPI_Test");
  }
  while (!notes_.empty() && notes_.front().request == MPI_REQUEST_NULL) notes_.pop_front();
  return any;
}

void Mail::close() {
  if (std::exchange(closed_, true)) return;
  const auto withdraw = [](MPI_Request& request) {
    if (request == MPI_REQUEST_NULL) return true;
    MPI_Cancel(&request);
    int over = 0;
    MPI_Test(&request, &over, MPI_STATUS_IGNORE);
    return over != 0;
  };
  bool all_over = withdraw(note_request_);
  // MPI may still write to a receive that has begun, and read sends that have not finished.
  if (!all_over) (void)new std::vector<std::byte>(std::move(note_));
  for (std::size_t slot = 0; slot < in_.size(); ++slot) {
    if (withdraw(in_requests_[slot])) continue;
    (void)in_[slot].release();
    all_over = false;
  }
  for (std::size_t slot = 0; slot < out_.size(); ++slot) {
    if (out_requests_[slot] == MPI_REQUEST_NULL) continue;
    (void)out_[slot].release();
    all_over = false;
  }
  for (Note& note : notes_) {
    if (note.request == MPI_REQUEST_NULL) continue;
    (void)new std::vector<std::byte>(std::move(note.bytes));
    all_over = false;
  }
  if (!all_over) communicator_->abandon();
  communicator_.reset();  // now and not with the last ticket, because MPI may be finalised by then
}

}  // namespace annulus::mpi
