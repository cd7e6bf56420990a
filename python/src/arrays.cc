#include "python/src/arrays.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string_view>

namespace sparge::python {
namespace {

using Code = nb::dlpack::dtype_code;

nb::dlpack::dtype DtypeOf(const char* name, nb::str dtype) {
  const std::string_view text = dtype.c_str();
  struct Known {
    const char* text;
    Code code;
    uint8_t bits;
  };
  static constexpr Known kKnown[] = {{"torch.float32", Code::Float, 32},   {"torch.float16", Code::Float, 16},
                                     {"torch.bfloat16", Code::Bfloat, 16}, {"torch.bool", Code::Bool, 8},
                                     {"torch.uint8", Code::UInt, 8},       {"torch.float64", Code::Float, 64}};
  for (const Known& known : kKnown) {
    if (text == known.text) return {static_cast<uint8_t>(known.code), known.bits, 1};
  }
  RaiseType(std::string(name) + ": dtype " + std::string(text) + " is not supported");
}

sparge_dtype ElementType(const Array& array) {
  const auto code = static_cast<Code>(array.dtype.code);
  if (code == Code::Float && array.dtype.bits == 32) return SPARGE_F32;
  if (code == Code::Float && array.dtype.bits == 16) return SPARGE_F16;
  if (code == Code::Bfloat && array.dtype.bits == 16) return SPARGE_BF16;
  RaiseType(std::string(array.name) + ": dtype " + DtypeText(array.dtype) + " is none of float32, float16, bfloat16");
}

std::vector<int64_t> Integers(const nb::tuple& tuple) {
  std::vector<int64_t> values;
  values.reserve(tuple.size());
  for (nb::handle item : tuple) values.push_back(nb::cast<int64_t>(item));
  return values;
}

template <class NdArray>
Array Import(const char* name, nb::handle object, Place place) {
  if (nb::isinstance<nb::tuple>(object)) {
    const auto view = nb::borrow<nb::tuple>(object);
    if (view.size() != 4) RaiseType(std::string(name) + ": tuple is no array");
    return {name,
            reinterpret_cast<void*>(nb::cast<uintptr_t>(view[0])),
            DtypeOf(name, nb::cast<nb::str>(view[3])),
            Integers(nb::cast<nb::tuple>(view[1])),
            Integers(nb::cast<nb::tuple>(view[2])),
            {}};
  }
  NdArray array;
  if (!nb::try_cast(object, array)) {
    RaiseType(std::string(name) + ": " + nb::type_name(object.type()).c_str() +
              " is no array with DLPack or a buffer that can be used here (on the " + (place.on_gpu() ? "GPU" : "CPU") +
              ", without gradient, native byte order, strides in whole elements" +
              (NdArray::ReadOnly ? ")" : ", writable)"));
  }
  if (array.device_type() != place.device_type) {
    RaiseValue(std::string(name) + ": is on device type " + std::to_string(array.device_type()) + ", not on the " +
               (place.on_gpu() ? "GPU" : "CPU"));
  }
  if (place.on_gpu() && array.device_id() != place.gpu) {
    RaiseValue(std::string(name) + ": is on cuda:" + std::to_string(array.device_id()) +
               ", not on cuda:" + std::to_string(place.gpu));
  }
  const size_t dims = array.ndim();
  return {name,
          const_cast<void*>(static_cast<const void*>(array.data())),
          array.dtype(),
          {array.shape_ptr(), array.shape_ptr() + dims},
          {array.stride_ptr(), array.stride_ptr() + dims},
          nb::ndarray<nb::ro>(array)};
}

}  // namespace

std::string DtypeText(nb::dlpack::dtype dtype) {
  static constexpr const char* kNames[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  const std::string name = dtype.code < std::size(kNames) ? kNames[dtype.code] : "unknown";
  return name + std::to_string(dtype.bits);
}

void RaiseValue(const std::string& text) { throw nb::value_error(text.c_str()); }
void RaiseType(const std::string& text) { throw nb::type_error(text.c_str()); }

bool Empty(const Array& array) { return std::find(array.shape.begin(), array.shape.end(), 0) != array.shape.end(); }

std::string ShapeText(const int64_t* shape, size_t dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims; ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + (dims == 1 ? ",)" : ")");
}

Array ImportInput(const char* name, nb::handle object, Place place) {
  return Import<nb::ndarray<nb::ro>>(name, object, place);
}
Array ImportOutput(const char* name, nb::handle object, Place place) {
  return Import<nb::ndarray<>>(name, object, place);
}

void Input::CopyIfNeeded(Place place) {
  const size_t n = array_.dims();
  const std::vector<int64_t>& shape = array_.shape;
  const std::vector<int64_t>& strides = array_.strides;
  bool usable = n == 0 || shape[n - 1] <= 1 || strides[n - 1] == 1;
  int64_t elements = 1;
  for (size_t i = 0; i < n; ++i) {
    usable = usable && (shape[i] <= 1 || strides[i] >= 0);
    elements *= shape[i];
  }
  if (usable || elements == 0) return;
  if (place.on_gpu()) {
    RaiseValue(std::string(array_.name) + ": its last dimension is not contiguous, or runs backwards, on a GPU");
  }
  const int64_t bytes = (array_.dtype.bits + 7) / 8;
  copy_.resize(static_cast<size_t>(elements * bytes));
  std::vector<int64_t> index(n, 0);
  int64_t offset = 0;
  for (int64_t e = 0; e < elements; ++e) {
    std::memcpy(&copy_[static_cast<size_t>(e * bytes)], static_cast<const std::byte*>(array_.data) + offset * bytes,
                static_cast<size_t>(bytes));
    for (size_t i = n; i-- > 0;) {
      offset += strides[i];
      if (++index[i] < shape[i]) break;
      offset -= index[i] * strides[i];
      index[i] = 0;
    }
  }
  array_.data = copy_.data();
  array_.strides.assign(n, 1);
  for (size_t i = n - 1; i > 0; --i) array_.strides[i - 1] = array_.strides[i] * shape[i];
}

TensorView View(const Array& array, Layout layout) {
  const size_t dims = array.dims();
  if (dims < 2 || dims > 4) {
    RaiseValue(std::string(array.name) + ": has " + std::to_string(dims) + " dimensions, not 2 to 4");
  }
  const bool heads_first = layout == Layout::kHeadsFirst;
  const size_t heads = heads_first ? dims - 3 : dims - 2;  // of 3 dimensions or more
  const size_t tokens = dims == 2 || heads_first ? dims - 2 : dims - 3;
  TensorView view;
  view.shape = {dims == 4 ? array.shape[0] : 1, dims >= 3 ? array.shape[heads] : 1, array.shape[tokens],
                array.shape[dims - 1]};
  view.tensor.data = array.data;
  view.tensor.dtype = ElementType(array);
  if (Empty(array)) return view;
  // The stride of a dimension of one entry may be anything.
  if (view.shape[0] > 1) view.tensor.batch_stride = array.strides[0];
  if (view.shape[1] > 1) view.tensor.head_stride = array.strides[heads];
  if (view.shape[2] > 1) view.tensor.token_stride = array.strides[tokens];
  return view;
}

TensorView ViewOutput(const Array& array, Layout layout) {
  const TensorView view = View(array, layout);
  if (view.shape[3] > 1 && !Empty(array) && array.strides.back() != 1) {
    RaiseValue(std::string(array.name) + ": its last dimension is not contiguous");
  }
  return view;
}

}  // namespace sparge::python
