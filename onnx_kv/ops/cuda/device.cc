#include "onnx_kv/ops/cuda/device.h"

#include <map>
#include <memory>
#include <mutex>

#include "onnx_kv/ops/capi.h"

namespace onnx_kv::cuda {

const Device& Device::Get(int32_t ordinal) {
  static std::mutex mutex;
  static std::map<int32_t, std::unique_ptr<Device>> devices;
  std::lock_guard lock(mutex);
  std::unique_ptr<Device>& device = devices[ordinal];
  if (device == nullptr) device = std::make_unique<Device>(ordinal);
  return *device;
}

Device::Device(int32_t ordinal) : ordinal_(ordinal) {
  int count = 0;
  CU_CHECK(cuDeviceGetCount, &count);
  if (ordinal < 0 || ordinal >= count) {
    throw Error(ONNX_KV_INVALID_ARGUMENT,
                "there is no CUDA device " + std::to_string(ordinal) + "; this machine has " + std::to_string(count));
  }
  CU_CHECK(cuDeviceGet, &handle_, ordinal);
  CU_CHECK(cuDevicePrimaryCtxRetain, &context_, handle_);
}

int Device::Attribute(CUdevice_attribute attribute) const {
  int value = 0;
  CU_CHECK(cuDeviceGetAttribute, &value, attribute, handle_);
  return value;
}

UseDevice::UseDevice(const Device& device) {
  CU_CHECK(cuCtxGetCurrent, &outer_);
  if (outer_ == device.context()) return;
  CU_CHECK(cuCtxSetCurrent, device.context());
  switched_ = true;
}

UseDevice::~UseDevice() {
  if (switched_) Driver().cuCtxSetCurrent(outer_);
}

}  // namespace onnx_kv::cuda

using onnx_kv::Guard;
using onnx_kv::cuda::Device;
using onnx_kv::cuda::UseDevice;

OnnxKvStatus onnx_kv_cuda_device_count(int32_t* count) {
  return Guard([&] {
    int found = 0;
    CU_CHECK(cuDeviceGetCount, &found);
    *count = found;
  });
}

OnnxKvStatus onnx_kv_cuda_device_info(int32_t device, OnnxKvDeviceInfo* info) {
  return Guard([&] {
    const Device& chosen = Device::Get(device);
    *info = {};
    CU_CHECK(cuDeviceGetName, info->name, static_cast<int>(sizeof info->name), chosen.handle());
    size_t total = 0;
    CU_CHECK(cuDeviceTotalMem, &total, chosen.handle());
    info->total_bytes = total;
    info->compute_major = chosen.Attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    info->compute_minor = chosen.Attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    info->multiprocessors = chosen.Attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    info->virtual_memory = chosen.Attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    int version = 0;
    CU_CHECK(cuDriverGetVersion, &version);
    info->driver_version = version;
  });
}

OnnxKvStatus onnx_kv_cuda_memory_info(int32_t device, uint64_t* free_bytes, uint64_t* total_bytes) {
  return Guard([&] {
    UseDevice use(device);
    size_t free = 0;
    size_t total = 0;
    CU_CHECK(cuMemGetInfo, &free, &total);
    *free_bytes = free;
    *total_bytes = total;
  });
}

OnnxKvStatus onnx_kv_cuda_synchronize(int32_t device) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuCtxSynchronize);
  });
}
