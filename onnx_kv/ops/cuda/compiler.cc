#include "onnx_kv/ops/cuda/compiler.h"

#include <algorithm>
#include <sstream>

#include "onnx_kv/ops/capi.h"
#include "onnx_kv/ops/cuda/disk_cache.h"
#include "onnx_kv/ops/cuda/driver.h"
#include "onnx_kv/ops/cuda/sources.h"

namespace onnx_kv::cuda {
namespace {

class Program {
 public:
  explicit Program(const Source& source) {
    std::vector<const char*> texts;
    std::vector<const char*> names;
    for (const Source& header : Sources()) {
      if (std::string_view(header.path).ends_with(".cu")) continue;
      texts.push_back(header.text);
      names.push_back(header.path);
    }
    texts.push_back(FindSource("onnx_kv/ops/cuda/cstdint.cuh").text);
    names.push_back("cstdint");
    NVRTC_CHECK(nvrtcCreateProgram, &program_, source.text, source.path, static_cast<int>(texts.size()), texts.data(),
                names.data());
  }
  ~Program() { Nvrtc().nvrtcDestroyProgram(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  nvrtcProgram get() const { return program_; }

  std::string Log() const {
    size_t size = 0;
    NVRTC_CHECK(nvrtcGetProgramLogSize, program_, &size);
    std::string log(size, '\0');
    NVRTC_CHECK(nvrtcGetProgramLog, program_, log.data());
    return log.c_str();  // without the terminating zero
  }

 private:
  nvrtcProgram program_ = nullptr;
};

std::vector<std::string> Options(const Specialisation& specialisation, const std::string& arch) {
  std::vector<std::string> options = {"--gpu-architecture=" + arch, "--std=c++17", "-default-device", "--ptxas-options=-v"};
  for (const std::string& define : specialisation.defines) options.push_back("-D" + define);
  return options;
}

// All that decides what machine code comes out: NVRTC's version, every option and every source.
std::string CacheKey(const Specialisation& specialisation, const std::string& arch) {
  int major = 0;
  int minor = 0;
  NVRTC_CHECK(nvrtcVersion, &major, &minor);
  uint64_t sources = Fnv1a("");
  for (const Source& source : Sources()) {
    sources = Fnv1a(source.path, sources);
    sources = Fnv1a(source.text, sources);
  }
  std::ostringstream key;
  key << "nvrtc " << major << '.' << minor << " sources " << std::hex << sources << ' ' << specialisation.file;
  for (const std::string& option : Options(specialisation, arch)) key << ' ' << option;
  return key.str();
}

}  // namespace

const Source& FindSource(std::string_view path) {
  for (const Source& source : Sources()) {
    if (source.path == path) return source;
  }
  throw Error(ONNX_KV_INVALID_ARGUMENT, "no CUDA source " + std::string(path) + " is embedded in the library");
}

std::string Specialisation::Key() const {
  std::string key = file;
  for (const std::string& define : defines) key += ' ' + define;
  return key;
}

Specialisation Specialisation::Parse(const std::string& key) {
  std::istringstream words(key);
  Specialisation specialisation;
  words >> specialisation.file;
  for (std::string define; words >> define;) specialisation.defines.push_back(define);
  return specialisation;
}

Cubin Compile(const Specialisation& specialisation, const std::string& arch) {
  const Program program(FindSource(specialisation.file));
  const std::vector<std::string> options = Options(specialisation, arch);
  std::vector<const char*> words;
  for (const std::string& option : options) words.push_back(option.c_str());
  const nvrtcResult result =
      Nvrtc().nvrtcCompileProgram(program.get(), static_cast<int>(words.size()), words.data());
  Cubin cubin;
  cubin.log = program.Log();
  if (result != NVRTC_SUCCESS) {
    throw Error(ONNX_KV_DRIVER_ERROR, "compiling " + specialisation.Key() + " for " + arch + ": " +
                                          Nvrtc().nvrtcGetErrorString(result) + "\n" + cubin.log);
  }
  size_t size = 0;
  NVRTC_CHECK(nvrtcGetCUBINSize, program.get(), &size);
  cubin.image.resize(size);
  NVRTC_CHECK(nvrtcGetCUBIN, program.get(), cubin.image.data());
  return cubin;
}

std::vector<char> CompileCached(const Specialisation& specialisation, const std::string& arch) {
  const std::string key = CacheKey(specialisation, arch);
  const DiskCache cache = DiskCache::OfUser();
  std::vector<char> image;
  if (cache.Load(key, image)) return image;
  image = Compile(specialisation, arch).image;
  cache.Store(key, image);
  return image;
}

std::string ArchName(int major, int minor) {
  const std::string name = "sm_" + std::to_string(major) + std::to_string(minor);
  return major == 9 ? name + "a" : name;
}

}  // namespace onnx_kv::cuda

using onnx_kv::Guard;

OnnxKvStatus onnx_kv_set_nvrtc_path(const char* path) {
  return Guard([&] { onnx_kv::cuda::SetNvrtcPath(path); });
}

OnnxKvStatus onnx_kv_cuda_compile(const char* key, const char* arch, void* image, uint64_t capacity, uint64_t* size,
                                  char* log, uint64_t log_capacity) {
  return Guard([&] {
    const onnx_kv::cuda::Cubin cubin = onnx_kv::cuda::Compile(onnx_kv::cuda::Specialisation::Parse(key), arch);
    *size = cubin.image.size();
    std::copy_n(cubin.image.data(), std::min(capacity, *size), static_cast<char*>(image));
    if (log_capacity > 0) log[cubin.log.copy(log, log_capacity - 1)] = '\0';
  });
}

OnnxKvStatus onnx_kv_cuda_compile_cached(const char* key, const char* arch, void* image, uint64_t capacity,
                                         uint64_t* size) {
  return Guard([&] {
    const std::vector<char> found = onnx_kv::cuda::CompileCached(onnx_kv::cuda::Specialisation::Parse(key), arch);
    *size = found.size();
    std::copy_n(found.data(), std::min(capacity, *size), static_cast<char*>(image));
  });
}
