// Statements to instructions. Each opcode has a builder, which takes every modifier and operand: what it does not take,
// it does not know, and that is an error.
#ifndef SPARGE_TOOLS_PTXRUN_DECODE_H_
#define SPARGE_TOOLS_PTXRUN_DECODE_H_

#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tools/ptxrun/program.h"
#include "tools/ptxrun/syntax.h"

namespace ptxrun {

enum class Type : uint8_t {
  kNone,
  kU8,
  kU16,
  kU32,
  kU64,
  kS8,
  kS16,
  kS32,
  kS64,
  kF16,
  kBf16,
  kF32,
  kF64,
  kF16x2,
  kBf16x2,
  kE4m3,
  kE5m2,
  kE4m3x2,
  kE5m2x2,
  kPred
};

int BitsOf(Type type);

class Decoder;

class Builder {
 public:
  Builder(Decoder& decoder, const Statement& statement);

  // Modifiers. Take: whether it was there. TakeType: the next one that is a type; b32 counts as u32.
  const std::string& base() const { return base_; }
  bool Take(std::string_view modifier);
  std::string TakeOneOf(std::initializer_list<std::string_view> modifiers);
  Type TakeType();
  // "/i", "/f", "/h": whether the first type is one of integers, floats or halves. Opcodes whose builders differ by
  // that are listed so: add/i.
  std::string Kind() const;
  void NeedAllTaken() const;

  size_t count() const { return statement_.operands.size(); }
  const std::string& operand(size_t n) const;
  // `{a, b}` in parts; others are the only part.
  std::vector<std::string> Parts(size_t n) const;
  // `d|p`: the part behind the bar goes to `second`, empty without one.
  std::string Split(size_t n, std::string* second) const;

  // Rows. The size of a register must be that of the type, but In accepts a wider one for integers, as PTX does for
  // stores and conversions: of these the lower bits count.
  uint32_t In(const std::string& token, Type type);
  uint32_t In(size_t n, Type type) { return In(operand(n), type); }
  uint32_t Out(const std::string& token, Type type);
  uint32_t Out(size_t n, Type type) { return Out(operand(n), type); }
  // Bits of the register `token`: 1, 32 or 64; 0: none.
  int RegisterBits(const std::string& token) const;
  // Predicates. `negated`: the operand is written !p.
  uint32_t PredicateIn(const std::string& token, bool* negated);
  uint32_t PredicateOut(const std::string& token);
  // [base + offset]: row of the base, whether it is 64 bits wide, the offset, and the space if the base is a variable.
  struct Address {
    uint32_t row = 0;
    bool is_wide = false;
    int64_t offset = 0;
    bool is_variable = false;
    Space space = Space::kGlobal;
  };
  Address AddressOf(size_t n);
  int64_t Immediate(size_t n);
  bool IsImmediate(size_t n) const;
  void BranchTo(const std::string& label);
  void BranchByTable(const std::string& label);
  const Place* FindVariable(const std::string& name) const;

  [[noreturn]] void Fail(const std::string& what) const;
  // `handler` must not be nullptr: that is how the pickers below say that there is none for a type.
  void Finish(Handler handler);
  Program& program();

  Instr instr;

 private:
  Decoder& decoder_;
  const Statement& statement_;
  std::string base_;
  std::vector<std::string> modifiers_;
};

using BuildFunction = void (*)(Builder& builder);
using Opcodes = std::map<std::string_view, BuildFunction>;

void AddIntegerOpcodes(Opcodes& opcodes);
void AddBitOpcodes(Opcodes& opcodes);
void AddFloatOpcodes(Opcodes& opcodes);
void AddHalfOpcodes(Opcodes& opcodes);
void AddConvertOpcodes(Opcodes& opcodes);
void AddPredicateOpcodes(Opcodes& opcodes);
void AddMoveOpcodes(Opcodes& opcodes);
void AddMemoryOpcodes(Opcodes& opcodes);
void AddAtomicOpcodes(Opcodes& opcodes);
void AddCopyOpcodes(Opcodes& opcodes);
void AddWarpOpcodes(Opcodes& opcodes);
void AddMatrixOpcodes(Opcodes& opcodes);
void AddControlOpcodes(Opcodes& opcodes);

// `globals`: addresses of the module's variables.
std::shared_ptr<const Program> Decode(const Syntax& syntax, const Entry& entry,
                                      const std::map<std::string, Place>& globals);

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_DECODE_H_
