// The algorithm, top to bottom: pack, masses, (probe,) select, schedule, attend. One plan after the other: heads of
// different precision are packed differently.
#include "src/cpu/attend.h"

#include <algorithm>

#include "src/base/threads.h"
#include "src/calibrate/sampling.h"
#include "src/cpu/attend_rows.h"
#include "src/cpu/decode.h"
#include "src/cpu/pack.h"
#include "src/cpu/parts.h"
#include "src/cpu/predict.h"
#include "src/cpu/probe.h"
#include "src/cpu/results.h"
#include "src/cpu/schedule.h"
#include "src/cpu/workspace.h"

namespace sparge::impl {
namespace {

// One plan of a call at work.
struct Pass {
  const Plan& plan;
  bool first, last;  // of the call's plans
  HeadChoice heads;
  const sparge_run_args& args;
  Workspace& w;
};

// A plan that decodes: heads as they are calibrated by the calls before.
HeadChoice TakeHeadsAsTheyAre(const Plan& plan, bool first, bool last, const Decisions& decisions) {
  if (plan.select != SPARGE_SELECT_AUTO) return {plan.heads.data(), plan.active.data()};
  for (int64_t h = 0; h < plan.q_heads; ++h) {
    const HeadSetting setting = plan.calibration->Setting(h);
    decisions.params[h] = setting.params;
    // Another call may change the setting in between: what the first plan leaves is the last one's.
    decisions.active[h] = first ? last || !setting.needs_int16 : !decisions.done[h];
    decisions.done[h] = first && decisions.active[h];
  }
  return {decisions.params, decisions.active};
}

// A calibrated plan: which heads it takes. Of two plans, the first one has fewer bits and leaves to the second what
// needs more.
HeadChoice TakeHeads(const Plan& plan, bool first, bool last, const Decisions& decisions) {
  if (plan.decodes) return TakeHeadsAsTheyAre(plan, first, last, decisions);
  if (!plan.calibrates()) return {plan.heads.data(), plan.active.data()};
  for (int64_t h = 0; h < plan.q_heads; ++h) {
    if (first) decisions.done[h] = decisions.sampled[h] = 0;
    decisions.active[h] = last ? !decisions.done[h] : !plan.calibration->Setting(h).needs_int16;
  }
  return {decisions.params, decisions.active};
}

// body(pass) for every plan that has heads to do.
template <class Body>
void ForEachPlan(const std::vector<Plan>& plans, const sparge_run_args& args, const Body& body) {
  if (plans.front().idle()) return;
  Cache cache = OpenCache(plans, args);
  for (const Plan& plan : plans) {
    Arena arena = ArenaOf(args.workspace);
    Workspace w = LayWorkspace(plan, arena, cache.arena);
    if (!cache.fits) EmptyCache(plan, w.packed);
    const bool first = &plan == &plans.front();
    const bool last = &plan == &plans.back();
    const HeadChoice heads = TakeHeads(plan, first, last, w.decisions);
    if (std::none_of(heads.active, heads.active + plan.q_heads, [](uint8_t a) { return a != 0; })) {
      ForgetSteps(plan, w.packed);
      continue;
    }
    body(Pass{plan, first, last, heads, args, w});
  }
}

// What the calibration says of the heads of a range, now that their samples are in. `scored`: per head, whether there
// are masses to select by, for another call may have made a choice in between; NULL = there will be.
void TakeSettings(const Pass& pass, HeadRange range, const uint8_t* scored) {
  const Decisions& decisions = pass.w.decisions;
  for (int64_t h = range.begin; h < range.end; ++h) {
    const HeadSetting setting = pass.plan.calibration->Setting(h);
    decisions.params[h] = scored == nullptr || scored[h] ? setting.params : ParamsAt(Cell{}, 0);
    decisions.sampled[h] |= decisions.active[h];
    if (setting.needs_int16 && !pass.last) decisions.active[h] = 0;
    decisions.done[h] |= decisions.active[h];
  }
}

// Samples of the active heads of a range, and the choice that follows; a head that moved here from an earlier plan has
// been sampled there.
void ProbeHeads(const Pass& pass, HeadRange range, Sampling sampling) {
  const Plan& plan = pass.plan;
  const Decisions& decisions = pass.w.decisions;
  for (int64_t h = range.begin; h < range.end; ++h) {
    decisions.fresh[h] = decisions.active[h] && !decisions.sampled[h] && pass.w.stage1.store.scored[h];
  }
  const HeadChoice heads{decisions.params, decisions.fresh};
  const Follow follow = FollowFor(plan, sampling);
  for (sampling.round = 0; sampling.round < kRounds; ++sampling.round) {
    sampling.head = range.begin;
    while (const int64_t count = NextSamples(plan, heads, range.end, sampling, pass.w.probes.samples)) {
      ProbeSamples(plan, pass.args, pass.w.packed, pass.w.stage1, pass.w.map, pass.w.probes, count);
    }
    ForEach(plan.machine.executor, range.end - range.begin, [&](int32_t, int64_t i) {
      const int64_t head = range.begin + i;
      if (decisions.fresh[head]) plan.calibration->Decide(head, sampling.call, follow);
    });
  }
}

// Which heads of a range need masses: those that are going to be sampled, and those that may skip.
void WantMasses(const Pass& pass, HeadRange range, const Sampling& sampling) {
  const Decisions& decisions = pass.w.decisions;
  for (int64_t h = range.begin; h < range.end; ++h) {
    const bool sampled = !decisions.sampled[h] && MaySample(pass.plan, sampling, h);
    pass.w.stage1.store.scored[h] = decisions.active[h] && (sampled || pass.plan.calibration->Setting(h).sparse);
  }
}

// The masses of a head serve its samples and then its selection; of as many heads at a time as the store has room for.
void CalibrateAndSelect(const Pass& pass, const Sampling& sampling, bool select, sparge_stats& stats) {
  const Plan& plan = pass.plan;
  Workspace& w = pass.w;
  Stopwatch watch;
  MassStore& store = w.stage1.store;
  for (HeadRange range{0, 0}; range.begin < plan.q_heads; range.begin = range.end) {
    range.end = std::min(range.begin + store.heads, plan.q_heads);
    store.first_head = range.begin;
    WantMasses(pass, range, sampling);
    ScoreHeads(plan, range, pass.args, w.packed, w.stage1, w.map);
    stats.predict_ms += watch.Lap();
    ProbeHeads(pass, range, sampling);
    TakeSettings(pass, range, store.scored);
    stats.calibrate_ms += watch.Lap();
    if (select) SelectHeads(plan, pass.heads, range, pass.args, w.packed, w.stage1, w.map);
    stats.predict_ms += watch.Lap();
  }
}

void PackPass(const Pass& pass, sparge_stats& stats) {
  Stopwatch watch;
  if (pass.plan.direct()) {
    PackDirect(pass.plan, pass.args, pass.w.packed);
  } else {
    const KeyBlockCounts counts = PackAll(pass.plan, pass.heads, pass.args, /*with_values=*/true, pass.w.packed);
    stats.key_blocks += counts.all;
    stats.key_blocks_reused += counts.reused;
  }
  stats.pack_ms += watch.Lap();
}

// A negative effort: what each head needs.
Sampling StartSampling(const Plan& plan, double effort) {
  return {plan.calibrates() ? plan.calibration->NextCall() : 0, effort, SampleRows(plan)};
}

// Few queries: no tile is chosen, and time goes into reading.
void Decode(const Pass& pass, sparge_stats& stats) {
  Stopwatch watch;
  const KeyBlockCounts counts = RefreshCache(pass.plan, pass.heads, pass.args, pass.w.packed, pass.w.decode);
  stats.key_blocks += counts.all;
  stats.key_blocks_reused += counts.reused;
  stats.pack_ms += watch.Lap();
  DecodeHeads(pass.plan, pass.heads, pass.args, pass.w.packed, pass.w.decode, stats);
  stats.kernel_ms += watch.Lap();
}

}  // namespace

void Attend(const std::vector<Plan>& plans, const sparge_run_args& args) {
  sparge_stats stats{};
  if (args.key_codes != nullptr) CheckFine(plans.front(), *args.key_codes);
  ClearResults(plans.front(), args);
  WriteKeyless(plans.front(), plans.front().machine.executor, args);
  const Sampling sampling = StartSampling(plans.front(), -1.0);
  ForEachPlan(plans, args, [&](const Pass& pass) {
    if (pass.plan.decodes) return Decode(pass, stats);
    Workspace& w = pass.w;
    PackPass(pass, stats);

    Stopwatch watch;
    if (pass.plan.calibrates()) {
      CalibrateAndSelect(pass, sampling, /*select=*/true, stats);
      watch.Lap();
    } else {
      PredictAll(pass.plan, pass.heads, args, w.packed, w.stage1, w.map);
      stats.predict_ms += watch.Lap();
    }

    MakeSchedule(pass.plan, pass.heads, w.map, w.schedule);
    stats.schedule_ms += watch.Lap();

    AttendRows(pass.plan, pass.heads, args, w);
    stats.kernel_ms += watch.Lap();
    CountPass(pass.plan, pass.heads, args, w, stats);
  });
  WriteStats(plans.front(), args, stats);
}

void Predict(const std::vector<Plan>& plans, const sparge_run_args& args) {
  sparge_stats stats{};
  if (args.pool_counts != nullptr) CheckCounts(plans.front(), args);
  ClearResults(plans.front(), args);
  ForEachPlan(plans, args, [&](const Pass& pass) {
    if (args.key_survey_out != nullptr) return LeaveSurvey(pass.plan, pass.heads, args, pass.w.packed);
    Stopwatch watch;
    if (args.key_codes_out != nullptr) {
      PackAll(pass.plan, pass.heads, args, /*with_values=*/true, pass.w.packed);
      return;
    }
    if (pass.plan.predicts()) PackAll(pass.plan, pass.heads, args, /*with_values=*/false, pass.w.packed);
    stats.pack_ms += watch.Lap();
    if (pass.plan.calibrates()) TakeSettings(pass, {0, pass.plan.q_heads}, nullptr);  // as calibrated so far
    PredictAll(pass.plan, pass.heads, args, pass.w.packed, pass.w.stage1, pass.w.map);
    stats.predict_ms += watch.Lap();
    CountPass(pass.plan, pass.heads, args, pass.w, stats);
  });
  WriteStats(plans.front(), args, stats);
}

void Calibrate(const std::vector<Plan>& plans, const sparge_run_args& args, double effort) {
  const Sampling sampling = StartSampling(plans.front(), effort);
  sparge_stats ignored{};
  ForEachPlan(plans, args, [&](const Pass& pass) {
    if (!pass.plan.calibrates()) return;
    PackPass(pass, ignored);
    CalibrateAndSelect(pass, sampling, /*select=*/false, ignored);
  });
}

}  // namespace sparge::impl
