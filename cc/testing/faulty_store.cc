// The file system `faulty://`, an object store in memory that can fail.
//
// Tests use it to end a writer before any of its write operations, and to check
// what a reader finds afterwards. The file system has the weakest guarantees of
// the file systems that TensorFlow supports:
//
// - A file is visible while it is being written.
// - A rename copies the file and deletes the source, in two operations. A
//   folder cannot be renamed.
// - A folder exists while it contains a file, or after it was created.
// - Lists of names are late: they show the files as they were
//   `faulty_store_set_delay` write operations ago.
//
// The functions with C linkage at the end of the file control the file system.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/file_statistics.h"
#include "tensorflow/core/platform/file_system.h"

namespace layoutmap {
namespace {

namespace tf = tensorflow;

constexpr char kScheme[] = "faulty://";

// All files and folders.
struct Contents {
  std::map<std::string, std::shared_ptr<std::string>> files;
  // Numbers of the write operations that created folders and files, and that
  // deleted files.
  std::map<std::string, int64_t> folders, created, deleted;
};

struct Store : Contents {
  std::mutex mutex;
  Contents saved;
  // Number of write operations, and the number of the first one that fails.
  int64_t num_writes = 0;
  int64_t fails_at = -1;
  bool fails_once = false;
  // Whether a rename that fails leaves the first half of the file.
  bool halves = false;
  // Number of write operations after which a list of names shows a change.
  int64_t delay = 0;
};

Store& store() {
  static Store* found = new Store;
  return *found;
}

// Counts a write operation, which fails if the writer has ended.
absl::Status CountWrite(Store& s) {
  const int64_t number = s.num_writes++;
  const bool fails = s.fails_at >= 0 && (s.fails_once ? number == s.fails_at
                                                      : number >= s.fails_at);
  return fails ? absl::UnavailableError(
                     absl::StrCat("write operation ", number, " failed"))
               : absl::OkStatus();
}

std::string KeyOf(absl::string_view path) {
  absl::ConsumePrefix(&path, kScheme);
  while (absl::ConsumeSuffix(&path, "/")) {
  }
  return std::string(path);
}

bool IsFolder(const Store& s, const std::string& key) {
  // The first part of a path is a bucket, which always exists.
  if (s.folders.count(key) || key.find('/') == std::string::npos) return true;
  const auto found = s.files.lower_bound(key + "/");
  return found != s.files.end() && absl::StartsWith(found->first, key + "/");
}

absl::Status NotFound(const std::string& key) {
  return absl::NotFoundError(absl::StrCat(kScheme, key, " does not exist"));
}

void Put(Store& s, const std::string& key, std::shared_ptr<std::string> value) {
  if (!s.files.count(key)) s.created[key] = s.num_writes;
  s.deleted.erase(key);
  s.files[key] = std::move(value);
}

void Erase(Store& s, const std::string& key) {
  s.files.erase(key);
  s.created.erase(key);
  s.deleted[key] = s.num_writes;
}

class Reader : public tf::RandomAccessFile {
 public:
  explicit Reader(std::string content) : content_(std::move(content)) {}

  absl::Status Read(uint64_t offset, size_t n, absl::string_view* result,
                    char* scratch) const override {
    const size_t begin = std::min<size_t>(offset, content_.size());
    const size_t size = std::min(n, content_.size() - begin);
    std::memcpy(scratch, content_.data() + begin, size);
    *result = absl::string_view(scratch, size);
    return size < n ? absl::OutOfRangeError("end of file") : absl::OkStatus();
  }

 private:
  const std::string content_;
};

class Writer : public tf::WritableFile {
 public:
  explicit Writer(std::shared_ptr<std::string> content)
      : content_(std::move(content)) {}

  absl::Status Append(absl::string_view data) override {
    std::lock_guard<std::mutex> lock(store().mutex);
    if (absl::Status status = CountWrite(store()); !status.ok()) {
      content_->append(data.data(), data.size() / 2);
      return status;
    }
    content_->append(data.data(), data.size());
    return absl::OkStatus();
  }
  absl::Status Close() override { return absl::OkStatus(); }
  absl::Status Flush() override { return absl::OkStatus(); }
  absl::Status Sync() override { return absl::OkStatus(); }
  absl::Status Tell(int64_t* position) override {
    std::lock_guard<std::mutex> lock(store().mutex);
    *position = static_cast<int64_t>(content_->size());
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<std::string> content_;
};

class FaultyStore : public tf::FileSystem {
 public:
  TF_USE_FILESYSTEM_METHODS_WITH_NO_TRANSACTION_SUPPORT;

