// flags.h - flags whose texts we parse ourselves: numbers, choices and comma-separated lists of them. Every refusal
// names the flag and the value.
#ifndef SPARGE_CLI_FLAGS_H_
#define SPARGE_CLI_FLAGS_H_

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

// Declared only: whoever includes CLI11 compiles its validators, 5 s per file.
namespace CLI {
class App;
}  // namespace CLI

namespace sparge::cli {

// Bad usage or bad input, in one line that names the argument and the value. Exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A verb of the program.
CLI::App* AddVerb(CLI::App& program, const std::string& name, const std::string& help, const std::string& footer = "");

// A call with the flag's text. Texts are parsed here and not by CLI11, which takes "" for "not given".
void AddText(CLI::App& app, const std::string& flag, const std::string& kind, const std::string& help,
             const std::string& group, const std::function<void(const std::string&)>& take);

double ParseNumber(const std::string& flag, const std::string& text);                           // finite
double ParseNumber(const std::string& flag, const std::string& text, double low, double high);  // both included
int64_t ParseInteger(const std::string& flag, const std::string& text, int64_t low, int64_t high);
// `text` if it is one of `choices`.
std::string ParseChoice(const std::string& flag, const std::string& text, const std::vector<std::string>& choices);
std::string JoinChoices(const std::vector<std::string>& choices);  // "a|b|c"

// "1,2,3" in parts; an empty part stays, for its parser to refuse.
std::vector<std::string> SplitList(const std::string& text);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_FLAGS_H_
