#include "cli/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "annulus/error.h"

namespace annulus::cli {
namespace fs = std::filesystem;
namespace {

std::string error_text(int code) { return std::generic_category().message(code); }

// An unused name in the folder of `target`. The target's name is not part of it, because it may
// already have the maximal length. Process and counter distinguish writers.
fs::path name_beside(const fs::path& target) {
  static std::atomic<unsigned> counter{0};
  return target.parent_path() /
         (".annulus-" + std::to_string(::getpid()) + "-" + std::to_string(counter++) + ".tmp");
}

// The descriptor of standard output or error if `status` is that file, else -1. Renaming over that
// file would lose other output.
int standard_descriptor(const struct stat& status) {
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat open {};
    if (::fstat(descriptor, &open) == 0 && open.st_dev == status.st_dev &&
        open.st_ino == status.st_ino) {
      return descriptor;
    }
  }
  return -1;
}

// Moves a file out of the way and moves it back unless dropped. If there was no file, whatever is
// there at the end is removed.
class MovedAway {
 public:
  explicit MovedAway(fs::path target) : target_(std::move(target)) {
    fs::path kept = name_beside(target_);
    struct stat status {};
    if (::lstat(target_.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
      throw std::system_error(EISDIR, std::generic_category());  // a rename would take it along
    }
    if (::rename(target_.c_str(), kept.c_str()) == 0) {
      kept_ = std::move(kept);
    } else if (errno != ENOENT) {
      throw std::system_error(errno, std::generic_category());
    }
  }
  MovedAway(MovedAway&& other) noexcept
      : target_(std::move(other.target_)),
        kept_(std::move(other.kept_)),
        active_(std::exchange(other.active_, false)) {}
  MovedAway& operator=(MovedAway&&) = delete;
  ~MovedAway() {
    if (!active_) return;
    if (kept_.empty()) {
      ::unlink(target_.c_str());
    } else {
      ::rename(kept_.c_str(), target_.c_str());
    }
  }

  void drop() noexcept {
    active_ = false;
    if (!kept_.empty()) ::unlink(kept_.c_str());
  }

 private:
  fs::path target_;
  fs::path kept_;
  bool active_ = true;
};

}  // namespace

OutputFile::OutputFile(std::string kind, fs::path path)
    : kind_(std::move(kind)), path_(std::move(path)), target_(path_) {
  if (path_.empty()) fail("the name is empty, expected that of a file");
  struct stat status {};
  if (::stat(path_.c_str(), &status) != 0) {
    if (errno != ENOENT) fail("cannot be examined", errno);
    std::error_code error;
    if (fs::is_symlink(fs::symlink_status(path_, error))) {
      fail("is a symbolic link that leads nowhere", ENOENT);
    }
    // One spelling for each file: commit_together compares them.
    const fs::path folder =
        fs::canonical(path_.has_parent_path() ? path_.parent_path() : ".", error);
    if (!error) target_ = folder / path_.filename();
    create_temporary(0);
    return;
  }
  if (S_ISDIR(status.st_mode)) fail("is a directory, expected a file name");
  const int standard = standard_descriptor(status);
  if (standard >= 0 || !S_ISREG(status.st_mode)) {
    open_through(standard);
    return;
  }
  // A rename needs permission for the folder only; check the file's, too.
  if (::access(path_.c_str(), W_OK) != 0) fail("cannot be written", errno);
  std::error_code error;
  target_ = fs::canonical(path_, error);
  if (error) fail("cannot be examined: " + error.message());
  create_temporary(status.st_mode & 07777U);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : kind_(std::move(other.kind_)),
      path_(std::move(other.path_)),
      target_(std::move(other.target_)),
      temporary_(std::exchange(other.temporary_, {})),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void OutputFile::open_through(int descriptor) {
  if (descriptor >= 0) {
    std::fflush(nullptr);  // keeps the order of the output
    descriptor_ = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  } else {
    do {
      descriptor_ = ::open(path_.c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC);
    } while (descriptor_ < 0 && errno == EINTR);
  }
  if (descriptor_ < 0) fail("cannot be written", errno);
}

void OutputFile::create_temporary(unsigned permissions) {
  // A name left over from a crash is skipped, never reused.
  constexpr int kAttempts = 1000;
  int code = 0;
  for (int attempt = 0; attempt < kAttempts && descriptor_ < 0; ++attempt) {
    temporary_ = name_beside(target_);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    code = errno;
    if (descriptor_ < 0 && code != EEXIST && code != EINTR) break;
  }
  if (descriptor_ < 0) {
    const fs::path temporary = std::exchange(temporary_, {});
    fail("cannot be written: the temporary file '" + temporary.string() +
         "' beside it cannot be created: " + error_text(code));
  }
  // Not essential: some file systems have none.
  if (permissions != 0) (void)::fchmod(descriptor_, static_cast<mode_t>(permissions));
}

void OutputFile::write(const void* data, std::size_t bytes) {
  // Linux transfers at most 2 GiB - 4 KiB per call, macOS refuses more than 2 GiB.
  constexpr std::size_t kLargest = std::size_t{1} << 30;
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, next, std::min(bytes, kLargest));
    if (written < 0) {
      if (errno == EINTR) continue;
      fail("cannot be written", errno);
    }
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

// Everything that can fail because the disk is full.
void OutputFile::finish() {
  // Without fsync the rename may reach the disk before the data, and a quota on a network file
  // system may show only now. EINVAL: the file system cannot sync.
  if (!temporary_.empty() && ::fsync(descriptor_) != 0 && errno != EINVAL) {
    fail("cannot be written", errno);
  }
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("cannot be written", errno);
}

void OutputFile::place() {
  if (temporary_.empty()) return;
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot be put in place", errno);
  temporary_.clear();
}

void OutputFile::commit() {
  finish();
  place();
}

void OutputFile::fail(const std::string& problem) const {
  throw ConfigError(kind_ + " '" + path_.string() + "': " + problem);
}

void OutputFile::fail(const char* problem, int code) const {
  fail(std::string(problem) + ": " + error_text(code));
}

fs::path check_output_file(const char* kind, const std::string& path) {
  struct stat status {};
  // A device or a pipe is opened once, when there is something to write.
  const bool exists = ::stat(path.c_str(), &status) == 0;
  if (exists && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode)) return {};
  return OutputFile(kind, path).target();
}

void commit_together(std::vector<OutputFile>& files, std::span<const fs::path> stale) {
  for (std::size_t i = 0; i < files.size(); ++i) {
    // Two names may be links to one file, which would then have only the last content.
    for (std::size_t j = 0; j < i; ++j) {
      if (!files[i].temporary_.empty() && !files[j].temporary_.empty() &&
          files[i].target_ == files[j].target_) {
        files[i].fail("is the same file as '" + files[j].path_.string() + "'");
      }
    }
    files[i].finish();
  }
  std::vector<MovedAway> moved;
  moved.reserve(files.size() + stale.size());
  for (OutputFile& file : files) {
    if (file.temporary_.empty()) continue;
    try {
      moved.emplace_back(file.target_);
    } catch (const std::system_error& error) {
      file.fail("cannot be replaced", error.code().value());
    }
    file.place();
  }
  for (const fs::path& path : stale) {
    try {
      moved.emplace_back(path);
    } catch (const std::system_error& error) {
      throw ConfigError("stale file '" + path.string() +
                        "': cannot be removed: " + error_text(error.code().value()));
    }
  }
  for (MovedAway& old : moved) old.drop();
}

}  // namespace annulus::cli
