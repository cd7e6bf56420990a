#include "tools/ptxrun/syntax.h"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tools/ptxrun/fault.h"

namespace ptxrun {
namespace {

bool IsNameChar(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%' || c == '.';
}

std::string_view Trim(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) text.remove_suffix(1);
  return text;
}

// Comments become blanks, so that lines keep their numbers.
std::string WithoutComments(std::string_view text) {
  std::string out(text);
  for (size_t i = 0; i + 1 < out.size(); ++i) {
    if (out[i] == '"') {
      while (++i < out.size() && out[i] != '"') {
      }
    } else if (out[i] == '/' && out[i + 1] == '/') {
      while (i < out.size() && out[i] != '\n') out[i++] = ' ';
    } else if (out[i] == '/' && out[i + 1] == '*') {
      while (i + 1 < out.size() && !(out[i] == '*' && out[i + 1] == '/')) {
        if (out[i] != '\n') out[i] = ' ';
        ++i;
      }
      out[i] = ' ';
      if (i + 1 < out.size()) out[i + 1] = ' ';
    }
  }
  return out;
}

// Commas separate operands, except inside brackets.
std::vector<std::string> SplitOperands(std::string_view text) {
  std::vector<std::string> parts;
  int depth = 0;
  std::string part;
  for (const char c : text) {
    if (c == '[' || c == '{' || c == '(') ++depth;
    if (c == ']' || c == '}' || c == ')') --depth;
    if (c == ',' && depth == 0) {
      parts.emplace_back(Trim(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!Trim(part).empty()) parts.emplace_back(Trim(part));
  return parts;
}

std::vector<std::string> Words(std::string_view text) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : text) {
    if (std::isspace(static_cast<unsigned char>(c)) != 0) {
      if (!word.empty()) words.push_back(std::exchange(word, {}));
    } else {
      word += c;
    }
  }
  if (!word.empty()) words.push_back(word);
  return words;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(WithoutComments(text)) {}

  Syntax Parse() {
    while (SkipBlanks()) {
      const int line = line_;
      const std::string head = TakeUntil(";({\n");
      const std::vector<std::string> words = Words(head);
      if (words.empty()) Fail(line, "unexpected `" + std::string(1, text_[at_]) + "`");
      ParseTopLevel(line, head, words);
    }
    if (syntax_.target == 0) Fail(line_, "no .target");
    return std::move(syntax_);
  }

 private:
  [[noreturn]] static void Fail(int line, const std::string& what) { throw SyntaxError(line, what); }

  void ParseTopLevel(int line, const std::string& head, const std::vector<std::string>& words) {
    const std::string& first = words[0];
    if (first == ".version" || first == ".address_size" || first == ".file") return;
    if (first == ".target") {
      const size_t digits = words.size() > 1 ? words[1].find_first_of("0123456789") : std::string::npos;
      if (digits == std::string::npos) Fail(line, "unknown target: " + head);
      syntax_.target = std::atoi(words[1].c_str() + digits);
      return;
    }
    for (size_t i = 0; i < words.size(); ++i) {
      if (words[i] == ".entry" && i + 1 < words.size()) return ParseEntry(line, words[i + 1]);
      if (words[i] == ".func" || words[i] == ".section") return SkipBody();
      if (words[i] == ".global" || words[i] == ".const" || words[i] == ".shared") {
        syntax_.variables.push_back(ParseVariable(line, head + TakeUntil(";")));
        ++at_;
        return;
      }
    }
    Fail(line, "unknown directive: " + head);
  }

  // Blanks and newlines; false at the end.
  bool SkipBlanks() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) Advance();
    return at_ < text_.size();
  }

  void Advance() { line_ += text_[at_++] == '\n'; }

  std::string TakeUntil(const char* ends) {
    std::string taken;
    while (at_ < text_.size() && std::strchr(ends, text_[at_]) == nullptr) {
      taken += text_[at_];
      Advance();
    }
    return taken;
  }

