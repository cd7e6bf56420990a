// captures.cc - walks the folder, reads each capture once, and refuses what would spoil a long run later.
#include "io/captures.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "io/tensor.h"

namespace sparge::io {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWanted = " (wanted: CAPTURES/LAYER/SAMPLE.safetensors)";
constexpr const char* kNone = "no .safetensors files in this folder";

constexpr const char* kEnding = ".safetensors";

bool IsCapture(const fs::path& path) { return path.extension() == kEnding; }

// Entries of a folder by name; hidden ones left out.
std::vector<fs::path> Entries(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (!it->path().filename().string().starts_with('.')) entries.push_back(it->path());
  }
  if (error) throw Error(folder.string(), "cannot be searched: " + error.message());
  std::sort(entries.begin(), entries.end());
  return entries;
}

// Layers and samples are written into a JSON file.
void CheckName(const std::string& name, const std::string& path) {
  try {
    nlohmann::json(name).dump();
  } catch (const nlohmann::json::exception&) {
    throw Error(path, "the name is not valid UTF-8");
  }
}

Capture CaptureAt(const fs::path& path) {
  CheckName(path.stem().string(), path.string());
  return {path.stem().string(), path.string(), {}, nullptr};
}

LayerCaptures LayerAt(const fs::path& folder, const std::string& name) {
  CheckName(name, folder.string());
  LayerCaptures layer;
  layer.name = name;
  for (const fs::path& entry : Entries(folder)) {
    if (fs::is_directory(entry)) throw Error(entry.string(), std::string("is a folder inside a layer") + kWanted);
    if (IsCapture(entry)) layer.captures.push_back(CaptureAt(entry));
  }
  if (layer.captures.empty()) throw Error(folder.string(), std::string(kNone) + kWanted);
  return layer;
}

// A number that changes with every bit that was added.
class Digest {
 public:
  void Add(std::span<const std::byte> bytes) {
    Mix(bytes.size());
    while (!bytes.empty()) {
      uint64_t word = 0;
      const size_t count = std::min(bytes.size(), sizeof word);
      std::memcpy(&word, bytes.data(), count);
      Mix(word);
      bytes = bytes.subspan(count);
    }
  }
  void Add(const std::string& text) { Add(std::as_bytes(std::span(text))); }
  void Add(const Tensor& tensor) {
    Mix(static_cast<uint64_t>(tensor.dtype));
    for (const int64_t dim : tensor.shape) Mix(static_cast<uint64_t>(dim));
    Add(tensor.data);
  }
  std::string Text() const {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(state_));
    return text;
  }

 private:
  // FNV-1a on words, with the high bits folded back, which alone would never reach the low ones.
  void Mix(uint64_t word) {
    state_ = (state_ ^ word) * 0x100000001b3;
    state_ ^= state_ >> 32;
  }
  uint64_t state_ = 0xcbf29ce484222325;
};

// Infinity and NaN have all bits of the exponent set.
template <class Bits>
int64_t FirstNonFinite(std::span<const std::byte> data, Bits exponent) {
  for (size_t at = 0; at + sizeof(Bits) <= data.size(); at += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, data.data() + at, sizeof bits);
    if ((bits & exponent) == exponent) return static_cast<int64_t>(at / sizeof(Bits));
  }
  return -1;
}

void CheckFinite(const std::string& path, const char* name, const Tensor& tensor) {
  const int64_t found = tensor.dtype == DType::F32
                            ? FirstNonFinite<uint32_t>(tensor.data, 0x7f800000)
                            : FirstNonFinite<uint16_t>(tensor.data, tensor.dtype == DType::F16 ? 0x7c00 : 0x7f80);
  if (found < 0) return;
  const std::vector<int64_t>& shape = tensor.shape;
  const int64_t dim = shape[shape.size() - 1];
  const int64_t tokens = shape[shape.size() - 2];
  throw Error(path, std::string("tensor ") + name + " has a value that is not finite, at head " +
                        std::to_string(found / dim / tokens) + ", token " + std::to_string(found / dim % tokens) +
                        ": no error can be measured against that");
}

