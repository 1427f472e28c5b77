#include "onnx_kv/ops/cuda/modules.h"

#include <map>
#include <mutex>
#include <utility>

namespace onnx_kv::cuda {
namespace {

CUmodule LoadModule(const Specialisation& specialisation) {
  CUdevice device;
  CU_CHECK(cuCtxGetDevice, &device);
  int major = 0;
  int minor = 0;
  CU_CHECK(cuDeviceGetAttribute, &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  CU_CHECK(cuDeviceGetAttribute, &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  if (major < 8) {
    throw Error(ONNX_KV_UNSUPPORTED, "the CUDA kernels need compute capability 8.0 or later; this device has " +
                                         std::to_string(major) + "." + std::to_string(minor));
  }
  const std::vector<char> image = CompileCached(specialisation, ArchName(major, minor));
  CUmodule module;
  CU_CHECK(cuModuleLoadDataEx, &module, image.data(), 0, nullptr, nullptr);
  return module;
}

CUfunction LoadFunction(const Specialisation& specialisation, const char* entry, unsigned shared_bytes) {
  CUfunction function;
  CU_CHECK(cuModuleGetFunction, &function, LoadModule(specialisation), entry);
  CU_CHECK(cuFuncSetAttribute, function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(shared_bytes));
  return function;
}

}  // namespace

void RefuseInCapture(CUstream stream, const std::string& what) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CU_CHECK(cuStreamIsCapturing, stream, &status);
  if (status == CU_STREAM_CAPTURE_STATUS_NONE) return;
  throw Error(ONNX_KV_UNSUPPORTED,
              what + " is needed for the first time while the stream is being captured; run one step before capturing");
}

CUfunction LoadKernel(const Specialisation& specialisation, const char* entry, unsigned shared_bytes, CUstream stream) {
  static std::mutex mutex;
  static std::map<std::pair<CUcontext, std::string>, CUfunction> functions;  // modules live as long as the process
  CUcontext context;
  CU_CHECK(cuCtxGetCurrent, &context);
  const std::pair key(context, specialisation.Key() + ' ' + entry);
  std::lock_guard lock(mutex);
  if (const auto found = functions.find(key); found != functions.end()) return found->second;
  RefuseInCapture(stream, "kernel " + key.second);
  return functions[key] = LoadFunction(specialisation, entry, shared_bytes);
}

}  // namespace onnx_kv::cuda