  // A function or a section: to its closing brace, or to the semicolon of a declaration.
  void SkipBody() {
    int depth = 0;
    for (; at_ < text_.size(); Advance()) {
      if (text_[at_] == '{') ++depth;
      if ((text_[at_] == '}' && --depth == 0) || (text_[at_] == ';' && depth == 0)) {
        Advance();
        return;
      }
    }
  }

  // [linkage] .space [.align N] .type name[count] [= values]
  Variable ParseVariable(int line, std::string_view text) {
    Variable variable;
    std::string_view initial;
    if (const size_t equals = text.find('='); equals != std::string_view::npos) {
      initial = text.substr(equals + 1);
      text = text.substr(0, equals);
    }
    int64_t count = 1;
    if (const size_t bracket = text.find('['); bracket != std::string_view::npos) {
      count = std::atoll(std::string(text.substr(bracket + 1)).c_str());
      text = text.substr(0, bracket);
    }
    int bits = 0;
    int64_t align = 0;
    const std::vector<std::string> words = Words(text);
    for (size_t i = 0; i < words.size(); ++i) {
      if (words[i] == ".shared") variable.space = Space::kShared;
      if (words[i] == ".local") variable.space = Space::kLocal;
      if (words[i] == ".const") variable.space = Space::kConst;
      if (words[i] == ".param") variable.space = Space::kParam;
      if (words[i] == ".align" && i + 1 < words.size()) align = std::atoll(words[i + 1].c_str());
      if (words[i][0] == '.') bits += TypeBits(words[i].substr(1));
    }
    if (words.empty() || bits == 0) Fail(line, "not a variable: " + std::string(text));
    variable.name = words.back();
    variable.bytes = count * bits / 8;
    variable.align = align != 0 ? align : bits / 8;
    if (!initial.empty()) FillInitial(line, initial, bits / 8, variable);
    return variable;
  }

  static void FillInitial(int line, std::string_view text, int width, Variable& variable) {
    text = Trim(text);
    if (!text.empty() && text.front() == '{') text = text.substr(1, text.size() - 2);
    variable.initial.assign(static_cast<size_t>(variable.bytes), 0);
    size_t at = 0;
    for (const std::string& item : SplitOperands(text)) {
      char* end = nullptr;
      const bool is_hex_float = item.size() > 1 && item[0] == '0' && (item[1] == 'f' || item[1] == 'd');
      const uint64_t value =
          is_hex_float ? std::strtoull(item.c_str() + 2, &end, 16) : std::strtoull(item.c_str(), &end, 0);
      if (*end != '\0' && *end != 'U') Fail(line, "initial value is not a number: " + item);
      if (at + static_cast<size_t>(width) > variable.initial.size()) Fail(line, "too many initial values");
      std::memcpy(variable.initial.data() + at, &value, static_cast<size_t>(width));
      at += static_cast<size_t>(width);
    }
  }

  void ParseEntry(int line, const std::string& name) {
    Entry entry;
    entry.name = name;
    entry.line = line;
    if (SkipBlanks() && text_[at_] == '(') {
      ++at_;
      const int first = line_;
      for (const std::string& part : SplitOperands(TakeUntil(")"))) {
        // `.ptr .align 4` tells what a pointer points to, and is no alignment of the parameter.
        const size_t pointer = part.find(".ptr");
        const std::string text =
            pointer == std::string::npos ? part : part.substr(0, pointer) + part.substr(part.find_last_of(" \t"));
        entry.params.push_back(ParseVariable(first, text));
      }
      ++at_;
    }
    TakeUntil("{");  // .maxntid, .minnctapersm, .reqntid: limits that a launch does not change here
    if (at_ == text_.size()) Fail(line, "entry without a body: " + name);
    ++at_;
    ParseBody(entry);
    syntax_.entries.emplace(name, std::move(entry));
  }

