// tensor.cc - sizes that cannot overflow, texts for messages, and reading a whole file.
#include "io/tensor.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>

namespace sparge::io {

Error::Error(std::string_view file, std::string_view what)
    : std::runtime_error(std::string(file) + ": " + std::string(what)) {}

size_t ElementSize(DType dtype) {
  switch (dtype) {
    case DType::F32:
      return 4;
    case DType::F16:
    case DType::BF16:
      return 2;
    case DType::U8:
    case DType::BOOL:
      return 1;
  }
  return 1;
}

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::F32:
      return "float32";
    case DType::F16:
      return "float16";
    case DType::BF16:
      return "bfloat16";
    case DType::U8:
      return "uint8";
    case DType::BOOL:
      return "bool";
  }
  return "unknown";
}

std::optional<int64_t> ElementCount(std::span<const int64_t> shape) {
  int64_t product = 1;
  bool empty = false;
  for (const int64_t dim : shape) {
    if (dim < 0) return std::nullopt;
    empty = empty || dim == 0;
    if (__builtin_mul_overflow(product, std::max<int64_t>(dim, 1), &product)) return std::nullopt;
  }
  return empty ? 0 : product;
}

std::optional<int64_t> ByteCount(DType dtype, std::span<const int64_t> shape) {
  const std::optional<int64_t> count = ElementCount(shape);
  int64_t bytes = 0;
  if (!count || __builtin_mul_overflow(*count, static_cast<int64_t>(ElementSize(dtype)), &bytes)) return std::nullopt;
  return bytes;
}

Tensor MakeTensor(DType dtype, std::vector<int64_t> shape) {
  const std::optional<int64_t> bytes = ByteCount(dtype, shape);
  Tensor tensor{dtype, std::move(shape), {}};
  if (!bytes || static_cast<uint64_t>(*bytes) > tensor.data.max_size()) throw std::bad_alloc();
  tensor.data.resize(static_cast<size_t>(*bytes));
  return tensor;
}

std::string ShapeText(std::span<const int64_t> shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string Quoted(std::string_view text) {
  constexpr size_t kLongest = 60;
  std::string quoted = "'";
  for (const char c : text.substr(0, kLongest)) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      quoted += c;
    } else {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", byte);
      quoted += escaped;
    }
  }
  return quoted + (text.size() > kLongest ? "...'" : "'");
}

std::vector<std::byte> ReadFile(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) throw Error(path, "is a directory, not a file");
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) throw Error(path, std::string("cannot be opened: ") + std::strerror(errno));
  std::vector<std::byte> bytes;
  // The size is only a hint: pipes have none, and the file may change while it is read.
  const auto hint = std::filesystem::file_size(path, ignored);
  size_t chunk = ignored ? size_t{1} << 20 : static_cast<size_t>(hint) + 1;
  while (true) {
    const size_t start = bytes.size();
    bytes.resize(start + chunk);
    const size_t got = std::fread(bytes.data() + start, 1, chunk, file.get());
    bytes.resize(start + got);
    if (got < chunk) break;
    chunk = size_t{1} << 20;
  }
  if (std::ferror(file.get()) != 0) throw Error(path, std::string("cannot be read: ") + std::strerror(errno));
  return bytes;
}

}  // namespace sparge::io
