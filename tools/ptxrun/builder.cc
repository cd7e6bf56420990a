// Modifiers and operands of a statement.
#include <algorithm>
#include <bit>
#include <cstdlib>

#include "tools/ptxrun/decoder.h"
#include "tools/ptxrun/fault.h"

namespace ptxrun {
namespace {

const std::map<std::string_view, Type> kTypes = {
    {"b8", Type::kU8},       {"u8", Type::kU8},         {"s8", Type::kS8},         {"b16", Type::kU16},
    {"u16", Type::kU16},     {"s16", Type::kS16},       {"b32", Type::kU32},       {"u32", Type::kU32},
    {"s32", Type::kS32},     {"b64", Type::kU64},       {"u64", Type::kU64},       {"s64", Type::kS64},
    {"f16", Type::kF16},     {"bf16", Type::kBf16},     {"f32", Type::kF32},       {"f64", Type::kF64},
    {"f16x2", Type::kF16x2}, {"bf16x2", Type::kBf16x2}, {"e4m3x2", Type::kE4m3x2}, {"e5m2x2", Type::kE5m2x2},
    {"e4m3", Type::kE4m3},   {"e5m2", Type::kE5m2},     {"pred", Type::kPred}};

const std::map<std::string_view, Special> kSpecials = {{"%tid.x", Special::kTidX},
                                                       {"%tid.y", Special::kTidY},
                                                       {"%tid.z", Special::kTidZ},
                                                       {"%ntid.x", Special::kNtidX},
                                                       {"%ntid.y", Special::kNtidY},
                                                       {"%ntid.z", Special::kNtidZ},
                                                       {"%ctaid.x", Special::kCtaidX},
                                                       {"%ctaid.y", Special::kCtaidY},
                                                       {"%ctaid.z", Special::kCtaidZ},
                                                       {"%nctaid.x", Special::kNctaidX},
                                                       {"%nctaid.y", Special::kNctaidY},
                                                       {"%nctaid.z", Special::kNctaidZ},
                                                       {"%laneid", Special::kLane},
                                                       {"%warpid", Special::kWarp},
                                                       {"%lanemask_eq", Special::kMaskEq},
                                                       {"%lanemask_lt", Special::kMaskLt},
                                                       {"%lanemask_le", Special::kMaskLe},
                                                       {"%lanemask_gt", Special::kMaskGt},
                                                       {"%lanemask_ge", Special::kMaskGe},
                                                       {"%dynamic_smem_size", Special::kDynamicBytes},
                                                       {"%total_smem_size", Special::kTotalBytes},
                                                       {"%smid", Special::kZero}};

std::string Trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\n");
  if (begin == std::string_view::npos) return {};
  return std::string(text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1));
}

// The bits of a number as PTX writes it.
bool ParseNumber(const std::string& token, Type type, uint64_t* value) {
  const char* text = token.c_str();
  char* end = nullptr;
  const auto is_done = [&] { return *end == '\0' || (*end == 'U' && end[1] == '\0'); };
  if (token.size() == 10 && token[0] == '0' && (token[1] == 'f' || token[1] == 'F')) {
    *value = std::strtoull(text + 2, &end, 16);
    if (type == Type::kF64)
      *value = std::bit_cast<uint64_t>(static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(*value))));
    return *end == '\0';
  }
  if (token.size() == 18 && token[0] == '0' && (token[1] == 'd' || token[1] == 'D')) {
    *value = std::strtoull(text + 2, &end, 16);
    if (type == Type::kF32) *value = std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(*value)));
    return *end == '\0';
  }
  if (token.empty() || (token[0] != '-' && (token[0] < '0' || token[0] > '9'))) return false;
  if (token.find('.') != std::string::npos) {
    const double number = std::strtod(text, &end);
    if (type == Type::kF32) *value = std::bit_cast<uint32_t>(static_cast<float>(number));
    if (type == Type::kF64) *value = std::bit_cast<uint64_t>(number);
    return *end == '\0' && (type == Type::kF32 || type == Type::kF64);
  }
  *value = token[0] == '-' ? static_cast<uint64_t>(std::strtoll(text, &end, 0)) : std::strtoull(text, &end, 0);
  return is_done();
}

}  // namespace

