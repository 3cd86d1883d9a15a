#include "cli/npy.h"

#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "annulus/error.h"

namespace annulus::cli {
namespace fs = std::filesystem;
namespace {

static_assert(std::endian::native == std::endian::little,
              "the data of a .npy file is copied as it is");

constexpr std::string_view kMagic = "\x93NUMPY";
// Format 2.0 allows 4 GiB of header. No header of a plain array needs more than format 1.0 has.
constexpr std::uint64_t kMaxHeaderBytes = 65535;
// numpy before 2.0 reads no more.
constexpr std::size_t kMaxAxes = 32;
constexpr std::string_view kExpectedDict =
    "{'descr': '<f4' or '<f2', 'fortran_order': False, 'shape': (...)}";

[[noreturn]] void fail_npy(const fs::path& path, const std::string& problem) {
  throw ConfigError("npy file '" + path.string() + "': " + problem);
}

// Bytes of a file for a message: the start of them, printable.
std::string excerpt(std::string_view bytes) {
  constexpr std::size_t kLongest = 60;
  std::string text;
  for (const char c : bytes.substr(0, kLongest)) {
    if (c >= ' ' && c <= '~') {
      text += c;
    } else {
      constexpr std::string_view kDigits = "0123456789abcdef";
      const auto value = static_cast<unsigned char>(c);
      text += {'\\', 'x', kDigits[value / 16], kDigits[value % 16]};
    }
  }
  return bytes.size() > kLongest ? text + "..." : text;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "(";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    text += std::to_string(shape[axis]) + (axis + 1 < shape.size() ? ", " : "");
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

const char* numpy_name(DType dtype) { return dtype == DType::f32 ? "float32" : "float16"; }

// Bytes of an array; nothing if that overflows. Axes of length 0 are left out of the check: numpy
// also refuses (0, 2^62, 2^62), whose strides do not exist.
std::optional<std::int64_t> bytes_of(DType dtype, std::span<const std::int64_t> shape) {
  auto bytes = static_cast<std::int64_t>(size_of(dtype));
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent == 0) {
      empty = true;
    } else if (bytes > std::numeric_limits<std::int64_t>::max() / extent) {
      return std::nullopt;
    } else {
      bytes *= extent;
    }
  }
  return empty ? 0 : bytes;
}

// The header is a Python dict literal. This accepts what any numpy has written (keys in any order,
// either quote, blanks anywhere, the 3L of Python 2) and nothing more.
class HeaderParser {
 public:
  HeaderParser(const fs::path& path, std::string_view text) : path_(path), text_(text) {}

  void parse(NpyHeader& header) {
    bool has_dtype = false;
    bool has_order = false;
    bool has_shape = false;
    expect('{');
    while (!accept('}')) {
      const std::string_view key = parse_string();
      expect(':');
      if (key == "descr" && !std::exchange(has_dtype, true)) {
        header.dtype = parse_dtype();
      } else if (key == "fortran_order" && !std::exchange(has_order, true)) {
        parse_order();
      } else if (key == "shape" && !std::exchange(has_shape, true)) {
        header.shape = parse_shape();
      } else {
        fail_dict("key '" + excerpt(key) + "' is unknown or comes twice");
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_blanks();
    if (at_ != text_.size()) fail_dict("text follows the dict");
    if (!has_dtype) fail_dict("key 'descr' is missing");
    if (!has_order) fail_dict("key 'fortran_order' is missing");
    if (!has_shape) fail_dict("key 'shape' is missing");
  }

 private:
  [[noreturn]] void fail_dict(const std::string& problem) const {
    fail_npy(path_, "the header is not the expected dict: " + problem + ": found \"" +
                        excerpt(text_) + "\", expected \"" + std::string(kExpectedDict) + "\"");
  }

  void skip_blanks() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != text_.npos) ++at_;
  }

  bool accept(char c) {
    skip_blanks();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    if (!accept(c)) {
      fail_dict(std::string("no '") + c + "' at character " + std::to_string(at_));
    }
  }

  std::string_view parse_string() {
    skip_blanks();
    const std::size_t end = at_ < text_.size() && (text_[at_] == '\'' || text_[at_] == '"')
                                ? text_.find(text_[at_], at_ + 1)
                                : text_.npos;
    if (end == text_.npos) fail_dict("no string at character " + std::to_string(at_));
    const std::string_view value = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return value;
  }

