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
  const io::PresetBounds& bounds = preset_.bounds;
  Head head{name,
            errors.skipped.Relative(bounds.measure),
            errors.pv_skipped.Relative(bounds.measure),
            errors.rounding.RelativeL1(),
            Sparsity(errors.stats),
            0};
  if (bounds.of_loss()) {  // a bound of the model says nothing about a head; a broken result is wrong all the same
    head.excess =
        std::isfinite(head.error + head.pv_error + head.round_l1) ? 0 : std::numeric_limits<double>::infinity();
    heads_.push_back(head);
    return;
  }
  head.excess = std::max(
      {Excess(head.error, bounds.target), Excess(head.pv_error, bounds.pv), Excess(head.round_l1, bounds.round_l1)});
  heads_.push_back(head);
}

bool BoundsJudge::passed() const {
  return preset_.bounds.of_loss() ? ShareWithin(1) == 1 : ShareWithin(SPARGE_SINGLE_CALL) >= kShareWithin;
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
  const io::PresetBounds& bounds = preset_.bounds;
  if (bounds.of_loss()) {
    return {{"loss", bounds.loss}, {"measured_loss", bounds.measured_loss}, {"heads", heads_.size()},
            {"judged", false},     {"mean_sparsity", MeanSparsity()},       {"passed", passed()}};
  }
  const char* const measure = sparge_measure_name(bounds.measure);
  Json json = {{io::TargetName(bounds.measure), bounds.target},
               {io::PvName(bounds.measure), bounds.pv},
               {"round_l1", bounds.round_l1},
               {"heads", heads_.size()},
               {"share_within_bounds", ShareWithin(1)},
               {"share_within_1.2_bounds", ShareWithin(SPARGE_SINGLE_CALL)},
               {"mean_sparsity", MeanSparsity()},
               {"outside", Json::array()}};
  for (const Head& head : heads_) {
    if (head.excess <= 1) continue;
    json["outside"].push_back({{"head", head.name},
                               {measure, Number(head.error)},
                               {io::PvName(bounds.measure), Number(head.pv_error)},
                               {"round_l1", Number(head.round_l1)},
                               {"error_over_bound", Number(head.excess)},
                               {"within_1.2_bounds", head.excess <= SPARGE_SINGLE_CALL}});
  }
  json["passed"] = passed();
  return json;
}

std::string BoundsJudge::Text() const {
  const io::PresetBounds& bounds = preset_.bounds;
  if (bounds.of_loss()) {
    return Format(
        "bound of the preset: loss %g nats per token of the model (%g when it was made). It bounds no single head, so\n"
        "errors of heads are not judged: run the model to see it, or give --max-l1\n"
        "%zu heads: mean sparsity %.1f %%: %s\n",
        bounds.loss, bounds.measured_loss, heads_.size(), 100 * MeanSparsity(),
        passed() ? "finite" : "failed, results are not finite");
  }
  const char* const measure = sparge_measure_name(bounds.measure);
  std::string text = Format("bounds of the preset: target_%s %g, pv_%s %g, round_l1 %g\n", measure, bounds.target,
                            measure, bounds.pv, bounds.round_l1);
  for (const Head& head : heads_) {
    if (head.excess <= 1) continue;
    text += Format("%s: %.2f times its bound%s: %s %.3g, pv_%s %.3g, round_l1 %.3g\n", head.name.c_str(), head.excess,
                   head.excess <= SPARGE_SINGLE_CALL ? "" : " (too much)", measure, head.error, measure, head.pv_error,
                   head.round_l1);
  }
  return text + Format(
                    "%zu heads: %.1f %% within the bounds, %.1f %% within %g times the bounds (%.0f %% needed), "
                    "mean sparsity %.1f %%: %s\n",
                    heads_.size(), 100 * ShareWithin(1), 100 * ShareWithin(SPARGE_SINGLE_CALL), SPARGE_SINGLE_CALL,
                    100 * kShareWithin, 100 * MeanSparsity(), passed() ? "passed" : "failed");
}

}  // namespace sparge::cli
