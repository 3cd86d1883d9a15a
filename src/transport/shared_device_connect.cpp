#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "transport/shared_device_ring.h"

// Connects the ranks of a ring of processes, and finds out whether they can share memory by trying
// it.
namespace annulus::shared_device {
namespace {

constexpr std::uint32_t kTag = 0x53484152;  // "SHAR": of records on the control

// The first message between two ranks.
struct Introduction {
  std::array<char, 64> board{};
  SharedHandle handle;  // memory that holds the name of the board
  std::array<char, 400> complaint{};
};
struct Verdict {
  std::array<char, 400> complaint{};
};

template <std::size_t kSize>
void set(std::array<char, kSize>& to, const std::string& text) {
  std::memcpy(to.data(), text.data(), std::min(text.size(), kSize - 1));
}

template <typename Record>
std::vector<Record> exchange(Transport& control, Record& mine) {
  std::vector<Record> all(static_cast<std::size_t>(control.size()));
  const Region from(std::as_writable_bytes(std::span(&mine, 1)));
  std::vector<Region> to;
  for (Record& record : all) to.emplace_back(std::as_writable_bytes(std::span(&record, 1)));
  std::vector<Message> batch;
  for (int peer = 0; peer < control.size(); ++peer) {
    if (peer == control.rank()) continue;
    batch.push_back({Way::receive, peer, kTag, &to[static_cast<std::size_t>(peer)], 0,
                     static_cast<std::int64_t>(sizeof(Record))});
    batch.push_back({Way::send, peer, kTag, &from, 0, static_cast<std::int64_t>(sizeof(Record))});
  }
  control.post(batch, Event())->wait();
  all[static_cast<std::size_t>(control.rank())] = mine;
  return all;
}

template <typename Record>
std::string first_complaint(const std::vector<Record>& records) {
  for (std::size_t rank = 0; rank < records.size(); ++rank) {
    if (records[rank].complaint[0] != '\0')
      return "rank " + std::to_string(rank) + ": " + records[rank].complaint.data();
  }
  return "";
}

}  // namespace

std::string Ring::connect() {
  Introduction mine;
  Memory proof;
  std::string text;
  try {
    text = sharing_ == nullptr ? "there is no way to share memory of its device"
                               : sharing_->complaint();
    if (text.empty()) {
      auto own = Board::create(size_);
      signals_ = sharing_->make_queue();
      proof = sharing_->allocate(sizeof(mine.board), "a proof that memory is shared");
      set(mine.board, own->name());
      signals_->copy(proof.data(), reinterpret_cast<const std::byte*>(mine.board.data()),
                     sizeof(mine.board));
      signals_->record().wait();
      mine.handle = sharing_->share(proof.data());
      boards_[static_cast<std::size_t>(rank_)] = std::move(own);
    }
  } catch (const std::exception& error) {
    text = error.what();
  }
  set(mine.complaint, text);
  const std::vector<Introduction> all = exchange(control_, mine);
  text = first_complaint(all);
  if (!text.empty()) return text;

  Verdict verdict;
  try {
    for (int peer = 0; peer < size_; ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      if (peer != rank_) {
        boards_[p] = Board::open(all[p].board.data(), size_);
        const std::shared_ptr<std::byte> theirs = sharing_->open(all[p].handle);
        std::array<char, 64> found{};
        signals_->copy(reinterpret_cast<std::byte*>(found.data()),
                       theirs.get() + all[p].handle.offset, sizeof(found));
        signals_->record().wait();
        if (found != all[p].board)
          throw TransportError("memory of rank " + std::to_string(peer) + " holds something else",
                               peer);
      }
      words_[p] = sharing_->adopt(boards_[p]->words());
    }
    // The word that this rank would use for messages to itself: unused otherwise, and its value is
    // 0.
    const std::size_t word = Board::ready_word(rank_, 0);
    words(rank_).write(*signals_, word, 0);
    words(rank_).wait(*signals_, word, 0);
    signals_->record().wait();
  } catch (const std::exception& error) {
    set(verdict.complaint, error.what());
  }
  text = first_complaint(exchange(control_, verdict));
  board(rank_).forget_name();  // all ranks have opened it
  return text;
}

}  // namespace annulus::shared_device