int BitsOf(Type type) {
  switch (type) {
    case Type::kPred:
      return 1;
    case Type::kU8:
    case Type::kS8:
    case Type::kE4m3:
    case Type::kE5m2:
      return 8;
    case Type::kU16:
    case Type::kS16:
    case Type::kF16:
    case Type::kBf16:
    case Type::kE4m3x2:
    case Type::kE5m2x2:
      return 16;
    case Type::kU64:
    case Type::kS64:
    case Type::kF64:
      return 64;
    default:
      return 32;
  }
}

Builder::Builder(Decoder& decoder, const Statement& statement) : decoder_(decoder), statement_(statement) {
  instr.line = statement.line;
  instr.op.fill(kNone);
  size_t at = statement.name.find('.');
  base_ = statement.name.substr(0, at);
  while (at != std::string::npos) {
    const size_t next = statement.name.find('.', at + 1);
    modifiers_.push_back(statement.name.substr(at + 1, next == std::string::npos ? next : next - at - 1));
    at = next;
  }
  if (!statement.guard.empty()) {
    bool negated = false;
    instr.guard = PredicateIn(statement.guard, &negated);
    instr.guard_not = statement.guard_not;
  }
}

void Builder::Fail(const std::string& what) const {
  std::string text = statement_.name;
  for (size_t i = 0; i < statement_.operands.size(); ++i) text += (i == 0 ? " " : ", ") + statement_.operands[i];
  throw SyntaxError(statement_.line, what + ": " + text);
}

bool Builder::Take(std::string_view modifier) {
  const auto found = std::find(modifiers_.begin(), modifiers_.end(), modifier);
  if (found == modifiers_.end()) return false;
  modifiers_.erase(found);
  return true;
}

std::string Builder::TakeOneOf(std::initializer_list<std::string_view> modifiers) {
  for (const std::string_view modifier : modifiers) {
    if (Take(modifier)) return std::string(modifier);
  }
  return {};
}

std::string Builder::Kind() const {
  const auto found =
      std::find_if(modifiers_.begin(), modifiers_.end(), [](const std::string& m) { return kTypes.contains(m); });
  if (found == modifiers_.end()) return {};
  switch (kTypes.find(*found)->second) {
    case Type::kF32:
    case Type::kF64:
      return "/f";
    case Type::kF16:
    case Type::kBf16:
    case Type::kF16x2:
    case Type::kBf16x2:
      return "/h";
    default:
      return "/i";
  }
}

Type Builder::TakeType() {
  for (auto modifier = modifiers_.begin(); modifier != modifiers_.end(); ++modifier) {
    const auto found = kTypes.find(*modifier);
    if (found == kTypes.end()) continue;
    modifiers_.erase(modifier);
    return found->second;
  }
  Fail("no type");
}

void Builder::NeedAllTaken() const {
  if (!modifiers_.empty()) Fail("unknown modifier ." + modifiers_[0]);
}

const std::string& Builder::operand(size_t n) const {
  if (n >= statement_.operands.size()) Fail("too few operands");
  return statement_.operands[n];
}

std::vector<std::string> Builder::Parts(size_t n) const {
  const std::string& text = operand(n);
  if (text.empty() || text.front() != '{') return {text};
  std::vector<std::string> parts;
  std::string_view rest = std::string_view(text).substr(1, text.size() - 2);
  while (true) {
    const size_t comma = rest.find(',');
    parts.push_back(Trimmed(rest.substr(0, comma)));
    if (comma == std::string_view::npos) return parts;
    rest = rest.substr(comma + 1);
  }
}

std::string Builder::Split(size_t n, std::string* second) const {
  const std::string& text = operand(n);
  const size_t bar = text.find('|');
  *second = bar == std::string::npos ? std::string() : Trimmed(std::string_view(text).substr(bar + 1));
  return Trimmed(std::string_view(text).substr(0, bar));
}

int Builder::RegisterBits(const std::string& token) const {
  const Decoder::Register* found = decoder_.Find(token);
  return found == nullptr ? 0 : found->bits;
}

