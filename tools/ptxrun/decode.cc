#include "tools/ptxrun/decode.h"

#include <algorithm>
#include <cstdlib>

#include "tools/ptxrun/decoder.h"
#include "tools/ptxrun/fault.h"
#include "tools/ptxrun/warp.h"

namespace ptxrun {
namespace {

const Opcodes& AllOpcodes() {
  static const Opcodes kOpcodes = [] {
    Opcodes opcodes;
    AddIntegerOpcodes(opcodes);
    AddBitOpcodes(opcodes);
    AddFloatOpcodes(opcodes);
    AddHalfOpcodes(opcodes);
    AddConvertOpcodes(opcodes);
    AddPredicateOpcodes(opcodes);
    AddMoveOpcodes(opcodes);
    AddMemoryOpcodes(opcodes);
    AddAtomicOpcodes(opcodes);
    AddCopyOpcodes(opcodes);
    AddWarpOpcodes(opcodes);
    AddMatrixOpcodes(opcodes);
    AddControlOpcodes(opcodes);
    return opcodes;
  }();
  return kOpcodes;
}

void LowerHalf(Warp& warp, const Instr& instr, uint32_t lanes) {
  uint32_t* d = warp.Row<uint32_t>(instr.op[0]);
  const uint64_t* a = warp.Row<uint64_t>(instr.op[1]);
  ForLanes(lanes, [&](uint32_t lane) { d[lane] = static_cast<uint32_t>(a[lane]); });
}

uint64_t AlignUp(uint64_t value, uint64_t align) { return (value + align - 1) / align * align; }

}  // namespace

Decoder::Decoder(const Syntax& syntax, const Entry& entry, const std::map<std::string, Place>& globals)
    : entry_(entry), variables_(globals) {
  program_.name = entry.name;
  program_.target = syntax.target;
  program_.specials.fill(kNone);
  LayParams();
  LayShared(syntax);
  LayLocal();
}

std::shared_ptr<const Program> Decoder::Run() {
  scopes_.emplace_back();
  for (const Statement& statement : entry_.body) {
    switch (statement.kind) {
      case Statement::Kind::kOpen:
        OpenScope();
        break;
      case Statement::Kind::kClose:
        scopes_.pop_back();
        break;
      case Statement::Kind::kRegisters:
        Declare(statement);
        break;
      case Statement::Kind::kLabel:
        labels_[{scopes_.back().id, statement.name}] = static_cast<int64_t>(program_.code.size());
        last_label_ = statement.name;
        break;
      case Statement::Kind::kTargets:
        targets_[last_label_] = &statement;
        break;
      case Statement::Kind::kInstruction:
        Add(statement);
        break;
    }
  }
  // Running off the end is leaving.
  const Statement end{
      .line = entry_.body.empty() ? entry_.line : entry_.body.back().line, .guard = {}, .name = "ret", .operands = {}};
  Add(end);
  ResolveLabels();
  return std::make_shared<const Program>(std::move(program_));
}

void Decoder::OpenScope() {
  scopes_.emplace_back();
  scopes_.back().id = ++scope_count_;
}

void Decoder::LayParams() {
  for (const Variable& param : entry_.params) {
    program_.param_bytes = static_cast<uint32_t>(AlignUp(program_.param_bytes, static_cast<uint64_t>(param.align)));
    program_.params.push_back(param);
    program_.param_offsets.push_back(program_.param_bytes);
    variables_[param.name] = {.space = Space::kParam, .address = program_.param_bytes, .bytes = param.bytes};
    program_.param_bytes += static_cast<uint32_t>(param.bytes);
  }
}

void Decoder::LayShared(const Syntax& syntax) {
  std::vector<const Variable*> all;
  for (const Variable& variable : entry_.variables) all.push_back(&variable);
  for (const Variable& variable : syntax.variables) {
    const auto names_it = [&](const Statement& statement) {
      return std::any_of(statement.operands.begin(), statement.operands.end(),
                         [&](const std::string& operand) { return operand.find(variable.name) != std::string::npos; });
    };
    if (std::any_of(entry_.body.begin(), entry_.body.end(), names_it)) all.push_back(&variable);
  }
  uint64_t bytes = 0;
  for (const bool sized : {true, false}) {
    for (const Variable* variable : all) {
      if (variable->space != Space::kShared || (variable->bytes != 0) != sized) continue;
      uint64_t place = AlignUp(bytes, static_cast<uint64_t>(variable->align));
      if (!sized) place = bytes = AlignUp(bytes, std::max<uint64_t>(16, static_cast<uint64_t>(variable->align)));
      variables_[variable->name] = {.space = Space::kShared, .address = place, .bytes = variable->bytes};
      if (sized) bytes = place + static_cast<uint64_t>(variable->bytes);
    }
  }
  program_.static_shared = static_cast<uint32_t>(bytes);
}

void Decoder::LayLocal() {
  for (const Variable& variable : entry_.variables) {
    if (variable.space != Space::kLocal) continue;
    const uint64_t place = AlignUp(program_.local_bytes, static_cast<uint64_t>(variable.align));
    variables_[variable.name] = {.space = Space::kLocal, .address = place, .bytes = variable.bytes};
    program_.local_bytes = static_cast<uint32_t>(place + static_cast<uint64_t>(variable.bytes));
  }
  program_.local_bytes = static_cast<uint32_t>(AlignUp(program_.local_bytes, 16));
}

void Decoder::Declare(const Statement& statement) {
  int bits = statement.name == "pred" ? 1 : TypeBits(statement.name);
  if (bits == 0 || bits > 64) throw SyntaxError(statement.line, "unknown type of registers: " + statement.name);
  if (bits > 1 && bits < 32) bits = 32;
  for (const std::string& name : statement.operands) {
    if (const size_t bracket = name.find('<'); bracket != std::string::npos) {
      scopes_.back().families[name.substr(0, bracket)] = {bits, std::atoll(name.c_str() + bracket + 1)};
    } else {
      scopes_.back().names[name] = bits;
    }
  }
}

const Decoder::Register* Decoder::Find(const std::string& name) {
  const size_t digits = name.find_last_not_of("0123456789") + 1;
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    if (const auto found = scope->found.find(name); found != scope->found.end()) return &found->second;
    int bits = 0;
    if (const auto single = scope->names.find(name); single != scope->names.end()) {
      bits = single->second;
    } else if (digits < name.size()) {
      const auto family = scope->families.find(name.substr(0, digits));
      if (family != scope->families.end() && std::atoll(name.c_str() + digits) < family->second.second)
        bits = family->second.first;
    }
    if (bits == 0) continue;
    const uint32_t index = bits == 1 ? program_.predicates++ : NewRow(bits);
    return &scope->found.emplace(name, Register{bits, index}).first->second;
  }
  return nullptr;
}

