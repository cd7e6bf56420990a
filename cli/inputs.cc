// inputs.cc - reads the files of check and report, twice.
#include "cli/inputs.h"

#include <cstdio>

#include "cli/report.h"

namespace sparge::cli {

void Inputs::LookAtAll(const Look& look) {
  for (const std::string& source : sources_) {
    Problem problem = LoadProblem(verb_, options_, source);
    chooser_.TakePreset(source, problem);
    heads_ += problem.desc.batch * problem.desc.q_heads;
    notes_ += NotesText(problem, source);
    if (look) look(problem, source.empty() ? options_.q : source);
  }
}

void Inputs::ForEach(const std::string& doing, const Work& work) const {
  std::fputs(notes_.c_str(), stderr);
  Progress progress(doing, heads_);
  for (const std::string& source : sources_) {
    Problem problem = LoadProblem(verb_, options_, source);
    chooser_.TakePreset(source, problem);
    work(problem, source.empty() ? options_.q : source, progress);
  }
}

}  // namespace sparge::cli