  absl::Status NewRandomAccessFile(
      const std::string& path, tf::TransactionToken*,
      std::unique_ptr<tf::RandomAccessFile>* result) override {
    Store& s = store();
    std::lock_guard<std::mutex> lock(s.mutex);
    const auto found = s.files.find(KeyOf(path));
    if (found == s.files.end()) return NotFound(KeyOf(path));
    *result = std::make_unique<Reader>(*found->second);
    return absl::OkStatus();
  }

  absl::Status NewWritableFile(
      const std::string& path, tf::TransactionToken*,
      std::unique_ptr<tf::WritableFile>* result) override {
    return Open(path, /*keeps_content=*/false, result);
  }

  absl::Status NewAppendableFile(
      const std::string& path, tf::TransactionToken*,
      std::unique_ptr<tf::WritableFile>* result) override {
    return Open(path, /*keeps_content=*/true, result);
  }

  absl::Status NewReadOnlyMemoryRegionFromFile(
      const std::string&, tf::TransactionToken*,
      std::unique_ptr<tf::ReadOnlyMemoryRegion>*) override {
    return absl::UnimplementedError("files cannot be mapped");
  }

  absl::Status FileExists(const std::string& path,
                          tf::TransactionToken*) override {
    tf::FileStatistics ignored;
    return Stat(path, nullptr, &ignored);
  }

  absl::Status Stat(const std::string& path, tf::TransactionToken*,
                    tf::FileStatistics* result) override {
    Store& s = store();
    std::lock_guard<std::mutex> lock(s.mutex);
    const std::string key = KeyOf(path);
    const auto found = s.files.find(key);
    if (found == s.files.end() && !IsFolder(s, key)) return NotFound(key);
    result->is_directory = found == s.files.end();
    result->length = result->is_directory ? 0 : found->second->size();
    result->mtime_nsec = 0;
    return absl::OkStatus();
  }

  absl::Status GetFileSize(const std::string& path, tf::TransactionToken*,
                           uint64_t* size) override {
    Store& s = store();
    std::lock_guard<std::mutex> lock(s.mutex);
    const auto found = s.files.find(KeyOf(path));
    if (found == s.files.end()) return NotFound(KeyOf(path));
    *size = found->second->size();
    return absl::OkStatus();
  }

  absl::Status GetChildren(const std::string& path, tf::TransactionToken*,
                           std::vector<std::string>* result) override {
    Store& s = store();
    std::lock_guard<std::mutex> lock(s.mutex);
    const std::string folder = KeyOf(path);
    std::set<std::string> names;
    const auto add = [&](absl::string_view key) {
      if (folder.empty() || (absl::ConsumePrefix(&key, folder) &&
                             absl::ConsumePrefix(&key, "/"))) {
        names.emplace(key.substr(0, key.find('/')));
      }
    };
    for (const auto* made : {&s.folders, &s.created}) {
      for (const auto& [key, number] : *made) {
        if (number + s.delay <= s.num_writes) add(key);
      }
    }
    for (const auto& [key, number] : s.deleted) {
      if (number + s.delay > s.num_writes) add(key);
    }
    if (names.empty() && !IsFolder(s, folder)) return NotFound(folder);
    result->assign(names.begin(), names.end());
    return absl::OkStatus();
  }

  absl::Status GetMatchingPaths(const std::string& pattern,
                                tf::TransactionToken*,
                                std::vector<std::string>* result) override {
    Store& s = store();
    std::lock_guard<std::mutex> lock(s.mutex);
    for (const auto& [key, number] : s.created) {
      const std::string path = absl::StrCat(kScheme, key);
      if (number + s.delay <= s.num_writes && Match(path, pattern)) {
        result->push_back(path);
      }
    }
    return absl::OkStatus();
  }

  absl::Status DeleteFile(const std::string& path,
                          tf::TransactionToken*) override {
    Store& s = store();
    std::lock_guard<std::mutex> lock(s.mutex);
    const std::string key = KeyOf(path);
    if (!s.files.count(key)) return NotFound(key);
    if (absl::Status status = CountWrite(s); !status.ok()) return status;
    Erase(s, key);
    return absl::OkStatus();
  }