uint32_t Decoder::ConstantRow(uint64_t value, bool is_wide) {
  if (!is_wide) value &= 0xFFFFFFFF;
  const auto [at, is_new] = constants_.try_emplace({is_wide, value}, 0);
  if (is_new) {
    at->second = NewRow(is_wide ? 64 : 32);
    program_.constants.push_back({.row = at->second, .is_wide = is_wide, .value = value});
  }
  return at->second;
}

uint32_t Decoder::Narrowed(uint32_t wide, const Statement& statement) {
  Instr instr;
  instr.run = &LowerHalf;
  instr.op.fill(kNone);
  instr.op[0] = NewRow(32);
  instr.op[1] = wide;
  instr.line = statement.line;
  instr.text = TextOf(statement.name);
  program_.code.push_back(instr);
  return instr.op[0];
}

uint32_t Decoder::TextOf(const std::string& name) {
  const auto [text, is_new] = texts_.try_emplace(name, static_cast<uint32_t>(program_.texts.size()));
  if (is_new) program_.texts.push_back(name);
  return text->second;
}

uint32_t Decoder::SpecialRow(Special special) {
  uint32_t& row = program_.specials[static_cast<size_t>(special)];
  if (row == kNone) row = NewRow(32);
  return row;
}

void Decoder::Add(const Statement& statement) {
  Builder builder(*this, statement);
  auto found = AllOpcodes().find(builder.base());
  if (found == AllOpcodes().end()) found = AllOpcodes().find(builder.base() + builder.Kind());
  if (found == AllOpcodes().end()) builder.Fail("unknown opcode");
  found->second(builder);
  builder.NeedAllTaken();
  if (builder.instr.run == nullptr && builder.instr.flow == Flow::kPlain) builder.Fail("not modelled for this type");
  builder.instr.text = TextOf(statement.name);
  program_.code.push_back(builder.instr);
}

int64_t Decoder::LabelOf(const std::string& label, const Jump& jump) const {
  for (const int scope : jump.scopes) {
    if (const auto found = labels_.find({scope, label}); found != labels_.end()) return found->second;
  }
  throw SyntaxError(jump.line, "no such label: " + label);
}

void Decoder::ResolveLabels() {
  for (const Jump& jump : jumps_) {
    if (!jump.by_table) {
      program_.code[jump.at].imm[0] = LabelOf(jump.label, jump);
      continue;
    }
    const auto found = targets_.find(jump.label);
    if (found == targets_.end()) throw SyntaxError(jump.line, "no such .branchtargets: " + jump.label);
    std::vector<uint32_t> table;
    for (const std::string& label : found->second->operands)
      table.push_back(static_cast<uint32_t>(LabelOf(label, jump)));
    program_.code[jump.at].imm[0] = static_cast<int64_t>(program_.tables.size());
    program_.tables.push_back(std::move(table));
  }
}

void Decoder::AddJump(const std::string& label, bool by_table, int line) {
  Jump jump{.at = program_.code.size(), .label = label, .scopes = {}, .by_table = by_table, .line = line};
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) jump.scopes.push_back(scope->id);
  jumps_.push_back(std::move(jump));
}

std::shared_ptr<const Program> Decode(const Syntax& syntax, const Entry& entry,
                                      const std::map<std::string, Place>& globals) {
  return Decoder(syntax, entry, globals).Run();
}

}  // namespace ptxrun
