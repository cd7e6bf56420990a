// io_test.cc - .npy, .safetensors and atomic files: round trips, and a clear refusal of every hostile input.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "io/atomic_file.h"
#include "io/npy.h"
#include "io/preset.h"
#include "io/safetensors.h"

namespace sparge::io {
namespace {

namespace fs = std::filesystem;
using Dims = std::vector<int64_t>;

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (fs::temp_directory_path() / "sparge-io-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempFolder() { fs::remove_all(path_); }
  std::string File(const std::string& name) const { return (path_ / name).string(); }
  size_t Count() const { return static_cast<size_t>(std::distance(fs::directory_iterator(path_), {})); }

 private:
  fs::path path_;
};

Tensor Counting(DType dtype, Dims shape) {
  Tensor tensor = MakeTensor(dtype, std::move(shape));
  for (size_t i = 0; i < tensor.data.size(); ++i) tensor.data[i] = static_cast<std::byte>(i * 7 + 1);
  return tensor;
}

void ExpectSame(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_EQ(a.shape, b.shape);
  EXPECT_EQ(a.data, b.data);
}

// `call` must throw Error, in one line that begins with the name of the file and contains `part`.
void ExpectError(const std::string& file, const std::string& part, const std::function<void()>& call) {
  try {
    call();
    FAIL() << "accepted; expected: " << part;
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_TRUE(what.starts_with(file + ": ")) << what;
    EXPECT_NE(what.find(part), std::string::npos) << what << " lacks: " << part;
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
  }
}

std::vector<std::byte> Bytes(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

TEST(Sizes, AreCheckedForOverflow) {
  EXPECT_EQ(ElementCount(Dims{}), 1);
  EXPECT_EQ(ElementCount(Dims{2, 3, 4}), 24);
  EXPECT_EQ(ElementCount(Dims{0, 3}), 0);
  EXPECT_EQ(ElementCount(Dims{2, -3}), std::nullopt);
  EXPECT_EQ(ElementCount(Dims{int64_t{1} << 32, int64_t{1} << 31}), std::nullopt);
  EXPECT_EQ(ElementCount(Dims{0, int64_t{1} << 62, 4}), std::nullopt);
  EXPECT_EQ(ByteCount(DType::F32, Dims{int64_t{1} << 61}), std::nullopt);
  EXPECT_EQ(ByteCount(DType::F16, Dims{3, 5}), 30);
  EXPECT_THROW(MakeTensor(DType::F32, {int64_t{1} << 61}), std::bad_alloc);
}

TEST(Texts, StayOnOneLine) {
  EXPECT_EQ(ShapeText(Dims{}), "()");
  EXPECT_EQ(ShapeText(Dims{5}), "(5,)");
  EXPECT_EQ(ShapeText(Dims{1, 2}), "(1, 2)");
  EXPECT_EQ(Quoted("a\nb\xff"), "'a\\x0ab\\xff'");
  EXPECT_LT(Quoted(std::string(1000, 'x')).size(), 80u);
}

// ------------------------------------------------------------------ npy

std::string NpyText(const std::string& header, size_t data_bytes, char version = 1) {
  std::string file = "\x93NUMPY";
  file += version;
  file += '\0';
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) file += static_cast<char>(header.size() >> (8 * i) & 0xff);
  return file + header + std::string(data_bytes, '\1');
}

std::string NpyHeader(const std::string& descr, const std::string& order, const std::string& shape) {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

void ExpectBadNpy(const std::string& part, const std::string& file) {
  ExpectError("x.npy", part, [&] { ParseNpy(Bytes(file), "x.npy"); });
}

TEST(Npy, RoundTrips) {
  const TempFolder folder;
  for (const DType dtype : {DType::F32, DType::F16, DType::U8, DType::BOOL}) {
    for (const Dims& shape : {Dims{}, Dims{7}, Dims{3, 5}, Dims{2, 0, 4}, Dims{1, 2, 3, 4}, Dims(8, 1)}) {
      const Tensor tensor = Counting(dtype, shape);
      WriteNpy(folder.File("a.npy"), tensor);
      ExpectSame(ReadNpy(folder.File("a.npy")), tensor);
    }
  }
  EXPECT_EQ(folder.Count(), 1u);
  EXPECT_EQ(ReadFile(folder.File("a.npy")).size() % 64, 1u);  // elements begin at a multiple of 64
}

TEST(Npy, ReadsEveryVersionAndAnyKeyOrder) {
  for (const char version : {'\1', '\2', '\3'}) {
    const Tensor tensor = ParseNpy(Bytes(NpyText(NpyHeader("<f2", "False", "(2, 3)"), 12, version)), "x.npy");
    EXPECT_EQ(tensor.dtype, DType::F16);
    EXPECT_EQ(tensor.shape, (Dims{2, 3}));
  }
  const std::string other = "{\"shape\":(4,),\"fortran_order\":True,\"descr\":\"|u1\"}";
  EXPECT_EQ(ParseNpy(Bytes(NpyText(other, 4)), "x.npy").shape, (Dims{4}));
}

TEST(Npy, RefusesTypesAndOrders) {
  ExpectBadNpy("big-endian dtype '>f4'", NpyText(NpyHeader(">f4", "False", "(1,)"), 4));
  ExpectBadNpy("dtype '<f8' is not supported", NpyText(NpyHeader("<f8", "False", "(1,)"), 8));
  ExpectBadNpy("structured", NpyText("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", 4));
  ExpectBadNpy("Fortran order with shape (2, 3)", NpyText(NpyHeader("<f4", "True", "(2, 3)"), 24));
}

TEST(Npy, RefusesSizesThatLie) {
  ExpectBadNpy("truncated: shape (2, 3) of float32 needs 24 bytes, the file has 23",
               NpyText(NpyHeader("<f4", "False", "(2, 3)"), 23));
  ExpectBadNpy("trailing bytes: shape (2, 3) of float32 needs 24 bytes, the file has 25",
               NpyText(NpyHeader("<f4", "False", "(2, 3)"), 25));
  ExpectBadNpy("negative dimension '-3'", NpyText(NpyHeader("<f4", "False", "(2, -3)"), 24));
  ExpectBadNpy("overflows", NpyText(NpyHeader("<f4", "False", "(4611686018427387904, 4)"), 0));
  ExpectBadNpy("overflows", NpyText(NpyHeader("<f4", "False", "(0, 4611686018427387904, 4)"), 0));
  ExpectBadNpy("'99999999999999999999' is too large", NpyText(NpyHeader("<f4", "False", "(99999999999999999999,)"), 0));
  ExpectBadNpy("more than 8 dimensions", NpyText(NpyHeader("<f4", "False", "(1,1,1,1,1,1,1,1,1)"), 4));
}

TEST(Npy, RefusesBrokenHeaders) {
  ExpectBadNpy("not an .npy file", "");
  ExpectBadNpy("not an .npy file", "PK\3\4 something else");
  ExpectBadNpy("truncated before the version", "\x93NUMPY");
  ExpectBadNpy("truncated before the header length", std::string("\x93NUMPY\1\0\5", 9));
  ExpectBadNpy("version 4.0 is not supported", NpyText(NpyHeader("<f4", "False", "(1,)"), 4, 4));
  ExpectBadNpy("header length 4294967295 is absurd", std::string("\x93NUMPY\2\0\xff\xff\xff\xff{}", 14));
  ExpectBadNpy("truncated: the header needs 512 bytes, the file has 2 more", std::string("\x93NUMPY\1\0\0\2{}", 12));
  ExpectBadNpy("lacks 'shape'", NpyText("{'descr': '<f4', 'fortran_order': False}", 4));
  ExpectBadNpy("lacks 'descr'", NpyText("{}", 4));
  ExpectBadNpy("key 'descr'", NpyText("{'descr': '<f4', 'descr': '<f4'}", 4));
  ExpectBadNpy("key 'other'", NpyText("{'other': 1}", 4));
  ExpectBadNpy("closing quote", NpyText("{'descr", 4));
  ExpectBadNpy("neither True nor False", NpyText(NpyHeader("<f4", "0", "(1,)"), 4));
  ExpectBadNpy("text after its end", NpyText(NpyHeader("<f4", "False", "(1,)") + "x", 4));
  ExpectBadNpy("expected a dimension", NpyText(NpyHeader("<f4", "False", "(x,)"), 4));
  ExpectBadNpy("dtype 'a\\x0ab'", NpyText(NpyHeader("a\nb", "False", "(1,)"), 4));
}

TEST(Npy, NamesFilesThatCannotBeRead) {
  const TempFolder folder;
  ExpectError(folder.File("none.npy"), "cannot be opened", [&] { ReadNpy(folder.File("none.npy")); });
  ExpectError(folder.File(""), "is a directory", [&] { ReadNpy(folder.File("")); });
}

TEST(Npy, RefusesToWriteBfloat16) {
  const TempFolder folder;
  const std::string path = folder.File("a.npy");
  ExpectError(path, "use .safetensors", [&] { WriteNpy(path, Counting(DType::BF16, {2})); });
  EXPECT_EQ(folder.Count(), 0u);
}

// ------------------------------------------------------------------ safetensors

std::string SafeText(const std::string& header, size_t data_bytes) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(header.size() >> (8 * i) & 0xff);
  return file + header + std::string(data_bytes, '\1');
}

std::string OneEntry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"q":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

void ExpectBadSafe(const std::string& part, const std::string& file) {
  ExpectError("x.safetensors", part, [&] { Safetensors::Parse(Bytes(file), "x.safetensors"); });
}

TEST(SafetensorsFile, RoundTrips) {
  const TempFolder folder;
  const Tensor q = Counting(DType::BF16, {2, 3, 4});
  const Tensor k = Counting(DType::F32, {0, 4});
  const Tensor v = Counting(DType::F16, {});
  const Tensor mask = Counting(DType::BOOL, {5});
  const Metadata metadata = {{"causal", "true"}, {"title", "a \"quoted\"\nline"}};
  const NamedTensor tensors[] = {{"q", &q}, {"k", &k}, {"v", &v}, {"mask", &mask}};
  const std::string path = folder.File("a.safetensors");
  WriteSafetensors(path, tensors, metadata);
  const Safetensors file = Safetensors::Read(path);
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_EQ(file.Names(), (std::vector<std::string>{"k", "mask", "q", "v"}));
  for (const NamedTensor& named : tensors) ExpectSame(file.Get(named.name), *named.tensor);
  EXPECT_FALSE(file.Has("o"));
  ExpectError(path, "has no tensor 'o'", [&] { file.Get("o"); });
  EXPECT_EQ(folder.Count(), 1u);
}

TEST(SafetensorsFile, RefusesAnUnknownTypeOnlyWhenAsked) {
  const Safetensors file = Safetensors::Parse(Bytes(SafeText(OneEntry("I64", "[1]", "[0,8]"), 8)), "x");
  EXPECT_TRUE(file.Has("q"));
  ExpectError("x", "dtype 'I64' is not supported", [&] { file.Get("q"); });
}

TEST(SafetensorsFile, RefusesBrokenHeaders) {
  ExpectBadSafe("shorter than 8 bytes", "abc");
  ExpectBadSafe("is absurd", std::string(8, '\x7f'));
  ExpectBadSafe("truncated: the header needs 5 bytes, the file has 2 more", std::string("\5\0\0\0\0\0\0\0{}", 10));
  ExpectBadSafe("not valid JSON", SafeText("{\"q\":\n", 0));
  ExpectBadSafe("not valid JSON", SafeText("{\"\xff\":1}", 0));
  ExpectBadSafe("not valid JSON", SafeText("", 0));
  ExpectBadSafe("not a JSON object", SafeText("[1]", 0));
  ExpectBadSafe("nested too deeply", SafeText(std::string(100000, '['), 0));
  ExpectBadSafe("key 'q' twice", SafeText(R"({"q":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"q":{}})", 0));
  ExpectBadSafe("key 'a' twice", SafeText(R"({"__metadata__":{"a":"1","a":"2"}})", 0));
  ExpectBadSafe("__metadata__ 'a' is not a string", SafeText(R"({"__metadata__":{"a":true}})", 0));
  ExpectBadSafe("__metadata__ is not a map", SafeText(R"({"__metadata__":[]})", 0));
  ExpectBadSafe("tensor 'q': its description is not a map", SafeText(R"({"q":1})", 0));
  ExpectBadSafe("'dtype' is missing", SafeText(R"({"q":{"shape":[0],"data_offsets":[0,0]}})", 0));
  ExpectBadSafe("'shape' is missing", SafeText(R"({"q":{"dtype":"U8","data_offsets":[0,0]}})", 0));
  ExpectBadSafe("'data_offsets' is missing", SafeText(OneEntry("U8", "[0]", "[0]"), 0));
}

TEST(SafetensorsFile, RefusesRangesThatLie) {
  ExpectBadSafe("[0, 4] leave the file, which has 3 data bytes", SafeText(OneEntry("F32", "[1]", "[0,4]"), 3));
  ExpectBadSafe("[4, 0] run backwards", SafeText(OneEntry("F32", "[1]", "[4,0]"), 4));
  ExpectBadSafe("leave the file", SafeText(OneEntry("F32", "[1]", "[9223372036854775800,9223372036854775804]"), 4));
  ExpectBadSafe("bad data_offsets", SafeText(OneEntry("F32", "[1]", "[18446744073709551615,3]"), 4));
  ExpectBadSafe("bad data_offsets", SafeText(OneEntry("F32", "[1]", "[-4,0]"), 4));
  ExpectBadSafe("shape (3,) of F32 needs 12 bytes, data_offsets [0, 8] hold 8",
                SafeText(OneEntry("F32", "[3]", "[0,8]"), 8));
  ExpectBadSafe("overflows", SafeText(OneEntry("F32", "[1099511627776,1099511627776]", "[0,4]"), 4));
  ExpectBadSafe("bad dimension '-1'", SafeText(OneEntry("F32", "[-1]", "[0,4]"), 4));
  ExpectBadSafe("bad dimension '1.0'", SafeText(OneEntry("F32", "[1.0]", "[0,4]"), 4));
}

TEST(SafetensorsFile, RefusesToWriteBadNames) {
  const TempFolder folder;
  const Tensor t = Counting(DType::F32, {1});
  const std::string path = folder.File("a");
  const NamedTensor twice[] = {{"a", &t}, {"a", &t}};
  const NamedTensor not_utf8[] = {{"\xff", &t}};
  ExpectError(path, "'a' is reserved or used twice", [&] { WriteSafetensors(path, twice); });
  ExpectError(path, "UTF-8", [&] { WriteSafetensors(path, not_utf8); });
  EXPECT_EQ(folder.Count(), 0u);
}

// ------------------------------------------------------------------ the fuzzers' corpus, and atomic files

template <typename Read>
void CheckCorpus(const char* folder, Read read) {
  int good = 0, bad = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(SPARGE_FUZZ_CORPUS) / folder)) {
    const std::string path = entry.path().string();
    if (entry.path().filename().string().starts_with("ok_")) {
      ++good;
      EXPECT_NO_THROW(read(path)) << path;
    } else {
      ++bad;
      EXPECT_THROW(read(path), Error) << path;
    }
  }
  EXPECT_GT(good, 4);
  EXPECT_GT(bad, 10);
}

