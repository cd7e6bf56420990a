// cmd_llama.cc - `sparge llama`: where the backend for llama.cpp is, and how a program takes it; or runs one with it.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "io/tensor.h"

namespace sparge::cli {
namespace {

constexpr char kBackend[] = "libggml-sparge.so";
// A llama.cpp with the CPU linked in loads backends only if an option needs them. This one overrides nothing.
constexpr char kNeedsBackends[] = "LLAMA_ARG_OVERRIDE_TENSOR";
constexpr char kOverridesNothing[] = "^$=CPU";

struct LlamaOptions {
  std::string backend;
  std::vector<std::string> command;
};

// Beside this program: in its build folder, or where both are installed.
std::string FindBackend() {
  std::error_code error;
  std::string tried;
  for (const char* folder :
       {"../ggml", ".", "../lib", "../lib64", "../lib/x86_64-linux-gnu", "../lib/aarch64-linux-gnu"}) {
    const std::filesystem::path file = (ProgramFolder() / folder / kBackend).lexically_normal();
    if (std::filesystem::exists(file, error)) return file.string();
    tried += (tried.empty() ? "" : ", ") + file.parent_path().string();
  }
  throw UsageError(std::string(kBackend) + " is in none of " + tried +
                   ": build it with -DSPARGE_GGML=ON, or name it with --backend");
}

std::string BackendOf(const LlamaOptions& options) {
  if (options.backend.empty()) return FindBackend();
  std::error_code error;
  const std::filesystem::path file = std::filesystem::absolute(options.backend, error);
  if (!std::filesystem::is_regular_file(file, error))
    throw UsageError("--backend " + io::Quoted(options.backend) + ": no such file");
  return file.string();
}

// The command overrides tensors itself, or the caller does: then backends are loaded anyway.
bool OverridesTensors(const std::vector<std::string>& command) {
  const auto is = [](const std::string& argument) {
    return argument == "-ot" || argument.starts_with("--override-tensor");
  };
  return std::getenv(kNeedsBackends) != nullptr || std::any_of(command.begin(), command.end(), is);
}

int Run(const std::string& backend, const std::vector<std::string>& command) {
  setenv("GGML_BACKEND_PATH", backend.c_str(), 1);
  if (!OverridesTensors(command)) setenv(kNeedsBackends, kOverridesNothing, 1);
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  execvp(arguments[0], arguments.data());
  throw UsageError("cannot run " + io::Quoted(command[0]) + ": " + std::strerror(errno));
}

int Llama(const LlamaOptions& options) {
  const std::string backend = BackendOf(options);
  if (!options.command.empty()) return Run(backend, options.command);
  PrintOut("backend  " + backend + "\n" +
           "run      sparge llama -- llama-cli -m model.gguf -fa on\n"
           "or       GGML_BACKEND_PATH=" +
           backend + " " + kNeedsBackends + "='" + kOverridesNothing +
           "' llama-cli -m model.gguf -fa on\n"
           "It works if the program says 'sparge " +
           sparge_version() + ": attention for ggml ...' on stderr, and what came of it at its end.\n");
  return 0;
}

constexpr char kFooter[] =
    "sparge llama                                     says where the backend is, and the line to run\n"
    "sparge llama -- llama-cli -m model.gguf -fa on   runs it, with the backend\n"
    "\n"
    "Everything after -- is the command. docs/ggml.md has what the backend reads from the environment "
    "(SPARGE_TARGET_L2,\n"
    "SPARGE_STATS and others), and what llama-cpp-python and whisper.cpp need.";

}  // namespace

Command AddLlama(CLI::App& program) {
  CLI::App* app = AddVerb(program, "llama", "llama.cpp with sparge's attention", kFooter);
  const auto options = std::make_shared<LlamaOptions>();
  app->add_option("--backend", options->backend, "the backend's file; default: found beside this program")
      ->type_name("FILE");
  app->add_option("command", options->command, "after --: the program to run, and its arguments")->type_name("");
  return {app, [options] { return Llama(*options); }};
}

}  // namespace sparge::cli
