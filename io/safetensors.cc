// safetensors.cc - reads and writes .safetensors: header length (8 bytes, little endian), a JSON header, raw elements.
#include "io/safetensors.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "io/strict_json.h"

namespace sparge::io {
namespace {

using Json = nlohmann::json;

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kLongestHeader = 100'000'000;  // the limit of the format's own reader
constexpr int kDeepestNesting = 4;                // a correct header nests three levels
constexpr const char* kMetadataKey = "__metadata__";

constexpr std::pair<const char*, DType> kTypes[] = {
    {"F32", DType::F32}, {"F16", DType::F16}, {"BF16", DType::BF16}, {"U8", DType::U8}, {"BOOL", DType::BOOL}};

std::optional<DType> TypeOf(const std::string& name) {
  for (const auto& [text, dtype] : kTypes) {
    if (name == text) return dtype;
  }
  return std::nullopt;
}

const char* NameOf(DType dtype) {
  for (const auto& [text, known] : kTypes) {
    if (dtype == known) return text;
  }
  return "";
}

// A non-negative integer that fits, or nothing.
std::optional<int64_t> Integer(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t number = value.get<uint64_t>();
  if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return static_cast<int64_t>(number);
}

}  // namespace

// Fills a Safetensors from its header.
struct Safetensors::Builder {
  Safetensors& target;
  size_t data_at;  // first byte after the header

  [[noreturn]] void Fail(const std::string& what) const { throw Error(target.name_, what); }

  void AddMetadata(const Json& map) const {
    if (!map.is_object()) Fail("__metadata__ is not a map");
    for (const auto& [key, value] : map.items()) {
      if (!value.is_string()) Fail("__metadata__ " + Quoted(key) + " is not a string");
      target.metadata_[key] = value.get<std::string>();
    }
  }

  void AddTensor(const std::string& tensor, const Json& info) const {
    const std::string which = "tensor " + Quoted(tensor) + ": ";
    if (!info.is_object()) Fail(which + "its description is not a map");
    const auto dtype = info.find("dtype");
    const auto shape = info.find("shape");
    const auto offsets = info.find("data_offsets");
    if (dtype == info.end() || !dtype->is_string()) Fail(which + "'dtype' is missing or not a string");
    if (shape == info.end() || !shape->is_array()) Fail(which + "'shape' is missing or not a list");
    if (offsets == info.end() || !offsets->is_array() || offsets->size() != 2) {
      Fail(which + "'data_offsets' is missing or not a list of two");
    }
    Entry entry;
    entry.dtype = dtype->get<std::string>();
    for (const Json& dim : *shape) {
      const std::optional<int64_t> value = Integer(dim);
      if (!value) Fail(which + "bad dimension " + Quoted(dim.dump()));
      entry.shape.push_back(*value);
    }
    const std::optional<int64_t> begin = Integer((*offsets)[0]);
    const std::optional<int64_t> end = Integer((*offsets)[1]);
    if (!begin || !end) Fail(which + "bad data_offsets " + Quoted(offsets->dump()));
    CheckRange(which, entry, static_cast<uint64_t>(*begin), static_cast<uint64_t>(*end));
    entry.begin = data_at + static_cast<size_t>(*begin);
    entry.end = data_at + static_cast<size_t>(*end);
    target.entries_.emplace(tensor, std::move(entry));
  }

  void CheckRange(const std::string& which, const Entry& entry, uint64_t begin, uint64_t end) const {
    const uint64_t available = target.file_.size() - data_at;
    const std::string range = "data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) + "]";
    if (begin > end) Fail(which + range + " run backwards");
    if (end > available)
      Fail(which + range + " leave the file, which has " + std::to_string(available) + " data bytes");
    const std::optional<DType> dtype = TypeOf(entry.dtype);
    if (!dtype) return;  // size unknown; Get refuses it
    const std::optional<int64_t> needed = ByteCount(*dtype, entry.shape);
    if (!needed) Fail(which + "shape " + ShapeText(entry.shape) + " overflows");
    if (static_cast<uint64_t>(*needed) != end - begin) {
      Fail(which + "shape " + ShapeText(entry.shape) + " of " + entry.dtype + " needs " + std::to_string(*needed) +
           " bytes, " + range + " hold " + std::to_string(end - begin));
    }
  }
};

Safetensors Safetensors::Parse(std::vector<std::byte> file, std::string name) {
  if (file.size() < kLengthBytes) throw Error(name, "not a .safetensors file: shorter than 8 bytes");
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) length = length << 8 | std::to_integer<uint64_t>(file[i]);
  const uint64_t rest = file.size() - kLengthBytes;
  if (length > kLongestHeader) {
    throw Error(name, "not a .safetensors file: header length " + std::to_string(length) + " is absurd (at most " +
                          std::to_string(kLongestHeader) + ")");
  }
  if (length > rest) {
    throw Error(name, "truncated: the header needs " + std::to_string(length) + " bytes, the file has " +
                          std::to_string(rest) + " more");
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, static_cast<size_t>(length));
  const Json header = ParseStrictJson(text, name, "header", kDeepestNesting);
  if (!header.is_object()) throw Error(name, "header is not a JSON object");

  Safetensors result;
  result.name_ = std::move(name);
  result.file_ = std::move(file);
  const Builder builder{result, kLengthBytes + static_cast<size_t>(length)};
  for (const auto& [key, value] : header.items()) {
    if (key == kMetadataKey) {
      builder.AddMetadata(value);
    } else {
      builder.AddTensor(key, value);
    }
  }
  return result;
}

Safetensors Safetensors::Read(const std::string& path) { return Parse(ReadFile(path), path); }

std::vector<std::string> Safetensors::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

Tensor Safetensors::Get(const std::string& tensor) const {
  const auto found = entries_.find(tensor);
  if (found == entries_.end()) throw Error(name_, "has no tensor " + Quoted(tensor));
  const Entry& entry = found->second;
  const std::optional<DType> dtype = TypeOf(entry.dtype);
  if (!dtype) throw Error(name_, "tensor " + Quoted(tensor) + ": dtype " + Quoted(entry.dtype) + " is not supported");
  const std::span<const std::byte> bytes = std::span(file_).subspan(entry.begin, entry.end - entry.begin);
  return {*dtype, entry.shape, {bytes.begin(), bytes.end()}};
}

void WriteSafetensors(AtomicFile& file, std::span<const NamedTensor> tensors, const Metadata& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  size_t offset = 0;
  for (const NamedTensor& named : tensors) {
    if (named.name == kMetadataKey || header.contains(named.name)) {
      throw Error(file.path(), "tensor name " + Quoted(named.name) + " is reserved or used twice");
    }
    const size_t end = offset + named.tensor->data.size();
    header[named.name] = {
        {"dtype", NameOf(named.tensor->dtype)}, {"shape", named.tensor->shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception&) {
    throw Error(file.path(), "a name or a metadata string is not valid UTF-8");
  }
  while (text.size() % kLengthBytes != 0) text += ' ';  // keeps the elements aligned
  std::byte length[kLengthBytes];
  for (size_t i = 0; i < kLengthBytes; ++i) length[i] = static_cast<std::byte>(uint64_t{text.size()} >> (8 * i) & 0xff);
  file.Write(length);
  file.Write(std::as_bytes(std::span(text)));
  for (const NamedTensor& named : tensors) file.Write(named.tensor->data);
}

void WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors, const Metadata& metadata) {
  AtomicFile file(path);
  WriteSafetensors(file, tensors, metadata);
  file.Commit();
}

}  // namespace sparge::io
