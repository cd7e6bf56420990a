// Shared by the tests: tensors in any type and layout, problems, the reference result, error measures.
#ifndef SPARGE_TESTS_TEST_UTIL_H_
#define SPARGE_TESTS_TEST_UTIL_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <sparge/sparge.hpp>
#include <string>
#include <tuple>
#include <vector>

namespace sparge::testing {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// SPARGE_TEST_QUICK=1 shortens sweeps, for slow machines and emulators.
inline bool Quick() { return std::getenv("SPARGE_TEST_QUICK") != nullptr; }

// Instruction sets that this machine can run.
// With SPARGE_TEST_ONE_ISA only the one that a context chooses: for runs whose findings do not depend on it (races).
inline std::vector<std::string> RunnableIsas() {
  if (std::getenv("SPARGE_TEST_ONE_ISA") != nullptr) return {Context(1).isa()};
  std::vector<std::string> names;
  for (int32_t i = 0; i < sparge_isa_count(); ++i) {
    sparge_isa isa;
    sparge_isa_init(&isa);
    Check(sparge_isa_at(i, &isa));
    if (isa.runnable != 0) names.emplace_back(isa.name);
  }
  return names;
}

enum class Layout { kHeads, kTokens, kPrime };  // (B,H,N,D), (B,N,H,D), (B,H,N,D) with prime row strides

// A (batch, heads, tokens, dim) tensor that owns its memory. Gaps between rows hold NaN, so that a read of them shows.
class TestTensor {
 public:
  TestTensor() = default;
  TestTensor(int64_t batch, int64_t heads, int64_t tokens, int64_t dim, sparge_dtype dtype = SPARGE_F32,
             Layout layout = Layout::kHeads);

  float Get(int64_t b, int64_t h, int64_t t, int64_t d) const;
  void Set(int64_t b, int64_t h, int64_t t, int64_t d, float value);
  void Fill(const std::function<float(int64_t, int64_t, int64_t, int64_t)>& value);
  sparge_tensor view() const { return view_; }
  const std::vector<uint8_t>& bytes() const { return *bytes_; }
  int64_t batch = 0, heads = 0, tokens = 0, dim = 0;

 private:
  int64_t At(int64_t b, int64_t h, int64_t t, int64_t d) const;
  std::shared_ptr<std::vector<uint8_t>> bytes_;
  sparge_tensor view_{};
};

// What a test varies. Zero kv fields take the query's value.
struct Case {
  int64_t batch = 1, q_heads = 1, kv_heads = 0, q_tokens = 64, kv_tokens = -1, qk_dim = 64, v_dim = 0;
  sparge_dtype q_type = SPARGE_F32, k_type = SPARGE_F32, v_type = SPARGE_F32, o_type = SPARGE_F32;
  Layout layout = Layout::kHeads;
  uint32_t seed = 1;
  bool correlated = false;  // neighbouring tokens are alike, as in real heads
};

// Inputs and description of one problem; adjust `desc` and the tensors at will before running.
struct Problem {
  explicit Problem(const Case& shape);

  Case shape;
  PlanDesc desc;
  TestTensor q, k, v;
  std::vector<uint8_t> mask_bytes;  // filled by the test; strides in `mask`
  sparge_mask mask{};
  std::vector<uint8_t> map;
  int64_t map_batch_stride = 0, map_head_stride = 0;
};

struct Result {
  TestTensor o;
  std::vector<float> lse;  // (batch, heads, tokens)
  std::vector<uint8_t> map;
  int64_t q_blocks = 0, k_blocks = 0;
  Stats stats;
  std::vector<sparge_head_stats> head_stats;
};

Result RunProblem(const Context& context, const Problem& problem);
Result Predict(const Context& context, const Problem& problem);
// The oracle under `map` (empty: all visible tiles), in float.
Result Reference(const Context& context, const Problem& problem, const std::vector<uint8_t>& map = {});

// sum |a - b| / sum |b|; 0 if both are zero.
double RelativeL1(const TestTensor& a, const TestTensor& b);
double RelativeL2(const TestTensor& a, const TestTensor& b);
double MaxAbsDifference(const std::vector<float>& a, const std::vector<float>& b);  // equal infinities differ by 0
bool AllFinite(const TestTensor& tensor);

// A random block map that keeps about `share` of the tiles, one per head.
void RandomMap(Problem& problem, double share, uint32_t seed);

// Relative L1 allowed for noise with scores of standard deviation <= 1: twice the root mean square of the rounding
// errors (FlashAttention's factor for "as good as its precision"), and never more than the public contract.
double Tolerance(sparge_precision precision, sparge_dtype o_type, int64_t qk_dim);

const char* Name(sparge_precision precision);

}  // namespace sparge::testing
#endif  // SPARGE_TESTS_TEST_UTIL_H_
