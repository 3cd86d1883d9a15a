#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::cli {

// A file that is being written: every file that the tool writes is one of these.
//
// A plain file, existing or new, appears complete or not at all: it is written beside its place
// under a temporary name and renamed, and keeps its permissions. A symbolic link stays and what it
// leads to is replaced. What is no plain file (a device, a pipe) would be destroyed by that, and is
// written through to; so is a file that is this program's standard output or error already.
// Problems are ConfigErrors that start with `kind` ("npy file") and the path.
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
  // What commit() replaces; empty: the file is written through.
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
  std::filesystem::path temporary_;  // empty: written through, or in its place
  int descriptor_ = -1;
};

// For a file that is written when all work is done: ConfigError if that is bound to fail. What will
// be replaced, with links followed; empty: it will be written through.
[[nodiscard]] std::filesystem::path check_output_file(const char* kind, const std::string& path);

// Puts all files in place and removes `stale` plain files, or leaves everything as it was.
void commit_together(std::vector<OutputFile>& files, std::span<const std::filesystem::path> stale);

}  // namespace annulus::cli
