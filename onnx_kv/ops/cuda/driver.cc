#include "onnx_kv/ops/cuda/driver.h"

#include <dlfcn.h>

#include <mutex>
#include <vector>

namespace onnx_kv::cuda {
namespace {

#define ONNX_KV_STRING(name) #name
#define ONNX_KV_SYMBOL(name) ONNX_KV_STRING(name)

void* OpenFirst(const std::vector<std::string>& names, const char* what, const char* advice) {
  std::string reasons;
  for (const std::string& name : names) {
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    reasons += std::string("; ") + dlerror();
  }
  throw Error(ONNX_KV_UNSUPPORTED, std::string("cannot open ") + what + " (" + advice + ")" + reasons);
}

template <typename Function>
void Load(void* handle, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, symbol));
  if (function == nullptr) throw Error(ONNX_KV_UNSUPPORTED, std::string(symbol) + " is missing; the driver or NVRTC is too old");
}

DriverTable LoadDriver() {
  void* handle = OpenFirst({"libcuda.so.1"}, "the CUDA driver", "install an NVIDIA driver, or use --device cpu");
  DriverTable table{};
#define X(name) Load(handle, ONNX_KV_SYMBOL(name), table.name);
  ONNX_KV_DRIVER_FUNCTIONS(X)
#undef X
  CUresult result = table.cuInit(0);
  if (result != CUDA_SUCCESS) {
    const char* name = nullptr;
    table.cuGetErrorName(result, &name);
    throw Error(ONNX_KV_UNSUPPORTED, std::string("cuInit failed: ") + (name ? name : "unknown status"));
  }
  return table;
}

std::mutex nvrtc_path_mutex;
std::string nvrtc_path;

NvrtcTable LoadNvrtc() {
  std::vector<std::string> names;
  {
    std::lock_guard lock(nvrtc_path_mutex);
    if (!nvrtc_path.empty()) names.push_back(nvrtc_path);
  }
  names.insert(names.end(), {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"});
  void* handle = OpenFirst(names, "NVRTC", "pip install nvidia-cuda-nvrtc");
  NvrtcTable table{};
#define X(name) Load(handle, ONNX_KV_SYMBOL(name), table.name);
  ONNX_KV_NVRTC_FUNCTIONS(X)
#undef X
  return table;
}

}  // namespace

const DriverTable& Driver() {
  static const DriverTable table = LoadDriver();
  return table;
}

const NvrtcTable& Nvrtc() {
  static const NvrtcTable table = LoadNvrtc();
  return table;
}

void SetNvrtcPath(const std::string& path) {
  std::lock_guard lock(nvrtc_path_mutex);
  nvrtc_path = path;
}

void CheckDriver(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  const char* text = nullptr;
  Driver().cuGetErrorName(result, &name);
  Driver().cuGetErrorString(result, &text);
  const bool memory = result == CUDA_ERROR_OUT_OF_MEMORY;
  throw Error(memory ? ONNX_KV_OUT_OF_MEMORY : ONNX_KV_DRIVER_ERROR,
              std::string(call) + ": " + (name ? name : std::to_string(result)) + (text ? std::string(", ") + text : ""));
}

void CheckNvrtc(nvrtcResult result, const char* call) {
  if (result == NVRTC_SUCCESS) return;
  throw Error(ONNX_KV_DRIVER_ERROR, std::string(call) + ": " + Nvrtc().nvrtcGetErrorString(result));
}

}  // namespace onnx_kv::cuda
