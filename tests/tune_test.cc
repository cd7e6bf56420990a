// Tuning: what it finds is what a run gives, and within the bounds; the same for any number of threads; it can be
// stopped; and it refuses by name.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <stdexcept>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

// As a model asks for it: nothing is said of how exactly.
Problem Plain(Problem p) {
  const PlanDesc plain;
  p.desc.precision = plain.precision;
  p.desc.select = plain.select;
  p.desc.params = plain.params;
  return p;
}

// Runs of alike tokens, of eight kinds at right angles: a token attends to its kind, by exp(strength) more than to the
// others. What a model learned (kinds and their values) is the same in all samples.
Problem Structured(const Case& shape, float strength = 10.0f) {
  constexpr int64_t kKinds = 8, kRun = 48;
  Problem p(shape);
  const auto kind = [&shape](int64_t token) {
    const uint64_t mixed = (static_cast<uint64_t>(token / kRun) + 1000 * shape.seed) * 0x9e3779b97f4a7c15u;
    return static_cast<int64_t>((mixed >> 40) % kKinds);
  };
  const float dim = static_cast<float>(p.shape.qk_dim);
  const float gain = std::sqrt(strength / std::sqrt(dim));  // q and k have strength * sqrt(dim) as product
  const auto point = [&](TestTensor& tensor) {
    tensor.Fill([&, old = tensor](int64_t b, int64_t h, int64_t t, int64_t d) {
      return 0.5f * gain * old.Get(b, h, t, d) + (d == kind(t) ? gain * std::sqrt(dim) : 0.0f);
    });
  };
  point(p.q);
  point(p.k);
  p.v.Fill([&, old = p.v](int64_t b, int64_t h, int64_t t, int64_t d) {
    return old.Get(b, h, t, d) +
           2.0f * std::sin(static_cast<float>(1 + 31 * h + 7 * d) * static_cast<float>(1 + kind(t)));
  });
  return Plain(std::move(p));
}

Case Shape(uint32_t seed, int64_t tokens = 768) {
  return {.q_heads = 2,
          .kv_heads = 1,
          .q_tokens = tokens,
          .kv_tokens = tokens,
          .qk_dim = 32,
          .seed = seed,
          .correlated = true};
}

// Samples in memory, and a record of what the tuner asked for.
class Samples : public TuneSamples {
 public:
  explicit Samples(std::vector<Problem> problems) : problems(std::move(problems)) {
    for (const Problem& p : this->problems) {
      RunArgs args;
      args.q = p.q.view();
      args.k = p.k.view();
      args.v = p.v.view();
      args.mask = p.mask;
      all_args.push_back(args);
    }
  }
  // Of one layer, not causal.
  explicit Samples(int count) : Samples(Make(count)) {}

  std::vector<const sparge_plan_desc*> Descriptors() const override {
    std::vector<const sparge_plan_desc*> descriptors;
    for (const Problem& p : problems) descriptors.push_back(&p.desc);
    return descriptors;
  }
  const sparge_run_args& Open(int64_t index) override {
    EXPECT_EQ(open, -1) << "two samples are open at once";
    open = index;
    opened.insert(index);
    return all_args[static_cast<size_t>(index)];
  }
  void Close(int64_t index) noexcept override {
    EXPECT_EQ(open, index);
    open = -1;
  }
  bool Stops(int64_t done, int64_t steps) override {
    progress.push_back(done);
    total = steps;
    return static_cast<int64_t>(progress.size()) == stop_at;
  }

  std::vector<Problem> problems;
  std::vector<RunArgs> all_args;
  std::set<int64_t> opened;
  int64_t open = -1, total = 0, stop_at = -1;
  std::vector<int64_t> progress;

 private:
  static std::vector<Problem> Make(int count) {
    std::vector<Problem> problems;
    for (int i = 0; i < count; ++i) problems.push_back(Structured(Shape(static_cast<uint32_t>(10 + i))));
    return problems;
  }
};

