// atomic_file.cc - the temporary file and its rename, over POSIX calls because those report every error.
#include "io/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "io/tensor.h"

namespace sparge::io {
namespace fs = std::filesystem;
namespace {

// Where a rename must go so that a link stays a link.
std::string FollowLinks(const std::string& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error)) return path;
  const fs::path target = fs::canonical(path, error);
  return error ? path : target.string();
}

fs::path FolderOf(const std::string& path) {
  const fs::path folder = fs::path(path).parent_path();
  return folder.empty() ? fs::path(".") : folder;
}

}  // namespace

void CheckWritable(const std::string& path) {
  if (path.empty()) throw Error("''", "an empty name cannot be written");
  const std::string target = FollowLinks(path);
  std::error_code error;
  const fs::file_status status = fs::status(target, error);
  if (fs::is_directory(status)) throw Error(path, "is a directory, cannot be written as a file");
  if (fs::exists(status) && !fs::is_regular_file(status)) throw Error(path, "exists and is not a regular file");
  const fs::path folder = FolderOf(target);
  if (!fs::is_directory(folder, error)) throw Error(path, "directory " + Quoted(folder.string()) + " does not exist");
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    throw Error(path, "directory " + Quoted(folder.string()) + " is not writable: " + std::strerror(errno));
  }
}

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)), target_(FollowLinks(path_)) {
  CheckWritable(path_);
  // Names of this process only; a file left by a killed process of the same id is stepped over, not reused.
  static std::atomic<unsigned> counter{0};
  const std::string stem = (FolderOf(target_) / ".sparge-").string() + std::to_string(getpid()) + "-";
  do {
    temporary_ = stem + std::to_string(counter++) + ".tmp";
    descriptor_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) {
    temporary_.clear();
    Fail("created", errno);
  }
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void AtomicFile::Fail(const char* doing, int error) const {
  throw Error(path_, std::string("cannot be ") + doing + ": " + std::strerror(error));
}

void AtomicFile::Write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) Fail("written", errno);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void AtomicFile::Close() {
  if (descriptor_ < 0) return;
  const int result = close(descriptor_);
  descriptor_ = -1;
  if (result != 0) Fail("written", errno);
}

void AtomicFile::Commit() {
  Close();
  if (temporary_.empty()) return;
  if (rename(temporary_.c_str(), target_.c_str()) != 0) Fail("put in place", errno);
  temporary_.clear();
}

}  // namespace sparge::io
