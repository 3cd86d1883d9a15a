#include "cli/npy.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "annulus/error.h"

namespace annulus::cli {
namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;

constexpr std::uint64_t kSeed = 20240614;

std::vector<std::byte> bytes_of(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  std::transform(text.begin(), text.end(), bytes.begin(),
                 [](char c) { return static_cast<std::byte>(c); });
  return bytes;
}

std::string little_endian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i) & 0xff);
  return text;
}

// A whole file from its parts; `version` picks the width of the length.
std::string file_text(const std::string& dict, const std::string& data, int version = 1) {
  return "\x93NUMPY"s + static_cast<char>(version) + '\0' +
         little_endian(dict.size(), version == 1 ? 2 : 4) + dict + data;
}

std::string dict_text(const std::string& descr, const std::string& order,
                      const std::string& shape) {
  return "{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

class Npy : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "annulus_npy_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path path(const std::string& name = "array.npy") const { return folder_ / name; }

  fs::path write_text(const std::string& text) const {
    // A new file each time: truncating one costs ext4 a flush of milliseconds.
    fs::remove(path());
    std::ofstream(path(), std::ios::binary) << text;
    return path();
  }

  void write(const NpyArray& array) const { start_npy(path(), array).commit(); }

  static std::string read_text(const fs::path& file) {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }

  std::vector<std::string> names_in_folder() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  static void expect_error(const std::function<void()>& action,
                           const std::vector<std::string>& fragments) {
    try {
      action();
      ADD_FAILURE() << "no exception; expected one with '" << fragments.front() << "'";
    } catch (const ConfigError& error) {
      for (const std::string& fragment : fragments) {
        EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos)
            << "'" << fragment << "' in: " << error.what();
      }
    }
  }

  // Both readers refuse the file, and the message names it.
  void expect_malformed(const std::string& text, std::vector<std::string> fragments) const {
    const fs::path file = write_text(text);
    fragments.push_back("'" + file.string() + "'");
    expect_error([&] { (void)read_npy(file); }, fragments);
    expect_error([&] { (void)read_npy_header(file); }, fragments);
  }

  void expect_bad_dict(const std::string& dict, const std::vector<std::string>& fragments) const {
    SCOPED_TRACE(dict);
    expect_malformed(file_text(dict, std::string(4, '\0')), fragments);
  }

 private:
  fs::path folder_;
};

TEST_F(Npy, WhatIsWrittenIsRead) {
  std::mt19937_64 random(kSeed);
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  const std::vector<std::vector<std::int64_t>> shapes = {
      {}, {0}, {1}, {7}, {3, 5}, {2, 0, 4}, {1, 16, 4, 8}, {1, 1, 1, 1, 2, 1}};
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (const std::vector<std::int64_t>& shape : shapes) {
      std::size_t bytes = size_of(dtype);
      for (const std::int64_t extent : shape) bytes *= static_cast<std::size_t>(extent);
      std::vector<std::byte> data(bytes);
      for (std::byte& value : data) value = static_cast<std::byte>(random());
      write({dtype, shape, data});
      const NpyArray array = read_npy(path());
      EXPECT_EQ(array.dtype, dtype);
      EXPECT_EQ(array.shape, shape);
      EXPECT_EQ(array.data, data);
      const NpyHeader header = read_npy_header(path());
      EXPECT_EQ(header.dtype, dtype);
      EXPECT_EQ(header.shape, shape);
      EXPECT_EQ(header.data_offset % 64, 0);
      EXPECT_EQ(header.data_bytes, static_cast<std::int64_t>(bytes));
    }
  }
}

// The bytes that numpy.save writes for numpy.array([1, 2, 3], 'f4').
TEST_F(Npy, WritesTheBytesThatNumpyWrites) {
  const std::vector<float> values = {1, 2, 3};
  std::vector<std::byte> data(12);
  std::memcpy(data.data(), values.data(), 12);
  write({DType::f32, {3}, data});
  const std::string dict = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }";
  const std::string expected = "\x93NUMPY\x01\x00\x76\x00"s + dict +
                               std::string(0x76 - dict.size() - 1, ' ') + "\n" +
                               "\x00\x00\x80\x3f\x00\x00\x00\x40\x00\x00\x40\x40"s;
  EXPECT_EQ(read_text(path()), expected);
}

TEST_F(Npy, ReadsAllThreeFormatVersions) {
  const std::string data = little_endian(0x3f800000, 4) + little_endian(0xc0000000, 4);
  for (int version = 1; version <= 3; ++version) {
    SCOPED_TRACE(version);
    write_text(file_text(dict_text("'<f4'", "False", "(1, 2)"), data, version));
    const NpyArray array = read_npy(path());
    EXPECT_EQ(array.shape, (std::vector<std::int64_t>{1, 2}));
    EXPECT_EQ(array.data, bytes_of(data));
  }
}