TunerDesc Bounds(double target_l1 = 0.05, double pv_l1 = 0.06) {
  TunerDesc desc;
  desc.target_l1 = target_l1;
  desc.pv_l1 = pv_l1;
  desc.name = "layer";
  return desc;
}

std::vector<TunedHead> Heads(const Tuner& tuner, int64_t count) {
  std::vector<TunedHead> heads;
  for (int64_t h = 0; h < count; ++h) heads.push_back(tuner.Head(h));
  return heads;
}

// All but the padding between members.
void ExpectSame(const std::vector<TunedHead>& a, const std::vector<TunedHead>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t h = 0; h < a.size(); ++h) {
    EXPECT_EQ(a[h].precision, b[h].precision);
    EXPECT_EQ(a[h].select, b[h].select);
    EXPECT_EQ(std::memcmp(&a[h].params, &b[h].params, sizeof(a[h].params)), 0);
    for (const auto member :
         {&TunedHead::sparsity, &TunedHead::work, &TunedHead::error, &TunedHead::pv_error, &TunedHead::round_l1}) {
      EXPECT_EQ(a[h].*member, b[h].*member);
    }
    EXPECT_EQ(a[h].verified_on, b[h].verified_on);
  }
}

double Share(int64_t part, int64_t whole) { return static_cast<double>(part) / static_cast<double>(whole); }

// sum |a - b| / sum |b| of one head.
double HeadL1(const TestTensor& a, const TestTensor& b, int64_t head) {
  double error = 0, size = 0;
  for (int64_t i = 0; i < b.batch * b.tokens * b.dim; ++i) {
    const int64_t d = i % b.dim, t = i / b.dim % b.tokens, batch = i / b.dim / b.tokens;
    error += std::fabs(a.Get(batch, head, t, d) - b.Get(batch, head, t, d));
    size += std::fabs(b.Get(batch, head, t, d));
  }
  return error / size;
}

// What runs of whole samples say of the heads of a preset, as means over the samples that were verified.
std::vector<TunedHead> MeasureHeads(const Context& context, const Samples& samples, const Tuner& tuner) {
  const sparge_layer_preset preset = tuner.Preset();
  std::vector<TunedHead> means(static_cast<size_t>(preset.q_heads));
  double count = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(samples.problems.size()); ++i) count += tuner.VerifiedOn(i) ? 1 : 0;
  for (size_t i = 0; i < samples.problems.size(); ++i) {
    if (!tuner.VerifiedOn(static_cast<int64_t>(i))) continue;
    Problem p = samples.problems[i];
    std::vector<sparge_head_params> heads(preset.heads, preset.heads + preset.q_heads);
    p.desc.select = preset.select;
    p.desc.predictor = preset.predictor;
    p.desc.heads = heads.data();
    p.desc.head_precision = preset.head_precision;
    const Result skipping = RunProblem(context, p);
    for (sparge_head_params& head : heads) head.pv_skip = SPARGE_PV_SKIP_OFF;
    const Result plain = RunProblem(context, p);
    p.desc.select = SPARGE_SELECT_ALL;
    const Result dense = RunProblem(context, p);
    for (int64_t h = 0; h < preset.q_heads; ++h) {
      TunedHead& mean = means[static_cast<size_t>(h)];
      sparge_head_stats sum{};
      for (int64_t b = 0; b < p.desc.batch; ++b) {
        const sparge_head_stats& stats = skipping.head_stats[static_cast<size_t>(b * preset.q_heads + h)];
        sum.qk_eligible += stats.qk_eligible;
        sum.qk_computed += stats.qk_computed;
        sum.pv_eligible += stats.pv_eligible;
        sum.pv_computed += stats.pv_computed;
      }
      const double qk = Share(sum.qk_computed, sum.qk_eligible);
      mean.sparsity += (1 - qk) / count;
      mean.work += 0.5 * (qk + Share(sum.pv_computed, sum.pv_eligible)) / count;
      mean.error += HeadL1(plain.o, dense.o, h) / count;
      mean.pv_error += HeadL1(skipping.o, dense.o, h) / count;
    }
  }
  return means;
}

