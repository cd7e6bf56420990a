// Names, rows and labels of one kernel while it is made ready: what builders of opcodes share.
#ifndef SPARGE_TOOLS_PTXRUN_DECODER_H_
#define SPARGE_TOOLS_PTXRUN_DECODER_H_

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tools/ptxrun/decode.h"

namespace ptxrun {

class Decoder {
 public:
  Decoder(const Syntax& syntax, const Entry& entry, const std::map<std::string, Place>& globals);
  std::shared_ptr<const Program> Run();

 private:
  friend class Builder;

  struct Register {
    int bits = 0;  // 1, 32 or 64
    uint32_t index = 0;
  };
  struct Scope {
    int id = 0;
    std::map<std::string, int> names;                         // to bits
    std::map<std::string, std::pair<int, int64_t>> families;  // %r<10>: prefix to bits and count
    std::map<std::string, Register> found;
  };
  struct Jump {
    size_t at = 0;  // instruction
    std::string label;
    std::vector<int> scopes;  // innermost first
    bool by_table = false;
    int line = 0;
  };

  void OpenScope();
  void LayParams();
  // Those of the body, and those of the module that the body names; what the launch sizes comes last.
  void LayShared(const Syntax& syntax);
  void LayLocal();
  void Declare(const Statement& statement);
  uint32_t NewRow(int bits) { return std::exchange(program_.rows, program_.rows + (bits == 64 ? 2 : 1)); }

  // nullptr: no such register. Registers that no instruction names get no row.
  const Register* Find(const std::string& name);
  uint32_t ConstantRow(uint64_t value, bool is_wide);
  // The lower half of a wide row is no row: an instruction of its own makes one of it. Without a guard, because nothing
  // else reads what it writes.
  uint32_t Narrowed(uint32_t wide, const Statement& statement);
  uint32_t TextOf(const std::string& name);
  uint32_t SpecialRow(Special special);
  void Add(const Statement& statement);
  int64_t LabelOf(const std::string& label, const Jump& jump) const;
  void ResolveLabels();
  void AddJump(const std::string& label, bool by_table, int line);

  const Entry& entry_;
  Program program_;
  std::map<std::string, Place> variables_;
  std::vector<Scope> scopes_;
  int scope_count_ = 0;
  std::map<std::pair<bool, uint64_t>, uint32_t> constants_;
  std::map<std::string, uint32_t> texts_;
  std::map<std::pair<int, std::string>, int64_t> labels_;
  std::map<std::string, const Statement*> targets_;
  std::string last_label_;
  std::vector<Jump> jumps_;
};

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_DECODER_H_
