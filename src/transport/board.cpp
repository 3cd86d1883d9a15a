#include "transport/board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <system_error>
#include <type_traits>
#include <utility>

namespace annulus::shared_device {
namespace {

constexpr std::size_t kPage = 4096;  // words start on a page: a device can lock them alone

std::size_t up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::size_t words_bytes(int ranks) {
  return up(static_cast<std::size_t>(ranks) * kSlots * 2 * sizeof(std::uint32_t), kPage);
}

// The header, the words, and what every rank writes.
std::size_t board_bytes(int ranks) {
  return up(kPage + words_bytes(ranks) + static_cast<std::size_t>(ranks) * sizeof(Inbox), kPage);
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
  std::array<std::uint64_t, 2> process{};
  std::int32_t culprit = -1;
  std::array<char, 1024> reason{};
};

namespace {

// Identifies this process to all processes that map its boards. Process numbers are not unique:
// containers with different process namespaces can share /dev/shm.
std::array<std::uint64_t, 2> this_process() {
  static const std::uint64_t random = [] {
    std::random_device source;
    return std::uint64_t{source()} << 32 | source();
  }();
  return {random, static_cast<std::uint64_t>(getpid())};  // the random number survives fork()
}

}  // namespace

// This process's only mapping of a board, shared by all of its ranks. Each rank could map the
// board, but the file lock through which other processes see that this one lives ends when any of
// its descriptors of the file is closed: the first rank to leave would look like the death of all.
class Board::Mapping {
 public:
  // `own`: creates it. Throws std::system_error.
  Mapping(const std::string& name, std::size_t bytes, bool own) : bytes_(bytes) {
    const int flags = (own ? O_CREAT | O_EXCL : 0) | O_RDWR | O_CLOEXEC;
    file_ = shm_open(name.c_str(), flags, 0600);
    if (file_ < 0) fail((own ? "making shared memory " : "opening shared memory ") + name);
    struct stat found {};
    int error = 0;
    if (own) {
      // Not ftruncate: with that, a full /dev/shm would kill the process with a signal on first
      // use.
      error = posix_fallocate(file_, 0, static_cast<off_t>(bytes));
    } else if (fstat(file_, &found) != 0) {
      error = errno;
    } else if (static_cast<std::size_t>(found.st_size) != bytes) {
      error = EINVAL;  // belongs to a ring of another size
    }
    void* mapped = MAP_FAILED;
    if (error == 0) {
      mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
      if (mapped == MAP_FAILED) error = errno;
    }
    if (error != 0) {
      if (own) shm_unlink(name.c_str());
      close(file_);
      errno = error;
      fail("mapping shared memory " + name);
    }
    memory_ = static_cast<std::byte*>(mapped);
    if (!own) return;
    // New pages are zero, which is the initial value of everything here. Formally, objects begin
    // here.
    (new (memory_) Header)->process = this_process();
    // The kernel releases this lock when the process ends, however it ends. Forked children do not
    // inherit it.
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    static_cast<void>(fcntl(file_, F_SETLK, &lock));
  }
  ~Mapping() {
    munmap(memory_, bytes_);
    close(file_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  [[nodiscard]] std::byte* memory() const { return memory_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] int file() const { return file_; }

  // Mappings of this process whose boards still have their names.
  struct Named {
    std::mutex mutex;
    std::map<std::string, std::weak_ptr<Mapping>> all;
  };
  static Named& named() {
    static auto* named = new Named;  // boards may outlive static objects
    return *named;
  }

 private:
  std::size_t bytes_;
  int file_ = -1;
  std::byte* memory_ = nullptr;
};

std::unique_ptr<Board> Board::create(int ranks) {
  std::random_device random;
  std::string name = "/annulus-";
  for (int i = 0; i < 24; ++i) name += "0123456789abcdef"[random() % 16];
  auto mapping = std::make_shared<Mapping>(name, board_bytes(ranks), true);
  {
    const std::lock_guard lock(Mapping::named().mutex);
    Mapping::named().all[name] = mapping;
  }
  return std::unique_ptr<Board>(new Board(std::move(name), ranks, std::move(mapping), true));
}

std::unique_ptr<Board> Board::open(const std::string& name, int ranks) {
  std::shared_ptr<Mapping> mapping;
  {
    const std::lock_guard lock(Mapping::named().mutex);
    const auto found = Mapping::named().all.find(name);
    if (found != Mapping::named().all.end()) mapping = found->second.lock();
  }
  if (mapping == nullptr) {
    mapping = std::make_shared<Mapping>(name, board_bytes(ranks), false);
  } else if (mapping->bytes() != board_bytes(ranks)) {
    errno = EINVAL;
    fail("mapping shared memory " + name);
  }
  return std::unique_ptr<Board>(new Board(name, ranks, std::move(mapping), false));
}

Board::Board(std::string name, int ranks, std::shared_ptr<Mapping> mapping, bool own)
    : name_(std::move(name)), ranks_(ranks), mapping_(std::move(mapping)), named_(own) {
  static_assert(sizeof(Header) <= kPage);
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
}

Board::~Board() { forget_name(); }

void Board::forget_name() {
  if (!std::exchange(named_, false)) return;
  shm_unlink(name_.c_str());
  const std::lock_guard lock(Mapping::named().mutex);
  Mapping::named().all.erase(name_);
}

Board::Header& Board::header() const { return *reinterpret_cast<Header*>(memory()); }

std::byte* Board::memory() const { return mapping_->memory(); }

std::span<std::byte> Board::words() const { return {memory() + kPage, words_bytes(ranks_)}; }

std::atomic<std::uint32_t>& Board::word(std::size_t index) const {
  return reinterpret_cast<std::atomic<std::uint32_t>*>(memory() + kPage)[index];
}

void Board::release_words() {
  const std::size_t count = static_cast<std::size_t>(ranks_) * kSlots * 2;
  for (std::size_t i = 0; i < count; ++i) word(i).fetch_add(1U << 30, std::memory_order_release);
}

Inbox& Board::from(int rank) const {
  return reinterpret_cast<Inbox*>(memory() + kPage + words_bytes(ranks_))[rank];
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
  if (header().process == this_process()) return true;  // its own lock does not block it
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return fcntl(mapping_->file(), F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace annulus::shared_device