// Six digits are kept; and a head alone is summed in another order than among others.
void ExpectMeasured(const Context& context, const Samples& samples, const Tuner& tuner) {
  const std::vector<TunedHead> want = MeasureHeads(context, samples, tuner);
  for (size_t h = 0; h < want.size(); ++h) {
    const TunedHead head = tuner.Head(static_cast<int64_t>(h));
    EXPECT_NEAR(head.sparsity, want[h].sparsity, 1e-5) << "head " << h;
    EXPECT_NEAR(head.work, want[h].work, 1e-5) << "head " << h;
    EXPECT_NEAR(head.error, want[h].error, 1e-5 + 1e-4 * want[h].error) << "head " << h;
    EXPECT_NEAR(head.pv_error, want[h].pv_error, 1e-5 + 1e-4 * want[h].pv_error) << "head " << h;
  }
}

TEST(Tune, KeepsTheBoundsAndSaysWhatARunGives) {
  const Context context(2);
  Samples samples(3);
  Tuner tuner(context, Bounds(), samples);
  ASSERT_TRUE(tuner.Run());
  EXPECT_EQ(samples.opened.size(), 3u);
  int held_out = 0;
  for (int64_t i = 0; i < 3; ++i) held_out += tuner.VerifiedOn(i) && !tuner.TunedOn(i) ? 1 : 0;
  EXPECT_EQ(held_out, 1);
  for (int64_t h = 0; h < 2; ++h) {
    const TunedHead head = tuner.Head(h);
    EXPECT_EQ(head.select, SPARGE_SELECT_FLOOR);
    EXPECT_GT(head.sparsity, 0.1);
    EXPECT_GT(head.error, 0);
    EXPECT_LE(head.error, 0.05);
    EXPECT_LE(head.pv_error, 0.06);
    EXPECT_GT(head.round_l1, 0);
    EXPECT_EQ(head.verified_on, 2);
  }
  ExpectMeasured(context, samples, tuner);
  const TunerInfo info = tuner.Info();
  EXPECT_GT(info.ms, 0);
  EXPECT_GT(info.dense_ms, 0);
}

// What was found on some samples does not do for another kind: verification finds that out, and mends it.
TEST(Tune, SamplesOfAnotherKindTightenTheBounds) {
  const Context context(2);
  Samples alike(3);
  Tuner easy(context, Bounds(), alike);
  ASSERT_TRUE(easy.Run());
  std::vector<Problem> problems;
  for (int64_t i = 0; i < 3; ++i) {
    problems.push_back(Structured(Shape(10 + static_cast<uint32_t>(i)), easy.TunedOn(i) ? 10.0f : 4.0f));
  }
  Samples samples(std::move(problems));
  Tuner tuner(context, Bounds(), samples);
  ASSERT_TRUE(tuner.Run());
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_LE(tuner.Head(h).error, 0.05);
    EXPECT_LE(tuner.Head(h).pv_error, 0.06);
    EXPECT_LT(tuner.Head(h).sparsity, easy.Head(h).sparsity);
  }
  ExpectMeasured(context, samples, tuner);
}

