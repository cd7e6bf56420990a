// options.h - the options that run, map, check and report share: one struct, its registration, and the checks between
// options.
#ifndef SPARGE_CLI_OPTIONS_H_
#define SPARGE_CLI_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/flags.h"
#include "cli/grid.h"

namespace CLI {
class App;
}  // namespace CLI

namespace sparge::cli {

enum class Verb { kRun, kMap, kCheck, kReport };
// Verbs that go through many files, and write none of tensors.
inline bool TakesPaths(Verb verb) { return verb == Verb::kCheck || verb == Verb::kReport; }

// As given; "not given" is kept apart from every value, because files may carry defaults of their own.
struct Options {
  std::string q, k, v;             // .npy files
  std::string tensors;             // or one .safetensors file
  std::vector<std::string> paths;  // or, if TakesPaths, files and folders of them
  std::string mask, map;
  std::string out, lse, map_out;

  bool causal = false;
  std::optional<int64_t> query_offset, window;
  std::optional<double> scale;
  GridOptions grid;

  std::optional<std::string> precision, predictor;
  std::optional<std::string> select;
  std::optional<double> tau, topk, theta;
  std::optional<double> pv_skip;  // infinity = off
  std::optional<bool> sink;
  std::optional<double> target_l1, pv_l1, target_l2, pv_l2, round_l1;  // of --select auto
  std::optional<int64_t> seed, warm;
  std::string preset, layer;

  int32_t threads = 0;  // 0 = all
  bool json = false;
  std::optional<double> max_l1;  // check only
};

// Which selection the flags ask for. One place for the rule: --select says it; else the parameter of a selection means
// that selection, and nothing at all means what every client of the library does.
struct Selection {
  std::string name;  // as --select takes it
  std::string flag;  // what says so, for messages: "--select cdf", "--tau", "--select auto, the default,"
};
Selection SelectionOf(const Options& options);

// Adds the options of `verb` to `app`; `options` must outlive it. Ranges of single values are checked while parsing.
void RegisterOptions(CLI::App& app, Verb verb, Options& options);
// Error bounds as flags name them.
struct GivenBounds {
  std::optional<double> target_l1, pv_l1, target_l2, pv_l2;
};
// One measure, and none that is smaller with PV skip than without. Throws UsageError.
void CheckBounds(const GivenBounds& given);
// --threads and --json, which every verb that computes has.
void RegisterThreads(CLI::App& app, int32_t& threads);
void RegisterJson(CLI::App& app, bool& json);
// Contradictory or meaningless combinations. What depends on the files is checked when they are read.
void CheckOptions(Verb verb, const Options& options);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_OPTIONS_H_