TEST_F(Npy, ReadsEverySpellingOfTheDict) {
  for (const std::string dict : {
           "{'shape': (2,), 'descr': '<f2', 'fortran_order': False}",
           "{\"descr\":\"<f2\",\"fortran_order\":False,\"shape\":(2,)}",
           "  {  'descr'  :  '<f2'  , 'fortran_order' : False , 'shape' : ( 2 , ) , }  \n\n",
           "{'descr': '<f2', 'fortran_order': False, 'shape': (2L,), }",
           "{'descr': '<f2', 'fortran_order': False, 'shape': (1, 2), }",
           "{'descr': '<f2', 'fortran_order': False, 'shape': (1, 2,), }",
       }) {
    SCOPED_TRACE(dict);
    write_text(file_text(dict, "\x00\x3c\x00\x40"s));
    NpyArray array;
    ASSERT_NO_THROW(array = read_npy(path()));
    EXPECT_EQ(array.dtype, DType::f16);
    EXPECT_EQ(array.shape.back(), 2);
    EXPECT_EQ(array.data.size(), 4U);
  }
}

TEST_F(Npy, MissingFileDirectoryAndPipeAreErrors) {
  expect_error([&] { (void)read_npy(path()); }, {"array.npy'", "does not exist"});
  expect_error([&] { (void)read_npy(path() / "below"); }, {"does not exist"});
  expect_error([&] { (void)read_npy(path("")); }, {"is a directory", "expected"});
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);
  expect_error([&] { (void)read_npy(path()); }, {"not a regular file"});
}

TEST_F(Npy, BadMagicIsAnError) {
  expect_malformed("", {"starts with \"\"", "expected \"\\x93NUMPY\"", "not a .npy file"});
  expect_malformed("PK\x03\x04 an npz archive", {"\"PK\\x03\\x04 a\"", "expected"});
  expect_malformed("\x93NUMP", {"\"\\x93NUMP\"", "expected"});
  expect_malformed("\x93NUMPX\x01\x00\x00\x00"s, {"\"\\x93NUMPX\"", "expected"});
}

TEST_F(Npy, UnsupportedVersionIsAnError) {
  expect_malformed("\x93NUMPY\x04\x00\x00\x00\x00\x00"s, {"version is 4.0", "1.0, 2.0 or 3.0"});
  expect_malformed("\x93NUMPY\x01\x01\x00\x00"s, {"version is 1.1", "expected"});
  expect_malformed("\x93NUMPY\x00\x00\x00\x00"s, {"version is 0.0", "expected"});
  expect_malformed("\x93NUMPY\xff\xff\x00\x00"s, {"version is 255.255", "expected"});
}

TEST_F(Npy, EveryTruncationIsAnError) {
  for (int version = 1; version <= 3; ++version) {
    const std::string whole =
        file_text(dict_text("'<f4'", "False", "(2, 3)"), std::string(24, 'x'), version);
    write_text(whole);
    ASSERT_NO_THROW((void)read_npy(path()));
    for (std::size_t size = 0; size < whole.size(); ++size) {
      SCOPED_TRACE("version " + std::to_string(version) + ", " + std::to_string(size) + " of " +
                   std::to_string(whole.size()) + " bytes");
      const bool header_cut = size < whole.size() - 24;
      expect_malformed(whole.substr(0, size), {size < 6     ? "not a .npy file"
                                               : header_cut ? "header is truncated"
                                                            : "expected 24 for float32 of shape "
                                                              "(2, 3): the file is truncated"});
    }
  }
}

TEST_F(Npy, HugeHeaderLengthIsAnErrorAndAllocatesNothing) {
  expect_malformed("\x93NUMPY\x02\x00"s + little_endian(0xffffffff, 4) + "{}",
                   {"header length is 4294967295", "at most 65535"});
  expect_malformed("\x93NUMPY\x02\x00"s + little_endian(65536, 4) + std::string(70000, ' '),
                   {"header length is 65536", "at most 65535"});
  expect_malformed("\x93NUMPY\x01\x00\xff\xff{}"s, {"truncated", "expected at least 65545"});
}

TEST_F(Npy, HeaderThatIsNotTheExpectedDictIsAnError) {
  const std::string expected = "expected \"{'descr'";
  expect_bad_dict("", {"not the expected dict", expected});
  expect_bad_dict("\n", {"not the expected dict", expected});
  expect_bad_dict("[1, 2]", {"no '{'", "found \"[1, 2]\"", expected});
  expect_bad_dict("{", {"not the expected dict"});
  expect_bad_dict("{}", {"'descr' is missing", expected});
  expect_bad_dict("{'descr': '<f4', 'fortran_order': False}", {"'shape' is missing"});
  expect_bad_dict("{'descr': '<f4', 'shape': (1,)}", {"'fortran_order' is missing"});
  expect_bad_dict("{'fortran_order': False, 'shape': (1,)}", {"'descr' is missing"});
  expect_bad_dict("{'descr': '<f4', 'descr': '<f4'}", {"key 'descr'", "twice"});
  expect_bad_dict("{'colour': 1}", {"key 'colour' is unknown"});
  expect_bad_dict("{descr: '<f4'}", {"no string"});
  expect_bad_dict("{'descr: 1}", {"no string"});
  expect_bad_dict("{'descr' '<f4'}", {"no ':'"});
  expect_bad_dict("{'descr': '<f4' 'shape': (1,)}", {"no '}'"});
  expect_bad_dict("{'descr': None}", {"no string"});
  expect_bad_dict(dict_text("'<f4'", "0", "(1,)"), {"fortran_order is '0'"});
  expect_bad_dict(dict_text("'<f4'", "False", "(1,)") + "x", {"text follows"});
  expect_bad_dict(dict_text("'<f4'", "False", "1"), {"no '('"});
  expect_bad_dict(dict_text("'<f4'", "False", "(1)"), {"no tuple"});
  expect_bad_dict(dict_text("'<f4'", "False", "(1 1)"), {"no ',' in the shape"});
  expect_bad_dict(dict_text("'<f4'", "False", "(,)"), {"no integer"});
  expect_bad_dict(dict_text("'<f4'", "False", "(1.0,)"), {"no integer", "'1.0'"});
  expect_bad_dict(dict_text("'<f4'", "False", "(True,)"), {"no integer", "'True'"});
  expect_bad_dict("{'descr': '<f4', 'fortran_order': False, 'shape': (1,", {"no integer"});
  expect_bad_dict("{'\x01\xff': 1}", {"key '\\x01\\xff'"});  // control characters stay out
}

