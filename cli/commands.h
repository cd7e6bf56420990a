// commands.h - the verbs: each adds its subcommand to the program and returns what to call if it was chosen.
#ifndef SPARGE_CLI_COMMANDS_H_
#define SPARGE_CLI_COMMANDS_H_

#include <functional>

namespace CLI {
class App;
}  // namespace CLI

namespace sparge::cli {

struct Command {
  CLI::App* app;              // owned by the program
  std::function<int()> call;  // returns the exit code; throws on bad usage or bad input
};

Command AddRun(CLI::App& program);
Command AddMap(CLI::App& program);
Command AddCheck(CLI::App& program);
Command AddReport(CLI::App& program);
Command AddInfo(CLI::App& program);
Command AddDemo(CLI::App& program);
Command AddBench(CLI::App& program);
Command AddTune(CLI::App& program);
Command AddLlama(CLI::App& program);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_COMMANDS_H_
