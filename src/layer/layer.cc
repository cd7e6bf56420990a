// A call through a layer, from top to bottom.
#include "src/layer/layer.h"

#include <algorithm>
#include <utility>

#include "src/base/status.h"

namespace sparge::impl {
namespace {

const char* TextOf(Notice notice) {
  switch (notice) {
    case Notice::kNoMemoryForKeys:
      return "no memory for packed keys: every call packs anew";
    case Notice::kPresetIsCausal:
      return "the preset is for causal calls: others have its precisions, and skip nothing";
    case Notice::kPresetIsNotCausal:
      return "the preset is for calls that are not causal: causal ones have its precisions, and skip nothing";
    case Notice::kCount:
      break;
  }
  return "";
}

CallKind KindOf(const sparge_plan_desc& desc) {
  return {desc.q_heads, desc.kv_heads, desc.qk_dim, desc.v_dim, desc.causal};
}

}  // namespace

Layer::Layer(LayerSettings settings, AllocateZeros allocate) : settings_(std::move(settings)), keys_(allocate) {}

void Layer::Run(PlanRunner& runner, sparge_plan_desc desc, sparge_run_args args, bool dense) {
  if (settings_.preset) CheckFits(*settings_.preset, desc);
  const Tiles tiles = ChooseTiles(settings_, desc, dense);
  if (!dense && args.map_out == nullptr && args.pv_out == nullptr && StepsOn(desc)) return Decode(runner, desc, args);
  const Remembered remembered = Remember(desc, tiles);  // lives until the call is over
  Fill(settings_, tiles, remembered.most_queries, desc);
  desc.calibration = remembered.calibration.get();
  if (UsesKeys(settings_, desc)) {
    desc.glance = dense ? 0 : 1;
    RunKeepingKeys(runner, desc, args);
  } else {
    others_came_ = true;
    if (dense) ForgetKeys();
    runner.Make(desc);
    runner.Run(args);
  }
  Add(desc, tiles, *args.stats);
}

// Whether these few queries can take the keys of the calls before.
bool Layer::StepsOn(const sparge_plan_desc& desc) {
  if (!CanDecode(settings_, desc)) return false;
  const std::lock_guard keys_lock(keys_mutex_);
  const int64_t before = std::exchange(last_step_, desc.kv_tokens);
  return keys_.size() > 0 || IsNextStep(desc, before);
}

void Layer::Decode(PlanRunner& runner, sparge_plan_desc desc, sparge_run_args args) {
  FillDecode(settings_, desc);
  const bool others_came = others_came_.exchange(false);
  if (others_came) desc.decode = 2;
  std::shared_ptr<sparge_calibration> calibration;  // lives until the call is over
  if (desc.select == SPARGE_SELECT_AUTO) calibration = CalibrationForStep(desc);
  desc.calibration = calibration.get();
  try {
    RunKeepingKeys(runner, desc, args);
  } catch (...) {  // it has not looked at the keys: the next one must
    if (others_came) others_came_ = true;
    throw;
  }
  if (others_came && desc.decode == 0) others_came_ = true;  // nor without memory for them
  Add(desc, Tiles::kAll, *args.stats);
}

// That of the prompt. Whether its queries saw all keys does not matter to one that comes after it.
std::shared_ptr<sparge_calibration> Layer::CalibrationForStep(const sparge_plan_desc& desc) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<sparge_calibration> found;
  for (const KindRecord& record : kinds_) {
    CallKind kind = KindOf(desc);
    if (record.kind == kind && record.calibration) return record.calibration;
    kind.causal = record.kind.causal;
    if (record.kind == kind && record.calibration) found = record.calibration;
  }
  if (!found) found = MakeCalibration(desc.q_heads);
  return found;
}

// What counts of earlier calls, and the calibration that this one needs.
Layer::Remembered Layer::Remember(const sparge_plan_desc& desc, Tiles tiles) {
  const bool calibrates = tiles == Tiles::kAuto;
  if (!settings_.remembers) return {0, calibrates ? MakeCalibration(desc.q_heads) : nullptr};
  const std::lock_guard lock(mutex_);
  KindRecord& record = RecordOf(KindOf(desc));
  if (calibrates && !record.calibration) record.calibration = MakeCalibration(desc.q_heads);
  return {record.most_queries, calibrates ? record.calibration : nullptr};
}

