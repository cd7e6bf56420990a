// npy.cc - reads and writes .npy: magic, version, length, a Python dict literal, then the raw elements.
#include "io/npy.h"

#include <cstring>
#include <utility>

namespace sparge::io {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kLongestHeader = size_t{1} << 20;  // real ones have about 100 bytes
constexpr size_t kMostDims = 8;

struct Header {
  DType dtype = DType::F32;
  std::vector<int64_t> shape;
  size_t data_begin = 0;  // bytes before the elements
};

// Reads the header's dict literal, the only Python that .npy needs: {'key': 'text' | True | False | (1, 2), ...}.
class DictParser {
 public:
  DictParser(std::string_view text, std::string_view file) : text_(text), file_(file) {}

  Header Parse() {
    bool has_descr = false, has_order = false, has_shape = false;
    bool fortran = false;
    Header header;
    Expect('{');
    while (!Accept('}')) {
      const std::string_view key = ParseString("a key");
      Expect(':');
      if (key == "descr" && !std::exchange(has_descr, true)) {
        header.dtype = ParseDescr();
      } else if (key == "fortran_order" && !std::exchange(has_order, true)) {
        fortran = ParseBool();
      } else if (key == "shape" && !std::exchange(has_shape, true)) {
        header.shape = ParseShape();
      } else {
        Fail("header has an unknown or repeated key " + Quoted(key));
      }
      if (!Accept(',') && Peek() != '}') Fail("header: expected ',' or '}' at byte " + std::to_string(at_));
    }
    SkipSpace();
    if (at_ != text_.size()) Fail("header has text after its end: " + Quoted(text_.substr(at_)));
    if (!has_descr) Fail("header lacks 'descr'");
    if (!has_order) Fail("header lacks 'fortran_order'");
    if (!has_shape) Fail("header lacks 'shape'");
    if (fortran && header.shape.size() > 1) {
      Fail("Fortran order with shape " + ShapeText(header.shape) + " is not supported; save it in C order");
    }
    return header;
  }

 private:
  [[noreturn]] void Fail(const std::string& what) const { throw Error(file_, what); }

  void SkipSpace() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }
  char Peek() {  // 0 at the end
    SkipSpace();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool Accept(char c) {
    SkipSpace();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void Expect(char c) {
    if (!Accept(c)) Fail(std::string("header: expected '") + c + "' at byte " + std::to_string(at_));
  }

  std::string_view ParseString(const char* what) {
    const char quote = Peek();
    if (quote != '\'' && quote != '"') {
      Fail(std::string("header: expected ") + what + " in quotes at byte " + std::to_string(at_));
    }
    const size_t begin = ++at_;
    const size_t end = text_.find(quote, begin);
    if (end == std::string_view::npos) Fail("header: a text has no closing quote");
    at_ = end + 1;
    return text_.substr(begin, end - begin);
  }

  bool ParseBool() {
    SkipSpace();
    for (const auto& [word, value] : {std::pair{"True", true}, std::pair{"False", false}}) {
      if (text_.substr(at_).starts_with(word)) {
        at_ += std::strlen(word);
        return value;
      }
    }
    Fail("header: 'fortran_order' is neither True nor False");
  }

  DType ParseDescr() {
    if (Peek() == '[') Fail("structured dtypes are not supported");
    const std::string_view descr = ParseString("the dtype");
    if (descr == "<f4") return DType::F32;
    if (descr == "<f2") return DType::F16;
    if (descr == "|u1" || descr == "<u1") return DType::U8;
    if (descr == "|b1" || descr == "<b1") return DType::BOOL;
    if (descr.starts_with('>')) Fail("big-endian dtype " + Quoted(descr) + " is not supported");
    Fail("dtype " + Quoted(descr) + " is not supported; expected '<f4', '<f2', '|u1' or '|b1'");
  }

  std::vector<int64_t> ParseShape() {
    std::vector<int64_t> shape;
    Expect('(');
    while (!Accept(')')) {
      if (shape.size() == kMostDims) Fail("more than " + std::to_string(kMostDims) + " dimensions");
      shape.push_back(ParseDim());
      if (!Accept(',') && Peek() != ')') Fail("header: expected ',' or ')' at byte " + std::to_string(at_));
    }
    return shape;
  }

  int64_t ParseDim() {
    SkipSpace();
    const size_t begin = at_;
    if (at_ < text_.size() && text_[at_] == '-') ++at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    const std::string_view digits = text_.substr(begin, at_ - begin);
    if (digits.empty() || digits == "-") Fail("header: expected a dimension at byte " + std::to_string(begin));
    if (digits.front() == '-') Fail("negative dimension " + Quoted(digits));
    int64_t dim = 0;
    for (const char digit : digits) {
      if (__builtin_mul_overflow(dim, int64_t{10}, &dim) || __builtin_add_overflow(dim, digit - '0', &dim)) {
        Fail("dimension " + Quoted(digits) + " is too large");
      }
    }
    return dim;
  }

  std::string_view text_;
  std::string_view file_;
  size_t at_ = 0;
};

// Little-endian, from bytes known to be there.
uint32_t LoadSize(std::span<const std::byte> bytes) {
  uint32_t size = 0;
  for (size_t i = bytes.size(); i-- > 0;) size = size << 8 | std::to_integer<uint32_t>(bytes[i]);
  return size;
}

Header ParseHeader(std::span<const std::byte> file, std::string_view name) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  if (!text.starts_with(kMagic)) throw Error(name, "not an .npy file: it does not begin with \\x93NUMPY");
  if (file.size() < kMagic.size() + 2) throw Error(name, "truncated before the version number");
  const int major = std::to_integer<int>(file[kMagic.size()]);
  const int minor = std::to_integer<int>(file[kMagic.size() + 1]);
  if (major < 1 || major > 3 || minor != 0) {
    throw Error(name, ".npy version " + std::to_string(major) + "." + std::to_string(minor) + " is not supported");
  }
  const size_t length_at = kMagic.size() + 2;
  const size_t length_bytes = major == 1 ? 2 : 4;
  if (file.size() < length_at + length_bytes) throw Error(name, "truncated before the header length");
  const size_t length = LoadSize(file.subspan(length_at, length_bytes));
  if (length > kLongestHeader) {
    throw Error(name, "header length " + std::to_string(length) + " is absurd (at most " +
                          std::to_string(kLongestHeader) + ")");
  }
  const size_t header_at = length_at + length_bytes;
  if (length > file.size() - header_at) {
    throw Error(name, "truncated: the header needs " + std::to_string(length) + " bytes, the file has " +
                          std::to_string(file.size() - header_at) + " more");
  }
  Header header = DictParser(text.substr(header_at, length), name).Parse();
  header.data_begin = header_at + length;
  return header;
}

// The header against the size of the file.
void CheckSize(const Header& header, size_t file_size, std::string_view name) {
  const std::optional<int64_t> needed = ByteCount(header.dtype, header.shape);
  if (!needed) throw Error(name, "shape " + ShapeText(header.shape) + " overflows");
  const uint64_t present = file_size - header.data_begin;
  const std::string sizes = "shape " + ShapeText(header.shape) + " of " + DTypeName(header.dtype) + " needs " +
                            std::to_string(*needed) + " bytes, the file has " + std::to_string(present);
  if (present < static_cast<uint64_t>(*needed)) throw Error(name, "truncated: " + sizes);
  if (present > static_cast<uint64_t>(*needed)) throw Error(name, "trailing bytes: " + sizes);
}

}  // namespace

