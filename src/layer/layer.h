// All that a model keeps per attention layer, and a call through it: decide, lend what is kept, run, add up.
#ifndef SPARGE_SRC_LAYER_LAYER_H_
#define SPARGE_SRC_LAYER_LAYER_H_

#include <sparge/sparge.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "src/calibrate/calibration.h"
#include "src/layer/packed_keys.h"
#include "src/layer/rules.h"

namespace sparge::impl {

// Makes a plan and runs it, for one call: the door's, so that this room knows no device. Throws Failure.
class PlanRunner {
 public:
  // In place of the plan made before, if any. Returns the size of its key cache.
  virtual size_t Make(const sparge_plan_desc& desc) = 0;
  virtual void Run(const sparge_run_args& args) = 0;

 protected:
  ~PlanRunner() = default;
};

// Calls that a calibration must not mix.
struct CallKind {
  int64_t q_heads, kv_heads, qk_dim, v_dim, causal;
  bool operator==(const CallKind&) const = default;
};

// What is remembered of the calls of one kind.
struct KindRecord {
  CallKind kind;
  int64_t most_queries;                             // of a call so far
  std::shared_ptr<sparge_calibration> calibration;  // NULL until one is needed; shared with calls that are running
};

// What a user should know, once each.
enum class Notice { kNoMemoryForKeys, kPresetIsCausal, kPresetIsNotCausal, kCount };

class Layer {
 public:
  explicit Layer(LayerSettings settings, AllocateZeros allocate = &std::calloc);

  // `desc` has been checked, and says nothing of what is the layer's to choose. args.stats must be given, in full size,
  // args.cache not. Safe to call from several threads at once.
  void Run(PlanRunner& runner, sparge_plan_desc desc, sparge_run_args args, bool dense);

  sparge_layer_totals Totals() const;
  // NULL if there is nothing new to say. The text lives as long as the program.
  const char* NextNotice();
  // Those made so far. They live until Restore.
  int64_t CalibrationCount() const;
  const sparge_calibration* CalibrationAt(int64_t index) const;  // NULL if there is none

  std::vector<std::byte> Save() const;
  // Throws Failure, and then nothing has changed.
  void Restore(const std::byte* data, size_t size);

 private:
  struct Remembered {
    int64_t most_queries = 0;
    std::shared_ptr<sparge_calibration> calibration;
  };
  KindRecord& RecordOf(const CallKind& kind);
  std::shared_ptr<sparge_calibration> MakeCalibration(int64_t q_heads) const;
  Remembered Remember(const sparge_plan_desc& desc, Tiles tiles);
  bool StepsOn(const sparge_plan_desc& desc);
  void Decode(PlanRunner& runner, sparge_plan_desc desc, sparge_run_args args);
  std::shared_ptr<sparge_calibration> CalibrationForStep(const sparge_plan_desc& desc);
  void RunKeepingKeys(PlanRunner& runner, sparge_plan_desc& desc, sparge_run_args& args);
  void ForgetKeys();
  void Add(const sparge_plan_desc& desc, Tiles tiles, const sparge_stats& stats);
  void Say(Notice notice);

  const LayerSettings settings_;
  std::mutex keys_mutex_;  // held while a call uses them
  PackedKeys keys_;
  int64_t last_step_ = 0;  // keys of the last call of few queries
  // Since the last call that took packed keys there was one that did not, as a prompt by itself: keys that look as if
  // they had only grown may be others.
  std::atomic<bool> others_came_ = false;
  mutable std::mutex mutex_;  // of all that follows; never held during a call
  std::vector<KindRecord> kinds_;
  sparge_layer_totals totals_{};
  struct {
    bool said, told;
  } notices_[static_cast<size_t>(Notice::kCount)]{};
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_LAYER_LAYER_H_
