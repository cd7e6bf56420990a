// A plan on a GPU: what its runs need, and the kernels of a run in their order.
#ifndef SPARGE_SRC_CUDA_PLAN_H_
#define SPARGE_SRC_CUDA_PLAN_H_

#include <memory>

#include "src/base/arena.h"
#include "src/cuda/gpu.h"
#include "src/cuda/tables.h"
#include "src/device.h"
#include "src/select/predictors.h"

namespace sparge::impl {

// Throws Failure, by one line that names it, for what a GPU cannot do yet.
void RefuseForGpu(const std::vector<Problem>& problems);

class CudaPlan final : public DevicePlan {
 public:
  CudaPlan(const Gpu& gpu, Problem problem);
  const Problem& problem() const override { return problem_; }
  Needs needs() const override;
  int64_t pools() const override { return 0; }
  void Run(const sparge_run_args& args) const override;
  void Predict(const sparge_run_args& args) const override;
  void Calibrate(const sparge_run_args& args, double effort) const override;

 private:
  // The workspace; docs/cuda.md says what is in it.
  struct Memory {
    float *block_mean, *block_max, *value_max, *key_mean;
    int32_t* finite;
    cuda::KeyUnit* units;
    float *value_inverse, *value_step, *value_unit;
    uint8_t *steps, *queries;
    float *key_scale, *k_similarity;
    float *q_shift, *q_mean, *q_similarity;
    cuda::ScoredRows scored;
    float* scores;
    uint32_t* kept;
  };
  // A run at work.
  struct Call {
    const sparge_run_args& args;
    CudaStream stream;
    Memory memory;
    bool with_values;
  };

  bool Predicts() const { return problem_.predicts(); }
  bool ScoresKeys() const { return Predicts() && !predictor_.scores_are_logs; }
  bool Judges() const { return ScoresKeys() && problem_.select == SPARGE_SELECT_FLOOR; }
  int Dim() const { return DimOf(size_); }
  int StepBytesOf() const { return cuda::StepBytes(Dim(), gpu_.fp8()); }
  int ScoreRows() const { return ScoresKeys() ? cuda::kScoredRows : 1; }
  int64_t MapRows() const { return problem_.q_heads * problem_.all_q_blocks; }
  int64_t RowsAtOnce() const;
  Memory Lay(Arena& arena) const;
  Call Begin(const sparge_run_args& args, bool with_values) const;
  void Launch(const Call& call, const Kernel& kernel, const void* params, int64_t grid_x, int64_t grid_y, int threads,
              int shared_bytes) const;
  void Clear(const Call& call) const;
  void WriteEmpty(const Call& call) const;
  void PackKeys(const Call& call) const;
  void PackQueries(const Call& call) const;
  void Select(const Call& call) const;
  void Attend(const Call& call) const;

  const Gpu& gpu_;
  Problem problem_;
  const Predictor& predictor_;
  HeadSize size_;
  Tables tables_;
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CUDA_PLAN_H_