// Everything that belongs to a head has to be found when it runs alone: key head, slope, sink, mask, batch entries.
TEST(Tune, SlicesHeads) {
  const Context context(2);
  std::vector<Problem> problems;
  const std::vector<float> slopes = {0.0f, 0.01f, 0.002f, 0.03f};
  const std::vector<float> sinks = {-3.0f, 4.0f, 0.0f, 8.0f};
  for (uint32_t i = 0; i < 2; ++i) {
    Problem p = Structured({.batch = 2,
                            .q_heads = 4,
                            .kv_heads = 2,
                            .q_tokens = 640,
                            .kv_tokens = 640,
                            .qk_dim = 32,
                            .v_dim = 48,
                            .k_type = SPARGE_BF16,
                            .v_type = SPARGE_F16,
                            .layout = Layout::kTokens,
                            .seed = 20 + i,
                            .correlated = true});
    p.desc.causal = 1;
    p.desc.alibi_slopes = slopes.data();
    p.desc.sink_logits = sinks.data();
    p.desc.mask = SPARGE_MASK_BOOL;
    p.mask_bytes.assign(4 * 640, 1);
    for (size_t h = 0; h < 4; ++h) std::fill_n(p.mask_bytes.begin() + static_cast<std::ptrdiff_t>(640 * h), 64 * h, 0);
    p.mask = {nullptr, 0, 640, 0};
    problems.push_back(std::move(p));
  }
  for (Problem& p : problems) p.mask.data = p.mask_bytes.data();
  Samples samples(std::move(problems));
  Tuner tuner(context, Bounds(), samples);
  ASSERT_TRUE(tuner.Run());
  std::set<double> sparsity;
  for (int64_t h = 0; h < 4; ++h) sparsity.insert(tuner.Head(h).sparsity);
  EXPECT_GE(sparsity.size(), 3u) << "these heads do not tell slices apart";
  ExpectMeasured(context, samples, tuner);
}

TEST(Tune, TakesPackedBatchesAndWindows) {
  const Context context(2);
  const std::vector<int64_t> offsets = {0, 900, 900, 2100};
  std::vector<Problem> problems;
  for (uint32_t i = 0; i < 2; ++i) {
    Problem p = Structured(Shape(30 + i, 2100));
    p.desc.batch = 3;
    p.desc.q_offsets = p.desc.kv_offsets = offsets.data();
    p.desc.causal = 1;
    p.desc.window = 1000;
    problems.push_back(std::move(p));
  }
  Samples samples(std::move(problems));
  Tuner tuner(context, Bounds(0.3, 0.4), samples);
  ASSERT_TRUE(tuner.Run());
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_GT(tuner.Head(h).sparsity, 0);
    EXPECT_LE(tuner.Head(h).pv_error, 0.4);
  }
  ExpectMeasured(context, samples, tuner);
}

TEST(Tune, IsTheSameForAnyNumberOfThreadsAndAgain) {
  std::vector<TunedHead> first;
  for (const int32_t threads : {1, 2, 3}) {
    const Context context(threads);
    Samples samples(3);
    Tuner tuner(context, Bounds(), samples);
    for (int again = 0; again < 2; ++again) {
      ASSERT_TRUE(tuner.Run());
      if (first.empty()) first = Heads(tuner, 2);
      ExpectSame(Heads(tuner, 2), first);
    }
  }
}

TEST(Tune, ASingleSampleServesForBoth) {
  const Context context(2);
  Samples samples(1);
  Tuner tuner(context, Bounds(), samples);
  EXPECT_TRUE(tuner.TunedOn(0));
  EXPECT_TRUE(tuner.VerifiedOn(0));
  ASSERT_TRUE(tuner.Run());
  EXPECT_EQ(tuner.Head(0).verified_on, 1);
  EXPECT_GT(tuner.Head(0).sparsity, 0.1);
  EXPECT_LE(tuner.Head(0).pv_error, 0.06);
  ExpectMeasured(context, samples, tuner);
}

TEST(Tune, HoldsOutByNameAndSeed) {
  const Context context(1);
  Samples samples(9);
  std::set<std::vector<int64_t>> seen;
  TunerDesc desc = Bounds();
  for (const char* name : {"layer", "model.layers.3", static_cast<const char*>(nullptr)}) {
    for (desc.seed = 0; desc.seed < 4; ++desc.seed) {
      desc.name = name;
      const Tuner tuner(context, desc, samples);
      std::vector<int64_t> held_out;
      int tuned = 0, verified = 0;
      for (int64_t i = 0; i < 9; ++i) {
        tuned += tuner.TunedOn(i) ? 1 : 0;
        verified += tuner.VerifiedOn(i) ? 1 : 0;
        if (!tuner.TunedOn(i)) held_out.push_back(i);
        EXPECT_TRUE(tuner.TunedOn(i) || tuner.VerifiedOn(i));
      }
      EXPECT_EQ(tuned, 7);
      EXPECT_EQ(verified, 4);
      EXPECT_EQ(held_out.size(), 2u);
      seen.insert(held_out);
      EXPECT_EQ(sparge_tuner_sample(tuner.get(), 9), 0u);
      EXPECT_EQ(sparge_tuner_sample(tuner.get(), -1), 0u);
    }
  }
  EXPECT_GT(seen.size(), 6u);
}

