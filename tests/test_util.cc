// Shared by the tests.
#include "tests/test_util.h"

#include <algorithm>
#include <cstring>

#include "src/base/half.h"

namespace sparge::testing {

using impl::DtypeBytes, impl::LoadElement, impl::StoreElement;

TestTensor::TestTensor(int64_t b, int64_t h, int64_t t, int64_t d, sparge_dtype dtype, Layout layout)
    : batch(b), heads(h), tokens(t), dim(d) {
  int64_t elements = 0;
  if (layout == Layout::kTokens) {
    view_ = {nullptr, dtype, t * h * d, d, h * d};
    elements = b * t * h * d;
  } else {
    // Odd gaps: no row but the first is aligned.
    const int64_t row = layout == Layout::kPrime ? d + 7 : d;
    const int64_t head = row * t + (layout == Layout::kPrime ? 13 : 0);
    view_ = {nullptr, dtype, head * h, head, row};
    elements = b * h * head;
  }
  bytes_ = std::make_shared<std::vector<uint8_t>>(static_cast<size_t>(elements + 1) * DtypeBytes(dtype), 0xFF);
  view_.data = bytes_->data();
}

int64_t TestTensor::At(int64_t b, int64_t h, int64_t t, int64_t d) const {
  return b * view_.batch_stride + h * view_.head_stride + t * view_.token_stride + d;
}
float TestTensor::Get(int64_t b, int64_t h, int64_t t, int64_t d) const {
  return LoadElement(view_.data, view_.dtype, At(b, h, t, d));
}
void TestTensor::Set(int64_t b, int64_t h, int64_t t, int64_t d, float value) {
  StoreElement(view_.data, view_.dtype, At(b, h, t, d), value);
}
void TestTensor::Fill(const std::function<float(int64_t, int64_t, int64_t, int64_t)>& value) {
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t d = 0; d < dim; ++d) Set(b, h, t, d, value(b, h, t, d));
      }
    }
  }
}

namespace {

// Unit normal noise, or a walk whose neighbours have cosine 0.98 and which jumps to a new place every ~100 tokens.
void FillRandom(TestTensor& tensor, bool correlated, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  std::vector<float> state(static_cast<size_t>(tensor.dim));
  for (int64_t b = 0; b < tensor.batch; ++b) {
    for (int64_t h = 0; h < tensor.heads; ++h) {
      for (int64_t t = 0; t < tensor.tokens; ++t) {
        const bool jump = !correlated || t == 0 || uniform(random) < 0.01f;
        for (int64_t d = 0; d < tensor.dim; ++d) {
          float& x = state[static_cast<size_t>(d)];
          x = jump ? normal(random) : 0.98f * x + 0.199f * normal(random);
          tensor.Set(b, h, t, d, x);
        }
      }
    }
  }
}

RunArgs ArgsFor(const Problem& problem) {
  RunArgs args;
  args.q = problem.q.view();
  args.k = problem.k.view();
  args.v = problem.v.view();
  args.mask = problem.mask;
  return args;
}

void SetMap(const Problem& problem, RunArgs& args) {
  if (problem.desc.select != SPARGE_SELECT_MAP) return;
  args.map = problem.map.data();
  args.map_batch_stride = problem.map_batch_stride;
  args.map_head_stride = problem.map_head_stride;
}

void SetResult(const Problem& problem, const Plan& plan, Result& result, RunArgs& args) {
  const Case& shape = problem.shape;
  result.o = TestTensor(shape.batch, shape.q_heads, shape.q_tokens, shape.v_dim, shape.o_type, shape.layout);
  result.lse.assign(static_cast<size_t>(shape.batch * shape.q_heads * shape.q_tokens), 12345.0f);
  std::tie(result.q_blocks, result.k_blocks) = plan.map_shape();
  const int64_t sequences = problem.desc.batch;
  result.map.assign(static_cast<size_t>(sequences * shape.q_heads * result.q_blocks * result.k_blocks), 7);
  result.head_stats.resize(static_cast<size_t>(sequences * shape.q_heads));
  args.o = result.o.view();
  args.lse = {result.lse.data(), shape.q_heads * shape.q_tokens, shape.q_tokens};
  args.map_out = result.map.data();
  args.stats = &result.stats;
  args.head_stats = result.head_stats.data();
}

}  // namespace

Problem::Problem(const Case& given) : shape(given) {
  if (shape.kv_heads == 0) shape.kv_heads = shape.q_heads;
  if (shape.kv_tokens < 0) shape.kv_tokens = shape.q_tokens;
  if (shape.v_dim == 0) shape.v_dim = shape.qk_dim;
  desc.batch = shape.batch;
  desc.q_heads = shape.q_heads;
  desc.kv_heads = shape.kv_heads;
  desc.q_tokens = shape.q_tokens;
  desc.kv_tokens = shape.kv_tokens;
  desc.qk_dim = shape.qk_dim;
  desc.v_dim = shape.v_dim;
  desc.select = SPARGE_SELECT_ALL;
  desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
  std::mt19937 random(shape.seed);
  q = TestTensor(shape.batch, shape.q_heads, shape.q_tokens, shape.qk_dim, shape.q_type, shape.layout);
  k = TestTensor(shape.batch, shape.kv_heads, shape.kv_tokens, shape.qk_dim, shape.k_type, shape.layout);
  v = TestTensor(shape.batch, shape.kv_heads, shape.kv_tokens, shape.v_dim, shape.v_type, shape.layout);
  FillRandom(q, shape.correlated, random);
  FillRandom(k, shape.correlated, random);
  FillRandom(v, shape.correlated, random);
}

