// cmd_bench.cc - `sparge bench`: checks cases against the reference, then times them in turns.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <tuple>

#include "cli/bench_decode.h"
#include "cli/bench_options.h"
#include "cli/bench_report.h"
#include "cli/bench_run.h"
#include "cli/commands.h"
#include "cli/machine.h"
#include "cli/outputs.h"
#include "cli/progress.h"

namespace sparge::cli {
namespace {

constexpr double kDefaultSeconds = 1;
// Fewer say nothing of the spread, more do not change the median.
constexpr int64_t kFewestRounds = 3, kMostRounds = 200;
// The clock of a busy machine moves: peaks are measured before, between and after the rounds, and the best counts.
constexpr int64_t kPeakTimes = 8;
constexpr double kPeakMs = 10;

// All cases, with what they share: a context per number of threads, and tensors.
class Cases {
 public:
  explicit Cases(const std::vector<BenchCase>& cases) {
    for (const BenchCase& c : cases)
      runs_.push_back(std::make_unique<BenchRun>(ContextFor(c.threads), c, InputsFor(c)));
  }
  const std::vector<std::unique_ptr<BenchRun>>& runs() const { return runs_; }
  std::string isa() const { return contexts_.begin()->second->isa(); }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, BenchData>;  // what else there is takes no list

  const Context& ContextFor(int32_t threads) {
    std::unique_ptr<Context>& context = contexts_[threads];
    if (!context) context = std::make_unique<Context>(threads);
    return *context;
  }
  std::shared_ptr<const BenchInputs> InputsFor(const BenchCase& c) {
    std::shared_ptr<const BenchInputs>& inputs = inputs_[Key{c.tokens, c.queries, c.dim, c.data}];
    if (!inputs) inputs = std::make_shared<const BenchInputs>(MakeInputs(c));
    return inputs;
  }

  std::map<int32_t, std::unique_ptr<Context>> contexts_;
  std::map<Key, std::shared_ptr<const BenchInputs>> inputs_;
  std::vector<std::unique_ptr<BenchRun>> runs_;
};

class Peaks {
 public:
  Peaks(std::string isa, const std::vector<BenchCase>& cases) : isa_(std::move(isa)) {
    for (const BenchCase& c : cases) best_[{c.threads, c.precision}] = {};
  }
  void Measure() {
    for (auto& [key, best] : best_) {
      const Peak peak = MeasurePeak(isa_, key.second, key.first, kPeakMs);
      if (peak.gops > best.gops) best = peak;
    }
  }
  const std::map<std::pair<int32_t, sparge_precision>, Peak>& best() const { return best_; }

 private:
  std::string isa_;
  std::map<std::pair<int32_t, sparge_precision>, Peak> best_;
};

void VerifyAll(const Cases& cases) {
  Progress progress("checking cases", static_cast<int64_t>(cases.runs().size()));
  for (const auto& run : cases.runs()) {
    run->Verify();
    progress.Step();
  }
}

// How often a case is to be timed if that takes `ms`.
int64_t RoundsFor(const BenchOptions& options, double ms) {
  if (options.rounds) return *options.rounds;
  const double fit = std::floor(options.seconds.value_or(kDefaultSeconds) * 1e3 / std::max(ms, 1e-3));
  return static_cast<int64_t>(std::clamp(fit, static_cast<double>(kFewestRounds), static_cast<double>(kMostRounds)));
}

// A case in the timing, with its number of rounds and the milliseconds that one is expected to take.
struct Turn {
  BenchRun* run;
  int64_t rounds;
  double expected_ms;
  // Rounds that are to be done when `done` of `all` rounds are over: spread evenly, whatever their number.
  int64_t DueAfter(int64_t done, int64_t all) const { return done * rounds / all; }
};

// The bar moves with the expected time, because rounds of different cases take very different times.
class TimeProgress {
 public:
  explicit TimeProgress(double expected_ms) : expected_ms_(expected_ms), bar_("timing, percent", kSteps) {}
  void Add(double ms) {
    done_ms_ += ms;
    for (; steps_ < kSteps && steps_ < done_ms_ / expected_ms_ * kSteps; ++steps_) bar_.Step();
  }

 private:
  static constexpr int kSteps = 100;
  double expected_ms_, done_ms_ = 0;
  int steps_ = 0;
  Progress bar_;
};

void TimeAll(const BenchOptions& options, const Cases& cases, Peaks& peaks) {
  std::vector<Turn> turns;
  int64_t all = 1;
  double expected_ms = 0;
  for (const auto& run : cases.runs()) {
    if (!run->result().passed()) continue;  // the time of a wrong result means nothing
    const double ms = run->Probe();
    turns.push_back({run.get(), RoundsFor(options, ms), ms});
    all = std::max(all, turns.back().rounds);
    expected_ms += static_cast<double>(turns.back().rounds) * ms;
  }
  TimeProgress progress(expected_ms);
  peaks.Measure();
  for (int64_t round = 0; round < all; ++round) {
    for (const Turn& turn : turns) {
      if (turn.DueAfter(round + 1, all) == turn.DueAfter(round, all)) continue;
      turn.run->Time();
      progress.Add(turn.expected_ms);
    }
    if ((round + 1) * kPeakTimes / all != round * kPeakTimes / all) peaks.Measure();
  }
  for (const Turn& turn : turns) turn.run->CheckSteady();
}

int Bench(const BenchOptions& options) {
  if (options.decode) return BenchDecode(options);
  const int32_t all_threads = Context(0).threads();
  const std::vector<BenchCase> list = ExpandCases(options, all_threads);
  const Cases cases(list);
  Peaks peaks(cases.isa(), list);
  if (options.once) {
    cases.runs().front()->Time();
  } else {
    VerifyAll(cases);
    TimeAll(options, cases, peaks);
  }
  BenchReport report{CpuName(), cases.isa(), all_threads, peaks.best(), {}, {}};
  for (const auto& run : cases.runs()) {
    BenchResult& result = report.results.emplace_back(run->result());
    result.peak_gops = peaks.best().at({result.c.threads, result.c.precision}).gops;
    report.repeat.push_back(RepeatLine(options, result.c));
  }
  PrintOut(options.json ? BenchJson(report) : BenchText(report));
  std::fputs(BenchFailures(report).c_str(), stderr);
  return report.passed() ? 0 : 1;
}

constexpr char kFooter[] =
    "Every combination of the lists is a case. Each result is compared with the double-precision reference over the\n"
    "tiles that were computed, in large cases for a sample of rows; only right results are timed. Cases take turns.\n"
    "\n"
    "  min, median  milliseconds of a run\n"
    "  spread       (p75 - p25) / median of the times\n"
    "  kept         tiles computed / tiles visible\n"
    "  GFLOP/s      in the best run: 4 x dim per query and visible key of the computed tiles;\n"
    "               'dense GFLOP/s' counts all visible keys, computed or not\n"
    "  peak         GFLOP/s as a share of the measured peak: multiply-adds of this precision in registers,\n"
    "               on as many threads\n"
    "  error        relative L1 over the checked rows; 'worst row' of a single one, against its own size or the\n"
    "               mean size of a row, whichever is larger\n"
    "\n"
    "Exit code 1 if a result is wrong. SPARGE_ISA=NAME in the environment forces an instruction set.";

}  // namespace

Command AddBench(CLI::App& program) {
  CLI::App* app = AddVerb(program, "bench", "speed of checked results on made-up tensors", kFooter);
  const auto options = std::make_shared<BenchOptions>();
  RegisterBenchOptions(*app, *options);
  return {app, [options] { return Bench(*options); }};
}

}  // namespace sparge::cli
