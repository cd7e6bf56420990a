// outputs.cc - checks, writes and commits output files.
#include "cli/outputs.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>

#include "io/npy.h"
#include "io/safetensors.h"

namespace sparge::cli {
namespace {

bool IsSafetensors(const std::string& path) { return path.ends_with(".safetensors"); }

std::vector<NamedFile> Given(const std::vector<NamedFile>& all) {
  std::vector<NamedFile> given;
  for (const NamedFile& file : all) {
    if (!file.path.empty()) given.push_back(file);
  }
  return given;
}

// Names the flag in front of what the file's writer says.
template <class Work>
void Naming(const std::string& flag, const Work& work) {
  try {
    work();
  } catch (const io::Error& error) {
    throw UsageError(flag + " " + error.what());
  }
}

void CheckEnding(const NamedFile& file, io::DType q_dtype) {
  const bool may_be_safetensors = file.flag == "--out";
  if (!file.path.ends_with(".npy") && !(may_be_safetensors && IsSafetensors(file.path))) {
    throw UsageError(file.flag + " " + file.path + ": must end in .npy" +
                     (may_be_safetensors ? " or .safetensors" : ""));
  }
  if (may_be_safetensors && q_dtype == io::DType::BF16 && !IsSafetensors(file.path)) {
    throw UsageError("--out " + file.path + ": q is bfloat16, which .npy cannot hold; use .safetensors");
  }
}

}  // namespace

std::vector<NamedFile> NamedInputs(const Options& o) {
  return Given({{"--q", o.q},
                {"--k", o.k},
                {"--v", o.v},
                {"--tensors", o.tensors},
                {"--mask", o.mask},
                {"--map", o.map},
                {"--preset", o.preset}});
}

void CheckPlaces(const std::vector<NamedFile>& outputs, const std::vector<NamedFile>& inputs) {
  std::map<std::string, std::string> taken;  // key of a file, and what it is
  for (const NamedFile& input : inputs) {
    const std::string what = "would overwrite the input " + (input.flag.empty() ? input.path : input.flag);
    for (const std::string& key : io::FileKeys(input.path)) taken.emplace(key, what);
  }
  for (const NamedFile& output : outputs) {
    Naming(output.flag, [&] {
      io::CheckWritable(output.path);
      const std::vector<std::string> keys = io::FileKeys(output.path);
      for (const std::string& key : keys) {
        const auto found = taken.find(key);
        if (found != taken.end()) throw io::Error(output.path, found->second);
      }
      for (const std::string& key : keys) taken.emplace(key, "same file as " + output.flag);
    });
  }
}

void CheckOutputs(const Options& o, io::DType q_dtype) {
  const std::vector<NamedFile> outputs = Given({{"--out", o.out}, {"--lse", o.lse}, {"--map-out", o.map_out}});
  for (const NamedFile& output : outputs) CheckEnding(output, q_dtype);
  CheckPlaces(outputs, NamedInputs(o));
}

void Outputs::Add(const std::string& flag, const std::string& path, const std::string& name, const io::Tensor& tensor) {
  Naming(flag, [&] {
    io::AtomicFile& file = files_.Add(path);
    if (IsSafetensors(path)) {
      const io::NamedTensor tensors[] = {{name, &tensor}};
      io::WriteSafetensors(file, tensors);
    } else {
      io::WriteNpy(file, tensor);
    }
    file.Close();
  });
}

void Outputs::Add(const std::string& flag, const std::string& path, std::span<const std::byte> bytes) {
  Naming(flag, [&] {
    io::AtomicFile& file = files_.Add(path);
    file.Write(bytes);
    file.Close();
  });
}

void Outputs::MakeFolder(const std::string& flag, const std::string& path) {
  Naming(flag, [&] { files_.MakeFolder(path); });
}

void PrintOut(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw UsageError(std::string("stdout: cannot be written: ") + std::strerror(errno));
  }
}

}  // namespace sparge::cli
