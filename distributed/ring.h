// The ring: keys and values go from rank to rank, and each computes with those it has while the next ones travel.
#ifndef SPARGE_DISTRIBUTED_RING_H_
#define SPARGE_DISTRIBUTED_RING_H_

#include <vector>

#include "distributed/parts.h"

namespace sparge::distributed {

class Ring {
 public:
  // survey and sums: of SurveyKeys and SumPools; no sums if nothing is selected.
  Ring(const Call& call, const std::vector<double>& survey, const std::vector<Buffer>& sums)
      : call_(call), survey_(survey), sums_(sums) {}
  void Run();
  int64_t parts() const { return call_.group.ranks() - 1; }
  int64_t parts_in_time() const { return parts_in_time_; }

 private:
  // Keys and values of a rank, contiguous (batch, kv_heads, tokens, dim).
  struct Held {
    Buffer k, v;
  };
  // A result of a segment of own queries in fp32, contiguous (batch, q_heads, count, v_dim).
  struct Partial {
    Buffer o, lse;
  };

  Held RoomFor(int rank) const;
  Held OwnKeys() const;
  Partial RoomFor(const Segment& q) const;
  sparge_partial View(const Partial& partial, const Segment& q) const;
  void AddKeys(size_t index, int owner, const Held& held);
  Partial RunPart(size_t index, const Segment& k, const sparge_tensor& keys, const sparge_tensor& values);
  void AddStats(const Stats& stats, const std::vector<sparge_head_stats>& heads);
  void StoreMap(const Segment& q, const Segment& k, const std::vector<uint8_t>& map) const;
  void Merge(const Segment& q, const std::vector<sparge_partial>& parts, const sparge_partial& out) const;
  void Finish(size_t index) const;

  const Call& call_;
  const std::vector<double>& survey_;
  const std::vector<Buffer>& sums_;
  std::vector<Partial> results_;  // of each segment of own queries, over the keys that were here
  Stats stats_;
  int64_t parts_in_time_ = 0;
};

}  // namespace sparge::distributed
#endif  // SPARGE_DISTRIBUTED_RING_H_