  std::string_view parse_word() {
    skip_blanks();
    const std::size_t begin = at_;
    while (at_ < text_.size() && std::string_view(" \t\r\n,:(){}").find(text_[at_]) == text_.npos) {
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }

  DType parse_dtype() {
    skip_blanks();
    // A list describes a structured dtype; there is no need to parse it in order to reject it.
    const bool structured = at_ < text_.size() && text_[at_] == '[';
    const std::string_view name =
        structured ? text_.substr(at_, text_.find(']', at_) - at_ + 1) : parse_string();
    if (name == "<f4") return DType::f32;
    if (name == "<f2") return DType::f16;
    fail_npy(path_,
             "the dtype is " + (structured ? excerpt(name) : "'" + excerpt(name) + "'") +
                 ", expected '<f4' (float32) or '<f2' (float16), little endian: convert with "
                 "array.astype('<f4')");
  }

  void parse_order() {
    const std::string_view value = parse_word();
    if (value == "False") return;
    if (value == "True") {
      fail_npy(path_,
               "fortran_order is True, expected False (C order): save with "
               "numpy.save(path, numpy.ascontiguousarray(array))");
    }
    fail_dict("fortran_order is '" + excerpt(value) + "'");
  }

  std::vector<std::int64_t> parse_shape() {
    std::vector<std::int64_t> shape;
    expect('(');
    bool comma = true;
    while (!accept(')')) {
      if (!comma) fail_dict("no ',' in the shape");
      std::string_view word = parse_word();
      if (word.ends_with('L')) word.remove_suffix(1);
      std::int64_t extent = 0;
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), extent);
      if (error == std::errc::result_out_of_range) {
        fail_npy(path_, "the shape has an axis of " + excerpt(word) + ", expected less than 2^63");
      }
      if (error != std::errc() || end != word.data() + word.size()) {
        fail_dict("no integer in the shape but '" + excerpt(word) + "'");
      }
      if (extent < 0) {
        fail_npy(path_, "the shape has an axis of " + excerpt(word) + ", expected at least 0");
      }
      if (shape.size() == kMaxAxes) {
        fail_npy(path_, "the shape has more than " + std::to_string(kMaxAxes) + " axes");
      }
      shape.push_back(extent);
      comma = accept(',');
    }
    // (3) is a number in Python; numpy does not accept it as a shape either.
    if (shape.size() == 1 && !comma) fail_dict("the shape is no tuple");
    return shape;
  }

  const fs::path& path_;
  std::string_view text_;
  std::size_t at_ = 0;
};

// The part of a file of `file_bytes` bytes before the data: magic, version, and a Python dict with
// dtype, order and shape.
NpyHeader parse_header(const fs::path& path, std::istream& file, std::int64_t file_bytes) {
  const std::string size_text = "the file has " + std::to_string(file_bytes) + " bytes";
  std::array<char, 12> prefix{};  // magic, version, and a length of 2 or 4 bytes
  file.read(prefix.data(), static_cast<std::streamsize>(prefix.size()));
  const std::string_view start(prefix.data(), static_cast<std::size_t>(file.gcount()));
  file.clear();
  if (!start.starts_with(kMagic)) {
    fail_npy(path, "starts with \"" + excerpt(start.substr(0, kMagic.size())) + "\", expected \"" +
                       excerpt(kMagic) + "\": not a .npy file");
  }
  constexpr std::size_t kLengthAt = kMagic.size() + 2;
  if (start.size() < kLengthAt) fail_npy(path, "the header is truncated: " + size_text);
  const int major = static_cast<unsigned char>(start[kMagic.size()]);
  const int minor = static_cast<unsigned char>(start[kMagic.size() + 1]);
  if (major < 1 || major > 3 || minor != 0) {
    fail_npy(path, "the format version is " + std::to_string(major) + "." + std::to_string(minor) +
                       ", expected 1.0, 2.0 or 3.0");
  }
  const std::size_t text_at = kLengthAt + (major == 1 ? 2 : 4);
  if (start.size() < text_at) fail_npy(path, "the header is truncated: " + size_text);
  std::uint64_t text_bytes = 0;
  for (std::size_t i = text_at; i-- > kLengthAt;) {
    text_bytes = text_bytes * 256 + static_cast<unsigned char>(start[i]);
  }
  if (text_bytes > kMaxHeaderBytes) {
    fail_npy(path, "the header length is " + std::to_string(text_bytes) +
                       " bytes, expected at most " + std::to_string(kMaxHeaderBytes));
  }
  const std::int64_t data_offset = static_cast<std::int64_t>(text_at + text_bytes);
  if (data_offset > file_bytes) {
    fail_npy(path, "the header is truncated: " + size_text + ", expected at least " +
                       std::to_string(data_offset));
  }
  std::string text(text_bytes, '\0');
  file.seekg(static_cast<std::streamoff>(text_at));
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file) fail_npy(path, "the header cannot be read");

  NpyHeader header;
  HeaderParser(path, text).parse(header);
  header.data_offset = data_offset;
  const std::string array_text =
      std::string(numpy_name(header.dtype)) + " of shape " + shape_text(header.shape);
  const std::optional<std::int64_t> needed = bytes_of(header.dtype, header.shape);
  if (!needed) fail_npy(path, array_text + " has more than 2^63 bytes");
  header.data_bytes = *needed;
  const std::int64_t found = file_bytes - data_offset;
  if (found < header.data_bytes) {
    fail_npy(path, "has " + std::to_string(found) + " bytes of data, expected " +
                       std::to_string(header.data_bytes) + " for " + array_text +
                       ": the file is truncated or its header is wrong");
  }
  if (found > header.data_bytes) {
    fail_npy(path, "has " + std::to_string(found - header.data_bytes) +
                       " trailing bytes, expected the file to end after " +
                       std::to_string(header.data_bytes) + " bytes of data for " + array_text);
  }
  return header;
}

