// peak.cc - the loops behind the measured peaks, compiled once per instruction set.
#include "cli/peak.h"

// The same choice of targets as the library's (src/cpu/targets.h, which a client may not include).
#define HWY_WANT_AVX3_DL 1
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#define HWY_BROKEN_EMU128 0

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cli/peak.cc"
#include <hwy/foreach_target.h>
// Must come after foreach_target.
#include <hwy/highway.h>

#ifndef SPARGE_CLI_PEAK_ONCE
#define SPARGE_CLI_PEAK_ONCE
namespace sparge::cli {

// A loop of independent multiply-adds.
struct PeakLoop {
  void (*run)(int64_t rounds);
  double operations_per_round;
  const char* text;
};

}  // namespace sparge::cli
#endif

HWY_BEFORE_NAMESPACE();
namespace sparge::cli {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
// More than latency x throughput of every known core (4 to 5 cycles, 2 a cycle), and few enough for 16 registers.
constexpr int kChains = 12;

using Vector = hn::Vec<hn::ScalableTag<int32_t>>;

// Assembly, so that the compiler neither hoists the products out of the loop nor folds them. `Step` adds one
// instruction's products to an accumulator.
#if HWY_TARGET == HWY_NEON
struct StepFp32 {
  static constexpr char kText[] = "fmla";
  static constexpr int kProductsPerLane = 1;
  static HWY_INLINE void Step(Vector& acc, const Vector& a, const Vector& b) {
    asm volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(acc.raw) : "w"(a.raw), "w"(b.raw));
  }
};
struct StepInt16 {
  static constexpr char kText[] = "smlal";
  static constexpr int kProductsPerLane = 1;
  static HWY_INLINE void Step(Vector& acc, const Vector& a, const Vector& b) {
    asm volatile("smlal %0.4s, %1.4h, %2.4h" : "+w"(acc.raw) : "w"(a.raw), "w"(b.raw));
  }
};
using StepInt8 = StepInt16;  // smull + sadalp do as many products per instruction
struct StepSdot {
  static constexpr char kText[] = "sdot";
  static constexpr int kProductsPerLane = 4;
  static HWY_INLINE void Step(Vector& acc, const Vector& a, const Vector& b) {
    asm volatile(".arch armv8.2-a+crypto+dotprod\n\tsdot %0.4s, %1.16b, %2.16b"
                 : "+w"(acc.raw)
                 : "w"(a.raw), "w"(b.raw));
  }
};
struct StepUsdot {
  static constexpr char kText[] = "usdot";
  static constexpr int kProductsPerLane = 4;
  static HWY_INLINE void Step(Vector& acc, const Vector& a, const Vector& b) {
    asm volatile(".arch armv8.2-a+crypto+i8mm\n\tusdot %0.4s, %1.16b, %2.16b" : "+w"(acc.raw) : "w"(a.raw), "w"(b.raw));
  }
};
#else
struct StepFp32 {
  static constexpr char kText[] = "vfmadd231ps";
  static constexpr int kProductsPerLane = 1;
  static HWY_INLINE void Step(Vector& acc, const Vector& a, const Vector& b) {
    asm volatile("vfmadd231ps %2, %1, %0" : "+v"(acc.raw) : "v"(a.raw), "v"(b.raw));
  }
};
#if HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_AVX2
#undef SPARGE_VEX
#if HWY_TARGET == HWY_AVX2
#define SPARGE_VEX "%{vex%} "  // as processors without AVX-512 know it
#else
#define SPARGE_VEX ""
#endif
struct StepInt16Vnni {
  static constexpr char kText[] = "vpdpwssd";
  static constexpr int kProductsPerLane = 2;
  static HWY_INLINE void Step(Vector& acc, const Vector& a, const Vector& b) {
    asm volatile(SPARGE_VEX "vpdpwssd %2, %1, %0" : "+v"(acc.raw) : "v"(a.raw), "v"(b.raw));
  }
};
struct StepInt8Vnni {
  static constexpr char kText[] = "vpdpbusd";
  static constexpr int kProductsPerLane = 4;
  static HWY_INLINE void Step(Vector& acc, const Vector& a, const Vector& b) {
    asm volatile(SPARGE_VEX "vpdpbusd %2, %1, %0" : "+v"(acc.raw) : "v"(a.raw), "v"(b.raw));
  }
};
#endif
#if HWY_TARGET == HWY_AVX3_DL
using StepInt16 = StepInt16Vnni;
using StepInt8 = StepInt8Vnni;
#else
struct StepInt16 {
  static constexpr char kText[] = "vpmaddwd + vpaddd";
  static constexpr int kProductsPerLane = 2;
  static HWY_INLINE void Step(Vector& acc, const Vector& a, const Vector& b) {
    Vector products = a;
    asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
                 : "+v"(acc.raw), "=&v"(products.raw)
                 : "v"(a.raw), "v"(b.raw));
  }
};
struct StepInt8 {
  static constexpr char kText[] = "vpmaddubsw + vpaddw";
  static constexpr int kProductsPerLane = 4;
  static HWY_INLINE void Step(Vector& acc, const Vector& a, const Vector& b) {
    Vector products = a;
    asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
                 : "+v"(acc.raw), "=&v"(products.raw)
                 : "v"(a.raw), "v"(b.raw));
  }
};
#endif
#endif  // x86

