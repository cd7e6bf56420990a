// Arrays of other libraries (NumPy, PyTorch, JAX: DLPack or the buffer protocol) as the views of sparge.h.
#ifndef SPARGE_PYTHON_SRC_ARRAYS_H_
#define SPARGE_PYTHON_SRC_ARRAYS_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

namespace sparge::python {

namespace nb = nanobind;
// Raise ValueError and TypeError; `text` names the argument and the value.
[[noreturn]] void RaiseValue(const std::string& text);
[[noreturn]] void RaiseType(const std::string& text);

// "float32"
std::string DtypeText(nb::dlpack::dtype dtype);
// "(2, 3, 4)"
std::string ShapeText(const int64_t* shape, size_t dims);

// Where the arrays of a call are: the host's memory, or that of a GPU.
struct Place {
  int32_t device_type = nb::device::cpu::value;  // as DLPack has it
  int32_t gpu = 0;

  bool on_gpu() const { return device_type == nb::device::cuda::value; }
};
inline Place OnGpu(int32_t gpu) { return {nb::device::cuda::value, gpu}; }

// An array as the call sees it. The memory belongs to `owner`, or to the caller for the time of the call.
struct Array {
  const char* name = "";
  void* data = nullptr;
  nb::dlpack::dtype dtype{};
  std::vector<int64_t> shape, strides;
  nb::ndarray<nb::ro> owner;

  size_t dims() const { return shape.size(); }
  std::string ShapeText() const { return python::ShapeText(shape.data(), dims()); }
};

// Without a single element: then strides mean nothing.
bool Empty(const Array& array);

// Anything with DLPack or a buffer in that place; or a tuple (address, shape, strides, str(dtype)) of memory there:
// PyTorch tensors come as this, because its DLPack capsules take longer than a small attention.
Array ImportInput(const char* name, nb::handle object, Place place = {});
Array ImportOutput(const char* name, nb::handle object, Place place = {});

// An input as the caller has it; copied only if its last dimension is not contiguous or a stride is negative. Nothing
// is copied on a GPU: then that is refused.
class Input {
 public:
  Input() = default;
  Input(const char* name, nb::handle object, Place place = {}) : array_(ImportInput(name, object, place)) {
    CopyIfNeeded(place);
  }

  const Array& array() const { return array_; }

 private:
  void CopyIfNeeded(Place place);

  Array array_;
  std::vector<std::byte> copy_;
};

// Where tokens and heads stand: (B, H, N, D) or (B, N, H, D); leading dimensions may be missing.
enum class Layout { kHeadsFirst, kTokensFirst };

struct TensorView {
  sparge_tensor tensor{};
  std::array<int64_t, 4> shape{};  // batch, heads, tokens, dim
};

TensorView View(const Array& array, Layout layout);
// Also refuses a last dimension that is not contiguous.
TensorView ViewOutput(const Array& array, Layout layout);

}  // namespace sparge::python
#endif  // SPARGE_PYTHON_SRC_ARRAYS_H_