TEST(Corpus, IsReadOrRefusedAsItsNamesSay) {
  CheckCorpus("npy", [](const std::string& path) { ReadNpy(path); });
  CheckCorpus("preset", [](const std::string& path) { ReadPreset(path); });
  CheckCorpus("safetensors", [](const std::string& path) { Safetensors::Read(path); });
}

TEST(AtomicFileTest, AppearsOnlyAtCommit) {
  const TempFolder folder;
  const std::string path = folder.File("out");
  std::ofstream(path) << "old";
  {
    AtomicFile file(path);
    file.Write(Bytes("new and longer"));
    EXPECT_EQ(ReadFile(path), Bytes("old"));
  }
  EXPECT_EQ(ReadFile(path), Bytes("old"));
  EXPECT_EQ(folder.Count(), 1u);
  AtomicFile file(path);
  file.Write(Bytes("new"));
  file.Commit();
  EXPECT_EQ(ReadFile(path), Bytes("new"));
  EXPECT_EQ(folder.Count(), 1u);
}

TEST(AtomicFileTest, WritesThroughLinks) {
  const TempFolder folder;
  std::ofstream(folder.File("real")) << "old";
  fs::create_symlink("real", folder.File("link"));
  AtomicFile file(folder.File("link"));
  file.Write(Bytes("new"));
  file.Commit();
  EXPECT_TRUE(fs::is_symlink(folder.File("link")));
  EXPECT_EQ(ReadFile(folder.File("real")), Bytes("new"));
}

