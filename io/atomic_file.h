// atomic_file.h - output files that appear whole or not at all, alone or several together: written beside their places,
// synced to the disk, then renamed into their places.
#ifndef SPARGE_IO_ATOMIC_FILE_H_
#define SPARGE_IO_ATOMIC_FILE_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace sparge::io {

class AtomicFile {
 public:
  // Opens a temporary file in the directory of `path`; follows `path` if it is a link, also to a file that does not
  // exist yet. Throws Error.
  explicit AtomicFile(std::string path);
  // Without Commit the temporary file goes away and `path` is as it was.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void Write(std::span<const std::byte> bytes);
  // Ends writing, and returns when the disk has the bytes: what it refuses is reported here. Commit calls it if needed.
  void Close();
  // Puts the file in its place, so that it survives a power cut. For one file; several belong into AtomicFiles.
  void Commit();

  const std::string& path() const { return path_; }

 private:
  friend class AtomicFiles;
  [[noreturn]] void Fail(const char* doing, int error) const;
  std::string NewName(const char* ending) const;
  void KeepOld();
  void PutInPlace();
  // Undoes PutInPlace; returns what could not be undone, or "".
  std::string Restore();
  void DropOld();

  std::string path_;    // as given, for messages
  std::string target_;  // links followed
  std::string temporary_;
  std::string old_;  // another name of what was at `target_`; empty if nothing was, or nothing was kept
  bool was_there_ = false, in_place_ = false;
  int descriptor_ = -1;
};

// Files that belong together: after Commit all are in their places, after anything else none.
class AtomicFiles {
 public:
  AtomicFiles() = default;
  ~AtomicFiles();
  AtomicFiles(const AtomicFiles&) = delete;
  AtomicFiles& operator=(const AtomicFiles&) = delete;

  // Makes a folder, which goes away again without Commit. One that is there already is left alone.
  void MakeFolder(const std::string& path);
  AtomicFile& Add(std::string path);
  // `last` is called when all files are in their places; if it throws, they are taken back.
  void Commit(const std::function<void()>& last = {});

 private:
  void PutInPlace(bool revocable);

  std::vector<std::unique_ptr<AtomicFile>> files_;
  std::vector<std::string> folders_;  // made here
};

// Throws Error unless `path` looks like a place for a new or replaced file: its directory exists and may be written,
// and what is there now, if anything, is a regular file (renaming over a device or a folder would destroy it).
void CheckWritable(const std::string& path);

// Texts that two paths share if and only if they name one file, whether it exists or not: links followed, by whatever
// folders they go.
std::vector<std::string> FileKeys(const std::string& path);

}  // namespace sparge::io
#endif  // SPARGE_IO_ATOMIC_FILE_H_
