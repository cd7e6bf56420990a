// PTX text to statements. Knows how PTX is written, not what its instructions mean.
#ifndef SPARGE_TOOLS_PTXRUN_SYNTAX_H_
#define SPARGE_TOOLS_PTXRUN_SYNTAX_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace ptxrun {

enum class Space : uint8_t { kGlobal, kConst, kShared, kLocal, kParam };

// A variable in memory, or a parameter.
struct Variable {
  Space space = Space::kGlobal;
  std::string name;
  int64_t bytes = 0;  // 0: `extern .shared`, as large as the launch says
  int64_t align = 1;
  std::vector<uint8_t> initial;  // empty: none
};

struct Statement {
  enum class Kind : uint8_t { kInstruction, kLabel, kOpen, kClose, kRegisters, kTargets };
  Kind kind = Kind::kInstruction;
  int line = 0;
  std::string guard;  // register, without @ and !
  bool guard_not = false;
  std::string name;                   // opcode with modifiers, label, or type of the registers
  std::vector<std::string> operands;  // of an instruction, registers, or labels of .branchtargets
};

struct Entry {
  std::string name;
  int line = 0;
  std::vector<Variable> params;     // in order
  std::vector<Variable> variables;  // of the body: shared and local
  std::vector<Statement> body;
};

struct Syntax {
  int target = 0;  // 80 of sm_80
  std::vector<Variable> variables;
  std::map<std::string, Entry> entries;
};

Syntax ParseText(std::string_view text);

// Bits of a type name without dot: 32 of "f32"; 0 if it is none.
int TypeBits(std::string_view type);

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_SYNTAX_H_
