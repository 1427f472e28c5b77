// CUDA devices through their primary contexts: the contexts that ONNX Runtime and every other runtime-API user share.
#pragma once

#include <cstdint>

#include "onnx_kv/ops/cuda/driver.h"

namespace onnx_kv::cuda {

class Device {
 public:
  // The device with this ordinal; its primary context is retained at the first call and kept for the process's life.
  // Throws Error: no such device, or no driver.
  static const Device& Get(int32_t ordinal);

  explicit Device(int32_t ordinal);

  int32_t ordinal() const { return ordinal_; }
  CUdevice handle() const { return handle_; }
  CUcontext context() const { return context_; }
  int Attribute(CUdevice_attribute attribute) const;

 private:
  int32_t ordinal_;
  CUdevice handle_;
  CUcontext context_;
};

// Makes a device's primary context current on this thread for a scope. Every C function of this folder opens one, so
// that callers may come from any thread.
class UseDevice {
 public:
  explicit UseDevice(int32_t ordinal) : UseDevice(Device::Get(ordinal)) {}
  explicit UseDevice(const Device& device);
  ~UseDevice();
  UseDevice(const UseDevice&) = delete;
  UseDevice& operator=(const UseDevice&) = delete;

 private:
  CUcontext outer_ = nullptr;
  bool switched_ = false;
};

}  // namespace onnx_kv::cuda