uint32_t Builder::In(const std::string& token, Type type) {
  const bool is_wide = BitsOf(type) == 64;
  if (const Decoder::Register* found = decoder_.Find(token)) {
    if (found->bits == 1 || (is_wide && found->bits != 64) || (type == Type::kF32 && found->bits != 32))
      Fail("size of " + token);
    return !is_wide && found->bits == 64 ? decoder_.Narrowed(found->index, statement_) : found->index;
  }
  if (const auto special = kSpecials.find(token); special != kSpecials.end()) {
    if (is_wide) Fail("size of " + token);
    return decoder_.SpecialRow(special->second);
  }
  if (token == "WARP_SZ") return decoder_.ConstantRow(32, is_wide);
  uint64_t value = 0;
  if (ParseNumber(token, type, &value)) return decoder_.ConstantRow(value, is_wide);
  const size_t plus = token.find('+');
  if (const Place* place = FindVariable(Trimmed(std::string_view(token).substr(0, plus)))) {
    if (plus != std::string::npos) value = static_cast<uint64_t>(std::atoll(token.c_str() + plus + 1));
    return decoder_.ConstantRow(place->address + value, is_wide);
  }
  Fail("unknown operand " + token);
}

uint32_t Builder::Out(const std::string& token, Type type) {
  const int bits = BitsOf(type) == 64 ? 64 : 32;
  if (token == "_") return decoder_.NewRow(bits);
  const Decoder::Register* found = decoder_.Find(token);
  if (found == nullptr) Fail("unknown register " + token);
  if (found->bits != bits) Fail("size of " + token);
  return found->index;
}

uint32_t Builder::PredicateIn(const std::string& token, bool* negated) {
  *negated = !token.empty() && token[0] == '!';
  const Decoder::Register* found = decoder_.Find(*negated ? token.substr(1) : token);
  if (found == nullptr || found->bits != 1) Fail("not a predicate: " + token);
  return found->index;
}

uint32_t Builder::PredicateOut(const std::string& token) {
  if (token == "_") return decoder_.program_.predicates++;
  bool negated = false;
  return PredicateIn(token, &negated);
}

Builder::Address Builder::AddressOf(size_t n) {
  const std::string& text = operand(n);
  if (text.size() < 2 || text.front() != '[') Fail("not an address: " + text);
  const std::string inner = Trimmed(std::string_view(text).substr(1, text.size() - 2));
  const size_t plus = inner.find('+');
  const std::string base = Trimmed(std::string_view(inner).substr(0, plus));
  Address address;
  if (plus != std::string::npos) {
    uint64_t offset = 0;
    if (!ParseNumber(Trimmed(std::string_view(inner).substr(plus + 1)), Type::kS64, &offset))
      Fail("not an offset: " + inner);
    address.offset = static_cast<int64_t>(offset);
  }
  const int bits = RegisterBits(base);
  address.is_wide = bits != 32;
  address.row = In(base, address.is_wide ? Type::kU64 : Type::kU32);
  if (bits == 0) {
    if (const Place* place = FindVariable(base)) {
      address.is_variable = true;
      address.space = place->space;
    }
  }
  return address;
}

bool Builder::IsImmediate(size_t n) const {
  uint64_t value = 0;
  return n < count() && ParseNumber(operand(n), Type::kS64, &value);
}

int64_t Builder::Immediate(size_t n) {
  uint64_t value = 0;
  if (!ParseNumber(operand(n), Type::kS64, &value)) Fail("not a constant: " + operand(n));
  return static_cast<int64_t>(value);
}

void Builder::BranchTo(const std::string& label) { decoder_.AddJump(label, false, statement_.line); }
void Builder::BranchByTable(const std::string& label) { decoder_.AddJump(label, true, statement_.line); }

const Place* Builder::FindVariable(const std::string& name) const {
  const auto found = decoder_.variables_.find(name);
  return found == decoder_.variables_.end() ? nullptr : &found->second;
}

void Builder::Finish(Handler handler) {
  if (handler == nullptr) Fail("not modelled for this type");
  instr.run = handler;
}

Program& Builder::program() { return decoder_.program_; }

}  // namespace ptxrun
