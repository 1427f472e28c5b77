// The CUDA driver and NVRTC, opened at run time: one library serves machines with and without a GPU.
//
// `Driver()` and `Nvrtc()` open their library at the first call and throw an Error that says what is missing. Calls go
// through CU_CHECK / NVRTC_CHECK, so that every status becomes an Error that names the call.
#pragma once

#include <cuda.h>
#include <nvrtc.h>

#include <string>

#include "onnx_kv/ops/status.h"

namespace onnx_kv::cuda {

// Names go through the preprocessor, so that cuda.h's own renaming (cuMemAlloc -> cuMemAlloc_v2) picks the symbol.
#define ONNX_KV_DRIVER_FUNCTIONS(X)                                                                                  \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString)                                              \
  X(cuDeviceGet) X(cuDeviceGetCount) X(cuDeviceGetName) X(cuDeviceGetAttribute) X(cuDeviceTotalMem)                  \
  X(cuDevicePrimaryCtxRetain) X(cuCtxGetCurrent) X(cuCtxSetCurrent) X(cuCtxGetDevice)                                \
  X(cuCtxSynchronize) X(cuMemGetInfo) X(cuMemAlloc) X(cuMemFree) X(cuMemHostAlloc) X(cuMemFreeHost)                  \
  X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuMemcpyDtoDAsync) X(cuMemcpy2DAsync) X(cuMemsetD8Async)               \
  X(cuMemsetD32Async) X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemCreate) X(cuMemRelease) X(cuMemMap)          \
  X(cuMemUnmap) X(cuMemSetAccess) X(cuMemGetAllocationGranularity)                                                   \
  X(cuStreamCreate) X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamQuery)                                       \
  X(cuStreamIsCapturing) X(cuStreamBeginCapture) X(cuStreamEndCapture)                                               \
  X(cuGraphInstantiateWithFlags) X(cuGraphExecDestroy) X(cuGraphDestroy) X(cuGraphLaunch) X(cuGraphUpload)           \
  X(cuGraphGetNodes) X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize)       \
  X(cuEventElapsedTime) X(cuModuleLoadDataEx) X(cuModuleGetFunction) X(cuFuncSetAttribute)                           \
  X(cuLaunchKernel) X(cuLaunchKernelEx)

#define ONNX_KV_NVRTC_FUNCTIONS(X)                                                                                   \
  X(nvrtcVersion) X(nvrtcGetErrorString) X(nvrtcCreateProgram) X(nvrtcDestroyProgram) X(nvrtcCompileProgram)         \
  X(nvrtcGetCUBINSize) X(nvrtcGetCUBIN) X(nvrtcGetProgramLogSize) X(nvrtcGetProgramLog)

struct DriverTable {
#define X(name) decltype(&::name) name;
  ONNX_KV_DRIVER_FUNCTIONS(X)
#undef X
};

struct NvrtcTable {
#define X(name) decltype(&::name) name;
  ONNX_KV_NVRTC_FUNCTIONS(X)
#undef X
};

// Opens libcuda.so.1 and calls cuInit once. Throws Error (ONNX_KV_UNSUPPORTED) without a usable driver.
const DriverTable& Driver();

// Opens NVRTC once: the path given by SetNvrtcPath (Python knows where its package lies), else libnvrtc.so.13 / .12 as
// the system's loader finds them. Throws Error (ONNX_KV_UNSUPPORTED) where there is none.
const NvrtcTable& Nvrtc();

// Where NVRTC's shared object lies. Later calls than the first use of Nvrtc() have no effect.
void SetNvrtcPath(const std::string& path);

void CheckDriver(CUresult result, const char* call);
void CheckNvrtc(nvrtcResult result, const char* call);

}  // namespace onnx_kv::cuda

#define CU_CHECK(name, ...) ::onnx_kv::cuda::CheckDriver(::onnx_kv::cuda::Driver().name(__VA_ARGS__), #name)
#define NVRTC_CHECK(name, ...) ::onnx_kv::cuda::CheckNvrtc(::onnx_kv::cuda::Nvrtc().name(__VA_ARGS__), #name)
