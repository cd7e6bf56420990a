// atomic_file.h - an output file that appears whole or not at all: written beside its place, then renamed into it.
#ifndef SPARGE_IO_ATOMIC_FILE_H_
#define SPARGE_IO_ATOMIC_FILE_H_

#include <cstddef>
#include <span>
#include <string>

namespace sparge::io {

class AtomicFile {
 public:
  // Opens a temporary file in the directory of `path`; follows `path` if it is a link. Throws Error.
  explicit AtomicFile(std::string path);
  // Without Commit the temporary file goes away and `path` is as it was.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void Write(std::span<const std::byte> bytes);
  // Ends writing: what the disk refuses is reported here at the latest. Commit calls it if needed.
  void Close();
  // Puts the file in its place. When several files belong together, write and Close all, then Commit all.
  void Commit();

  const std::string& path() const { return path_; }

 private:
  [[noreturn]] void Fail(const char* doing, int error) const;

  std::string path_;    // as given, for messages
  std::string target_;  // links followed
  std::string temporary_;
  int descriptor_ = -1;
};

// Throws Error unless `path` looks like a place for a new or replaced file: its directory exists and may be written,
// and what is there now, if anything, is a regular file (renaming over a device or a folder would destroy it).
void CheckWritable(const std::string& path);

}  // namespace sparge::io
#endif  // SPARGE_IO_ATOMIC_FILE_H_