TEST_F(Npy, OtherDtypesAreErrors) {
  for (const std::string descr : {"'<f8'", "'>f4'", "'>f2'", "'<i4'", "'|O'", "'|b1'", "'<c8'",
                                  "'float32'", "''", "'<f4 '"}) {
    SCOPED_TRACE(descr);
    expect_malformed(
        file_text(dict_text(descr, "False", "(1,)"), "1234"),
        {"dtype is " + descr, "expected '<f4' (float32) or '<f2' (float16)", "astype"});
  }
  expect_malformed(file_text(dict_text("[('x', '<f4')]", "False", "(1,)"), "1234"),
                   {"dtype is [('x', '<f4')]", "expected '<f4'"});
}

TEST_F(Npy, FortranOrderIsAnErrorThatTellsTheRemedy) {
  expect_malformed(file_text(dict_text("'<f4'", "True", "(1, 1)"), "1234"),
                   {"fortran_order is True", "expected False", "numpy.ascontiguousarray"});
}

TEST_F(Npy, ImpossibleShapesAreErrors) {
  const auto with = [](const std::string& shape) {
    return file_text(dict_text("'<f4'", "False", shape), "1234");
  };
  expect_malformed(with("(-1,)"), {"axis of -1", "at least 0"});
  expect_malformed(with("(-1, -1)"), {"axis of -1"});
  expect_malformed(with("(9223372036854775808,)"), {"axis of 9223372036854775808", "2^63"});
  expect_malformed(with("(9223372036854775807,)"), {"more than 2^63 bytes"});
  // 2^32 * 2^32 * 4 is 0 modulo 2^64.
  expect_malformed(with("(4294967296, 4294967296)"), {"more than 2^63 bytes"});
  expect_malformed(with("(0, 4611686018427387904, 4)"), {"more than 2^63 bytes"});
  std::string many = "(";
  for (int axis = 0; axis < 33; ++axis) many += "1, ";
  expect_malformed(with(many + ")"), {"more than 32 axes"});
}

TEST_F(Npy, ShapeThatDoesNotMatchTheFileIsAnErrorBeforeAnyAllocation) {
  const auto with = [](const std::string& shape, std::size_t bytes) {
    return file_text(dict_text("'<f4'", "False", shape), std::string(bytes, '\0'));
  };
  // An exabyte, in the header only: allocating it would throw something else.
  expect_malformed(with("(536870912, 536870912)", 16),
                   {"16 bytes of data", "expected 1152921504606846976", "float32"});
  expect_malformed(with("(2, 3)", 23), {"23 bytes of data", "expected 24", "(2, 3)"});
  expect_malformed(with("(2, 3)", 25), {"1 trailing bytes", "24 bytes", "(2, 3)"});
  expect_malformed(with("(0,)", 4), {"4 trailing bytes", "(0,)"});
  expect_malformed(with("()", 8), {"4 trailing bytes", "()"});
}

TEST_F(Npy, RandomDamageNeverEscapesAsAnotherError) {
  std::mt19937_64 random(kSeed);
  const std::string whole = file_text(dict_text("'<f4'", "False", "(2, 3)"), std::string(24, 'x'));
  for (int trial = 0; trial < 3000; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", trial " + std::to_string(trial));
    std::string damaged = whole;
    for (int change = 0; change < 1 + trial % 3; ++change) {
      damaged[random() % (whole.size() - 24)] = static_cast<char>(random());
    }
    write_text(damaged);
    try {
      const NpyArray array = read_npy(path());
      ASSERT_LE(array.data.size(), 24U);
    } catch (const ConfigError&) {
      // Expected most of the time.
    }
  }
}

TEST_F(Npy, WriteRefusesBf16) {
  expect_error(
      [&] {
        write({DType::bf16, {4}, std::vector<std::byte>(8)});
      },
      {"array.npy'", "bf16", "fp32"});
  EXPECT_TRUE(names_in_folder().empty());
}

}  // namespace
}  // namespace annulus::cli