  void ParseBody(Entry& entry) {
    for (int depth = 1; depth > 0;) {
      if (!SkipBlanks()) Fail(line_, "the body of " + entry.name + " does not end");
      const char c = text_[at_];
      const int line = line_;
      if (c == '{' || c == '}') {
        depth += c == '{' ? 1 : -1;
        ++at_;
        entry.body.push_back({.kind = c == '{' ? Statement::Kind::kOpen : Statement::Kind::kClose,
                              .line = line,
                              .guard = {},
                              .name = {},
                              .operands = {}});
      } else if (text_.compare(at_, 5, ".loc ") == 0 || text_.compare(at_, 5, ".loc\t") == 0) {
        TakeUntil("\n");
      } else if (const std::string label = TakeLabel(); !label.empty()) {
        entry.body.push_back(
            {.kind = Statement::Kind::kLabel, .line = line, .guard = {}, .name = label, .operands = {}});
      } else {
        ParseStatement(line, TakeStatement(line), entry);
      }
    }
    entry.body.pop_back();  // the closing brace of the body itself
  }

  // To the semicolon, which braces of vectors and of initial values do not hide.
  std::string TakeStatement(int line) {
    std::string taken = TakeUntil(";");
    if (at_ == text_.size()) Fail(line, "no semicolon after: " + taken.substr(0, 60));
    ++at_;
    return taken;
  }

  std::string TakeLabel() {
    size_t end = at_;
    while (end < text_.size() && IsNameChar(text_[end])) ++end;
    const size_t name_end = end;
    while (end < text_.size() && text_[end] == ' ') ++end;
    if (end == text_.size() || text_[end] != ':' || text_.compare(end, 2, "::") == 0) return {};
    std::string label = text_.substr(at_, name_end - at_);
    at_ = end + 1;
    return label;
  }

  void ParseStatement(int line, std::string_view text, Entry& entry) {
    text = Trim(text);
    Statement statement{.line = line, .guard = {}, .name = {}, .operands = {}};
    if (!text.empty() && text.front() == '@') {
      text.remove_prefix(1);
      statement.guard_not = text.front() == '!';
      if (statement.guard_not) text.remove_prefix(1);
      size_t end = 0;
      while (end < text.size() && IsNameChar(text[end])) ++end;
      statement.guard = text.substr(0, end);
      text = Trim(text.substr(end));
    }
    size_t end = 0;
    while (end < text.size() && std::isspace(static_cast<unsigned char>(text[end])) == 0) ++end;
    statement.name = text.substr(0, end);
    const std::string_view rest = Trim(text.substr(end));
    if (statement.name == ".pragma" || statement.name.empty()) return;
    if (statement.name == ".shared" || statement.name == ".local") {
      entry.variables.push_back(ParseVariable(line, text));
      return;
    }
    if (statement.name == ".reg") {
      const size_t blank = rest.find_first_of(" \t");
      statement.kind = Statement::Kind::kRegisters;
      statement.name = rest.substr(1, blank - 1);
      statement.operands = SplitOperands(rest.substr(blank));
    } else if (statement.name == ".branchtargets") {
      statement.kind = Statement::Kind::kTargets;
      statement.operands = SplitOperands(rest);
    } else if (statement.name[0] == '.') {
      Fail(line, "unknown directive: " + statement.name);
    } else {
      statement.operands = SplitOperands(rest);
    }
    entry.body.push_back(std::move(statement));
  }

  std::string text_;
  size_t at_ = 0;
  int line_ = 1;
  Syntax syntax_;
};

}  // namespace

int TypeBits(std::string_view type) {
  static const std::map<std::string_view, int> kBits = {
      {"b8", 8},   {"u8", 8},    {"s8", 8},     {"b16", 16},    {"u16", 16},  {"s16", 16}, {"f16", 16},
      {"b32", 32}, {"u32", 32},  {"s32", 32},   {"f32", 32},    {"b64", 64},  {"u64", 64}, {"s64", 64},
      {"f64", 64}, {"bf16", 16}, {"f16x2", 32}, {"bf16x2", 32}, {"b128", 128}};
  const auto found = kBits.find(type);
  return found == kBits.end() ? 0 : found->second;
}

Syntax ParseText(std::string_view text) { return Parser(text).Parse(); }

}  // namespace ptxrun