TEST(AtomicFileTest, CreatesTheTargetOfALink) {
  const TempFolder folder;
  fs::create_directory(folder.File("sub"));
  fs::create_symlink("sub/new", folder.File("link"));
  fs::create_symlink(folder.File("link"), folder.File("far"));
  AtomicFile file(folder.File("far"));
  file.Write(Bytes("new"));
  file.Commit();
  EXPECT_TRUE(fs::is_symlink(folder.File("far")));
  EXPECT_TRUE(fs::is_symlink(folder.File("link")));
  EXPECT_EQ(ReadFile(folder.File("sub/new")), Bytes("new"));
  fs::create_symlink("loop", folder.File("loop"));
  ExpectError(folder.File("loop"), "symbolic links", [&] { AtomicFile loop(folder.File("loop")); });
}

TEST(AtomicFilesTest, AppearTogetherOrNotAtAll) {
  const TempFolder folder;
  std::ofstream(folder.File("old")) << "old";
  const auto write = [&](const std::function<void()>& last) {
    AtomicFiles files;
    files.MakeFolder(folder.File("made/"));
    for (const char* name : {"new", "old", "made/inside"}) files.Add(folder.File(name)).Write(Bytes("new"));
    EXPECT_EQ(ReadFile(folder.File("old")), Bytes("old"));
    files.Commit(last);
  };
  EXPECT_THROW(write([&] {
                 EXPECT_EQ(ReadFile(folder.File("made/inside")), Bytes("new"));
                 throw std::runtime_error("the last step");
               }),
               std::runtime_error);
  EXPECT_EQ(ReadFile(folder.File("old")), Bytes("old"));
  EXPECT_EQ(folder.Count(), 1u);
  write({});
  for (const char* name : {"new", "old", "made/inside"}) EXPECT_EQ(ReadFile(folder.File(name)), Bytes("new"));
  EXPECT_EQ(folder.Count(), 3u);
}

