// How the tool writes files: nothing is destroyed that is not replaced by something complete.

#include "cli/output_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"

namespace annulus::cli {
namespace {

namespace fs = std::filesystem;

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

class OutputFiles : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "annulus_output_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  [[nodiscard]] fs::path path(const std::string& name) const { return folder_ / name; }

  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
      found.push_back(entry.path().filename().string());
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  static OutputFile started(const fs::path& path, const std::string& text) {
    OutputFile file("picture", path);
    file.write(text);
    return file;
  }

  static std::string problem(const fs::path& path) {
    try {
      started(path, "new").commit();
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  }

  fs::path folder_;
};

TEST_F(OutputFiles, AppearAtCommitAndLeaveNothingElse) {
  write_text(path("a"), "old");
  {
    OutputFile file = started(path("a"), "new");
    EXPECT_EQ(read_text(path("a")), "old");
    file.commit();
  }
  EXPECT_EQ(read_text(path("a")), "new");
  { const OutputFile dropped = started(path("b"), "never"); }
  EXPECT_EQ(names(), (std::vector<std::string>{"a"}));
}

TEST_F(OutputFiles, KeepTheirPermissions) {
  write_text(path("secret"), "old");
  ASSERT_EQ(::chmod(path("secret").c_str(), 0600), 0);
  started(path("secret"), "new").commit();
  struct stat status {};
  ASSERT_EQ(::stat(path("secret").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0600U);
  EXPECT_EQ(read_text(path("secret")), "new");
}

TEST_F(OutputFiles, FollowLinks) {
  fs::create_directory(path("elsewhere"));
  write_text(path("elsewhere") / "real", "old");
  fs::create_symlink("elsewhere/real", path("one"));
  fs::create_symlink("one", path("two"));
  started(path("two"), "new").commit();
  EXPECT_TRUE(fs::is_symlink(path("one")) && fs::is_symlink(path("two")));
  EXPECT_EQ(read_text(path("elsewhere") / "real"), "new");
  EXPECT_EQ(names(), (std::vector<std::string>{"elsewhere", "one", "two"}));
}

TEST_F(OutputFiles, WriteThroughToPipesAndDevices) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  fs::create_symlink("pipe", path("link"));
  // For reading and writing: such a pipe needs no second program, and opening it does not wait.
  const int reader = ::open(path("pipe").c_str(), O_RDWR | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  for (const char* name : {"pipe", "link"}) {
    started(path(name), "through").commit();
    char text[16] = {};
    EXPECT_EQ(::read(reader, text, sizeof(text)), 7) << name;
    EXPECT_STREQ(text, "through");
  }
  ::close(reader);
  EXPECT_TRUE(fs::is_fifo(path("pipe")));

  // A device of our own: with the rights to make one, a writer that fails here could replace the
  // system's. Without them there is nothing to fear, and pipes have to do.
  if (::mknod(path("full").c_str(), S_IFCHR | 0600, makedev(1, 7)) != 0) return;
  if (::access(path("full").c_str(), W_OK) == 0) {  // not on a file system without devices
    EXPECT_NE(problem(path("full")).find("cannot be written: No space left"), std::string::npos);
  }
  EXPECT_TRUE(fs::is_character_file(path("full")));
}

TEST_F(OutputFiles, ProblemsSayWhatIsWrongAndChangeNothing) {
  fs::create_directory(path("folder"));
  fs::create_symlink("nowhere", path("dangling"));
  write_text(path("file"), "old");
  const std::vector<std::pair<fs::path, const char*>> cases = {
      {"", "the name is empty"},
      {path("folder"), "is a directory"},
      {path("dangling"), "leads nowhere"},
      {path("missing") / "a", "No such file"},
      {path("file") / "a", "Not a directory"}};
  for (const auto& [where, complaint] : cases) {
    EXPECT_NE(problem(where).find(complaint), std::string::npos) << where << problem(where);
    EXPECT_EQ(problem(where).rfind("picture '" + where.string() + "': ", 0), 0U);
  }
  EXPECT_EQ(names(), (std::vector<std::string>{"dangling", "file", "folder"}));
}

// Lowers the file size limit of the process: write() then fails midway as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit lowered = before_;
    lowered.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &lowered);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit before_{};
};

TEST_F(OutputFiles, KeepTheOldFileWhenTheDiskIsFull) {
  write_text(path("a"), "old");
  std::string message;
  {
    const FileSizeLimit limit(4096);
    try {
      started(path("a"), std::string(100'000, 'x')).commit();
    } catch (const ConfigError& error) {
      message = error.what();
    }
  }
  EXPECT_NE(message.find("a': cannot be written: File too large"), std::string::npos) << message;
  EXPECT_EQ(names(), (std::vector<std::string>{"a"}));
  EXPECT_EQ(read_text(path("a")), "old");
}

TEST_F(OutputFiles, AreCommittedTogetherOrNotAtAll) {
  write_text(path("a"), "old a");
  write_text(path("stale"), "old stale");
  const std::vector<fs::path> stale = {path("stale"), path("not there")};
  const auto start = [&] {
    std::vector<OutputFile> files;
    for (const char* name : {"a", "b", "c"}) {
      files.push_back(started(path(name), std::string("new ") + name));
    }
    return files;
  };
  {
    std::vector<OutputFile> files = start();
    fs::create_directory(path("c"));  // the third fails when two are in place
    EXPECT_THROW(commit_together(files, stale), ConfigError);
  }
  EXPECT_EQ(names(), (std::vector<std::string>{"a", "c", "stale"}));
  EXPECT_EQ(read_text(path("a")), "old a");
  EXPECT_EQ(read_text(path("stale")), "old stale");

  fs::remove(path("c"));
  {
    std::vector<OutputFile> files = start();
    commit_together(files, stale);
  }
  EXPECT_EQ(names(), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(read_text(path("a")), "new a");
}

}  // namespace
}  // namespace annulus::cli
