// tensor.h - a tensor in memory as the file formats know it: type, shape, contiguous bytes; and the error they throw.
#ifndef SPARGE_IO_TENSOR_H_
#define SPARGE_IO_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace sparge::io {

enum class DType { F32, F16, BF16, U8, BOOL };

// One line: the file, what is wrong with it, and the values.
class Error : public std::runtime_error {
 public:
  Error(std::string_view file, std::string_view what);
  explicit Error(const std::string& line) : std::runtime_error(line) {}
};

// Row-major, little endian. An empty shape is a scalar (one element).
struct Tensor {
  DType dtype = DType::F32;
  std::vector<int64_t> shape;
  std::vector<std::byte> data;
};

size_t ElementSize(DType dtype);
const char* DTypeName(DType dtype);  // "float32", "float16", "bfloat16", "uint8", "bool"

// Product of the dimensions, or nothing if one is negative or the product overflows. A zero does not hide the other
// dimensions: (0, 2^62, 2^62) is refused, so that strides made from an accepted shape cannot overflow either.
std::optional<int64_t> ElementCount(std::span<const int64_t> shape);
// The same in bytes.
std::optional<int64_t> ByteCount(DType dtype, std::span<const int64_t> shape);

// A zero-filled tensor; std::bad_alloc if the size does not fit.
Tensor MakeTensor(DType dtype, std::vector<int64_t> shape);

// "(2, 3)", "(2,)", "()": as numpy prints a shape.
std::string ShapeText(std::span<const int64_t> shape);
// `text` in quotes, shortened, with unprintable bytes escaped: hostile input must not break the one-line rule.
std::string Quoted(std::string_view text);

// The whole file. Throws Error if it cannot be read.
std::vector<std::byte> ReadFile(const std::string& path);

}  // namespace sparge::io
#endif  // SPARGE_IO_TENSOR_H_
