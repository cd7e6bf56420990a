// strict_json.h - JSON from outside: refuses what the JSON library would take silently.
#ifndef SPARGE_IO_STRICT_JSON_H_
#define SPARGE_IO_STRICT_JSON_H_

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace sparge::io {

// One JSON text. Repeated keys (the library keeps the last one) and nesting beyond `deepest` (costs memory for nothing)
// throw Error, as does what is not JSON; `what` is the part of the file that messages name.
nlohmann::json ParseStrictJson(std::string_view text, std::string_view file, const std::string& what, int deepest);

}  // namespace sparge::io
#endif  // SPARGE_IO_STRICT_JSON_H_
