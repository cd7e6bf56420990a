// Messages, and who is still there.
#include "distributed/group.h"

#include <algorithm>
#include <future>
#include <thread>
#include <utility>

namespace sparge::distributed {
namespace {

constexpr int kBeatTag = 1, kDataTag = 2;
constexpr size_t kMostBytes = size_t{1} << 22;  // of one message of MPI, which counts in int
constexpr auto kBeatPeriod = std::chrono::milliseconds(250);
// How often messages are moved on. Beside a computation this costs a per cent of one core.
constexpr auto kPollComputing = std::chrono::microseconds(500), kPollWaiting = std::chrono::microseconds(100);
// Small messages leave at once, unless their receiver has stopped reading.
constexpr auto kFlush = std::chrono::milliseconds(100);

double Seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

std::string ErrorText(int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return text;
}

}  // namespace

Group::Group(MPI_Comm comm, double timeout_s)
    : comm_(comm), timeout_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s))) {
  int ranks = 0;
  Must(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), -1);
  Must(MPI_Comm_rank(comm, &rank_), -1);
  Must(MPI_Comm_size(comm, &ranks), -1);
  peers_.resize(ranks);
}

void Group::Leave() {
  own_.leaves = 1;
  Say(/*to_all=*/true);
  const auto all_leave = [&] {
    for (int r = 0; r < ranks(); ++r) {
      if (r != rank_ && peers_[r].last.leaves == 0) return false;
    }
    return true;
  };
  for (const auto since = Clock::now(); !all_leave() && Clock::now() - since < timeout_;) {
    Poll();
    std::this_thread::sleep_for(kPollWaiting);
  }
  Flush(kFlush);
}

void Group::Begin() {
  if (lost_rank_ >= 0) {
    throw Failure{SPARGE_RANK_LOST, lost_text_ + "; that was in an earlier call, and the group is of no use any more"};
  }
  own_.call = own_.done + 1;
  bytes_sent = 0;
  waited = {};
  for (Peer& peer : peers_) peer.heard = Clock::now();
  Say(/*to_all=*/true);
}

void Group::End() {
  own_.done = own_.call;
  Say(/*to_all=*/true);
  Flush(kFlush);
}

void Group::Fail(const std::string& text) noexcept {
  if (lost_rank_ >= 0) return;
  try {
    GiveUp(rank_, "(this one) has failed: " + text);
  } catch (...) {  // what it has to say is said
  }
}

void Group::GiveUp(int lost, const std::string& text) {
  lost_rank_ = lost;
  own_.verdict = lost;
  lost_text_ = "rank " + std::to_string(lost) + " " + text;
  try {
    Say(/*to_all=*/true);
    Flush(kFlush);
  } catch (const Failure&) {  // the first loss is what counts
  }
  throw Failure{SPARGE_RANK_LOST, lost_text_};
}

void Group::Must(int code, int peer) {
  if (code == MPI_SUCCESS) return;
  const std::string text = "MPI says: " + ErrorText(code);
  if (peer < 0 || lost_rank_ >= 0) throw Failure{SPARGE_INTERNAL_ERROR, text};
  GiveUp(peer, "cannot be reached: " + text);
}

void Group::Send(const Buffer& from, int to, Transfers* transfers) {
  transfers->memory.push_back(from);
  for (size_t at = 0; at < from.size(); at += kMostBytes) {
    const int bytes = static_cast<int>(std::min(kMostBytes, from.size() - at));
    MPI_Request& request = transfers->requests.emplace_back(MPI_REQUEST_NULL);
    Must(MPI_Isend(from.as<std::byte>() + at, bytes, MPI_BYTE, to, kDataTag, comm_, &request), to);
  }
  bytes_sent += static_cast<int64_t>(from.size());
}

void Group::Receive(const Buffer& into, int from, Transfers* transfers) {
  transfers->memory.push_back(into);
  for (size_t at = 0; at < into.size(); at += kMostBytes) {
    const int bytes = static_cast<int>(std::min(kMostBytes, into.size() - at));
    MPI_Request& request = transfers->requests.emplace_back(MPI_REQUEST_NULL);
    Must(MPI_Irecv(into.as<std::byte>() + at, bytes, MPI_BYTE, from, kDataTag, comm_, &request), from);
  }
}

bool Group::Test(Transfers* transfers) {
  int all = 1;
  Must(MPI_Testall(static_cast<int>(transfers->requests.size()), transfers->requests.data(), &all, MPI_STATUSES_IGNORE),
       -1);
  return all != 0;
}

