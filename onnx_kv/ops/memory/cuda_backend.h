// Device memory through the driver's virtual memory management (cuMem*).
#pragma once

#include "onnx_kv/ops/cuda/device.h"
#include "onnx_kv/ops/memory/backend.h"

namespace onnx_kv::memory {

class CudaBackend final : public Backend {
 public:
  // `granule` is a multiple of what the driver asks for; 0 means just that. Throws Error (ONNX_KV_UNSUPPORTED) on a
  // device without virtual memory management.
  CudaBackend(const cuda::Device& device, uint64_t granule);

  void Quiesce() override;

 private:
  uint64_t DoReserve(uint64_t bytes) override;
  void DoFree(uint64_t address, uint64_t bytes) override;
  uint64_t DoCreate() override;
  void DoDestroy(uint64_t handle) override;
  void DoMap(uint64_t address, uint64_t handle) override;
  void DoUnmap(uint64_t address) override;
  void DoSetAccess(uint64_t address, uint64_t bytes) override;

  const cuda::Device& device_;
};

}  // namespace onnx_kv::memory