Tensor ParseNpy(std::span<const std::byte> file, std::string_view name) {
  Header header = ParseHeader(file, name);
  CheckSize(header, file.size(), name);
  const std::span<const std::byte> data = file.subspan(header.data_begin);
  return {header.dtype, std::move(header.shape), {data.begin(), data.end()}};
}

Tensor ReadNpy(const std::string& path) {
  std::vector<std::byte> file = ReadFile(path);
  Header header = ParseHeader(file, path);
  CheckSize(header, file.size(), path);
  // Moving the elements down keeps one copy in memory instead of two.
  file.erase(file.begin(), file.begin() + static_cast<ptrdiff_t>(header.data_begin));
  return {header.dtype, std::move(header.shape), std::move(file)};
}

void WriteNpy(AtomicFile& file, const Tensor& tensor) {
  const char* descr = nullptr;
  switch (tensor.dtype) {
    case DType::F32:
      descr = "<f4";
      break;
    case DType::F16:
      descr = "<f2";
      break;
    case DType::U8:
      descr = "|u1";
      break;
    case DType::BOOL:
      descr = "|b1";
      break;
    case DType::BF16:
      throw Error(file.path(), "bfloat16 cannot be written as .npy; use .safetensors");
  }
  std::string header(kMagic);
  header += std::string_view("\x01\x00\x00\x00", 4);  // version 1.0, the length comes below
  header +=
      std::string("{'descr': '") + descr + "', 'fortran_order': False, 'shape': " + ShapeText(tensor.shape) + ", }";
  while ((header.size() + 1) % 64 != 0) header += ' ';  // numpy aligns the elements to 64 bytes
  header += '\n';
  const size_t length = header.size() - kMagic.size() - 4;
  header[kMagic.size() + 2] = static_cast<char>(length & 0xff);
  header[kMagic.size() + 3] = static_cast<char>(length >> 8);
  file.Write(std::as_bytes(std::span(header)));
  file.Write(tensor.data);
}

void WriteNpy(const std::string& path, const Tensor& tensor) {
  AtomicFile file(path);
  WriteNpy(file, tensor);
  file.Commit();
}

}  // namespace sparge::io
