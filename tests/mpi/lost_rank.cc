// lost_rank HOW: a rank that is stopped, missing, leaves, fails or is killed; all others say who it is, and when they
// knew. lost_rank_test.py starts it under mpirun and reads what they say.
#include <signal.h>
#include <sparge/sparge_mpi.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <sparge/sparge.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kTokens = 1024, kDim = 32;
constexpr int kCulprit = 1, kGoodCalls = 2;
constexpr double kTimeoutSeconds = 3;

// Threads of a rank that fails in the middle of a call.
void RunAndThrow(void* self, int32_t workers, sparge_task task, void* arg) {
  if (++*static_cast<int*>(self) > 2) throw std::runtime_error("no more threads");
  for (int32_t w = 0; w < workers; ++w) task(arg, w);
}

}  // namespace

int main(int count, char** values) {
  int level = 0, rank = 0, ranks = 0;
  MPI_Init_thread(&count, &values, MPI_THREAD_FUNNELED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const std::string how = count > 1 ? values[1] : "";
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  sparge_mpi_desc group_desc;
  sparge_mpi_desc_init(&group_desc);
  group_desc.timeout_s = kTimeoutSeconds;
  sparge_mpi* group = nullptr;
  if (sparge_mpi_create(comm, &group_desc, &group) != SPARGE_OK) MPI_Abort(comm, 2);

  int runs = 0;
  sparge_executor executor;
  sparge_executor_init(&executor);
  executor.self = &runs;
  executor.workers = 2;
  executor.run = RunAndThrow;
  const sparge::Context good(1);
  const sparge::Context bad(executor);
  sparge_mpi_segment segments[2];
  sparge_mpi_segments(kTokens, rank, ranks, SPARGE_MPI_CONTIGUOUS, segments);
  std::vector<float> tensor(static_cast<size_t>(segments[0].count * kDim), 0.5f), out(tensor.size());
  sparge::PlanDesc desc;
  desc.batch = desc.q_heads = desc.kv_heads = 1;
  desc.q_tokens = desc.kv_tokens = kTokens;
  desc.qk_dim = desc.v_dim = kDim;
  desc.select = SPARGE_SELECT_FLOOR;
  sparge::RunArgs args;
  args.q = args.k = args.v = sparge::ViewHeads(tensor.data(), SPARGE_F32, 1, segments[0].count, kDim);
  args.o = sparge::ViewHeads(out.data(), SPARGE_F32, 1, segments[0].count, kDim);

  for (int call = 0; call <= kGoodCalls; ++call) {
    const bool now = call == kGoodCalls && rank == kCulprit;
    if (now && how == "killed") raise(SIGKILL);
    if (now && how == "leaves") break;
    if (now && how == "missing") std::this_thread::sleep_for(std::chrono::seconds(60));
    if (now && how == "stopped") {
      std::thread([pid = getpid()] {
        std::this_thread::sleep_for(std::chrono::microseconds(500));  // as a rule, in the middle of the call
        kill(pid, SIGSTOP);
      }).detach();
    }
    const auto began = std::chrono::steady_clock::now();
    const auto status = sparge_mpi_run(group, now && how == "fails" ? bad.get() : good.get(), &desc, &args, nullptr);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    if (call < kGoodCalls && status == SPARGE_OK) continue;
    std::printf("%d: status %d, lost %d, call %d, after %.2f s: %s\n", rank, status, sparge_mpi_lost_rank(group), call,
                seconds, sparge_mpi_last_error());
    const auto again = sparge_mpi_run(group, good.get(), &desc, &args, nullptr);
    std::printf("%d: again status %d: %s\n", rank, again, sparge_mpi_last_error());
    std::fflush(stdout);
    break;
  }
  if (how == "leaves" && rank == kCulprit) sparge_mpi_destroy(std::exchange(group, nullptr));
  std::this_thread::sleep_for(std::chrono::seconds(2));  // all others have spoken, too
  sparge_mpi_destroy(group);
  MPI_Abort(MPI_COMM_WORLD, 3);  // MPI_Finalize would wait for the one that is lost
}
