#include "transport/board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <random>
#include <system_error>
#include <type_traits>
#include <utility>

namespace annulus::shared_device {
namespace {

constexpr std::size_t kPage = 4096;  // words start at one, so that a device can lock them alone

std::size_t up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::size_t words_bytes(int ranks) {
  return up(static_cast<std::size_t>(ranks) * kSlots * 2 * sizeof(std::uint32_t), kPage);
}

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

static_assert(std::is_trivially_copyable_v<Note> && sizeof(Note) % 8 == 0);

void NotePlace::store(const Note& note) {
  std::array<std::uint64_t, sizeof(Note) / 8> words;
  std::memcpy(words.data(), &note, sizeof(note));
  for (std::size_t i = 0; i < words.size(); ++i)
    words_[i].store(words[i], std::memory_order_relaxed);
}

Note NotePlace::load() const {
  std::array<std::uint64_t, sizeof(Note) / 8> words;
  for (std::size_t i = 0; i < words.size(); ++i)
    words[i] = words_[i].load(std::memory_order_relaxed);
  Note note;
  std::memcpy(static_cast<void*>(&note), words.data(), sizeof(note));
  return note;
}

struct Board::Header {
  std::atomic<std::uint32_t> state{0};  // BoardState
  std::int64_t process = 0;
  std::int32_t culprit = -1;
  std::array<char, 1024> reason{};
};

std::unique_ptr<Board> Board::create(int ranks) {
  std::random_device random;
  std::string name = "/annulus-";
  for (int i = 0; i < 24; ++i) name += "0123456789abcdef"[random() % 16];
  const int file = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) fail("making shared memory " + name);
  return std::unique_ptr<Board>(new Board(std::move(name), ranks, file, true));
}

std::unique_ptr<Board> Board::open(const std::string& name, int ranks) {
  const int file = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (file < 0) fail("opening shared memory " + name);
  return std::unique_ptr<Board>(new Board(name, ranks, file, false));
}

Board::Board(std::string name, int ranks, int file, bool own)
    : name_(std::move(name)), ranks_(ranks), file_(file), own_(own), named_(own) {
  static_assert(sizeof(Header) <= kPage);
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
  bytes_ = up(kPage + words_bytes(ranks) + static_cast<std::size_t>(ranks) * sizeof(Inbox), kPage);
  struct stat found {};
  const bool fits =
      own ? ftruncate(file_, static_cast<off_t>(bytes_)) == 0
          : fstat(file_, &found) == 0 && static_cast<std::size_t>(found.st_size) == bytes_;
  void* mapped =
      fits ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0) : MAP_FAILED;
  if (mapped == MAP_FAILED) {
    const int error = errno;
    if (own) shm_unlink(name_.c_str());
    close(file_);
    errno = error;
    fail("mapping shared memory " + name_);
  }
  memory_ = static_cast<std::byte*>(mapped);
  if (!own) return;
  // New pages are zeros, which is what all of it starts as; formally, objects begin here.
  new (memory_) Header;
  header().process = getpid();
  // Goes with the process, however that ends, and is not its children's.
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  static_cast<void>(fcntl(file_, F_SETLK, &lock));
}

Board::~Board() {
  forget_name();
  munmap(memory_, bytes_);
  close(file_);
}

void Board::forget_name() {
  if (std::exchange(named_, false)) shm_unlink(name_.c_str());
}

Board::Header& Board::header() const { return *reinterpret_cast<Header*>(memory_); }

std::span<std::byte> Board::words() const { return {memory_ + kPage, words_bytes(ranks_)}; }

std::atomic<std::uint32_t>& Board::word(std::size_t index) const {
  return reinterpret_cast<std::atomic<std::uint32_t>*>(memory_ + kPage)[index];
}

void Board::release_words() {
  const std::size_t count = static_cast<std::size_t>(ranks_) * kSlots * 2;
  for (std::size_t i = 0; i < count; ++i) word(i).fetch_add(1U << 30, std::memory_order_release);
}

Inbox& Board::from(int rank) const {
  return reinterpret_cast<Inbox*>(memory_ + kPage + words_bytes(ranks_))[rank];
}

void Board::abort(int culprit, const std::string& reason) {
  auto expected = static_cast<std::uint32_t>(BoardState::open);
  if (!header().state.compare_exchange_strong(expected,
                                              static_cast<std::uint32_t>(BoardState::aborting)))
    return;
  header().culprit = culprit;
  std::memcpy(header().reason.data(), reason.data(),
              std::min(reason.size(), header().reason.size() - 1));
  header().state.store(static_cast<std::uint32_t>(BoardState::aborted), std::memory_order_release);
}

void Board::leave() {
  auto expected = static_cast<std::uint32_t>(BoardState::open);
  header().state.compare_exchange_strong(expected, static_cast<std::uint32_t>(BoardState::left));
}

BoardState Board::state() const {
  return static_cast<BoardState>(header().state.load(std::memory_order_acquire));
}

Board::Abort Board::why() const { return {header().culprit, header().reason.data()}; }

bool Board::owner_runs() const {
  if (own_ || header().process == getpid()) return true;  // ranks of one process
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return fcntl(file_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace annulus::shared_device
