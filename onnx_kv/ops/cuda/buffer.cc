// Plain device memory and pinned host memory.
#include "onnx_kv/ops/capi.h"
#include "onnx_kv/ops/cuda/device.h"

using onnx_kv::Guard;
using onnx_kv::cuda::UseDevice;

OnnxKvStatus onnx_kv_cuda_buffer_create(int32_t device, uint64_t bytes, uint64_t* address) {
  return Guard([&] {
    UseDevice use(device);
    CUdeviceptr created = 0;
    CU_CHECK(cuMemAlloc, &created, bytes);
    *address = created;
  });
}

OnnxKvStatus onnx_kv_cuda_buffer_destroy(int32_t device, uint64_t address) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuMemFree, address);
  });
}

OnnxKvStatus onnx_kv_cuda_pinned_create(int32_t device, uint64_t bytes, uint64_t* address) {
  return Guard([&] {
    UseDevice use(device);
    void* created = nullptr;
    CU_CHECK(cuMemHostAlloc, &created, bytes, CU_MEMHOSTALLOC_PORTABLE);
    *address = reinterpret_cast<uint64_t>(created);
  });
}

OnnxKvStatus onnx_kv_cuda_pinned_destroy(int32_t device, uint64_t address) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuMemFreeHost, reinterpret_cast<void*>(address));
  });
}