// Noise: every tile matters, and nothing can be left out within such bounds.
TEST(Tune, HeadsThatNeedAllTilesAreDense) {
  const Context context(2);
  std::vector<Problem> problems;
  for (uint32_t i = 0; i < 2; ++i) problems.push_back(Plain(Problem({.q_tokens = 640, .qk_dim = 32, .seed = 40 + i})));
  Samples samples(std::move(problems));
  Tuner tuner(context, Bounds(0.001, 0.0012), samples);
  ASSERT_TRUE(tuner.Run());
  const TunedHead head = tuner.Head(0);
  EXPECT_EQ(head.select, SPARGE_SELECT_ALL);
  EXPECT_EQ(head.params.tau, 1);
  EXPECT_TRUE(std::isinf(head.params.pv_skip));
  EXPECT_EQ(head.sparsity, 0);
  EXPECT_EQ(head.work, 1);
  EXPECT_EQ(head.pv_error, 0);
  EXPECT_EQ(head.verified_on, 2);
  EXPECT_GT(tuner.Info().dense_ms, 0);
  EXPECT_EQ(samples.progress.back(), samples.total);
}

TEST(Tune, BitsByTheErrorOfRounding) {
  const Context context(2);
  Samples samples(2);
  TunerDesc desc = Bounds();
  desc.round_l1 = 1e-5;
  Tuner tuner(context, desc, samples);
  ASSERT_TRUE(tuner.Run());
  EXPECT_EQ(tuner.Head(0).precision, SPARGE_PRECISION_INT16);
  EXPECT_EQ(tuner.Preset().head_precision[0], SPARGE_PRECISION_INT16);
  EXPECT_GT(tuner.Info().dense_ms, 0) << "one head is run in int8 for its time";
}

TEST(Tune, ValuesThatAreNotFiniteMakeAHeadDense) {
  const Context context(2);
  Samples samples(2);
  for (Problem& p : samples.problems) {
    for (int64_t t = 0; t < 768; t += 100) p.q.Set(0, 0, t, 0, kNan);
  }
  Tuner tuner(context, Bounds(), samples);
  ASSERT_TRUE(tuner.Run());
  EXPECT_EQ(tuner.Head(0).select, SPARGE_SELECT_ALL);
  EXPECT_EQ(tuner.Head(1).select, SPARGE_SELECT_FLOOR);
}

TEST(Tune, ProgressGoesFromNoneToAll) {
  const Context context(2);
  Samples samples(3);
  Tuner tuner(context, Bounds(), samples);
  ASSERT_TRUE(tuner.Run());
  EXPECT_EQ(samples.progress.front(), 0);
  EXPECT_EQ(samples.progress.back(), samples.total);
  EXPECT_EQ(samples.total, tuner.Info().steps);
  EXPECT_TRUE(std::is_sorted(samples.progress.begin(), samples.progress.end()));
  EXPECT_GT(samples.progress.size(), 6u);
}

