// atomic_file.cc - the temporary files and their renames, over POSIX calls because those report every error.
#include "io/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>

#include "io/tensor.h"

namespace sparge::io {
namespace fs = std::filesystem;
namespace {

fs::path FolderOf(const fs::path& path) {
  const fs::path folder = path.parent_path();
  return folder.empty() ? fs::path(".") : folder;
}

// Where a rename must go so that a link stays a link; the last link may point to nothing yet.
std::string FollowLinks(const std::string& path) {
  constexpr int kMostLinks = 40;  // as the kernel
  fs::path place = path;
  std::error_code error;
  for (int links = 0; fs::is_symlink(place, error); ++links) {
    if (links == kMostLinks) throw Error(path, std::string("cannot be written: ") + std::strerror(ELOOP));
    const fs::path next = fs::read_symlink(place, error);
    if (error) throw Error(path, "cannot be followed as a link: " + error.message());
    place = FolderOf(place) / next;  // an absolute link replaces the folder
  }
  return place.string();
}

// 0 or the error. Some file systems cannot sync, and say so by EINVAL: there is nothing more to do then.
int Sync(int descriptor) {
  int result = 0;
  do {
    result = fsync(descriptor);
  } while (result != 0 && errno == EINTR);
  return result == 0 || errno == EINVAL ? 0 : errno;
}

// The names in a folder, too, are on the disk only once it is synced.
int SyncFolder(const fs::path& folder) {
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0 && errno == EACCES) {
    sync();  // a folder that may be written but not read: everything, then
    return 0;
  }
  if (descriptor < 0) return errno;
  const int error = Sync(descriptor);
  close(descriptor);
  return error;
}

}  // namespace

void CheckWritable(const std::string& path) {
  if (path.empty()) throw Error("''", "an empty name cannot be written");
  const std::string target = FollowLinks(path);
  std::error_code error;
  const fs::path folder = FolderOf(target);
  if (!fs::is_directory(folder, error)) throw Error(path, "directory " + Quoted(folder.string()) + " does not exist");
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::none) throw Error(path, "cannot be written: " + error.message());
  if (fs::is_directory(status)) throw Error(path, "is a directory, cannot be written as a file");
  if (fs::exists(status) && !fs::is_regular_file(status)) throw Error(path, "exists and is not a regular file");
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    throw Error(path, "directory " + Quoted(folder.string()) + " is not writable: " + std::strerror(errno));
  }
}

std::vector<std::string> FileKeys(const std::string& path) {
  const fs::path target = FollowLinks(path);
  std::error_code error;
  const fs::path folder = fs::canonical(FolderOf(target), error);
  // A folder that does not exist holds no file; the name as it stands is all there is to compare.
  std::vector<std::string> keys = {error ? target.string() : (folder / target.filename()).string()};
  struct stat status;
  if (stat(target.c_str(), &status) == 0) {  // hard links
    keys.push_back(std::to_string(status.st_dev) + ":" + std::to_string(status.st_ino));
  }
  return keys;
}

// ------------------------------------------------------------------ one file

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  CheckWritable(path_);
  target_ = FollowLinks(path_);
  do {
    temporary_ = NewName(".tmp");
    descriptor_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) {
    temporary_.clear();
    Fail("created", errno);
  }
  // A file that only some may read stays so.
  struct stat old;
  if (stat(target_.c_str(), &old) == 0 && fchmod(descriptor_, old.st_mode & 0777) != 0) Fail("created", errno);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void AtomicFile::Fail(const char* doing, int error) const {
  throw Error(path_, std::string("cannot be ") + doing + ": " + std::strerror(error));
}