void Group::Wait(Transfers* transfers) {
  const auto since = Clock::now();
  while (!Test(transfers)) {
    Poll();
    Check(since);
    std::this_thread::sleep_for(kPollWaiting);
  }
  waited += Clock::now() - since;
  open_.remove_if([&](const Transfers& open) { return &open == transfers; });
}

bool Group::Compute(const std::function<void()>& work, Transfers* transfers) {
  bool through = false;
  std::future<void> ends = std::async(std::launch::async, work);
  while (ends.wait_for(kPollComputing) != std::future_status::ready) {
    Poll();
    if (transfers != nullptr && !through) through = Test(transfers);
  }
  ends.get();
  return through;
}

std::vector<Buffer> Group::Exchange(const std::vector<Buffer>& outgoing, const std::vector<size_t>& incoming_bytes) {
  std::vector<Buffer> incoming;
  Transfers* transfers = Open();
  for (int r = 0; r < ranks(); ++r) {
    incoming.push_back(r == rank_ ? outgoing[r] : Buffer(incoming_bytes[r]));
    if (r != rank_) Receive(incoming[r], r, transfers);
  }
  for (int r = 0; r < ranks(); ++r) {
    if (r != rank_) Send(outgoing[r], r, transfers);
  }
  Wait(transfers);
  return incoming;
}

// Moves messages on, hears what others say, and says that this rank is there.
void Group::Poll() {
  if (own_.leaves == 0 && Clock::now() - said_ >= kBeatPeriod) Say(/*to_all=*/false);
  for (int there = 1; there != 0;) {
    MPI_Status status;
    Must(MPI_Iprobe(MPI_ANY_SOURCE, kBeatTag, comm_, &there, &status), -1);
    if (there == 0) break;
    Peer& peer = peers_[status.MPI_SOURCE];
    Must(MPI_Recv(&peer.last, sizeof(Beat), MPI_BYTE, status.MPI_SOURCE, kBeatTag, comm_, MPI_STATUS_IGNORE),
         status.MPI_SOURCE);
    peer.heard = Clock::now();
  }
  sending_.remove_if([&](Sending& sending) {
    int sent = 0;
    Must(MPI_Test(&sending.request, &sent, MPI_STATUS_IGNORE), -1);
    peers_[sending.to].unsent -= sent;
    return sent != 0;
  });
}

// A sign of life need not go to a rank that has not read the last one; what is new must.
void Group::Say(bool to_all) {
  for (int r = 0; r < ranks(); ++r) {
    if (r == rank_ || (!to_all && peers_[r].unsent > 0)) continue;
    Sending& sending = sending_.emplace_back(Sending{MPI_REQUEST_NULL, own_, r});
    if (MPI_Isend(&sending.beat, sizeof(Beat), MPI_BYTE, r, kBeatTag, comm_, &sending.request) == MPI_SUCCESS) {
      ++peers_[r].unsent;
    } else {
      sending_.pop_back();  // it cannot be reached: whoever needs it will find that out
    }
  }
  said_ = Clock::now();
}

void Group::Flush(Clock::duration most) {
  for (const auto since = Clock::now(); !sending_.empty() && Clock::now() - since < most;) Poll();
}

void Group::Check(Clock::time_point waiting_since) {
  const double timeout_s = Seconds(timeout_);
  for (int r = 0; r < ranks(); ++r) {
    const int verdict = static_cast<int>(peers_[r].last.verdict);
    if (r == rank_ || verdict < 0) continue;
    const std::string by = "rank " + std::to_string(r);
    GiveUp(verdict, verdict == r       ? "has failed with an error of its own"
                    : verdict == rank_ ? "(this one) was given up by " + by
                                       : "does not do its part, says " + by);
  }
  const auto now = Clock::now();
  const auto owes = [&](int r) { return r != rank_ && peers_[r].last.done < own_.call; };
  for (int r = 0; r < ranks(); ++r) {
    if (owes(r) && peers_[r].last.leaves != 0) GiveUp(r, "has left the group (sparge_mpi_destroy)");
    if (!owes(r) || now - peers_[r].heard <= timeout_) continue;
    const char* what = peers_[r].last.call < own_.call ? "has not come" : "is silent";
    GiveUp(r, Format("%s: nothing from it for %.1f s (timeout_s=%g)", what, Seconds(now - peers_[r].heard), timeout_s));
  }
  for (int r = 0; r < ranks(); ++r) {
    if (!owes(r) || peers_[r].last.call >= own_.call || now - waiting_since <= timeout_) continue;
    GiveUp(r, Format("has not come: its last call is %lld, not %lld, after %g s (timeout_s)",
                     static_cast<long long>(peers_[r].last.call), static_cast<long long>(own_.call), timeout_s));
  }
}

}  // namespace sparge::distributed
