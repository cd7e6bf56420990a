// The C interface: failures become a status and a text.
#include <sparge/sparge_mpi.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "distributed/agree.h"
#include "distributed/ring.h"
#include "distributed/stage1.h"

using namespace sparge::distributed;  // NOLINT: this file is the edge between the C names and the namespace

struct sparge_mpi {
  Group group;
  sparge_mpi_shard shard;
};

namespace {

thread_local std::string last_error;

template <class Body>
sparge_status Guard(const Body& body) noexcept {
  const auto failed = [](sparge_status status, const char* text) {
    try {
      last_error = text;
    } catch (const std::bad_alloc&) {
      last_error.clear();
    }
    return status;
  };
  try {
    body();
    return SPARGE_OK;
  } catch (const Failure& failure) {
    return failed(failure.status, failure.text.c_str());
  } catch (const sparge::Error& error) {
    return failed(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return failed(SPARGE_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return failed(SPARGE_INTERNAL_ERROR, error.what());
  } catch (...) {
    return failed(SPARGE_INTERNAL_ERROR, "unknown exception");
  }
}

template <class T>
void InitSized(T* out, size_t size, const T& defaults) {
  if (out == nullptr || size < sizeof(size_t)) return;
  std::memset(static_cast<void*>(out), 0, size);
  std::memcpy(static_cast<void*>(out), &defaults, std::min(size, sizeof(T)));
  out->struct_size = size;
}

bool IsShard(sparge_mpi_shard shard) { return shard == SPARGE_MPI_CONTIGUOUS || shard == SPARGE_MPI_ZIGZAG; }

// MPI must be at work, and let this thread and no other call it.
void CheckMpi(MPI_Comm comm) {
  int begun = 0, ended = 0, level = MPI_THREAD_SINGLE, is_main = 0, is_inter = 0;
  MPI_Initialized(&begun);
  MPI_Finalized(&ended);
  SPARGE_REQUIRE(begun != 0 && ended == 0, "MPI is not initialised: call MPI_Init_thread first");
  MPI_Query_thread(&level);
  MPI_Is_thread_main(&is_main);
  SPARGE_REQUIRE(level >= MPI_THREAD_SERIALIZED || (level == MPI_THREAD_FUNNELED && is_main != 0),
                 "MPI was initialised with %s: this needs MPI_THREAD_FUNNELED and the main thread, or more",
                 level == MPI_THREAD_SINGLE ? "MPI_THREAD_SINGLE" : "MPI_THREAD_FUNNELED by another thread");
  SPARGE_REQUIRE(comm != MPI_COMM_NULL, "comm is MPI_COMM_NULL");
  MPI_Comm_test_inter(comm, &is_inter);
  SPARGE_REQUIRE(is_inter == 0, "comm is an intercommunicator");
}

sparge_mpi_desc CheckedDesc(const sparge_mpi_desc* given) {
  sparge_mpi_desc desc;
  sparge_mpi_desc_init(&desc);
  if (given == nullptr) return desc;
  SPARGE_REQUIRE(given->struct_size == sizeof(desc), "desc.struct_size=%zu is not that of sparge_mpi.h",
                 given->struct_size);
  desc = *given;
  SPARGE_REQUIRE(IsShard(desc.shard), "shard=%d is outside %d..%d", static_cast<int>(desc.shard), SPARGE_MPI_CONTIGUOUS,
                 SPARGE_MPI_ZIGZAG);
  SPARGE_REQUIRE(desc.timeout_s > 0 && desc.timeout_s <= 1e6, "timeout_s=%g is outside 0..1e6", desc.timeout_s);
  return desc;
}

void RunAgreed(sparge_mpi& mpi, sparge_context* context, const Asked& asked, sparge_mpi_stats* stats) {
  Group& group = mpi.group;
  Call call{group, context, asked.desc, asked.args, {}, {}};
  for (int r = 0; r < group.ranks(); ++r) {
    call.q_of.push_back(SegmentsOf(asked.desc.q_tokens, r, group.ranks(), mpi.shard));
    call.k_of.push_back(SegmentsOf(asked.desc.kv_tokens, r, group.ranks(), mpi.shard));
  }
  const std::vector<double> survey = SurveyKeys(call);
  std::vector<Buffer> sums;
  if (asked.desc.select == SPARGE_SELECT_FLOOR) sums = SumPools(call, survey);
  Ring ring(call, survey, sums);
  ring.Run();
  if (stats == nullptr) return;
  stats->bytes_sent = group.bytes_sent;
  stats->waited_ms = std::chrono::duration<double, std::milli>(group.waited).count();
  stats->parts = ring.parts();
  stats->parts_in_time = ring.parts_in_time();
}

}  // namespace

extern "C" {

const char* sparge_mpi_last_error(void) { return last_error.c_str(); }

int32_t sparge_mpi_segments(int64_t tokens, int32_t rank, int32_t ranks, sparge_mpi_shard shard,
                            sparge_mpi_segment segments[2]) {
  if (tokens < 0 || rank < 0 || rank >= ranks || !IsShard(shard) || segments == nullptr) return -1;
  const Segments found = SegmentsOf(tokens, rank, ranks, shard);
  for (size_t i = 0; i < found.size(); ++i) segments[i] = {found[i].first, found[i].count};
  return static_cast<int32_t>(found.size());
}

void sparge_mpi_desc_init_sized(sparge_mpi_desc* desc, size_t size) {
  InitSized(desc, size, {0, SPARGE_MPI_CONTIGUOUS, 60.0});
}

void sparge_mpi_stats_init_sized(sparge_mpi_stats* stats, size_t size) { InitSized(stats, size, {}); }

sparge_status sparge_mpi_create(MPI_Comm comm, const sparge_mpi_desc* given, sparge_mpi** out) {
  return Guard([&] {
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    *out = nullptr;
    const sparge_mpi_desc desc = CheckedDesc(given);
    CheckMpi(comm);
    *out = new sparge_mpi{Group(comm, desc.timeout_s), desc.shard};
  });
}

void sparge_mpi_destroy(sparge_mpi* group) {
  if (group == nullptr || group->group.lost_rank() >= 0) return;  // its memory stays: messages may still use it
  Guard([&] { group->group.Leave(); });
  delete group;
}

int32_t sparge_mpi_lost_rank(const sparge_mpi* group) { return group == nullptr ? -1 : group->group.lost_rank(); }

sparge_status sparge_mpi_run(sparge_mpi* mpi, sparge_context* context, const sparge_plan_desc* desc,
                             const sparge_run_args* args, sparge_mpi_stats* stats) {
  return Guard([&] {
    SPARGE_REQUIRE(mpi != nullptr, "group is NULL");
    Group& group = mpi->group;
    group.Begin();
    Asked asked;
    std::string description;
    const sparge_status refused = Guard([&] {
      SPARGE_REQUIRE(stats == nullptr || stats->struct_size == sizeof(*stats),
                     "stats.struct_size=%zu is not that of sparge_mpi.h", stats->struct_size);
      asked = CheckAsked(group, mpi->shard, context, desc, args);
      description = Describe(asked, mpi->shard);
    });
    bool agreed = false;
    const sparge_status status = Guard([&] {
      Agree(group, description, refused == SPARGE_OK ? "" : last_error);
      agreed = true;
      RunAgreed(*mpi, context, asked, stats);
    });
    if (status == SPARGE_OK || (!agreed && status == SPARGE_INVALID_ARGUMENT)) {
      group.End();
    } else {
      group.Fail(last_error);
    }
    if (status != SPARGE_OK) throw Failure{status, last_error};
  });
}

}  // extern "C"
