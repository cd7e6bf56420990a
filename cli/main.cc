// main.cc - the program `sparge`: picks the verb, and turns every failure into one line on stderr and exit code 2.
#include <sparge/sparge.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <iterator>
#include <new>
#include <string>

#include "cli/commands.h"
#include "io/tensor.h"

namespace sparge::cli {
namespace {

int Fail(const std::string& verb, std::string what) {
  // One line, whatever file names and arguments hold.
  std::replace_if(
      what.begin(), what.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  std::fprintf(stderr, "sparge%s%s: %s\n", verb.empty() ? "" : " ", verb.c_str(), what.c_str());
  return 2;
}

constexpr char kExamples[] =
    "Examples:\n"
    "  sparge demo                                          dense and sparse attention on recorded heads\n"
    "  sparge run --tensors x.safetensors --out o.npy       an attention call on files, error within 0.03 per head\n"
    "  sparge check data                                    its errors and what it skips, against double precision\n"
    "  sparge report data -o report.html                    maps, tiles and errors as one page\n"
    "  sparge tune --target-l2 0.1 captures -o preset.json  the fastest settings of a model's heads within an error\n"
    "  sparge llama -- llama-cli -m model.gguf -fa on       a program of llama.cpp with this attention\n"
    "\n"
    "`sparge VERB --help` has the flags of a verb, and more examples.";

int Main(int argc, char** argv) {
  CLI::App program("SpargeAttention on files: block-sparse, quantised attention", "sparge");
  program.footer(kExamples);
  program.set_version_flag("--version", sparge_version());
  program.require_subcommand(1);
  const Command commands[] = {AddRun(program),  AddMap(program),    AddCheck(program),
                              AddTune(program), AddReport(program), AddInfo(program),
                              AddDemo(program), AddBench(program),  AddLlama(program)};
  const std::string first = argc > 1 ? argv[1] : "";
  const auto chosen = std::find_if(std::begin(commands), std::end(commands),
                                   [&first](const Command& command) { return command.app->get_name() == first; });
  const std::string verb = chosen != std::end(commands) ? first : "";
  if (verb.empty() && !first.starts_with('-')) {
    return Fail("", first.empty()
                        ? "no verb given: run, map, check, tune, report, info, demo, bench or llama (see --help)"
                        : "unknown verb " + io::Quoted(first) +
                              ": run, map, check, tune, report, info, demo, bench or llama (see --help)");
  }
  try {
    program.parse(argc, argv);
    if (chosen == std::end(commands)) throw CLI::RequiredError("A verb as the first argument");
    return chosen->call();
  } catch (const CLI::Success& help) {
    return program.exit(help);
  } catch (const CLI::ParseError& error) {
    return Fail(verb, std::string(error.what()) + " (see --help)");
  } catch (const std::bad_alloc&) {
    return Fail(verb, "not enough memory for these tensors");
  } catch (const std::exception& error) {
    return Fail(verb, error.what());
  }
}

}  // namespace
}  // namespace sparge::cli

int main(int argc, char** argv) { return sparge::cli::Main(argc, argv); }
