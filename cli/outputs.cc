// outputs.cc - checks, writes and commits output files.
#include "cli/outputs.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "io/npy.h"
#include "io/safetensors.h"

namespace sparge::cli {
namespace {

namespace fs = std::filesystem;

bool IsSafetensors(const std::string& path) { return path.ends_with(".safetensors"); }

void CheckPlace(const std::string& flag, const std::string& path) {
  try {
    io::CheckWritable(path);
  } catch (const io::Error& error) {
    throw UsageError(flag + " " + error.what());
  }
}

using Named = std::vector<std::pair<std::string, std::string>>;  // flag, path

Named Given(const Named& all) {
  Named given;
  for (const auto& named : all) {
    if (!named.second.empty()) given.push_back(named);
  }
  return given;
}

}  // namespace

bool SameFile(const std::string& a, const std::string& b) {
  std::error_code error;
  if (fs::equivalent(a, b, error)) return true;
  const fs::path left = fs::weakly_canonical(a, error);
  const fs::path right = fs::weakly_canonical(b, error);
  return left == right;
}

void CheckOutputs(const Options& o, io::DType q_dtype) {
  const Named outputs = Given({{"--out", o.out}, {"--lse", o.lse}, {"--map-out", o.map_out}});
  const Named inputs = Given({{"--q", o.q},
                              {"--k", o.k},
                              {"--v", o.v},
                              {"--tensors", o.tensors},
                              {"--mask", o.mask},
                              {"--map", o.map},
                              {"--preset", o.preset}});
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& [flag, path] = outputs[i];
    const bool may_be_safetensors = flag == "--out";
    if (!path.ends_with(".npy") && !(may_be_safetensors && IsSafetensors(path))) {
      throw UsageError(flag + " " + path + ": must end in .npy" + (may_be_safetensors ? " or .safetensors" : ""));
    }
    if (flag == "--out" && q_dtype == io::DType::BF16 && !IsSafetensors(path)) {
      throw UsageError("--out " + path + ": q is bfloat16, which .npy cannot hold; use .safetensors");
    }
    CheckPlace(flag, path);
    for (size_t j = 0; j < i; ++j) {
      if (SameFile(path, outputs[j].second)) throw UsageError(flag + " " + path + ": same file as " + outputs[j].first);
    }
    for (const auto& [input_flag, input] : inputs) {
      if (SameFile(path, input)) throw UsageError(flag + " " + path + ": would overwrite the input " + input_flag);
    }
  }
}

void Outputs::Add(const std::string& flag, const std::string& path, const std::string& name, const io::Tensor& tensor) {
  try {
    files_.push_back(std::make_unique<io::AtomicFile>(path));
    if (IsSafetensors(path)) {
      const io::NamedTensor tensors[] = {{name, &tensor}};
      io::WriteSafetensors(*files_.back(), tensors);
    } else {
      io::WriteNpy(*files_.back(), tensor);
    }
    files_.back()->Close();
  } catch (const io::Error& error) {
    throw UsageError(flag + " " + error.what());
  }
}

void Outputs::Commit() {
  for (const auto& file : files_) file->Commit();
}

void PrintOut(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw UsageError(std::string("stdout: cannot be written: ") + std::strerror(errno));
  }
}

}  // namespace sparge::cli
