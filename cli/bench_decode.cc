// bench_decode.cc - steps of decoding over the layers of a made-up model, checked, and beside what memory gives.
#include "cli/bench_decode.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <sparge/sparge.hpp>
#include <string>
#include <thread>
#include <vector>

#include "cli/bench_data.h"
#include "cli/bench_verify.h"
#include "cli/machine.h"
#include "cli/metrics.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/progress.h"
#include "cli/report.h"
#include "cli/text.h"

namespace sparge::cli {
namespace {

// So many layers that their keys and values are no more in a cache when their turn comes again.
constexpr int64_t kBytesOfAll = int64_t{256} << 20;
constexpr int64_t kMostLayers = 32;
constexpr int64_t kDefaultRounds = 15;

double MsOf(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

// What threads read from memory together, GB/s; the best of several passes.
double ReadBandwidth(int32_t threads) {
  const std::vector<uint64_t> memory(static_cast<size_t>(kBytesOfAll) / sizeof(uint64_t), 1);
  const size_t each = memory.size() / static_cast<size_t>(threads) / 4 * 4;
  std::vector<uint64_t> sums(static_cast<size_t>(threads));
  double best_ms = 1e30;
  for (int pass = 0; pass < 5; ++pass) {
    const double ms = MsOf([&] {
      std::vector<std::thread> readers;
      for (size_t t = 0; t < sums.size(); ++t) {
        readers.emplace_back([&, t] {
          const uint64_t* const from = memory.data() + t * each;
          uint64_t a = 0, b = 0, c = 0, d = 0;
          for (size_t i = 0; i < each; i += 4) a += from[i], b ^= from[i + 1], c += from[i + 2], d ^= from[i + 3];
          sums[t] = a + b + c + d;
        });
      }
      for (std::thread& reader : readers) reader.join();
    });
    best_ms = std::min(best_ms, ms);
  }
  const uint64_t used = std::accumulate(sums.begin(), sums.end(), uint64_t{0});  // so that it has to be read
  return used == 0 ? 0 : static_cast<double>(each * sums.size() * sizeof(uint64_t)) / best_ms * 1e-6;
}

struct DecodeResult {
  BenchCase c;
  double tensors_us = 1e30, packed_us = 1e30;  // of a layer, the best round
  double error = 0;                            // relative L1 of packed keys
  double bandwidth = 0;                        // GB/s, measured

  double Bytes() const { return 2.0 * static_cast<double>(c.tokens * c.kv_heads * c.dim); }  // packed, scales aside
  double Rate() const { return Bytes() / packed_us * 1e-3; }
};

// The layers of one case.
class Model {
 public:
  Model(const Context& context, const BenchCase& c) : context_(context), c_(c), inputs_(MakeInputs(c)) {
    const int64_t bytes = 2 * static_cast<int64_t>(inputs_.k.size());
    const int64_t layers = std::clamp<int64_t>(kBytesOfAll / std::max<int64_t>(bytes, 1), 1, kMostLayers);
    for (int64_t i = 0; i < layers; ++i) layers_.push_back({inputs_.k, inputs_.v, {}});
    out_.resize(static_cast<size_t>(c.heads * c.queries * c.dim));
  }

  // A step of all layers with so many of the keys; microseconds of one.
  double Step(int64_t keys, bool packed) {
    PlanDesc desc = DescribeCase(c_);
    desc.kv_tokens = keys;
    desc.query_offset = keys - c_.queries;
    desc.cache_tokens = packed ? c_.tokens : 0;
    desc.decode = packed ? 1 : 0;
    const double ms = MsOf([&] {
      for (LayerData& layer : layers_) Run(desc, layer);
    });
    return ms * 1e3 / static_cast<double>(layers_.size());
  }
  const std::vector<float>& out() const { return out_; }

 private:
  struct LayerData {
    std::vector<std::byte> k, v, cache;
  };

  void Run(const PlanDesc& desc, LayerData& layer) {
    Plan plan(context_, desc);
    RunArgs args;
    args.q = {inputs_.q.data(), c_.dtype, 0, c_.queries * c_.dim, c_.dim};
    args.k = {layer.k.data(), c_.dtype, 0, c_.tokens * c_.dim, c_.dim};
    args.v = {layer.v.data(), c_.dtype, 0, c_.tokens * c_.dim, c_.dim};
    args.o = {out_.data(), SPARGE_F32, 0, c_.queries * c_.dim, c_.dim};
    layer.cache.resize(std::max(layer.cache.size(), sparge_plan_cache_size(plan.get())));
    if (desc.cache_tokens > 0) {
      args.cache = layer.cache.data();
      args.cache_size = layer.cache.size();
    }
    plan.Run(args);
  }

  const Context& context_;
  BenchCase c_;
  BenchInputs inputs_;
  std::vector<LayerData> layers_;
  std::vector<float> out_;
};

// Keys grow by the queries' own from step to step, and both ways take turns.
DecodeResult Measure(const Context& context, const BenchCase& c, int64_t rounds) {
  DecodeResult result{c};
  Model model(context, c);
  const int64_t steps = std::min(rounds, c.tokens / c.queries / 2);
  model.Step(c.tokens - (steps + 1) * c.queries, true);  // packs
  for (int64_t i = 0; i <= steps; ++i) {
    const int64_t keys = c.tokens - (steps - i) * c.queries;
    const double tensors_us = model.Step(keys, false);
    const std::vector<float> expected = model.out();
    const double packed_us = model.Step(keys, true);
    ErrorTotals totals;
    totals.Add(model.out(), expected);
    if (!std::isnan(result.error))
      result.error = std::max(totals.RelativeL1(), result.error);  // NaN comes first, and stays
    if (i == 0) continue;                                          // finds the first memory
    result.tensors_us = std::min(result.tensors_us, tensors_us);
    result.packed_us = std::min(result.packed_us, packed_us);
  }
  return result;
}

std::vector<BenchCase> DecodeCases(const BenchOptions& given, int32_t all_threads) {
  BenchOptions options = given;
  const BenchOptions defaults;
  if (given.once || given.seconds || given.causal || given.data || given.pv_skip || given.dtype != SPARGE_F32 ||
      given.precisions != defaults.precisions || given.selects != defaults.selects) {
    throw UsageError(
        "--decode takes --tokens, --queries, --dim, --heads, --kv-heads, --threads, --rounds, --seed and --json only");
  }
  if (options.tokens.empty()) options.tokens = {512, 2048, 8192, 32768};
  if (options.dims.empty()) options.dims = {64};
  if (!options.heads) options.heads = 9;
  if (!options.kv_heads && *options.heads % 3 == 0) options.kv_heads = *options.heads / 3;
  options.queries = options.queries.value_or(1);
  if (*options.queries > SPARGE_FEW_QUERIES) {
    throw UsageError(Format("--queries %lld: --decode is for up to %d", static_cast<long long>(*options.queries),
                            SPARGE_FEW_QUERIES));
  }
  options.precisions = {SPARGE_PRECISION_INT8};
  options.dtype = SPARGE_F16;
  options.causal = true;
  std::vector<BenchCase> cases = ExpandCases(options, all_threads);
  for (const BenchCase& c : cases) {
    if (c.tokens < 4 * c.queries) {
      throw UsageError(
          Format("--tokens %lld: --decode needs four times as many as queries", static_cast<long long>(c.tokens)));
    }
  }
  return cases;
}

std::string Text(const std::vector<DecodeResult>& results, const char* isa) {
  const BenchCase& first = results.front().c;
  std::string text = CpuName() + ", " + isa + "\n";
  text += Format("%lld heads on %lld of keys, queries %lld, fp16 keys and values beside packed int8 ones\n\n",
                 static_cast<long long>(first.heads), static_cast<long long>(first.kv_heads),
                 static_cast<long long>(first.queries));
  text += "   depth  dim  threads  tensors us  packed us  faster   GB/s  of memory's   error\n";
  for (const DecodeResult& r : results) {
    text += Format("%8lld %4lld %8d %11.1f %10.1f %6.2fx %6.1f %12.0f%% %7.4f\n", static_cast<long long>(r.c.tokens),
                   static_cast<long long>(r.c.dim), r.c.threads, r.tensors_us, r.packed_us, r.tensors_us / r.packed_us,
                   r.Rate(), 100 * r.Rate() / r.bandwidth, r.error);
  }
  return text +
         "\nus: of one layer, its keys in memory and not in a cache; memory's GB/s were measured by reading only.\n";
}

std::string JsonText(const std::vector<DecodeResult>& results, const char* isa) {
  Json json{{"cpu", CpuName()}, {"isa", isa}, {"cases", Json::array()}};
  for (const DecodeResult& r : results) {
    json["cases"].push_back({{"depth", r.c.tokens},
                             {"queries", r.c.queries},
                             {"dim", r.c.dim},
                             {"heads", r.c.heads},
                             {"kv_heads", r.c.kv_heads},
                             {"threads", r.c.threads},
                             {"tensors_us", r.tensors_us},
                             {"packed_us", r.packed_us},
                             {"gb_per_s", r.Rate()},
                             {"memory_gb_per_s", r.bandwidth},
                             {"error", r.error}});
  }
  return Dump(json);
}

}  // namespace

int BenchDecode(const BenchOptions& options) {
  const std::vector<BenchCase> cases = DecodeCases(options, Context(0).threads());
  std::vector<DecodeResult> results;
  Progress progress("decoding", static_cast<int64_t>(cases.size()));
  std::string isa;
  for (const BenchCase& c : cases) {
    const Context context(c.threads);
    isa = context.isa();
    results.push_back(Measure(context, c, options.rounds.value_or(kDefaultRounds)));
    results.back().bandwidth = ReadBandwidth(c.threads);
    progress.Step();
  }
  PrintOut(options.json ? JsonText(results, isa.c_str()) : Text(results, isa.c_str()));
  const auto wrong = [](const DecodeResult& r) { return !(r.error <= ErrorBound(r.c)); };
  return std::any_of(results.begin(), results.end(), wrong) ? 1 : 0;
}

}  // namespace sparge::cli