void CheckCapture(Capture& capture, const LayerCaptures& layer, Digest& digest) {
  std::optional<RecordedCall> read;
  if (!capture.call) read = ReadCall(capture.path);
  const RecordedCall& call = capture.call ? *capture.call : *read;
  const PlanDesc& desc = call.desc;
  if (desc.q_tokens == 0 || desc.kv_tokens == 0) throw Error(capture.path, "has no tokens");
  CheckFinite(capture.path, "q", call.q);
  CheckFinite(capture.path, "k", call.k);
  CheckFinite(capture.path, "v", call.v);
  capture.desc = desc;
  const Capture& first = layer.captures[0];
  const auto same = [&](const char* what, int64_t mine, int64_t all) {
    if (mine == all) return;
    throw Error(capture.path, std::string(what) + " " + std::to_string(mine) + ", but " + first.path +
                                  " of the same layer has " + std::to_string(all));
  };
  same("q_heads", desc.q_heads, first.desc.q_heads);
  same("kv_heads", desc.kv_heads, first.desc.kv_heads);
  same("qk_dim", desc.qk_dim, first.desc.qk_dim);
  same("v_dim", desc.v_dim, first.desc.v_dim);
  same("causal", desc.causal, first.desc.causal);
  digest.Add(capture.name);
  for (const Tensor* tensor : {&call.q, &call.k, &call.v}) digest.Add(*tensor);
  for (const auto& [key, value] : call.metadata) {
    digest.Add(key);
    digest.Add(value);
  }
}

}  // namespace

std::string LayerOf(const std::string& file) {
  std::error_code error;
  const fs::path path = fs::absolute(file, error).lexically_normal();
  return path.parent_path().filename().string();
}

Captures FindCaptures(const std::string& path) {
  Captures captures;
  std::error_code error;
  if (!fs::exists(path, error)) throw Error(path, "does not exist");
  if (!fs::is_directory(path, error)) {
    captures.layers.push_back({LayerOf(path), {CaptureAt(path)}});
    captures.assumed = path + ": one sample of layer " + Quoted(LayerOf(path)) + ", named after its folder";
    return captures;
  }
  std::vector<fs::path> folders, files;
  for (const fs::path& entry : Entries(path)) {
    if (fs::is_directory(entry)) folders.push_back(entry);
    if (!fs::is_directory(entry) && IsCapture(entry)) files.push_back(entry);
  }
  if (!folders.empty() && !files.empty()) {
    throw Error(path, "has both samples (" + files[0].filename().string() + ") and folders (" +
                          folders[0].filename().string() + ")" + kWanted);
  }
  if (!files.empty()) {
    const std::string name = LayerOf(files[0].string());
    captures.layers.push_back(LayerAt(path, name));
    captures.assumed = path + ": " + std::to_string(files.size()) + (files.size() == 1 ? " sample" : " samples") +
                       " of one layer " + Quoted(name) + ", named after the folder";
    return captures;
  }
  if (folders.empty()) throw Error(path, std::string(kNone) + kWanted);
  for (const fs::path& folder : folders) captures.layers.push_back(LayerAt(folder, folder.filename().string()));
  return captures;
}

void AddCapture(const std::string& layer, const std::string& name, RecordedCall call, Captures& captures) {
  CheckName(layer, layer);
  CheckName(name, layer);
  auto& layers = captures.layers;
  const auto at = std::lower_bound(layers.begin(), layers.end(), layer,
                                   [](const LayerCaptures& a, const std::string& b) { return a.name < b; });
  const bool known = at != layers.end() && at->name == layer;
  auto& among = (known ? at : layers.insert(at, {layer, {}}))->captures;
  // Sorted as files are, with their ending.
  Capture capture{name, layer + "/" + name + kEnding, {}, std::make_shared<const RecordedCall>(std::move(call))};
  const auto place = std::lower_bound(among.begin(), among.end(), capture.path,
                                      [](const Capture& a, const std::string& b) { return a.path < b; });
  if (place != among.end() && place->name == name) throw Error(capture.path, "was recorded twice");
  among.insert(place, std::move(capture));
}

std::string CheckCaptures(Captures& captures) {
  Digest digest;
  for (LayerCaptures& layer : captures.layers) {
    digest.Add(layer.name);
    for (Capture& capture : layer.captures) CheckCapture(capture, layer, digest);
  }
  return digest.Text();
}

}  // namespace sparge::io