// Opens the file and reads up to the data.
NpyHeader open_and_read_header(const fs::path& path, std::ifstream& file) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) fail_npy(path, "does not exist");
  if (fs::is_directory(status)) fail_npy(path, "is a directory, expected a .npy file");
  if (status.type() == fs::file_type::none) {
    fail_npy(path, "cannot be examined: " + error.message());
  }
  // The size of a pipe or device is unknown, and the checks below rest on it.
  if (!fs::is_regular_file(status)) {
    fail_npy(path, "is not a regular file: save the array to a file first");
  }
  errno = 0;
  file.open(path, std::ios::binary | std::ios::ate);
  if (!file) fail_npy(path, "cannot be opened: " + std::generic_category().message(errno));
  const auto file_bytes = static_cast<std::int64_t>(file.tellg());
  if (file_bytes < 0) fail_npy(path, "its size cannot be determined");
  file.seekg(0);
  return parse_header(path, file, file_bytes);
}

// Format 1.0.
std::string format_header(const NpyArray& array) {
  std::string text = std::string("{'descr': '") + (array.dtype == DType::f32 ? "<f4" : "<f2") +
                     "', 'fortran_order': False, 'shape': " + shape_text(array.shape) + ", }";
  // The format asks for data at a multiple of 64 bytes, so that it can be mapped and used in place.
  const std::size_t unpadded = kMagic.size() + 4 + text.size() + 1;
  text.append((64 - unpadded % 64) % 64, ' ');
  text += '\n';
  std::string header(kMagic);
  header +=
      {'\x01', '\x00', static_cast<char>(text.size() % 256), static_cast<char>(text.size() / 256)};
  return header + text;
}

}  // namespace

NpyHeader read_npy_header(const fs::path& path) {
  std::ifstream file;
  return open_and_read_header(path, file);
}

NpyArray read_npy(const fs::path& path) {
  std::ifstream file;
  NpyHeader header = open_and_read_header(path, file);
  NpyArray array{header.dtype, std::move(header.shape), {}};
  array.data.resize(static_cast<std::size_t>(header.data_bytes));
  file.seekg(static_cast<std::streamoff>(header.data_offset));
  file.read(reinterpret_cast<char*>(array.data.data()),
            static_cast<std::streamsize>(array.data.size()));
  if (file.gcount() != static_cast<std::streamsize>(array.data.size())) {
    fail_npy(path, "only " + std::to_string(file.gcount()) + " of " +
                       std::to_string(header.data_bytes) +
                       " bytes of data could be read: did the file change meanwhile?");
  }
  return array;
}

OutputFile start_npy(const fs::path& path, const NpyArray& array) {
  if (array.dtype == DType::bf16) fail_npy(path, "the format has no bf16: convert to fp32 first");
  OutputFile file("npy file", path);
  file.write(format_header(array));
  file.write(array.data.data(), array.data.size());
  return file;
}

}  // namespace annulus::cli