TEST(Tune, StopsAtEveryStepAndBeginsAnew) {
  const Context context(2);
  Samples undisturbed(3);
  Tuner whole(context, Bounds(), undisturbed);
  ASSERT_TRUE(whole.Run());
  Samples samples(3);
  Tuner tuner(context, Bounds(), samples);
  const auto calls = static_cast<int64_t>(undisturbed.progress.size());
  for (int64_t at = 1; at <= calls; at += 3) {
    samples.progress.clear();
    samples.stop_at = at;
    EXPECT_FALSE(tuner.Run()) << at;
    EXPECT_EQ(samples.open, -1) << "a sample was not closed";
    EXPECT_EQ(static_cast<int64_t>(samples.progress.size()), at);
    EXPECT_NE(std::string(sparge_last_error()).find("stopped after"), std::string::npos) << sparge_last_error();
    EXPECT_THROW(tuner.Head(0), Error);
    EXPECT_THROW(tuner.Preset(), Error);
    EXPECT_EQ(tuner.Info().ms, 0);
  }
  samples.progress.clear();
  samples.stop_at = -1;
  ASSERT_TRUE(tuner.Run());
  ExpectSame(Heads(tuner, 2), Heads(whole, 2));
  samples.progress.clear();
  samples.stop_at = 2;
  EXPECT_FALSE(tuner.Run());
  EXPECT_THROW(tuner.Head(0), Error) << "what an earlier run found is not what this one found";
}

TEST(Tune, StoppedIsAStatusWithAText) {
  EXPECT_STREQ(sparge_status_text(SPARGE_STOPPED), "stopped by the caller");
  const Context context(1);
  Samples samples(1);
  samples.stop_at = 1;
  Tuner tuner(context, Bounds(), samples);
  EXPECT_EQ(sparge_tuner_run(tuner.get()), SPARGE_STOPPED);
}

TEST(Tune, WhatTheCallerThrowsPassesThrough) {
  class Broken : public Samples {
   public:
    using Samples::Samples;
    const sparge_run_args& Open(int64_t index) override {
      if (opened.size() == 2) throw std::out_of_range("no disk");
      return Samples::Open(index);
    }
  };
  const Context context(1);
  Broken samples(3);
  Tuner tuner(context, Bounds(), samples);
  EXPECT_THROW(tuner.Run(), std::out_of_range);
  EXPECT_EQ(samples.open, -1);
}

// ------------------------------------------------------------------ refusals

// The C functions on one sample, with what a test changes.
struct Raw {
  explicit Raw(const Problem& problem) : problem(problem) {
    sparge_run_args_init(&args);
    args.q = problem.q.view();
    args.k = problem.k.view();
    args.v = problem.v.view();
    sparge_tuner_desc_init(&desc);
    desc.sample_count = 2;
    desc.samples = samples;
    desc.self = this;
    desc.open = [](void* self, int64_t, const sparge_run_args** out) {
      *out = &static_cast<Raw*>(self)->args;
      return static_cast<Raw*>(self)->status;
    };
    desc.close = [](void* self, int64_t) { ++static_cast<Raw*>(self)->closed; };
  }
  Raw(const Raw&) = delete;

  // What creation says; "" if it works.
  std::string Refusal(sparge_status status = SPARGE_INVALID_ARGUMENT) {
    sparge_tuner* tuner = reinterpret_cast<sparge_tuner*>(this);
    const sparge_status got = sparge_tuner_create(context.get(), &desc, &tuner);
    EXPECT_EQ(tuner == nullptr, got != SPARGE_OK);
    sparge_tuner_destroy(tuner);
    if (got == SPARGE_OK) return "";
    EXPECT_EQ(got, status);
    return sparge_last_error();
  }
  // What a run says.
  std::string RunRefusal(sparge_status want) {
    sparge_tuner* tuner = nullptr;
    Check(sparge_tuner_create(context.get(), &desc, &tuner));
    EXPECT_EQ(sparge_tuner_run(tuner), want);
    sparge_tuner_destroy(tuner);
    return sparge_last_error();
  }

  Context context{1};
  Problem problem;
  PlanDesc second = problem.desc;
  const sparge_plan_desc* samples[2] = {&problem.desc, &second};
  sparge_run_args args;
  sparge_tuner_desc desc;
  sparge_status status = SPARGE_OK;
  int closed = 0;
};

Problem Small() { return Plain(Problem({.q_tokens = 64, .qk_dim = 16, .seed = 1})); }

void ExpectSays(const std::string& what, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(what.find(part), std::string::npos) << part << " not in: " << what;
}

