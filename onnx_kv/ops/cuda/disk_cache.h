// Compiled kernels on disk, in the user's cache folder: $XDG_CACHE_HOME/onnx-kv/kernels, else ~/.cache/onnx-kv/kernels.
//
// The folder is used only where it belongs to this user and nobody else may write to it; otherwise, and wherever the disk
// fails, nothing is cached and nothing fails. An entry names the whole key that it was made for and carries a checksum:
// what is damaged, cut short or of another key counts as absent, and is replaced. Entries appear by a rename, so
// processes that race see each other's whole entries or none.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace onnx_kv::cuda {

// FNV-1a, 64 bits, continued from `seed`. Guards against accidents, not against an attacker: the folder does that.
uint64_t Fnv1a(std::string_view bytes, uint64_t seed = 0xcbf29ce484222325u);

class DiskCache {
 public:
  // Opens the user's folder, making it with mode 0700 if need be.
  static DiskCache OfUser();
  DiskCache(DiskCache&& other) noexcept;
  ~DiskCache();

  // Whether a good entry for `key` was found; `image` is what was stored.
  bool Load(const std::string& key, std::vector<char>& image) const;
  void Store(const std::string& key, const std::vector<char>& image) const;

 private:
  explicit DiskCache(int folder) : folder_(folder) {}

  int folder_;  // descriptor; -1 where there is no usable folder
};

}  // namespace onnx_kv::cuda