  absl::Status CreateDir(const std::string& path,
                         tf::TransactionToken*) override {
    Store& s = store();
    std::lock_guard<std::mutex> lock(s.mutex);
    const std::string key = KeyOf(path);
    if (s.files.count(key) || s.folders.count(key)) {
      return absl::AlreadyExistsError(absl::StrCat(kScheme, key, " exists"));
    }
    if (absl::Status status = CountWrite(s); !status.ok()) return status;
    s.folders[key] = s.num_writes;
    return absl::OkStatus();
  }

  absl::Status DeleteDir(const std::string& path,
                         tf::TransactionToken*) override {
    Store& s = store();
    std::lock_guard<std::mutex> lock(s.mutex);
    if (!IsFolder(s, KeyOf(path))) return NotFound(KeyOf(path));
    if (absl::Status status = CountWrite(s); !status.ok()) return status;
    s.folders.erase(KeyOf(path));
    return absl::OkStatus();
  }

  absl::Status RenameFile(const std::string& from, const std::string& to,
                          tf::TransactionToken*) override {
    Store& s = store();
    std::lock_guard<std::mutex> lock(s.mutex);
    const auto found = s.files.find(KeyOf(from));
    if (found == s.files.end()) return NotFound(KeyOf(from));
    const std::string content = *found->second;
    if (absl::Status status = CountWrite(s); !status.ok()) {
      if (s.halves) {
        Put(s, KeyOf(to),
            std::make_shared<std::string>(content, 0, content.size() / 2));
      }
      return status;
    }
    Put(s, KeyOf(to), std::make_shared<std::string>(content));
    if (absl::Status status = CountWrite(s); !status.ok()) return status;
    Erase(s, KeyOf(from));
    return absl::OkStatus();
  }

  absl::Status HasAtomicMove(const std::string&, bool* result) override {
    *result = false;
    return absl::OkStatus();
  }

 private:
  absl::Status Open(const std::string& path, bool keeps_content,
                    std::unique_ptr<tf::WritableFile>* result) {
    Store& s = store();
    std::lock_guard<std::mutex> lock(s.mutex);
    if (absl::Status status = CountWrite(s); !status.ok()) return status;
    const std::string key = KeyOf(path);
    const auto found = s.files.find(key);
    auto content = std::make_shared<std::string>(
        keeps_content && found != s.files.end() ? *found->second
                                                : std::string());
    Put(s, key, content);
    *result = std::make_unique<Writer>(std::move(content));
    return absl::OkStatus();
  }
};

REGISTER_FILE_SYSTEM("faulty", FaultyStore);

}  // namespace
}  // namespace layoutmap

extern "C" {

// Removes all files, and ends the effects of the other functions.
__attribute__((visibility("default"))) void faulty_store_reset() {
  layoutmap::Store& s = layoutmap::store();
  std::lock_guard<std::mutex> lock(s.mutex);
  static_cast<layoutmap::Contents&>(s) = {};
  s.num_writes = s.delay = 0;
  s.fails_at = -1;
  s.fails_once = s.halves = false;
}

// Saves all files for `faulty_store_restore`. Lists of names show them.
__attribute__((visibility("default"))) void faulty_store_save() {
  layoutmap::Store& s = layoutmap::store();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.saved = s;
  s.saved.deleted.clear();
  for (auto* made : {&s.saved.folders, &s.saved.created}) {
    for (auto& [key, number] : *made) number = -(int64_t{1} << 60);
  }
}

// Replaces all files by the saved files.
__attribute__((visibility("default"))) void faulty_store_restore() {
  layoutmap::Store& s = layoutmap::store();
  std::lock_guard<std::mutex> lock(s.mutex);
  static_cast<layoutmap::Contents&>(s) = s.saved;
  for (auto& [key, content] : s.files) {
    content = std::make_shared<std::string>(*content);
  }
}

// Lets the write operation `number` from now on fail; -1 for none. If `once` is
// 0, all following write operations also fail, as after the end of the writer.
__attribute__((visibility("default"))) void faulty_store_fail_at(int64_t number,
                                                                 int once,
                                                                 int halves) {
  layoutmap::Store& s = layoutmap::store();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.fails_at = number < 0 ? -1 : s.num_writes + number;
  s.fails_once = once != 0;
  s.halves = halves != 0;
}

// Sets the number of write operations by which lists of names are late.
__attribute__((visibility("default"))) void faulty_store_set_delay(
    int64_t delay) {
  layoutmap::Store& s = layoutmap::store();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.delay = delay;
}

// Returns the number of write operations.
__attribute__((visibility("default"))) int64_t faulty_store_num_writes() {
  layoutmap::Store& s = layoutmap::store();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.num_writes;
}
}
