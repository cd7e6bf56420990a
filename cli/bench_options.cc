// bench_options.cc - registers the flags of `sparge bench` and expands their lists into cases.
#include "cli/bench_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "cli/flags.h"
#include "cli/options.h"
#include "cli/report.h"
#include "io/tensor.h"

namespace sparge::cli {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 24;  // more would not end
constexpr int64_t kMostHeads = 1024;
constexpr int32_t kMostThreads = 1024;
// A smaller threshold leaves out so much that the check against the reference could not tell it from an error.
constexpr double kLeastPvSkip = 8;

constexpr double kDefaultKeep = 0.5;
const sparge_head_params& Defaults() {
  static const PlanDesc desc;
  return desc.params;
}

template <class T>
std::vector<T> ParseList(const std::string& text, const std::function<T(const std::string&)>& parse) {
  std::vector<T> values;
  for (const std::string& part : SplitList(text)) values.push_back(parse(part));
  return values;
}

template <class T>
void AddIntegers(CLI::App& app, const std::string& flag, const std::string& help, const std::string& group,
                 std::vector<T>& target, int64_t high) {
  AddText(app, flag, "N[,N..]", help, group, [flag, high, &target](const std::string& text) {
    target =
        ParseList<T>(text, [&](const std::string& part) { return static_cast<T>(ParseInteger(flag, part, 1, high)); });
  });
}

void AddInteger(CLI::App& app, const std::string& flag, const std::string& help, const std::string& group,
                const std::function<void(int64_t)>& take, int64_t high) {
  AddText(app, flag, "N", help, group,
          [flag, high, take](const std::string& text) { take(ParseInteger(flag, text, 1, high)); });
}

void AddShares(CLI::App& app, const std::string& flag, const std::string& help, std::vector<double>& target) {
  AddText(app, flag, "X[,X..]", help, "Method", [flag, &target](const std::string& text) {
    target = ParseList<double>(text, [&](const std::string& part) { return ParseNumber(flag, part, 0, 1); });
  });
}

// One of `values` by its name.
template <class T>
T ByName(const std::string& flag, const std::string& text, const std::vector<T>& values) {
  std::vector<std::string> names;
  names.reserve(values.size());
  for (const T value : values) names.emplace_back(NameOf(value));
  ParseChoice(flag, text, names);
  return values[static_cast<size_t>(std::find(names.begin(), names.end(), text) - names.begin())];
}

const std::vector<sparge_dtype> kDtypes{SPARGE_F32, SPARGE_F16, SPARGE_BF16};
const std::vector<sparge_precision> kPrecisions{SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8};
const std::vector<BenchSelect> kSelects{BenchSelect::kDense, BenchSelect::kCdf, BenchSelect::kTopk,
                                        BenchSelect::kRandom};
const std::vector<BenchData> kData{BenchData::kNoise, BenchData::kLocal};

void RegisterShape(CLI::App& app, BenchOptions& o) {
  const std::string group = "Shape and data";
  AddIntegers(app, "--tokens", "keys and values; default 1024,4096,8192", group, o.tokens, kMostTokens);
  AddInteger(
      app, "--queries", "queries, the last of the tokens; default all, 1 = decoding", group,
      [&o](int64_t n) { o.queries = n; }, kMostTokens);
  AddIntegers(app, "--dim", "head size; default 64,128", group, o.dims, SPARGE_MAX_HEAD_DIM);
  AddInteger(
      app, "--heads", "query heads; default 2", group, [&o](int64_t n) { o.heads = n; }, kMostHeads);
  AddInteger(
      app, "--kv-heads", "key heads; default as --heads", group, [&o](int64_t n) { o.kv_heads = n; }, kMostHeads);
  app.add_flag("--causal", o.causal, "query i sees keys j <= i + tokens - queries")->group(group);
  AddText(app, "--dtype", "fp32|fp16|bf16", "type of the tensors; default fp32", group,
          [&o](const std::string& text) { o.dtype = ByName("--dtype", text, kDtypes); });
  AddText(app, "--data", "noise|local", "white noise, or neighbours that are alike; default local for cdf and topk",
          group, [&o](const std::string& text) { o.data = ByName("--data", text, kData); });
  AddText(app, "--seed", "N", "of data, random maps and rows to check; default 1", group,
          [&o](const std::string& text) {
            constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
            o.seed = static_cast<uint64_t>(ParseInteger("--seed", text, 0, kLargest));
          });
}

void RegisterMethod(CLI::App& app, BenchOptions& o) {
  const std::string group = "Method";
  AddText(app, "--precision", "P[,P..]", "of fp32, int16, int8; default all", group, [&o](const std::string& text) {
    o.precisions = ParseList<sparge_precision>(
        text, [](const std::string& part) { return ByName("--precision", part, kPrecisions); });
  });
  AddText(
      app, "--select", "S[,S..]", "of dense, cdf, topk, random; default dense", group, [&o](const std::string& text) {
        o.selects =
            ParseList<BenchSelect>(text, [](const std::string& part) { return ByName("--select", part, kSelects); });
      });
  AddShares(app, "--keep", Format("random: share of a row's visible tiles; default %g", kDefaultKeep), o.keeps);
  AddShares(app, "--tau", Format("cdf: predicted mass to keep; default %g", Defaults().tau), o.taus);
  AddShares(app, "--topk", Format("topk: share of a row's visible tiles; default %g", Defaults().topk), o.topks);
  AddText(app, "--pv-skip", "X|off",
          Format("as in run, at least %g; default off, for cdf and topk %g", kLeastPvSkip, Defaults().pv_skip), group,
          [&o](const std::string& text) {
            constexpr double kInfinity = std::numeric_limits<double>::infinity();
            o.pv_skip = text == "off" ? kInfinity : ParseNumber("--pv-skip", text, kLeastPvSkip, kInfinity);
          });
}

void RegisterRun(CLI::App& app, BenchOptions& o) {
  const std::string group = "Run";
  AddIntegers(app, "--threads", "threads; default all", group, o.threads, kMostThreads);
  AddInteger(
      app, "--rounds", "timed runs of each case", group, [&o](int64_t n) { o.rounds = n; }, 100000);
  AddText(app, "--seconds", "X", "or about this long for each case, 3 to 200 runs; default 1", group,
          [&o](const std::string& text) { o.seconds = ParseNumber("--seconds", text, 0, 86400); });
  app.add_flag(
         "--decode", o.decode,
         "instead of prompts: steps of few queries, with keys in fp16 tensors and packed; default 9 heads on 3 of "
         "keys, depths (--tokens) 512,2048,8192,32768, head size 64")
      ->group(group);
  app.add_flag("--once", o.once, "one run of one case, not checked, no peaks: for counting instructions")->group(group);
  RegisterJson(app, o.json);
}

bool Has(const BenchOptions& o, BenchSelect select) {
  return std::find(o.selects.begin(), o.selects.end(), select) != o.selects.end();
}

void CheckSelect(const BenchOptions& o, const char* flag, const std::vector<double>& values, BenchSelect select) {
  if (values.empty() || Has(o, select)) return;
  throw UsageError(Format("%s has no meaning without --select %s", flag, NameOf(select)));
}

void CheckBenchOptions(const BenchOptions& o) {
  const int64_t heads = o.heads.value_or(BenchOptions::kHeads);
  if (o.kv_heads && (*o.kv_heads > heads || heads % *o.kv_heads != 0)) {
    throw UsageError("--kv-heads " + std::to_string(*o.kv_heads) + " does not divide --heads " + std::to_string(heads));
  }
  CheckSelect(o, "--keep", o.keeps, BenchSelect::kRandom);
  CheckSelect(o, "--tau", o.taus, BenchSelect::kCdf);
  CheckSelect(o, "--topk", o.topks, BenchSelect::kTopk);
  if (o.rounds && o.seconds) throw UsageError("give only one of --rounds and --seconds");
  if (o.once && o.rounds) throw UsageError("--rounds has no meaning with --once");
  if (o.once && o.seconds) throw UsageError("--seconds has no meaning with --once");
}

// Shares to try for a selection.
std::vector<double> SharesOf(const BenchOptions& o, BenchSelect select) {
  const auto given = [](const std::vector<double>& values, double fallback) {
    return values.empty() ? std::vector<double>{fallback} : values;
  };
  switch (select) {
    case BenchSelect::kCdf:
      return given(o.taus, Defaults().tau);
    case BenchSelect::kTopk:
      return given(o.topks, Defaults().topk);
    case BenchSelect::kRandom:
      return given(o.keeps, kDefaultKeep);
    case BenchSelect::kDense:
      break;
  }
  return {1.0};
}

BenchCase CommonCase(const BenchOptions& o) {
  BenchCase c;
  c.heads = o.heads.value_or(BenchOptions::kHeads);
  c.kv_heads = o.kv_heads.value_or(c.heads);
  c.causal = o.causal;
  c.dtype = o.dtype;
  c.seed = o.seed;
  return c;
}

bool Predicted(BenchSelect select) { return select == BenchSelect::kCdf || select == BenchSelect::kTopk; }
// Noise has no structure to predict: nearly all tiles would be kept.
BenchData DefaultData(BenchSelect select) { return Predicted(select) ? BenchData::kLocal : BenchData::kNoise; }
double DefaultPvSkip(BenchSelect select) { return Predicted(select) ? Defaults().pv_skip : SPARGE_PV_SKIP_OFF; }

// The case once for every precision, selection and share.
void AddMethods(const BenchOptions& o, BenchCase c, std::vector<BenchCase>& cases) {
  for (const BenchSelect select : o.selects) {
    c.select = select;
    c.data = o.data.value_or(DefaultData(select));
    c.pv_skip = o.pv_skip.value_or(DefaultPvSkip(select));
    for (const double share : SharesOf(o, select)) {
      c.share = share;
      for (const sparge_precision precision : o.precisions) {
        c.precision = precision;
        cases.push_back(c);
      }
    }
  }
}

// The flags that give this case alone, those left out that say what is the default anyway.
std::string CaseFlags(const BenchCase& c) {
  const BenchOptions defaults;
  std::string text = "--tokens " + std::to_string(c.tokens);
  if (c.queries != c.tokens) text += " --queries " + std::to_string(c.queries);
  text += " --dim " + std::to_string(c.dim);
  if (c.heads != BenchOptions::kHeads) text += " --heads " + std::to_string(c.heads);
  if (c.kv_heads != c.heads) text += " --kv-heads " + std::to_string(c.kv_heads);
  text += std::string(" --precision ") + NameOf(c.precision) + " --select " + NameOf(c.select);
  if (c.select == BenchSelect::kCdf) text += " --tau " + NumberText(c.share);
  if (c.select == BenchSelect::kTopk) text += " --topk " + NumberText(c.share);
  if (c.select == BenchSelect::kRandom) text += " --keep " + NumberText(c.share);
  if (c.pv_skip != DefaultPvSkip(c.select)) {
    text += " --pv-skip " + (std::isinf(c.pv_skip) ? "off" : NumberText(c.pv_skip));
  }
  if (c.causal) text += " --causal";
  if (c.dtype != defaults.dtype) text += std::string(" --dtype ") + NameOf(c.dtype);
  if (c.data != DefaultData(c.select)) text += std::string(" --data ") + NameOf(c.data);
  if (c.seed != defaults.seed) text += " --seed " + std::to_string(c.seed);
  return text + " --threads " + std::to_string(c.threads);
}

}  // namespace

