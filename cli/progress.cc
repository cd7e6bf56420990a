// progress.cc - draws the progress bar or prints the progress lines.
#include "cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace sparge::cli {
namespace {

constexpr int kBarWidth = 30;
constexpr std::chrono::seconds kLineEvery{5};  // quick work prints no line at all

std::string Minutes(double seconds) {
  const long whole = std::lround(seconds);
  char text[32];
  std::snprintf(text, sizeof text, "%ld:%02ld", whole / 60, whole % 60);
  return text;
}

}  // namespace

Progress::Progress(std::string what, int64_t total)
    : what_(std::move(what)),
      total_(std::max<int64_t>(total, 1)),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(Clock::now()),
      last_(start_) {
  if (terminal_) Draw();
}

Progress::~Progress() {
  if (terminal_) std::fprintf(stderr, "\r\033[K");
}

void Progress::Step(int64_t steps) {
  done_ += steps;
  if (terminal_) {
    Draw();
  } else if (Clock::now() - last_ >= kLineEvery) {
    last_ = Clock::now();
    PrintLine();
  }
}

void Progress::Draw() {
  const auto full = static_cast<size_t>(kBarWidth * std::min(done_, total_) / total_);
  const double elapsed = std::chrono::duration<double>(Clock::now() - start_).count();
  std::string left = "-:--";
  if (done_ > 0) left = Minutes(elapsed / static_cast<double>(done_) * static_cast<double>(total_ - done_));
  std::fprintf(stderr, "\r%s [%s%s] %lld/%lld, %s left\033[K", what_.c_str(), std::string(full, '#').c_str(),
               std::string(kBarWidth - full, '.').c_str(), static_cast<long long>(done_),
               static_cast<long long>(total_), left.c_str());
}

void Progress::PrintLine() {
  const double elapsed = std::chrono::duration<double>(Clock::now() - start_).count();
  const double left = elapsed / static_cast<double>(done_) * static_cast<double>(total_ - done_);
  std::fprintf(stderr, "%s: %lld of %lld, %s left\n", what_.c_str(), static_cast<long long>(done_),
               static_cast<long long>(total_), Minutes(left).c_str());
}

}  // namespace sparge::cli
