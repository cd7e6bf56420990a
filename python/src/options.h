// The keyword arguments of sparge.attention and its siblings, as a plan.
#ifndef SPARGE_PYTHON_SRC_OPTIONS_H_
#define SPARGE_PYTHON_SRC_OPTIONS_H_

#include <memory>
#include <optional>
#include <vector>

#include "python/src/arrays.h"

namespace sparge::python {

// One call, as its arguments say it; arrays that the descriptor points to are kept here.
struct Described {
  PlanDesc desc;
  Place place;  // of all arrays
  Layout layout = Layout::kHeadsFirst;
  int32_t threads = 0;
  std::shared_ptr<Calibration> calibration;  // SELECT_AUTO
  std::optional<Input> mask;
  sparge_mask mask_view{};
  std::optional<Input> map;
  int64_t map_batch_stride = 0;
  int64_t map_head_stride = 0;

  std::vector<int64_t> q_offsets, kv_offsets;
  std::vector<float> alibi_slopes, sink_logits;
  std::vector<sparge_head_params> heads;
  std::vector<sparge_precision> head_precision;
};

// Who says how exactly: the options of the call, or a layer, which is then told only what is asked.
enum class Asker { kCaller, kLayer };

// `q`, `k`, `v` give the shapes (`v` may be absent: prediction). Raises what is wrong with any of them.
// Not movable once read: the descriptor points into it.
void ReadCall(const TensorView& q, const TensorView& k, const TensorView* v, nb::dict options, Asker asker,
              Described& described);

// A sparge_precision, or SPARGE_PRECISION_AUTO for None.
int32_t ReadPrecision(nb::handle name);
const char* NameOf(sparge_precision precision);
const char* NameOf(sparge_select select);

// The layout alone, which is needed to read the shapes.
Layout ReadLayout(nb::dict options);

}  // namespace sparge::python
#endif  // SPARGE_PYTHON_SRC_OPTIONS_H_
