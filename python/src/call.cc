#include "python/src/call.h"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace sparge::python {
namespace {

// Beneath this many multiply-adds waking other threads takes longer than they save (results do not depend on threads).
constexpr double kAlone = 1.5e6;

}  // namespace

std::optional<Array> OptionalOutput(const char* name, nb::handle object, Place place) {
  if (object.is_none()) return std::nullopt;
  return ImportOutput(name, object, place);
}

int32_t ThreadsFor(double work, int32_t wanted) { return work <= kAlone ? 1 : wanted; }

int32_t Call::threads() const {
  const PlanDesc& d = described_.desc;
  const double work = static_cast<double>(d.batch) * static_cast<double>(d.q_heads) * static_cast<double>(d.q_tokens) *
                      static_cast<double>(d.kv_tokens) * static_cast<double>(d.qk_dim + d.v_dim);
  return ThreadsFor(work, described_.threads);
}

void CheckShape(const char* name, const TensorView& view, const std::array<int64_t, 4>& wanted) {
  if (view.shape != wanted) {
    RaiseValue(std::string(name) + ": as (batch, heads, tokens, dim) it is " + ShapeText(view.shape.data(), 4) +
               ", not " + ShapeText(wanted.data(), 4));
  }
}

sparge_lse ViewLse(const Array& array, const TensorView& q) {
  const size_t dims = array.dims();
  const std::array<int64_t, 3> wanted{q.shape[0], q.shape[1], q.shape[2]};
  bool fits = array.dtype == nb::dtype<float>() && dims >= 1 && dims <= 3;
  std::array<int64_t, 3> strides{};
  for (size_t i = 0; fits && i < 3; ++i) {
    const bool there = i + dims >= 3;
    const int64_t side = there ? array.shape[i + dims - 3] : 1;
    fits = side == wanted[i];
    strides[i] = side > 1 && !Empty(array) ? array.strides[i + dims - 3] : 0;
  }
  if (!fits || strides[2] > 1) {
    RaiseValue(std::string(array.name) + ": is no float32 array " + ShapeText(wanted.data(), 3) +
               " with a contiguous last dimension");
  }
  return {static_cast<float*>(array.data), strides[0], strides[1]};
}

namespace {

// Takes an array by its name.
class Reader {
 public:
  Reader(std::string name, nb::handle value) : name_(std::move(name)), value_(value) {}

  template <class T>
  Reader& Take(const char* of, Numbers<T>& numbers) {
    if (name_ != of) return *this;
    known_ = true;
    nb::ndarray<T, nb::c_contig, nb::device::cpu> array;
    if (!nb::try_cast(value_, array, /*convert=*/false)) RaiseType(name_ + ": is no contiguous array of its type");
    numbers = array;
    return *this;
  }
  // A dict of arrays.
  template <class T>
  Reader& Take(const char* of, std::optional<T>& codes) {
    if (name_ != of) return *this;
    known_ = true;
    nb::dict arrays;
    if (!nb::try_cast(value_, arrays, /*convert=*/false)) RaiseType(name_ + ": is no dict");
    ReadCodes(arrays, codes.emplace());
    return *this;
  }
  void Finish() const {
    if (!known_) RaiseType("unexpected array '" + name_ + "'");
  }

 private:
  static void ReadCodes(nb::dict arrays, KeyCodes& codes);
  static void ReadCodes(nb::dict arrays, PoolCodes& codes);

  std::string name_;
  nb::handle value_;
  bool known_ = false;
};

template <class T>
T* DataOf(const Numbers<T>& numbers) {
  return numbers ? numbers->data() : nullptr;
}

void Reader::ReadCodes(nb::dict arrays, KeyCodes& c) {
  for (const auto& [key, value] : arrays) {
    Reader(nb::cast<std::string>(key), value)
        .Take("keys", c.keys)
        .Take("key_scales", c.key_scales)
        .Take("values", c.values)
        .Take("value_scales", c.value_scales)
        .Take("fine_values", c.fine_values)
        .Take("fine", c.fine)
        .Take("not_finite", c.not_finite)
        .Finish();
  }
  c.pointers = {DataOf(c.keys),        DataOf(c.key_scales), DataOf(c.values),    DataOf(c.value_scales),
                DataOf(c.fine_values), DataOf(c.fine),       DataOf(c.not_finite)};
}

void Reader::ReadCodes(nb::dict arrays, PoolCodes& c) {
  for (const auto& [key, value] : arrays) {
    Reader(nb::cast<std::string>(key), value)
        .Take("rows", c.rows)
        .Take("factors", c.factors)
        .Take("shifts", c.shifts)
        .Finish();
  }
  c.pointers = {DataOf(c.rows), DataOf(c.factors), DataOf(c.shifts)};
}

}  // namespace

void PartArrays::Read(nb::dict arrays) {
  for (const auto& [key, value] : arrays) {
    Reader(nb::cast<std::string>(key), value)
        .Take("key_survey", key_survey)
        .Take("key_survey_out", key_survey_out)
        .Take("pool_lse", pool_lse)
        .Take("pool_lse_out", pool_lse_out)
        .Take("pool_rows", pool_rows)
        .Take("pool_rows_out", pool_rows_out)
        .Take("pool_counts", pool_counts)
        .Take("pool_counts_out", pool_counts_out)
        .Take("key_codes", key_codes)
        .Take("key_codes_out", key_codes_out)
        .Take("pool_codes", pool_codes)
        .Take("pool_codes_out", pool_codes_out)
        .Finish();
  }
}