void Layer::RunKeepingKeys(PlanRunner& runner, sparge_plan_desc& desc, sparge_run_args& args) {
  std::unique_lock lock(keys_mutex_);
  desc.cache_tokens = keys_.RoomFor(desc.kv_tokens);
  const size_t needed = runner.Make(desc);
  if (needed == 0) {
    lock.unlock();  // so few queries that nothing is packed
  } else if (void* memory = keys_.Reserve(needed); memory != nullptr) {
    args.cache = memory;
    args.cache_size = keys_.size();
  } else {
    lock.unlock();
    Say(Notice::kNoMemoryForKeys);
    if (std::exchange(desc.decode, 0) != 0) {
      Fill(settings_, Tiles::kAll, 0, desc);
      desc.calibration = nullptr;
      desc.heads = nullptr;
    }
    desc.cache_tokens = desc.glance = 0;
    runner.Make(desc);
  }
  runner.Run(args);
}

// Who asks for a dense call may have changed what no glance shows: later calls must not take the keys of earlier ones.
void Layer::ForgetKeys() {
  const std::lock_guard keys_lock(keys_mutex_);
  keys_.Forget();
  last_step_ = 0;
}

void Layer::Add(const sparge_plan_desc& desc, Tiles tiles, const sparge_stats& stats) {
  if (tiles == Tiles::kUntuned) {
    Say(settings_.preset->causal ? Notice::kPresetIsCausal : Notice::kPresetIsNotCausal);
  }
  const std::lock_guard lock(mutex_);
  if (settings_.remembers) {
    KindRecord& record = RecordOf(KindOf(desc));
    record.most_queries = std::max(record.most_queries, MostQueries(desc));
  }
  totals_.calls += 1;
  totals_.dense_calls += tiles == Tiles::kAll || tiles == Tiles::kUntuned ? 1 : 0;
  totals_.total_ms += stats.total_ms;
  totals_.pack_ms += stats.pack_ms;
  totals_.predict_ms += stats.predict_ms;
  totals_.schedule_ms += stats.schedule_ms;
  totals_.kernel_ms += stats.kernel_ms;
  totals_.calibrate_ms += stats.calibrate_ms;
  totals_.key_blocks += stats.key_blocks;
  totals_.key_blocks_reused += stats.key_blocks_reused;
  // Tiles of one query are no measure beside those of 128, and would drown them.
  if (desc.decode != 0) {
    totals_.decode_ms += stats.kernel_ms;
    return;
  }
  totals_.tiles.qk_eligible += stats.total.qk_eligible;
  totals_.tiles.qk_computed += stats.total.qk_computed;
  totals_.tiles.pv_eligible += stats.total.pv_eligible;
  totals_.tiles.pv_computed += stats.total.pv_computed;
}

KindRecord& Layer::RecordOf(const CallKind& kind) {
  const auto same = [&](const KindRecord& record) { return record.kind == kind; };
  const auto found = std::find_if(kinds_.begin(), kinds_.end(), same);
  return found != kinds_.end() ? *found : kinds_.emplace_back(KindRecord{kind, 0, nullptr});
}

std::shared_ptr<sparge_calibration> Layer::MakeCalibration(int64_t q_heads) const {
  return std::shared_ptr<sparge_calibration>(
      new sparge_calibration{Calibration(q_heads, settings_.bounds, settings_.round_l1, settings_.seed)});
}

sparge_layer_totals Layer::Totals() const {
  const std::lock_guard lock(mutex_);
  return totals_;
}

void Layer::Say(Notice notice) {
  const std::lock_guard lock(mutex_);
  notices_[static_cast<size_t>(notice)].said = true;
}

const char* Layer::NextNotice() {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < std::size(notices_); ++i) {
    if (notices_[i].said && !std::exchange(notices_[i].told, true)) return TextOf(static_cast<Notice>(i));
  }
  return nullptr;
}

int64_t Layer::CalibrationCount() const {
  const std::lock_guard lock(mutex_);
  return std::count_if(kinds_.begin(), kinds_.end(), [](const KindRecord& record) { return record.calibration; });
}

const sparge_calibration* Layer::CalibrationAt(int64_t index) const {
  const std::lock_guard lock(mutex_);
  for (const KindRecord& record : kinds_) {
    if (record.calibration && index-- == 0) return record.calibration.get();
  }
  return nullptr;
}

}  // namespace sparge::impl
