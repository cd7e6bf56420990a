// Messages between the ranks of a group, and who is still there. MPI is called by the thread that calls the library,
// which moves messages on while another thread computes: Open MPI makes no progress by itself. Meanwhile each rank
// tells all others four times a second what it is doing, so that one that is stopped or elsewhere is known by its
// number.
#ifndef SPARGE_DISTRIBUTED_GROUP_H_
#define SPARGE_DISTRIBUTED_GROUP_H_

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "distributed/failure.h"

namespace sparge::distributed {

using Clock = std::chrono::steady_clock;

// Memory that a message may use after all others have let go of it; zeros at first.
class Buffer {
 public:
  explicit Buffer(size_t bytes = 0) : bytes_(std::make_shared<std::vector<std::byte>>(bytes)) {}
  explicit Buffer(std::vector<std::byte> bytes) : bytes_(std::make_shared<std::vector<std::byte>>(std::move(bytes))) {}
  template <class T>
  static Buffer Of(size_t count) {
    return Buffer(count * sizeof(T));
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(bytes_->data());
  }
  size_t size() const { return bytes_->size(); }

 private:
  std::shared_ptr<std::vector<std::byte>> bytes_;
};

// Messages on their way, with their memory.
struct Transfers {
  std::vector<MPI_Request> requests;
  std::vector<Buffer> memory;
};

class Group {
 public:
  Group(MPI_Comm comm, double timeout_s);
  // Tells all others that this rank goes, and waits until they say so, too.
  void Leave();

  int rank() const { return rank_; }
  int ranks() const { return static_cast<int>(peers_.size()); }
  int lost_rank() const { return lost_rank_; }

  // A call begins, and ends well. One that began and does not end well ends with Fail.
  void Begin();
  void End();
  // All others shall know at once that this rank has failed, unless they gave it up or it gave up one of them.
  void Fail(const std::string& text) noexcept;

  // Messages between two ranks arrive in the order in which both sides name them. What is opened is to be waited for.
  Transfers* Open() { return &open_.emplace_back(); }
  void Send(const Buffer& from, int to, Transfers* transfers);
  void Receive(const Buffer& into, int from, Transfers* transfers);
  // Until all have arrived and left, then closes them. Throws Failure if a rank cannot do its part of this call any
  // more.
  void Wait(Transfers* transfers);
  // Runs `work` in a thread of its own. Returns whether all messages were through before it had ended.
  bool Compute(const std::function<void()>& work, Transfers* transfers = nullptr);
  // outgoing[r] goes to rank r; returns what came from each, of the sizes given. The own one is handed through.
  std::vector<Buffer> Exchange(const std::vector<Buffer>& outgoing, const std::vector<size_t>& incoming_bytes);
  // The same to all.
  std::vector<Buffer> Gather(const Buffer& own, const std::vector<size_t>& bytes) {
    return Exchange(std::vector<Buffer>(ranks(), own), bytes);
  }

  int64_t bytes_sent = 0;  // of this call
  Clock::duration waited{};

 private:
  // What a rank says of itself.
  struct Beat {
    int64_t call;     // the one at work, counted from 1
    int64_t done;     // calls that ended well
    int64_t verdict;  // a rank that is lost, itself if it has failed; -1 = none
    int64_t leaves;
  };
  struct Peer {
    Beat last{0, 0, -1, 0};
    Clock::time_point heard;
    int unsent = 0;  // beats that MPI still has
  };
  struct Sending {
    MPI_Request request;
    Beat beat;
    int to;
  };

  bool Test(Transfers* transfers);
  void Poll();
  void Say(bool to_all);
  void Flush(Clock::duration most);
  void Check(Clock::time_point waiting_since);
  [[noreturn]] void GiveUp(int lost, const std::string& text);
  void Must(int code, int peer);

  MPI_Comm comm_;
  Clock::duration timeout_;
  int rank_ = 0;
  Beat own_{0, 0, -1, 0};
  std::vector<Peer> peers_;
  std::list<Sending> sending_;
  Clock::time_point said_{};
  int lost_rank_ = -1;
  std::string lost_text_;
  std::list<Transfers> open_;  // a call that fails leaves them here: MPI may still write to their memory
};

}  // namespace sparge::distributed
#endif  // SPARGE_DISTRIBUTED_GROUP_H_
