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

void PartArrays::Read(nb::dict arrays) {
  for (const auto& [key, value] : arrays) {
    const std::string name = nb::cast<std::string>(key);
    bool known = false;
    const auto read = [&](const char* of, auto& numbers) {
      if (name != of) return;
      known = true;
      typename std::remove_reference_t<decltype(numbers)>::value_type array;
      if (!nb::try_cast(value, array, /*convert=*/false)) RaiseType(name + ": is no contiguous array of its type");
      numbers = array;
    };
    read("key_survey", key_survey);
    read("key_survey_out", key_survey_out);
    read("pool_lse", pool_lse);
    read("pool_lse_out", pool_lse_out);
    read("pool_rows", pool_rows);
    read("pool_rows_out", pool_rows_out);
    read("pool_counts", pool_counts);
    read("pool_counts_out", pool_counts_out);
    if (!known) RaiseType("unexpected array '" + name + "'");
  }
}

void PartArrays::Set(RunArgs& args) const {
  const auto data = [](const auto& numbers) { return numbers ? numbers->data() : nullptr; };
  args.key_survey = data(key_survey);
  args.key_survey_out = data(key_survey_out);
  args.pool_lse = data(pool_lse);
  args.pool_lse_out = data(pool_lse_out);
  args.pool_rows = data(pool_rows);
  args.pool_rows_out = data(pool_rows_out);
  args.pool_counts = data(pool_counts);
  args.pool_counts_out = data(pool_counts_out);
}

void PartArrays::Check(const sparge_plan* plan, const PlanDesc& desc) const {
  const int64_t survey = desc.batch * desc.kv_heads * (desc.qk_dim + 3);
  const int64_t rows = desc.batch * desc.q_heads * sparge_plan_pools(plan);
  const int64_t blocks = desc.batch * desc.q_heads * ((desc.q_tokens + SPARGE_BLOCK_Q - 1) / SPARGE_BLOCK_Q);
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