TEST(TuneRefuses, Bounds) {
  EXPECT_EQ(Raw(Small()).Refusal(), "");
  const auto says = [](double sparge_tuner_desc::*bound, double value, const std::vector<std::string>& parts) {
    Raw raw(Small());
    raw.desc.*bound = value;
    if (bound == &sparge_tuner_desc::pv_l1) raw.desc.target_l1 = 0.05;
    ExpectSays(raw.Refusal(), parts);
  };
  says(&sparge_tuner_desc::target_l1, 0, {"target_l1=0", "1e-06..1"});
  says(&sparge_tuner_desc::target_l1, kNan, {"target_l1=nan"});
  says(&sparge_tuner_desc::target_l1, 1.5, {"target_l1=1.5"});
  says(&sparge_tuner_desc::pv_l1, 0.01, {"pv_l1=0.01", "target_l1=0.05"});
  says(&sparge_tuner_desc::pv_l1, 7, {"pv_l1=7"});
  says(&sparge_tuner_desc::target_l2, 0, {"target_l2=0", "1e-06..1"});
  says(&sparge_tuner_desc::pv_l2, 0.01, {"pv_l2=0.01", "target_l2=0.1"});
  says(&sparge_tuner_desc::round_l1, -1, {"round_l1=-1"});
}

TEST(TuneRefuses, Descriptors) {
  Raw raw(Small());
  raw.desc.sample_count = 0;
  ExpectSays(raw.Refusal(), {"sample_count=0"});
  raw.desc.sample_count = 2;
  raw.desc.samples = nullptr;
  ExpectSays(raw.Refusal(), {"samples is NULL"});
  raw.desc.samples = raw.samples;
  raw.samples[1] = nullptr;
  ExpectSays(raw.Refusal(), {"samples[1] is NULL"});
  raw.samples[1] = &raw.second;
  raw.desc.open = nullptr;
  ExpectSays(raw.Refusal(), {"open is NULL"});
  raw.desc.struct_size = 3;
  ExpectSays(raw.Refusal(), {"desc.struct_size=3"});
  sparge_tuner* tuner = nullptr;
  EXPECT_EQ(sparge_tuner_create(raw.context.get(), nullptr, &tuner), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_tuner_create(nullptr, &raw.desc, &tuner), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_tuner_create(raw.context.get(), &raw.desc, nullptr), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_tuner_run(nullptr), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_tuner_get_info(nullptr, nullptr), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_tuner_head(nullptr, 0, nullptr), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_tuner_preset(nullptr, nullptr), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_tuner_sample(nullptr, 0), 0u);
  sparge_tuner_destroy(nullptr);
}

TEST(TuneRefuses, SamplesThatDoNotBelongTogether) {
  const auto says = [](int64_t sparge_plan_desc::*member, int64_t value, const std::vector<std::string>& parts) {
    Raw raw(Small());
    raw.second.*member = value;
    ExpectSays(raw.Refusal(), parts);
  };
  says(&sparge_plan_desc::q_heads, 3, {"samples[1].q_heads=3", "samples[0]"});
  says(&sparge_plan_desc::qk_dim, 8, {"samples[1].qk_dim=8"});
  says(&sparge_plan_desc::v_dim, 8, {"samples[1].v_dim=8"});
  says(&sparge_plan_desc::qk_dim, 0, {"samples[1]", "qk_dim=0"});
  says(&sparge_plan_desc::q_tokens, 0, {"samples[1]", "q_tokens=0"});
  says(&sparge_plan_desc::kv_tokens, 0, {"samples[1]", "kv_tokens=0"});
  Raw raw(Small());
  raw.second.causal = 1;
  ExpectSays(raw.Refusal(), {"samples[1].causal=1"});
  Raw part(Small());
  part.second.all_queries = 640;
  ExpectSays(part.Refusal(), {"samples[1]", "all_queries=640", "tuner takes whole"});
  Raw grouped(Plain(Problem({.q_heads = 2, .kv_heads = 2, .q_tokens = 64, .qk_dim = 16})));
  grouped.second.kv_heads = 1;
  ExpectSays(grouped.Refusal(), {"samples[1].kv_heads=1"});
}

