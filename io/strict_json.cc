// strict_json.cc - the parser callback that sees repeated keys and deep nesting.
#include "io/strict_json.h"

#include <set>
#include <vector>

#include "io/tensor.h"

namespace sparge::io {
namespace {

using Json = nlohmann::json;

class StrictKeys {
 public:
  StrictKeys(std::string_view file, const std::string& what, int deepest)
      : file_(file), what_(what), deepest_(deepest) {}

  bool operator()(int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > deepest_) throw Error(file_, what_ + ": JSON is nested too deeply");
    if (event == Json::parse_event_t::object_start) keys_.emplace_back();
    if (event == Json::parse_event_t::object_end) keys_.pop_back();
    if (event == Json::parse_event_t::key) {
      const std::string& key = parsed.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second) throw Error(file_, what_ + " has the key " + Quoted(key) + " twice");
    }
    return true;
  }

 private:
  std::string_view file_;
  const std::string& what_;
  int deepest_;
  std::vector<std::set<std::string>> keys_;  // one set per open object
};

}  // namespace

Json ParseStrictJson(std::string_view text, std::string_view file, const std::string& what, int deepest) {
  // The callback is copied by the parser, its state must not be.
  StrictKeys strict(file, what, deepest);
  const auto callback = [&strict](int depth, Json::parse_event_t event, Json& parsed) {
    return strict(depth, event, parsed);
  };
  try {
    return Json::parse(text, callback);
  } catch (const Json::exception& error) {
    throw Error(file, what + " is not valid JSON (exception " + std::to_string(error.id) + "): " + Quoted(text));
  }
}

}  // namespace sparge::io
