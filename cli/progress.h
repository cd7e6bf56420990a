// progress.h - progress of long work on stderr: a bar with the time left on a terminal, now and then a line otherwise.
#ifndef SPARGE_CLI_PROGRESS_H_
#define SPARGE_CLI_PROGRESS_H_

#include <chrono>
#include <cstdint>
#include <string>

namespace sparge::cli {

class Progress {
 public:
  // `total` steps; their number is all that the time left is judged by, so they should cost about the same.
  Progress(std::string what, int64_t total);
  // Takes the bar off the terminal.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Step(int64_t steps = 1);

 private:
  using Clock = std::chrono::steady_clock;
  void Draw();
  void PrintLine();

  std::string what_;
  int64_t total_;
  int64_t done_ = 0;
  bool terminal_;
  Clock::time_point start_, last_;
};

}  // namespace sparge::cli
#endif  // SPARGE_CLI_PROGRESS_H_