template <class S>
HWY_NOINLINE void Run(int64_t rounds) {
  const hn::ScalableTag<int32_t> d;
  const Vector a = hn::Zero(d), b = hn::Zero(d);  // zeros stay zeros: no overflow, no denormals
  Vector c0 = a, c1 = a, c2 = a, c3 = a, c4 = a, c5 = a, c6 = a, c7 = a, c8 = a, c9 = a, c10 = a, c11 = a;
  for (int64_t i = 0; i < rounds; ++i) {
    S::Step(c0, a, b);
    S::Step(c1, a, b);
    S::Step(c2, a, b);
    S::Step(c3, a, b);
    S::Step(c4, a, b);
    S::Step(c5, a, b);
    S::Step(c6, a, b);
    S::Step(c7, a, b);
    S::Step(c8, a, b);
    S::Step(c9, a, b);
    S::Step(c10, a, b);
    S::Step(c11, a, b);
  }
}

template <class S>
inline constexpr PeakLoop kLoop{&Run<S>, 2.0 * kChains * sizeof(Vector) / sizeof(int32_t) * S::kProductsPerLane,
                                S::kText};
inline constexpr PeakLoop kPeakLoops[3] = {kLoop<StepFp32>, kLoop<StepInt16>, kLoop<StepInt8>};
#if HWY_TARGET == HWY_AVX2
inline constexpr PeakLoop kVnniPeakLoops[3] = {kLoop<StepFp32>, kLoop<StepInt16Vnni>, kLoop<StepInt8Vnni>};
#elif HWY_TARGET == HWY_NEON
inline constexpr PeakLoop kDotprodPeakLoops[3] = {kLoop<StepFp32>, kLoop<StepInt16>, kLoop<StepSdot>};
inline constexpr PeakLoop kI8mmPeakLoops[3] = {kLoop<StepFp32>, kLoop<StepInt16>, kLoop<StepUsdot>};
#endif

#else
inline constexpr PeakLoop kPeakLoops[3] = {};
#endif

}  // namespace HWY_NAMESPACE
}  // namespace sparge::cli
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <barrier>
#include <chrono>
#include <thread>
#include <vector>

namespace sparge::cli {
namespace {

using Clock = std::chrono::steady_clock;

PeakLoop LoopFor(const std::string& isa, sparge_precision precision) {
#if HWY_TARGETS & HWY_AVX3_DL
  if (isa == "avx512vnni") return N_AVX3_DL::kPeakLoops[precision];
#endif
#if HWY_TARGETS & HWY_AVX3
  if (isa == "avx512") return N_AVX3::kPeakLoops[precision];
#endif
#if HWY_TARGETS & HWY_AVX2
  if (isa == "avxvnni") return N_AVX2::kVnniPeakLoops[precision];
  if (isa == "avx2") return N_AVX2::kPeakLoops[precision];
#endif
#if HWY_TARGETS & HWY_NEON
  if (isa == "neon_i8mm") return N_NEON::kI8mmPeakLoops[precision];
  if (isa == "neon_dotprod") return N_NEON::kDotprodPeakLoops[precision];
  if (isa == "neon") return N_NEON::kPeakLoops[precision];
#endif
  return {};
}

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Rounds that take about `seconds` on one thread.
int64_t RoundsFor(const PeakLoop& loop, double seconds) {
  constexpr int64_t kProbe = 20000;  // a good part of a millisecond, so that reading the clock does not count
  const Clock::time_point start = Clock::now();
  loop.run(kProbe);
  return std::max(kProbe, static_cast<int64_t>(kProbe * (seconds / std::max(SecondsSince(start), 1e-6))));
}

// Seconds from the first start to the last end of `rounds` rounds on every thread at once. Not the sum of the threads'
// own rates: a thread whose core the others have left would look faster than all of them together can be.
double SecondsOfAll(const PeakLoop& loop, int32_t threads, int64_t rounds) {
  std::vector<Clock::time_point> begin(static_cast<size_t>(threads)), end(begin.size());
  std::barrier together(threads);
  const auto work = [&](size_t i) {
    together.arrive_and_wait();
    begin[i] = Clock::now();
    loop.run(rounds);
    end[i] = Clock::now();
  };
  {
    std::vector<std::jthread> others;
    for (size_t i = 1; i < begin.size(); ++i) others.emplace_back(work, i);
    work(0);
  }
  return std::chrono::duration<double>(*std::max_element(end.begin(), end.end()) -
                                       *std::min_element(begin.begin(), begin.end()))
      .count();
}

}  // namespace

Peak MeasurePeak(const std::string& isa, sparge_precision precision, int32_t threads, double ms) {
  constexpr int kStretches = 5;
  const PeakLoop loop = LoopFor(isa, precision);
  if (loop.run == nullptr) return {};
  const int64_t rounds = RoundsFor(loop, ms * 1e-3 / kStretches);
  const double operations = static_cast<double>(threads) * static_cast<double>(rounds) * loop.operations_per_round;
  double best = 0;
  for (int i = 0; i < kStretches; ++i) best = std::max(best, operations / SecondsOfAll(loop, threads, rounds) * 1e-9);
  return {best, loop.text};
}

}  // namespace sparge::cli
#endif  // HWY_ONCE
