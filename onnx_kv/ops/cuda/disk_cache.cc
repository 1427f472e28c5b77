#include "onnx_kv/ops/cuda/disk_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace onnx_kv::cuda {
namespace {

constexpr char kMagic[8] = {'o', 'n', 'n', 'x', 'k', 'v', '0', '1'};
constexpr uint64_t kLargestImage = 64u << 20;

// What precedes the key and the image in an entry.
struct Header {
  char magic[8];
  uint64_t key_bytes;
  uint64_t image_bytes;
  uint64_t checksum;  // of the image
};

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool ok() const { return descriptor_ >= 0; }

  bool Read(void* bytes, size_t count) const {
    for (char* at = static_cast<char*>(bytes); count > 0;) {
      const ssize_t done = read(descriptor_, at, count);
      if (done <= 0) return false;
      at += done;
      count -= static_cast<size_t>(done);
    }
    return true;
  }

  bool Write(const void* bytes, size_t count) const {
    for (const char* at = static_cast<const char*>(bytes); count > 0;) {
      const ssize_t done = write(descriptor_, at, count);
      if (done <= 0) return false;
      at += done;
      count -= static_cast<size_t>(done);
    }
    return true;
  }

 private:
  int descriptor_;
};

std::string FolderPath() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && cache[0] == '/') return std::string(cache) + "/onnx-kv/kernels";
  const char* home = std::getenv("HOME");
  if (home != nullptr && home[0] == '/') return std::string(home) + "/.cache/onnx-kv/kernels";
  return "";
}

std::string EntryName(const std::string& key) {
  char name[32];
  std::snprintf(name, sizeof name, "%016llx.cubin", static_cast<unsigned long long>(Fnv1a(key)));
  return name;
}

uint64_t Checksum(const std::vector<char>& image) { return Fnv1a({image.data(), image.size()}); }

}  // namespace

uint64_t Fnv1a(std::string_view bytes, uint64_t seed) {
  for (const char byte : bytes) seed = (seed ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return seed;
}

DiskCache DiskCache::OfUser() {
  const std::string path = FolderPath();
  if (path.empty()) return DiskCache(-1);
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  mkdir(path.c_str(), 0700);
  const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct stat status;
  if (folder >= 0 && (fstat(folder, &status) != 0 || status.st_uid != geteuid() || (status.st_mode & 022) != 0)) {
    close(folder);
    return DiskCache(-1);
  }
  return DiskCache(folder);
}

DiskCache::DiskCache(DiskCache&& other) noexcept : folder_(other.folder_) { other.folder_ = -1; }

DiskCache::~DiskCache() {
  if (folder_ >= 0) close(folder_);
}

bool DiskCache::Load(const std::string& key, std::vector<char>& image) const {
  if (folder_ < 0) return false;
  const File file(openat(folder_, EntryName(key).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  Header header;
  if (!file.ok() || !file.Read(&header, sizeof header) || std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 ||
      header.key_bytes != key.size() || header.image_bytes > kLargestImage) {
    return false;
  }
  std::string stored(key.size(), '\0');
  image.resize(header.image_bytes);
  return file.Read(stored.data(), stored.size()) && stored == key && file.Read(image.data(), image.size()) &&
         Checksum(image) == header.checksum;
}

void DiskCache::Store(const std::string& key, const std::vector<char>& image) const {
  if (folder_ < 0) return;
  const std::string name = EntryName(key);
  const std::string draft = name + '.' + std::to_string(getpid());
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.key_bytes = key.size();
  header.image_bytes = image.size();
  header.checksum = Checksum(image);
  {
    const File file(openat(folder_, draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file.ok() && file.Write(&header, sizeof header) && file.Write(key.data(), key.size()) &&
        file.Write(image.data(), image.size()) && renameat(folder_, draft.c_str(), folder_, name.c_str()) == 0) {
      return;
    }
  }
  unlinkat(folder_, draft.c_str(), 0);
}

}  // namespace onnx_kv::cuda