// What says how exactly is for the tuner to find.
TEST(TuneRefuses, WhatItIsToChoose) {
  const sparge_head_params params{};
  const sparge_precision precision = SPARGE_PRECISION_INT8;
  const auto says = [](const std::function<void(sparge_plan_desc&)>& change, const char* name) {
    Raw raw(Small());
    change(raw.second);
    ExpectSays(raw.Refusal(), {"samples[1]", name});
  };
  says([](auto& desc) { desc.precision = SPARGE_PRECISION_FP32; }, "precision");
  says([](auto& desc) { desc.select = SPARGE_SELECT_ALL; }, "select");
  says([](auto& desc) { desc.params.tau = 0.5; }, "params");
  says([](auto& desc) { desc.params.pv_skip = 3; }, "params");
  says([&](auto& desc) { desc.heads = &params; }, "heads");
  says([](auto& desc) { desc.predictor = SPARGE_PREDICT_PAPER; }, "predictor");
  says([&](auto& desc) { desc.head_precision = &precision; }, "head_precision");
  says([](auto& desc) { desc.dense_tail = 5; }, "dense_tail");
  says([](auto& desc) { desc.cache_tokens = 64; }, "cache_tokens");
  says([](auto& desc) { desc.least_effort = 0.5; }, "least_effort");
}

TEST(TuneRefuses, TensorsThatCannotBeRead) {
  Raw failing(Small());
  failing.status = SPARGE_OUT_OF_MEMORY;
  ExpectSays(failing.RunRefusal(SPARGE_OUT_OF_MEMORY), {"samples[", "returned 3", "out of memory"});
  EXPECT_EQ(failing.closed, 0);
  Raw unknown(Small());
  unknown.status = static_cast<sparge_status>(7);
  ExpectSays(unknown.RunRefusal(SPARGE_INTERNAL_ERROR), {"returned 7"});
  Raw empty(Small());
  empty.args.v.data = nullptr;
  ExpectSays(empty.RunRefusal(SPARGE_INVALID_ARGUMENT), {"v.data"});
  EXPECT_EQ(empty.closed, 1);
}

TEST(TuneRefuses, Outputs) {
  float value = 0;
  const auto says = [](const std::function<void(sparge_run_args&)>& change, const char* name) {
    Raw raw(Small());
    change(raw.args);
    ExpectSays(raw.RunRefusal(SPARGE_INVALID_ARGUMENT), {"samples[", name});
    EXPECT_EQ(raw.closed, 1);
  };
  says([&](auto& args) { args.o.data = &value; }, "args.o");
  says([&](auto& args) { args.lse.data = &value; }, "args.lse");
  says([&](auto& args) { args.mass_out = &value; }, "args.mass_out");
  says([&](auto& args) { args.workspace = &value; }, "args.workspace");
  says([&](auto& args) { args.cache = &value; }, "args.cache");
  says([&](auto& args) { args.map = reinterpret_cast<const uint8_t*>(&value); }, "args.map");
  says([&](auto& args) { args.struct_size = 1; }, "struct_size=1");
}

TEST(TuneRefuses, QuestionsBeforeTheRun) {
  const Context context(1);
  Samples samples(1);
  Tuner tuner(context, Bounds(), samples);
  EXPECT_THROW(tuner.Head(0), Error);
  EXPECT_THROW(tuner.Preset(), Error);
  EXPECT_GT(tuner.Info().steps, 0);
  ASSERT_TRUE(tuner.Run());
  EXPECT_THROW(tuner.Head(2), Error);
  ExpectSays(sparge_last_error(), {"head=2", "0..1"});
  EXPECT_THROW(tuner.Head(-1), Error);
  sparge_tuned_head head{};
  EXPECT_EQ(sparge_tuner_head(tuner.get(), 0, &head), SPARGE_INVALID_ARGUMENT);
  ExpectSays(sparge_last_error(), {"out.struct_size=0"});
}

}  // namespace
}  // namespace sparge::testing
