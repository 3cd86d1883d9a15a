#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace annulus::cli {

// Runs the built tool as a user would. ANNULUS_BINARY is its path, in the environment or from
// CMake.

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Words = std::vector<std::string>;

inline std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

inline void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

struct Outcome {
  int code = -1;  // 128 + signal if it was killed
  std::string out;
  std::string err;
};

struct Surroundings {
  std::map<std::string, std::string> environment = {};
  rlim_t file_bytes = RLIM_INFINITY;
  rlim_t address_bytes = RLIM_INFINITY;
};

class Cli : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "annulus_cli_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  Outcome annulus(const Words& arguments, const Surroundings& around = {}) const {
    const char* chosen = std::getenv("ANNULUS_BINARY");
    const std::string binary = chosen != nullptr ? chosen : ANNULUS_BINARY;
    std::vector<char*> words = {const_cast<char*>(binary.c_str())};
    for (const std::string& word : arguments) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    const fs::path out = folder_ / ".stdout";
    const fs::path err = folder_ / ".stderr";
    const pid_t child = ::fork();
    if (child == 0) {
      ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
      ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
      ::signal(SIGXFSZ, SIG_IGN);  // too long a file then fails, instead of killing
      const rlimit file_limit{around.file_bytes, around.file_bytes};
      const rlimit address_limit{around.address_bytes, around.address_bytes};
      if (around.file_bytes != RLIM_INFINITY) ::setrlimit(RLIMIT_FSIZE, &file_limit);
      if (around.address_bytes != RLIM_INFINITY) ::setrlimit(RLIMIT_AS, &address_limit);
      for (const auto& [name, value] : around.environment) {
        ::setenv(name.c_str(), value.c_str(), 1);
      }
      ::execv(binary.c_str(), words.data());
      ::_exit(127);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    Outcome outcome{WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
                    read_text(out), read_text(err)};
    fs::remove(out);
    fs::remove(err);
    return outcome;
  }

  Json annulus_json(Words arguments, int expected_code = 0, const Surroundings& around = {}) const {
    arguments.emplace_back("--json");
    const Outcome outcome = annulus(arguments, around);
    EXPECT_EQ(outcome.code, expected_code) << outcome.err;
    const Json json = Json::parse(outcome.out, nullptr, false);
    EXPECT_TRUE(json.is_object()) << outcome.out;
    return json.is_object() ? json : Json::object();
  }

  void expect_refused(const Outcome& outcome, const std::string& because) const {
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_EQ(outcome.err.rfind("annulus: error: ", 0), 0U) << outcome.err;
    EXPECT_NE(outcome.err.find(because), std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  }

  fs::path folder_;
};

inline const Words kSmall = {"run", "--tokens", "200", "--heads", "4", "--head-dim", "16"};

inline Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

}  // namespace annulus::cli
