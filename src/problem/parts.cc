#include "src/problem/parts.h"

#include <algorithm>
#include <cinttypes>
#include <utility>

#include "src/base/status.h"

namespace sparge::impl {
namespace {

// Of the plan's heads; a plan of several precisions has its int8 heads in the first problem.
bool AnyInt8(const Problem& problem) { return problem.precision == SPARGE_PRECISION_INT8; }
bool AllInt8(const Problem& problem) {
  return AnyInt8(problem) &&
         std::all_of(problem.active.begin(), problem.active.end(), [](uint8_t a) { return a != 0; });
}

// Results of a prediction that has tiles.
bool HasOtherResults(const sparge_run_args& args) {
  return args.map_out != nullptr || args.mass_out != nullptr || args.stats != nullptr || args.head_stats != nullptr;
}

void CheckCall(const Problem& problem, const sparge_run_args& args, Call call) {
  const bool survey = args.key_survey != nullptr || args.key_survey_out != nullptr;
  SPARGE_REQUIRE(!survey || (problem.cache_blocks == 0 && (call == Call::kRun || call == Call::kPredict)),
                 "%s is given, but only run and predict without a cache have one",
                 args.key_survey != nullptr ? "key_survey" : "key_survey_out");
  SPARGE_REQUIRE(args.key_survey_out == nullptr || call == Call::kPredict,
                 "key_survey_out is given, but only predict fills it");
  if (args.key_survey_out == nullptr) return;
  const bool others = HasOtherResults(args) || args.pool_lse_out != nullptr || args.pool_counts_out != nullptr ||
                      args.pool_counts != nullptr || args.key_codes_out != nullptr || args.pool_lse != nullptr;
  SPARGE_REQUIRE(!others, "key_survey_out is given: then predict fills it and nothing else");
  SPARGE_REQUIRE(!problem.has_unasked_keys,
                 "key_survey_out is given, but a sequence has keys and no queries: such keys are not read");
}

// Codes are rounded by the survey of the whole, lie as the tokens do, and have no summaries.
void CheckCode(const Problem& problem, const sparge_run_args& args, Call call, const char* name, bool fits) {
  SPARGE_REQUIRE(args.key_survey != nullptr && (call == Call::kRun || call == Call::kPredict),
                 "%s is given, but key_survey is NULL: codes are rounded by that of all keys", name);
  SPARGE_REQUIRE(!problem.packed && problem.order.empty() && !problem.calibrates(), "%s cannot be combined with %s",
                 name,
                 problem.packed         ? "q_offsets"
                 : problem.calibrates() ? "select=AUTO"
                                        : "a grid");
  SPARGE_REQUIRE(!problem.predicts() || problem.select == SPARGE_SELECT_FLOOR,
                 "%s is given, but of plans that predict only those with select=FLOOR take codes", name);
  SPARGE_REQUIRE(problem.predictor != SPARGE_PREDICT_PAPER || !problem.predicts(),
                 "%s cannot be combined with predictor=PAPER, which takes means of the keys", name);
  SPARGE_REQUIRE(!problem.direct(), "%s is given, but so few queries take keys as they are", name);
  SPARGE_REQUIRE(fits, "%s is given, but %s", name, AnyInt8(problem) ? "not all heads are int8" : "no head is int8");
}

void CheckKeyCodes(const Problem& problem, const sparge_run_args& args, Call call) {
  if (args.key_codes_out != nullptr) {
    CheckCode(problem, args, call, "key_codes_out", AllInt8(problem));
    SPARGE_REQUIRE(call == Call::kPredict, "key_codes_out is given, but only predict fills it");
    const sparge_key_codes& c = *args.key_codes_out;
    SPARGE_REQUIRE(c.keys != nullptr && c.key_scales != nullptr && c.values != nullptr && c.value_scales != nullptr &&
                       c.fine_values != nullptr && c.fine != nullptr && c.not_finite != nullptr,
                   "key_codes_out has an array that is NULL");
    SPARGE_REQUIRE(args.key_codes == nullptr && args.pool_lse_out == nullptr && args.pool_counts_out == nullptr &&
                       !HasOtherResults(args),
                   "key_codes_out is given: then predict fills it and nothing else");
  }
  if (args.key_codes == nullptr) return;
  CheckCode(problem, args, call, "key_codes", AnyInt8(problem));
  const sparge_key_codes& c = *args.key_codes;
  const bool values = c.values != nullptr && c.value_scales != nullptr && c.fine_values != nullptr &&
                      c.fine != nullptr && c.not_finite != nullptr;
  SPARGE_REQUIRE(c.keys != nullptr && c.key_scales != nullptr && (values || call == Call::kPredict),
                 "key_codes has an array that is NULL");
}

const char* NameOfPools(const void* rows, const char* name, const char* code) { return rows != nullptr ? name : code; }

void CheckPools(const Problem& problem, const sparge_run_args& args, Call call, bool pools) {
  const bool in = args.pool_rows != nullptr || args.pool_codes != nullptr;
  const bool out = args.pool_rows_out != nullptr || args.pool_codes_out != nullptr;
  SPARGE_REQUIRE(in == (args.pool_counts != nullptr), "%s is missing", in ? "pool_counts" : "pool_rows");
  SPARGE_REQUIRE(out == (args.pool_counts_out != nullptr), "%s is missing", out ? "pool_counts_out" : "pool_rows_out");
  SPARGE_REQUIRE((!in && !out) || pools,
                 "%s is given, but only run and predict with select=FLOOR and the predictor of its default have pools",
                 in ? NameOfPools(args.pool_rows, "pool_rows", "pool_codes")
                    : NameOfPools(args.pool_rows_out, "pool_rows_out", "pool_codes_out"));
  SPARGE_REQUIRE(args.pool_rows == nullptr || args.pool_codes == nullptr, "pool_rows and pool_codes are both given");
  SPARGE_REQUIRE(args.pool_rows_out == nullptr || args.pool_codes_out == nullptr,
                 "pool_rows_out and pool_codes_out are both given");
  for (const auto& [name, codes] :
       {std::pair{"pool_codes_out", args.pool_codes_out}, {"pool_codes", args.pool_codes}}) {
    if (codes == nullptr) continue;
    CheckCode(problem, args, call, name, AllInt8(problem));
    SPARGE_REQUIRE(codes->rows != nullptr && codes->factors != nullptr && codes->shifts != nullptr,
                   "%s has an array that is NULL", name);
  }
  if (!in) return;
  const char* name = NameOfPools(args.pool_rows, "pool_rows", "pool_codes");
  SPARGE_REQUIRE(call == Call::kPredict && args.pool_lse_out != nullptr,
                 "%s is given, but only predict with pool_lse_out takes them", name);
  const bool others = HasOtherResults(args) || out || args.pool_lse != nullptr;
  SPARGE_REQUIRE(!others, "%s is given: then predict fills pool_lse_out and nothing else", name);
}

}  // namespace

Reads ReadsOf(const Problem& problem, const sparge_run_args& args, Call call) {
  const bool tensors = args.key_codes == nullptr || !AllInt8(problem);
  const bool values = call != Call::kPredict || args.key_survey_out != nullptr || args.key_codes_out != nullptr;
  return {args.pool_rows == nullptr && args.pool_codes == nullptr, tensors, tensors && values};
}

void CheckParts(const Problem& problem, const sparge_run_args& args, Call call, bool pools) {
  CheckCall(problem, args, call);
  CheckKeyCodes(problem, args, call);
  CheckPools(problem, args, call, pools);
}

}  // namespace sparge::impl