void PartArrays::Set(RunArgs& args) const {
  args.key_survey = DataOf(key_survey);
  args.key_survey_out = DataOf(key_survey_out);
  args.pool_lse = DataOf(pool_lse);
  args.pool_lse_out = DataOf(pool_lse_out);
  args.pool_rows = DataOf(pool_rows);
  args.pool_rows_out = DataOf(pool_rows_out);
  args.pool_counts = DataOf(pool_counts);
  args.pool_counts_out = DataOf(pool_counts_out);
  args.key_codes = key_codes ? &key_codes->pointers : nullptr;
  args.key_codes_out = key_codes_out ? &key_codes_out->pointers : nullptr;
  args.pool_codes = pool_codes ? &pool_codes->pointers : nullptr;
  args.pool_codes_out = pool_codes_out ? &pool_codes_out->pointers : nullptr;
}

void PartArrays::Check(const sparge_plan* plan, const PlanDesc& desc) const {
  const int64_t survey = desc.batch * desc.kv_heads * (desc.qk_dim + 3);
  const int64_t rows = desc.batch * desc.q_heads * sparge_plan_pools(plan);
  const auto blocks_of = [](int64_t tokens, int64_t block) { return (tokens + block - 1) / block; };
  const int64_t blocks = desc.batch * desc.q_heads * blocks_of(desc.q_tokens, SPARGE_BLOCK_Q);
  const int64_t keys = desc.batch * desc.kv_heads * desc.kv_tokens;
  const int64_t row = blocks_of(desc.qk_dim, 4) * 4;  // of integers
  const int64_t key_blocks = desc.batch * desc.kv_heads * blocks_of(desc.kv_tokens, SPARGE_BLOCK_K);
  const auto check = [](const char* name, const auto& numbers, int64_t wanted) {
    if (numbers && static_cast<int64_t>(numbers->size()) != wanted) {
      throw std::length_error(std::string(name) + " has " + std::to_string(numbers->size()) + " entries, not " +
                              std::to_string(wanted));
    }
  };
  check("key_survey", key_survey, survey);
  check("key_survey_out", key_survey_out, survey);
  check("pool_lse", pool_lse, rows);
  check("pool_lse_out", pool_lse_out, rows);
  check("pool_rows", pool_rows, rows * desc.qk_dim);
  check("pool_rows_out", pool_rows_out, rows * desc.qk_dim);
  check("pool_counts", pool_counts, blocks);
  check("pool_counts_out", pool_counts_out, blocks);
  for (const std::optional<KeyCodes>* codes : {&key_codes, &key_codes_out}) {
    if (!*codes) continue;
    check("keys", (*codes)->keys, keys * row);
    check("key_scales", (*codes)->key_scales, keys);
    check("values", (*codes)->values, keys * desc.v_dim);
    check("fine_values", (*codes)->fine_values, keys * desc.v_dim);
    check("value_scales", (*codes)->value_scales, key_blocks * desc.v_dim);
    check("fine", (*codes)->fine, key_blocks);
    check("not_finite", (*codes)->not_finite, key_blocks);
  }
  for (const std::optional<PoolCodes>* codes : {&pool_codes, &pool_codes_out}) {
    if (!*codes) continue;
    check("rows", (*codes)->rows, rows * row);
    check("factors", (*codes)->factors, rows);
    check("shifts", (*codes)->shifts, rows);
  }
}

Call::Call(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::dict options, Asker asker, Outputs outputs,
           Place place)
    : q_("q", q, place), k_("k", k, place), outputs_(std::move(outputs)) {
  described_.place = place;
  described_.layout = ReadLayout(options);
  const TensorView q_view = View(q_.array(), described_.layout);
  const TensorView k_view = View(k_.array(), described_.layout);
  TensorView v_view;
  if (!v.is_none()) {
    v_ = Input("v", v, place);
    v_view = View(v_.array(), described_.layout);
  }
  ReadCall(q_view, k_view, v.is_none() ? nullptr : &v_view, options, asker, described_);

  args_.q = q_view.tensor;
  args_.k = k_view.tensor;
  args_.v = v_view.tensor;
  args_.mask = described_.mask_view;
  if (!out.is_none()) {
    out_ = ImportOutput("out", out, place);
    const TensorView view = ViewOutput(out_, described_.layout);
    CheckShape("out", view, {q_view.shape[0], q_view.shape[1], q_view.shape[2], v_view.shape[3]});
    args_.o = view.tensor;
  }
  if (described_.map) {
    args_.map = static_cast<const uint8_t*>(described_.map->array().data);
    args_.map_batch_stride = described_.map_batch_stride;
    args_.map_head_stride = described_.map_head_stride;
  }
  if (outputs_.lse) args_.lse = ViewLse(*outputs_.lse, q_view);
  if (outputs_.map) args_.map_out = static_cast<uint8_t*>(outputs_.map->data);
  outputs_.part.Set(args_);
  if (outputs_.stats) {
    outputs_.stats->heads.resize(static_cast<size_t>(described_.desc.batch * described_.desc.q_heads));
    args_.stats = &outputs_.stats->stats;
    args_.head_stats = outputs_.stats->heads.data();
  }
}

}  // namespace sparge::python
