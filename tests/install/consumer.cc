// Uses the installed C++ header and library: a small attention compared with the library's own reference.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sparge/sparge.hpp>
#include <vector>

int main() {
  constexpr int64_t kHeads = 2;
  constexpr int64_t kTokens = 200;
  constexpr int64_t kDim = 32;
  std::vector<float> q(kHeads * kTokens * kDim);
  std::vector<float> k(q.size());
  std::vector<float> v(q.size());
  std::vector<float> o(q.size());
  std::vector<float> expected(q.size());
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] = std::sin(0.7f * static_cast<float>(i));
    k[i] = std::cos(1.3f * static_cast<float>(i));
    v[i] = std::sin(2.1f * static_cast<float>(i) + 0.5f);
  }
  const auto view = [](std::vector<float>& data) {
    return sparge::ViewHeads(data.data(), SPARGE_F32, kHeads, kTokens, kDim);
  };

  const sparge::Context context;
  sparge::PlanDesc desc;
  desc.batch = 1;
  desc.q_heads = desc.kv_heads = kHeads;
  desc.q_tokens = desc.kv_tokens = kTokens;
  desc.qk_dim = desc.v_dim = kDim;
  desc.precision = SPARGE_PRECISION_FP32;
  desc.select = SPARGE_SELECT_ALL;
  desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
  sparge::Plan plan(context, desc);
  sparge::Stats stats;
  sparge::RunArgs args;
  args.q = view(q);
  args.k = view(k);
  args.v = view(v);
  args.o = view(o);
  args.stats = &stats;
  plan.Run(args);
  args.o = view(expected);
  plan.Reference(args);

  float worst = 0;
  for (size_t i = 0; i < o.size(); ++i) worst = std::max(worst, std::fabs(o[i] - expected[i]));
  std::printf("sparge from C++ on %s: largest difference to the reference %.2g\n", stats.isa, worst);

  desc.qk_dim = 0;
  bool refused = false;
  try {
    sparge::Plan bad(context, desc);
  } catch (const sparge::Error& error) {
    refused = error.status() == SPARGE_INVALID_ARGUMENT;
  }
  return worst < 1e-5f && refused && stats.sparsity() == 0.0 ? 0 : 1;
}