Result RunProblem(const Context& context, const Problem& problem) {
  Plan plan(context, problem.desc);
  Result result;
  RunArgs args = ArgsFor(problem);
  SetResult(problem, plan, result, args);
  SetMap(problem, args);
  plan.Run(args);
  return result;
}

Result Predict(const Context& context, const Problem& problem) {
  Plan plan(context, problem.desc);
  Result result;
  RunArgs args = ArgsFor(problem);
  SetResult(problem, plan, result, args);
  SetMap(problem, args);
  args.v = args.o = {};
  args.lse = {};
  plan.Predict(args);
  return result;
}

Result Reference(const Context& context, const Problem& problem, const std::vector<uint8_t>& map) {
  Plan plan(context, problem.desc);
  Result result;
  RunArgs args = ArgsFor(problem);
  SetResult(problem, plan, result, args);
  result.o = TestTensor(problem.shape.batch, problem.shape.q_heads, problem.shape.q_tokens, problem.shape.v_dim);
  args.o = result.o.view();
  if (!map.empty()) {
    args.map = map.data();
    args.map_head_stride = result.q_blocks * result.k_blocks;
    args.map_batch_stride = args.map_head_stride * problem.shape.q_heads;
  }
  plan.Reference(args);
  return result;
}

namespace {

// Sums of `of` over all differences, against sums over what is expected.
template <class Of>
double RelativeSums(const TestTensor& a, const TestTensor& b, const Of& of) {
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < b.batch; ++i) {
    for (int64_t h = 0; h < b.heads; ++h) {
      for (int64_t t = 0; t < b.tokens; ++t) {
        for (int64_t d = 0; d < b.dim; ++d) {
          const double expected = b.Get(i, h, t, d);
          difference += of(a.Get(i, h, t, d) - expected);
          norm += of(expected);
        }
      }
    }
  }
  if (difference == 0) return 0;
  return difference / norm;  // infinite if the reference is zero and we are not
}

}  // namespace

double RelativeL1(const TestTensor& a, const TestTensor& b) {
  return RelativeSums(a, b, [](double x) { return std::fabs(x); });
}
double RelativeL2(const TestTensor& a, const TestTensor& b) {
  return std::sqrt(RelativeSums(a, b, [](double x) { return x * x; }));
}

double MaxAbsDifference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return kInf;
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) most = std::max(most, std::fabs(static_cast<double>(a[i]) - b[i]));
    if (std::isnan(a[i]) != std::isnan(b[i])) return kInf;
  }
  return most;
}

bool AllFinite(const TestTensor& tensor) {
  for (int64_t b = 0; b < tensor.batch; ++b) {
    for (int64_t h = 0; h < tensor.heads; ++h) {
      for (int64_t t = 0; t < tensor.tokens; ++t) {
        for (int64_t d = 0; d < tensor.dim; ++d) {
          if (!std::isfinite(tensor.Get(b, h, t, d))) return false;
        }
      }
    }
  }
  return true;
}

void RandomMap(Problem& problem, double share, uint32_t seed) {
  const int64_t q_blocks = (problem.shape.q_tokens + SPARGE_BLOCK_Q - 1) / SPARGE_BLOCK_Q;
  const int64_t k_blocks = (problem.shape.kv_tokens + SPARGE_BLOCK_K - 1) / SPARGE_BLOCK_K;
  problem.map_head_stride = q_blocks * k_blocks;
  problem.map_batch_stride = problem.map_head_stride * problem.shape.q_heads;
  problem.map.resize(static_cast<size_t>(problem.map_batch_stride * problem.shape.batch));
  std::mt19937 random(seed);
  std::bernoulli_distribution keep(share);
  for (uint8_t& tile : problem.map) tile = keep(random) ? 1 : 0;
  problem.desc.select = SPARGE_SELECT_MAP;
}

double Tolerance(sparge_precision precision, sparge_dtype o_type, int64_t qk_dim) {
  // Largest of 576 normal numbers is about 3.5 standard deviations; rounding to a step has the error step / sqrt(12).
  const double rms = 3.5 / std::sqrt(12.0);
  double squared = 0, contract = 0;
  if (precision == SPARGE_PRECISION_INT8) {
    // The coarsest grid: q 63, k 127, v 127 steps; p 127 steps, with a row of probabilities about 0.2 of its maximum.
    squared = std::pow(rms / 63, 2) + 2 * std::pow(rms / 127, 2) + std::pow(0.29 / (127 * 0.2), 2);
    contract = 3e-2;
  } else if (precision == SPARGE_PRECISION_INT16) {
    const double step = std::max(rms / 32767, std::sqrt(static_cast<double>(qk_dim)) / 46300 / std::sqrt(12.0));
    squared = 2 * step * step + std::pow(rms / 4095, 2) + std::pow(0.29 / (8191 * 0.2), 2);
    contract = 1e-3;
  } else {
    const double epsilon = std::numeric_limits<float>::epsilon();
    squared = std::pow(epsilon * std::sqrt(static_cast<double>(qk_dim)) * 4, 2) + std::pow(epsilon * 16, 2);
    contract = 1e-5;
  }
  const double own = std::min(2 * std::sqrt(squared), contract);
  const double output = o_type == SPARGE_F16 ? 0x1p-11 : o_type == SPARGE_BF16 ? 0x1p-8 : 0;  // half an ulp, relative
  return own + output;
}

const char* Name(sparge_precision precision) {
  return precision == SPARGE_PRECISION_FP32 ? "fp32" : precision == SPARGE_PRECISION_INT16 ? "int16" : "int8";
}

}  // namespace sparge::testing
