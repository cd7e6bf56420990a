// Format: a header {magic, version, header bytes, bytes}, then entries of the same kind {kind, header bytes, payload
// bytes, compressed bytes, architecture, flags, uncompressed bytes}, each followed by its payload.
#include "tools/ptxrun/libcuda/fatbin.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace ptxrun {
namespace {

constexpr uint32_t kFatMagic = 0xBA55ED50, kWrapperMagic = 0x466243B1;
constexpr uint16_t kPtx = 1;
constexpr uint64_t kLz4 = 0x2000, kZstd = 0x8000;

struct FatHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct Entry {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t payload_bytes;
  uint32_t compressed_bytes, options_offset;
  uint16_t minor, major;
  uint32_t architecture;
  uint32_t name_offset, name_bytes;
  uint64_t flags, zero, uncompressed_bytes;
};
static_assert(sizeof(Entry) == 64);

// LZ4 block format: literals, then a copy of what was written before, again and again.
std::string DecodeLz4(const uint8_t* from, size_t count, size_t bytes) {
  std::string out;
  out.reserve(bytes);
  const uint8_t* end = from + count;
  const auto length = [&](size_t nibble) {
    if (nibble < 15) return nibble;
    uint8_t more = 255;
    while (more == 255 && from < end) nibble += more = *from++;
    return nibble;
  };
  while (from < end) {
    const uint8_t token = *from++;
    const size_t literals = length(token >> 4);
    if (literals > static_cast<size_t>(end - from)) throw NoPtx("broken LZ4 data");
    out.append(reinterpret_cast<const char*>(from), literals);
    from += literals;
    if (end - from < 2) break;  // the last sequence has no copy
    const size_t distance = from[0] | size_t{from[1]} << 8;
    from += 2;
    if (distance == 0 || distance > out.size()) throw NoPtx("broken LZ4 data");
    for (size_t n = length(token & 15) + 4; n > 0; --n) out += out[out.size() - distance];
  }
  return out;
}

// With the library that every Debian has, because dpkg needs it; without it compressed images are refused.
std::string DecodeZstd(const uint8_t* from, size_t count, size_t bytes) {
  using Decompress = size_t (*)(void* to, size_t to_bytes, const void* from, size_t from_bytes);
  static void* const library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
  static const auto decompress =
      library == nullptr ? nullptr : reinterpret_cast<Decompress>(dlsym(library, "ZSTD_decompress"));
  if (decompress == nullptr) throw NoPtx("the PTX is compressed with zstd, and there is no libzstd.so.1");
  std::string out(bytes, '\0');
  if (decompress(out.data(), bytes, from, count) != bytes) throw NoPtx("broken zstd data");
  return out;
}

std::string TextOf(const Entry& entry, const uint8_t* payload) {
  const auto count = static_cast<size_t>(entry.compressed_bytes != 0 ? entry.compressed_bytes : entry.payload_bytes);
  const auto bytes = static_cast<size_t>(entry.uncompressed_bytes);
  std::string text;
  if ((entry.flags & kZstd) != 0) {
    text = DecodeZstd(payload, count, bytes);
  } else if ((entry.flags & kLz4) != 0) {
    text = DecodeLz4(payload, count, bytes);
  } else {
    text.assign(reinterpret_cast<const char*>(payload), static_cast<size_t>(entry.payload_bytes));
  }
  return text.substr(0, text.find('\0'));
}

}  // namespace

std::string PtxOf(const void* image, int sm) {
  const auto* at = static_cast<const uint8_t*>(image);
  FatHeader header;
  std::memcpy(&header, at, sizeof(header));
  if (header.magic == kWrapperMagic) {  // {magic, version, pointer}: as nvcc registers it
    std::memcpy(&at, at + 8, sizeof(at));
    std::memcpy(&header, at, sizeof(header));
  }
  if (std::memcmp(at,
                  "\x7f"
                  "ELF",
                  4) == 0)
    throw NoPtx("machine code of a GPU, without PTX");
  if (header.magic != kFatMagic) return reinterpret_cast<const char*>(at);
  const uint8_t* end = at + header.header_bytes + header.bytes;
  std::string found, offered;
  uint32_t best = 0;
  for (at += header.header_bytes; at < end;) {
    Entry entry;
    std::memcpy(&entry, at, sizeof(entry));
    if (entry.kind == kPtx) {
      offered += " " + std::to_string(entry.architecture);
      if (static_cast<int>(entry.architecture) <= sm && entry.architecture > best) {
        best = entry.architecture;
        found = TextOf(entry, at + entry.header_bytes);
      }
    }
    at += entry.header_bytes + entry.payload_bytes;
  }
  if (best == 0)
    throw NoPtx("no PTX for sm_" + std::to_string(sm) + "; there is:" + (offered.empty() ? " none" : offered));
  return found;
}

}  // namespace ptxrun
