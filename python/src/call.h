// The arguments of one call from Python, as the library takes them.
#ifndef SPARGE_PYTHON_SRC_CALL_H_
#define SPARGE_PYTHON_SRC_CALL_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "python/src/arrays.h"
#include "python/src/options.h"

namespace sparge::python {

struct CallStats {
  Stats stats;
  std::vector<sparge_head_stats> heads;  // batch x q_heads
};

template <class T>
using Numbers = std::optional<nb::ndarray<T, nb::c_contig, nb::device::cpu>>;

// sparge_key_codes and sparge_pool_codes: in Python a dict of arrays by the same names.
struct KeyCodes {
  Numbers<int8_t> keys, values, fine_values;
  Numbers<float> key_scales, value_scales;
  Numbers<uint8_t> fine;
  Numbers<uint64_t> not_finite;
  sparge_key_codes pointers = {};
};
struct PoolCodes {
  Numbers<int8_t> rows;
  Numbers<float> factors, shifts;
  sparge_pool_codes pointers = {};
};

// What parts of a larger call leave for each other, as sparge_run_args has it, contiguous. Missing ones are not wanted.
struct PartArrays {
  std::optional<KeyCodes> key_codes, key_codes_out;
  std::optional<PoolCodes> pool_codes, pool_codes_out;
  Numbers<double> key_survey, key_survey_out, pool_lse, pool_lse_out;
  Numbers<float> pool_rows, pool_rows_out;
  Numbers<int32_t> pool_counts, pool_counts_out;

  // By name. Raises for others.
  void Read(nb::dict arrays);
  void Set(RunArgs& args) const;
  // Raises if one of them has another size than the plan needs.
  void Check(const sparge_plan* plan, const PlanDesc& desc) const;
};

// What a call may write besides the result.
struct Outputs {
  std::optional<Array> lse, map;
  std::shared_ptr<CallStats> stats;
  PartArrays part = {};
};

// Nothing for None.
std::optional<Array> OptionalOutput(const char* name, nb::handle object, Place place = {});

// Arrays and options, read and checked. Points into itself and into the caller's arrays.
class Call {
 public:
  // `v` and `out` may be None; all arrays are in that place. Raises what is wrong.
  Call(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::dict options, Asker asker, Outputs outputs,
       Place place = {});
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const Described& described() const { return described_; }
  const Outputs& outputs() const { return outputs_; }
  RunArgs& args() { return args_; }
  // 1 where others would not be awake in time to help; else what was asked for, 0 = the default.
  int32_t threads() const;

 private:
  Described described_;
  Input q_, k_, v_;
  Array out_;
  Outputs outputs_;
  RunArgs args_;
};

// The same for work that is not a call of attention, in multiply-adds.
int32_t ThreadsFor(double work, int32_t wanted);

void CheckShape(const char* name, const TensorView& view, const std::array<int64_t, 4>& wanted);
// Log-sum-exps that go with the queries `q`.
sparge_lse ViewLse(const Array& array, const TensorView& q);

}  // namespace sparge::python
#endif  // SPARGE_PYTHON_SRC_CALL_H_
