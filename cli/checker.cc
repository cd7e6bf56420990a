// checker.cc - runs the shipped path and the reference, and compares them stage by stage.
#include "cli/checker.h"

#include "cli/runner.h"

namespace sparge::cli {

void StageErrors::Add(const StageErrors& other) {
  stats.qk_eligible += other.stats.qk_eligible;
  stats.qk_computed += other.stats.qk_computed;
  stats.pv_eligible += other.stats.pv_eligible;
  stats.pv_computed += other.stats.pv_computed;
  total.Add(other.total);
  selection.Add(other.selection);
  quantisation.Add(other.quantisation);
  pv_skip.Add(other.pv_skip);
  skipped.Add(other.skipped);
  pv_skipped.Add(other.pv_skipped);
  rounding.Add(other.rounding);
}

const char* StageErrors::Largest() const {
  if (Selection() == 0 && Quantisation() == 0 && PvSkip() == 0) return "none";
  if (Selection() >= Quantisation() && Selection() >= PvSkip()) return "selection";
  return Quantisation() >= PvSkip() ? "quantisation" : "pv_skip";
}

Json ErrorsJson(const StageErrors& errors) {
  Json json = {{"relative_l1", Number(errors.total.RelativeL1())},
               {"cosine", Number(errors.total.Cosine())},
               {"max_error", Number(errors.total.MaxError())},
               {"rmse", Number(errors.total.Rmse())},
               {"stages_l1",
                {{"selection", Number(errors.Selection())},
                 {"quantisation", Number(errors.Quantisation())},
                 {"pv_skip", Number(errors.PvSkip())}}},
               {"largest_source", errors.Largest()},
               {"l1", Number(errors.skipped.RelativeL1())},
               {"pv_l1", Number(errors.pv_skipped.RelativeL1())},
               {"l2", Number(errors.skipped.RelativeL2())},
               {"pv_l2", Number(errors.pv_skipped.RelativeL2())},
               {"round_l1", Number(errors.rounding.RelativeL1())}};
  AddTiles(json, errors.stats);
  return json;
}

Checker::Checker(const Context& context, LoadedCall& call) : context_(context), call_(call) {
  const PlanDesc& desc = call.desc;
  map_.resize(static_cast<size_t>(desc.batch * desc.q_heads * TilesPerHead()) + 1);
  pv_groups_.resize(map_.size());
  head_stats_.resize(static_cast<size_t>(desc.batch * desc.q_heads));
  RunShipped(call);
  without_skip_ = RunWithoutSkip(map_.data());
  dense_ = RunWithoutSkip(nullptr);
}

void Checker::RunShipped(LoadedCall& call) {
  RunArgs args = call_.args;
  args.o = OutputView(shipped_, call_.desc);
  args.map_out = map_.data();
  args.pv_out = pv_groups_.data();
  args.head_stats = head_stats_.data();
  RunProblem(context_, call, args);
}

std::vector<float> Checker::RunWithoutSkip(const uint8_t* map) const {
  PlanDesc desc = call_.InForce();
  desc.select = map == nullptr ? SPARGE_SELECT_ALL : SPARGE_SELECT_MAP;
  const auto heads = SwitchSkipOff(desc);
  std::vector<float> o;
  RunArgs args = call_.args;
  args.o = OutputView(o, desc);
  args.map = map;
  args.map_head_stride = TilesPerHead();
  args.map_batch_stride = desc.q_heads * TilesPerHead();
  Plan(context_, desc).Run(args);
  return o;
}

// The oracle for one head, dense or over the tiles of `map`.
std::vector<float> Checker::Reference(HeadCall slice, const uint8_t* map, float* mass) const {
  slice.desc.select = map == nullptr ? SPARGE_SELECT_ALL : SPARGE_SELECT_MAP;
  slice.args.map = map;
  slice.args.map_batch_stride = slice.args.map_head_stride = 0;
  std::vector<float> o;
  slice.args.o = OutputView(o, slice.desc);
  slice.args.mass_out = mass;
  Plan(context_, slice.desc).Reference(slice.args);
  return o;
}

StageErrors Checker::Compare(int64_t head, HeadTruth& truth) const {
  const PlanDesc& desc = call_.desc;
  const HeadCall slice = SliceHead(call_, head / desc.q_heads, head % desc.q_heads);
  truth.mass.resize(static_cast<size_t>(TilesPerHead()) + 1);
  truth.o = Reference(slice, nullptr, truth.mass.data());
  truth.mass.pop_back();
  const std::vector<float> masked = Reference(slice, map_.data() + head * TilesPerHead(), nullptr);
  const auto size = static_cast<size_t>(desc.q_tokens * desc.v_dim);
  const auto at = static_cast<size_t>(head) * size;
  truth.o.resize(size);
  const std::span<const float> want = truth.o;
  const std::span<const float> chosen = std::span(masked).first(size);
  const std::span<const float> quantised = std::span(without_skip_).subspan(at, size);
  const std::span<const float> shipped = std::span(shipped_).subspan(at, size);
  const std::span<const float> dense = std::span(dense_).subspan(at, size);
  StageErrors errors;
  errors.stats = head_stats_[static_cast<size_t>(head)];
  errors.total.Add(shipped, want);
  errors.selection.Add(chosen, want);
  errors.quantisation.Add(quantised, chosen);
  errors.pv_skip.Add(shipped, quantised);
  errors.skipped.Add(quantised, dense);
  errors.pv_skipped.Add(shipped, dense);
  errors.rounding.Add(dense, want);
  return errors;
}

}  // namespace sparge::cli
