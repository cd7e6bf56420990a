// check_bounds.cc - error over bound for each head, and how many heads that leaves within.
#include "cli/check_bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sparge::cli {
namespace {

// NaN becomes infinity: a broken result is beyond every bound.
double Excess(double error, double bound) {
  if (std::isnan(error)) return std::numeric_limits<double>::infinity();
  if (error == 0) return 0;
  return error / bound;
}

}  // namespace

void BoundsJudge::Add(const std::string& name, const StageErrors& errors) {
  Head head{
      name, errors.l1.RelativeL1(), errors.pv_l1.RelativeL1(), errors.round_l1.RelativeL1(), Sparsity(errors.stats), 0};
  head.excess = std::max(
      {Excess(head.l1, preset_.target_l1), Excess(head.pv_l1, preset_.pv_l1), Excess(head.round_l1, preset_.round_l1)});
  heads_.push_back(head);
}

double BoundsJudge::ShareWithin(double slack) const {
  if (heads_.empty()) return 1;
  const auto within = std::count_if(heads_.begin(), heads_.end(), [=](const Head& h) { return h.excess <= slack; });
  return static_cast<double>(within) / static_cast<double>(heads_.size());
}

double BoundsJudge::MeanSparsity() const {
  double sum = 0;
  for (const Head& head : heads_) sum += head.sparsity;
  return heads_.empty() ? 0 : sum / static_cast<double>(heads_.size());
}

Json BoundsJudge::Report() const {
  Json json = {{"target_l1", preset_.target_l1},        {"pv_l1", preset_.pv_l1},
               {"round_l1", preset_.round_l1},          {"heads", heads_.size()},
               {"share_within_bounds", ShareWithin(1)}, {"share_within_1.2_bounds", ShareWithin(SPARGE_SINGLE_CALL)},
               {"mean_sparsity", MeanSparsity()},       {"outside", Json::array()}};
  for (const Head& head : heads_) {
    if (head.excess <= 1) continue;
    json["outside"].push_back({{"head", head.name},
                               {"l1", Number(head.l1)},
                               {"pv_l1", Number(head.pv_l1)},
                               {"round_l1", Number(head.round_l1)},
                               {"error_over_bound", Number(head.excess)},
                               {"within_1.2_bounds", head.excess <= SPARGE_SINGLE_CALL}});
  }
  json["passed"] = passed();
  return json;
}

std::string BoundsJudge::Text() const {
  std::string text = Format("bounds of the preset: target_l1 %g, pv_l1 %g, round_l1 %g\n", preset_.target_l1,
                            preset_.pv_l1, preset_.round_l1);
  for (const Head& head : heads_) {
    if (head.excess <= 1) continue;
    text += Format("%s: %.2f times its bound%s: l1 %.3g, pv_l1 %.3g, round_l1 %.3g\n", head.name.c_str(), head.excess,
                   head.excess <= SPARGE_SINGLE_CALL ? "" : " (too much)", head.l1, head.pv_l1, head.round_l1);
  }
  return text + Format(
                    "%zu heads: %.1f %% within the bounds, %.1f %% within %g times the bounds (%.0f %% needed), "
                    "mean sparsity %.1f %%: %s\n",
                    heads_.size(), 100 * ShareWithin(1), 100 * ShareWithin(SPARGE_SINGLE_CALL), SPARGE_SINGLE_CALL,
                    100 * kShareWithin, 100 * MeanSparsity(), passed() ? "passed" : "failed");
}

}  // namespace sparge::cli
