// usage.h - two lines for the user: that the backend is there, and at the end what it did, or why it did nothing.
#ifndef SPARGE_GGML_USAGE_H_
#define SPARGE_GGML_USAGE_H_

#include <cstdint>
#include <string>

#include "ggml/layers.h"
#include "ggml/settings.h"

namespace sparge::ggml {

// What was asked for and done, over all contexts of the program.
struct Usage {
  int64_t taken = 0, few = 0, impossible = 0;  // asked for, maybe several times for one operation
  int64_t prompts = 0, steps = 0;              // operations that were computed: of many queries, of few
  double ms = 0;
  int64_t eligible = 0, computed = 0;  // tiles, of contexts that were freed
};
// The line at the end.
std::string Describe(const Usage& usage);
// "relative L2 error 0.03 per head", or what else there is in force.
std::string Describe(const Settings& settings);

// Says that the backend is loaded, and sees to it that the other line comes when the program ends.
void SayLoaded(const Settings& settings, const char* ggml_version, const char* isa);

// From any thread.
void NoteAsked(int64_t Usage::*what);  // taken, few or impossible
void NoteComputed(int64_t queries, double ms);
void NoteTiles(const Totals& totals);

}  // namespace sparge::ggml
#endif  // SPARGE_GGML_USAGE_H_
