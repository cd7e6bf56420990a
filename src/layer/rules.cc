// The rules, one function each.
#include "src/layer/rules.h"

#include <algorithm>
#include <cinttypes>

#include "src/base/status.h"

namespace sparge::impl {
namespace {

// A prompt comes in small batches against ever more keys, and each part of it is another text. The few per cent of a
// call that runs sample by themselves would be too little of so small calls: the choice would come late, and be of the
// parts before. So many keys of a dense call are spent instead, that is the same time in every batch, which is much of
// the early and cheap ones, within these shares. docs/ggml.md has what that does.
constexpr double kSampledKeys = 280;
constexpr double kLeastEffort = 0.03;
constexpr double kMostEffort = 0.5;

struct Length {
  int64_t queries, keys;

  bool goes_on() const { return queries > 0 && keys > queries; }
};

// visit(length) for every sequence; those that are not packed have the same one.
template <class Visit>
void ForEachLength(const sparge_plan_desc& desc, const Visit& visit) {
  if (desc.q_offsets == nullptr) return visit(Length{desc.q_tokens, desc.kv_tokens});
  for (int64_t b = 0; b < desc.batch; ++b) {
    visit(Length{desc.q_offsets[b + 1] - desc.q_offsets[b], desc.kv_offsets[b + 1] - desc.kv_offsets[b]});
  }
}

template <class Test>
bool AnyLength(const sparge_plan_desc& desc, const Test& test) {
  bool any = false;
  ForEachLength(desc, [&](const Length& length) { any = any || test(length); });
  return any;
}

int64_t MostKeys(const sparge_plan_desc& desc) {
  int64_t most = 0;
  ForEachLength(desc, [&](const Length& length) { most = std::max(most, length.keys); });
  return most;
}

bool GoesOn(const sparge_plan_desc& desc) {
  return desc.causal == 1 && AnyLength(desc, [](const Length& length) { return length.goes_on(); });
}

// The whole prompt at once, or the smaller batch after those of equal size: whoever asks at the end of a prompt, asks
// in its last queries.
bool EndsPrompt(const sparge_plan_desc& desc, int64_t most_queries) {
  return desc.causal == 1 && AnyLength(desc, [&](const Length& length) {
           return length.queries > 0 && (length.keys == length.queries || length.queries < most_queries);
         });
}

// A preset says nothing about calls of other positions (image tokens of a language model). A mask that is no rule of
// positions may come from a causal model, too: several sequences in one batch.
bool IsTunedFor(const PresetSettings& preset, const sparge_plan_desc& desc) {
  return desc.mask != SPARGE_MASK_NONE || preset.causal == (desc.causal == 1);
}

}  // namespace

void CheckFits(const PresetSettings& preset, const sparge_plan_desc& desc) {
  const auto check = [](const char* name, int64_t has, int64_t asked) {
    SPARGE_REQUIRE(has == asked, "%s=%" PRId64 " is not the %" PRId64 " of the preset", name, asked, has);
  };
  check("q_heads", preset.q_heads, desc.q_heads);
  check("kv_heads", preset.kv_heads, desc.kv_heads);
  check("qk_dim", preset.qk_dim, desc.qk_dim);
  check("v_dim", preset.v_dim, desc.v_dim);
}

Tiles ChooseTiles(const LayerSettings& settings, const sparge_plan_desc& desc, bool dense) {
  if (dense || MostQueries(desc) <= SPARGE_FEW_QUERIES || MostKeys(desc) < settings.min_keys) return Tiles::kAll;
  if (settings.preset) return IsTunedFor(*settings.preset, desc) ? Tiles::kPreset : Tiles::kUntuned;
  return settings.Calibrates() ? Tiles::kAuto : Tiles::kAll;
}

int64_t MostQueries(const sparge_plan_desc& desc) {
  int64_t most = 0;
  ForEachLength(desc, [&](const Length& length) { most = std::max(most, length.queries); });
  return most;
}

bool UsesKeys(const LayerSettings& settings, const sparge_plan_desc& desc) {
  // Few queries are computed by another kind of plan, which would empty the cache of the prompt.
  const bool few = MostQueries(desc) <= SPARGE_FEW_QUERIES;
  return settings.keep_keys && settings.remembers && !few && desc.q_offsets == nullptr &&
         desc.mask == SPARGE_MASK_NONE && GoesOn(desc);  // a grid is never causal
}

bool CanDecode(const LayerSettings& settings, const sparge_plan_desc& desc) {
  const bool keeps = settings.keep_keys && settings.remembers && settings.precision != SPARGE_PRECISION_FP32;
  const bool one = desc.q_offsets == nullptr && desc.batch == 1 && desc.q_tokens > 0;
  return keeps && one && desc.q_tokens <= SPARGE_FEW_QUERIES && desc.kv_tokens >= SPARGE_DECODE_KEYS;
}

bool IsNextStep(const sparge_plan_desc& desc, int64_t before) {
  const int64_t grown = desc.kv_tokens - before;
  return before > 0 && grown >= 0 && grown <= SPARGE_FEW_QUERIES;
}

// As prompts do, so that the cache is laid alike.
void FillDecode(const LayerSettings& settings, sparge_plan_desc& desc) {
  const Tiles prompt = settings.preset ? Tiles::kPreset : settings.Calibrates() ? Tiles::kAuto : Tiles::kAll;
  Fill(settings, desc.kv_tokens < settings.min_keys ? Tiles::kAll : prompt, 0, desc);
  desc.dense_tail = 0;
  desc.least_effort = 0;
  desc.decode = desc.glance = 1;
}

void Fill(const LayerSettings& settings, Tiles tiles, int64_t most_queries, sparge_plan_desc& desc) {
  desc.precision = settings.precision;
  if (settings.preset) desc.head_precision = settings.preset->precision.data();
  switch (tiles) {
    case Tiles::kAll:
    case Tiles::kUntuned:
      desc.select = SPARGE_SELECT_ALL;
      desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
      return;
    case Tiles::kPreset:
      desc.select = settings.preset->select;
      desc.heads = settings.preset->heads.data();
      desc.predictor = settings.preset->predictor;
      break;
    case Tiles::kAuto:
      desc.select = SPARGE_SELECT_AUTO;
      if (GoesOn(desc)) {
        desc.least_effort = std::clamp(kSampledKeys / static_cast<double>(MostKeys(desc)), kLeastEffort, kMostEffort);
      }
      break;
  }
  if (desc.select != SPARGE_SELECT_ALL && EndsPrompt(desc, most_queries)) desc.dense_tail = settings.dense_tail;
}

}  // namespace sparge::impl
