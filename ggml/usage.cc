#include "ggml/usage.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace sparge::ggml {
namespace {

// Never destroyed: contexts may be freed after the destructors of this object have run.
struct Shared {
  std::mutex mutex;
  Usage usage;
};
Shared& All() {
  static auto* const all = new Shared;
  return *all;
}

std::string Number(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

}  // namespace

std::string Describe(const Usage& usage) {
  if (usage.prompts + usage.steps > 0) {
    const std::string text = "computed " + std::to_string(usage.prompts) +
                             (usage.prompts == 1 ? " attention call" : " attention calls") + " of prompts and " +
                             std::to_string(usage.steps) + " of answers in " + Number("%.2f s", usage.ms / 1e3);
    if (usage.eligible == 0) return text;
    const double kept = static_cast<double>(usage.computed) / static_cast<double>(usage.eligible);
    return text + "; " + Number("%.0f %%", 100 * (1 - kept)) + " of the tiles of prompts were skipped";
  }
  if (usage.impossible > 0 && usage.few == 0) {
    return "computed nothing: attention of these types or shapes is none of docs/ggml.md";
  }
  if (usage.few > 0) {
    return "computed nothing: no prompt had more than " + std::to_string(SPARGE_FEW_QUERIES) +
           " tokens, and answers are taken from " + std::to_string(SPARGE_DECODE_KEYS) +
           " tokens of context on, from one cache in f16, bf16 or f32";
  }
  return usage.taken > 0 ? "computed nothing: the program ended before its first prompt"
                         : "computed nothing: no flash attention was asked for (is it off? -fa on)";
}

std::string Describe(const Settings& settings) {
  if (settings.mode == Mode::kOff) return "switched off by SPARGE_MODE=off";
  if (settings.mode == Mode::kExact) return "every tile, fp32";
  if (settings.preset) return "preset " + settings.preset_path;
  const auto bounds = BoundsOf(settings.bounds);
  if (bounds.target == 0) return "every tile, " + std::string(io::PrecisionName(settings.precision));
  const char* const measure = bounds.measure == SPARGE_MEASURE_L1 ? "L1" : "L2";
  return "relative " + std::string(measure) + " error " + Number("%g", bounds.target) + " per head";
}

void SayLoaded(const Settings& settings, const char* ggml_version, const char* isa) {
  if (settings.quiet) return;
  std::fprintf(stderr, "sparge %s: attention for ggml %s, %s, %s (SPARGE_QUIET=1: without this line)\n",
               sparge_version(), ggml_version, isa, Describe(settings).c_str());
  if (settings.mode == Mode::kOff) return;
  std::atexit([] {
    const std::lock_guard lock(All().mutex);
    std::fprintf(stderr, "sparge: %s\n", Describe(All().usage).c_str());
  });
}

void NoteAsked(int64_t Usage::*what) {
  const std::lock_guard lock(All().mutex);
  ++(All().usage.*what);
}

void NoteComputed(int64_t queries, double ms) {
  const std::lock_guard lock(All().mutex);
  ++(queries > SPARGE_FEW_QUERIES ? All().usage.prompts : All().usage.steps);
  All().usage.ms += ms;
}

void NoteTiles(const Totals& totals) {
  const std::lock_guard lock(All().mutex);
  All().usage.eligible += totals.runs.tiles.qk_eligible;
  All().usage.computed += totals.runs.tiles.qk_computed;
}

}  // namespace sparge::ggml
