#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::cli {

// A file that the tool is writing. A plain file appears complete or not at all: it is written under
// a temporary name beside its place and then renamed. Permissions of an existing file are kept, and
// the target of a symbolic link is replaced, not the link. A rename would destroy a device or a
// pipe, so these are written directly; so is a file that is the standard output or error of this
// process. Errors are ConfigErrors that start with `kind` ("npy file") and the path.
class OutputFile {
 public:
  OutputFile(std::string kind, std::filesystem::path path);
  // Removes what was not committed.
  ~OutputFile();
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;

  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  // Puts the file in its place.
  void commit();
  // The file that commit() replaces; empty if the file is written directly.
  [[nodiscard]] std::filesystem::path target() const {
    return temporary_.empty() ? std::filesystem::path() : target_;
  }

 private:
  friend void commit_together(std::vector<OutputFile>& files,
                              std::span<const std::filesystem::path> stale);
  void open_through(int descriptor);
  void create_temporary(unsigned permissions);
  void finish();
  void place();
  [[noreturn]] void fail(const std::string& problem) const;
  [[noreturn]] void fail(const char* problem, int code) const;

  std::string kind_;
  std::filesystem::path path_;
  std::filesystem::path target_;     // path_ with links followed
  std::filesystem::path temporary_;  // empty: written directly, or already in its place
  int descriptor_ = -1;
};

// For a file that is written at the end of the work: throws ConfigError if it cannot be written.
// Returns the file that will be replaced, with links followed, or nothing if it will be written
// directly.
[[nodiscard]] std::filesystem::path check_output_file(const char* kind, const std::string& path);

// Puts all files in place and removes `stale` plain files, or leaves everything as it was.
void commit_together(std::vector<OutputFile>& files, std::span<const std::filesystem::path> stale);

}  // namespace annulus::cli