TEST(FileKeys, AreSharedByNamesOfOneFile) {
  const TempFolder folder;
  const auto same = [&](const std::string& a, const std::string& b) {
    const std::vector<std::string> left = FileKeys(folder.File(a)), right = FileKeys(folder.File(b));
    return std::find_first_of(left.begin(), left.end(), right.begin(), right.end()) != left.end();
  };
  fs::create_directory(folder.File("d"));
  fs::create_symlink("d", folder.File("l"));
  fs::create_symlink("../x", folder.File("d/link"));
  for (const char* name : {"./x", "d/../x", "l/../x", "d/link", "l/link"}) EXPECT_TRUE(same("x", name)) << name;
  std::ofstream(folder.File("x")) << "x";
  fs::create_hard_link(folder.File("x"), folder.File("d/hard"));
  for (const char* name : {"./x", "l/../x", "l/link", "l/hard"}) EXPECT_TRUE(same("x", name)) << name;
  for (const char* name : {"y", "d/x", "X", "x.npy"}) EXPECT_FALSE(same("x", name)) << name;
}

TEST(AtomicFileTest, RefusesPlacesThatAreNotFiles) {
  const TempFolder folder;
  ExpectError("/dev/null", "not a regular file", [] { AtomicFile file("/dev/null"); });
  ExpectError(folder.File(""), "is a directory", [&] { AtomicFile file(folder.File("")); });
  const std::string deep = folder.File("no/such/file");
  ExpectError(deep, "does not exist", [&] { AtomicFile file(deep); });
  EXPECT_EQ(folder.Count(), 0u);
}

}  // namespace
}  // namespace sparge::io
