// inputs.cc - reads the files of check and report, twice.
#include "cli/inputs.h"

#include <cstdio>

#include "cli/report.h"

namespace sparge::cli {

void Inputs::LookAtAll(const Look& look) {
  for (const std::string& source : sources_) {
    LoadedCall call = LoadCall(verb_, options_, source);
    chooser_.TakePreset(source, call);
    heads_ += call.desc.batch * call.desc.q_heads;
    notes_ += NotesText(call, source);
    if (look) look(call, source.empty() ? options_.q : source);
  }
}

void Inputs::ForEach(const std::string& doing, const Work& work) const {
  std::fputs(notes_.c_str(), stderr);
  Progress progress(doing, heads_);
  for (const std::string& source : sources_) {
    LoadedCall call = LoadCall(verb_, options_, source);
    chooser_.TakePreset(source, call);
    work(call, source.empty() ? options_.q : source, progress);
  }
}

}  // namespace sparge::cli