// Of this process only; a file left by a killed process of the same id is stepped over, not reused.
std::string AtomicFile::NewName(const char* ending) const {
  static std::atomic<unsigned> counter{0};
  return (FolderOf(target_) / ".sparge-").string() + std::to_string(getpid()) + "-" + std::to_string(counter++) +
         ending;
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
  const int synced = Sync(descriptor_);
  const int closed = close(descriptor_) == 0 ? 0 : errno;
  descriptor_ = -1;
  if (synced != 0 || closed != 0) Fail("written", synced != 0 ? synced : closed);
}

void AtomicFile::Commit() {
  if (temporary_.empty()) return;
  Close();
  PutInPlace();
  const int error = SyncFolder(FolderOf(target_));
  if (error == 0) return;
  Restore();
  Fail("put in place", error);
}

// Another link to the file that is there, so that it never is absent; moved away where there are no hard links.
void AtomicFile::KeepOld() {
  struct stat status;
  if (lstat(target_.c_str(), &status) != 0) return;
  std::string name = NewName(".old");
  int result = 0;
  while ((result = link(target_.c_str(), name.c_str())) != 0 && errno == EEXIST) name = NewName(".old");
  if (result != 0 && rename(target_.c_str(), name.c_str()) != 0) Fail("put in place", errno);
  old_ = name;
}

void AtomicFile::PutInPlace() {
  struct stat status;
  was_there_ = lstat(target_.c_str(), &status) == 0;
  if (rename(temporary_.c_str(), target_.c_str()) != 0) Fail("put in place", errno);
  temporary_.clear();
  in_place_ = true;
}

std::string AtomicFile::Restore() {
  if (!old_.empty()) {
    if (rename(old_.c_str(), target_.c_str()) != 0) {
      return "; " + path_ + " is not as it was (" + std::strerror(errno) + "), but " + old_ + " is";
    }
    DropOld();  // a rename from one name of a file to another leaves both
  } else if (in_place_ && !was_there_ && unlink(target_.c_str()) != 0) {
    return "; " + path_ + " was left behind: " + std::strerror(errno);
  }
  in_place_ = false;
  return "";
}

void AtomicFile::DropOld() {
  if (!old_.empty()) unlink(old_.c_str());
  old_.clear();
}

// ------------------------------------------------------------------ several

AtomicFiles::~AtomicFiles() {
  files_.clear();  // temporary files are in these folders
  for (auto folder = folders_.rbegin(); folder != folders_.rend(); ++folder) rmdir(folder->c_str());
}

void AtomicFiles::MakeFolder(const std::string& path) {
  fs::path folder = FollowLinks(path);
  if (!folder.has_filename()) folder = folder.parent_path();  // "maps/"
  std::error_code error;
  if (fs::create_directory(folder, error)) folders_.push_back(folder.string());
  if (error) throw Error(path, "cannot be made: " + error.message());
}

AtomicFile& AtomicFiles::Add(std::string path) {
  return *files_.emplace_back(std::make_unique<AtomicFile>(std::move(path)));
}

void AtomicFiles::Commit(const std::function<void()>& last) {
  for (const auto& file : files_) file->Close();
  try {
    PutInPlace(files_.size() > 1 || last);
    if (last) last();
  } catch (const std::exception& error) {
    std::string trouble;
    for (auto file = files_.rbegin(); file != files_.rend(); ++file) trouble += (*file)->Restore();
    if (!trouble.empty()) throw std::runtime_error(error.what() + trouble);
    throw;
  }
  for (const auto& file : files_) file->DropOld();
  files_.clear();
  folders_.clear();
}

void AtomicFiles::PutInPlace(bool revocable) {
  std::set<fs::path> folders;  // with new names in them
  for (const std::string& folder : folders_) folders.insert(FolderOf(folder));
  for (const auto& file : files_) {
    if (revocable) file->KeepOld();
    file->PutInPlace();
    folders.insert(FolderOf(file->target_));
  }
  for (const fs::path& folder : folders) {
    const int error = SyncFolder(folder);
    if (error != 0) throw Error(folder.string(), std::string("cannot be written: ") + std::strerror(error));
  }
}

}  // namespace sparge::io