void RegisterBenchOptions(CLI::App& app, BenchOptions& options) {
  RegisterShape(app, options);
  RegisterMethod(app, options);
  RegisterRun(app, options);
}

std::vector<BenchCase> ExpandCases(const BenchOptions& options, int32_t all_threads) {
  CheckBenchOptions(options);
  std::vector<BenchCase> cases;
  BenchCase c = CommonCase(options);
  for (const int64_t tokens : options.tokens.empty() ? std::vector<int64_t>{1024, 4096, 8192} : options.tokens) {
    c.tokens = tokens;
    c.queries = options.queries.value_or(tokens);
    for (const int64_t dim : options.dims.empty() ? std::vector<int64_t>{64, 128} : options.dims) {
      c.dim = dim;
      for (const int32_t threads : options.threads.empty() ? std::vector<int32_t>{all_threads} : options.threads) {
        c.threads = threads;
        AddMethods(options, c, cases);
      }
    }
  }
  if (options.once && cases.size() != 1) {
    throw UsageError("--once is for a single case, and these flags give " + std::to_string(cases.size()) +
                     ": name one value each of --tokens, --dim, --precision, --select, --threads");
  }
  return cases;
}

std::string RepeatLine(const BenchOptions& options, const BenchCase& c) {
  const char* isa = std::getenv("SPARGE_ISA");
  std::string line = isa != nullptr && *isa != '\0' ? std::string("SPARGE_ISA=") + isa + " " : "";
  line += "sparge bench " + CaseFlags(c);
  if (options.rounds) line += " --rounds " + std::to_string(*options.rounds);
  if (options.seconds) line += " --seconds " + NumberText(*options.seconds);
  if (options.once) line += " --once";
  return line;
}

}  // namespace sparge::cli
