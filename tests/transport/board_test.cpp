#include "transport/board.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <system_error>

namespace annulus::shared_device {
namespace {

// Two ranks of this process have the board of one of them, and so has another process: when the
// other rank leaves, the process has not ended.
TEST(Board, OwnerRunsUntilItsProcessEnds) {
  int ready[2];
  int done[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(done), 0);
  std::fflush(stdout);
  const pid_t owner = fork();
  if (owner == 0) {
    const auto own = Board::create(2);
    { const auto other = Board::open(own->name(), 2); }
    char stop = 0;
    const auto length = static_cast<ssize_t>(own->name().size());
    if (write(ready[1], own->name().data(), own->name().size()) != length) _exit(1);
    if (read(done[0], &stop, 1) != 1) _exit(1);
    _exit(0);
  }
  char name[64] = {};
  ASSERT_GT(read(ready[0], name, sizeof(name) - 1), 0);
  const auto board = Board::open(name, 2);
  EXPECT_TRUE(board->owner_runs());
  ASSERT_EQ(write(done[1], "x", 1), 1);
  ASSERT_EQ(waitpid(owner, nullptr, 0), owner);
  EXPECT_FALSE(board->owner_runs());
  shm_unlink(name);
}

// A page that is not there ends the process when it is touched, and is nobody's exception.
TEST(Board, HasItsMemoryFromTheBeginning) {
  const auto board = Board::create(8);
  struct stat found {};
  ASSERT_EQ(stat(("/dev/shm" + board->name()).c_str(), &found), 0);
  EXPECT_GE(found.st_blocks * 512, found.st_size);
}

TEST(Board, IsGoneWithThoseThatHaveIt) {
  auto own = Board::create(2);
  const auto other = Board::open(own->name(), 2);
  EXPECT_THROW((void)Board::open(own->name(), 3), std::system_error);
  own->forget_name();
  EXPECT_THROW((void)Board::open(own->name(), 2), std::system_error);
  own->word(5) = 7;
  EXPECT_EQ(other->word(5), 7U);
  own->abort(1, "no more");
  own->abort(0, "too late");
  EXPECT_EQ(other->state(), BoardState::aborted);
  EXPECT_EQ(other->why().culprit, 1);
  EXPECT_EQ(other->why().reason, "no more");
  own.reset();
  EXPECT_EQ(other->word(5), 7U) << "memory is gone before those who use it";
}

}  // namespace
}  // namespace annulus::shared_device
